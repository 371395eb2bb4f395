"""Packed attention: several sequences in one row, each seeing only itself, through transformers' attention interface.

Shapes: T tokens of a pack (all sequences, no padding), H query heads, K key/value heads, D and V head sizes of keys and
values.
A pack is `model(input_ids=[1, T], position_ids=[1, T] restarting at 0 in each sequence)`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from attnrl.errors import ConfigError

IMPLEMENTATION = "attnrl_packed"
FLASH, SDPA, BLOCKS = "flash_varlen", "sdpa_per_sequence", "torch_blocks"
FLASH_MAX_HEAD = 256  # largest head size of the aten flash kernels
BLOCK = 512  # query rows at a time where scores are built by hand
FUSED_ONLY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


class Collector(Protocol):
    """Sees the queries and keys of every attention layer, after rotary embedding, in a no-grad context."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        lse_HT: torch.Tensor | None,  # row log-sum-exp in nats where the kernel gave one
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None: ...


@dataclass(slots=True)
class Pack:
    """The sequences of the pack under way, and what attention did with them."""

    lengths: tuple[int, ...]
    collector: Collector | None = None
    kinds: set[str] = field(default_factory=set)  # which implementations ran
    calls: int = 0  # attention layers seen
    _cu: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Cumulative lengths [sequences + 1], int32, on the device."""
        if device not in self._cu:
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            self._cu[device] = ends.to(device=device, dtype=torch.int32)
        return self._cu[device]

    def spans(self) -> list[tuple[int, int]]:
        """The half-open token range of each sequence in the pack."""
        spans, start = [], 0
        for length in self.lengths:
            spans.append((start, start + length))
            start += length
        return spans


# Keyed by config identity, not by thread: recomputation under gradient checkpointing runs on autograd's own thread.
_ACTIVE: dict[int, Pack] = {}
_LOCK = threading.Lock()


def packed_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
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
) -> str:
    """The attention implementation that a layer of this shape gets.

    `flash_varlen`: one aten flash kernel over the pack (CUDA, half precision). `sdpa_per_sequence`: torch's fused
    attention, sequence by sequence. `torch_blocks`: scores by query blocks, for a window or a soft-cap without flash.

    >>> attention_kind("cuda", torch.bfloat16, 128), attention_kind("cpu", torch.float32, 64)
    ('flash_varlen', 'sdpa_per_sequence')
    >>> attention_kind("cpu", torch.float32, 64, window=4)
    'torch_blocks'
    """
    same_size = value_size is None or value_size == head_size
    half_on_cuda = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if half_on_cuda and softcap is None and (value_size or 0) <= head_size <= FLASH_MAX_HEAD:
        return FLASH
    if softcap is not None or window is not None or not same_size:
        return BLOCKS
    return SDPA


def attend(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    pack: Pack,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Block-diagonal causal attention: outputs [T, H, V], row log-sum-exp [H, T] where known, and the kind used."""
    kind = attention_kind(
        q_THD.device.type,
        q_THD.dtype,
        q_THD.shape[-1],
        value_size=v_TKV.shape[-1],
        window=window,
        softcap=softcap,
    )
    if kind == FLASH:
        out_THV, lse_HT = _flash(q_THD, k_TKD, v_TKV, pack, scale, window)
        return out_THV, lse_HT, kind
    groups = q_THD.shape[1] // k_TKD.shape[1]
    k_THD = k_TKD.repeat_interleave(groups, 1) if groups > 1 else k_TKD
    v_THV = v_TKV.repeat_interleave(groups, 1) if groups > 1 else v_TKV
    outs = []
    for start, stop in pack.spans():
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THV))
        if kind == SDPA:
            with sdpa_kernel(FUSED_ONLY):  # the math kernel would build T x T scores
                out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
        else:
            out = _by_blocks(q, k, v, scale, window, softcap)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), None, kind


def _flash(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, pack: Pack, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    head, value = q_THD.shape[-1], v_TKV.shape[-1]
    wide = -(-head // 8) * 8  # the kernel takes multiples of 8; zeros change neither scores nor outputs
    q, k = (F.pad(x, (0, wide - head)) if wide > head else x for x in (q_THD, k_TKD))
    v = F.pad(v_TKV, (0, wide - value)) if wide > value else v_TKV
    offsets, longest = pack.offsets(q.device), max(pack.lengths)
    out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
    )
    return out[..., :value], lse_HT


def masked_scores(
    q_HQD: torch.Tensor,
    k_HTD: torch.Tensor,
    first_query: int,
    first_key: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Scores [H, Q, keys] of one query block as the model's softmax sees them, -inf where a query may not look."""
    scores = torch.matmul(q_HQD, k_HTD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query = torch.arange(first_query, first_query + q_HQD.shape[1], device=q_HQD.device)[:, None]
    key = torch.arange(first_key, first_key + k_HTD.shape[1], device=q_HQD.device)[None, :]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return scores.masked_fill(hidden, float("-inf"))


def _one_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: tuple[int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    scores = masked_scores(q, k, *at, scale, window, softcap)
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    return torch.matmul(torch.softmax(scores, -1, dtype=wide).to(v.dtype), v)


def _by_blocks(
    q_HTD: torch.Tensor,
    k_HTD: torch.Tensor,
    v_HTV: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Exact attention of one sequence, `BLOCK` queries at a time; blocks are recomputed in the backward pass."""
    outs = []
    for start in range(0, q_HTD.shape[1], BLOCK):
        stop = min(start + BLOCK, q_HTD.shape[1])
        first = 0 if window is None else max(0, start - window + 1)
        args = (q_HTD[:, start:stop], k_HTD[:, first:stop], v_HTV[:, first:stop], (start, first))
        if torch.is_grad_enabled() and q_HTD.requires_grad:
            outs.append(checkpoint(_one_block, *args, scale, window, softcap, use_reentrant=False))
        else:
            outs.append(_one_block(*args, scale, window, softcap))
    return torch.cat(outs, 1)


def _interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer; tensors are [1, heads, T, D]."""
    pack = _ACTIVE.get(id(getattr(module, "config", None)))
    if pack is None:
        raise ConfigError("packed attention was called outside `packed_attention`; run backward inside it too")
    _check_call(module, query, attention_mask, dropout, sliding_window, kwargs)
    longest = max(pack.lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THD, k_TKD, v_TKV = (x[0].transpose(0, 1) for x in (query, key, value))
    if q_THD.shape[0] != sum(pack.lengths):
        raise ConfigError(f"the pack has {sum(pack.lengths)} tokens, the model got {q_THD.shape[0]}")
    out_THV, lse_HT, kind = attend(q_THD, k_TKD, v_TKV, pack, scale=scale, window=window, softcap=softcap)
    pack.kinds.add(kind)
    pack.calls += 1
    if pack.collector is not None:
        with torch.no_grad():
            pack.collector(q_THD, k_TKD, lse_HT, scale=scale, window=window, softcap=softcap)
    return out_THV[None], None


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what would silently give other scores than the model's own attention."""
    name = type(module).__name__
    for extra, meaning in (("s_aux", "attention sinks"), ("position_bias", "a position bias"), ("cache", "paging")):
        if kwargs.get(extra) is not None:
            raise ConfigError(f"{name} uses {meaning} ({extra}), which packed attention does not support yet")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{name} is not causal; only decoder-only models can be packed")
    if query.shape[0] != 1 or mask is not None:
        raise ConfigError("packed attention takes one row without an attention mask: input_ids [1, T]")
    if dropout:
        raise ConfigError("packed attention has no dropout; set attention_dropout to 0 in the model's config")
    layer, layers = getattr(module, "layer_idx", None), getattr(module.config, "layer_types", None)
    if layer is not None and layers and layers[layer] == "sliding_attention" and sliding_window is None:
        raise ConfigError(f"{name} hides its sliding window in the mask, which packed attention does not build")


def _configs(model: torch.nn.Module) -> list[Any]:
    """Every config object that a module of the model reads, parents before children; raises where one is unfit.

    Runs for every pack, since a layer may have been exchanged, so it is written to be quick: `model.modules()` and
    `getattr` on a module take ten times as long.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo: list[torch.nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        todo.extend(module._modules.values())
        if getattr(type(module), "_supports_attention_backend", None) is False:
            raise ConfigError(
                f"{type(module).__name__} does not use transformers' attention interface, so it cannot be packed"
            )
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def check_model(model: torch.nn.Module) -> list[Any]:
    """The model's config objects; raises where a pack would not give each sequence the model's own attention."""
    configs = _configs(model)
    for config in configs:
        layers: list[str] = []
        for name in ("layer_types", "layers_block_type", "block_types"):  # recurrent models have names of their own
            layers += getattr(config, name, None) or ()
        odd = set(layers) - {"full_attention", "sliding_attention", "attention"}
        if odd:
            raise ConfigError(
                f"{type(config).__name__} has layers of type {', '.join(sorted(odd))}: packed sequences would mix there"
            )
    return configs


def lone_from(model: torch.nn.Module) -> int | None:
    """The length over which a sequence must not share a pack, or None.

    Rotary embeddings of type longrope and dynamic take other frequencies for every token of a forward once its longest
    position is beyond this: in a pack, one long sequence would change the short ones.
    """
    config: Any = model.config
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    limits = [
        int(kind.get("original_max_position_embeddings") or text.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type", kind.get("type")) in ("longrope", "dynamic")
    ]
    return min(limits) if limits else None


_OPEN: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def packed_attention(
    model: torch.nn.Module, lengths: Sequence[int], *, collector: Collector | None = None
) -> Iterator[Pack]:
    """While open, the model attends causally within each of the packed sequences of these lengths, and nowhere else.

    Call `model(input_ids=[1, T], position_ids=packed_positions(lengths), attention_mask=None, use_cache=False)` inside.
    It is differentiable, also under gradient checkpointing; call `backward` inside, since recomputation attends again.
    One thread at a time has a model open; others wait.
    """
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"every packed sequence needs at least one token; got lengths {list(lengths)[:8]}")
    configs = check_model(model)
    limit = lone_from(model) if len(lengths) > 1 else None
    if limit is not None and max(lengths) > limit:
        raise ConfigError(
            f"a sequence of {max(lengths)} tokens cannot share a pack: beyond {limit} tokens this model's rotary "
            "embedding changes for the whole pack; pack it alone"
        )
    AttentionInterface.register(IMPLEMENTATION, _interface)
    pack = Pack(tuple(int(n) for n in lengths), collector)
    with _LOCK:
        lock = _OPEN.setdefault(model, threading.RLock())
    with lock:  # another thread's pack would change the configs under this one's layers
        before = [config._attn_implementation for config in configs]
        outer = {id(config): _ACTIVE.get(id(config)) for config in configs}
        _ACTIVE.update(dict.fromkeys(outer, pack))
        try:
            for config in configs:
                config._attn_implementation = IMPLEMENTATION
            yield pack
        finally:
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name
            for key, previous in outer.items():
                if previous is None:
                    _ACTIVE.pop(key, None)
                else:
                    _ACTIVE[key] = previous
