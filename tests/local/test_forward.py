"""Whether fused forwards are taken, the sampler's and the learner's: by their numbers, also with weights like those of
trained models.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")

from attnrl.attention.interface import attending
from attnrl.config import UpdateConfig
from attnrl.local import forward
from attnrl.local.forward import Forward, ProbeAttention, sampling_mode
from attnrl.local.fused import FusedDecoder, agrees, decoder_layers
from attnrl.local.learn import first_gradient, gradient_gap
from attnrl.local.learner import Learner
from attnrl.local.models import prepare_model
from attnrl.local.wide import InFloat32, widens
from attnrl.policy.packing import Pack, pack
from attnrl.types import Sample, as_floats, as_ids


def trained_like(dtype: torch.dtype = torch.bfloat16, layers: int = 16) -> Any:
    """A model in which rounding grows through the layers: large weights and a few channels far above the others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=503, hidden_size=96, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:3] *= 8
            layer.self_attn.q_proj.weight *= 3
            layer.input_layernorm.weight.uniform_(0.2, 2.0)
    return model.to(dtype)


class Kernels:
    """The kernels' formulas in torch, norms rounded once and products summed in parts; `wrong` plants a defect."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def add_norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float) -> Any:
        x = x if y is None else (x.float() + (y.sum(0) if y.dim() == 3 else y).to(x.dtype).float()).to(x.dtype)
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        weight = torch.ones_like(weight) if self.wrong == "no norm weight" else weight
        normed = (x.float() * scale * weight.float()).to(x.dtype)
        if self.wrong == "last token":
            normed[-1] *= -1
        return x, normed

    def rotate_store(
        self, qkv: Any, biases: Any, cos: Any, sin: Any, positions: Any, slots: Any, keys: Any, values: Any, _: Any
    ) -> torch.Tensor:
        assert biases is None
        q, k, v = (x if x.dim() == 2 else x.sum(0).to(keys.dtype) for x in qkv)
        cos, sin = cos[positions], sin[positions]
        if self.wrong == "positions":
            cos, sin = cos.roll(1, 0), sin.roll(1, 0)
        dim, page = keys.shape[3], keys.shape[2]

        def rotated(x: torch.Tensor) -> torch.Tensor:
            x = x.unflatten(1, (-1, dim))
            halves = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * cos[:, None] + halves * sin[:, None]

        keys[slots // page, :, slots % page] = rotated(k)
        values[slots // page, :, slots % page] = v.unflatten(1, (-1, dim))
        return rotated(q).flatten(1)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate * 1.2 if self.wrong == "gate" else gate) * up

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype == torch.bfloat16

    def gated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.gate(*((x.float() @ part.float().T).to(x.dtype) for part in weight.chunk(2)))

    def parts_of(self, weight: torch.Tensor) -> int:
        return 8

    def summed_apart(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(8, -1), weight.chunk(8, -1), strict=True)
        return torch.stack([a.float() @ b.float().T for a, b in parts])


def opened(monkeypatch: Any, model: Any, wrong: str = "") -> Forward:
    def fuse(model: Any, device: torch.device) -> FusedDecoder:
        layers = decoder_layers(model.model, copy=True)
        assert layers is not None
        fused = FusedDecoder(model, layers)
        fused.kernels = fused.products = Kernels(wrong)
        fused.gated = None
        return fused

    monkeypatch.setattr(forward, "fuse", fuse)
    probe = ProbeAttention()
    with sampling_mode(model), attending(model, probe):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    return Forward(model, probe.layers(), model.dtype)


def test_rounding_of_a_trained_model_is_no_reason_to_refuse(monkeypatch) -> None:
    shares = []
    monkeypatch.setattr(forward, "agrees", lambda a, b, **_: shares.append(apart(a, b)) or agrees(a, b, **_))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(monkeypatch, trained_like()).fused is not None
    assert shares[0] > 0.05  # a fixed share would have refused it


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    spread = (theirs - theirs.mean(-1, keepdim=True)).float().square().mean().sqrt()
    return float((ours - theirs).float().square().mean().sqrt() / spread)


@pytest.mark.parametrize("wrong", ["positions", "gate", "no norm weight", "last token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_defect_is_refused_among_rounding_too(monkeypatch, wrong: str, dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match="sampling runs unfused"):
        assert opened(monkeypatch, trained_like(dtype), wrong).fused is None


def test_weights_that_cannot_be_widened_keep_the_fixed_share(monkeypatch) -> None:
    monkeypatch.setattr(forward, "widens", lambda model: False)
    with pytest.warns(UserWarning, match="sampling runs unfused"):
        assert opened(monkeypatch, trained_like()).fused is None
    packed = SimpleNamespace(parameters=lambda: iter([torch.zeros(2, dtype=torch.uint8)]))
    assert widens(trained_like())
    assert not widens(packed)  # type: ignore[arg-type]


def test_a_layer_with_weights_of_its_own_is_none_of_ours() -> None:
    """Attention sinks, for one: the fused forward would leave them out."""
    model = trained_like(layers=1)
    assert decoder_layers(model.model) is not None
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.full((6,), -100.0))
    assert decoder_layers(model.model) is None


def test_numbers_that_are_none_are_refused() -> None:
    good = torch.randn(4, 9)
    bad = good.clone()
    bad[1, 2] = torch.nan
    for ours, theirs, truth in ((bad, good, good), (good, bad, good), (bad, bad, bad)):
        with pytest.warns(UserWarning, match="unfused"):
            assert not agrees(ours, theirs, dtype=torch.bfloat16, truth=lambda truth=truth: truth)


@torch.no_grad()
def test_a_forward_in_float32_is_that_of_a_wide_copy() -> None:
    model, ids = trained_like(), torch.arange(20)[None]
    with InFloat32():
        found = model(input_ids=ids).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model.float()(input_ids=ids).logits, rtol=1e-3, atol=1e-3)


def test_where_float32_cannot_be_asked_the_model_runs_as_it_is(monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("attnrl.local.wide._linear", full)
    with pytest.warns(UserWarning, match=r"float32 could not be asked \(OutOfMemoryError: no room\): sampling runs"):
        assert opened(monkeypatch, trained_like()).fused is None


class Learning:
    """A learner's forward whose hidden states are right up to rounding, or `wrong` times what they are."""

    def __init__(self, model: Any, wrong: float = 1.0) -> None:
        self.model, self.wrong = model, wrong
        self.layers = [SimpleNamespace(module=layer) for layer in model.model.layers]

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        with InFloat32():
            found = self.model.base_model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
        return (self.wrong * found.last_hidden_state[0]).to(self.model.dtype)

    def logprobs(self, hidden_UW: torch.Tensor, targets_U: torch.Tensor, temperature: float, _size: int) -> Any:
        logits_UV = self.model.get_output_embeddings()(hidden_UW).float() / temperature
        return logits_UV.log_softmax(-1).gather(-1, targets_U[:, None])[:, 0], targets_U.float()


def one_pack() -> Pack:
    ids, zeros = as_ids(range(5, 45)), as_floats([0.0] * 40)
    return pack([Sample(ids[:9], ids, zeros, zeros, "q")], [0], torch.device("cpu"))


def test_gradients_in_float32_are_those_of_a_wide_copy() -> None:
    model = trained_like()
    with InFloat32():
        found = first_gradient(model, Learning(model), one_pack(), 1.0, fused=False)  # type: ignore[arg-type]
    wide = trained_like().float()
    want = first_gradient(wide, Learning(wide), one_pack(), 1.0, fused=False)  # type: ignore[arg-type]
    assert float((found - want).norm() / want.norm()) < 5e-3  # it comes back in bfloat16


def test_gradients_of_a_trained_model_are_held_against_float32(monkeypatch) -> None:
    def gap(model: Any, wrong: float, allowed: float = 0.1) -> float:
        return gradient_gap(model, Learning(model, wrong), one_pack(), 1.0, allowed)  # type: ignore[arg-type]

    model, chaos = trained_like(layers=4), trained_like()  # the latter's own gradients are mostly rounding
    assert gap(model, 1.0, allowed=1.0) > 0.1  # a fixed share would have refused it
    assert gap(model, 1.0) == 0.0
    assert min(gap(model, 1.3), gap(chaos, 1.3)) > 0.1
    monkeypatch.setattr("attnrl.local.learn.widens", lambda model: False)
    assert gap(model, 1.0) > 0.1


@pytest.mark.parametrize(("wrong", "kept"), [(1.0, True), (1.3, False)])
def test_a_learner_compares_gradients_over_drawn_tokens(wrong: float, kept: bool) -> None:
    """However short its responses are: over few tokens rounding alone differs by as much as is allowed."""
    model = trained_like(layers=4)
    learner = Learner(prepare_model(model), options=UpdateConfig(kl_weight=0.0))
    learner.shares_prefixes, learner.decoders = False, {id(model): Learning(model, wrong)}  # type: ignore[dict-item]
    short = Sample(as_ids(range(9)), as_ids([7, 8]), as_floats([1.0, 1.0]), as_floats([-1.0, -1.0]), "q")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        assert learner._ways_are_exact([short], [0]) is kept
    assert bool(learner.decoders) is kept
    assert kept or any("fused kernels changed gradients" in str(warning.message) for warning in said)
