"""Gradients of the learner with and without its own kernels, a JSON line a case; TRITON_INTERPRET=1 or a GPU."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from attnrl.config import UpdateConfig
from attnrl.local import recompute
from attnrl.local.learn import Gate, gives_logits, learning_decoder
from attnrl.local.learner import Learner
from attnrl.local.models import prepare_model
from attnrl.scoring import score
from attnrl.types import Sample, ScoreRequest, Step, as_floats, as_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
KINDS: dict[str, Any] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
}


def make(kind: str, dtype: torch.dtype, plain_head: bool = False) -> Any:
    """`plain_head`: its logits are rounded to half precision, and it is frozen."""
    config, model, more = KINDS[kind]
    torch.manual_seed(0)
    made = model(config(**SHAPE, **more, attn_implementation="eager"))
    for name, weight in made.named_parameters():
        if "norm" in name:  # ones hide a wrong gradient
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model = prepare_model(made.to(device=DEVICE, dtype=dtype), float32_logits=not plain_head)
    model.lm_head.requires_grad_(not plain_head)
    return model


def samples() -> list[Sample]:
    """Two groups of a trunk and its branches."""
    rng = np.random.default_rng(0)
    found = []
    for group, prompt in enumerate((as_ids(rng.integers(0, 37, 5)), as_ids(rng.integers(0, 37, 9)))):
        trunk = rng.integers(0, 37, 7)
        for cut in (7, 3):
            tail = np.concatenate([trunk[:cut], rng.integers(0, 37, 7 - cut)])
            found.append(
                Sample(prompt, as_ids(tail), as_floats(rng.normal(size=7)), as_floats(np.full(7, -3.5)), str(group))
            )
    return found


def gradients(learner: Learner, rows: list[Sample]) -> torch.Tensor:
    learner.accumulate(rows, [[0, 1], [2, 3]])
    return torch.cat([m.grad.flatten() for m in learner.optimizer.masters if m.grad is not None])


def check_counting(rows: list[Sample]) -> None:
    """What fused layers keep is counted, and nothing changes by it: their input, and what attention returns."""
    found = []
    recompute.free_bytes = lambda device: 1e12
    for again in ("none", "auto"):
        options = UpdateConfig(kl_weight=0.0, gradient_checkpointing=again, fused=True)
        learner = Learner(make("qwen2", torch.float32), options=options)
        found.append(gradients(learner, rows))
    kept = learner.recompute.kept
    assert kept is not None
    heads = SHAPE["num_attention_heads"]
    entry = 4 * (SHAPE["hidden_size"] + heads * SHAPE["head_dim"] + heads)  # a log-sum-exp for each head
    assert kept.entry == entry if DEVICE == "cpu" else entry <= kept.entry < 2 * entry, kept  # a GPU's kernels pad it
    assert kept.whole > 5 * kept.entry
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


def check_scoring() -> None:
    """Scores by the fused forward are the model's own, and a forward that differs is refused with a word."""
    model = make("qwen3", torch.float32)
    decoder = learning_decoder(model, lambda index, forward, *args, **given: forward(*args, **given))
    assert decoder is not None
    assert gives_logits(model, decoder)
    rng = np.random.default_rng(1)
    steps = tuple(Step(i, i + 4) for i in range(0, 24, 4))
    asked = [ScoreRequest(as_ids(rng.integers(0, 37, n)), as_ids(rng.integers(0, 37, 24)), steps) for n in (3, 8)]
    own, fused = (score(model, asked, delta=1, temperature=0.7, body=body) for body in (None, decoder.hidden))
    for a, b in zip(own, fused, strict=True):
        for name in ("logprobs", "entropy", "fci"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=2e-5, err_msg=name)
        assert a.fci.max() > 0.1
    decoder.layers = decoder.layers[:1]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not gives_logits(model, decoder)
    assert any("scoring runs unfused" in str(w.message) for w in said)


def check_once() -> None:
    """The gradients of a gate take its place: a second backward is an error, not a wrong number."""
    gate, up = (torch.randn(4, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    out = Gate.apply(gate * 1.0, up * 1.0).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def main() -> None:
    warnings.filterwarnings("error", message=".*(fused|shared)")
    rows = samples()
    cases: list[tuple[str, torch.dtype, bool, Any, bool]] = [
        ("qwen2", torch.float32, False, "none", False),
        ("qwen3", torch.float32, True, 1, False),
        ("llama", torch.bfloat16, True, "all", False),
        ("llama", torch.bfloat16, True, "all", True),
    ]
    for kind, dtype, both, again, plain_head in cases:
        found = []
        for fused in (False, True):
            options = UpdateConfig(
                kl_weight=0.1, entropy_weight=0.05, share_prefixes=both, gradient_checkpointing=again, fused=fused,
                logit_chunk_tokens=7,
            )  # fmt: skip
            policy, reference = (make(kind, dtype, plain_head) for _ in range(2))
            learner = Learner(policy, reference, options=options, temperature=0.8)
            assert bool(learner.decoders) == fused
            found.append(gradients(learner, rows))
            metrics = learner.update(rows, version=1)  # looks whether its kernels are exact; a warning is an error here
            assert bool(learner.decoders) == fused
            assert learner.checked
        plain, ours = found
        case = {"kind": kind, "dtype": str(dtype), "shared": both, "again": again}
        print(
            json.dumps(
                case | {"error": float((ours - plain).norm() / plain.norm()), "norm": metrics["policy/grad_norm"]}
            )
        )
    check_counting(rows)
    check_scoring()
    check_once()


if __name__ == "__main__":
    main()
