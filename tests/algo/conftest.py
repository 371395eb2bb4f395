"""Builders of small trunks, branches and forests, so that a test reads like the tree it draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from attnrl.types import (
    Branch,
    Finish,
    Forest,
    Group,
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


class Build:
    """Token ids count up from `first`, log-probs are minus their index over ten: every token can be told apart."""

    @staticmethod
    def prompt(uid: str = "q", tokens: int = 2) -> Prompt:
        return Prompt(uid=uid, ids=as_ids(range(900, 900 + tokens)), answers=("1",))

    @staticmethod
    def rollout(tokens: int, *, first: int = 0, finish: Finish = "stop", version: int = 0) -> Rollout:
        ids = np.arange(first, first + tokens)
        return Rollout(as_ids(ids), as_floats(-ids / 10.0), finish, version)

    @staticmethod
    def steps(*starts: int, tokens: int, thinking: int | None = None) -> tuple[Step, ...]:
        """Steps that start at 0 and at `starts`; from token `thinking` on they are the answer."""
        bounds = [0, *starts, tokens]
        end = tokens if thinking is None else thinking
        return tuple(Step(a, b, thinking=b <= end) for a, b in pairwise(bounds))

    def trunk(
        self,
        tokens: int,
        reward: float,
        *,
        starts: Sequence[int] = (),
        fci: Sequence[float] | None = None,
        logprobs: Sequence[float] | None = None,
        entropy: Sequence[float] | None = None,
        thinking: int | None = None,
        first: int = 0,
    ) -> Trunk:
        rollout = self.rollout(tokens, first=first)
        if logprobs is not None:
            rollout = Rollout(rollout.ids, as_floats(logprobs), "stop", 0)
        steps = self.steps(*starts, tokens=tokens, thinking=thinking)
        scores = Scores(
            rollout.logprobs,
            as_floats(np.zeros(tokens) if entropy is None else entropy),
            as_floats(np.zeros(len(steps)) if fci is None else fci),
        )
        return Trunk(rollout, Verdict(reward, "number"), steps, scores)

    def branch(self, point: int, tokens: int, reward: float, *, first: int = 500) -> Branch:
        return Branch(point, self.rollout(tokens, first=first, version=1), Verdict(reward, "number"))

    def tree(self, trunk_tokens: int, reward: float, *branches: tuple[int, int, float]) -> Tree:
        """A trunk of `trunk_tokens` tokens and branches, each as (point, tokens, reward)."""
        grown = tuple(self.branch(p, n, r, first=100 * (i + 1)) for i, (p, n, r) in enumerate(branches))
        return Tree(self.trunk(trunk_tokens, reward), grown)

    def forest(self, *trees: Tree, uid: str = "q") -> Forest:
        return Forest(self.prompt(uid), trees)

    def group(self, *rewards: float, tokens: int = 4, uid: str = "q") -> Group:
        return Group(self.prompt(uid), tuple(self.trunk(tokens, r) for r in rewards))


@pytest.fixture(scope="session")
def build() -> Build:
    return Build()
