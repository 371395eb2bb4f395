"""Tasks of the reasoning-gym package by name, as a further source of records (extra `gym`)."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from attnrl.data.records import Record
from attnrl.data.tasks import TEST_BUCKETS, Split
from attnrl.errors import ConfigError, DataError, MissingExtraError
from attnrl.types import content_hash

_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")


def gym_names() -> list[str]:
    """The names of all tasks that the installed reasoning-gym offers."""
    _gym()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def gym_records(
    name: str, split: Split, count: int, seed: int = 0, *, numbers_only: bool = True, **settings: Any
) -> list[Record]:
    """`count` different problems of one reasoning-gym task, e.g. "chain_sum"; `settings` are the task's own.

    As for made-up tasks, the hash of a problem decides its split: train and test of any two seeds share no problem.
    `numbers_only` refuses tasks whose answer is no plain number: many of those (countdown, sudoku, ...) have several
    right answers, which a comparison with one reference would count as wrong.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split = {split!r}: must be 'train' or 'test'")
    if name not in gym_names():
        raise ConfigError(f"reasoning-gym has no task {name!r}; it has {', '.join(gym_names())}")
    records: dict[str, Record] = {}
    drawn = 0
    for part in itertools.count():
        try:
            entries = _gym().create_dataset(name, size=256, seed=seed * 1_000_003 + part, **settings)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"reasoning-gym task {name!r} refuses these settings {settings}: {error}") from error
        for entry in entries:
            if len(records) == count:
                return list(records.values())
            drawn += 1
            problem, answer = str(entry["question"]).strip(), str(entry["answer"]).strip()
            if numbers_only and not _NUMBER.fullmatch(answer):
                raise DataError(
                    f"reasoning-gym task {name!r}: the answer {answer[:60]!r} is no plain number; one reference may "
                    "not be the only right answer; take another task, or pass numbers_only=False"
                )
            key = content_hash(problem)
            if (int(key, 16) % TEST_BUCKETS == 0) == (split == "test") and key not in records:
                where = f"gym:{name}/{split}:{len(records) + 1}"
                records[key] = Record(problem, (answer,), f"gym:{name}", where, _info(entry))
        if drawn > 100 * TEST_BUCKETS + 20 * TEST_BUCKETS * count:
            raise DataError(f"reasoning-gym task {name!r}: only {len(records)} different {split} problems, not {count}")
    raise AssertionError("unreachable")


def _info(entry: dict[str, Any]) -> dict[str, Any]:
    """Difficulty, and the metadata that the task's own scorer reads (the reward `gym`), as JSON holds it."""
    metadata = json.loads(json.dumps(entry.get("metadata", {}), default=str))
    return {"metadata": metadata} | ({"difficulty": metadata["difficulty"]} if "difficulty" in metadata else {})


def _gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtraError(
            'reasoning-gym tasks need the extra "gym": pip install "attnrl[gym]" (or pip install reasoning-gym)'
        ) from error
    return reasoning_gym
