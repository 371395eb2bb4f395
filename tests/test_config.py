"""Config: presets load, mistakes are named, defaults < base < preset < flags."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from attnrl.config import Config, keys, load_config, presets
from attnrl.errors import ConfigError, MissingFileError
from attnrl.launch.parts import KINDS, check_parts
from attnrl.policy.losses import LOSSES
from attnrl.policy.objective import objective


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_with_parts_that_exist(preset: str) -> None:
    config = load_config(preset)
    assert config.about, "a preset says in one line what it is"
    assert set(check_parts(config)) == {"segmenter", "rule", "filter", "budget", "estimator", "credit"}


OUT_OF_RANGE = [
    ("algo.rule", "fci", {"points": 0}, "greater than or equal to 1"),
    ("algo.rule", "fci", {"top_fraction": 1.5}, "less than or equal to 1"),
    ("algo.rule", "fci", {"min_gap_tokens": -1}, "greater than or equal to 0"),
    ("algo.rule", "fci_mean", {"delta": 0}, "greater than or equal to 1"),
    ("algo.rule", "position", {"shares": [0.1, 1.0]}, "less than 1"),
    ("algo.rule", "every_step", {"max_points": 0}, "greater than or equal to 1"),
    ("algo.rule", "fixed_segments", {"segment_tokens": -5}, "greater than or equal to 1"),
    ("algo.rule", "low_probability", {"below": -5}, "greater than 0"),
    ("algo.rule", "low_probability", {"per_segment": 0}, "greater than or equal to 1"),
    ("algo.segmenter", "every_n_tokens", {"tokens": 0}, "greater than or equal to 1"),
    ("algo.estimator", "treerl", {"train_leaves": -3}, "greater than or equal to 1"),
    ("algo.estimator", "grpo", {"ddof": 2}, "less than or equal to 1"),
    ("algo.estimator", "chain", {"only_below": 0.0}, "greater than 0"),
    ("algo.credit", "top_entropy", {"fraction": 7}, "less than or equal to 1"),
    ("algo.credit", "top_entropy", {"fraction": 0.0}, "greater than 0"),
    ("update.loss", "cispo", {"cap": -1.0}, "greater than 0"),
    ("update.loss", "cispo", {"cap": float("nan")}, "greater than 0"),
    ("update.loss", "gspo", {"low": 1.0}, "less than 1"),
    ("update.loss", "gspo", {"high": 0.0}, "greater than 0"),
    ("update.loss", "clip", {"dual_clip": 1.0}, "greater than 1"),
]


def settle(config: Config) -> None:
    check_parts(config)
    objective(config.update)


@pytest.mark.parametrize(("key", "name", "options", "said"), OUT_OF_RANGE)
def test_an_option_out_of_its_range_is_refused_with_the_range(
    key: str, name: str, options: dict[str, Any], said: str
) -> None:
    (option,) = options
    fixed = {"algo.adaptive_batch": False, key: name}
    settle(load_config("demo", fixed))
    with pytest.raises(ConfigError, match=rf"^{key}: option {option} = .*: input should be {said}"):
        settle(load_config("demo", {**fixed, f"{key}_options": options}))


def test_every_number_that_a_part_of_ours_takes_has_a_range() -> None:
    tried = {(key, option) for key, _, options, _ in OUT_OF_RANGE for option in options}
    tried |= {("update.loss", "clip_low"), ("update.loss", "clip_high")}  # as low and high
    found = set()
    for kind, table in {**{f"algo.{kind}": table for kind, table in KINDS.items()}, "update.loss": LOSSES}.items():
        for part in table.values():
            hints = get_type_hints(part, include_extras=True)
            for option, parameter in inspect.signature(part).parameters.items():
                text = repr(hints[option])
                if parameter.kind is parameter.KEYWORD_ONLY and ("int" in text or "float" in text):
                    assert "Annotated" in text, f"{kind} {part.__name__} {option}: {text}"
                    found.add((kind, option))
    assert found == tried


def test_the_papers_presets_are_there() -> None:
    paper = {"grpo_1p5b", "treerl_1p5b", "treerl_1p5b_off_policy", "attnrl_1p5b", "attnrl_1p5b_released", "attnrl_7b"}
    assert paper <= set(presets())


def test_the_paper_preset_states_the_papers_numbers() -> None:
    config = load_config("attnrl_1p5b")
    algo, update = config.algo, config.update
    assert (algo.prompts, algo.group, algo.points, algo.width, algo.delta) == (64, 6, 2, 2, 4)
    assert (algo.top_fraction, algo.history) == (0.2, 0.9)
    assert (update.lr, update.clip_low, update.clip_high, update.kl_weight) == (1e-6, 0.2, 0.28, 0.001)
    assert (update.minibatches, update.minibatch_samples, config.sampling.max_response_tokens) == (2, None, 8192)


def test_released_differs_from_paper_where_method_says_so() -> None:
    paper, released = load_config("attnrl_1p5b"), load_config("attnrl_1p5b_released")
    assert (paper.algo.min_gap_tokens, released.algo.min_gap_tokens) == (0, 512)
    assert released.algo.budget_options == {"rounding": "ceil"}
    assert (released.algo.mode, released.algo.drop, released.update.dual_clip) == ("released", "prompts", 3.0)
    assert (released.update.minibatches, released.update.minibatch_samples) == (None, 192)
    assert released.algo.rule == paper.algo.rule


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algo.pionts": 2}, r"unknown key algo\.pionts; did you mean algo\.points"),
        ({"algo.points": 0}, r"algo\.points: .*greater than or equal to 1, got 0"),
        ({"algo.top_fraction": 1.5}, r"algo\.top_fraction: .*less than or equal to 1, got 1\.5"),
        ({"update.lr": "fast"}, r"update\.lr: .*number"),
        ({"algo.drop": "some"}, r"algo\.drop: .*'samples', 'prompts' or 'none'"),
        ({"algo.points.x": 1}, r"algo\.points"),
        (
            {"reward": ["math", {"name": "exact", "wieght": 2}]},
            r"unknown key reward\.2\.wieght; did you mean reward\.2\.weight",
        ),
        (
            {"reward": [{"nme": "math"}]},
            r"reward\.1\.name: field required\n.*reward\.1\.nme; did you mean reward\.1\.name",
        ),
        (
            {"reward": [{"name": "math", "zzz": 1}]},
            r"unknown key reward\.1\.zzz; `attnrl config --help` lists the keys",
        ),
        ({"data.train": ["a.jsonl", 3]}, r"data\.train\.2: .*string, got 3"),
        (
            {"data.columns": "problem=q,answer=a"},
            r"data\.columns: should be a table, such as \{name = \"value\"\}; .*, got 'problem=q,answer=a'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("attnrl_1p5b", overrides)


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.95), ("top_k", 50)])
def test_training_refuses_a_truncated_distribution_and_says_why(key: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"sampling\.{key}: must be [01].* in training: .*not the learner's.*got {value}"
    ):
        load_config("attnrl_1p5b", {f"sampling.{key}": value})
    assert load_config("attnrl_1p5b", {"evaluation.top_p": 0.95}).evaluation.top_p == 0.95


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algo.rule": "fcy"}, r"algo\.rule: unknown name 'fcy'; did you mean 'fci'\?; known: fci"),
        ({"algo.rule_options": {"gap": 1}}, r"algo\.rule: 'fci' has no option 'gap'"),
        ({"algo.estimator": "no_such_module:f"}, r"algo\.estimator: cannot import"),
        ({"algo.filter": "some"}, r"algo\.filter: unknown name 'some'"),
        ({"algo.schedule": "on_polcy"}, r"algo\.schedule: unknown name 'on_polcy'; did you mean 'on_policy'"),
        ({"algo.prompts": 300}, r"algo\.prompts = 300 is above algo\.max_prompts = 256; raise that too"),
        ({"algo.rule": "every_step"}, r"algo\.adaptive_batch needs a rule that says how many points"),
    ],
)
def test_a_wrong_part_is_named_with_its_key(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parts(load_config("attnrl_1p5b", overrides))


def test_a_file_may_stand_on_a_preset_and_flags_on_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "attnrl_1p5b_released"\n[algo]\npoints = 5\n')
    config = load_config(str(file), {"algo.width": 7})
    assert (config.algo.points, config.algo.width, config.algo.min_gap_tokens) == (5, 7, 512)


@pytest.mark.parametrize("given", [None, 3, {}, {"algo": {"points": 3}}, ["demo"], b"demo"])
def test_what_names_no_config_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a config is a preset's name, a path or a Config, not "):
        load_config(given)


def test_a_path_is_read_like_its_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "demo"\n[algo]\npoints = 5\n')
    assert load_config(file, {"algo.width": 7}) == load_config(str(file), {"algo.width": 7})
    assert load_config(file).algo.points == 5


def test_missing_broken_and_circular_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"nowhere\.toml"):
        load_config("nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("algo = [")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_config(str(broken))
    broken.write_text(f'base = "{broken}"')
    with pytest.raises(ConfigError, match="its own base"):
        load_config(str(broken))
    with pytest.raises(ConfigError, match="did you mean 'attnrl_1p5b'"):
        load_config("attnrl_1p5")


@pytest.mark.parametrize("text", ["[1]", "3", '"demo"'])
def test_a_json_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json: holds a (list|int|str), not an object"):
        load_config(str(tmp_path / "a.json"))


def test_every_key_is_documented() -> None:
    assert [key for key, about in keys().items() if not about] == []


def test_none_is_nothing_where_a_key_may_be_empty_and_a_name_elsewhere(tmp_path: Path) -> None:
    """Also in a file: TOML has no word for nothing."""
    nothing = dict.fromkeys(["update.minibatches", "algo.rule", "algo.credit"], "none")
    file = tmp_path / "mine.toml"
    file.write_text('base = "attnrl_1p5b"\nalgo.rule = "none"\nalgo.credit = "none"\nupdate.minibatches = "none"\n')
    for config in (
        load_config("attnrl_1p5b", {**nothing, "update.minibatch_samples": 4}),
        load_config(str(file), {"update.minibatch_samples": 4}),
    ):
        assert config.update.minibatches is None
        assert (config.algo.rule, config.algo.credit) == ("none", "none")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"update.minibatch_samples": 4}, r"update: minibatch_samples is set beside minibatches: .*none"),
        ({"update.minibatches": "none"}, r"update: set minibatches or minibatch_samples"),
        ({"update.minibatches": 0}, r"update\.minibatches: .*greater than or equal to 1"),
    ],
)
def test_minibatches_are_said_in_one_way(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("attnrl_1p5b", overrides)


def test_one_name_is_a_list_of_one() -> None:
    config = load_config("demo", {"data.train": "rows.parquet", "data.decontaminate": "aime24"})
    assert config.data.train == ("rows.parquet",)
    assert config.data.decontaminate == ("aime24",)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().algo.points = 3  # type: ignore[misc]
