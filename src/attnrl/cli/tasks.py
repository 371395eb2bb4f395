"""attnrl tasks --output FILE.jsonl [--split test] [--count N]

Writes made-up reasoning tasks: arithmetic word problems over a dependency
graph, with worked solutions.

One JSON object a line: problem, answer, solution, operations, difficulty,
split, and of tasks with forks the numbers of the decisive steps.
A task depends on the settings, the split, the seed and its number alone.
Train and test share no problem, whatever the two seeds.

Example:
  attnrl tasks --split test --count 200 --operations 2,6 --modulus 11 \\
    --output test.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console

from attnrl.cli.files import check_folder
from attnrl.cli.flags import read_flags, show
from attnrl.config import Section, TaskConfig


class TasksFlags(Section):
    """The flags of `attnrl tasks`."""

    output: Path
    """File to write (.jsonl)."""
    split: Literal["train", "test"] = "train"
    """Which side of the split; test is one problem in sixteen."""
    count: int = Field(1000, ge=1)
    """Number of tasks, all different."""
    tasks: TaskConfig = TaskConfig()


def main(argv: list[str]) -> None:
    from attnrl.data.tasks import columns, make_tasks

    flags, _ = read_flags(TasksFlags, argv, str(__doc__), flat="tasks")
    check_folder("output", flags.output)
    with Console(stderr=True).status("making tasks"):
        tasks = make_tasks(flags.tasks, flags.split, flags.count, flags.tasks.seed)
    with flags.output.open("w", encoding="utf-8") as file:
        for task in tasks:
            row = {"problem": task.problem, "answer": task.answer, "solution": task.solution, **columns(task)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    show(f"{flags.output}: {flags.count} {flags.split} tasks, seed {flags.tasks.seed}")
