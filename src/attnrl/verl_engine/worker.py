"""What each rank is: verl's actor worker, one process per GPU, and our verbs over the FSDP2 module of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from attnrl.attention.decoder import vocabulary_of
from attnrl.config import UpdateConfig
from attnrl.policy.objective import objective
from attnrl.policy.passes import Passes
from attnrl.ranks.sharded import Rank, make_rank
from attnrl.ranks.watch import traced


class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
    """One rank."""

    ours: Rank  # made by `start`

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def attnrl(self, verb: Callable[..., Any], arguments: Sequence[Any], limit_s: float) -> Any:
        """verb(self, *arguments), traced."""
        with traced(limit_s):
            return verb(self, *arguments)


def start(worker: Worker, options: UpdateConfig, temperature: float) -> tuple[int, bool, Any]:
    """Build the model as verl does: its vocabulary's size, whether prefixes are shared, and its generation config."""
    worker.init_model()
    engine, name = worker.actor.engine, get_device_name()
    reference = None if worker.ref is None else worker.ref.engine
    passes = Passes(options, objective(options), temperature)
    device = torch.device("cpu") if name == "cpu" else torch.device(name, get_device_id())
    worker.ours = make_rank(engine, reference, passes, device, engine._gradient_sync_context)
    return vocabulary_of(engine.module), worker.ours.shares, engine.module.generation_config
