"""Path attention in half precision on a CUDA device, forward and back, without a matrix of scores.

On Hopper GPUs these are kernels of our own (`paths_hopper`, `back_hopper`); elsewhere, and for layers they do not fit,
aten's. Ours are compared with aten's on the first input of each kind, and left with a word where they differ.

Shapes: T tokens of a row, S tokens of all paths, H query heads, K key/value heads, D and V head sizes of keys and
values, J paths, B query blocks, I key blocks.
"""

# mypy: disable-error-code="untyped-decorator,misc,no-untyped-call"
# torch.library and torch.autograd.Function have no types.

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrl.attention.paged import failures, hopper
from attnrl.attention.pages import rows_readable
from attnrl.attention.scores import sunk
from attnrl.attention.trie import Runs

FLASH, OURS = "flash_varlen", "hopper_paths"
NEAR = {"outputs": 0.02, "log-sum-exps": 1e-3, "gradients": 0.04}  # relative differences that rounding explains
SMALL = 1e-3  # of the largest of several results: less than this is nothing
_left: set[tuple[int, ...]] = set()  # heads and head sizes for which ours were found to differ, or to fail
_seen: set[tuple[object, ...]] = set()  # kinds of inputs on which they were compared


def flash(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    runs: Runs,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor, str]:
    """Outputs [T, H, V], row log-sum-exp [H, T] in nats, without gradient, and whose kernels ran."""
    if window is None and sinks_H is None and hopper is not None:
        q, k, v = (_in_rows(x) for x in (q_THD, k_SKD, v_SKV))
        if hopper.packed_fits(q, k, v):
            # also where ours were left: a layer that runs again must meet the same op
            out_THD, lse_HT = torch.ops.attnrl.paths(
                q, k, v, *runs.blocks(q.device), *runs.ends(q.device), max(runs.fresh), max(runs.lengths), scale
            )
            return out_THD, lse_HT.detach(), FLASH if _shape(q, k) in _left else OURS
    # one flash kernel over all runs; with fewer queries than keys its causal mask is aligned to the last of both
    head, value = q_THD.shape[-1], v_SKV.shape[-1]
    wide = -(-head // 8) * 8  # the kernel takes multiples of 8; zeros change neither scores nor outputs
    q, k = (F.pad(x, (0, wide - head)) if wide > head else x for x in (q_THD, k_SKD))
    v = F.pad(v_SKV, (0, wide - value)) if wide > value else v_SKV
    how = (*runs.ends(q.device), max(runs.fresh), max(runs.lengths), 0.0, window is None)
    sides = {"window_size_left": -1, "window_size_right": -1}
    if window is not None:
        sides = {"window_size_left": window - 1, "window_size_right": 0}
    if sinks_H is not None:
        out, lse_HT = _Sunk.apply(q, k, v, sinks_H, how, {"scale": scale, **sides})
    else:
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *how, False, scale=scale, **sides)
    return out[..., :value], lse_HT, FLASH


class _Sunk(torch.autograd.Function):
    """aten's attention with sinks: its outputs take the share that the sinks leave.

    Its backward needs nothing new. From a log-sum-exp with the sinks in it, it computes the model's probabilities
    again; and what it takes from each score's gradient is the product of outputs and their gradients, as with a sink.
    """

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, sinks_H: Tensor, how: tuple[Any, ...], given: Any
    ) -> tuple[Tensor, Tensor]:
        out_THV, lse_HT, *_ = torch.ops.aten._flash_attention_forward(q_THD, k_SKD, v_SKV, *how, False, **given)
        out_THV, lse_HT = sunk(out_THV, lse_HT, sinks_H)
        ctx.save_for_backward(q_THD, k_SKD, v_SKV, sinks_H, out_THV, lse_HT)
        ctx.how, ctx.given = how, given
        ctx.mark_non_differentiable(lse_HT)
        return out_THV, lse_HT

    @staticmethod
    def backward(ctx: Any, g_THV: Tensor, _g_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out_THV, lse_HT = ctx.saved_tensors
        g = _in_rows(g_THV)
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of no dropout
        of_qkv = torch.ops.aten._flash_attention_backward(
            g, q, k, v, out_THV, lse_HT, *ctx.how, none, none[:0], **ctx.given
        )
        share_HT = torch.exp(sinks_H.to(lse_HT)[:, None] - lse_HT)
        of_sinks_H = -(share_HT * (g.to(lse_HT) * out_THV).sum(-1).t()).sum(1)
        return *of_qkv, of_sinks_H.to(sinks_H), None, None


def _shape(q_THD: Tensor, k_SKD: Tensor) -> tuple[int, ...]:
    return (*q_THD.shape[1:], k_SKD.shape[1])


def _in_rows(x: Tensor) -> Tensor:
    """The tensor as the copy engine can read it: itself where that will do."""
    return x if rows_readable(x) else x.contiguous()


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
    def by_aten() -> tuple[Tensor, ...]:
        how = (ends_q, ends_k, most_q, most_k, 0.0, True, False)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q_THD, k_SKD, v_SKD, *how, scale=scale)
        return out, lse

    def by_ours() -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = hopper.packed(q_THD, k_SKD, v_SKD, starts_J, blocks_B4, scale=scale)
        return made

    kinds = ("outputs", "log-sum-exps")
    out_THD, lse_HT = _chosen(by_ours, by_aten, kinds, _kind("forward", q_THD, k_SKD, starts_J))
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

    def by_ours() -> tuple[Tensor, ...]:
        from attnrl.attention import back_hopper

        return back_hopper.back(g, q, k, v, out, lse, starts, blocks, items, slots, scale=ctx.scale)

    return (*_chosen(by_ours, by_aten, ("gradients",) * 3, _kind("back", q, k, starts)), *[None] * 9)


_paths.register_autograd(_back, setup_context=_keep)


def _kind(way: str, q_THD: Tensor, k_SKD: Tensor, starts_J: Tensor) -> tuple[object, ...]:
    """What a comparison stands for: the layer's heads, then one run or several, with and without shared keys."""
    several, shares = len(starts_J) > 1, len(k_SKD) != len(q_THD)
    return (_shape(q_THD, k_SKD), way, q_THD.dtype, q_THD.device, several, shares)


def _chosen(
    by_ours: Callable[[], tuple[Tensor, ...]],
    by_aten: Callable[[], tuple[Tensor, ...]],
    names: tuple[str, ...],
    kind: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Our results, on the first input of its kind compared with aten's; aten's where ours fail or differ, and then on.

    It is said where ours are left.
    """
    shape = kind[0]
    if shape in _left:
        return by_aten()
    if kind in _seen:
        return by_ours()
    try:
        ours = by_ours()
    except torch.OutOfMemoryError:
        raise  # which says nothing of a kernel
    except failures() as error:
        theirs, why = by_aten(), f"fails ({type(error).__name__}: {str(error)[:200]})"
    else:
        theirs, why = by_aten(), ""
        least = SMALL * max(_length(other) for other in theirs)  # gradients of a lone token's query and key are 0
        for name, mine, other in zip(names, ours, theirs, strict=True):
            apart = _length(mine - other) / max(_length(other), least, 1e-12)
            if not apart <= NEAR[name]:  # also where it is not a number
                why = f"gives {name} that differ from aten's by {apart:.1%}"
                break
    _seen.add(kind)
    if not why:
        return ours
    _left.add(shape)
    warnings.warn(f"our attention {why} on this device; aten's is used", RuntimeWarning, stacklevel=2)
    return theirs


def _length(x: Tensor) -> float:
    """The norm, in float32 without a copy: a first input can be large."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float32))
