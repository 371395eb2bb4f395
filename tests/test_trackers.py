"""A tracker mirrors metrics.jsonl: after a kill and a resume it shows every iteration once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnrl.errors import MissingExtraError
from attnrl.trackers import Observer, check_trackers, open_trackers


def train_killed_and_resumed(tracker: str, run_dir: Path) -> None:
    """Iterations 0 to 7, killed; again from the checkpoint of iteration 4, to 10. The resumed ones log i + 0.5."""
    run_dir.mkdir(exist_ok=True)
    mirror(open_trackers([tracker], run_dir, {"run": {"iterations": 7}}), range(8), 0.0)
    mirror(open_trackers([tracker], run_dir, {"run": {"iterations": 10}}, kept=4, recorded=7), range(5, 11), 0.5)


def mirror(observers: list[Observer], iterations: range, shift: float) -> None:
    for i in iterations:
        for observe in observers:
            observe({"iteration": float(i), "policy/kl": i + shift})


def test_tensorboard_shows_what_the_resumed_run_recorded(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    from tensorboard.util.tensor_util import make_ndarray

    train_killed_and_resumed("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), tensor_size_guidance={"scalars": 0})
    events.Reload()
    found = [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors("policy/kl")]
    assert found == [(i, i + 0.5 * (i > 4)) for i in range(11)]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_trackers_that_cannot_forget_go_on_with_the_same_run(tracker: str, tmp_path: Path, monkeypatch) -> None:
    """The package is played by one that keeps what it is told; both want a run opened by its name or id."""
    opened, logged = [], []
    package = SimpleNamespace(
        init=lambda **options: opened.append(options), log=lambda metrics, step: logged.append((step, metrics))
    )
    monkeypatch.setitem(sys.modules, tracker, package)
    train_killed_and_resumed(tracker, tmp_path / "a")
    assert [step for step, _ in logged] == list(range(11))
    key = "id" if tracker == "wandb" else "name"
    assert opened[0][key] == opened[1][key]
    assert opened[1]["resume"] == "allow"
    open_trackers([tracker], tmp_path, {})
    assert opened[2][key] != opened[0][key], "another directory is another run"


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"wandb.*attnrl\[trackers\]"):
        check_trackers(["wandb"])
