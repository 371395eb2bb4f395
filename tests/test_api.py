"""Training, evaluating and scoring from Python, on the demo model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import attnrl
from attnrl.config import Config
from attnrl.errors import ConfigError, DataError, Interrupted, MissingFileError

SMALL = {
    "data.train_tasks": 60,
    "algo.prompts": 2,
    "algo.max_prompts": 4,
    "algo.group": 2,
    "evaluation.every": 0,
    "evaluation.tasks": 6,
    "evaluation.samples": 2,
    "run.iterations": 1,
    "run.checkpoint_every": 5,
}


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run of one iteration by `attnrl.train`."""
    where = tmp_path_factory.mktemp("api") / "run"
    trained = attnrl.train("demo", where, overrides=SMALL, say=quiet)
    assert repr(trained) == f"Trained(run_dir={where!r})"  # nobody wants to read its state
    return where


@pytest.mark.parametrize("code", ["import attnrl", "import attnrl; attnrl.load_config('demo')", "import attnrl.errors"])
def test_the_import_is_light(code):
    heavy = "torch transformers pyarrow rich ray vllm pandas"
    ask = f"{code}; import sys; print([name for name in {heavy.split()} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(attnrl.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_names_are_loaded_on_first_use_and_others_are_refused():
    assert set(attnrl.__all__) == {"__version__", "check", "evaluate", "load_config", "score", "train"}
    assert set(attnrl.__all__) <= set(dir(attnrl))
    assert all(callable(getattr(attnrl, name)) for name in attnrl.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        attnrl.fit  # noqa: B018


def test_a_config_is_made_of_a_preset_and_overrides():
    config = attnrl.load_config("demo", {"algo.points": 3, "reward": "exact"})
    assert isinstance(config, Config)
    assert (config.algo.points, config.reward[0].name, config.model.path) == (3, "exact", "demo")
    with pytest.raises(ConfigError, match=r"unknown key algo\.point; did you mean algo\.points\?"):
        attnrl.load_config("demo", {"algo.point": 3})


def test_what_an_engine_refuses_on_resume_does_not_stay_in_the_runs_record(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    before = (copy / "config.json").read_text()
    record = copy / "environment.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"command": ["attnrl", "train", "demo"]}))
    change = {"run.iterations": 2, "update.gradient_checkpointing": 99}
    with pytest.raises(ConfigError, match="99, but the model has 4 layers"):
        attnrl.train(run_dir=copy, resume=True, overrides=change, say=quiet)
    assert (copy / "config.json").read_text() == before
    assert attnrl.train(run_dir=copy, resume=True, overrides={"run.iterations": 2}, say=quiet).state.iteration == 2
    assert attnrl.load_config(str(copy / "config.json")).run.iterations == 2
    assert json.loads(record.read_text())["command"] == ["attnrl", "train", "demo"]  # what began it names the method


def test_a_run_goes_on_without_its_config_also_in_a_thread(run_dir, tmp_path):
    """The run's own config is taken; a thread has no signals to listen to; observers see what is on disk."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    seen: list[dict[str, float]] = []
    ended: list = []

    def go_on() -> None:
        more = {"run.iterations": 2}
        ended.append(attnrl.train(run_dir=copy, resume=True, overrides=more, observers=[seen.append], say=quiet))

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    (done,) = ended
    assert done.state.iteration == 2
    assert [m["iteration"] for m in done.metrics] == [1.0, 2.0]
    assert seen == done.metrics[1:]
    assert done.model == copy / "checkpoints" / "000002" / "model"
    assert (done.model / "config.json").is_file()


def test_resuming_what_was_never_begun_says_that_it_begins(run_dir, tmp_path):
    said: list[str] = []
    no_data = {**SMALL, "data.train": "no.jsonl", "data.train_tasks": 20_000}
    with pytest.raises(MissingFileError, match=r"no\.jsonl"):
        attnrl.train("demo", tmp_path / "typo", resume=True, overrides=no_data, say=said.append)
    assert said == [f"no run in {tmp_path / 'typo'} yet: it begins"]
    attnrl.train(run_dir=run_dir, resume=True, say=said.append)
    with pytest.raises(MissingFileError, match=r"no\.jsonl"):
        attnrl.train("demo", tmp_path / "new", overrides=no_data, say=said.append)
    assert not any("it begins" in line for line in said[1:])


def test_a_finished_run_is_left_alone_and_says_so(run_dir):
    before = (run_dir / "metrics.jsonl").read_bytes()
    said: list[str] = []
    done = attnrl.train(run_dir=run_dir, resume=True, say=said.append)
    assert done.state.iteration == 1
    assert "is finished: 1 iteration, " in said[0]
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ({"config": "demo"}, ConfigError, "run_dir"),
        ({"run_dir": "new"}, ConfigError, "give a preset"),
        ({"run_dir": "new", "resume": True}, MissingFileError, "holds no run"),
        ({"config": "demo", "run_dir": "RUN"}, ConfigError, "already holds a run"),
        ({"config": "no_such_preset", "run_dir": "new"}, ConfigError, "no preset 'no_such_preset'"),
        ({"config": Path("no.toml"), "run_dir": "new"}, MissingFileError, r"no\.toml does not exist"),
        ({"config": Config(), "run_dir": "new", "overrides": {"run.seed": 1}}, ConfigError, "a Config is taken as it"),
        (
            {"config": "demo", "run_dir": "new", "observers": [print, 3]},
            ConfigError,
            r"observers: .*functions.*not 3$",
        ),
        (
            {"config": "demo", "run_dir": "new", "observers": print},
            ConfigError,
            r"observers: .*not <built-in funct",
        ),
        ({"run_dir": "RUN", "resume": True, "overrides": {"algo.points": 3}}, ConfigError, r"points: was 2, is now 3"),
    ],
)
def test_mistakes_are_said_and_nothing_is_written(run_dir, tmp_path, monkeypatch, call, error, said):
    monkeypatch.chdir(tmp_path)
    if call.get("run_dir") == "RUN":
        call = {**call, "run_dir": run_dir}
    with pytest.raises(error, match=said):
        attnrl.train(**call)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_a_state_that_goes_on(tmp_path):
    """A signal sent by the system while an iteration runs: it ends, is saved, and the exception says what goes on."""
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []

    def interrupt(metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=r"stopped after iteration 1; attnrl train --resume") as stop:
        attnrl.train(
            "demo", tmp_path / "run", overrides={**SMALL, "run.iterations": 9}, observers=[interrupt], say=said.append
        )
    assert stop.value.number == signal.SIGINT
    assert isinstance(stop.value, KeyboardInterrupt)  # what a notebook shows as an interruption
    assert any("stopping after this iteration" in line for line in said)
    assert signal.getsignal(signal.SIGINT) is before
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["000001"]
    done = attnrl.train(run_dir=tmp_path / "run", resume=True, overrides={"run.iterations": 2}, say=quiet)
    assert [m["iteration"] for m in done.metrics] == [1.0, 2.0]


def test_a_run_is_evaluated_by_its_own_settings_and_kept(run_dir, tmp_path):
    report = attnrl.evaluate(run_dir, output=tmp_path / "results")
    kept = (tmp_path / "results" / "responses.jsonl").read_text().splitlines()
    assert len(kept) == 12  # evaluation.tasks = 6, samples = 2, from the run's config
    metrics = report.metrics()
    share = sum('"right": true' in line for line in kept) / 12
    assert metrics["eval/tasks/pass@1"] == pytest.approx(share)
    again = attnrl.evaluate(str(run_dir), output=tmp_path / "results")
    assert again.metrics() == metrics
    assert len((tmp_path / "results" / "responses.jsonl").read_text().splitlines()) == 12
    held = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}
    with pytest.raises(ConfigError, match=r"is a run directory; name another, for example .*results"):
        attnrl.evaluate(run_dir, output=run_dir)
    assert {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")} == held
    with pytest.raises(ConfigError, match="not both"):
        attnrl.evaluate("demo", config=attnrl.load_config("demo"), overrides={"evaluation.tasks": 2})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("a",), r"response 2: give a pair \(prompt, response\) or a row, not 1 values; the fields are prompt and"),
        (("a", "b", "c"), "not 3 values"),
        ("ab", "not str"),
        (3, "not int"),
    ],
)
def test_a_response_that_is_no_pair_is_named_with_what_one_is(row, said):
    with pytest.raises(DataError, match=said):
        attnrl.score("demo", [("a", "b"), row])


def test_scores_of_a_response_and_its_steps(run_dir):
    prompt = "All counts are modulo 11.\n- mugs = 3\n- rings = mugs + 9\nHow many rings are there?\n"
    lines = ["Plan: rings from mugs.", "Take mugs = 3", "Then rings = mugs + 9 = 3 + 9 = 1", "So rings = \\boxed{1}."]
    overrides = {"algo.delta": 1, "data.template": "{problem}"}
    (one,) = attnrl.score(run_dir, [(prompt, "\n\n".join(lines))], overrides=overrides)
    assert "".join(step["text"] for step in one.steps).split() == " ".join(lines).split()
    assert len(one.steps) == len(one.scores.fci) == 4
    assert one.scores.fci[-1] == 0.0  # nothing follows the last step
    assert (one.scores.fci[:-1] > 0).all()
    assert one.scores.logprobs.shape == one.response.shape
    assert (one.scores.logprobs <= 0).all()
    assert np.isfinite(one.scores.entropy).all()
    (same,) = attnrl.score(run_dir, [{"prompt_ids": one.prompt.tolist(), "response_ids": one.response.tolist()}])
    assert np.array_equal(same.scores.logprobs, one.scores.logprobs)
