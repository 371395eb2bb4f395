"""Weights and optimizer of one FSDP2 module, called on every rank in step: written, read, summed. torch only.

Shards are those of torch.distributed.checkpoint, which cuts them anew where the number of ranks has changed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from attnrl.errors import MissingFileError, cut_short, reading
from attnrl.ranks.sharded import over_ranks


def save_shards(folder: Path, module: Any, optimizer: Any) -> None:
    """Every rank writes its part of the weights and, once there was an update, of the optimizer's state."""
    state = {"model": get_model_state_dict(module)}
    if optimizer is not None and optimizer.state:  # torch would make one by a step, and count that step
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    dcp.save(state, checkpoint_id=folder)


def check_shards(folder: Path) -> None:
    """Raise where what `save_shards` wrote is not there, or not all of it; for the driver, before anything starts."""
    if not (folder / ".metadata").is_file():
        raise MissingFileError(f"{folder} holds no shards of weights: {folder.name}/.metadata is missing")
    ends: dict[str, int] = {}  # of each file of shards
    with reading(folder / ".metadata", folder.parent):
        pieces = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    for piece in pieces:
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in ends.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size < end:
            raise cut_short(file, folder.parent)


def load_shards(folder: Path, module: Any, optimizer: Any) -> None:
    """What `save_shards` wrote, at this number of ranks."""
    written = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    learns = optimizer is not None and any(name.startswith("optimizer.") for name in written)
    state: dict[str, Any] = {"model": get_model_state_dict(module)}
    if learns:
        state["optimizer"] = get_optimizer_state_dict(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"])
    if learns:
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
    elif optimizer is not None:
        optimizer.state.clear()


def save_model(folder: Path, module: Any, dtype: str) -> None:
    """The first rank writes a Hugging Face model of this dtype, whose config.json says so."""
    from transformers import AutoModelForCausalLM

    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(copy.deepcopy(module.config), dtype=getattr(torch, dtype))
        plain.generation_config = module.generation_config
        cast = {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in whole.items()}
        plain.save_pretrained(folder, state_dict=cast)
    dist.barrier()


def checksum(module: Any, dtype: str, device: torch.device) -> tuple[float, float]:
    """A sum over all weights as the optimizer has them, and as servers of this dtype get them."""
    sums = [0.0, 0.0]
    for p in module.parameters():
        local = (p.to_local() if isinstance(p, DTensor) else p).detach()
        for i, value in enumerate((local, local.to(getattr(torch, dtype)))):
            flat = value.double().flatten()
            sums[i] += float(flat.abs().sum() + (flat * flat).sum())
    exact, seen = over_ranks(sums, device)
    return exact, seen
