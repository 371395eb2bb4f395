"""Path attention: several sequences in one row, each seeing only itself. Exact and differentiable.

A pack is a trie that shares nothing; with shared prefixes, the queries of a run see the keys of its whole path, and
every other layer of the model works on each distinct token once.

Shapes: T tokens of a row (no padding), S tokens of all paths, H query heads, K key/value heads, D and V head sizes of
keys and values.
A pack is `model(input_ids=[1, T], position_ids=[1, T] restarting at 0 in each sequence)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from attnrl.attention.decoder import check_model, evaluating, lone_from, remembers, vocabulary_of
from attnrl.attention.flash import FLASH, flash
from attnrl.attention.interface import Layer, attending
from attnrl.attention.scores import capped, softmax
from attnrl.attention.trie import Runs, apart
from attnrl.errors import ConfigError

SDPA, BLOCKS = "sdpa_per_sequence", "torch_blocks"
FLASH_MAX_HEAD = 256  # largest head size of the aten flash kernels
BLOCK = 512  # query rows at a time where scores are built by hand
TEXT = 40  # tokens on which a model is tried
# Mean gap of log-probs, in nats, that rounding explains: in float32, and in half precision, where a wrong mask on a
# trained model makes several times as much.
ROUNDING, HALF_ROUNDING = {torch.float32: 1e-3}, 0.1
FUSED_ONLY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


class Collector(Protocol):
    """Sees the queries and keys of every attention layer, after rotary embedding, in a no-grad context."""

    def __call__(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        lse_HT: Tensor | None,  # row log-sum-exp in nats where the kernel gave one
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,  # `lse_HT` has them in it
    ) -> None: ...


@dataclass(slots=True, eq=False)
class PathAttention:
    """Each run attends causally along its path; and what was done."""

    runs: Runs
    collector: Collector | None = None
    kinds: set[str] = field(default_factory=set)  # which implementations ran
    calls: int = 0  # attention layers seen

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output [1, T, H, V] for q [1, H, T, D], k [1, K, T, D] and v [1, K, T, V]."""
        if q.shape[0] != 1:
            raise ConfigError(f"packed attention takes one row, input_ids [1, T]; the model got {q.shape[0]}")
        # squeezed: the gradient of [0] would be a copy
        q_THD, k_TKD, v_TKV = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        if len(q_THD) != sum(self.runs.fresh):
            raise ConfigError(f"the pack has {sum(self.runs.fresh)} tokens, the model got {len(q_THD)}")
        longest = max(self.runs.lengths)
        window = layer.window if layer.window is not None and layer.window < longest else None
        how: dict[str, Any] = {"scale": layer.scale, "window": window, "softcap": layer.softcap}
        how["sinks_H"] = layer.sinks_H
        out_THV, lse_HT, kind = attend(q_THD, k_TKD, v_TKV, self.runs, **how)
        self.kinds.add(kind)
        self.calls += 1
        if self.collector is not None:
            with torch.no_grad():
                self.collector(q_THD, k_TKD, lse_HT, **how)
        return out_THV[None]


def packed_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Position ids [1, T] that restart in each sequence.

    >>> packed_positions([2, 3]).tolist()
    [[0, 1, 0, 1, 2]]
    """
    return torch.cat([torch.arange(n) for n in lengths])[None].to(device)


def attention_kind(
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    *,
    value_size: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> str:
    """The attention implementation that a layer of this shape gets.

    `flash_varlen`: one flash kernel over the pack (CUDA, half precision), on Hopper GPUs ours where it fits
    (`hopper_paths`). `sdpa_per_sequence`: torch's fused attention, sequence by sequence. `torch_blocks`: scores by
    query blocks, for a soft-cap, and for a window or sinks without flash.

    >>> attention_kind("cuda", torch.bfloat16, 128), attention_kind("cpu", torch.float32, 64)
    ('flash_varlen', 'sdpa_per_sequence')
    >>> attention_kind("cpu", torch.float32, 64, window=4)
    'torch_blocks'
    """
    same_size = value_size is None or value_size == head_size
    half_on_cuda = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if half_on_cuda and softcap is None and (value_size or 0) <= head_size <= FLASH_MAX_HEAD:
        return FLASH
    if softcap is not None or window is not None or sinks or not same_size:
        return BLOCKS
    return SDPA


def attend(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    runs: Runs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, str]:
    """Causal attention along paths: outputs [T, H, V], row log-sum-exp [H, T] where known, and the kind used."""
    head, value = q_THD.shape[-1], v_TKV.shape[-1]
    asked: dict[str, Any] = {"value_size": value, "window": window, "softcap": softcap, "sinks": sinks_H is not None}
    kind = attention_kind(q_THD.device.type, q_THD.dtype, head, **asked)
    k_SKD, v_SKV = k_TKD, v_TKV
    if runs.paths_S is not None:
        # one gather for all runs: gathering run by run would make a gradient of T tokens for each
        k_SKD, v_SKV = k_TKD.index_select(0, runs.paths_S), v_TKV.index_select(0, runs.paths_S)
    if kind == FLASH:
        return flash(q_THD, k_SKD, v_SKV, runs, scale, window, sinks_H)
    groups = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD = k_SKD.repeat_interleave(groups, 1) if groups > 1 else k_SKD
    v_SHV = v_SKV.repeat_interleave(groups, 1) if groups > 1 else v_SKV
    queries = q_THD.split(list(runs.fresh))
    keys, values = k_SHD.split(list(runs.lengths)), v_SHV.split(list(runs.lengths))
    outs = []
    with sdpa_kernel(FUSED_ONLY) if kind == SDPA else nullcontext():  # the math kernel would build T x T scores
        for part in zip(queries, keys, values, strict=True):
            q, k, v = (x.transpose(0, 1) for x in part)
            out = _fused(q, k, v, scale) if kind == SDPA else _by_blocks(q, k, v, scale, window, softcap, sinks_H)
            outs.append(out.transpose(0, 1))
    return torch.cat(outs), None, kind


def _fused(q_HTD: Tensor, k_HSD: Tensor, v_HSV: Tensor, scale: float) -> Tensor:
    """Torch's own attention of one run over its path, [H, T, V]."""
    rows = (q_HTD[None], k_HSD[None], v_HSV[None])
    fresh, length = q_HTD.shape[1], k_HSD.shape[1]
    if fresh == length:
        return F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)[0]
    sees = torch.ones(fresh, length, dtype=torch.bool, device=q_HTD.device).tril(length - fresh)
    return F.scaled_dot_product_attention(*rows, attn_mask=sees, scale=scale)[0]


def masked_scores(
    q_HQD: Tensor,
    k_HTD: Tensor,
    first_query: int,
    first_key: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Scores [H, Q, keys] of one query block as the model's softmax sees them, -inf where a query may not look.

    Of one head, without the first axis, also.
    """
    scores = capped(torch.matmul(q_HQD, k_HTD.transpose(-1, -2)) * scale, softcap)
    query = torch.arange(first_query, first_query + q_HQD.shape[-2], device=q_HQD.device)[:, None]
    key = torch.arange(first_key, first_key + k_HTD.shape[-2], device=q_HQD.device)[None, :]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return scores.masked_fill(hidden, float("-inf"))


def _one_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: tuple[int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    scores = masked_scores(q, k, *at, scale, window, softcap)
    sinks_H11 = None if sinks_H is None else sinks_H[:, None, None]
    return torch.matmul(softmax(scores, sinks_H11).to(v.dtype), v)


def _by_blocks(
    q_HTD: Tensor,
    k_HSD: Tensor,
    v_HSV: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Exact attention of one run, `BLOCK` queries at a time; blocks are recomputed in the backward pass."""
    outs = []
    before = k_HSD.shape[1] - q_HTD.shape[1]  # keys that the run shares with others
    for start in range(0, q_HTD.shape[1], BLOCK):
        stop = min(start + BLOCK, q_HTD.shape[1])
        at, end = before + start, before + stop
        first = 0 if window is None else max(0, at - window + 1)
        block = (q_HTD[:, start:stop], k_HSD[:, first:end], v_HSV[:, first:end], (at, first))
        args = (*block, scale, window, softcap, sinks_H)
        if torch.is_grad_enabled() and (q_HTD.requires_grad or (sinks_H is not None and sinks_H.requires_grad)):
            outs.append(checkpoint(_one_block, *args, use_reentrant=False))
        else:
            outs.append(_one_block(*args))
    return torch.cat(outs, 1)


def can_share(model: nn.Module) -> bool:
    """Whether every layer of the model attends fully and without a soft cap, so that prefixes can be shared."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
            return False
        if not kinds and getattr(config, "sliding_window", None):
            return False
    return not remembers(model)


_TRIED: WeakSet[nn.Module] = WeakSet()


def check_attention(model: nn.Module) -> None:
    """Raises where the model does not attend by our plans as by its own attention.

    A model made for transformers' attention backends is believed. Another, or one that remembers, is tried once: on a
    pack of two short texts, or on one text, its logits must be its own.
    """
    if model in _TRIED:
        return
    check_model(model)
    if remembers(model) or any(getattr(type(m), "_supports_attention_backend", None) is False for m in model.modules()):
        with evaluating(model):
            _try(model)
    _TRIED.add(model)


def _try(model: nn.Module) -> None:
    device, name = next(model.parameters()).device, type(model).__name__
    most = getattr(model.config, "max_position_embeddings", None) or TEXT
    ids_T = torch.arange(min(TEXT, most), device=device) * 7919 % vocabulary_of(model)
    texts = [ids_T] if remembers(model) else list(ids_T.chunk(2))
    plan = PathAttention(apart([len(text) for text in texts]))

    def logprobs(ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
        out = model(input_ids=ids_T[None], position_ids=packed_positions(lengths, device), use_cache=False)
        found: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state  # of a body alone
        return torch.log_softmax(found[0].float(), -1)

    own_TV = torch.cat([logprobs(text, [len(text)]) for text in texts])
    with attending(model, plan):
        try:
            gap = float((logprobs(ids_T, plan.runs.lengths) - own_TV).abs().mean())
        except ConfigError:
            raise
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name} does not run with attnrl's attention in place of its own: {error}") from error
    if not plan.calls:
        raise ConfigError(f"{name} does not use transformers' attention interface, which attnrl needs to see attention")
    if gap > ROUNDING.get(model.dtype, HALF_ROUNDING):
        raise ConfigError(
            f"{name} does more in its attention than it tells transformers' attention interface: "
            f"with attnrl's in its place, log-probs differ by {gap:.3g} nats"
        )


@contextmanager
def path_attention(model: nn.Module, runs: Runs, *, collector: Collector | None = None) -> Iterator[PathAttention]:
    """While open, each run of the row attends causally along its path, and nowhere else.

    Call `model(input_ids=[1, T], position_ids=[1, T], attention_mask=None, use_cache=False)` inside. It is
    differentiable, also under gradient checkpointing; call `backward` inside, since recomputation attends again.
    """
    check_attention(model)
    limit = lone_from(model) if len(runs.lengths) > 1 else None
    if limit is not None and max(runs.lengths) > limit:
        why = (
            f"beyond {limit} tokens this model's rotary embedding changes for the whole pack"
            if limit
            else "this model's layers carry a state from each token to the next"
        )
        raise ConfigError(f"a sequence of {max(runs.lengths)} tokens cannot share a pack: {why}; pack it alone")
    assert collector is None or runs.paths_S is None, "a collector sees each token once"
    plan = PathAttention(runs, collector)
    with attending(model, plan):
        yield plan


@contextmanager
def packed_attention(
    model: nn.Module, lengths: Sequence[int], *, collector: Collector | None = None
) -> Iterator[PathAttention]:
    """While open, the model attends causally within each of the packed sequences of these lengths, and nowhere else.

    As `path_attention`; position ids are `packed_positions(lengths)`.
    """
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"every packed sequence needs at least one token; got lengths {list(lengths)[:8]}")
    with path_attention(model, apart(lengths), collector=collector) as plan:
        yield plan
