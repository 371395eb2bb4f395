"""A decoder's head, from hidden states to logits: in float32 where the model's weights are half precision.

A product of half-precision numbers is summed in float32 and then rounded. Logits of a trained model are some tens, of
which bfloat16 keeps steps of an eighth: sampler and learner, whose hidden states differ by rounding, would fall on
different steps. The sums as they are cost one wider write and give the same distribution to both.

Shapes: N positions, W model width, V vocabulary.
"""

# mypy: disable-error-code="misc,no-untyped-call"
# torch.autograd.Function has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrl.attention.decoder import body_of, vocabulary_of
from attnrl.errors import ConfigError


def float32_product(x_NW: Tensor, weight_VW: Tensor) -> Tensor:
    """x @ weight.T of half-precision numbers in float32, [N, V]; no gradient."""
    if x_NW.is_cuda:
        return torch.mm(x_NW, weight_VW.t(), out_dtype=torch.float32)
    return F.linear(x_NW.float(), weight_VW.float())


class _Float32Product(torch.autograd.Function):
    """`float32_product`; gradients are products in half precision again."""

    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, weight_VW: Tensor) -> Tensor:
        ctx.save_for_backward(x_NW, weight_VW)
        return float32_product(x_NW, weight_VW)

    @staticmethod
    def backward(ctx: Any, g_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NW, weight_VW = ctx.saved_tensors
        g_NV = g_NV.to(x_NW.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return (g_NV @ weight_VW if needs_x else None), (g_NV.t() @ x_NW if needs_weight else None)


class Float32Head(nn.Linear):
    """A head whose logits are float32 though its weights are not."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == torch.float32 or self.weight.dtype == torch.float32:
            return super().forward(input)
        logits: Tensor = _Float32Product.apply(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        return logits if self.bias is None else logits + self.bias.float()


def widen_head(model: Any) -> None:
    """Makes the head of a half-precision model, where it is a plain linear module, a `Float32Head` in its place."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16):
        head.__class__ = Float32Head


def plain_head(model: Any) -> nn.Linear | None:
    """The head, where logits are its product with hidden states and no more; None where something is done to them."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    plain = type(head) in (nn.Linear, Float32Head) and head.bias is None
    return head if plain and all(value is None for value in _scaling(config)) else None


def _scaling(config: Any) -> tuple[Any, Any, Any]:
    """By what logits are multiplied (Cohere, Falcon-H1), divided (Granite) and capped (Gemma 2, RecurrentGemma); None:
    they are not.
    """
    names = (("logit_scale", "lm_head_multiplier"), ("logits_scaling",), ("final_logit_softcapping", "logits_soft_cap"))
    multiply, divide, cap = (
        next((value for name in either if (value := getattr(config, name, None)) is not None), None) for either in names
    )
    return multiply, divide, cap


def logits_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function from hidden states [N, W] to logits [N, V], with the model's own scaling and soft-cap."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    multiply, divide, cap = _scaling(config)

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
    seen: list[Any] = []
    hook = body_of(model).register_forward_hook(lambda _module, _args, out: seen.append(out))
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % vocabulary_of(model)
    try:
        with torch.no_grad():
            want = inner(input_ids=ids, use_cache=False).logits.float()
            hidden: Tensor | None = getattr(seen[0], "last_hidden_state", None) if seen else None
            got = torch.zeros_like(want) if hidden is None else logits_head(model)(hidden).float()
    finally:
        hook.remove()
    if float((got - want).norm()) > 0.05 * float(want.norm()):
        raise ConfigError(f"{type(model).__name__} does more than project its hidden states to logits: not supported")
    _CHECKED.add(model)
