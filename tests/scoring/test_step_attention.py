"""The attention map of a head against dense attention, and against the FCI it sums up to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from attnrl.scoring import fci
from attnrl.scoring import step_attention as module
from attnrl.scoring.step_attention import deciding_head, step_attention

SPANS = [(3, 7), (7, 8), (8, 15), (15, 21), (21, 24)]


@pytest.fixture(scope="module", params=["qwen2", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    """With and without attention sinks."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 9}
    config = transformers.CONFIG_MAPPING[request.param](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        **experts if request.param == "gpt_oss" else {},
    )
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weights in made.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(weights, std=0.6)  # far from uniform attention
    return made


@pytest.mark.parametrize("block", [1 << 24, 24 * 5])
def test_it_is_the_mean_of_dense_attention(model: torch.nn.Module, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)  # also where the last block is smaller
    ids = np.random.default_rng(0).integers(0, 64, 24)
    with torch.no_grad():
        dense = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
    for layer, head in [(0, 1), (1, 3)]:
        found = step_attention(model, ids, SPANS, layer=layer, head=head)
        weights = dense[layer][0, head].numpy()
        expected = [[weights[a:b, c:d].mean() for c, d in SPANS] for a, b in SPANS]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert found[0, 1] == 0.0  # nothing attends to what comes later


def test_its_columns_sum_up_to_fci(model: torch.nn.Module) -> None:
    """y_k of a head is the sum of alpha[j, k] over j >= k + delta (Eq. 5)."""
    ids = np.random.default_rng(1).integers(0, 64, 24)
    heads = fci(model, ids, SPANS, delta=2, reduce="none")
    layer, head = deciding_head(heads)
    alpha = step_attention(model, ids, SPANS, layer=layer, head=head)
    summed = [alpha[k + 2 :, k].sum() for k in range(len(SPANS))]
    np.testing.assert_allclose(heads[layer, head], summed, atol=1e-5)
