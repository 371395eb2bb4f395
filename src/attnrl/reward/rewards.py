"""All rewards of a run: names in, one object out that turns attempts into verdicts."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnrl.algo.parts import bind, check_call, find
from attnrl.config import VerifyConfig, check_options
from attnrl.errors import ConfigError, TrainingError, listed, near
from attnrl.reward.builtin import REWARDS
from attnrl.reward.declare import HERE, TRUNCATED, WHOLE, declared
from attnrl.reward.runners import Finish, Here, InLoop, InWorkers, Runner
from attnrl.types import Attempt, Verdict
from attnrl.verify import Verifier
from attnrl.verify.pool import Pool, Served
from attnrl.verify.worker import reply_to


@dataclass(frozen=True, slots=True)
class Entry:
    """One reward of several."""

    label: str  # in parts and metrics
    weight: float
    sees_truncated: bool
    runner: Runner


class Rewards(AbstractContextManager["Rewards"]):
    """The weighted sum of some rewards. A context manager; workers start with the first attempt that needs one.

    A response cut off by the length limit earns 0 from every reward that does not declare to see such ones.

    >>> with build_rewards([("math", 1.0, {}), ("format", 0.2, {"tags": ["answer"]})]) as rewards:
    ...     said = ("<answer>2</answer>", "The answer is 2.")
    ...     verdicts = rewards.grade([Attempt("1+1?", ("2",), response) for response in said])
    >>> [(verdict.reward, verdict.right, verdict.parts) for verdict in verdicts]
    [(1.2, True, {'math': 1.0, 'format': 1.0}), (1.0, True, {'math': 1.0, 'format': 0.0})]
    """

    def __init__(
        self, entries: Sequence[Entry], verifier: Verifier, *, max_error_share: float, grade_truncated: bool
    ) -> None:
        self.entries = tuple(entries)
        self.verifier = verifier
        self.max_error_share = max_error_share
        self.grade_truncated = grade_truncated
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._seen: defaultdict[str, list[float]] = defaultdict(list)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, *, wait: bool = True) -> None:
        """Ends worker processes and calls; without `wait`, what has not begun is given up."""
        for entry in self.entries:
            entry.runner.close(wait=wait)
        self.verifier.close(wait=wait)

    def grade(self, attempts: Sequence[Attempt]) -> list[Verdict]:
        """The verdict of each attempt, in order. TrainingError where too many of them are errors."""
        started = [self._start(entry, attempts) for entry in self.entries]
        columns: list[list[Verdict]] = []
        for entry, finish in zip(self.entries, started, strict=True):
            begun = time.perf_counter()
            columns.append(finish())
            self._count(entry, columns[-1], time.perf_counter() - begun)
        rows = list(zip(*columns, strict=True))
        self._check(rows)
        return [self._sum(row) for row in rows]

    def _start(self, entry: Entry, attempts: Sequence[Attempt]) -> Finish:
        """What waits for the verdicts of one reward; the rule on truncated responses stands here and nowhere else."""
        everything = entry.sees_truncated or self.grade_truncated
        seen = [i for i, attempt in enumerate(attempts) if everything or attempt.finish != "length"]
        wait = entry.runner.start([attempts[i] for i in seen]) if seen else list

        def finish() -> list[Verdict]:
            verdicts = [Verdict(0.0, "truncated")] * len(attempts)
            for i, verdict in zip(seen, wait(), strict=True):
                verdicts[i] = verdict
            return verdicts

        return finish

    def _sum(self, row: Sequence[Verdict]) -> Verdict:
        """One verdict from those of all rewards: the first says what is right, by which rule, and for which answer."""
        first, parts = row[0], {}
        for entry, verdict in zip(self.entries, row, strict=True):
            parts[entry.label] = verdict.reward
            parts |= {f"{entry.label}.{name}": value for name, value in verdict.parts.items()}
        total = sum(entry.weight * verdict.reward for entry, verdict in zip(self.entries, row, strict=True))
        return Verdict(total, first.rule, first.answer, self._error(row)[1], first.right, parts)

    def _error(self, row: Sequence[Verdict]) -> tuple[str, str | None]:
        """The first of all rewards that failed on an attempt, and how; None where none did."""
        failed = ((e.label, v.error) for e, v in zip(self.entries, row, strict=True) if v.error is not None)
        return next(failed, ("", None))

    def _check(self, rows: Sequence[Sequence[Verdict]]) -> None:
        causes = Counter(found for row in rows if (found := self._error(row))[1] is not None)
        if causes.total() > self.max_error_share * len(rows):
            (label, cause), times = causes.most_common(1)[0]
            raise TrainingError(
                f"{causes.total()} of {len(rows)} rewards of a batch are errors, a larger share than "
                f"verify.max_error_share = {self.max_error_share:g}; the most frequent, of the reward {label!r} "
                f"({times} times): {cause}"
            )

    def _count(self, entry: Entry, verdicts: Sequence[Verdict], seconds: float) -> None:
        errors = [verdict.error for verdict in verdicts if verdict.error is not None]
        name = f"reward/{entry.label}"
        with self._lock:
            for verdict in verdicts:
                if verdict.error is None:
                    self._seen[name].append(verdict.reward)
                    for part, value in verdict.parts.items():
                        self._seen[f"{name}.{part}"].append(value)
            self._sums[f"{name}_errors"] += len(errors)
            self._sums[f"seconds/reward_{entry.label}"] += seconds
            for error in errors:
                self._sums[f"reward/error_{error.partition(':')[0]}"] += 1

    @property
    def takes(self) -> set[str]:
        """The dotted keys of [verify] that one of them takes."""
        return {f"verify.{key}" for entry in self.entries for key in entry.runner.takes}

    def metrics(self) -> dict[str, float]:
        """Since last asked: of each reward its mean `reward/NAME` over the attempts it judged, `reward/NAME.PART` of
        parts that its verdicts name, `reward/NAME_errors`, `seconds/reward_NAME` (waited for it); and errors by kind,
        `reward/error_KIND`.
        """
        with self._lock:
            sums, self._sums = dict(self._sums), defaultdict(float)
            seen, self._seen = dict(self._seen), defaultdict(list)
        return {**{name: sum(values) / len(values) for name, values in seen.items()}, **sums}


def build_rewards(
    entries: Sequence[tuple[str, float, Mapping[str, Any]]],
    *,
    grade_truncated: bool = False,
    knobs: Mapping[str, Any] | None = None,
    **verify: Any,
) -> Rewards:
    """The rewards called `name`, each with its weight and options; ConfigError names the entry that cannot be built.

    Knobs such as `max_response_tokens` are offered to all and taken by those whose signature has them; other keywords
    are keys of [verify].
    """
    if not entries:
        raise ConfigError("reward: name at least one reward, such as math")
    if not any(weight for _, weight, _ in entries):
        raise ConfigError("reward: every weight is 0, so that nothing is earned by anything; give one that is not")
    for name in verify.keys() - VerifyConfig.model_fields.keys():
        known = ("grade_truncated", "knobs", *VerifyConfig.model_fields)
        raise ConfigError(f"build_rewards has no option {name!r}{near(name, known)}; it has: {listed(known)}")
    limits = VerifyConfig(**verify)
    verifier = Verifier(limits.workers, limits.timeout_s, limits.memory_mb)
    built: list[Entry] = []
    labels: Counter[str] = Counter()
    for at, (name, weight, options) in enumerate(entries, start=1):
        label = name.rpartition(":")[2]
        labels[label] += 1
        label = label if labels[label] == 1 else f"{label}_{labels[label]}"
        try:
            part = _bound(name, options, {**(knobs or {}), "verifier": verifier})
            check_options(part.func, options)
            check_call(part, "attempt" if inspect.iscoroutinefunction(part.func) else "attempts")
            runner = _runner(part, name, label, verifier, limits)
        except ValueError as error:
            raise ConfigError(f"reward {at} ({name}): {error}") from error
        built.append(Entry(label, weight, declared(part.func, TRUNCATED), runner))
    return Rewards(built, verifier, max_error_share=limits.max_error_share, grade_truncated=grade_truncated)


def _runner(part: partial[Any], name: str, label: str, verifier: Verifier, limits: VerifyConfig) -> Runner:
    """Where a reward runs: as it declares, an async function in the event loop, any other in worker processes."""
    function = part.func
    if inspect.iscoroutinefunction(function):
        return InLoop(part, label, concurrency=limits.concurrency, timeout_s=limits.async_timeout_s)
    if declared(function, HERE):
        if "error" in (reply := reply_to(part, [])):  # options out of range are said now
            raise ValueError(reply["message"].removeprefix("ValueError: "))
        return Here(part, label)
    path = name if ":" in name else f"{function.__module__}:{function.__name__}"
    served = Served(
        "attnrl.reward.verdicts:served", {"name": path, "rule": label, "options": part.keywords}, heard=True
    )
    pool = Pool(served, verifier.workers, verifier.timeout, verifier.memory_mb)
    return InWorkers(pool, label, whole_batch=declared(function, WHOLE))


def _bound(name: str, options: Mapping[str, Any], knobs: Mapping[str, Any]) -> partial[Any]:
    """The reward function with knobs and options bound; the verifier cannot be handed to another process."""
    withheld = () if declared(find(REWARDS, name), HERE) else ("verifier",)
    if "verifier" in options:
        raise ValueError(f"{name!r} has no option 'verifier'; the limits of ours are those of [verify]")
    return bind(REWARDS, name, options, {k: v for k, v in knobs.items() if k not in withheld})
