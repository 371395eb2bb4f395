"""The one door between our attention and transformers' attention interface.

`attention` below is registered under one name. While `attending(model, plan)` is open, every attention layer of the
model calls it, and it hands the layer's queries, keys and values to the plan: `PathAttention` for packed sequences and
shared prefixes, `PrefillAttention` or `PagedPrefill` for contexts, `DecodeAttention` or `PagedDecode` for one token a
row. transformers builds no mask for an implementation it does not know, and callers ask it to keep no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface

from attnrl.attention.decoder import check_model
from attnrl.errors import ConfigError

NAME = "attnrl"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One attention layer, and how it scores."""

    index: int  # -1: the model does not number its layers
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None  # logits that join the softmax's sum, one a query head

    @property
    def plain(self) -> bool:
        """Scores are products, and their softmax sums to 1."""
        return self.softcap is None and self.sinks_H is None


class AttentionPlan(Protocol):
    """What the attention layers of a model do while the plan is open."""

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output [B, T, H, E] for q [B, H, T, D], k [B, K, T, D] and v [B, K, T, E]."""
        ...


class _Door:
    """Which plan a model follows; open while its configs name our attention."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # another thread's plan would change the configs under this one's layers
        self.open = False
        self.plan: AttentionPlan | None = None


_LOCK = threading.Lock()
_DOORS: WeakKeyDictionary[nn.Module, _Door] = WeakKeyDictionary()
# Keyed by config identity, not by thread: recomputation under gradient checkpointing runs on autograd's own thread.
_ACTIVE: dict[int, _Door] = {}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: hands the layer's q, k, v to the open plan."""
    door = _ACTIVE.get(id(getattr(module, "config", None)))
    if door is None or door.plan is None:
        raise ConfigError("attention was called outside of `attending`; run backward inside it too")
    _check_call(module, attention_mask, dropout, sliding_window, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = Layer(getattr(module, "layer_idx", -1), scale, sliding_window, softcap, s_aux)
    return door.plan.attend(layer, query, key, value), None


AttentionInterface.register(NAME, attention)


@contextmanager
def attending(model: nn.Module, plan: AttentionPlan | None) -> Iterator[None]:
    """While open, the model's attention layers follow the plan. Contexts nest: the innermost plan counts.

    Call `backward` inside: gradient checkpointing attends again. One thread at a time has a model open; others wait.
    With None the model is made ready, and plans are opened inside, each at no cost.
    """
    with _LOCK:
        door = _DOORS.setdefault(model, _Door())
    with door.lock, nullcontext() if door.open else _switched(check_model(model), door):
        outer, door.plan = door.plan, plan
        try:
            yield
        finally:
            door.plan = outer


@contextmanager
def _switched(configs: Sequence[Any], door: _Door) -> Iterator[None]:
    """Lets the configs name our attention, and their layers find the door; both as before afterwards."""
    before = [(config, config._attn_implementation, _ACTIVE.get(id(config))) for config in configs]
    door.open = True
    try:
        for config in configs:
            _ACTIVE[id(config)] = door
            config._attn_implementation = NAME
        yield
    finally:
        door.open = False
        for config, name, other in before:
            config._attn_implementation = name
            if other is None:
                _ACTIVE.pop(id(config), None)
            else:
                _ACTIVE[id(config)] = other


def _check_call(
    module: nn.Module, mask: Tensor | None, dropout: float, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    """Refuse what would silently give other scores than the model's own attention."""
    name = type(module).__name__
    for extra, meaning in (("position_bias", "a position bias"), ("cache", "paging")):
        if kwargs.get(extra) is not None:
            raise ConfigError(f"{name} uses {meaning} ({extra}), which attnrl's attention does not support yet")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{name} is not causal; only decoder-only models are supported")
    if mask is not None:
        raise ConfigError(f"{name} got an attention mask; attnrl's attention takes none")
    if dropout:
        raise ConfigError("attnrl's attention has no dropout; set attention_dropout to 0 in the model's config")
    config: Any = module.config
    layer, layers = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    window, most = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    slides = layer is not None and layers and layers[layer] == "sliding_attention"
    if not layers and window and getattr(config, "use_sliding_window", True):
        slides = most is None or window < most
    if slides and sliding_window is None:
        raise ConfigError(f"{name} hides its sliding window in the mask, which attnrl's attention does not build")
