"""verl's FSDP2 engine on the CPU. Named as actor_rollout_ref.model.external_lib: ranks load it before their model."""

import os
import time

import torch.distributed as dist
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngine(FSDPEngineWithLMHead):
    """verl registers its engine for cuda and npu only; a forward-only one would pin memory, which needs a device."""

    def _build_fsdp_module(self, module):
        forward_only = self.engine_config.forward_only
        object.__setattr__(self.engine_config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(self.engine_config, "forward_only", forward_only)


class CPUTrainingWorker(TrainingWorker):
    def __init__(self, config):
        if not dist.is_initialized():  # verl would ask for "cpu:gloo,cpu:gloo"
            dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        super().__init__(config)


ActorRolloutRefWorker.actor_worker_cls = ActorRolloutRefWorker.ref_worker_cls = CPUTrainingWorker


def stand_until(worker, path, seconds):
    """A verb that waits for a file: whether it came in time."""
    until = time.monotonic() + seconds
    while not (found := os.path.exists(path)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def stand_still(worker, seconds):
    """A verb of the ranks that takes its time."""
    time.sleep(seconds)
    return seconds
