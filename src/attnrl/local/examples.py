"""Packed batches of prompts and responses: made-up tasks, made in worker processes, or the rows of a file.

No torch here: a worker starts in a moment.

Shapes: T tokens of a batch, N of them predict a solution token.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnrl.config import TaskConfig
from attnrl.data.tasks import Task, make_task
from attnrl.types import Ids, as_ids

STRIDE = 1_000_000  # task indices set aside for one batch, far more than it can hold


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the batches are made of: the same recipe and index give the same batch on every machine."""

    spec: TaskConfig
    tokenizer_file: str  # tokenizer.json
    before: str  # template text before the problem
    after: str  # template text between problem and solution
    end: int  # id of the token that ends a solution
    tokens: int  # T
    seed: int = 0

    def batches(self, workers: int) -> Generator[Examples, None, None]:
        return batches(self, workers=workers)

    def held_out(self, count: int) -> list[Example]:
        return make_examples(self, "test", 0, count)

    def described(self) -> dict[str, Any]:
        return {"task": self.spec.model_dump()}


class Source(Protocol):
    """Where the sequences of a warm-up come from."""

    def batches(self, workers: int) -> Generator[Examples, None, None]:
        """Packed batches without end."""
        ...

    def held_out(self, count: int) -> list[Example]:
        """At most `count` examples that no batch holds."""
        ...

    def described(self) -> dict[str, Any]:
        """What it is, for warmup.json."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A prompt and its solution in token ids."""

    prompt: Ids
    solution: Ids  # with its end token
    answer: str | None  # final answer of the solution, where it states one
    task: Task | None = None  # the made-up task it is


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """One packed batch: sequences end to end, filled up to T with a sequence that carries no loss."""

    ids_T: Ids
    lengths: tuple[int, ...]
    source_N: NDArray[np.int64]  # position that predicts each target
    targets_N: Ids
    tokens: int  # without the filling


@lru_cache(maxsize=1)
def _tokenizer(file: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)


def make_examples(recipe: Recipe, split: Any, start: int, count: int) -> list[Example]:
    """Tasks start, start + 1, ... of a split, encoded."""
    tasks = [make_task(recipe.spec, split, i, recipe.seed) for i in range(start, start + count)]
    encode = _tokenizer(recipe.tokenizer_file).encode_batch
    prompts = encode([f"{recipe.before}{t.problem}{recipe.after}" for t in tasks], add_special_tokens=False)
    solutions = encode([t.solution for t in tasks], add_special_tokens=False)
    return [
        Example(as_ids(p.ids), as_ids([*s.ids, recipe.end]), task.answer, task)
        for task, p, s in zip(tasks, prompts, solutions, strict=True)
    ]


def make_batch(recipe: Recipe, index: int) -> Examples:
    """Batch number `index`: as many training tasks as fit into T tokens, in the order they come."""
    chosen: list[Example] = []
    room, start = recipe.tokens, index * STRIDE
    while True:
        for example in make_examples(recipe, "train", start, 16):
            length = len(example.prompt) + len(example.solution)
            if length > room:
                cut = example.solution[: max(1, recipe.tokens - len(example.prompt))]
                return lay_out(chosen or [replace(example, solution=cut)], recipe.tokens)
            chosen.append(example)
            room -= length
        start += 16


def lay_out(examples: Sequence[Example], tokens: int) -> Examples:
    """The examples as one batch of `tokens` tokens, or as many as they have."""
    rows = [np.concatenate([e.prompt, e.solution]) for e in examples]
    starts = np.cumsum([0, *map(len, rows)])
    used = int(starts[-1])
    lengths = [len(row) for row in rows]
    if filling := max(0, tokens - used):
        rows.append(np.zeros(filling, np.int32))
        lengths.append(filling)
    source = [np.arange(len(e.solution)) + s + len(e.prompt) - 1 for e, s in zip(examples, starts, strict=False)]
    targets = np.concatenate([e.solution for e in examples])
    return Examples(np.concatenate(rows), tuple(lengths), np.concatenate(source), targets, used)


def batches(recipe: Recipe, *, workers: int) -> Generator[Examples, None, None]:
    """Batches 0, 1, 2, ... without end; `workers` processes stay ahead of the consumer (0: made in this process)."""
    numbers = itertools.count()
    if workers == 0:
        yield from (make_batch(recipe, number) for number in numbers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        waiting: deque[Future[Examples]] = deque()
        waiting.extend(pool.submit(make_batch, recipe, next(numbers)) for _ in range(4 * workers))
        try:
            while True:
                batch = waiting.popleft().result()
                waiting.append(pool.submit(make_batch, recipe, next(numbers)))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """In a worker: Ctrl-C is the parent's to handle, and a parent that is gone, however it ended, ends the worker.

    Without it a worker whose parent was killed waits for work for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
