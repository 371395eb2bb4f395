"""The step-to-step attention of one head: what FCI sums up, in full.

Shapes: T tokens, H query heads, K key heads, D head size, S steps, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnrl.attention.paths import masked_scores
from attnrl.attention.scores import softmax
from attnrl.scoring.fci import run_body

BLOCK_ELEMENTS = 1 << 24  # scores held at a time: 64 MiB of float32


class HeadAttention:
    """Collects alpha[j, k] of one layer and head: mean over the queries of step j and over the keys of step k."""

    def __init__(self, spans: Sequence[tuple[int, int]], layer: int, head: int) -> None:
        self.spans, self.layer, self.head = np.asarray(spans, dtype=np.int64).reshape(-1, 2), layer, head
        self.alpha_SS: NDArray[np.float32] = np.zeros((len(spans), len(spans)), dtype=np.float32)
        self._seen = 0

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        lse_HT: torch.Tensor | None,
        *,
        sinks_H: torch.Tensor | None,
        **shape: Any,
    ) -> None:
        if self._seen == self.layer:
            group = q_THD.shape[1] // k_TKD.shape[1]
            q_TD, k_TD = q_THD[:, self.head].float(), k_TKD[:, self.head // group].float()
            sink = None if sinks_H is None else sinks_H[self.head]
            self.alpha_SS = step_means(q_TD, k_TD, self.spans, sink=sink, **shape)
        self._seen += 1


def step_means(
    q_TD: torch.Tensor,
    k_TD: torch.Tensor,
    spans: NDArray[np.int64],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> NDArray[np.float32]:
    """alpha[j, k] of one head over one sequence, by blocks of queries. Paper: Eq. 4."""
    tokens, device = len(q_TD), q_TD.device
    starts, stops = (torch.from_numpy(spans[:, i].copy()).to(device) for i in (0, 1))
    sizes = (stops - starts).clamp(min=1)
    step_T = torch.full((tokens,), len(spans), device=device)  # the last row takes what belongs to no step
    for number, (a, b) in enumerate(spans.tolist()):
        step_T[a:b] = number
    sums = torch.zeros(len(spans) + 1, len(spans), device=device)
    block = max(1, BLOCK_ELEMENTS // tokens)
    for first in range(0, tokens, block):
        rows = torch.arange(first, min(first + block, tokens), device=device)
        scores_BT = masked_scores(q_TD[rows], k_TD, first, 0, scale, window, softcap)
        weights_BT = softmax(scores_BT, sink)
        total_BT = torch.nn.functional.pad(weights_BT.double().cumsum(dim=1), (1, 0))
        by_step_BS = ((total_BT[:, stops] - total_BT[:, starts]) / sizes).float()
        sums.index_add_(0, step_T[rows], by_step_BS)
    alpha: NDArray[np.float32] = (sums[:-1] / sizes[:, None]).cpu().numpy()
    return alpha


def step_attention(
    model: torch.nn.Module, input_ids: Any, spans: Sequence[tuple[int, int]], *, layer: int, head: int
) -> NDArray[np.float32]:
    """[S, S] attention of step j (row) to step k (column) under one head of any Hugging Face decoder; 0 for later k.

    `layer` is counted among those that attend.
    """
    ids = np.asarray(input_ids)
    collected = HeadAttention(spans, layer, head)
    run_body(model, ids, [len(ids)], collected)
    return collected.alpha_SS


def deciding_head(heads_LHS: NDArray[np.float32]) -> tuple[int, int]:
    """The (layer, head) that is the largest for most steps that score at all; of equals, the larger in total (Eq. 6).

    >>> deciding_head(np.array([[[3, 0, 1], [1, 2, 0]], [[0, 1, 9], [0, 0, 0]]], dtype=np.float32))
    (1, 0)
    """
    layers, heads, steps = heads_LHS.shape
    flat = heads_LHS.reshape(layers * heads, steps)
    scored = flat.max(axis=0) > 0
    wins = np.bincount(flat.argmax(axis=0)[scored], minlength=layers * heads)
    best = max(range(layers * heads), key=lambda i: (wins[i], float(flat[i].sum())))
    return best // heads, best % heads
