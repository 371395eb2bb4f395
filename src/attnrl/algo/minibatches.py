"""Which samples share an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def plan_minibatches(
    uids: Sequence[str], *, minibatches: int | None, samples: int | None, rng: np.random.Generator
) -> list[list[int]]:
    """Sample indices of each minibatch: `minibatches` of them, or as many as it takes at `samples` samples each.

    Prompts (same uid) are shuffled by `rng`, their samples laid end to end, and the row is cut into parts that differ
    by at most one sample: a prompt stays together unless a cut falls into it. No part is empty: fewer samples than
    minibatches make one part each.

    Paper: Sec. 4.1, two updates an iteration. Deviation: two also where the prompt batch grows (Eq. 10), so that
    methods of one comparison make equally many.

    >>> plan_minibatches(["a", "a", "a", "b", "b", "c"], minibatches=2, samples=None, rng=np.random.default_rng(1))
    [[0, 1, 2], [3, 4, 5]]
    """
    if (minibatches is None) == (samples is None):
        raise ValueError("minibatches are given by their number or by their size in samples")
    if not uids:
        return []
    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(uids):
        groups.setdefault(uid, []).append(i)
    names = list(groups)
    row = [i for n in rng.permutation(len(names)) for i in groups[names[n]]]
    count = min(minibatches or -(-len(row) // (samples or 1)), len(row))
    return [part.tolist() for part in np.array_split(row, count)]
