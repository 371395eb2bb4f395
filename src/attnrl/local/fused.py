"""The forward of decoders built like Llama, with what lies between the matrix products fused.

transformers' own forward launches about forty kernels a layer, most of them for a few numbers. Decoders of this family
(Llama, Qwen2, Qwen3, Mistral and those with the same modules) are the same eleven here. Whether a model is one of them
is seen by its modules and then by its numbers: a first forward is compared with transformers' own and, where the two
differ, with one in float32. Others run as they are.

Shapes: T tokens, P positions, W width, H query heads, D head size, X all heads side by side, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrl.attention.interface import AttentionPlan, Layer
from attnrl.attention.paged import failures, has_kernels
from attnrl.attention.pages import PagePool

COPY_SHARE = 32  # gate and up weights are copied side by side where that takes at most this part of the memory
FEW = 256  # tokens over which the kernel of gate and up is compared
MANY = 1024  # tokens from which on a product adds the residual itself
# How much farther from float32 than the model's own the fused logits may be: the median token, and any one. By the
# kernels' formulas in torch, SmolLM2-135M, 14 texts: at most 1.23 and 5; with gates scaled by 1.02 the median is 1.46
# to 2.4.
NEAR, NEAR_ONE = 1.4, 8.0
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Paged(Protocol):
    """A plan over pages: `PagedDecode` or `PagedPrefill`."""

    @property
    def pool(self) -> PagePool: ...
    @property
    def slots_T(self) -> Tensor: ...
    def stored(self, layer: int) -> None: ...
    def at_ends(self) -> Paged: ...
    def read(self, layer: Layer, q: Tensor) -> Tensor: ...


class Recorded:
    """A plan over pages that also remembers how each layer scores, as the model passes it."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.layers: dict[int, Layer] = {}

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layers[layer.index] = layer
        return self.plan.attend(layer, q, k, v)


def _children(module: nn.Module) -> set[str]:
    """Names of the children that hold weights, and of the activation."""
    return {n for n, child in module.named_children() if n == "act_fn" or any(True for _ in child.parameters())}


def _is_norm(module: Any, width: int) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return named and weight is not None and weight.shape == (width,)


class _Joined:
    """Linear modules over the same input as one product of their weights side by side.

    The weights are copies that `refresh` renews; where the modules are no plain ones (adapters) or copies are not
    wanted, each module runs by itself.
    """

    def __init__(self, parts: Sequence[Any], *, copy: bool) -> None:
        self.parts = tuple(parts)
        plain = all(type(part) is nn.Linear for part in parts) and len({part.bias is None for part in parts}) == 1
        self.copy = copy and plain
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def refresh(self) -> None:
        """Copies the weights as they are now; a copy keeps its place in memory until `release`."""
        if not self.copy:
            return
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts if part.bias is not None]
        if self.weight is None:
            self.weight = torch.cat(weights)
            self.bias = torch.cat(biases) if biases else None
            return
        torch.cat(weights, out=self.weight)
        if self.bias is not None:
            torch.cat(biases, out=self.bias)

    def release(self) -> None:
        self.weight = self.bias = None

    def __call__(self, x_TW: Tensor) -> tuple[Tensor, ...]:
        if self.weight is None:
            return tuple(part(x_TW) for part in self.parts)
        return self.split(F.linear(x_TW, self.weight, self.bias))

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """Each module's part of the last dimension."""
        parts: tuple[Tensor, ...] = out.split([part.out_features for part in self.parts], -1)
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One decoder layer in our terms."""

    module: Any
    heads: int
    dim: int
    qkv: _Joined
    gate_up: _Joined

    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        attention = self.module.self_attn
        if not hasattr(attention, "q_norm"):
            return None
        return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon


def _read_layer(module: Any, *, copy: bool) -> _Layer | None:
    """The layer in our terms, or None where it has other modules than we compute."""
    if _children(module) != _LAYER or not _children(module.self_attn) >= _ATTENTION:
        return None
    attention, mlp = module.self_attn, module.mlp
    if any(list(part.parameters(recurse=False)) for part in (module, attention, mlp)):  # sinks, for one
        return None
    extra = _children(attention) - _ATTENTION
    dim = getattr(attention, "head_dim", None)
    if extra not in (set(), {"q_norm", "k_norm"}) or _children(mlp) != _MLP or dim is None or dim % 2:
        return None
    if extra and not (_is_norm(attention.q_norm, dim) and _is_norm(attention.k_norm, dim)):
        return None
    width = mlp.gate_proj.in_features
    if not all(_is_norm(n, width) for n in (module.input_layernorm, module.post_attention_layernorm)):
        return None
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    qkv = _Joined((attention.q_proj, attention.k_proj, attention.v_proj), copy=True)
    gate_up = _Joined((mlp.gate_proj, mlp.up_proj), copy=copy)
    return _Layer(module, attention.q_proj.out_features // dim, dim, qkv, gate_up)


class FusedDecoder:
    """The decoder's forward from token ids to normed hidden states, over pages."""

    def __init__(self, model: Any, layers: list[_Layer]) -> None:
        from attnrl.attention.triton_parts import GLUON
        from attnrl.local import fused_triton, products_triton

        self.kernels: Any = fused_triton
        self.products: Any = products_triton
        self.gated: Any = None  # gate and up of many tokens
        self.compared: set[int] = set()  # the widths of its tiles of which a result was compared
        if GLUON:
            from attnrl.local import gated_hopper

            self.gated = gated_hopper
        self.model = model
        self.base = model.model
        self.layers = layers
        self.scoring: dict[int, Layer] = {}  # how each layer's attention scores
        self.turns: tuple[Tensor, Tensor] | None = None  # cosines and sines of every position, [P, D]

    def refresh(self, positions: int) -> None:
        """Copies the projections' weights as they are now, and reckons how queries and keys turn at so many positions.

        The copies keep their place in memory; so do the turns until more positions are asked for.
        """
        with torch.no_grad():
            for layer in self.layers:
                layer.qkv.refresh()
                layer.gate_up.refresh()
            if self.turns is None or len(self.turns[0]) < positions:
                position_P = torch.arange(positions, device=next(self.model.parameters()).device)
                like_1W = self.base.embed_tokens(position_P[:1])
                self.base.rotary_emb(like_1W[None], position_ids=position_P[:1, None])  # forgets what was longer
                cos, sin = self.base.rotary_emb(like_1W[None], position_ids=position_P[None])
                self.turns = cos[0].contiguous(), sin[0].contiguous()

    def release(self) -> None:
        """Frees the copies and the turns until the next `refresh`."""
        self.turns = None
        for layer in self.layers:
            layer.qkv.release()
            layer.gate_up.release()

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: Paged, ends: Tensor | None = None) -> Tensor:
        """Final hidden states, normed: [T, W], or those of the tokens `ends`, the last of their runs, alone.

        Of other tokens the last layer leaves keys and values alone.
        """
        kernels = self.kernels
        x_TW = self.base.embed_tokens(tokens_T)
        assert self.turns is not None, "refreshed"
        after: Tensor | None = None
        for i, layer in enumerate(self.layers):
            attention, mlp = layer.module.self_attn, layer.module.mlp
            norm = layer.module.input_layernorm
            x_TW, normed_TW = kernels.add_norm(x_TW, after, norm.weight, norm.variance_epsilon)
            keys, values = plan.pool.keys[i], plan.pool.values[i]
            places = positions_T, plan.slots_T
            projected = self._projected(layer.qkv, normed_TW)
            q_TX = kernels.rotate_store(*projected, *self.turns, *places, keys, values, layer.norms())
            plan.stored(i)
            q_THD, reading = q_TX.unflatten(1, (layer.heads, layer.dim)), plan
            if ends is not None and i == len(self.layers) - 1:
                x_TW, q_THD, reading = x_TW[ends], q_THD[ends], plan.at_ends()
            seen_TX = reading.read(self.scoring[i], q_THD)
            norm = layer.module.post_attention_layernorm
            seen = self._summed(attention.o_proj, seen_TX, x_TW)
            x_TW, normed_TW = kernels.add_norm(x_TW, seen, norm.weight, norm.variance_epsilon)
            after = self._summed(mlp.down_proj, self._gated(layer.gate_up, normed_TW), x_TW)
        norm = self.base.norm
        normed: Tensor = kernels.add_norm(x_TW, after, norm.weight, norm.variance_epsilon)[1]
        return normed

    def _projected(self, qkv: _Joined, x_TW: Tensor) -> tuple[Any, Any]:
        """Queries, keys and values, each [T, X], or parts of them [S, T, X] and biases still to be added."""
        if qkv.weight is None or not self.products.fits(x_TW) or self.products.parts_of(qkv.weight) == 1:
            return qkv(x_TW), None
        parts_STX = self.products.summed_apart(x_TW, qkv.weight)
        return qkv.split(parts_STX), None if qkv.bias is None else qkv.split(qkv.bias)

    def _summed(self, module: Any, x_TK: Tensor, residual_TN: Tensor) -> Tensor | None:
        """What a linear module returns, [T, N], or parts of it, [S, T, N], for `add_norm` to add to the residual.

        None: of many tokens the product itself has added it, in place and rounded once where the modules round twice.
        """
        plain = type(module) is nn.Linear and module.bias is None
        if plain and self.products.fits(x_TK):
            parts: Tensor = self.products.summed_apart(x_TK, module.weight)
            return parts
        if plain and len(x_TK) >= MANY:
            residual_TN.addmm_(x_TK, module.weight.t())
            return None
        out: Tensor = module(x_TK)
        return out

    def _gated(self, gate_up: _Joined, x_TW: Tensor) -> Tensor:
        """silu(gate) * up of the inputs, [T, F]."""
        weight_MW = gate_up.weight if gate_up.bias is None else None
        out: Tensor
        if weight_MW is not None and self.products.fits(x_TW):
            out = self.products.gated(x_TW, weight_MW)
        elif weight_MW is not None and self.gated is not None and self.gated.fits(x_TW, weight_MW):
            wide = self.gated.width(x_TW, weight_MW)
            out = self.gated.gated(x_TW, weight_MW, wide=wide)
            if wide not in self.compared:
                self.compared.add(wide)
                theirs = self.kernels.gate(*gate_up(x_TW[:FEW]))
                if not agrees(out[:FEW], theirs, "gate and up run as two kernels", dtype=x_TW.dtype):
                    self.gated = None
                    return self._gated(gate_up, x_TW)
        else:
            out = self.kernels.gate(*gate_up(x_TW))
        return out


def decoder_layers(base: Any, *, copy: bool = False) -> list[_Layer] | None:
    """The layers of a decoder in our terms, or None where one of its modules is another than we compute.

    `copy`: gate and up weights side by side.
    """
    needed = ("layers", "embed_tokens", "norm", "rotary_emb")
    if not all(hasattr(base, name) for name in needed) or not _is_norm(base.norm, base.embed_tokens.embedding_dim):
        return None
    layers = [_read_layer(module, copy=copy) for module in base.layers]
    known = [layer for layer in layers if layer is not None]
    return known if len(known) == len(layers) else None


def fuse(model: Any, device: torch.device) -> FusedDecoder | None:
    """The fused forward of a model it fits by its modules, or None. Its numbers are still to be compared."""
    base = getattr(model, "model", None)
    if base is None or not has_kernels(device) or not hasattr(base, "layers"):
        return None
    inner = sum(m.mlp.gate_proj.weight.nbytes * 2 for m in base.layers if hasattr(getattr(m, "mlp", None), "gate_proj"))
    room = torch.cuda.get_device_properties(device).total_memory // COPY_SHARE if device.type == "cuda" else inner
    layers = decoder_layers(base, copy=inner <= room)
    if layers is None:
        return None
    fused = FusedDecoder(model, layers)
    fused.refresh(1)
    whole = fused.turns is not None and fused.turns[0].shape[1]  # else a part of each head turns
    return fused if all(layer.dim == whole for layer in layers) else None


def agrees(
    ours_TV: Tensor,
    theirs_TV: Tensor,
    instead: str = "sampling runs unfused",
    *,
    dtype: torch.dtype,
    truth: Callable[[], Tensor] | None = None,
) -> bool:
    """Whether two forwards' logits are the same up to rounding; where they are not, it is said what runs instead.

    `dtype` is the weights'. Through the layers of a trained model in half precision, rounding alone can grow to more
    than a fixed share. Where `truth` gives the logits in float32, two that differ by more are the same if ours are
    about as near to it.
    """
    spread = float((theirs_TV - theirs_TV.mean(-1, keepdim=True)).float().square().mean().sqrt())
    apart = float((ours_TV - theirs_TV).float().square().mean().sqrt())
    allowed = 1e-3 if dtype == torch.float32 else 5e-2
    if apart <= allowed * max(spread, 1e-6):
        return True
    message = f"the fused forward differs from the model's by {apart / max(spread, 1e-6):.1%}"
    try:
        truth_TV = truth() if truth is not None else None
    except failures() as error:  # no memory, or no kernel for float32: the model's own forward runs anyway
        truth_TV, message = None, f"{message}, float32 could not be asked ({type(error).__name__}: {str(error)[:200]})"
    if truth_TV is not None:
        ours_T, theirs_T = _errors(ours_TV, truth_TV), _errors(theirs_TV, truth_TV)
        ours, theirs = float(ours_T.median()), float(theirs_T.median())
        worst = float((ours_T / theirs_T.clamp(min=theirs)).max())
        if ours <= NEAR * theirs and worst <= NEAR_ONE:  # neither holds where one is not a number
            return True
        message += f", from float32 by {ours:.1%} against {theirs:.1%}, at one token {worst:.1f} times as much"
    warnings.warn(f"{message}: {instead}", stacklevel=2)
    return False


def _errors(logits_TV: Tensor, truth_TV: Tensor) -> Tensor:
    """Each token's distance from the true logits, as a share of their spread. [T]"""
    spread_T = (truth_TV - truth_TV.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    return (logits_TV.float() - truth_TV).square().mean(-1).sqrt() / spread_T.clamp(min=1e-6)
