"""The real training loop over a fake backend, under every preset's algorithm settings."""

from __future__ import annotations

import gc
import io
import json
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from attnrl.checkpoint import load_state, save_state
from attnrl.config import RunConfig, load_config, presets
from attnrl.console import console_line
from attnrl.errors import ConfigError, MissingFileError, TrainingError, reading
from attnrl.iteration import Outcome, Parts, first_state
from attnrl.run import open_run, read_metrics
from attnrl.schedules import SCHEDULES, one_step_off_policy, outcome_by
from attnrl.trainer import train
from attnrl.types import (
    Group,
    Prompt,
    Rollout,
    Scores,
    State,
    Step,
    Trunk,
    Verdict,
    as_floats,
    as_ids,
)
from fakes import FakeBackend, fake_parts


def run_fake(path: Path, preset: str, iterations: int, *, resume: bool = False, **overrides: object) -> FakeBackend:
    config = load_config(preset, {"algo.prompts": 6, "sampling.max_response_tokens": 80, **overrides})
    backend = FakeBackend()
    parts = fake_parts(config, backend)
    train(
        parts,
        SCHEDULES[config.algo.schedule],
        open_run(path, config.model_dump(mode="json"), resume=resume),
        RunConfig(iterations=iterations, seed=3, checkpoint_every=4, generated_tokens=config.run.generated_tokens),
    )
    return backend


def record(path: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in m.items() if not k.startswith("seconds/")} for m in read_metrics(path)]


@pytest.mark.parametrize("preset", presets())
def test_every_preset_trains_for_20_iterations_and_repeats_itself(preset: str, tmp_path: Path) -> None:
    run_fake(tmp_path / "a", preset, 20)
    run_fake(tmp_path / "b", preset, 20)
    metrics = record(tmp_path / "a")
    assert [m["iteration"] for m in metrics] == list(range(1, 21))
    assert metrics == record(tmp_path / "b")
    assert sum(m["train/valid_samples"] for m in metrics) > 0
    assert metrics[-1]["policy/version"] >= 1


@pytest.mark.parametrize("preset", ["attnrl_1p5b", "treerl_1p5b"])
@pytest.mark.parametrize("stopped_at", [2, 4, 7])
def test_a_resumed_run_leaves_the_record_of_an_uninterrupted_one(preset: str, stopped_at: int, tmp_path: Path) -> None:
    run_fake(tmp_path / "whole", preset, 10)
    run_fake(tmp_path / "parts", preset, stopped_at)
    newest = tmp_path / "parts/checkpoints" / f"{stopped_at:06d}"
    if stopped_at % 4:  # as if killed before the last checkpoint was written
        for file in sorted(newest.rglob("*"), reverse=True):
            file.unlink()
        newest.rename(newest.with_name(f".unfinished-{newest.name}"))
    run_fake(tmp_path / "parts", preset, 10, resume=True)
    assert record(tmp_path / "whole") == record(tmp_path / "parts")
    tables = [pq.read_table(tmp_path / name / "forests/000010.parquet") for name in ("whole", "parts")]
    assert repr(tables[0].to_pylist()) == repr(tables[1].to_pylist())  # by repr: unscored trunks hold NaN


@pytest.mark.parametrize("free", [1_000_000, 10**12])
def test_a_full_disk_is_named_and_costs_nothing_but_the_time(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_fake(tmp_path / "whole", "attnrl_1p5b", 10)
    save, saved = FakeBackend.save, []

    def fails_the_second_time(self: FakeBackend, path: Path) -> None:
        saved.append(path)
        if len(saved) == 2:
            (path / "half").write_bytes(bytes(300))
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")  # as torch.save says it
        save(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "save", fails_the_second_time)
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
        with pytest.raises(TrainingError if free < 10**9 else RuntimeError) as caught:
            run_fake(tmp_path / "run", "attnrl_1p5b", 10)
    said = str(caught.value)
    del caught  # its frames hold the run directory's lock
    gc.collect()
    if free < 10**9:
        assert "the disk is full" in said
        assert said.endswith("the run goes on from 000004")
        assert not saved[1].exists()
    run_fake(tmp_path / "run", "attnrl_1p5b", 10, resume=True)
    assert record(tmp_path / "whole") == record(tmp_path / "run")


@pytest.mark.parametrize("name", ["state.json", "state.npz"])
def test_a_state_that_is_cut_short_is_named(tmp_path: Path, name: str) -> None:
    config = load_config("attnrl_1p5b", {"algo.prompts": 4, "sampling.max_response_tokens": 80})
    parts = fake_parts(config)
    save_state(tmp_path, one_step_off_policy(first_state(parts, 0), parts).state)
    whole = (tmp_path / name).read_bytes()
    for length in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 3):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(MissingFileError, match=rf"{name} is missing or cut short; remove {tmp_path} to go on"):
            load_state(tmp_path)


def test_a_file_that_may_not_be_read_is_not_said_to_be_cut_short(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="denied"), reading(tmp_path / "state.json", tmp_path, OSError):
        raise PermissionError("denied")


def test_trap_the_checkpoint_holds_the_waiting_trunks_exactly(tmp_path: Path) -> None:
    config = load_config("attnrl_1p5b", {"algo.prompts": 4, "sampling.max_response_tokens": 80})
    parts = fake_parts(config)
    state = one_step_off_policy(first_state(parts, 0), parts).state
    save_state(tmp_path, state)
    loaded = load_state(tmp_path)
    assert len(loaded.waiting) == len(state.waiting) > 0
    for was, now in zip(state.waiting, loaded.waiting, strict=True):
        assert (was.prompt.uid, was.prompt.answers) == (now.prompt.uid, now.prompt.answers)
        np.testing.assert_array_equal(was.prompt.ids, now.prompt.ids)
        for a, b in zip(was.trunks, now.trunks, strict=True):
            assert (a.verdict, a.steps, a.rollout.finish) == (b.verdict, b.steps, b.rollout.finish)
            np.testing.assert_array_equal(a.rollout.ids, b.rollout.ids)
            np.testing.assert_array_equal(a.rollout.logprobs, b.rollout.logprobs)
            np.testing.assert_array_equal(a.scores.fci, b.scores.fci)
            np.testing.assert_array_equal(a.scores.entropy, b.scores.entropy)
    assert loaded.rng == state.rng
    assert loaded.batch_size == state.batch_size
    a = one_step_off_policy(state, parts)
    parts.backend.version -= 1  # back to the policy that meets the loaded state
    b = one_step_off_policy(loaded, parts)
    assert [s.response.tolist() for s in a.samples] == [s.response.tolist() for s in b.samples]


def plain(value: Any) -> Any:
    """A value in builtins, arrays with their type: what two equal states must agree in."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    return [plain(v) for v in value] if isinstance(value, tuple) else value


def test_a_checkpoint_holds_every_field_of_the_state_and_of_what_waits(tmp_path: Path) -> None:
    """Every field has a value that is not its default, so that one which is left out cannot come back by itself."""
    prompt = Prompt(
        "q7", as_ids([1, 2]), ("4", "four"), "2+2?", source="tasks.jsonl:7", row={"level": 3, "tags": ["a"]}
    )
    trunk = Trunk(
        Rollout(as_ids([3, 4, 5]), as_floats([-0.1, -0.2, -0.3]), "length", 6),
        Verdict(0.9, "unit", "4", "timeout: 5 s", right=False, parts={"unit": 0.25}),
        (Step(0, 2), Step(2, 3, thinking=False)),
        Scores(as_floats([-1, -2, -3]), as_floats([0.5, 0.25, 0.125]), as_floats([2.5, 0])),
    )
    state = State(
        batch_size=7.25,
        iteration=3,
        waiting=(Group(prompt, (trunk, trunk)), Group(prompt, (trunk,))),
        memory={"fci_sum": 0.1 + 0.2, "fci_count": 5},
        stream={"epoch": 1, "next": 9},
        rng=dict(np.random.default_rng(5).bit_generator.state),
        generated_tokens=12345,
    )
    for part in (state, prompt, trunk, trunk.rollout, trunk.verdict, trunk.steps[1]):
        for field in fields(part):
            if field.default is not MISSING:
                assert getattr(part, field.name) != field.default, f"{type(part).__name__}.{field.name}"
            if field.default_factory is not MISSING:
                assert getattr(part, field.name) != field.default_factory(), f"{type(part).__name__}.{field.name}"
    save_state(tmp_path, state)
    assert plain(load_state(tmp_path)) == plain(state)


def test_the_best_iteration_by_a_metric_is_kept_and_survives_worse_ones(tmp_path: Path) -> None:
    scores = {1: 0.3, 2: 0.6, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.1}

    def go(iterations: int, *, resume: bool) -> dict[str, Any]:
        config = load_config("treerl_1p5b", {"algo.prompts": 3, "sampling.max_response_tokens": 60})
        train(
            fake_parts(config),
            SCHEDULES["on_policy"],
            open_run(tmp_path, config.model_dump(mode="json"), resume=resume),
            RunConfig(iterations=iterations, checkpoint_every=1, keep_checkpoints=1, keep_best="eval/x/pass@1"),
            evaluate=lambda iteration: {"eval/x/pass@1": scores.get(iteration, 0.0)},
            evaluate_every=1,
        )
        return dict(json.loads((tmp_path / "best/best.json").read_text()))

    best = go(4, resume=False)
    assert best == {"metric": "eval/x/pass@1", "value": 0.6, "iteration": 2}  # the first of two equal ones
    assert load_state(tmp_path / "best").iteration == 2
    assert json.loads((tmp_path / "best/fake.json").read_text())["version"] == 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["000004"]
    assert go(6, resume=True) == {"metric": "eval/x/pass@1", "value": 0.7, "iteration": 5}
    assert load_state(tmp_path / "best").iteration == 5


@pytest.mark.parametrize("kept_by", ["eval/x/pas@1", "trunks/accurcy"])
def test_a_metric_that_never_comes_is_said_at_once(tmp_path: Path, kept_by: str) -> None:
    """At the end once more; and when a run goes on, at the first evaluation."""
    config, said = load_config("treerl_1p5b", {"algo.prompts": 3, "sampling.max_response_tokens": 60}), list[str]()

    def go(iterations: int = 3, *, resume: bool = False, kept_by: str | None = kept_by) -> None:
        train(
            fake_parts(config),
            SCHEDULES["on_policy"],
            open_run(tmp_path, config.model_dump(mode="json"), resume=resume),
            RunConfig(iterations=iterations, keep_best=kept_by),
            evaluate=lambda iteration: {"eval/x/pass@1": 0.5},
            evaluate_every=5,
            observers=[lambda metrics: said.append(f"{metrics['iteration']:.0f}")],
            say=said.append,
        )

    def line(iteration: int, meant: str) -> str:
        return f"run.keep_best: iteration {iteration} has no metric {kept_by!r}; did you mean {meant!r}?; not kept"

    if kept_by.startswith("eval/"):
        with pytest.raises(ConfigError, match=r"run\.keep_best: .*'eval/x/pas@1'; did you mean 'eval/x/pass@1'"):
            go()
        assert not (tmp_path / "forests/000001.parquet").exists(), "before anything is trained"
        (tmp_path / "metrics.jsonl").unlink()
        go(kept_by=None)
        said.clear()
        go(7, resume=True)
        best = "eval/x/pass@1"
        assert said == ["4", "5", line(5, best), "6", "7", line(7, best)]
    else:
        go()
        best = "trunks/accuracy"
        assert said == ["0", "1", line(1, best), "2", "3", line(3, best)]


def test_a_kill_while_the_best_is_replaced_costs_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("treerl_1p5b", {"algo.prompts": 3, "sampling.max_response_tokens": 60})
    parts = fake_parts(config)
    run, state = open_run(tmp_path, config.model_dump(mode="json"), resume=False), first_state(parts, 0)
    run.keep_best(state, parts.backend, "x", float("nan"))
    assert not (tmp_path / "best").exists(), "nothing is above a NaN: it must not be held"
    run.keep_best(state, parts.backend, "x", 1.0)
    rename, calls = Path.rename, []

    def killed_at(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at)
    with pytest.raises(KeyboardInterrupt):
        run.keep_best(state, parts.backend, "x", 2.0)
    monkeypatch.undo()
    run.resume(parts.backend)
    assert json.loads((tmp_path / "best/best.json").read_text())["value"] == 1.0
    assert load_state(tmp_path / "best").iteration == 0
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_are_whole_or_absent_and_old_ones_go(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 12)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["000008", "000012"]
    assert json.loads((tmp_path / "checkpoints/000012/state.json").read_text())["iteration"] == 12


def test_a_used_run_directory_is_refused_without_resume(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 2)
    with pytest.raises(ConfigError, match="--resume"):
        run_fake(tmp_path, "attnrl_1p5b", 2)


def test_resuming_with_another_config_names_the_key(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 2)
    with pytest.raises(ConfigError, match=r"algo\.points"):
        run_fake(tmp_path, "attnrl_1p5b", 4, resume=True, **{"algo.points": 3})


def test_a_run_from_before_a_key_existed_goes_on_with_its_default_alone(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 2)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["update"]["optimizer"], config["update"]["betas"], config["verify"], config["reward"]
    config["update"]["gradient_checkpointing"] = True  # as it was written then
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"update\.optimizer: was 'adamw', is now 'adamw_8bit'"):
        run_fake(tmp_path, "attnrl_1p5b", 4, resume=True, **{"update.optimizer": "adamw_8bit"})
    run_fake(tmp_path, "attnrl_1p5b", 4, resume=True)
    assert [m["iteration"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_run_stops_at_its_number_of_generated_tokens(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 50, **{"run.generated_tokens": 20_000})
    totals = [m["generate/total_tokens"] for m in read_metrics(tmp_path)]
    assert totals[-1] >= 20_000 > totals[-2]


@pytest.mark.parametrize("left", [[], ["checkpoints"], ["checkpoints", "forests", ".config.json.tmp"], ["config.json"]])
def test_a_run_stopped_before_it_recorded_anything_starts_anew(left: list[str], tmp_path: Path) -> None:
    for name in left:
        if "." in name:
            (tmp_path / name).write_text("{}")
        else:
            (tmp_path / name).mkdir()
    run_fake(tmp_path, "attnrl_1p5b", 2, resume=True)
    assert [m["iteration"] for m in read_metrics(tmp_path)] == [1, 2]


def test_a_directory_with_other_things_or_another_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        run_fake(tmp_path, "attnrl_1p5b", 2)
    with pytest.raises(ConfigError, match="cannot be written"):
        run_fake(tmp_path / "thesis.tex", "attnrl_1p5b", 2)
    held = open_run(tmp_path / "a", {}, resume=False)
    assert held.lock is not None
    with pytest.raises(ConfigError, match="in use"):
        open_run(tmp_path / "a", {}, resume=False)


def test_what_changes_no_result_may_change_on_resume(tmp_path: Path) -> None:
    run_fake(tmp_path, "attnrl_1p5b", 2)
    free = {"update.microbatch_tokens": 2048, "verify.workers": 1, "verify.max_error_share": 0.9}
    run_fake(tmp_path, "attnrl_1p5b", 4, resume=True, **free)
    assert len(read_metrics(tmp_path)) == 4
    for limit, value in (("timeout_s", 60.0), ("async_timeout_s", 90.0), ("memory_mb", 4096)):  # they say what is wrong
        with pytest.raises(ConfigError, match=rf"verify\.{limit}: was .*, is now {value}"):
            run_fake(tmp_path, "attnrl_1p5b", 6, resume=True, **{f"verify.{limit}": value})


def test_a_schedule_need_not_number_its_iterations(tmp_path: Path) -> None:
    config = load_config("treerl_1p5b", {"algo.prompts": 2, "sampling.max_response_tokens": 60, "run.iterations": 2})

    def mine(state: State, parts: Parts) -> Outcome:
        return replace(SCHEDULES["on_policy"](state, parts), metrics={"mine/share": np.float32(0.5)})  # type: ignore[dict-item]

    seen: list[dict[str, float]] = []
    run = open_run(tmp_path, config.model_dump(mode="json"), resume=False)
    watching = [console_line(config), seen.append]
    state = train(fake_parts(config), mine, run, config.run, observers=watching, say=lambda text: None)
    tokens = [row.pop("generate/total_tokens") for row in seen]
    assert seen == [{"mine/share": 0.5, "iteration": 1.0}, {"mine/share": 0.5, "iteration": 2.0}]
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1.0, 2.0]
    assert tokens[1] == state.generated_tokens


def test_settings_of_a_cluster_may_not_change_on_resume(tmp_path: Path) -> None:
    """They come after our own, those of the optimizer among them; how many machines there are changes no result."""
    run_fake(tmp_path, "attnrl_1p5b", 1)
    other = ["actor_rollout_ref.actor.optim.weight_decay=0.5"]
    with pytest.raises(ConfigError, match=r"engine\.verl\.overrides: was \[\], is now \['actor_rollout"):
        run_fake(tmp_path, "attnrl_1p5b", 2, resume=True, **{"engine.verl.overrides": other})
    run_fake(tmp_path, "attnrl_1p5b", 2, resume=True, **{"engine.verl.nodes": 2})
    assert len(read_metrics(tmp_path)) == 2


def test_the_console_does_not_blame_a_rule_that_declares_no_points() -> None:
    def shown(name: str, declared: int | None) -> str:
        def mine(prompt: Any, trunk: Any, rng: Any) -> tuple[int, ...]:
            return ()

        if declared is not None:
            mine.most_points = declared  # type: ignore[attr-defined]
        config = load_config("grpo_1p5b", {"algo.prompts": 2, "run.iterations": 1, "algo.rule": name})
        parts = fake_parts(config, FakeBackend(skill=-9.0))  # always wrong
        parts = replace(parts, rule=mine) if name == "fci" else parts
        out = io.StringIO()
        outcome = outcome_by(SCHEDULES["on_policy"], first_state(parts, 0), parts)
        console_line(config, Console(file=out, width=400))({**outcome.metrics, "iteration": 1.0})
        return out.getvalue()

    for name, declared, blamed in (("none", None, False), ("fci", 0, False), ("fci", 3, True), ("fci", None, True)):
        said = shown(name, declared)
        assert "nothing trained in 1 of 1 iterations" in said
        assert ("no trunk branched" in said) is blamed, (name, declared)
