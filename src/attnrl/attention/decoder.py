"""What we ask of a Hugging Face decoder: whether it can be packed, its body, its head.

Shapes: N positions, W model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

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


def logits_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function from hidden states [N, W] to logits [N, V] in the model's dtype, with its own scaling and soft-cap."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    multiply = getattr(config, "logit_scale", None)  # Cohere
    divide = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    def logits(hidden_NW: Tensor) -> Tensor:
        logits_NV = head(hidden_NW)
        if multiply is not None:
            logits_NV = logits_NV * multiply
        if divide is not None:
            logits_NV = logits_NV / divide
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    return logits


_CHECKED: WeakSet[nn.Module] = WeakSet()


def check_head(model: nn.Module) -> None:
    """Raise where `logits_head` does not give the model's own logits: some models transform hidden states before it.

    Runs the model on four tokens, once.
    """
    if model in _CHECKED:
        return
    inner: Any = model
    hidden: list[Tensor] = []
    hook = body_of(model).register_forward_hook(lambda _module, _args, out: hidden.append(out.last_hidden_state))
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % vocabulary_of(model)
    try:
        with torch.no_grad():
            want = inner(input_ids=ids, use_cache=False).logits.float()
            got = logits_head(model)(hidden[0]).float()
    finally:
        hook.remove()
    if float((got - want).norm()) > 0.05 * float(want.norm()):
        raise ConfigError(f"{type(model).__name__} does more than project its hidden states to logits: not supported")
    _CHECKED.add(model)
