"""Forests back from parquet: which ones to show, and the tree of Eq. 2-3 with values and advantages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnrl.algo.advantages import ESTIMATORS
from attnrl.errors import DataError
from attnrl.types import (
    Branch,
    Floats,
    Forest,
    Prompt,
    Rollout,
    Scores,
    Step,
    Tree,
    Trunk,
    Verdict,
    as_floats,
    as_ids,
)

Row = dict[str, Any]
COLUMNS = (
    *("iteration", "uid", "problem", "answers", "tree", "kind", "point", "text", "ids", "logprobs", "finish"),
    *("version", "reward", "rule", "answer", "step_starts", "step_texts", "fci", "entropy"),
)
TRUNKS_ONLY = ("grpo", "chain")  # estimators that make one sample a trunk and none a branch


def read_table(file: Path, columns: Sequence[str], uids: Sequence[str] | None = None) -> pa.Table:
    """Rows of a forest file, all of them or those of some prompts."""
    filters = None if uids is None else [("uid", "in", list(uids))]
    try:
        missing = set(columns) - set(pq.read_schema(file).names)
        if missing:
            raise DataError(f"{file}: column {min(missing)!r} is missing; was it written by another version?")
        return pq.read_table(file, columns=list(columns), filters=filters)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: not a readable forest file: {error}") from None


def read_rows(file: Path, columns: Sequence[str], uids: Sequence[str] | None = None) -> list[Row]:
    """The same as one dict a row."""
    rows: list[Row] = read_table(file, columns, uids).to_pylist()
    return rows


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each forest: a prompt drawn twice in an iteration makes two forests."""
    forests: list[list[Row]] = []
    for row in rows:
        last = forests[-1][-1] if forests else None
        if last is None or row["uid"] != last["uid"] or row["tree"] < last["tree"]:
            forests.append([])
        forests[-1].append(row)
    return forests


@dataclass(frozen=True, slots=True)
class Pick:
    """A forest worth showing: where it is, and how much there is to see in it."""

    file: Path
    uid: str
    interest: float


def interest(rows: Sequence[Row]) -> float:
    """How much a forest shows: branched trees, outcomes that differ within a tree, mixed outcomes overall.

    A forest with a tree whose branches overturned their trunk comes before one that is merely mixed.
    """
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row["tree"], []).append(row["reward"])
    within = sum(float(np.std(r)) for r in rewards.values() if len(r) > 1) / len(rewards)
    branched = any(len(r) > 1 for r in rewards.values())
    every = [r for tree in rewards.values() for r in tree]
    return 2.0 * within + 0.5 * float(np.std(every)) + 0.1 * branched


def pick_forests(files: Sequence[Path], count: int) -> list[Pick]:
    """Up to `count` forests, the most telling ones of the first and of the last iteration on disk, in that order."""
    ends = list(dict.fromkeys([files[0], files[-1]])) if files else []
    picks: list[Pick] = []
    for n, file in enumerate(ends):
        found: dict[str, Pick] = {}
        for rows in grouped(read_rows(file, ("uid", "tree", "kind", "reward"))):
            found.setdefault(rows[0]["uid"], Pick(file, rows[0]["uid"], interest(rows)))
        best = sorted(found.values(), key=lambda pick: (-pick.interest, pick.uid))
        picks += best[: (count - len(picks)) // (len(ends) - n)]
    return picks


def read_forests(picks: Sequence[Pick]) -> list[list[Row]]:
    """The rows of the picked forests, in the order of the picks."""
    found: dict[tuple[Path, str], list[Row]] = {}
    for file in dict.fromkeys(pick.file for pick in picks):
        uids = [pick.uid for pick in picks if pick.file == file]
        for rows in grouped(read_rows(file, COLUMNS, uids)):
            found.setdefault((file, rows[0]["uid"]), rows)
    return [found[pick.file, pick.uid] for pick in picks]


def rebuild(rows: Sequence[Row]) -> Forest:
    """The forest as it stood in training, without the prompt's tokens, which are not on record."""
    first = rows[0]
    prompt = Prompt(first["uid"], as_ids([]), tuple(first["answers"] or ()), first["problem"] or "")
    trees: list[Tree] = []
    for row in rows:
        rollout = Rollout(as_ids(row["ids"]), as_floats(row["logprobs"]), row["finish"], row["version"])
        verdict = Verdict(row["reward"], row["rule"], row["answer"])
        if row["kind"] == "trunk":
            bounds = [*row["step_starts"], len(rollout.ids)]
            steps = tuple(Step(a, b) for a, b in pairwise(bounds))
            scores = Scores(rollout.logprobs, as_floats(row["entropy"]), as_floats(row["fci"]))
            trees.append(Tree(Trunk(rollout, verdict, steps, scores)))
        else:
            grown = trees[-1]
            trees[-1] = Tree(grown.trunk, (*grown.branches, Branch(row["point"], rollout, verdict)))
    return Forest(prompt, tuple(trees))


def leaf_advantages(forest: Forest, estimator: str, options: dict[str, Any]) -> list[list[Floats | None]]:
    """Per tree the token advantages of its trunk and of each branch; None for a leaf that is not trained on.

    TreeRL trains a random subset of the leaves and centres over it; here all leaves count, so its numbers may be
    off by that draw's mean.
    """
    options = {**options, "train_leaves": None} if estimator == "treerl" else options
    samples = iter(ESTIMATORS[estimator](forest, np.random.default_rng(0), **options))
    found: list[list[Floats | None]] = []
    for tree in forest.trees:
        trained = bool(tree.branches) or estimator != "tree" or options.get("train_unbranched", True)
        found.append([next(samples).advantages if trained else None])
        for _ in tree.branches:
            found[-1].append(None if estimator in TRUNKS_ONLY else next(samples).advantages)
    assert next(samples, None) is None, f"estimator {estimator} made more samples than the forest has leaves"
    return found
