"""Forests back from parquet: which ones to show, and the tree of Eq. 2-3 with values and advantages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.steps import THINK_END
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


def read_table(file: Path, columns: Sequence[str], span: tuple[int, int] | None = None) -> pa.Table:
    """Rows of a forest file: all of them, or the half-open range `span`, of which only its row groups are read."""
    try:
        with pq.ParquetFile(file) as opened:
            if missing := {*columns} - {*opened.schema_arrow.names}:
                raise DataError(f"{file}: column {min(missing)!r} is missing; was it written by another version?")
            return _read(opened, list(columns), span)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: not a readable forest file: {error}") from None


def _read(opened: pq.ParquetFile, columns: list[str], span: tuple[int, int] | None) -> pa.Table:
    if span is None:
        return opened.read(columns)
    sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
    ends = np.cumsum(sizes)
    first, last = (int(np.searchsorted(ends, at, side="right")) for at in (span[0], max(span[1] - 1, span[0])))
    groups = list(range(first, min(last, len(sizes) - 1) + 1))
    before = int(ends[first] - sizes[first]) if groups else 0
    return opened.read_row_groups(groups, columns).slice(span[0] - before, span[1] - span[0])


def read_rows(file: Path, columns: Sequence[str], span: tuple[int, int] | None = None) -> list[Row]:
    """The same as one dict a row."""
    rows: list[Row] = read_table(file, columns, span).to_pylist()
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


def interest(trees: Sequence[Sequence[float]]) -> float:
    """How much a forest shows, from the rewards of each tree's leaves: branched trees, outcomes that differ within a
    tree, mixed outcomes overall.

    A forest with a tree whose branches overturned their trunk comes before one that is merely mixed.
    """
    within = sum(_deviation(rewards) for rewards in trees) / len(trees)
    branched = any(len(rewards) > 1 for rewards in trees)
    every = [r for rewards in trees for r in rewards]
    return 2.0 * within + 0.5 * _deviation(every) + 0.1 * branched


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation, of the values as a population."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def rebuild(rows: Sequence[Row]) -> Forest:
    """The forest as it stood in training, without the prompt's tokens, which are not on record; without log-probs where
    they were not read.
    """
    first = rows[0]
    prompt = Prompt(first["uid"], as_ids([]), tuple(first["answers"] or ()), first["problem"] or "")
    trees: list[Tree] = []
    for row in rows:
        ids = as_ids(row["ids"])
        logprobs = as_floats(row["logprobs"]) if "logprobs" in row else np.zeros(len(ids), dtype=np.float32)
        rollout = Rollout(ids, logprobs, row["finish"], row["version"])
        verdict = Verdict(row["reward"], row["rule"], row["answer"], right=row["right"])
        if row["kind"] == "trunk":
            bounds = [*row["step_starts"], len(ids)]
            steps = tuple(Step(*span, thinking) for span, thinking in zip(pairwise(bounds), thinks(row), strict=True))
            scores = Scores(rollout.logprobs, as_floats(row["entropy"]), as_floats(row["fci"]))
            trees.append(Tree(Trunk(rollout, verdict, steps, scores)))
        else:
            grown = trees[-1]
            trees[-1] = Tree(grown.trunk, (*grown.branches, Branch(row["point"], rollout, verdict)))
    return Forest(prompt, tuple(trees))


def thinks(row: Row) -> list[bool]:
    """For each step of a trunk's row whether it is thinking: False from the step in which `</think>` begins on."""
    ends = np.cumsum([len(text) for text in row["step_texts"]])
    found = "".join(row["step_texts"]).find(THINK_END)
    return [found < 0 or int(end) <= found for end in ends]


def leaf_advantages(forest: Forest, estimator: str, options: dict[str, Any]) -> list[list[Floats | None]]:
    """Per tree the token advantages of its trunk and of each branch; None for a leaf that is not trained on.

    TreeRL trains a random subset of the leaves and centres over it; here all leaves count, so its numbers may be
    off by that draw's mean.
    """
    options = {**options, "train_leaves": None} if estimator == "treerl" else options
    function = ESTIMATORS[estimator]
    samples = deque(function(forest, np.random.default_rng(0), **options))
    branches = getattr(function, "trains", "leaves") != "trunks"
    found: list[list[Floats | None]] = []
    for tree in forest.trees:
        trunk = tree.trunk.rollout.ids
        leaves = [trunk, *(np.concatenate([trunk[: b.point], b.rollout.ids]) for b in tree.branches)]
        found.append([])
        for number, response in enumerate(leaves):  # samples come in the order of leaves; one may be skipped
            mine = (branches or not number) and samples and np.array_equal(samples[0].response, response)
            found[-1].append(samples.popleft().advantages if mine else None)
    return found
