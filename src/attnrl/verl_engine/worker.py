"""What each rank does: verl's actor worker, one process per GPU, and our verbs over the FSDP2 module of its engine.

A verb is a function of the worker and of what the driver sends; all ranks run it at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from attnrl.attention.decoder import check_model, vocabulary_of
from attnrl.config import UpdateConfig
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import objective
from attnrl.policy.passes import Passes
from attnrl.policy.rates import Counters
from attnrl.ranks import sharded, weights
from attnrl.ranks.arrival import Checksum
from attnrl.ranks.watch import traced
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring


class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
    """One rank."""

    ours: sharded.Rank  # made by `start`

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def attnrl(self, verb: Callable[..., Any], arguments: Sequence[Any], limit_s: float) -> Any:
        """verb(self, *arguments), traced."""
        with traced(limit_s):
            return verb(self, *arguments)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if get_device_name() == "cpu" else torch.device(get_device_name(), get_device_id())


def look(worker: Worker, paths: Sequence[str]) -> tuple[str, list[str]]:
    """The name of this machine, and which of the paths are not there."""
    return socket.gethostname(), [path for path in paths if not Path(path).exists()]


def start(worker: Worker, options: UpdateConfig, temperature: float) -> tuple[int, bool, Any]:
    """Build the model as verl does: its vocabulary's size, whether prefixes are shared, and its generation config."""
    worker.init_model()
    engine = worker.actor.engine
    check_model(engine.module)
    with engine.eval_mode():
        sharded.prepare(engine.module)
    if worker.ref is not None:  # the same model; its weights may lie in host memory
        sharded.prepare(worker.ref.engine.module, check=False)
    if engine.optimizer is not None:
        sharded.decay_matrices_alone(engine.optimizer)
    worker.ours = sharded.Rank(Passes(options, objective(options), temperature), worker.device)
    return vocabulary_of(engine.module), worker.ours.passes.shares(engine.module), engine.module.generation_config


def score(
    worker: Worker, requests: Sequence[ScoreRequest], scoring: Scoring, token_budget: int
) -> tuple[list[Scores], ScoreReport]:
    engine = worker.actor.engine
    with engine.eval_mode():
        return sharded.score(engine.module, requests, scoring, token_budget=token_budget, device=worker.device)


def update(
    worker: Worker, minibatches: Sequence[Sequence[Sequence[Sample]]], counters: Counters
) -> tuple[UpdateMetrics, Counters]:
    """One optimizer step for each minibatch, of which this rank holds microbatches. Paper: Eq. 1."""
    engine = worker.actor.engine
    reference = None if worker.ref is None else worker.ref.engine
    metrics = worker.ours.update(engine, reference, minibatches, counters, sync=engine._gradient_sync_context)
    return metrics, counters


def checksum(worker: Worker, dtype: str) -> Checksum:
    return weights.checksum(worker.actor.engine.module, dtype, worker.device)


def save(worker: Worker, path: str, dtype: str) -> None:
    """Shards to `actor/`, a Hugging Face model of this dtype to `model/`."""
    engine = worker.actor.engine
    with engine.train_mode():
        weights.save_shards(Path(path, "actor"), engine.module, engine.optimizer)
        weights.save_model(Path(path, "model"), engine.module, dtype)


def load(worker: Worker, path: str) -> None:
    engine = worker.actor.engine
    with engine.train_mode():
        weights.load_shards(Path(path, "actor"), engine.module, engine.optimizer)


def memory(worker: Worker) -> float:
    """Most device memory held since last asked, GB; 0 without a GPU."""
    if worker.device.type != "cuda":
        return 0.0
    held: float = torch.cuda.max_memory_allocated(worker.device) / 1e9
    torch.cuda.reset_peak_memory_stats(worker.device)
    return held
