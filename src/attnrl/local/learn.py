"""The learner's forward of decoders built like Llama, with what lies between the matrix products fused both ways.

Half of an update's time goes into small kernels of the model's own modules: norms, rotation, gate, residual, and the
passes over the logits. Here each is one kernel forward and one back (`learn_triton`). Which models fit is seen by their
modules, as for the sampler (`fused`); attention is whatever the model's config names while a pack is open.

Shapes: T tokens, W width, H heads, D head size, F inner width, U positions, C of a chunk of them, V vocabulary.
"""

# mypy: disable-error-code="misc,no-untyped-call"
# torch.autograd.Function has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnrl.attention.head import Float32Head, float32_product, logits_head, plain_head
from attnrl.attention.paged import failures, has_kernels
from attnrl.local.fused import NEAR, agrees, decoder_layers
from attnrl.local.models import plain
from attnrl.local.wide import InFloat32, widens
from attnrl.policy.logprobs import pack_attention, token_logprobs
from attnrl.policy.packing import Pack
from attnrl.scoring.fci import run_body

TEXT = 256  # tokens over which the forward is compared
MOST = 0.2  # of a gradient that rounding may be: with more of it a wrong kernel could not be told


class Norm(torch.autograd.Function):
    """The root-mean-square norm of x."""

    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
        from attnrl.local import fused_triton

        ctx.save_for_backward(x_TW, weight_W)
        ctx.eps = eps
        return fused_triton.add_norm(x_TW, None, weight_W, eps)[1]

    @staticmethod
    def backward(ctx: Any, g_TW: Tensor) -> tuple[Tensor | None, ...]:
        from attnrl.local import learn_triton

        x_TW, weight_W = ctx.saved_tensors
        return (*learn_triton.norm_back(x_TW, weight_W, ctx.eps, g_TW, None), None)


class AddNorm(torch.autograd.Function):
    """(x + y, its norm)."""

    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, y_TW: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from attnrl.local import fused_triton

        sum_TW, normed_TW = fused_triton.add_norm(x_TW, y_TW, weight_W, eps)
        ctx.save_for_backward(sum_TW, weight_W)
        ctx.eps = eps
        return sum_TW, normed_TW

    @staticmethod
    def backward(ctx: Any, g_sum_TW: Tensor, g_normed_TW: Tensor) -> tuple[Tensor | None, ...]:
        from attnrl.local import learn_triton

        sum_TW, weight_W = ctx.saved_tensors
        dx_TW, dweight_W = learn_triton.norm_back(sum_TW, weight_W, ctx.eps, g_normed_TW, g_sum_TW)
        return dx_TW, dx_TW, dweight_W, None


class Rotate(torch.autograd.Function):
    """x * cos + rotate_half(x) * sin."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        from attnrl.local import learn_triton

        ctx.save_for_backward(cos_TD, sin_TD)
        return learn_triton.rotate(x_THD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, g_THD: Tensor) -> tuple[Tensor | None, ...]:
        from attnrl.local import learn_triton

        cos_TD, sin_TD = ctx.saved_tensors
        return learn_triton.rotate(g_THD, cos_TD, sin_TD, back=True), None, None


class Gate(torch.autograd.Function):
    """silu(gate) * up. Its gradients take the place of gate and up: nothing else reads those, and once only."""

    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        from attnrl.local import fused_triton

        ctx.save_for_backward(gate_TF.contiguous(), up_TF.contiguous())
        return fused_triton.gate(gate_TF, up_TF)

    @staticmethod
    def backward(ctx: Any, g_TF: Tensor) -> tuple[Tensor, Tensor]:
        from attnrl.local import learn_triton

        gate_TF, up_TF = ctx.saved_tensors
        torch.autograd.graph.increment_version((gate_TF, up_TF))  # a second time is an error
        return learn_triton.gate_back(gate_TF, up_TF, g_TF)


class HeadStats(torch.autograd.Function):
    """Log-probs of the targets and entropies at a temperature, from hidden states, `size` positions at a time.

    No logits are kept: they are computed again in `backward`, where their gradient is rounded to the weights'
    precision as it is written.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_UW: Tensor, weight_VW: Tensor, targets_U: Tensor, temperature: float, size: int, wide: bool
    ) -> tuple[Tensor, Tensor]:
        from attnrl.scoring.head_triton import row_stats

        parts = zip(hidden_UW.split(size), targets_U.split(size), strict=True)
        found = [row_stats(_logits(h, weight_VW, wide), t, temperature) for h, t in parts]
        logprobs_U, entropy_U = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(hidden_UW, weight_VW, targets_U, logprobs_U, entropy_U)
        ctx.how = temperature, size, wide
        return logprobs_U, entropy_U

    @staticmethod
    def backward(ctx: Any, g_logprobs_U: Tensor, g_entropy_U: Tensor) -> tuple[Tensor | None, ...]:
        from attnrl.local import learn_triton

        hidden_UW, weight_VW, *of_position = ctx.saved_tensors
        temperature, size, wide = ctx.how
        g_hidden_UW = torch.empty_like(hidden_UW)
        g_weight_VW = torch.zeros_like(weight_VW) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_UW), size):
            part = slice(start, start + size)
            logits_CV = _logits(hidden_UW[part], weight_VW, wide)
            of_part = [each[part] for each in (*of_position, g_logprobs_U, g_entropy_U)]
            g_CV = learn_triton.stats_back(logits_CV, *of_part, temperature=temperature, dtype=hidden_UW.dtype)
            torch.mm(g_CV, weight_VW, out=g_hidden_UW[part])
            if g_weight_VW is not None:
                g_weight_VW.addmm_(g_CV.t(), hidden_UW[part])
        return g_hidden_UW, g_weight_VW, None, None, None, None


def _logits(hidden_CW: Tensor, weight_VW: Tensor, wide: bool) -> Tensor:
    half = hidden_CW.dtype != torch.float32
    return float32_product(hidden_CW, weight_VW) if wide and half else hidden_CW @ weight_VW.t()


def _plainly(_index: int, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
    return forward(*args, **given)


class LearningDecoder:
    """From token ids of a pack to normed hidden states, and from those to log-probs, differentiable; call it while the
    pack's attention is open.
    """

    def __init__(self, model: Any, layers: list[Any], head: Any, run: Callable[..., Any] = _plainly) -> None:
        """`run(index, forward, *args, **given)` runs layer `index`: see `Recompute`."""
        self.base = model.base_model
        self.layers = layers
        self.head = head
        self.run = run

    def hidden(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Last hidden states [T, W]."""
        x_TW = self.base.embed_tokens(ids_T)
        cos, sin = self.base.rotary_emb(x_TW[None], position_ids=positions_T[None])
        turn = {"cos_TD": cos[0].contiguous(), "sin_TD": sin[0].contiguous()}
        for i, layer in enumerate(self.layers):
            x_TW = self.run(i, _run, x_TW, layer=layer, **turn)
        return _norm(x_TW, self.base.norm)

    def logprobs(self, hidden_UW: Tensor, targets_U: Tensor, temperature: float, size: int) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies of their distributions, `size` positions at a time. ([U], [U])"""
        how = (temperature, size, isinstance(self.head, Float32Head))
        found: tuple[Tensor, Tensor] = HeadStats.apply(hidden_UW, self.head.weight, targets_U, *how)
        return found


def _run(x_TW: Tensor, *, layer: Any, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """One layer."""
    attention, mlp, after = layer.module.self_attn, layer.module.mlp, layer.module.post_attention_layernorm
    normed_TW = _norm(x_TW, layer.module.input_layernorm)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q_THD, k_TKD, v_TKD = (project(normed_TW).unflatten(-1, (-1, layer.dim)) for project in projections)
    if layer.norms() is not None:
        q_THD, k_TKD = _norm(q_THD, attention.q_norm), _norm(k_TKD, attention.k_norm)
    q_THD, k_TKD = Rotate.apply(q_THD, cos_TD, sin_TD), Rotate.apply(k_TKD, cos_TD, sin_TD)
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    heads = (x[None].transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
    window = getattr(attention, "sliding_window", None)
    seen, _ = attend(attention, *heads, None, dropout=0.0, scaling=attention.scaling, sliding_window=window)
    new_TW = attention.o_proj(seen.squeeze(0).flatten(1))  # the gradient of [0] would be a copy
    x_TW, normed_TW = AddNorm.apply(x_TW, new_TW, after.weight, after.variance_epsilon)
    fed_TW: Tensor = mlp.down_proj(Gate.apply(mlp.gate_proj(normed_TW), mlp.up_proj(normed_TW)))
    return x_TW + fed_TW


def _norm(x: Tensor, norm: Any) -> Tensor:
    """The norm over the last axis."""
    normed: Tensor = Norm.apply(x.flatten(0, -2), norm.weight, norm.variance_epsilon)
    return normed.view_as(x)


def learning_decoder(model: Any, run: Callable[..., Any]) -> LearningDecoder | None:
    """The fused forward of a model whose modules it knows, where Triton runs, or None; its numbers are not compared."""
    hf = plain(model)
    layers = decoder_layers(hf.base_model) if has_kernels(next(hf.parameters()).device) else None
    head = plain_head(hf)
    return None if layers is None or head is None else LearningDecoder(hf, layers, head, run)


def gives_logits(model: Any, decoder: LearningDecoder) -> bool:
    """Whether the fused forward gives the model's own logits on a short text, up to rounding; else it is said."""
    count = min(TEXT, getattr(model.config, "max_position_embeddings", None) or TEXT)
    ids_T = (torch.arange(count) * 7919 % model.get_input_embeddings().num_embeddings).numpy()
    head = logits_head(model)

    def logits(body: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        with torch.no_grad():
            return head(run_body(model, ids_T, [count], None, body)[0])

    def truth() -> Tensor:
        with InFloat32():
            return logits(None).float()

    asked = None if model.dtype == torch.float32 or not widens(model) else truth
    return agrees(logits(decoder.hidden), logits(None), "scoring runs unfused", dtype=model.dtype, truth=asked)


def gradient_gap(model: Any, decoder: LearningDecoder, pack: Pack, temperature: float, allowed: float) -> float:
    """Relative difference between fused and plain gradients of the mean log-prob, at the first layer's weights.

    Through the layers of a trained model in half precision, rounding alone can make more than `allowed`: where the
    fused ones are about as near to those in float32 as the plain ones are, it is 0.
    """
    plain_P, fused_P = (first_gradient(model, decoder, pack, temperature, fused=f) for f in (False, True))
    gap = float((fused_P - plain_P).norm() / plain_P.norm())
    if gap <= allowed or model.dtype == torch.float32 or not widens(model):
        return gap
    try:
        with InFloat32():
            true_P = first_gradient(model, decoder, pack, temperature, fused=False)
    except failures():  # no memory, or no kernel for float32
        return gap
    ours, theirs = (float((found_P - true_P).norm() / true_P.norm()) for found_P in (fused_P, plain_P))
    return 0.0 if ours <= min(NEAR * theirs, MOST) else gap


def first_gradient(model: Any, decoder: LearningDecoder, pack: Pack, temperature: float, *, fused: bool) -> Tensor:
    """The gradient of the mean log-prob at the first layer's weights. [P]"""
    weights = [p for p in decoder.layers[0].module.parameters() if p.requires_grad]
    with pack_attention(model, pack):
        logprobs_N, _ = token_logprobs(model, pack, temperature=temperature, fused=decoder if fused else None)
        found = torch.autograd.grad(logprobs_N.mean(), weights)
    return torch.cat([g.flatten().float() for g in found])
