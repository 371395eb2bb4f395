"""Forward Context Influence: how much later reasoning steps attend to each step (Eq. 4-6).

Shapes: T tokens of a pack, H query heads, K key/value heads, D head size, S steps, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from attnrl.algo import position
from attnrl.attention.decoder import body_of, evaluating, lone_from, vocabulary_of
from attnrl.attention.paths import Collector, PathAttention, masked_scores, packed_attention, packed_positions
from attnrl.attention.scores import softmax
from attnrl.attention.trie import bins_by_budget
from attnrl.backend import check_ids
from attnrl.errors import ConfigError, DataError
from attnrl.scoring.plan import KeyReduce, Plan, Span, make_plan
from attnrl.types import Floats, Step

BLOCK_ROWS = 128  # queries at a time on the blockwise path, fewer where ...
BLOCK_ELEMENTS = 1 << 24  # ... their scores would be more than this: 64 MiB of float32
TRITON, TORCH_BLOCKS = "triton", "torch_blocks"
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # token ids and positions, [T] each: hidden states [T, W]


class Sums(Collector, Protocol):
    """Collects one attention layer after the other; `best_S` is the max over layers and heads so far."""

    kinds: set[str]  # which implementations ran
    best_S: torch.Tensor
    heads_LHS: list[torch.Tensor]


class BlockSums:
    """FCI by query blocks in plain torch: exact, on any device, memory linear in the tokens."""

    def __init__(self, plan: Plan, device: torch.device, *, keep_heads: bool = False) -> None:
        self.plan, self.keep_heads, self.kinds = plan, keep_heads, {TORCH_BLOCKS}
        self.best_S = torch.zeros(len(plan.step_S), device=device)
        self.heads_LHS: list[torch.Tensor] = []
        self._weight_T = torch.from_numpy(plan.weight_T).to(device)
        self._qmin_T = torch.from_numpy(plan.qmin_T).to(device)

    def __call__(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, lse_HT: torch.Tensor | None, **shape: Any) -> None:
        q_THD, k_TKD = q_THD.to(self.best_S.device), k_TKD.to(self.best_S.device)  # a model may span devices
        y_HS = step_scores(q_THD, k_TKD, self.plan, self._weight_T, self._qmin_T, **shape)
        if y_HS.numel():
            self.best_S = torch.maximum(self.best_S, y_HS.amax(0).to(self.best_S.dtype))
        if self.keep_heads:
            self.heads_LHS.append(y_HS)


def step_scores(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    plan: Plan,
    weight_T: torch.Tensor,
    qmin_T: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_k of one layer for every head and step of the pack, [H, S], in float32 (float64 inputs: float64).

    Paper: Eq. 5, as the weighted column sum of the attention matrix, built for a block of queries at a time.
    """
    total, heads, _ = q_THD.shape
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    sums_HT = torch.zeros(heads, total, device=q_THD.device, dtype=wide)
    sinks_H11 = None if sinks_H is None else sinks_H.to(q_THD.device)[:, None, None]
    for start, stop, first, last in plan.sequences:
        live = np.flatnonzero(plan.live_S[first:last])
        if not live.size:
            continue
        k_HTD = k_TKD[start:stop].transpose(0, 1).to(wide).repeat_interleave(heads // k_TKD.shape[1], 0)
        rows = max(1, min(BLOCK_ROWS, BLOCK_ELEMENTS // (heads * (stop - start))))
        earliest = int(plan.qmin_T[plan.step_S[first, 0]])  # no query before it counts for any key
        for low in range(earliest, stop, rows):
            high = min(low + rows, stop)
            left = start if window is None else max(start, low - window + 1)
            q_HQD = q_THD[low:high].transpose(0, 1).to(wide)
            scores = masked_scores(q_HQD, k_HTD[:, left - start : high - start], low, left, scale, window, softcap)
            query = torch.arange(low, high, device=q_THD.device)
            counts_QT = (query[:, None] >= qmin_T[None, left:high]) * weight_T[low:high, None].to(wide)
            sums_HT[:, left:high] += torch.einsum("hqt,qt->ht", softmax(scores, sinks_H11), counts_QT)
    return _per_step(sums_HT, plan)


def _per_step(sums_HT: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Sum (or mean) of the column sums over the keys of each step, [H, S]."""
    steps = len(plan.step_S)
    tokens = plan.step_S[:, 1] - plan.step_S[:, 0]
    owner = torch.from_numpy(np.repeat(np.arange(steps), tokens)).to(sums_HT.device)
    inside = [np.arange(a, b) for a, b in plan.step_S]
    index = torch.from_numpy(np.concatenate(inside) if inside else np.zeros(0, np.int64)).to(sums_HT.device)
    y_HS = sums_HT.new_zeros(sums_HT.shape[0], steps).index_add_(1, owner, sums_HT[:, index])
    return y_HS / torch.from_numpy(plan.divisor_S).to(sums_HT)


def fci_kind(device_type: str) -> str:
    """Which FCI implementation runs on a device: the fused kernel on CUDA, query blocks elsewhere."""
    return TRITON if device_type == "cuda" else TORCH_BLOCKS


def make_sums(plan: Plan, device: torch.device, *, keep_heads: bool = False, kind: str | None = None) -> Sums:
    """An empty collector for the layers of a pack."""
    kind = kind or fci_kind(device.type)
    if kind == TRITON:
        from attnrl.scoring.fci_launch import LayerSums  # triton is only there with CUDA builds of torch

        return cast(Sums, LayerSums(plan, device, keep_heads=keep_heads))
    if kind == TORCH_BLOCKS:
        return cast(Sums, BlockSums(plan, device, keep_heads=keep_heads))
    raise ConfigError(f"no FCI implementation {kind!r}; choose {TRITON!r} or {TORCH_BLOCKS!r}")


def split_steps(values: NDArray[Any], counts: Sequence[int]) -> list[NDArray[Any]]:
    """Values over all steps of a pack (last axis), cut into its sequences."""
    return np.split(values, np.cumsum(counts)[:-1], axis=-1)


def fci(
    model: torch.nn.Module,
    input_ids: Any,
    step_spans: Any,
    *,
    delta: int = 4,
    key_reduce: KeyReduce = "mean",
    reduce: Literal["max", "none"] = "max",
    kind: str | None = None,
) -> Any:
    """The Forward Context Influence of reasoning steps under any Hugging Face decoder, from one forward pass.

    `input_ids` is one sequence of token ids (prompt and response), as [T] or as a tokenizer returns it, [1, T]; or a
    list of sequences of any lengths, which are packed where the model allows it, never padded. `step_spans` gives the
    (start, stop) token range of each step, in order; tokens outside every span (the prompt) are context without a
    score. Returned for each sequence: float32 [steps], or with `reduce="none"` [layers, heads, steps], of the layers
    that attend. The last `delta` steps score 0: no step follows at that distance.

    Paper: Eq. 4-6.

    >>> import torch, transformers
    >>> config = transformers.Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1)
    >>> model = transformers.Qwen2ForCausalLM(config)
    >>> for weights in model.parameters():  # zero weights attend uniformly: P[q, t] = 1 / (q + 1)
    ...     _ = torch.nn.init.zeros_(weights)
    >>> scores = fci(model, [5, 6, 7, 8], [(1, 2), (2, 3), (3, 4)], delta=1)
    >>> [round(float(score), 3) for score in scores]  # 1/3 + 1/4, 1/4, 0
    [0.583, 0.25, 0.0]
    """
    single = _is_single(input_ids)
    rows = [_as_row(ids, index) for index, ids in enumerate([input_ids] if single else input_ids)]
    if not rows:
        return []
    check_ids(rows, vocabulary_of(model), "sequence")
    spans: list[Sequence[Span]] = [step_spans] if single else list(step_spans)
    if len(spans) != len(rows):
        raise DataError(f"{len(rows)} sequences but {len(spans)} lists of step spans")
    if reduce not in ("max", "none"):
        raise ConfigError(f"reduce must be 'max' or 'none'; got {reduce!r}")
    lengths = [len(row) for row in rows]
    device = next(model.parameters()).device
    parts: list[NDArray[Any]] = [np.zeros(0)] * len(rows)
    for members in bins_by_budget(lengths, sum(lengths), lone_from(model)):
        packed = [lengths[i] for i in members]
        plan = make_plan(packed, [spans[i] for i in members], delta=delta, key_reduce=key_reduce)
        sums = make_sums(plan, device, keep_heads=reduce == "none", kind=kind)
        run_body(model, np.concatenate([rows[i] for i in members]), packed, sums)
        values = (sums.best_S if reduce == "max" else torch.stack(sums.heads_LHS)).float().cpu().numpy()
        for index, part in zip(members, split_steps(values, plan.counts), strict=True):
            parts[index] = part
    return parts[0] if single else parts


def run_body(
    model: torch.nn.Module,
    ids_T: NDArray[np.integer[Any]],
    lengths: Sequence[int],
    collector: Collector | None,
    body: Body | None = None,
) -> tuple[torch.Tensor, PathAttention]:
    """One forward of the model below its head over packed sequences, without gradients and dropout.

    Returns the hidden states [T, width] and what attention did. `body` runs in the place of the model's own forward.
    """
    device = next(model.parameters()).device
    ids, positions = torch.from_numpy(ids_T.astype(np.int64))[None].to(device), packed_positions(lengths, device)
    with evaluating(model), packed_attention(model, lengths, collector=collector) as pack:
        if body is not None:
            hidden_TW = body(ids[0], positions[0])
        else:
            out = body_of(model)(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
            hidden_TW = out.last_hidden_state[0]
    if pack.calls == 0:
        raise ConfigError(f"{type(model).__name__} never called transformers' attention interface")
    return hidden_TW, pack


def _is_single(input_ids: Any) -> bool:
    if isinstance(input_ids, torch.Tensor | np.ndarray):
        if input_ids.ndim == 1 or (input_ids.ndim == 2 and len(input_ids) == 1):
            return True
        raise DataError("input_ids must be one sequence, [T] or [1, T], or a list of sequences; no padding")
    return len(input_ids) > 0 and np.ndim(input_ids[0]) == 0


def _as_row(ids: Any, index: int) -> NDArray[np.int64]:
    row = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
        raise DataError(f"sequence {index}: token ids must be a non-empty list of integers")
    return row.astype(np.int64)


def position_null(
    steps: Sequence[Span], prompt_tokens: int, *, delta: int = 4, key_reduce: KeyReduce = "mean"
) -> Floats:
    """What uniform causal attention, P[q, t] = 1 / (q + 1), would score: [S]. FCI above it is not position alone.

    Spans are token ranges of the response; `prompt_tokens` come before it.

    >>> [round(float(null), 3) for null in position_null([(0, 1), (1, 2), (2, 3)], 1, delta=1)]
    [0.583, 0.25, 0.0]
    """
    null = position.position_null(prompt_tokens, [Step(a, b) for a, b in steps], delta)
    if key_reduce == "sum":
        null = null * np.array([b - a for a, b in steps])
    return null.astype(np.float32)
