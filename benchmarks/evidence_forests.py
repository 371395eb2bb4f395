"""What the recorded forests of a run say: where its trees branch, and whether FCI knows more than position.

Steps are numbered from 0; the decisive steps of a task are those whose text holds the word "choose". Tasks have them
where more than half of the trunks do: a response to a problem of another kind may hold the word by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

DECISIVE = " choose "


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """A trunk with its branches, as a forest file holds them."""

    uid: str
    starts: tuple[int, ...]  # of its steps, tokens
    tokens: int
    fci: tuple[float, ...]
    reward: float
    decisive: tuple[int, ...]  # numbers of the steps
    points: tuple[int, ...]  # one entry a branch
    rewards: tuple[float, ...]  # one entry a branch


def read_forests(run_dir: Path) -> list[RecordedTree]:
    """Every tree of the recorded iterations of a run."""
    trees = []
    for file in sorted((run_dir / "forests").glob("*.parquet")):
        rows = pq.read_table(
            file, columns=["uid", "tree", "kind", "point", "ids", "reward", "step_starts", "step_texts", "fci"]
        ).to_pylist()
        branches: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for row in rows:
            if row["kind"] == "branch":
                branches.setdefault((row["uid"], row["tree"]), []).append((row["point"], row["reward"]))
        for row in rows:
            if row["kind"] == "trunk":
                own = branches.get((row["uid"], row["tree"]), [])
                named = [k for k, text in enumerate(row["step_texts"]) if DECISIVE in text]
                trees.append(
                    RecordedTree(
                        uid=f"{file.stem}/{row['uid']}",
                        starts=tuple(row["step_starts"]),
                        tokens=len(row["ids"]),
                        fci=tuple(row["fci"]),
                        reward=row["reward"],
                        decisive=tuple(named),
                        points=tuple(point for point, _ in own),
                        rewards=tuple(reward for _, reward in own),
                    )
                )
    return trees


def summary(trees: Sequence[RecordedTree]) -> dict[str, float]:
    """Means over the branched trees.

    first_steps    share of trees whose branch points are the second and third step
    at, after      share of branch points inside a decisive step, and after the last one; the rest is "before"; none of
                   the three where tasks have none
    split          share of branch points whose branches do not all end as the trunk does
    first, last    share of the response before the first and the last point
    decisive       share of the response before the first decisive step
    position_correlation   rank correlation of FCI with the step's number, mean over trunks
    filter_auc     chance that an easy prompt without signal has a lower mean FCI than one with, and their number
    """
    branched = [t for t in trees if t.points]
    decided = [t for t in trees if t.decisive]
    decided = decided if 2 * len(decided) > len(trees) else []
    found: dict[str, float] = {"trees": float(len(branched))}
    if branched:
        spots = [(t, p) for t in branched for p in sorted(set(t.points))]
        placed = [place(t, p) for t, p in spots if t.decisive and decided]
        found |= {
            "first_steps": float(np.mean([sorted(set(t.points)) == list(t.starts[1:3]) for t in branched])),
            **({n: float(np.mean([p == n for p in placed])) for n in ("before", "at", "after")} if placed else {}),
            "split": float(np.mean([splits(t, p) for t, p in spots])),
            "first": float(np.mean([min(t.points) / t.tokens for t in branched])),
            "last": float(np.mean([max(t.points) / t.tokens for t in branched])),
        }
    if decided:
        found["decisive"] = float(np.mean([t.starts[t.decisive[0]] / t.tokens for t in decided]))
    known_fci = [np.trim_zeros(t.fci[1:], "b") for t in trees if t.fci and np.isfinite(t.fci).all()]
    scored = [fci for fci in known_fci if len(fci) > 1]  # the last delta steps have none
    if scored:
        found["position_correlation"] = float(np.mean([rank_correlation(fci, range(len(fci))) for fci in scored]))
        found |= filter_auc(trees)
    return found


def place(tree: RecordedTree, point: int) -> str:
    """Where a point lies from the decisive steps: inside one, after the last one, or before (or between) them."""
    step = int(np.searchsorted(tree.starts, point, side="right")) - 1
    return "at" if step in tree.decisive else "after" if step > tree.decisive[-1] else "before"


def splits(tree: RecordedTree, point: int) -> bool:
    """Whether the branches at a point and the trunk differ in outcome: the point carries a signal of its own."""
    here = {reward for p, reward in zip(tree.points, tree.rewards, strict=True) if p == point}
    return len(here | {tree.reward}) > 1


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, ties by their mean rank; 0 where one of the two does not vary."""
    a, b = ranks(np.asarray(first, dtype=float)), ranks(np.asarray(second, dtype=float))
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties by their mean.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [1.5, 0.0, 1.5]
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts + ends - 1) / 2)[inverse])


def filter_auc(trees: Sequence[RecordedTree]) -> dict[str, float]:
    """Of prompts whose trunks are all right: does a low mean FCI tell those whose branches are all right as well?"""
    prompts: dict[str, list[RecordedTree]] = {}
    for tree in trees:
        prompts.setdefault(tree.uid, []).append(tree)
    easy = [own for own in prompts.values() if all(t.reward > 0.5 for t in own) and any(t.points for t in own)]
    means = np.array([np.mean([np.mean(t.fci[1:] or 0.0) for t in own]) for own in easy])
    signal = np.array([any(r < 0.5 for t in own for r in t.rewards) for own in easy], dtype=bool)
    if not signal.any() or signal.all():
        return {"easy_prompts": float(len(easy))}
    return {
        "easy_prompts": float(len(easy)),
        "easy_with_signal": float(signal.sum()),
        "filter_auc": auc(means[signal], means[~signal]),
    }


def auc(high: np.ndarray, low: np.ndarray) -> float:
    """Chance that one of `high` is above one of `low`, ties half.

    >>> auc(np.array([2.0, 3.0]), np.array([1.0, 3.0]))
    0.625
    """
    together = ranks(np.concatenate([high, low]))
    return float((together[: len(high)].sum() - len(high) * (len(high) - 1) / 2) / (len(high) * len(low)))
