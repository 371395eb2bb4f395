"""The settings of made-up tasks: the section [data.tasks], and what the generator takes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from attnrl.config.base import Section
from attnrl.config.taken import For

TASKS = For(
    '"tasks" in data.train or evaluation.benchmarks',
    lambda config: "tasks" in (*config.data.train, *config.evaluation.benchmarks),
)
TASKS_OR_GYM = For(
    '"tasks" in data.train or evaluation.benchmarks, or "gym:NAME" there',
    lambda config: any(
        name == "tasks" or name.startswith("gym:") for name in (*config.data.train, *config.evaluation.benchmarks)
    ),
)
PLAIN = For("data.tasks.modulus = none", lambda config: config.data.tasks.modulus is None)
FORKS = For("data.tasks.forks", lambda config: bool(config.data.tasks.forks))

TaskKind = Literal["more", "fewer", "times", "plus", "minus"]
Fork = Literal["hub", "method", "turn", "pair"]


def _within(bottom: int, top: int) -> AfterValidator:
    """A check that a pair is a range within these bounds."""

    def check(pair: tuple[int, int]) -> tuple[int, int]:
        if not bottom <= pair[0] <= pair[1] <= top:
            raise PydanticCustomError("range", f"give a range within {bottom} to {top}, smallest first")
        return pair

    return AfterValidator(check)


class TaskConfig(Section):
    """Made-up dependency-graph tasks; used where data.train or evaluation.benchmarks names "tasks".

    Ranges are inclusive.

    >>> TaskConfig(operations=(2, 4), modulus=11).numbers
    11
    """

    operations: Annotated[tuple[int, int], _within(1, 20)] = (4, 12)
    """Fewest and most computations the asked quantity needs, within 1 to 20."""
    modulus: int | None = Field(23, ge=5, le=1000)
    """Counts are taken modulo this, so that small models can learn single steps; None: plain counts."""
    largest: Annotated[int, PLAIN] = Field(99, ge=18)
    """Largest count where there is no modulus."""
    distractors: Annotated[tuple[int, int], _within(0, 20)] = (0, 4)
    """Fewest and most quantities that are not needed."""
    sides: Annotated[tuple[int, int], _within(0, 4)] = (0, 1)
    """Fewest and most side chains that join the main chain."""
    givens: int = Field(3, ge=0)
    """Most given counts that serve as second operands."""
    checks: Annotated[tuple[int, int], _within(0, 20)] = (0, 2)
    """Fewest and most re-computations of an earlier count in a solution."""
    slips: float = Field(0.0, ge=0, lt=1)
    """Chance that a computation of a solution first goes wrong and is corrected by a check."""
    errors: float = Field(0.0, ge=0, lt=1)
    """Chance that a computation of a solution goes wrong and stays so; problems and answers are not touched."""
    plan_entries: int = Field(3, ge=1)
    """Quantities per step of a solution's plan."""
    wording: Literal["sentences", "list", "equations"] = "sentences"
    """How problems read; equations are quoted word for word by the solutions, which is easiest for small models."""
    kinds: tuple[TaskKind, ...] = ("more", "fewer", "times", "plus", "minus")
    """Operations in use; more and fewer always are."""
    names: int = Field(40, ge=2, le=40)
    """Size of the vocabulary of names."""
    forks: tuple[Fork, ...] = ()
    """Kinds of decisive step, drawn at random: hub, method, turn, pair; none: tasks without one. docs/tasks.md."""
    routine: Annotated[tuple[int, int], _within(0, 30), FORKS] = (2, 8)
    """With forks: fewest and most computations before the decision; `operations` come after it."""
    doubts: Annotated[float, FORKS] = Field(0.0, ge=0, le=2 / 3)
    """With forks: mean chance that a solution decides wrongly; problems and answers are not touched."""
    style: Annotated[int, FORKS] = Field(1, ge=1, le=4)
    """With forks: number of words that may open a step of a solution."""
    seed: Annotated[int, TASKS_OR_GYM] = 0
    """Seed of the generator; train and test are disjoint for any two seeds."""

    @property
    def most_names(self) -> int:
        """The number of names the largest task of this kind uses."""
        if self.forks:
            return self.routine[1] + self.operations[1] + 6
        return self.operations[1] + 1 + self.sides[1] + self.givens + self.distractors[1]

    @property
    def numbers(self) -> int:
        """The number of counts that can occur: 0 to numbers - 1."""
        return self.largest + 1 if self.modulus is None else self.modulus

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.errors and self.modulus is None:
            raise PydanticCustomError("tasks", "errors above 0 need a modulus")
        if not {"more", "fewer"} <= set(self.kinds):
            raise PydanticCustomError("tasks", "kinds must hold 'more' and 'fewer'")
        if self.sides[1] and not {"plus", "minus"} & set(self.kinds):
            raise PydanticCustomError("tasks", "sides above 0 need 'plus' or 'minus' among the kinds: they join by it")
        if self.forks and (self.modulus is None or self.modulus % 2 == 0 or self.wording != "equations"):
            raise PydanticCustomError("tasks", "forks need an odd modulus and wording = 'equations'")
        if self.most_names > self.names:
            parts = "routine + operations + 6" if self.forks else "operations + 1 + sides + givens + distractors"
            need = f"these tasks need {self.most_names} names ({parts})"
            raise PydanticCustomError("tasks", f"{need} and there are {self.names}; lower one of the ranges")
        return self
