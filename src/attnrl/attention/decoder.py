"""What we ask of a Hugging Face decoder: whether it can be packed, and its body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from attnrl.errors import ConfigError, MissingFileError


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
    """Every config object that a module of the model reads, parents before children; raises where one is unfit.

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
        if getattr(type(module), "_supports_attention_backend", None) is False:
            raise ConfigError(
                f"{type(module).__name__} does not use transformers' attention interface, which attnrl needs to pack "
                "its sequences and to cache them"
            )
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def check_model(model: nn.Module) -> list[Any]:
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


def lone_from(model: nn.Module) -> int | None:
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


def body_of(model: nn.Module) -> nn.Module:
    """The decoder below the language-model head; adapters (LoRA) stay in place, since they live inside its layers."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return cast(nn.Module, getattr(inner, inner.base_model_prefix, inner))


def vocabulary_of(model: Any) -> int:
    """How many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])
