"""The head of a half-precision model gives float32: the sums as they are, with gradients, wherever the model goes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from attnrl.attention.head import Float32Head, check_head, logits_head, plain_head, widen_head
from attnrl.config import load_config
from attnrl.errors import ConfigError
from attnrl.local.backend import build

SHAPE = {"vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def tiny(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True, attn_implementation="eager"))
    return model.to(dtype).eval()


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (1, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_products_summed_in_float32(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 40, bias=bias).requires_grad_(False).bfloat16()
    x = torch.randn(*shape).bfloat16()
    rounded = head(x)
    head.__class__ = Float32Head
    found = head(x)
    assert found.dtype == torch.float32
    assert found.shape == rounded.shape
    exact = x.double() @ head.weight.double().T + (head.bias.double() if bias else 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)
    assert float((rounded.double() - exact).abs().max()) > 1e-3  # what rounding would have made of it


def test_gradients_are_those_of_the_rounded_head_up_to_rounding() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8).bfloat16().requires_grad_()
    plain = torch.nn.Linear(8, 40, bias=False).bfloat16()
    wide = copy.deepcopy(plain)
    wide.__class__ = Float32Head
    weights = torch.randn(6, 40)
    truth_x = weights @ plain.weight.float()
    truth_w = weights.T @ x.float()
    for head in (plain, wide):
        found_x, found_w = torch.autograd.grad((head(x).float() * weights).sum(), [x, head.weight])
        assert found_x.dtype == found_w.dtype == torch.bfloat16
        for found, truth in ((found_x, truth_x), (found_w, truth_w)):
            assert float((found.float() - truth).detach().norm() / truth.detach().norm()) < 1e-2
    frozen = copy.deepcopy(wide).requires_grad_(False)
    assert torch.equal(torch.autograd.grad((frozen(x) * weights).sum(), [x])[0], found_x)


def test_the_whole_model_its_copies_and_its_files(tmp_path: Path) -> None:
    model = tiny()
    ids = torch.arange(7)[None]
    rounded = model(input_ids=ids).logits
    widen_head(model)
    assert rounded.dtype == torch.bfloat16
    for one in (model, copy.deepcopy(model)):
        logits = one(input_ids=ids).logits
        assert logits.dtype == torch.float32
        assert torch.equal(logits.bfloat16(), rounded)  # rounded it is what it was
        assert one.lm_head.weight is one.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(again.lm_head) is torch.nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_model_in_float32_is_left_as_it_is() -> None:
    model = tiny(torch.float32)
    widen_head(model)
    assert type(model.lm_head) is torch.nn.Linear


def test_a_head_whose_logits_are_scaled_is_not_plain() -> None:
    assert plain_head(tiny()) is not None
    scaled = CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.5)).bfloat16().eval()
    widen_head(scaled)
    assert plain_head(scaled) is None
    hidden = torch.randn(3, 32).bfloat16()
    torch.testing.assert_close(logits_head(scaled)(hidden), 0.5 * hidden.float() @ scaled.lm_head.weight.float().T)


def test_hidden_states_that_differ_by_rounding_give_nearer_log_probs() -> None:
    """With logits of some tens, as trained models have them, rounding those is a large part of the difference."""
    torch.manual_seed(0)
    head = torch.nn.Linear(256, 500, bias=False).requires_grad_(False).bfloat16()
    ours = torch.randn(200, 256).mul_(12).bfloat16()
    theirs = torch.where(torch.rand(200, 256) < 0.05, ours * (1 + 2.0**-8), ours)
    assert 16 < float(head(ours).abs().max()) < 64
    gaps = []
    for kind in (torch.nn.Linear, Float32Head):
        head.__class__ = kind
        a, b = (head(x).float().log_softmax(-1) for x in (ours, theirs))
        gaps.append(float((a - b).abs().mean()))
    assert gaps[1] < 0.7 * gaps[0], gaps


@pytest.mark.parametrize("wide", [True, False])
def test_the_key_decides(tmp_path: Path, wide: bool) -> None:
    from attnrl.data.task_tokenizer import task_tokenizer

    tokenizer = task_tokenizer()
    Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"vocab_size": len(tokenizer)})).save_pretrained(tmp_path)
    keys = {"engine.local.device": "cpu", "model.dtype": "bfloat16", "engine.local.float32_logits": wide}
    engine = build(load_config("", keys), model=str(tmp_path), tokenizer=tokenizer)
    assert engine.learner is not None
    for model in (engine.model, engine.learner.reference):
        assert isinstance(model.lm_head, Float32Head) is wide


def test_a_body_that_is_not_run_whole_is_refused() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32)).eval()
    with pytest.raises(ConfigError, match="OPTForCausalLM does more than project"):
        check_head(model)
