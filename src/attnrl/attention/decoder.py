"""What we ask of a Hugging Face decoder: whether it can be packed, what it remembers, and its body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from attnrl.errors import ConfigError, MissingFileError

# What configs call their layers: the second kind does both, the third carries a state from token to token instead of
# attending, the last neither.
ATTENTION = {"full_attention", "sliding_attention", "attention"}
HYBRID = {"hybrid", "hybrid_sliding"}
RECURRENT = {"linear_attention", "conv", "mamba", "mamba2", "recurrent"}
STATELESS = {"mlp", "moe"}


def read_config(name: str) -> Any:
    """The Hugging Face config of a model, by directory or hub name; nothing else of it is read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        raise MissingFileError(f"cannot load model {name!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model {name!r} cannot be used: {error}") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and with every module in eval mode; modules that trained do so again afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _configs(model: nn.Module) -> list[Any]:
    """Every config object that a module of the model reads, parents before children.

    Runs whenever a model is opened, since a layer may have been exchanged, so it is written to be quick:
    `model.modules()` and `getattr` on a module take ten times as long.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        todo.extend(module._modules.values())
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def _kinds(config: Any) -> set[str]:
    """What a config calls its layers; recurrent models have names of their own for the key."""
    names = ("layer_types", "layers_block_type", "block_types")
    return {kind for name in names for kind in getattr(config, name, None) or ()}


def check_model(model: nn.Module) -> list[Any]:
    """The model's config objects; raises where one names layers that are none we know."""
    configs = _configs(model)
    for config in configs:
        odd = _kinds(config) - ATTENTION - HYBRID - RECURRENT - STATELESS
        if odd:
            raise ConfigError(
                f"{type(config).__name__} has layers of type {', '.join(sorted(odd))}: packed sequences would mix there"
            )
    return configs


def recurrent(config: Any) -> bool:
    """Whether a Hugging Face config names layers that carry a state from token to token."""
    return bool((_kinds(config) | _kinds(getattr(config, "text_config", None))) & (HYBRID | RECURRENT))


def remembers(model: nn.Module) -> bool:
    """Whether some layer carries a state from token to token (recurrent, state space, convolution), which no mask
    keeps within a sequence: each needs a forward of its own.
    """
    return bool(getattr(model, "_is_stateful", False)) or any(map(recurrent, _configs(model)))


def attending_layers(config: Any) -> list[int]:
    """Which layers attend, by a Hugging Face config; all where it does not tell their kinds."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
    return [index for index, kind in enumerate(kinds) if kind in ATTENTION | HYBRID]


def lone_from(model: nn.Module) -> int | None:
    """The length over which a sequence must not share a pack, or None. For a model that remembers it is 0."""
    return 0 if remembers(model) else rope_limit(model)


def rope_limit(model: nn.Module) -> int | None:
    """The length over which a sequence changes the rotary embedding of a whole forward, or None.

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


def body_of(model: nn.Module) -> nn.Module:
    """The decoder below the language-model head; adapters (LoRA) stay in place, since they live inside its layers."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return cast(nn.Module, getattr(inner, inner.base_model_prefix, inner))


def vocabulary_of(model: Any) -> int:
    """How many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])
