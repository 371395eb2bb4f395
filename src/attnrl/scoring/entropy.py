"""Log-probs and entropy from hidden states, a chunk of positions at a time: no full logits tensor.

Shapes: N positions, W model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from attnrl.errors import ConfigError
from attnrl.scoring.fci import body_of

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 25}  # of logits held at once; small blocks of memory are reused on a CPU


def logits_head(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from hidden states [N, W] to logits [N, V] in the model's dtype, with its own scaling and soft-cap."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    multiply = getattr(config, "logit_scale", None)  # Cohere
    divide = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    def logits(hidden_NW: torch.Tensor) -> torch.Tensor:
        logits_NV = head(hidden_NW)
        if multiply is not None:
            logits_NV = logits_NV * multiply
        if divide is not None:
            logits_NV = logits_NV / divide
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    return logits


_CHECKED: WeakSet[torch.nn.Module] = WeakSet()


def check_head(model: torch.nn.Module) -> None:
    """Raise where `logits_head` does not give the model's own logits: some models transform hidden states before it.

    Runs the model on four tokens, once.
    """
    if model in _CHECKED:
        return
    inner: Any = model
    hidden: list[torch.Tensor] = []
    hook = body_of(model).register_forward_hook(lambda _module, _args, out: hidden.append(out.last_hidden_state))
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % inner.get_input_embeddings().weight.shape[0]
    try:
        with torch.no_grad():
            want = inner(input_ids=ids, use_cache=False).logits.float()
            got = logits_head(model)(hidden[0]).float()
    finally:
        hook.remove()
    if float((got - want).norm()) > 0.05 * float(want.norm()):
        raise ConfigError(f"{type(model).__name__} does more than project its hidden states to logits: not supported")
    _CHECKED.add(model)


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
    row_bytes = int(inner.get_output_embeddings().weight.shape[0]) * hidden_NW.element_size()
    rows = chunk or max(1, min(4096, CHUNK_BYTES.get(hidden_NW.device.type, 1 << 25) // row_bytes))
    parts = [
        stats_of(head(hidden_NW[at : at + rows]), targets_N[at : at + rows], temperature)
        for at in range(0, len(targets_N), rows)
    ]
    if not parts:
        return hidden_NW.new_zeros(0).float(), hidden_NW.new_zeros(0).float()
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
