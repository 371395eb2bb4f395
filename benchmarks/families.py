"""Tiny random models of the families that remember beside attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnrl.local.models import prepare_model

VOCABULARY = 61
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
MAMBA_1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}


def _turns(kind: str, attention: str = "full_attention") -> dict[str, Any]:
    return {"layer_types": [kind, attention] * 2}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2": {**_turns("conv"), "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_turns("conv"), **EXPERTS, "num_dense_layers": 1},
    "lfm3": _turns("conv"),
    "granitemoehybrid": {
        **MAMBA, **_turns("mamba", "attention"), "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8, "expand": 2,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "olmo_hybrid": {**_turns("linear_attention"), **DELTA},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {
        **MAMBA_1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1,
    },
    "zamba": {
        **MAMBA_1, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4,
        "use_shared_attention_adapter": False,
    },
    "kimi_linear": {
        **LATENT, **LOCAL_EXPERTS, **_turns("linear_attention"), "linear_head_dim": 8, "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **LATENT, **LOCAL_EXPERTS, **_turns("linear_attention"), "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
    },
    "zaya": {},
    "minimax": {**_turns("linear_attention"), "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8},
}  # fmt: skip
SPREAD = {"zamba2": 0.1}  # of the weights; where it is wider, transformers' own forward with a cache differs by 3e-4
NOT_SAMPLED = {"minimax", "recurrent_gemma"}  # they keep their states in a cache of their own, or in their modules


def remembering(family: str, **settings: Any) -> Any:
    """A random float32 model of the family, in eval mode, whose attention and states matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.normal_(0, SPREAD.get(family, 0.15))
    return prepare_model(model)
