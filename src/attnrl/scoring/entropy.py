"""Log-probs and entropy from hidden states, a chunk of positions at a time: no full logits tensor.

Shapes: N positions, W model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from attnrl.attention.head import logits_head

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 25}  # of logits held at once; small blocks of memory are reused on a CPU


def stats_of(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, [N] each, in float32; fused on CUDA, plain torch elsewhere."""
    if logits_NV.is_cuda:
        from attnrl.scoring.head_triton import row_stats  # triton is only there with CUDA builds of torch

        return row_stats(logits_NV, targets_N, temperature)
    below_NV = logits_NV.float() / temperature if temperature != 1.0 else logits_NV.float()
    below_NV -= below_NV.amax(-1, keepdim=True)
    chosen_N = below_NV.gather(-1, targets_N[:, None])[:, 0]
    p_NV = below_NV.exp()
    total_N = p_NV.sum(-1)
    # p * x is 0 where p is 0, also for tokens with logit -inf
    mean_N = p_NV.mul_(below_NV.clamp_(min=-1e30)).sum(-1) / total_N
    log_total_N = total_N.log()
    return chosen_N - log_total_N, log_total_N - mean_N


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
    inner: Any = model
    row_bytes = 4 * int(inner.get_output_embeddings().weight.shape[0])
    rows = chunk or max(1, min(4096, CHUNK_BYTES.get(hidden_NW.device.type, 1 << 25) // row_bytes))
    # Results have their place before the first chunk: on a CPU, small ones kept between chunks would lie in the holes
    # that freed logits leave, so that the next logits, as large as the last, find none and the heap grows with each.
    logprobs_N, entropy_N = (torch.empty(len(targets_N), device=hidden_NW.device) for _ in range(2))
    for at in range(0, len(targets_N), rows):
        here = slice(at, at + rows)
        logprobs_N[here], entropy_N[here] = stats_of(head(hidden_NW[here]), targets_N[here], temperature)
    return logprobs_N, entropy_N
