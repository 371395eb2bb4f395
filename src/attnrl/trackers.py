"""Trackers mirror metrics.jsonl, which is the truth. Each is an optional package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnrl.errors import MissingExtraError

Observer = Callable[[dict[str, float]], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise MissingExtraError where a tracker is not installed."""
    for name in names:
        _need(name)


def open_trackers(names: Sequence[str], run_dir: Path, config: dict[str, Any]) -> list[Observer]:
    """One observer of metrics per tracker named; they see what a resumed run records anew once more."""
    return [OPENERS[name](run_dir, config) for name in names]


def _tensorboard(run_dir: Path, config: dict[str, Any]) -> Observer:
    writer = _need("tensorboard").Writer(str(run_dir / "tensorboard"))

    def mirror(metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step=int(metrics["iteration"]))
        writer.flush()

    return mirror


def _trackio(run_dir: Path, config: dict[str, Any]) -> Observer:
    return _wandb_like(_need("trackio"), run_dir, config)


def _wandb(run_dir: Path, config: dict[str, Any]) -> Observer:
    return _wandb_like(_need("wandb"), run_dir, config)


def _wandb_like(tracker: Any, run_dir: Path, config: dict[str, Any]) -> Observer:
    tracker.init(project="attnrl", name=run_dir.name, config=config)
    return lambda metrics: tracker.log(metrics, step=int(metrics["iteration"]))


def _need(name: str) -> Any:
    try:
        return importlib.import_module("tensorboard.summary" if name == "tensorboard" else name)
    except ImportError as error:
        raise MissingExtraError(
            f"run.trackers names {name}, which is not installed: pip install 'attnrl[trackers]'"
        ) from error


OPENERS: dict[str, Callable[[Path, dict[str, Any]], Observer]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
