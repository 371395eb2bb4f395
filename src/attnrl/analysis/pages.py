"""Forests as plain values for the tree viewer, their texts clipped to a budget; FCI by position in the response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from attnrl.algo.advantages import ESTIMATORS, leaf_rewards, segments
from attnrl.analysis.curves import clean
from attnrl.analysis.forests import Row, leaf_advantages, pick_forests, read_forests, read_table, rebuild
from attnrl.analysis.records import RunRecord
from attnrl.types import Floats, Tree

FORESTS = (12, 4)  # shown in one report, over all runs: of short responses, and of long ones
TEXT_BUDGET = 450_000  # characters of model output in one report
BINS = 20
# NUL and its kin would be dropped or mangled by a browser: show their pictures instead
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def forest_pages(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The forests of a report, the most telling ones of each run's first and last iteration.

    Where responses are long, fewer forests, so that what is left of each text after clipping can still be read.
    """
    pages: list[dict[str, Any]] = []
    for count in FORESTS:
        pages = []
        for number, record in enumerate(records):
            picked = read_forests(pick_forests(record.forest_files, max(2, count // len(records))))
            pages += [{"run": number, **forest_page(rows, record)} for rows in picked]
        if sum(len(text) for page in pages for text in _texts(page)) <= 2 * TEXT_BUDGET:
            break
    budget = TEXT_BUDGET // max(len(pages), 1)
    return [clip_page(page, budget) for page in pages]


def forest_page(rows: Sequence[Row], record: RunRecord) -> dict[str, Any]:
    """One forest: its prompt, V(root), and each tree with steps, nodes and branches.

    Values are those of Eq. 2. Advantages are those of the run's own estimator; an estimator from outside attnrl is
    not run, and Eq. 3 stands in for it, named as such.
    """
    forest = rebuild(rows)
    named = record.setting("algo.estimator", "tree")
    own = named in ESTIMATORS
    estimator = named if own else "tree"
    options = record.setting("algo.estimator_options", {}) if own else {}
    advantages = leaf_advantages(forest, estimator, options)
    by_tree: list[list[Row]] = []
    for row in rows:
        by_tree = [*by_tree, [row]] if row["kind"] == "trunk" else [*by_tree[:-1], [*by_tree[-1], row]]
    rewards = leaf_rewards(forest)
    return {
        "iteration": rows[0]["iteration"],
        "uid": forest.prompt.uid,
        "problem": forest.prompt.problem,
        "answers": list(forest.prompt.answers),
        "root": clean(float(rewards.mean())),
        "leaves": len(rewards),
        "estimator": estimator,
        "own_estimator": own,
        "trees": [tree_page(t, r, a) for t, r, a in zip(forest.trees, by_tree, advantages, strict=True)],
    }


def tree_page(tree: Tree, rows: Sequence[Row], advantages: Sequence[Floats | None]) -> dict[str, Any]:
    """One tree: the trunk's steps with their FCI, its segments with V and A, and its branches."""
    cut, trunk = segments(tree), rows[0]
    bounds = cut.bounds.tolist()
    nodes = [
        {
            "start": bounds[i],
            "stop": bounds[i + 1],
            "leaves": int(cut.leaves[i]),
            "value": clean(float(cut.values[i])),
            "advantage": _at(advantages[0], bounds[i]),
        }
        for i in range(len(cut.values))
    ]
    steps = [  # by position, not by name: there may be thousands
        [step.start, clean(float(fci)), text]
        for step, fci, text in zip(tree.trunk.steps, tree.trunk.scores.fci, trunk["step_texts"], strict=True)
    ]
    branches = [
        {
            **_leaf(row),
            "point": branch.point,
            "text": row["text"],
            "value": clean(branch.reward),
            "advantage": _at(found, branch.point),
        }
        for branch, row, found in zip(tree.branches, rows[1:], advantages[1:], strict=True)
    ]
    return {**_leaf(trunk), "steps": steps, "nodes": nodes, "branches": branches}


def _leaf(row: Row) -> dict[str, Any]:
    """How a rollout ended."""
    ended = {name: row[name] for name in ("finish", "version", "rule", "answer")}
    return {"reward": clean(row["reward"]), "tokens": len(row["ids"]), **ended}


def _at(advantages: Floats | None, token: int) -> float | None:
    """The advantage of the node that holds a token; all tokens of a node have the same."""
    return clean(float(advantages[token])) if advantages is not None and token < len(advantages) else None


def clip_page(page: dict[str, Any], budget: int) -> dict[str, Any]:
    """The page with its texts cut to about `budget` characters, the longest ones first; steps get at most half of it,
    so that their number does not crowd out the branches.
    """
    steps = [len(text) for tree in page["trees"] for _, _, text in tree["steps"]]
    step_limit = fair_limit(steps, budget // 2)
    used = sum(min(length, step_limit) for length in steps)
    limit = fair_limit([len(text) for text in _texts(page)][len(steps) :], budget - used)

    def clipped(leaf: dict[str, Any]) -> dict[str, Any]:
        texts = {name: clip(leaf[name], limit) for name in ("text", "answer") if leaf.get(name)}
        return {**leaf, **texts}

    trees = [
        {
            **clipped(tree),
            "steps": [[start, fci, clip(text, step_limit)] for start, fci, text in tree["steps"]],
            "branches": [clipped(branch) for branch in tree["branches"]],
        }
        for tree in page["trees"]
    ]
    answers = [clip(answer, limit) for answer in page["answers"]]
    return {**page, "problem": clip(page["problem"], limit), "answers": answers, "trees": trees}


def _texts(page: dict[str, Any]) -> list[str]:
    """Every text of a page: those of steps first."""
    leaves = [leaf for tree in page["trees"] for leaf in (tree, *tree["branches"])]
    others = [leaf[name] for leaf in leaves for name in ("text", "answer") if leaf.get(name)]
    steps = [text for tree in page["trees"] for _, _, text in tree["steps"]]
    return [*steps, page["problem"], *page["answers"], *others]


def fair_limit(lengths: Sequence[int], budget: int) -> int:
    """The largest limit for which texts cut to it fit the budget together.

    >>> fair_limit([10, 100, 100], 90)
    40
    """
    left, texts = budget, len(lengths)
    for length in sorted(lengths):
        if length * texts > left:
            return max(left // texts, 1)
        left, texts = left - length, texts - 1
    return max(lengths, default=1)


def clip(text: str, limit: int) -> str:
    """The text with control characters made visible and, over the limit, its middle left out.

    >>> clip("abcdefghij", 5)
    'abc [… 5 more …] ij'
    """
    text = text.translate(VISIBLE)
    if len(text) <= limit:
        return text
    tail = limit * 2 // 5
    left_out = len(text) - limit
    return f"{text[: limit - tail]} [… {left_out:,} more …] {text[len(text) - tail :]}"


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
        table = read_table(file, ("kind", "point", "step_starts", "fci", "ids"))
        tokens = pc.list_value_length(table["ids"]).to_pylist()  # ids themselves may be millions
        for row, drawn in zip(table.drop_columns(["ids"]).to_pylist(), tokens, strict=True):
            if row["kind"] == "branch":
                starts[min(int(BINS * row["point"] / length), BINS - 1)] += 1
                continue
            length = max(drawn, 1)
            fci = np.asarray(row["fci"], dtype=np.float64)
            if len(fci) < 2 or not np.isfinite(fci).all():
                continue
            where = np.minimum((BINS * np.asarray(row["step_starts"]) / length).astype(int), BINS - 1)
            np.add.at(total, where, fci)
            np.add.at(count, where, 1)
            ranks += [] if fci.std() == 0 else [_rank_correlation(fci)]
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


def _rank_correlation(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Spearman's correlation of values with their index; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
