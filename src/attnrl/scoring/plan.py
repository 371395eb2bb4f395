"""What FCI needs to know of a pack: which queries count for which keys, and with which weight.

Shapes: T tokens of a pack, S steps of the pack (all sequences, in order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attnrl.errors import DataError

KeyReduce = Literal["mean", "sum"]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The weighted column sum of a pack, on the host.

    y_k = sum over keys t of step k, over queries q >= qmin_t, of w_q * P[q, t], divided by the step's divisor.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]  # steps of each sequence
    qmin_T: NDArray[np.int32]  # first query that counts for a key; the sequence's end where none does
    weight_T: NDArray[np.float32]  # 1 / tokens of the query's step; 0 outside steps
    step_S: NDArray[np.int32]  # [S, 2] token range of each step in the pack
    live_S: NDArray[np.bool_]  # steps with at least one step delta or more ahead
    divisor_S: NDArray[np.float32]  # tokens of the step, or 1 for key_reduce = "sum"

    @property
    def sequences(self) -> list[tuple[int, int, int, int]]:
        """(first token, last token + 1, first step, last step + 1) of each sequence in the pack."""
        out, token, step = [], 0, 0
        for length, count in zip(self.lengths, self.counts, strict=True):
            out.append((token, token + length, step, step + count))
            token, step = token + length, step + count
        return out


def make_plan(
    lengths: Sequence[int], spans: Sequence[Sequence[Span]], *, delta: int = 4, key_reduce: KeyReduce = "mean"
) -> Plan:
    """The plan of packed sequences with these step spans, each counted in tokens of its own sequence.

    Paper: Eq. 5. A step attends forward to the steps `delta` or more after it.

    >>> plan = make_plan([6], [[(1, 3), (3, 4), (4, 6)]], delta=1)
    >>> plan.qmin_T.tolist(), plan.weight_T.tolist()
    ([6, 3, 3, 4, 6, 6], [0.0, 0.5, 0.5, 1.0, 0.5, 0.5])
    """
    if not isinstance(delta, int) or delta < 1:
        raise DataError(f"delta must be at least 1 and whole (a step does not attend forward to itself); got {delta}")
    if key_reduce not in ("mean", "sum"):
        raise DataError(f"key_reduce must be 'mean' or 'sum'; got {key_reduce!r}")
    total = int(sum(lengths))
    qmin = np.repeat(np.cumsum(lengths, dtype=np.int64), lengths).astype(np.int32)
    weight = np.zeros(total, np.float32)
    bounds, live = [np.zeros((0, 2), np.int32)], [np.zeros(0, bool)]
    offset = 0
    for row, (length, steps) in enumerate(zip(lengths, spans, strict=True)):
        span = _as_spans(row, steps)
        _check_spans(row, length, span)
        tokens = span[:, 1] - span[:, 0]
        inside = np.arange(tokens.sum()) + np.repeat(span[:, 0] - np.cumsum(tokens) + tokens, tokens) + offset
        weight[inside] = np.repeat(1.0 / tokens, tokens)
        first = np.full(len(span), length, np.int64)  # where the step `delta` later starts, or the end
        first[: max(0, len(span) - delta)] = span[delta:, 0]
        qmin[inside] = np.repeat(first, tokens) + offset
        bounds.append((span + offset).astype(np.int32))
        live.append(np.arange(len(span)) + delta < len(span))
        offset += length
    step = np.concatenate(bounds)
    size = (step[:, 1] - step[:, 0]).astype(np.float32)
    divisor = size if key_reduce == "mean" else np.ones_like(size)
    counts = tuple(len(part) for part in live[1:])
    return Plan(tuple(map(int, lengths)), counts, qmin, weight, step, np.concatenate(live), divisor)


def _as_spans(row: int, steps: Sequence[Span]) -> NDArray[np.int64]:
    """The steps of one sequence as [steps, 2]; raises where they are not pairs of whole numbers."""
    try:
        span = np.asarray(steps) if len(steps) else np.zeros((0, 2), np.int64)
        fit = span.ndim == 2 and span.shape[1] == 2 and span.dtype.kind in "iu"
    except (TypeError, ValueError):
        fit = False
    if not fit:
        raise DataError(f"sequence {row}: steps must be a list of (start, stop) token pairs; got {str(steps)[:80]}")
    return span.astype(np.int64)


def _check_spans(row: int, length: int, span: NDArray[np.int64]) -> None:
    before = np.append(0, span[:-1, 1]) if len(span) else np.zeros(0, np.int64)
    wrong = (span[:, 0] < before) | (span[:, 0] >= span[:, 1]) | (span[:, 1] > length)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"sequence {row}: step ({span[at, 0]}, {span[at, 1]}) must be non-empty, after the step before it "
            f"(ends at {before[at]}) and within the {length} tokens"
        )


ALIGN = 16  # queries: lets a kernel read log-sum-exps in wide loads


def key_blocks(plan: Plan, size: int, window: int | None = None) -> NDArray[np.int32]:
    """Blocks of at most `size` keys of one sequence each, longest work first: [B, 6].

    Columns: key start, key stop, a query (a multiple of 16) before which no key counts, the first query that counts for
    every key, the first that the window hides from some key (or the end), the first that counts for none any more.

    >>> key_blocks(make_plan([20], [[(1, 3), (3, 18), (18, 20)]], delta=1), 8).tolist()
    [[1, 9, 0, 18, 20, 20], [9, 17, 16, 18, 20, 20], [17, 18, 16, 18, 20, 20]]
    """
    tables = [np.zeros((0, 6), np.int32)]
    for _, end, first, last in plan.sequences:
        live = np.flatnonzero(plan.live_S[first:last])
        if not live.size:
            continue
        begin, stop = int(plan.step_S[first + live[0], 0]), int(plan.step_S[first + live[-1], 1])
        start = np.arange(begin, stop, size)
        k_stop = np.minimum(start + size, stop)
        counting = plan.weight_T[begin:stop] > 0  # keys between steps never count
        qmin = plan.qmin_T[begin:stop]
        low = np.minimum.reduceat(np.where(counting, qmin, end), start - begin)
        full = np.maximum.reduceat(np.where(counting, qmin, 0), start - begin)
        tail = np.full_like(start, end) if window is None else np.minimum(end, start + window)
        q_stop = np.full_like(start, end) if window is None else np.minimum(end, k_stop - 1 + window)
        low = np.minimum(low, q_stop) // ALIGN * ALIGN
        tables.append(np.stack([start, k_stop, low, full, tail, q_stop], 1).astype(np.int32))
    table = np.concatenate(tables)
    return np.ascontiguousarray(table[np.argsort(table[:, 2] - table[:, 5], kind="stable")])


def query_blocks(lengths: Sequence[int], size: int) -> NDArray[np.int32]:
    """Blocks of at most `size` queries of one sequence each: [B, 3] of sequence start, query start, query stop."""
    rows, start = [], 0
    for length in lengths:
        stop = start + length
        rows += [(start, m, min(m + size, stop)) for m in range(start, stop, size)]
        start = stop
    return np.asarray(rows, np.int32).reshape(-1, 3)
