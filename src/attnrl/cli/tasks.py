"""attnrl tasks --output FILE.jsonl [--split test] [--count N]

Writes made-up reasoning tasks: arithmetic word problems over a dependency
graph, with worked solutions.

One JSON object a line: problem, answer, solution, operations, difficulty,
split. A task depends on the settings, the split, the seed and its number alone.
Train and test share no problem, whatever the two seeds.

Example:
  attnrl tasks --split test --count 200 --operations 2 6 --modulus 11 \\
    --output test.jsonl
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import ValidationError
from rich.console import Console
from rich.progress import track

from attnrl.cli.flags import read_flags
from attnrl.config import TaskConfig, TaskKind, explain
from attnrl.errors import ConfigError, MissingFileError


@dataclass(frozen=True)
class TaskFlags:
    """What the tasks look like. Ranges are inclusive."""

    operations: tuple[int, int] = (4, 12)
    """Fewest and most computations the asked quantity needs, within 1 to 20."""
    modulus: int | None = 23
    """Counts are taken modulo this, so that small models can learn the single steps; None: plain counts."""
    largest: int = 99
    """Largest count where there is no modulus."""
    distractors: tuple[int, int] = (0, 4)
    """Fewest and most quantities that are not needed."""
    sides: tuple[int, int] = (0, 1)
    """Fewest and most side chains that join the main chain."""
    givens: int = 3
    """Most given counts that serve as second operands."""
    checks: tuple[int, int] = (0, 2)
    """Fewest and most re-computations of an earlier count in a solution."""
    slips: float = 0.0
    """Chance that a computation of a solution first goes wrong and is corrected by a check."""
    errors: float = 0.0
    """Chance that a computation of a solution goes wrong and stays so: a teacher that errs."""
    plan_entries: int = 3
    """Quantities per step of a solution's plan."""
    wording: Literal["sentences", "list", "equations"] = "sentences"
    """How problems read: a list costs fewer prompt tokens; equations are easiest for small models."""
    kinds: Annotated[tuple[TaskKind, ...], tyro.conf.arg(metavar="KIND ...")] = TaskConfig().kinds
    """Operations in use: more, fewer, times, plus, minus."""
    names: int = 40
    """Size of the vocabulary of names, at most 40."""

    def spec(self) -> TaskConfig:
        try:
            return TaskConfig(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        except ValidationError as error:
            raise ConfigError(explain(error, "task settings")) from None


@dataclass(frozen=True)
class TasksFlags:
    """The flags of `attnrl tasks`."""

    output: Path
    """File to write (.jsonl)."""
    split: Literal["train", "test"] = "train"
    """Which side of the split; test is one problem in sixteen."""
    count: int = 1000
    """Number of tasks, all different."""
    seed: int = 0
    """Another seed gives other tasks."""
    tasks: tyro.conf.OmitArgPrefixes[TaskFlags] = field(default_factory=TaskFlags)


def main(argv: list[str]) -> int:
    from attnrl.data.tasks import different_tasks

    flags = read_flags(TasksFlags, argv, str(__doc__))
    if flags.count < 1:
        raise ConfigError(f"--count {flags.count}: must be at least 1")
    if not flags.output.parent.is_dir():
        raise MissingFileError(f"--output {flags.output}: the directory {flags.output.parent} does not exist; make it")
    tasks = different_tasks(flags.tasks.spec(), flags.split, flags.count, flags.seed)
    console = Console(stderr=True)
    with flags.output.open("w", encoding="utf-8") as file:
        for task in track(tasks, "writing tasks", total=flags.count, console=console, transient=True):
            row = {
                "problem": task.problem,
                "answer": task.answer,
                "solution": task.solution,
                "operations": task.operations,
                "difficulty": task.difficulty,
                "split": task.split,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{flags.output}: {flags.count} {flags.split} tasks, seed {flags.seed}")
    return 0
