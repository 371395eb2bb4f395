"""What a config will need: memory by item, tokens and seconds of an iteration. Plain arithmetic, stated line by line.

Bytes are those of one process that holds everything (the local engine). `attnrl check` prints them for a model, and
the table of docs/own_model.md is made of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnrl.config import Config, ModelConfig
from attnrl.errors import ConfigError

MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "adamw_offloaded": 0.0}  # of a trained weight, on the device
LOGIT_ELEMENTS = 2**27  # logits of a chunk, by default (attnrl.policy.logprobs)
GB = 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder-only model that memory depends on."""

    weights: int
    trained: int  # weights that are trained: all of them, or those of the adapters
    layers: int
    attending: int  # of these layers
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int  # width of the gated layer
    vocabulary: int


def shape_of(model: Any, options: ModelConfig) -> Shape:
    """The shape of a Hugging Face config: weights are counted on a model that is built without memory for them."""
    import torch
    from transformers import AutoModelForCausalLM

    from attnrl.attention.decoder import attending_layers, read_config
    from attnrl.local.models import lora_layers

    config = read_config(model) if isinstance(model, str) else model
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in built.parameters())
    trained = weights
    if options.lora_rank:
        trained = sum(options.lora_rank * sum(layer.weight.shape) for layer in lora_layers(built, options))
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise ConfigError(f"{type(text).__name__} names no attention heads: a model without attention has no FCI")
    return Shape(
        weights=weights,
        trained=trained,
        layers=text.num_hidden_layers,
        attending=len(attending_layers(config)),
        width=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
    )


def memory(shape: Shape, config: Config, *, weight_bytes: int, cached_rows: int = 0) -> dict[str, float]:
    """Bytes by item while the policy is updated, the sampler's cache beside it.

    `weight_bytes`: 2 for bfloat16, 4 for float32. `cached_rows`: responses of full length in the sampler's cache.
    """
    update, half = config.update, weight_bytes < 4
    masters = half and not host_memory(shape, config)
    reference = update.kl_weight > 0 and not config.model.lora_rank
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    return {
        "weights": shape.weights * weight_bytes,
        "float32 masters": shape.trained * 4 if masters else 0,
        "Adam": shape.trained * MOMENT_BYTES[update.optimizer],
        "gradients": shape.trained * 4,
        "reference": shape.weights * weight_bytes if reference else 0,
        "activations": activations(shape, config, weight_bytes=weight_bytes),
        "cache": cached_rows * longest * cache_bytes(shape, weight_bytes),
    }


def host_memory(shape: Shape, config: Config) -> int:
    """Bytes of host memory that an offloaded optimizer takes: float32 masters and both moments."""
    return shape.trained * 12 if config.update.optimizer == "adamw_offloaded" else 0


def cache_bytes(shape: Shape, weight_bytes: int) -> int:
    """Keys and values of one token."""
    return 2 * shape.attending * shape.kv_heads * shape.head_size * weight_bytes


def activations(shape: Shape, config: Config, *, weight_bytes: int) -> int:
    """Bytes that forward and backward over one microbatch hold, its logits included.

    A layer keeps, per token: four arrays of the gated layer; around each of its two norms the input, a float32 copy
    and the result; queries, keys, values and the attention's output. Of the first layers, those that run again, each
    keeps its input and what attention gave, which is counted for short sequences too; once the others have given
    their memory back, one at a time holds all of this and the gradients of the gated layer's arrays. "auto" is counted
    as "all", the least it takes. Logits are a chunk, its probabilities and its gradient in float32.
    """
    update = config.update
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    tokens = max(update.microbatch_tokens, longest)
    attended = 2 * (shape.heads + shape.kv_heads) * shape.head_size
    layer = weight_bytes * (4 * shape.inner + attended) + 2 * shape.width * (2 * weight_bytes + 4)
    asked = {"none": 0, "all": shape.layers, "auto": shape.layers}.get(str(update.gradient_checkpointing))
    again = int(update.gradient_checkpointing) if asked is None else asked
    one = layer + 3 * shape.inner * weight_bytes if again else 0
    entry = weight_bytes * (shape.width + shape.heads * shape.head_size)
    kept = again * entry + max((shape.layers - again) * layer, one)
    chunk = LOGIT_ELEMENTS // shape.vocabulary if update.logit_chunk_tokens is None else update.logit_chunk_tokens
    logits = 3 * 4 * min(tokens, chunk) * shape.vocabulary
    return tokens * kept + logits


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one iteration."""

    generated: float
    scored: float
    trained: float  # of all paths, before prefixes are shared


def work(config: Config, *, prompt: float, length: float, trees: float, points: float) -> Work:
    """Tokens of an iteration whose responses have `length` tokens on average, after prompts of `prompt` tokens.

    Of the trunks of a prompt `trees` are branched, at `points` places each; a branch is taken to draw half a response.
    """
    algo = config.algo
    branches = trees * points * algo.width
    trunks = algo.prompts * algo.group
    return Work(
        generated=trunks * length + algo.prompts * branches * length / 2,
        scored=trunks * (prompt + length),
        trained=algo.prompts * (algo.group + branches) * (prompt + length),
    )
