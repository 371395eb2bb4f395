"""FCI by position in the response: how much of "important" is merely "early"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.intervals import rank_correlation
from attnrl.analysis.curves import clean
from attnrl.analysis.forests import read_rows

BINS = 20
COLUMNS = ("kind", "point", "step_starts", "fci", "tokens")


def fci_by_position(files: Sequence[Path]) -> dict[str, Any] | None:
    """Mean FCI of the steps and the share of branches by relative position in the trunk, over up to 12 iterations,
    and the mean rank correlation of FCI with position; None where nothing was scored.

    Steps nearer than Delta to the end score 0 by definition (Eq. 5), and early steps are attended to by more text
    even under uniform attention: the correlation says how much of FCI position alone explains.
    """
    chosen = dict.fromkeys(files[round(i * (len(files) - 1) / 11)] for i in range(12)) if files else {}
    total, count, starts = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
    ranks: list[float] = []
    for file in chosen:
        length = 1
        for row in read_rows(file, COLUMNS):
            if row["kind"] == "branch":
                starts[min(int(BINS * row["point"] / length), BINS - 1)] += 1
                continue
            length = max(row["tokens"], 1)
            fci = np.asarray(row["fci"], dtype=np.float64)
            if len(fci) < 2 or not np.isfinite(fci).all():
                continue
            where = np.minimum((BINS * np.asarray(row["step_starts"]) / length).astype(int), BINS - 1)
            np.add.at(total, where, fci)
            np.add.at(count, where, 1)
            ranks += [] if fci.std() == 0 else [rank_correlation(fci, np.arange(len(fci)))]
    if not count.any() and not starts.any():
        return None
    centres = [clean((i + 0.5) / BINS) for i in range(BINS)]
    return {
        "position": centres,
        "fci": [clean(t / c) if c else None for t, c in zip(total, count, strict=True)],
        "branches": [clean(s / starts.sum()) if starts.any() else None for s in starts],
        "correlation": clean(float(np.mean(ranks))) if ranks else None,
        "trunks": len(ranks),
    }
