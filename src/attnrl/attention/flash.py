"""Path attention in half precision on a CUDA device, forward and back, without a matrix of scores.

On Hopper GPUs these are kernels of our own (`paths_hopper`, `back_hopper`); elsewhere, and for layers they do not fit,
aten's. Ours are compared with aten's on the first input of each shape, and left with a word where they differ.

Shapes: T tokens of a row, S tokens of all paths, H query heads, K key/value heads, D and V head sizes of keys and
values, J paths, B query blocks, I key blocks.
"""

# mypy: disable-error-code="untyped-decorator"
# torch.library has no types.

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrl.attention.paged import hopper
from attnrl.attention.trie import Runs

FLASH, OURS = "flash_varlen", "hopper_paths"
NEAR = {"outputs": 0.02, "log-sum-exps": 1e-3, "gradients": 0.04}  # relative differences that rounding explains
_left: set[tuple[int, ...]] = set()  # shapes on which ours were found to differ
_seen: set[tuple[object, ...]] = set()  # shapes on which they were compared


def flash(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, runs: Runs, scale: float, window: int | None
) -> tuple[Tensor, Tensor, str]:
    """Outputs [T, H, V], row log-sum-exp [H, T] in nats, and whose kernels ran."""
    if window is None and hopper is not None and _shape(q_THD, k_SKD) not in _left:
        q, k, v = (_in_rows(x) for x in (q_THD, k_SKD, v_SKV))
        if hopper.packed_fits(q, k, v):
            found: tuple[Tensor, Tensor] = torch.ops.attnrl.paths(
                q, k, v, *runs.blocks(q.device), *runs.ends(q.device), max(runs.fresh), max(runs.lengths), scale
            )
            return *found, OURS
    return *_aten(q_THD, k_SKD, v_SKV, runs, scale, window), FLASH


def _aten(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, runs: Runs, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """One flash kernel over all runs; with fewer queries than keys its causal mask is aligned to the last of both."""
    head, value = q_THD.shape[-1], v_SKV.shape[-1]
    wide = -(-head // 8) * 8  # the kernel takes multiples of 8; zeros change neither scores nor outputs
    q, k = (F.pad(x, (0, wide - head)) if wide > head else x for x in (q_THD, k_SKD))
    v = F.pad(v_SKV, (0, wide - value)) if wide > value else v_SKV
    out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *runs.ends(q.device),
        max(runs.fresh),
        max(runs.lengths),
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
    )
    return out[..., :value], lse_HT


def _shape(q_THD: Tensor, k_SKD: Tensor) -> tuple[int, ...]:
    return (*q_THD.shape[1:], k_SKD.shape[1])


def _in_rows(x: Tensor) -> Tensor:
    """The tensor itself where the heads of a token lie side by side, and so that the copy engine takes its rows."""
    side_by_side = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if side_by_side else x.contiguous()


# An op of torch's own, so that recomputation can keep what it returns.
@torch.library.custom_op("attnrl::paths", mutates_args=())
def _paths(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    starts_J: Tensor,
    blocks_B4: Tensor,
    items_I6: Tensor,
    slots_T: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int,
    most_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out_THD, lse_HT = hopper.packed(q_THD, k_SKD, v_SKD, starts_J, blocks_B4, scale=scale)
    if _first("forward", q_THD, k_SKD):
        aten = torch.ops.aten._flash_attention_forward
        theirs, lse, *_ = aten(q_THD, k_SKD, v_SKD, ends_q, ends_k, most_q, most_k, 0.0, True, False, scale=scale)
        pairs = {"outputs": [(out_THD, theirs)], "log-sum-exps": [(lse_HT, lse)]}
        if not _agree(pairs, q_THD, k_SKD):
            return theirs, lse
    return out_THD, lse_HT


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.most_q, ctx.most_k, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, g_THD: Tensor, _g_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, starts, blocks, items, slots, ends_q, ends_k, out, lse = ctx.saved_tensors
    g = _in_rows(g_THD)

    def by_aten() -> tuple[Tensor, ...]:
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of no dropout
        how = (ends_q, ends_k, ctx.most_q, ctx.most_k, 0.0, True, none, none[:0])
        made: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(g, q, k, v, out, lse, *how, scale=ctx.scale)
        return made

    if _shape(q, k) in _left:
        grads = by_aten()
    else:
        from attnrl.attention import back_hopper

        grads = back_hopper.back(g, q, k, v, out, lse, starts, blocks, items, slots, scale=ctx.scale)
        if _first("back", q, k):
            theirs = by_aten()
            if not _agree({"gradients": list(zip(grads, theirs, strict=True))}, q, k):
                grads = theirs
    return (*grads, *[None] * 9)


_paths.register_autograd(_back, setup_context=_keep)


def _first(way: str, q_THD: Tensor, k_SKD: Tensor) -> bool:
    """Whether this is the first input of its shape."""
    key = (way, q_THD.dtype, q_THD.device, *_shape(q_THD, k_SKD))
    new = key not in _seen
    _seen.add(key)
    return new


def _agree(pairs: dict[str, list[tuple[Tensor, Tensor]]], q_THD: Tensor, k_SKD: Tensor) -> bool:
    """Whether our results are aten's up to rounding; where they are not, it is said, and ours are left."""
    for what, both in pairs.items():
        for ours, theirs in both:
            apart = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12))
            if not apart <= NEAR[what]:  # also where it is not a number
                _left.add(_shape(q_THD, k_SKD))
                message = f"our attention's {what} differ from aten's by {apart:.1%} on this device; aten's is used"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
                return False
    return True
