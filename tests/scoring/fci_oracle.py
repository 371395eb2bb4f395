"""Tiny random models and FCI as the paper writes it, from the dense attention that transformers' eager path returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # peaked attention: uniform rows would hide mistakes
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=16),
    "llama": lambda: LlamaConfig(**BASE),
    "mistral_window": lambda: MistralConfig(**BASE, sliding_window=11),
    "gemma2_window_softcap": lambda: Gemma2Config(
        **BASE, head_dim=8, sliding_window=9, query_pre_attn_scalar=8, attn_logit_softcapping=3.0
    ),
    "qwen2_mixed_window": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "gpt_oss_window_sinks": lambda: GptOssConfig(
        **BASE, head_dim=8, sliding_window=9, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi_partial_rotary": lambda: PhiConfig(**BASE, partial_rotary_factor=0.5),
    "glm_partial_rotary": lambda: GlmConfig(**BASE, head_dim=8, partial_rotary_factor=0.5),
}


def tiny(name: str, seed: int = 0) -> torch.nn.Module:
    """A random model of the family, float32, in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    return model.float().eval()


def of_family(family: str, **settings: object) -> torch.nn.Module:
    """A tiny random model of any transformers family, float32, in eval mode."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**BASE, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def longrope_model() -> torch.nn.Module:
    """A tiny Phi-3 whose rotary embedding changes beyond 16 tokens."""
    rope = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
    return of_family("phi3", original_max_position_embeddings=16, max_position_embeddings=64, rope_parameters=rope)


def dense_fci(
    model: torch.nn.Module, ids: Sequence[int], spans: Sequence[tuple[int, int]], delta: int, key_reduce: str = "mean"
) -> np.ndarray:
    """FCI [layers, heads, steps] of one sequence: alpha[j, k] from the full matrices, summed over j >= k + delta."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
    p_LHTT = torch.stack([a[0] for a in out.attentions]).double()
    steps = len(spans)
    y = np.zeros((*p_LHTT.shape[:2], steps))
    for k, (a, b) in enumerate(spans):
        for j in range(k + delta, steps):
            c, d = spans[j]
            block = p_LHTT[:, :, c:d, a:b].mean(2)
            y[:, :, k] += (block.mean(-1) if key_reduce == "mean" else block.sum(-1)).numpy()
    return y


def random_case(rng: np.random.Generator, length: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and ragged steps after a prompt of random length."""
    ids = rng.integers(3, 61, length).tolist()
    token, spans = int(rng.integers(1, 6)), []
    while token < length:
        stop = min(length, token + int(rng.integers(1, 6)))
        spans.append((token, stop))
        token = stop
    return ids, spans
