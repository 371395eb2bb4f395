"""How good the values of a tree's nodes are, by branching rule: each against many rollouts from the same place.

    PYTHONPATH=benchmarks attnrl train s_treerl --run-dir runs/nodes --algo.rule node_values:every_rule \\
      --algo.estimator node_values:nothing --algo.width 18 --algo.group 1 --algo.prompts 16 --run.iterations 6 \\
      --run.save_rollouts_every 1 --evaluation.every 0
    python benchmarks/node_values.py runs/nodes --json docs/results/s_nodes.json

Every rule chooses its two points of the same trunks. A tree of the paper has two branches a point, so two inner nodes:
the text before its first point, over five leaves, and the text between its points, over three. What its values would be
is not read off two of the branches drawn here but taken over all of them, given the trunk: with T1, T2 the means of the
n branches at the points and r the trunk's reward, the first node's expected error is (r + 2 T1 + 2 T2)/5 - T1, the
second's (r + 2 T2)/3 - T2. The squared error adds the variance of two draws a point and loses what T1 and T2 have of
their own. The oracle's points are one, so its tree has one inner node. Bias is the mean error; variance the mean
squared error less the squared bias. No update is made, so every iteration has the same policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from attnrl.algo.parts import reads
from attnrl.algo.rules import RULES
from attnrl.types import Forest, Prompt, Sample, Trunk
from step_values import interval

COMPARED = ("fci", "surprisal", "random_steps", "fci_residual", "oracle")
POINTS, WIDTH = 2, 2  # of the tree whose values are judged


@reads("logprobs", "fci")
def every_rule(prompt: Prompt, trunk: Trunk, rng: np.random.Generator) -> tuple[int, ...]:
    """The points of all rules, one rule after the other; none where some rule has too few."""
    chosen = [sorted(RULES[name](prompt, trunk, rng, points=POINTS)) for name in COMPARED]
    return tuple(p for points in chosen for p in points) if all(len(p) == POINTS for p in chosen) else ()


def nothing(forest: Forest, rng: np.random.Generator) -> list[Sample]:
    """No samples: the policy stays as it is."""
    return []


@dataclass(frozen=True, slots=True)
class Place:
    """A branch point and the rewards of all branches drawn there."""

    point: int
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True)
class Node:
    """An inner node of a tree: its true value, the error to expect of its value in the tree, and that error squared."""

    uid: str
    first: bool  # the text before the first point, or that between the two
    leaves: int
    truth: float
    single: float  # variance of one rollout's reward
    error: float
    squared_error: float


def nodes(uid: str, trunk: float, first: Place, second: Place) -> list[Node]:
    """The inner nodes of a tree, of the trunk's reward and the branches at its points; one where the points are one.

    >>> [round(n.error, 3) for n in nodes("q", 1.0, Place(7, [0.0, 1.0, 0.0, 1.0]), Place(9, [1.0, 1.0, 1.0, 1.0]))]
    [0.3, 0.0]
    """
    if first.point == second.point:
        return [node(uid, True, trunk, [[*first.rewards, *second.rewards]], POINTS * WIDTH)]
    both = [first.rewards, second.rewards]
    return [node(uid, True, trunk, both), node(uid, False, trunk, both[1:])]


def node(uid: str, first: bool, trunk: float, places: Sequence[Sequence[float]], width: int = WIDTH) -> Node:
    """The node whose end is the first of `places`: its leaves are the trunk's and `width` drawn at each of them."""
    leaves = 1 + width * len(places)
    means = [float(np.mean(rewards)) for rewards in places]
    singles = [float(np.var(rewards, ddof=1)) for rewards in places]
    weights = [width / leaves - (i == 0) for i in range(len(places))]  # of the means in the error
    error = trunk / leaves + sum(w * m for w, m in zip(weights, means, strict=True))
    noise = sum(w * w * s / len(r) for w, s, r in zip(weights, singles, places, strict=True))
    drawn = sum(width * s / leaves**2 for s in singles)
    return Node(uid, first, leaves, means[0], singles[0], error, error**2 - noise + drawn)


def read_nodes(run_dirs: Sequence[Path]) -> dict[str, list[Node]]:
    """rule -> the inner nodes of its trees, over all recorded iterations."""
    found: dict[str, list[Node]] = {name: [] for name in COMPARED}
    for file in (file for run in run_dirs for file in sorted((run / "forests").glob("*.parquet"))):
        trees: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in pq.read_table(file, columns=["uid", "tree", "kind", "point", "reward"]).to_pylist():
            trees.setdefault((row["uid"], row["tree"]), []).append(row)
        for (uid, _), (trunk, *branches) in trees.items():
            width = len(branches) // (len(COMPARED) * POINTS)
            runs = [branches[i : i + width] for i in range(0, len(branches), width)] if width else []
            places = [Place(run[0]["point"], [b["reward"] for b in run]) for run in runs]
            for name, first, second in zip(COMPARED, places[0::2], places[1::2], strict=False):
                found[name] += nodes(uid, trunk["reward"], first, second)
    return found


def quality(judged: Sequence[Node]) -> dict[str, Any]:
    """Bias and squared error with their 95 % intervals over prompts, the variance that is left of the latter, and as
    many independent rollouts as would have that variance.
    """
    bias = interval([n.error for n in judged], [n.uid for n in judged])
    squared = interval([n.squared_error for n in judged], [n.uid for n in judged])
    variance = squared[0] - bias[0] ** 2
    single = float(np.mean([n.single for n in judged]))
    return {
        "nodes": len(judged),
        "true value": float(np.mean([n.truth for n in judged])),
        "bias": bias,
        "squared error": squared,
        "variance": variance,
        "leaves": float(np.mean([n.leaves for n in judged])),
        "worth of leaves": single / variance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = read_nodes(args.runs)
    sides = {"before the first point": True, "between the points": False}
    answer = {
        rule: {side: quality(own) for side, first in sides.items() if (own := [n for n in judged if n.first == first])}
        for rule, judged in found.items()
    }
    print(json.dumps(answer, indent=1))
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
