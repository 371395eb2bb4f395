"""What an attention layer does over pages: stores the new keys and values, then reads each row or path.

Shapes: R rows, T packed tokens, H query heads, K key/value heads, D and E head sizes of keys and values, M pages of the
longest row or path, J paths, B query blocks. Without Triton the pages are gathered and read by torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnrl.attention.interface import Layer
from attnrl.attention.pages import PAGE, PagePool
from attnrl.attention.scores import additive, dense
from attnrl.attention.trie import QUERY_BLOCK

try:
    from attnrl.attention import paged_triton, paths_triton, triton_parts

    kernels: Any = paged_triton
except ImportError:  # triton is published for Linux on x86-64 only
    kernels = None
hopper: Any = None
if kernels is not None and triton_parts.GLUON:
    from attnrl.attention import paths_hopper

    hopper = paths_hopper


def has_kernels(device: torch.device) -> bool:
    """Whether Triton runs on this device; in its interpreter it runs on any."""
    return kernels is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def starts_early(device: torch.device) -> bool:
    """Whether decode attention is on this device before the kernel before it has ended (`early.py`)."""
    return kernels is not None and bool(kernels.early(device))


def failures() -> tuple[type[Exception], ...]:
    """What a forward can fail by."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)


def places(table_RM: Tensor, lengths_R: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """The slot that each row's new token takes, and its position: at most `last`, also of rows that ran on past it."""
    if has_kernels(lengths_R.device):
        found: tuple[Tensor, Tensor] = kernels.places(table_RM, lengths_R, last)
        return found
    page_R = table_RM.gather(1, (lengths_R // PAGE)[:, None])[:, 0]
    return page_R.long() * PAGE + lengths_R % PAGE, lengths_R.clamp(max=last)


@dataclass(frozen=True, slots=True, eq=False)
class PagedDecode:
    """One token a row. Rows beyond the running ones stand at position 0 of page 0."""

    pool: PagePool
    table_RM: Tensor  # int32
    lengths_R: Tensor  # tokens before the new one
    slots_T: Tensor  # where it goes
    positions_R: Tensor  # what the model is told of where it stands
    single_I5: Tensor
    shared_I5: Tensor | None
    splits_R: Tensor | None
    scratch: tuple[Tensor, Tensor] | None

    def at_ends(self) -> PagedDecode:
        """A row's one token is its last."""
        return self

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output [R, 1, H, E] for q [R, H, 1, D] and k, v [R, K, 1, D], as transformers asks for it."""
        self.pool.store(layer.index, self.slots_T, k[:, :, 0], v[:, :, 0])
        out_RW = self.read(layer, q[:, :, 0].contiguous())
        return out_RW.view(q.shape[0], 1, q.shape[1], -1)

    def stored(self, layer: int) -> None:
        """Called once the layer's keys and values are in their slots."""

    def read(self, layer: Layer, q_RHD: Tensor) -> Tensor:
        """The attention output [R, H * E] over what is stored."""
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        if not has_kernels(q_RHD.device):
            return _gathered(q_RHD, keys, values, self.table_RM, self.lengths_R, layer)
        out: Tensor = kernels.decode(
            q_RHD,
            keys,
            values,
            self.table_RM,
            self.lengths_R,
            self.single_I5,
            self.shared_I5,
            self.splits_R,
            self.scratch,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks_H=layer.sinks_H,
            tile=(1, 3) if q_RHD.dtype != torch.float32 else (4, 2),
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class PagedPrefill:
    """Contexts packed as a trie: every token stands once and attends along its own path to the root.

    A token that ends up in several rows' pages is stored in one of them and copied to the others.
    """

    pool: PagePool
    slots_T: Tensor
    copies: tuple[Tensor, Tensor] | None  # slots: from, to
    table_JM: Tensor  # int32
    blocks_B4: Tensor  # int32: first packed query, queries, position of the first, path
    ends_N4: Tensor  # as blocks, for the last query of each run alone

    def at_ends(self) -> PagedPrefill:
        """The same for the last queries of the runs alone, in their order."""
        return replace(self, blocks_B4=self.ends_N4)

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output [1, T, H, E] for q [1, H, T, D] and k, v [1, K, T, D], as transformers asks for it."""
        self.pool.store(layer.index, self.slots_T, k[0].transpose(0, 1), v[0].transpose(0, 1))
        self.stored(layer.index)
        out_TW = self.read(layer, q[0].transpose(0, 1).contiguous())
        return out_TW.view(1, q.shape[2], q.shape[1], -1)

    def stored(self, layer: int) -> None:
        """Called once the layer's keys and values are in their slots."""
        if self.copies is not None:
            self.pool.copy(layer, *self.copies)

    def read(self, layer: Layer, q_THD: Tensor) -> Tensor:
        """The attention output [T, H * E] over what is stored."""
        keys, values = self.pool.keys[layer.index], self.pool.values[layer.index]
        if not has_kernels(q_THD.device):
            out_THE = q_THD.new_empty(*q_THD.shape[:2], values.shape[3])
            for first, count, position, path in self.blocks_B4.tolist():
                at = torch.arange(position, position + count, device=q_THD.device)
                queries, table = q_THD[first : first + count], self.table_JM[path].expand(count, -1)
                out = _gathered(queries, keys, values, table, at, layer)
                out_THE[first : first + count] = out.view(count, q_THD.shape[1], -1)
            return out_THE.flatten(1)
        out_TW: Tensor
        if hopper is not None and layer.plain and hopper.fits(q_THD, keys, values, layer.window):
            out_TW = hopper.paths(q_THD, keys, values, self.table_JM, self.blocks_B4, scale=layer.scale)
            return out_TW
        out_TW = paths_triton.paths(
            q_THD,
            keys,
            values,
            self.table_JM,
            self.blocks_B4,
            QUERY_BLOCK,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks_H=layer.sinks_H,
            tile=(64, 4, 3) if q_THD.dtype != torch.float32 else (32, 4, 2),
        )
        return out_TW


def _gathered(q_RHD: Tensor, keys: Tensor, values: Tensor, table_RM: Tensor, newest_R: Tensor, layer: Layer) -> Tensor:
    """Attention of one query a row over its pages, gathered: [R, H * E]."""
    rows, heads, dim = q_RHD.shape
    span = int(newest_R.max()) // PAGE + 1
    table = table_RM[:, :span].long()
    k_RKLD = keys[table].transpose(1, 2).flatten(2, 3)
    v_RKLE = values[table].transpose(1, 2).flatten(2, 3)
    positions_L = torch.arange(k_RKLD.shape[2], device=q_RHD.device)
    seen_RL = positions_L <= newest_R[:, None]
    if layer.window is not None:
        seen_RL &= positions_L > newest_R[:, None] - layer.window
    q_RKGD = q_RHD.reshape(rows, keys.shape[1], -1, dim)
    # What was never written may be NaN, and NaN is neither hidden by -inf nor by 0.
    k_RKLD, v_RKLE = (x.masked_fill(~seen_RL[:, None, :, None], 0.0) for x in (k_RKLD, v_RKLE))
    mask_R11L = additive(seen_RL, torch.float32)[:, None, None]
    return dense(q_RKGD, k_RKLD, v_RKLE, mask_R11L, layer).reshape(rows, heads * values.shape[3])
