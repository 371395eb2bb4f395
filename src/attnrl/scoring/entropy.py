"""Log-probs and entropy from hidden states, a chunk of positions at a time: no full logits tensor.

Shapes: N positions, W model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional as F

CHUNK_ELEMENTS = 1 << 27  # logits held at once: 512 MiB of float32


def logits_head(model: torch.nn.Module) -> Any:
    """A function from hidden states [N, W] to float32 logits [N, V], with the model's own soft-cap or scaling."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    multiply = getattr(config, "logit_scale", None)  # Cohere
    divide = getattr(config, "logits_scaling", None)  # Granite

    def head_fn(hidden_NW: torch.Tensor) -> torch.Tensor:
        logits_NV = head(hidden_NW)
        if multiply is not None:
            logits_NV = logits_NV * multiply
        if divide is not None:
            logits_NV = logits_NV / divide
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV.float()

    return head_fn


def logprobs_and_entropy(
    model: torch.nn.Module,
    hidden_NW: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target token and entropy in nats of each next-token distribution, [N] each, in float32.

    Call it without gradients: the learner has its own form with a backward pass.
    """
    head = logits_head(model)
    vocabulary = int(cast(Any, model).get_output_embeddings().weight.shape[0])
    rows = chunk or max(1, min(2048, CHUNK_ELEMENTS // vocabulary))
    logprobs, entropies = [], []
    for start in range(0, len(targets_N), rows):
        logits_NV = head(hidden_NW[start : start + rows])
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        log_p_NV = F.log_softmax(logits_NV, -1)
        logprobs.append(log_p_NV.gather(-1, targets_N[start : start + rows, None])[:, 0])
        # p log p is 0 where p is 0, also for tokens with logit -inf
        entropies.append(torch.special.entr(log_p_NV.exp()).sum(-1))
    if not logprobs:
        return hidden_NW.new_zeros(0).float(), hidden_NW.new_zeros(0).float()
    return torch.cat(logprobs), torch.cat(entropies)
