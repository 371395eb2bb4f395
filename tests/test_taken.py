"""A key that the user set and that nothing takes is refused by name; what a preset holds is not the user's doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnrl
from attnrl.cli import run as command
from attnrl.config import AlgoConfig, Config, ModelConfig, RewardConfig, keys, load_config, presets
from attnrl.config.taken import For, mark_of
from attnrl.errors import ConfigError
from attnrl.launch.training import make_ready

PLAIN = {"algo.rule": "none", "algo.filter": "all", "algo.adaptive_batch": False}
ROWS = {"data.train": ["rows.jsonl"], "evaluation.benchmarks": ["aime24"]}
NO_HELD_OUT = {"evaluation.benchmarks": [], "evaluation.every": 0}
SPELLING = {"reward": [{"name": "exact"}]}
MADE_UP = {"data.train": ["tasks"], "evaluation.benchmarks": ["tasks"]}

# (key, a value, settings under which nothing takes it, settings under which something does), over the preset "demo"
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("model.lora_alpha", 64.0, {}, {"model.lora_rank": 4}),
    ("model.lora_targets", ["q_proj"], {}, {"model.lora_rank": 4}),
    ("engine.local.rows", 8, {"engine.name": "verl"}, {}),
    ("engine.verl.nodes", 2, {}, {"engine.name": "verl"}),
    ("data.train_tasks", 5, ROWS, {}),
    ("data.columns", {"problem": "question"}, MADE_UP, ROWS),
    ("data.drop_bad_rows", True, MADE_UP, ROWS),
    ("data.directory", "folder", NO_HELD_OUT, {**NO_HELD_OUT, "data.decontaminate": ["aime24"]}),
    ("data.tasks.wording", "list", ROWS, {**ROWS, "evaluation.benchmarks": ["tasks"]}),
    ("data.tasks.seed", 3, ROWS, {**ROWS, "evaluation.benchmarks": ["gym:leg_counting"]}),
    ("data.tasks.largest", 50, {}, {"data.tasks.modulus": None}),
    ("data.tasks.routine", [3, 4], {}, {"data.tasks.forks": ["hub"]}),
    ("data.tasks.doubts", 0.5, {}, {"data.tasks.forks": ["hub"]}),
    ("data.tasks.style", 2, {}, {"data.tasks.forks": ["hub"]}),
    ("algo.points", 3, PLAIN, {}),
    ("algo.width", 3, PLAIN, {**PLAIN, "algo.rule": "surprisal"}),
    ("algo.budget", "all", PLAIN, {**PLAIN, "algo.rule": "surprisal"}),
    ("algo.budget_options", {"rounding": "ceil"}, PLAIN, {}),
    ("algo.top_fraction", 0.5, {"algo.rule": "surprisal"}, {}),
    ("algo.min_gap_tokens", 9, {"algo.rule": "surprisal"}, {}),
    ("algo.mode", "released", {"algo.rule": "none", "algo.filter": "all"}, {"algo.rule": "none"}),
    ("algo.delta", 2, PLAIN, {**PLAIN, "algo.filter": "attention"}),
    ("algo.key_reduce", "sum", PLAIN, {}),
    ("algo.history", 0.5, PLAIN, {}),
    ("algo.max_prompts", 300, PLAIN, {**PLAIN, "algo.schedule": "dynamic"}),
    ("update.clip_low", 0.3, {"update.loss": "cispo"}, {}),
    ("update.clip_high", 0.3, {"update.loss": "gspo"}, {}),
    ("update.dual_clip", 3.0, {"update.loss": "cispo"}, {}),
    ("verify.workers", 2, SPELLING, {}),
    ("verify.timeout_s", 2.0, SPELLING, {"reward": [{"name": "exact"}, {"name": "math"}]}),
    ("verify.memory_mb", 512, SPELLING, {"reward": [{"name": "gym"}]}),
    ("verify.concurrency", 8, {}, {"reward": [{"name": "own_judge:judge"}]}),
    ("verify.async_timeout_s", 8.0, {}, {"reward": [{"name": "math"}, {"name": "own_judge:judge"}]}),
    ("evaluation.tasks", 8, {"evaluation.benchmarks": ["aime24"]}, {"evaluation.benchmarks": ["gym:leg_counting"]}),
    ("evaluation.samples", 8, NO_HELD_OUT, {"evaluation.every": 0}),
    ("evaluation.temperature", 0.5, NO_HELD_OUT, {}),
    ("evaluation.top_p", 0.5, NO_HELD_OUT, {}),
    ("evaluation.max_response_tokens", 50, NO_HELD_OUT, {}),
    ("evaluation.max_prompt_tokens", 50, NO_HELD_OUT, {}),
    ("evaluation.ks", [2], NO_HELD_OUT, {}),
]


@pytest.fixture(autouse=True)
def own_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_judge.py").write_text("async def judge(attempt):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)


def fit(settings: dict[str, Any]) -> None:
    make_ready(load_config("demo", settings)).rewards.close()


@pytest.mark.parametrize(("key", "value", "idle", "busy"), CASES, ids=[case[0] for case in CASES])
def test_a_key_that_nothing_takes_is_refused_by_its_name(key: str, value: Any, idle: Any, busy: Any) -> None:
    fit({**busy, key: value})
    fit(idle)
    with pytest.raises(ConfigError, match=rf"^{key.replace('.', '[.]')} = .* is set, but nothing takes it: it is for "):
        fit({**idle, key: value})


def marked(section: Any = Config, prefix: str = "", above: For | None = None) -> dict[str, For | None]:
    found: dict[str, For | None] = {}
    for name, field in section.model_fields.items():
        mark = mark_of(field, above)
        inner = hasattr(field.annotation, "model_fields")
        found |= marked(field.annotation, f"{prefix}{name}.", mark) if inner else {f"{prefix}{name}": mark}
    return found


def test_every_key_that_only_some_settings_take_has_a_case() -> None:
    """One key stands for a section that is marked as a whole."""
    marks = marked()
    assert marks.keys() == keys().keys()
    tried = {key: marks[key] for key, *_ in CASES}
    assert None not in tried.values()
    alone = {key for key, mark in marks.items() if mark is not None and mark not in tried.values()}
    assert not alone
    twice = [
        mark for mark in set(tried.values()) if list(marks.values()).count(mark) > list(tried.values()).count(mark)
    ]
    assert {mark.what for mark in twice if mark} == {
        "engine.name = 'local'",
        "engine.name = 'verl'",
        '"tasks" in data.train or evaluation.benchmarks',
    }


@pytest.mark.parametrize("preset", presets())
def test_no_preset_is_refused_nor_what_is_printed_of_it(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with what `attnrl config PRESET` prints is the user's own, all of it."""
    assert not load_config(preset).model_fields_set
    config = load_config(preset, {"model.path": "owner/model"})
    assert config.model_fields_set == {"model"}
    assert command(["config", preset, "--model.path", "owner/model"]) == 0
    file = tmp_path / "mine.toml"
    file.write_text(capsys.readouterr().out)
    mine = load_config(str(file))
    assert mine.model_fields_set >= {"about", "model", "algo", "update", "run"}
    for one in (config, mine):
        make_ready(one).rewards.close()
    unlike = {key for key in keys() if value_of(mine, key) != value_of(config, key)}
    fixed = {"algo.max_prompts"} if not config.algo.adaptive_batch else set()  # every batch has as many prompts
    assert unlike <= fixed | ({"algo.budget"} if config.algo.rule == "none" else set())


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_what_counts_is_a_flag_or_a_file_of_one_s_own(tmp_path: Path) -> None:
    """Released settings have a gap of 512 tokens, which surprisal does not know."""
    over = {"algo.rule": "surprisal", "algo.filter": "all"}
    make_ready(load_config("attnrl_1p5b_released", over)).rewards.close()
    idle = (
        r"^algo[.]min_gap_tokens = 512 is set, but nothing takes it: it is for a part with such an option \(segmenter "
    )
    with pytest.raises(ConfigError, match=idle + "'blank_lines', rule 'surprisal', filter 'all', "):
        make_ready(load_config("attnrl_1p5b_released", {**over, "algo.min_gap_tokens": 512}))

    lower, upper = tmp_path / "lower.toml", tmp_path / "upper.toml"
    lower.write_text('base = "attnrl_1p5b_released"\nalgo.rule = "surprisal"\nalgo.filter = "all"\n')
    upper.write_text(f'base = "{lower}"\nrun.seed = 3\n')
    make_ready(load_config(str(upper))).rewards.close()
    lower.write_text(lower.read_text() + "algo.min_gap_tokens = 512\n")
    for file in (lower, upper):
        with pytest.raises(ConfigError, match=idle):
            make_ready(load_config(str(file)))

    whole = load_config("attnrl_1p5b_released", over).model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(whole))  # as a run directory holds it: checked when it began
    make_ready(load_config(str(tmp_path / "config.json"))).rewards.close()
    with pytest.raises(ConfigError, match=r"verify[.]concurrency"):
        make_ready(load_config(str(tmp_path / "config.json"), {"verify.concurrency": 3}))

    plain = AlgoConfig(rule="none", filter="all", adaptive_batch=False, points=4)
    with pytest.raises(ConfigError, match=r"algo[.]points = 4"):
        make_ready(Config(model=ModelConfig(path="demo"), algo=plain, reward=(RewardConfig(name="exact"),)))


def test_a_file_may_hold_settings_of_several_engines_and_a_flag_is_for_the_one_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "demo"\nengine.local.rows = 7\nengine.verl.nodes = 2\n')
    for name in ("local", "verl"):
        config = load_config(str(file), {"engine.name": name})
        assert (config.engine.local.rows, config.engine.verl.nodes) == (7, 2)
        make_ready(config).rewards.close()
    with pytest.raises(ConfigError, match=r"engine[.]verl[.]nodes = 3 is set, .* it is for engine[.]name = 'verl'"):
        make_ready(load_config(str(file), {"engine.verl.nodes": 3}))
    inside = {"engine.name": "attnrl.local.backend:build", "engine.local.rows": 8, "engine.verl.nodes": 3}
    make_ready(load_config(str(file), inside)).rewards.close()  # which of ours works inside, it alone knows


def test_commands_and_functions_refuse_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["train", "demo", "--run-dir", str(tmp_path / "run"), "--engine.verl.nodes", "2"]) == 2
    assert "engine.verl.nodes = 2 is set, but nothing takes it" in capsys.readouterr().err
    assert command(["eval", "--model", "demo", "--output", str(tmp_path / "out"), "--algo.points", "3"]) == 2
    assert "algo.points = 3 is set, but nothing takes it" in capsys.readouterr().err
    assert command(["config", "demo_grpo", "--algo.width", "3"]) == 2
    assert "algo.width = 3 is set, but nothing takes it: it is for a rule that branches" in capsys.readouterr().err
    for budget in ("difficulty", "all"):  # the default, and what the preset has
        assert command(["train", "demo_grpo", "--run-dir", str(tmp_path / "run"), "--algo.budget", budget]) == 2
        said = f"algo.budget = '{budget}' is set, but nothing takes it: it is for a rule that branches"
        assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"verify[.]workers = 2 is set"):
        attnrl.score("demo", [("a", "b")], overrides={"verify.workers": 2})
    with pytest.raises(ConfigError, match=r"data[.]train_tasks = 9 is set"):
        attnrl.check("demo", overrides={"data.train": "rows.jsonl", "data.train_tasks": 9})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own_judge.py"]


OTHERS = {  # what each command is called with, and how it calls itself
    "model": (["eval", "--model", "demo", "--output", "out"], "an evaluation"),
    "stored": (["eval", "--responses", "rows.jsonl", "--output", "out"], "grading stored responses"),
    "compare": (["eval", "--compare", "a,b"], "a comparison"),
    "score": (["score", "--model", "demo", "--input", "rows.jsonl", "--output", "out"], "scoring"),
    "disrupt": (["disrupt", "--model", "demo", "--output", "out"], "the experiment"),
    "verify": (["verify", "rows.jsonl"], "attnrl verify"),
    "warmup": (["warmup", "--output", "out"], "attnrl warmup"),
}
EVERYWHERE = [("update.lr", "3"), ("run.iterations", "77"), ("data.train", "no.parquet"), ("algo.budget", "all")]
NOT_BY = [
    ("model", "sampling.temperature", "0.1"),
    ("model", "sampling.max_response_tokens", "9"),
    ("model", "evaluation.every", "3"),
    ("model", "model.path", "demo"),
    ("stored", "evaluation.samples", "9"),
    ("stored", "evaluation.temperature", "0.2"),
    ("stored", "model.dtype", "bfloat16"),
    ("compare", "evaluation.ks", "4"),
    ("score", "algo.filter", "all"),
    ("score", "evaluation.temperature", "0.3"),
    ("disrupt", "evaluation.ks", "4"),
    ("disrupt", "algo.rule", "entropy"),
    ("verify", "verify.concurrency", "3"),
    ("warmup", "engine.local.rows", "8"),
]
TAKEN = [
    ("model", "--verify.workers 1 --data.tasks.seed 5 --algo.grade_truncated --engine.local.rows 9 --k 1"),
    ("model", "--reward math,overlong --sampling.max_response_tokens 90"),
    ("stored", "--k 1 --data-dir x --reward exact --algo.grade_truncated"),
    ("score", "--sampling.temperature 0.7 --algo.rule entropy --points 3 --delta 2 --token-budget 99"),
    ("score", "--algo.segmenter lines --data.system x --algo.mode released --dtype float32"),
    ("disrupt", "--delta 2 --algo.segmenter lines --samples 3 --update.microbatch_tokens 99"),
    ("verify", "--workers 1 --timeout 3 --memory-mb 300"),
]


@pytest.mark.parametrize(
    ("name", "key", "value"), [*((name, *pair) for name in OTHERS for pair in EVERYWHERE), *NOT_BY]
)
def test_every_command_refuses_a_flag_that_it_does_not_take(
    name: str, key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one with the value that it has anyway."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2", "gold": "2"}\n')
    before = sorted(tmp_path.iterdir())
    words, said = OTHERS[name]
    assert command([*words, f"--{key}", value]) == 2
    error = capsys.readouterr().err
    assert f"{key} = " in error
    assert f"is set, but nothing takes it: {said} takes " in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("name", "flags"), TAKEN)
def test_what_a_command_takes_it_does_not_refuse(
    name: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ends these is a model that is not there, or a row without its fields: looked at after the keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    words, _ = OTHERS[name]
    assert command([word.replace("demo", "./nope") for word in words] + flags.split()) == 2
    error = capsys.readouterr().err
    assert "takes" not in error
    assert "rows.jsonl" in error or "./nope" in error


def test_a_whole_config_of_one_s_own_may_hold_more_than_an_evaluation_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "demo"\nupdate.lr = 3e-4\nrun.iterations = 7\nevaluation.tasks = 2\n')
    report = attnrl.evaluate("demo", config=load_config(str(file)))
    assert len(report.metrics()) > 0
    with pytest.raises(ConfigError, match=r"update[.]lr = 0[.]1 is set, but nothing takes it: an evaluation takes "):
        attnrl.evaluate("demo", overrides={"update": {"lr": 0.1}})
