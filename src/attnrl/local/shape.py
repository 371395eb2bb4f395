"""New models by their shape, with random weights."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator

from attnrl.config import Section
from attnrl.errors import ConfigError
from attnrl.local.models import prepare_model


class Shape(Section):
    """The architecture of a new model."""

    family: Literal["qwen3", "llama", "qwen2"] = "qwen3"
    """Model family. qwen2 needs our own tokenizer loading: AutoTokenizer replaces the splitting rules of that type."""
    layers: int = 4
    """Decoder layers."""
    width: int = 192
    """Hidden size."""
    heads: int = 6
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides `heads`."""
    head_size: int = 32
    """Size of a head, at least 32."""
    mlp: int | None = None
    """Size of the feed-forward layer; by default 8/3 of the width, in multiples of 64."""
    positions: int = 4096
    """Longest sequence."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.head_size < 32 or self.head_size % 2:
            raise ValueError(f"head_size must be even and at least 32, not {self.head_size}")
        return self


def new_model(shape: Shape, tokenizer: Any, *, seed: int = 0) -> Any:
    """A random float32 model with tied embeddings for this tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family,
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.mlp or -(-shape.width * 8 // (3 * 64)) * 64,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if shape.family == "qwen2" and shape.head_size * shape.heads != shape.width:
        raise ConfigError(f"qwen2 needs heads * head_size = width; {shape.heads} * {shape.head_size} != {shape.width}")
    torch.manual_seed(seed)
    return prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"))
