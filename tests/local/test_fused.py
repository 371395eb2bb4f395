"""Which kernel computes gate and up, and where kernels may start early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")

from attnrl.attention.early import early
from attnrl.local import fused as fused_module
from attnrl.local import products_triton
from attnrl.local.fused import FusedDecoder, _Joined, decoder_layers


def decoder(answer: torch.Tensor, few: bool = False) -> FusedDecoder:
    """One whose Hopper kernel fits every input and gives `answer`, and whose plain way multiplies the two halves."""
    made = FusedDecoder.__new__(FusedDecoder)
    made.kernels = SimpleNamespace(gate=lambda gate, up: gate * up)
    made.products = SimpleNamespace(fits=lambda x: few, gated=lambda x, weight: torch.zeros(1))
    made.gated = SimpleNamespace(
        fits=lambda x, weight: True,
        width=lambda x, weight: 64 if len(x) < 5 else 128,
        gated=lambda x, weight, wide: answer[: len(x)],
    )
    made.compared = set()
    return made


def joined(bias: bool = False) -> tuple[_Joined, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(4, 6, bias=bias) for _ in range(2)]
    both = _Joined(parts, copy=True)
    both.refresh()
    x = torch.randn(5, 4)
    with torch.no_grad():
        return both, x, parts[0](x) * parts[1](x)


@torch.no_grad()
def test_many_tokens_go_to_the_hopper_kernel_which_is_compared_once_a_width() -> None:
    both, x, truth = joined()
    fused = decoder(truth + 1e-6)
    assert torch.equal(fused._gated(both, x), truth + 1e-6)
    plain, fused.kernels = fused.kernels, None  # from now on nothing is compared
    assert torch.equal(fused._gated(both, x), truth + 1e-6)
    with pytest.raises(AttributeError):
        fused._gated(both, x[:4])  # tiles of another width are
    fused.kernels = plain
    fused.compared.discard(64)
    assert torch.equal(fused._gated(both, x[:4]), truth[:4] + 1e-6)
    assert fused.compared == {64, 128}


@torch.no_grad()
def test_of_many_tokens_the_product_adds_the_residual(monkeypatch) -> None:
    """The same sum as the module's result added afterwards, which few tokens and biases get."""
    monkeypatch.setattr(fused_module, "MANY", 5)
    fused = decoder(torch.zeros(1))
    for module in (torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(4, 6)):
        x, residual = torch.randn(5, 4), torch.randn(5, 6)
        expected = residual + module(x)
        for count in (5, 4):
            into = residual[:count].clone()
            after = fused._summed(module, x[:count], into)
            assert (after is None) == (count == 5 and module.bias is None)
            torch.testing.assert_close(into if after is None else into + after, expected[:count])


@torch.no_grad()
def test_a_kernel_that_gives_other_numbers_is_left_with_a_word() -> None:
    both, x, truth = joined()
    fused = decoder(truth + 1.0)
    with pytest.warns(UserWarning, match="gate and up run as two kernels"):
        torch.testing.assert_close(fused._gated(both, x), truth)
    assert fused.gated is None
    torch.testing.assert_close(fused._gated(both, x), truth)


@torch.no_grad()
def test_few_tokens_and_biases_do_not_go_there() -> None:
    both, x, truth = joined()
    assert decoder(truth, few=True)._gated(both, x).tolist() == [0.0]
    both, x, truth = joined(bias=True)
    torch.testing.assert_close(decoder(truth + 1.0)._gated(both, x), truth)


def test_kernels_start_early_on_hopper_gpus_and_later_alone(monkeypatch) -> None:
    capability = {"cuda:1": (8, 9), "cuda:2": (9, 0), "cuda:3": (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[str(device)])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = {name: bool(early.__wrapped__(torch.device(name))) for name in ("cpu", *capability)}
    assert found == {"cpu": False, "cuda:1": False, "cuda:2": True, "cuda:3": True}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert early.__wrapped__(torch.device("cuda:2")) == {}
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert early.__wrapped__(torch.device("cuda:2")) == {}


def test_turns_are_those_of_short_sequences_also_after_a_long_one() -> None:
    """Dynamic rotary frequencies change with the longest sequence seen, and go back with a shorter one alone."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).eval()
    layers = decoder_layers(model.model, copy=True)
    assert layers is not None
    fused, made = FusedDecoder(model, layers), []
    for _ in range(2):
        fused.refresh(128)
        made.append(fused.turns)
        fused.release()
        with torch.no_grad():
            model(torch.zeros(1, 200, dtype=torch.int64))
    torch.testing.assert_close(made[0], made[1], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("rows", "width", "parts"),
    [(1536, 8960, 4), (1536, 1536, 4), (2048, 1536, 3), (576, 1536, 6), (3584, 18944, 2), (4608, 3584, 1), (64, 64, 1)],
)
def test_parts_of_a_product_make_about_as_many_programs_and_none_is_empty(rows: int, width: int, parts: int) -> None:
    weight = torch.empty(rows, width, device="meta")
    assert products_triton.parts_of(weight) == parts
    turns = -(-width // products_triton.SUMMED[1])
    assert (parts - 1) * -(-turns // parts) < turns
