"""Weights from ranks to servers of their own through a file: verl's own ways (nccl, nixl, ...) need a device.

Named as actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module: driver, ranks and servers import it.
"""

import asyncio
import tempfile
from pathlib import Path

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileEngine(CheckpointEngine):
    """The first rank writes all weights, every server reads them; one folder a sync, removed after it."""

    def __init__(self, bucket_size, is_master=False):
        self.is_master, self.folder = is_master, None

    def prepare(self):
        return tempfile.mkdtemp(prefix="verl_cpu_sync_") if self.is_master else None

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return {"folder": [metadata[0]] * actor_wg_world_size}, {"folder": [metadata[0]] * rollout_world_size}

    def init_process_group(self, folder):
        self.folder = Path(folder)

    async def send_weights(self, weights, global_steps=None):
        whole = {name: weight.detach().clone() for name, weight in weights}  # every rank takes part in gathering them
        if self.is_master:
            torch.save(whole, self.folder / "unfinished")
            (self.folder / "unfinished").rename(self.folder / "weights")

    async def receive_weights(self, global_steps=None):
        while not (self.folder / "weights").exists():
            await asyncio.sleep(0.02)
        for name, weight in torch.load(self.folder / "weights").items():
            yield name, weight

    def finalize(self):
        if self.is_master:
            (self.folder / "weights").unlink()
            self.folder.rmdir()
