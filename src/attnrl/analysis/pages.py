"""One forest as plain values for the tree inspector: steps with their scores and reasons, values before and after each
branch point, branches step by step beside their trunk; and the same clipped to a budget, for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from attnrl.algo.advantages import ESTIMATORS, Segments, leaf_rewards, segments
from attnrl.algo.reasons import Reasons, explain, step_reasons
from attnrl.algo.steps import SEGMENTERS, blank_lines
from attnrl.analysis.curves import clean
from attnrl.analysis.forests import Row, leaf_advantages, rebuild
from attnrl.analysis.intervals import value_change
from attnrl.analysis.records import RunRecord
from attnrl.types import Floats, Forest, Tree

# NUL and its kin would be dropped or mangled by a browser: show their pictures instead
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
Cut = Callable[[str], list[str]]


def forest_page(rows: Sequence[Row], record: RunRecord) -> dict[str, Any]:
    """One forest: its prompt, V(root), and each tree with steps, nodes and branches.

    Values are those of Eq. 2. Advantages are those of the run's own estimator; an estimator from outside attnrl is
    not run, and Eq. 3 stands in for it, named as such. Reasons that are not on record are derived.
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
    why, recorded = forest_reasons(forest, by_tree, advantages, record)
    pages = [tree_page(t, r, a, record) for t, r, a in zip(forest.trees, by_tree, advantages, strict=True)]
    return {
        "iteration": rows[0]["iteration"],
        "uid": forest.prompt.uid,
        "problem": forest.prompt.problem,
        "answers": list(forest.prompt.answers),
        "root": clean(float(rewards.mean())),
        "leaves": len(rewards),
        "estimator": estimator,
        "own_estimator": own,
        "reason": why.prompt,
        "recorded": recorded,
        "trees": [{**page, "reason": reason} for page, reason in zip(pages, why.trees, strict=True)],
    }


def forest_reasons(
    forest: Forest, by_tree: Sequence[Sequence[Row]], advantages: Sequence[Sequence[Floats | None]], record: RunRecord
) -> tuple[Reasons, bool]:
    """The reasons on record, or those that follow from the forest itself; and whether they are on record."""
    first = by_tree[0][0]
    if first.get("prompt_reason"):
        return Reasons(first["prompt_reason"], tuple(rows[0]["reason"] or "" for rows in by_tree)), True
    taught = any(a is not None and np.any(a) for tree in advantages for a in tree)
    return explain(forest, planned=None, taught=taught, branching=record.branches), False


def tree_page(
    tree: Tree, rows: Sequence[Row], advantages: Sequence[Floats | None], record: RunRecord
) -> dict[str, Any]:
    """One tree: the trunk's steps with their scores and reasons, its segments with V and A, and its branches.

    A step is [start, FCI, text, mean entropy, reason], by position: there may be thousands.
    """
    cut, trunk = segments(tree), rows[0]
    starts = [step.start for step in tree.trunk.steps]
    entropy = step_means(tree.trunk.scores.entropy, starts)
    reasons = tree_step_reasons(tree, record)
    steps = [
        [start, clean(float(fci)), text, clean(mean), reason]
        for start, fci, text, mean, reason in zip(
            starts, tree.trunk.scores.fci, trunk["step_texts"], entropy, reasons, strict=True
        )
    ]
    into_steps = text_cutter(record)
    branches = []
    for branch, row, found in zip(tree.branches, rows[1:], advantages[1:], strict=True):
        place = step_at(starts, branch.point)
        before = "".join(trunk["step_texts"][:place])
        own = tree.trunk.rollout.ids[branch.point :]
        shared = same_tokens(own, branch.rollout.ids)
        ends = shared >= len(own) and shared >= len(branch.rollout.ids)
        branches.append(
            {
                **_leaf(row),
                "point": branch.point,
                "place": place,
                "steps": branch_steps(before, row["text"], into_steps),
                # of the branch's steps the first that is not the trunk's word for word; None where all are
                "differs": None if ends else step_at(starts, branch.point + shared) - place,
                "value": clean(branch.reward),
                "advantage": _at(found, branch.point),
            }
        )
    return {**_leaf(trunk), "steps": steps, "nodes": node_pages(tree, cut, advantages[0]), "branches": branches}


def node_pages(tree: Tree, cut: Segments, advantages: Floats | None) -> list[dict[str, Any]]:
    """The segments of a trunk; each but the first with the change of value at the branch point it starts at."""
    bounds = cut.bounds.tolist()
    nodes = []
    for i in range(len(cut.values)):
        node: dict[str, Any] = {
            "start": bounds[i],
            "stop": bounds[i + 1],
            "leaves": int(cut.leaves[i]),
            "value": clean(float(cut.values[i])),
            "advantage": _at(advantages, bounds[i]),
        }
        if i:
            below = [tree.trunk.reward, *(b.reward for b in tree.branches if b.point > bounds[i])]
            change = value_change(below, [b.reward for b in tree.branches if b.point == bounds[i]])
            node["change"] = {key: None if v is None else clean(v) for key, v in asdict(change).items()}
        nodes.append(node)
    return nodes


def tree_step_reasons(tree: Tree, record: RunRecord) -> tuple[str, ...]:
    """Why each step of the trunk is a branch point or not, by the knobs of the run's rule."""
    return step_reasons(
        tree.trunk,
        {branch.point for branch in tree.branches},
        by_fci="fci" in record.rule["reads"],
        by_quantile=record.rule["by_quantile"],
        delta=record.setting("algo.delta", 4),
        top_fraction=record.setting("algo.top_fraction", 0.2),
        min_gap_tokens=record.setting("algo.min_gap_tokens", 0),
        mode=record.setting("algo.mode", "paper"),
    )


def step_means(values: Floats, starts: Sequence[int]) -> list[float]:
    """The mean over the tokens of each step.

    >>> step_means(np.array([1, 3, 5, 5], dtype=np.float32), [0, 2])
    [2.0, 5.0]
    """
    if not len(values) or not starts:
        return [float("nan")] * len(starts)
    sums = np.add.reduceat(values.astype(np.float64), starts)
    means: list[float] = (sums / np.diff([*starts, len(values)])).tolist()
    return means


def step_at(starts: Sequence[int], token: int) -> int:
    """The step that holds a token.

    >>> [step_at([0, 4, 9], token) for token in (0, 3, 4, 20)]
    [0, 0, 1, 2]
    """
    return max(int(np.searchsorted(np.asarray(starts), token, side="right")) - 1, 0)


def same_tokens(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """How many tokens two continuations begin with alike."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def text_cutter(record: RunRecord) -> Cut:
    """Text -> its steps, as the run's segmenter cuts them; one from outside attnrl, or one that counts tokens, is not
    run, and blank lines stand in for it. Branches have no steps on record.
    """
    named = record.setting("algo.segmenter", "blank_lines")
    known = named in SEGMENTERS and named != "every_n_tokens"
    segment = partial(SEGMENTERS[named], **record.setting("algo.segmenter_options", {})) if known else blank_lines
    return lambda text: [text[s.start : s.stop] for s in segment(list(text))]  # a character is a token of its own


def branch_steps(before: str, text: str, cut: Cut) -> list[str]:
    """The steps of a branch's own text, cut in the light of what it continues.

    >>> branch_steps("ab|", "cd|e", lambda text: text.replace("|", "| ").split())
    ['cd|', 'e']
    """
    found, at = [], 0
    for piece in cut(before + text):
        at += len(piece)
        if at > len(before):
            found.append(piece[-(at - len(before)) :])
    return found


def _leaf(row: Row) -> dict[str, Any]:
    """How a rollout ended."""
    ended = {name: row[name] for name in ("right", "finish", "version", "rule", "answer")}
    return {"reward": clean(row["reward"]), "tokens": len(row["ids"]), **ended}


def _at(advantages: Floats | None, token: int) -> float | None:
    """The advantage of the node that holds a token; all tokens of a node have the same."""
    return clean(float(advantages[token])) if advantages is not None and token < len(advantages) else None


def map_texts(page: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The page with every text of the model or the data changed."""

    def leaf(old: dict[str, Any]) -> dict[str, Any]:
        return {**old, "answer": change(old["answer"])} if old["answer"] else old

    trees = [
        {
            **leaf(tree),
            "steps": [[start, fci, change(text), *more] for start, fci, text, *more in tree["steps"]],
            "branches": [{**leaf(b), "steps": [change(text) for text in b["steps"]]} for b in tree["branches"]],
        }
        for tree in page["trees"]
    ]
    answers = [change(answer) for answer in page["answers"]]
    return {**page, "problem": change(page["problem"]), "answers": answers, "trees": trees}


def page_texts(page: dict[str, Any]) -> list[str]:
    """Every text of a page."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    map_texts(page, keep)
    return found


def clip_page(page: dict[str, Any], budget: int) -> dict[str, Any]:
    """The page with its texts cut to about `budget` characters, the longest ones first."""
    limit = fair_limit([len(text) for text in page_texts(page)], budget)
    return map_texts(page, lambda text: clip(text, limit))


def fair_limit(lengths: Iterable[int], budget: int) -> int:
    """The largest limit for which texts cut to it fit the budget together.

    >>> fair_limit([10, 100, 100], 90)
    40
    """
    ordered = sorted(lengths)
    left, texts = budget, len(ordered)
    for length in ordered:
        if length * texts > left:
            return max(left // texts, 1)
        left, texts = left - length, texts - 1
    return max(ordered, default=1)


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
