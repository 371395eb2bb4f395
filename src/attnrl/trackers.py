"""Trackers mirror metrics.jsonl, which is the truth. Each is an optional package."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnrl.errors import ConfigError, MissingExtraError

Observer = Callable[[dict[str, float]], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise MissingExtraError where a tracker is not installed."""
    for name in names:
        _need(name)


def check_observers(observers: Any) -> None:
    """Raise ConfigError where they are no list of functions."""
    listed = isinstance(observers, list | tuple)
    for wrong in [one for one in observers if not callable(one)] if listed else [observers]:
        raise ConfigError(f"observers: give a list of functions of the metrics, such as [print]; not {wrong!r}")


def open_trackers(
    names: Sequence[str], run_dir: Path, config: dict[str, Any], *, kept: int = -1, recorded: int = -1
) -> list[Observer]:
    """One observer of metrics per tracker named.

    A resumed run keeps its record up to iteration `kept` and makes those up to `recorded` once more; -1: none. No
    tracker shows them twice: TensorBoard forgets the first ones, the others, which cannot forget, ignore the second.
    """
    return [OPENERS[name](run_dir, config, kept, recorded) for name in names]


def _tensorboard(run_dir: Path, config: dict[str, Any], kept: int, recorded: int) -> Observer:
    folder = str(run_dir / "tensorboard")
    _mark_start(folder, kept + 1)
    writer = _need("tensorboard").Writer(folder)

    def mirror(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step=int(metrics["iteration"]))
        writer.flush()

    return mirror


def _mark_start(folder: str, step: int) -> None:
    """Say in the event files that a session starts at `step`: readers drop what earlier sessions hold from there on.

    The first session says so too, since TensorBoard takes the first start it meets for no restart.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)
    writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
    writer.close()


def _trackio(run_dir: Path, config: dict[str, Any], kept: int, recorded: int) -> Observer:
    tracker, run = _need("trackio"), f"{run_dir.name}-{_run_id(run_dir)}"
    tracker.init(project="attnrl", name=run, config=config, resume="allow")
    return _after(recorded, tracker)


def _wandb(run_dir: Path, config: dict[str, Any], kept: int, recorded: int) -> Observer:
    tracker, run = _need("wandb"), _run_id(run_dir)
    changes: dict[str, Any] = {"config": config, "allow_val_change": True}  # such as run.iterations
    tracker.init(project="attnrl", name=run_dir.name, id=run, resume="allow", dir=str(run_dir), **changes)
    return _after(recorded, tracker)


def _after(recorded: int, tracker: Any) -> Observer:
    def mirror(metrics: dict[str, float]) -> None:
        if metrics["iteration"] > recorded:
            tracker.log(metrics, step=int(metrics["iteration"]))

    return mirror


def _run_id(run_dir: Path) -> str:
    """What a tracker knows the run by, however often it is resumed: two directories may have one name."""
    file = run_dir / "tracker_id"
    if not file.exists():
        file.write_text(uuid4().hex[:8])
    return file.read_text()


def _need(name: str) -> Any:
    try:
        return importlib.import_module("tensorboard.summary" if name == "tensorboard" else name)
    except ImportError as error:
        raise MissingExtraError(
            f"run.trackers names {name}, which is not installed: pip install 'attnrl[trackers]'"
        ) from error


OPENERS: dict[str, Callable[[Path, dict[str, Any], int, int], Observer]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
