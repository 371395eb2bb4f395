"""Which samples share an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def plan_minibatches(
    uids: Sequence[str], *, prompts: int | None, samples: int | None, rng: np.random.Generator
) -> list[list[int]]:
    """Sample indices of each minibatch, shuffled by `rng`: at most `prompts` prompts or `samples` samples each.

    All samples of a prompt (same uid) share a minibatch when minibatches are counted in prompts. With neither limit,
    everything is one minibatch.

    Deviation: the minibatches are of even size (40 prompts at 32 a minibatch: 20 and 20, not 32 and 8), so that no
    update is made from a small remainder.
    """
    if samples is not None:
        units = [[i] for i in range(len(uids))]
        size = samples
    else:
        groups: dict[str, list[int]] = {}
        for i, uid in enumerate(uids):
            groups.setdefault(uid, []).append(i)
        units = list(groups.values())
        size = prompts or len(units)
    if not units:
        return []
    order = rng.permutation(len(units))
    parts = np.array_split(order, -(-len(units) // size))
    return [[i for unit in part for i in units[unit]] for part in parts]
