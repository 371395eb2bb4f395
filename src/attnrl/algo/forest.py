"""Forests: plan which trunks branch where, request the branches, plant the trees they grow into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnrl.algo.adaptive import Budget, choose_trunks
from attnrl.algo.branching import Rule
from attnrl.algo.promises import points_by, trees_by
from attnrl.errors import ConfigError
from attnrl.types import Branch, Forest, Group, Ids, Prompt, Request, Rollout, Scores, Step, Tree, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where the trunks of one prompt branch: for each trunk its points, () for a trunk that stays as it is."""

    group: Group
    points: tuple[tuple[int, ...], ...]  # one entry per trunk
    chosen: frozenset[int] = frozenset()  # trunks that were to become trees (Eq. 9)

    @property
    def spots(self) -> list[tuple[int, int]]:
        """(trunk, point) of every branch point, in order."""
        return [(t, p) for t, points in enumerate(self.points) for p in points]


def plan(group: Group, *, rule: Rule, budget: Budget, trunks: int, rng: np.random.Generator) -> Plan:
    """Which trunks of a prompt branch (Eq. 9) and where (Eq. 7).

    `trunks` is G, as many as were drawn; the group may have lost some to errors. A trunk of fewer than two tokens has
    no inner point and is never branched.
    """
    chosen = frozenset(choose_trunks(group, trees_by(budget, group.accuracy, trunks), rng))
    points = (points_by(rule, group.prompt, t, rng) if i in chosen else () for i, t in enumerate(group.trunks))
    return Plan(group, tuple(points), chosen)


def draw_seed(rng: np.random.Generator) -> int:
    """A seed for one request's own random stream."""
    return int(rng.integers(2**63))


def tree_name(prompt: Prompt, trunk: int) -> str:
    """The identity of a tree: its prompt and the number of its trunk."""
    return f"{prompt.uid}/{trunk}"


def trunk_requests(prompt: Prompt, *, group: int, max_tokens: int, rng: np.random.Generator) -> list[Request]:
    """One request per trunk of a prompt."""
    return [Request(prompt.ids, max_tokens, draw_seed(rng), tree_name(prompt, n)) for n in range(group)]


def branch_requests(plan: Plan, *, width: int, max_tokens: int, rng: np.random.Generator) -> list[Request]:
    """`width` requests per branch point: the prompt and the trunk before the point.

    A branch may use what its prefix left of the response limit `max_tokens`.
    """
    prompt = plan.group.prompt
    requests = []
    for trunk, point in plan.spots:
        if point >= max_tokens:
            raise ConfigError(
                f"a branch at token {point} has nothing left of the response limit of {max_tokens} tokens: the trunk "
                "was drawn under a larger limit; resume with that limit"
            )
        context = np.concatenate([prompt.ids, plan.group.trunks[trunk].rollout.ids[:point]])
        name = tree_name(prompt, trunk)
        requests += [Request(context, max_tokens - point, draw_seed(rng), name) for _ in range(width)]
    return requests


def whole_responses(plan: Plan, rollouts: Sequence[Rollout], width: int) -> list[Ids]:
    """The response of each branch as the verifier must see it: prefix and continuation."""
    return [
        np.concatenate([plan.group.trunks[trunk].rollout.ids[:point], rollout.ids])
        for (trunk, point), rollout in zip(_spread(plan, width), rollouts, strict=True)
    ]


def plant(plan: Plan, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], width: int) -> Forest:
    """The forest of a prompt: each trunk with the branches that were drawn for it.

    A branch whose verdict is an error is left out: an error is no evidence for or against it.
    """
    grown: list[list[Branch]] = [[] for _ in plan.group.trunks]
    for (trunk, point), rollout, verdict in zip(_spread(plan, width), rollouts, verdicts, strict=True):
        if verdict.error is None:
            grown[trunk].append(Branch(point, rollout, verdict))
    trees = (Tree(trunk, tuple(branches)) for trunk, branches in zip(plan.group.trunks, grown, strict=True))
    return Forest(plan.group.prompt, tuple(trees))


def untrained(group: Group, reason: str) -> Forest:
    """A prompt that is left out of training, for the record: its trunks as trees of one leaf."""
    return Forest(group.prompt, tuple(Tree(trunk) for trunk in group.trunks), reason)


def unscored(rollout: Rollout, steps: Sequence[Step]) -> Scores:
    """Scores of a trunk nobody asked a forward pass for: the sampler's log-probs, the rest not a number."""
    missing = np.full(len(rollout.ids), np.nan, dtype=np.float32)
    return Scores(rollout.logprobs, missing, missing[: len(steps)])


def _spread(plan: Plan, width: int) -> list[tuple[int, int]]:
    return [spot for spot in plan.spots for _ in range(width)]
