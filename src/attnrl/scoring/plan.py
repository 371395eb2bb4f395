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
    if delta < 1:
        raise DataError(f"delta must be at least 1 (a step does not attend forward to itself); got {delta}")
    if key_reduce not in ("mean", "sum"):
        raise DataError(f"key_reduce must be 'mean' or 'sum'; got {key_reduce!r}")
    total = int(sum(lengths))
    qmin = np.zeros(total, np.int32)
    weight = np.zeros(total, np.float32)
    bounds: list[tuple[int, int]] = []
    live: list[bool] = []
    offset = 0
    for row, (length, steps) in enumerate(zip(lengths, spans, strict=True)):
        _check_spans(row, length, steps)
        qmin[offset : offset + length] = offset + length
        for index, (start, stop) in enumerate(steps):
            weight[offset + start : offset + stop] = 1.0 / (stop - start)
            bounds.append((offset + start, offset + stop))
            live.append(index + delta < len(steps))
            if live[-1]:
                qmin[offset + start : offset + stop] = offset + steps[index + delta][0]
        offset += length
    step = np.asarray(bounds, np.int32).reshape(-1, 2)
    tokens = (step[:, 1] - step[:, 0]).astype(np.float32)
    divisor = tokens if key_reduce == "mean" else np.ones_like(tokens)
    counts = tuple(len(steps) for steps in spans)
    return Plan(tuple(map(int, lengths)), counts, qmin, weight, step, np.asarray(live, bool), divisor)


def _check_spans(row: int, length: int, steps: Sequence[Span]) -> None:
    end = 0
    for start, stop in steps:
        if not end <= start < stop <= length:
            raise DataError(
                f"sequence {row}: step ({start}, {stop}) must be non-empty, after the step before it (ends at {end}) "
                f"and within the {length} tokens"
            )
        end = stop


ALIGN = 16  # queries: lets a kernel read log-sum-exps in wide loads


def key_blocks(plan: Plan, size: int, window: int | None = None) -> NDArray[np.int32]:
    """Blocks of at most `size` keys of one sequence each, longest work first: [B, 6].

    Columns: key start, key stop, a query (a multiple of 16) before which no key counts, the first query that counts for
    every key, the first that the window hides from some key (or the end), the first that counts for none any more.

    >>> key_blocks(make_plan([20], [[(1, 3), (3, 18), (18, 20)]], delta=1), 8).tolist()
    [[1, 9, 0, 18, 20, 20], [9, 17, 16, 18, 20, 20], [17, 18, 16, 18, 20, 20]]
    """
    rows = []
    for _, end, first, last in plan.sequences:
        live = np.flatnonzero(plan.live_S[first:last])
        if not live.size:
            continue
        stop = int(plan.step_S[first + live[-1], 1])
        for start in range(int(plan.step_S[first + live[0], 0]), stop, size):
            k_stop = min(start + size, stop)
            qmin = plan.qmin_T[start:k_stop][plan.weight_T[start:k_stop] > 0]  # keys between steps never count
            if not qmin.size:
                continue
            tail = end if window is None else min(end, start + window)
            q_stop = end if window is None else min(end, k_stop - 1 + window)
            low = min(int(qmin.min()), q_stop) // ALIGN * ALIGN
            rows.append((start, k_stop, low, int(qmin.max()), tail, q_stop))
    table = np.asarray(rows, np.int32).reshape(-1, 6)
    return table[np.argsort(table[:, 2] - table[:, 5], kind="stable")]


def query_blocks(lengths: Sequence[int], size: int) -> NDArray[np.int32]:
    """Blocks of at most `size` queries of one sequence each: [B, 3] of sequence start, query start, query stop."""
    rows, start = [], 0
    for length in lengths:
        stop = start + length
        rows += [(start, m, min(m + size, stop)) for m in range(start, stop, size)]
        start = stop
    return np.asarray(rows, np.int32).reshape(-1, 3)
