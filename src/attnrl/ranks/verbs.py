"""What a driver asks of ranks, however the question gets there.

A verb is a function of a worker, the process that holds a rank, and of what the driver sends; all ranks run it at once.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from attnrl.policy.metrics import UpdateMetrics, peak_memory
from attnrl.policy.rates import Counters
from attnrl.ranks import sharded, weights
from attnrl.ranks.arrival import Checksum
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring


class Worker(Protocol):
    """One process of those that work together."""

    ours: sharded.Rank  # made once its model is loaded


def look(worker: object, paths: Sequence[str]) -> tuple[str, list[str]]:
    """The name of this machine, and which of the paths are not there; before a model is loaded."""
    return socket.gethostname(), [path for path in paths if not Path(path).exists()]


def score(
    worker: Worker, requests: Sequence[ScoreRequest], scoring: Scoring, token_budget: int
) -> tuple[list[Scores], ScoreReport]:
    rank = worker.ours
    with rank.policy.eval_mode():
        return sharded.score(rank.policy.module, requests, scoring, token_budget=token_budget, device=rank.device)


def update(
    worker: Worker, minibatches: Sequence[Sequence[Sequence[Sample]]], counters: Counters
) -> tuple[UpdateMetrics, Counters]:
    """One optimizer step for each minibatch, of which this rank holds microbatches. Paper: Eq. 1."""
    return worker.ours.update(minibatches, counters), counters


def checksum(worker: Worker, dtype: str) -> Checksum:
    return weights.checksum(worker.ours.policy.module, dtype, worker.ours.device)


def save(worker: Worker, path: str, dtype: str) -> None:
    """Shards to `actor/`, a Hugging Face model of this dtype to `model/`."""
    policy = worker.ours.policy
    with policy.train_mode():
        weights.save_shards(Path(path, "actor"), policy.module, policy.optimizer)
        weights.save_model(Path(path, "model"), policy.module, dtype)


def load(worker: Worker, path: str) -> None:
    policy = worker.ours.policy
    with policy.train_mode():
        weights.load_shards(Path(path, "actor"), policy.module, policy.optimizer)


def memory(worker: Worker) -> float:
    """Most device memory held since last asked, GB; 0 without a GPU."""
    return peak_memory(worker.ours.device)
