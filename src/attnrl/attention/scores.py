"""From scores to attention: the soft-cap, the softmax and its sinks, in plain torch.

A sink is a learned logit of a head that joins the softmax's sum and stands for no token: what it takes, goes nowhere.

Shapes: T tokens of a row, H query heads, V head size of values; N rows or jobs, Q queries, S keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrl.attention.interface import Layer


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """The scores, drawn smoothly into (-softcap, softcap)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The probabilities of the keys, the last axis; `sinks` broadcasts to the other axes. At least float32."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=wide)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1, dtype=wide)[..., :-1]


def with_sinks(lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Row log-sum-exps of the scores, the sinks among them."""
    return torch.logaddexp(lse_HT, sinks_H.to(lse_HT)[:, None])


def sunk(out_THV: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and row log-sum-exps of attention without sinks, as they are with them."""
    all_HT = with_sinks(lse_HT, sinks_H)
    return (out_THV * torch.exp(lse_HT - all_HT).t()[..., None]).to(out_THV.dtype), all_HT


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed and -inf elsewhere, in the dtype attention computes with."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def dense(q_NHQD: Tensor, k_NHSD: Tensor, v_NHSV: Tensor, mask: Tensor, layer: Layer) -> Tensor:
    """Attention by its matrix of scores, without gradients: [N, H, Q, V].

    H may be key heads, and Q the query heads of each.
    """
    wide = torch.promote_types(q_NHQD.dtype, torch.float32)
    scores = torch.matmul(q_NHQD.to(wide).mul(layer.scale), k_NHSD.to(wide).transpose(2, 3))
    sinks = None if layer.sinks_H is None else layer.sinks_H.reshape(q_NHQD.shape[1], -1, 1)
    weights = softmax(capped(scores, layer.softcap).add_(mask), sinks)
    return torch.matmul(weights, v_NHSV.to(wide)).to(q_NHQD.dtype)


def fused(q_NHQD: Tensor, k_NHSD: Tensor, v_NHSV: Tensor, mask: Tensor, layer: Layer) -> Tensor:
    """As `dense`, by torch's own kernel where it computes what the layer asks for."""
    if not layer.plain:
        return dense(q_NHQD, k_NHSD, v_NHSV, mask, layer)
    return F.scaled_dot_product_attention(q_NHQD, k_NHSD, v_NHSV, attn_mask=mask, scale=layer.scale)
