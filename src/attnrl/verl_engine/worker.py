"""What each rank does: verl's actor worker, one process per GPU, and our verbs over the FSDP2 module of its engine.

A verb is a function of the worker and of what the driver sends; all ranks run it at once.
"""

from __future__ import annotations

import faulthandler
import math
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from attnrl.attention.decoder import check_model, vocabulary_of
from attnrl.config import UpdateConfig
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import objective
from attnrl.policy.packing import Pack
from attnrl.policy.passes import Passes
from attnrl.policy.rates import Counters, learning_rate
from attnrl.ranks import sharded, weights
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring


class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
    """One rank."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def attnrl(self, verb: Callable[..., Any], arguments: Sequence[Any], limit_s: float) -> Any:
        """verb(self, *arguments); past the limit, this process prints the stack of every thread, once."""
        faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__ or sys.stderr)
        try:
            return verb(self, *arguments)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if get_device_name() == "cpu" else torch.device(get_device_name(), get_device_id())


def look(worker: Worker, paths: Sequence[str]) -> tuple[str, list[str]]:
    """The name of this machine, and which of the paths are not there."""
    return socket.gethostname(), [path for path in paths if not Path(path).exists()]


def start(worker: Worker, options: UpdateConfig) -> tuple[int, bool, Any]:
    """Build the model as verl does: its vocabulary's size, whether prefixes are shared, and its generation config."""
    worker.init_model()
    engine = worker.actor.engine
    check_model(engine.module)
    with engine.eval_mode():
        sharded.prepare(engine.module)
    if worker.ref is not None:  # the same model; its weights may lie in host memory
        sharded.prepare(worker.ref.engine.module, check=False)
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    if len(groups) == 1:  # as in the local engine: matrices decay, vectors (norms, biases) do not
        every, group = groups[0]["params"], groups[0]
        vectors = {**group, "params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}
        groups[:] = [{**group, "params": [p for p in every if p.dim() >= 2]}, vectors]
    shares = Passes(options, objective(options)).shares(engine.module)
    return vocabulary_of(engine.module), shares, engine.module.generation_config


def score(
    worker: Worker, requests: Sequence[ScoreRequest], scoring: Scoring, token_budget: int
) -> tuple[list[Scores], ScoreReport]:
    engine = worker.actor.engine
    with engine.eval_mode():
        return sharded.score(engine.module, requests, scoring, token_budget=token_budget, device=worker.device)


def update(
    worker: Worker,
    minibatches: Sequence[Sequence[Sequence[Sample]]],
    options: UpdateConfig,
    temperature: float,
    counters: Counters,
) -> tuple[UpdateMetrics, Counters]:
    """One optimizer step for each minibatch, of which this rank holds microbatches: its metrics, and the counters.

    Paper: Eq. 1.
    """
    engine = worker.actor.engine
    rank = sharded.Rank(Passes(options, objective(options), temperature), worker.device)
    share = rank.passes.shares(engine.module)
    laid_out = [rank.lay_out(packs, share=share) for packs in minibatches]
    nothing = [None] * len(laid_out)
    reference = logprobs(worker.ref.engine, rank, laid_out) if options.kl_weight > 0 else nothing
    old = logprobs(engine, rank, laid_out) if rank.passes.objective.needs_old else nothing
    metrics = UpdateMetrics()
    with engine.train_mode():
        for known in zip(laid_out, reference, old, strict=True):
            step(engine, rank, *known, counters, metrics)
    metrics.sums = {name: value.cpu() for name, value in metrics.sums.items()}
    metrics.ratio_max = None if metrics.ratio_max is None else metrics.ratio_max.cpu()
    return metrics, counters


def logprobs(engine: Any, rank: sharded.Rank, laid_out: Sequence[Sequence[Pack]]) -> list[list[Tensor]]:
    """Log-probs of every microbatch of this rank under one of verl's engines."""
    with engine.eval_mode():
        return [rank.logprobs(engine.module, packs) for packs in laid_out]


def step(
    engine: Any,
    rank: sharded.Rank,
    packs: Sequence[Pack],
    reference: Sequence[Tensor] | None,
    old: Sequence[Tensor] | None,
    counters: Counters,
    metrics: UpdateMetrics,
) -> None:
    """One optimizer step, or none where loss or gradient is not finite; all ranks decide the same."""
    engine.optimizer_zero_grad()
    sync = lambda last: engine._gradient_sync_context(is_last_micro_batch=last)  # noqa: E731
    here = rank.learn(engine.module, packs, reference, old, sync=sync)
    options = rank.passes.options
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(options, counters.updates)
    finite = math.isfinite(sharded.over_ranks([here.total("loss")], rank.device)[0])
    norm = engine.optimizer_step() if finite else math.nan  # clips; makes no step where the norm is not finite
    if math.isfinite(norm):
        counters.made()
        metrics.add(here)
        metrics.norms.append(norm)
    else:
        metrics.skipped += 1
        counters.skip(options.max_bad_updates)


def checksum(worker: Worker, dtype: str) -> tuple[float, float]:
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
