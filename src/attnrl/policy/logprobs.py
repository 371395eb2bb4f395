"""Log-probs of packed tokens without a full logits tensor.

Shapes: T tokens of a pack, N loss tokens, U positions that predict them, C of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnrl.attention.head import logits_head
from attnrl.attention.paths import path_attention
from attnrl.policy.packing import Pack

CHUNK_ELEMENTS = 2**27  # of float32 logits held at once when no chunk size is given: 512 MiB


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at once by default; at least 64."""
    return max(64, CHUNK_ELEMENTS // vocabulary)


class Fused(Protocol):
    """A model's forward in kernels of our own: see `attnrl.local.learn`."""

    def hidden(self, ids_T: Tensor, positions_T: Tensor) -> Tensor: ...
    def logprobs(
        self, hidden_UD: Tensor, targets_U: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]: ...


def pack_attention(model: Any, pack: Pack) -> AbstractContextManager[Any]:
    """While open, each sequence of the pack sees only itself and its own prefix.

    Call `backward` inside: gradient checkpointing runs the layers again there. The model is Hugging Face's own.
    """
    return path_attention(model, pack.runs)


def token_logprobs(
    model: Any,
    pack: Pack,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy_gradient: bool = False,
    fused: Fused | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the loss tokens at the sampling temperature, and entropies of their distributions. ([N], [N])

    One forward of the model's body, inside `pack_attention`. The head runs over `chunk` tokens at a time and again in
    `backward`, so that at most one chunk of logits exists.
    """
    size = chunk or chunk_tokens(model.get_output_embeddings().weight.shape[0])
    if fused is not None:
        hidden_UD = fused.hidden(pack.ids_T, pack.positions_T).index_select(0, pack.source_U)
        logprobs, entropy = fused.logprobs(hidden_UD, pack.targets_U, temperature, size)
        entropy = entropy if entropy_gradient else entropy.detach()
    else:
        out = model.base_model(input_ids=pack.ids_T[None], position_ids=pack.positions_T[None], use_cache=False)
        # index_select, not indexing: its backward adds in a fixed order, so that runs on several threads are repeatable
        hidden_UD = out.last_hidden_state[0].index_select(0, pack.source_U)
        logprobs, entropy = _by_chunks(model, hidden_UD, pack.targets_U, temperature, size, entropy_gradient)
    if pack.expand_N is None:
        return logprobs, entropy
    return logprobs.index_select(0, pack.expand_N), entropy.index_select(0, pack.expand_N)


def _by_chunks(
    model: Any, hidden_UD: Tensor, targets_U: Tensor, temperature: float, size: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, from the model's own head over `size` positions at a time. ([U], [U])"""
    logits_of = logits_head(model)

    def head(hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = logits_of(hidden_CD).float() / temperature
        lse_C = logits_CV.logsumexp(-1)
        logprobs_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - lse_C
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            probabilities_CV = (logits_CV - lse_C[:, None]).exp()
            entropy_C = lse_C - (probabilities_CV * logits_CV).sum(-1)
        return logprobs_C, entropy_C

    parts = list(zip(hidden_UD.split(size), targets_U.split(size), strict=True))
    if torch.is_grad_enabled() and len(parts) > 1:
        results = [checkpoint(head, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]
    else:
        results = [head(h, t) for h, t in parts]
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])


def pack_logprobs(
    model: Any, pack: Pack, *, temperature: float = 1.0, chunk: int | None = None, fused: Fused | None = None
) -> Tensor:
    """Log-probs of the loss tokens of a pack, without gradient. [N]"""
    with torch.no_grad(), pack_attention(model, pack):
        return token_logprobs(model, pack, temperature=temperature, chunk=chunk, fused=fused)[0]
