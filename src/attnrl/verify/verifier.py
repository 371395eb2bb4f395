"""The verifier: responses and golds in, verdicts out, in order, whatever the responses hold."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from attnrl.errors import ConfigError, DataError
from attnrl.types import Verdict
from attnrl.verify.equal import GOLD_LIMIT, Decision, decide_any, may_be_symbolic, read
from attnrl.verify.extract import extract
from attnrl.verify.pool import Pool, Reply, Served

Gold = str | Sequence[str]
Item = tuple[str, Gold]
MAX_TIMEOUT = 3600.0  # seconds
MIN_MEMORY_MB = 256
GOLD_CHECKS = 4096  # that are remembered

WAKE_S = 1.0


_verifiers: weakref.WeakSet[Verifier] = weakref.WeakSet()


def _new_locks() -> None:
    """In a forked child: a lock that another thread held at the fork would stay locked."""
    for verifier in list(_verifiers):
        verifier._new_lock()


os.register_at_fork(after_in_child=_new_locks)


class Verifier(AbstractContextManager["Verifier"]):
    """Grades answers: rules in the calling process, the symbolic grader in worker processes.

    A context manager. Workers start with the first answer that needs one. Safe to use from threads, from asyncio
    (`agrade`) and from process pools; a forked or pickled copy starts workers of its own.

    >>> with Verifier() as verifier:
    ...     [verdict.reward for verdict in verifier.grade([(r"\\boxed{0.5}", r"\\frac{1}{2}"), ("no idea", "3")])]
    [1.0, 0.0]
    """

    def __init__(
        self,
        workers: int | None = None,
        timeout: float = 5.0,
        memory_mb: int = 2048,
        max_chars: int = 4000,
        disagreements: Path | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}")
        if not (math.isfinite(timeout) and 0 < timeout <= MAX_TIMEOUT):
            raise ConfigError(f"timeout must be above 0 and at most {MAX_TIMEOUT:g} seconds, not {timeout}")
        if memory_mb < MIN_MEMORY_MB:
            raise ConfigError(f"memory_mb must be at least {MIN_MEMORY_MB}: an answer may need it, not {memory_mb}")
        self.workers = workers or min(4, os.cpu_count() or 1)
        self.timeout = timeout  # seconds of wall clock for one answer in a worker
        self.memory_mb = memory_mb  # of one worker, beyond what its libraries take
        self.max_chars = max_chars  # longest answer or gold that is looked at
        self.disagreements = disagreements
        self._pool = Pool(Served("attnrl.verify.symbolic:grader"), self.workers, timeout, memory_mb)
        self._counts: Counter[str] = Counter()
        self._new_lock()
        _verifiers.add(self)

    def _new_lock(self) -> None:
        self._lock = threading.Lock()
        self._gold_checks: dict[tuple[str, ...], Future[Reply]] = {}  # of golds beside which an answer broke

    def __reduce__(self) -> tuple[type[Verifier], tuple[Any, ...]]:
        return Verifier, (self.workers, self.timeout, self.memory_mb, self.max_chars, self.disagreements)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, *, wait: bool = True) -> None:
        """Ends the worker processes, without `wait` before they come to what waits; a later call starts new ones."""
        self._pool.close(wait=wait)

    @property
    def counts(self) -> dict[str, int]:
        """How many answers so far: `answers`, `right`, `rule/<rule>`, `error/<kind>`, `disagreements`."""
        with self._lock:
            return dict(self._counts)

    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return self._pool.pids()

    def grade(self, items: Sequence[Item], *, progress: bool = False) -> list[Verdict]:
        """The verdict of each (response, gold or golds), in order."""
        begun = [self._begin(at, response, gold) for at, (response, gold) in enumerate(items)]
        ends: Iterable[Verdict | _Waiting] = begun
        if progress:
            ends = track(begun, description="verify", total=len(begun))
        verdicts = []
        for end in ends:
            verdict = end if isinstance(end, Verdict) else self._finish(end)
            verdicts.append(verdict)
            self._count(verdict)
        return verdicts

    async def agrade(self, items: Sequence[Item]) -> list[Verdict]:
        """`grade` for asyncio: the event loop stays free."""
        return await asyncio.to_thread(self.grade, items)

    def _begin(self, at: int, response: str, gold: Gold) -> Verdict | _Waiting:
        """The verdict of one item, or its place in the queue; what breaks the rules spares the other items."""
        golds = _as_golds(at, response, gold)
        try:
            return self._by_rules(response, golds)
        except (RecursionError, MemoryError):
            return _verdict(None, _too_deep(golds))

    def _by_rules(self, response: str, golds: list[str]) -> Verdict | _Waiting:
        if not any(g.strip() for g in golds):
            return Verdict(0.0, "empty_gold", None, "empty_gold")
        answer = extract(response).answer
        if answer is None:
            return Verdict(0.0, "no_answer")
        if len(answer) > self.max_chars:
            return Verdict(0.0, "too_long", answer[:200])
        golds = [g for g in golds if len(g) <= self.max_chars]
        if not any(g.strip() for g in golds):
            return Verdict(0.0, "gold_too_long", answer, "gold_too_long")
        decision, waiting = decide_any(answer, golds)
        if waiting and not decision.right:
            shown = tuple(read(g).cleaned for g in waiting)
            return _Waiting(answer, decision, shown, self._ask(read(answer).cleaned, shown))
        if self.disagreements is not None and decision.rule != "string":
            return self._audited(answer, golds, decision)
        return _verdict(answer, decision)

    def _audited(self, answer: str, golds: Sequence[str], decision: Decision) -> Verdict | _Waiting:
        """The rules' decision, with a second opinion for the log where the text may be shown to the symbolic grader."""
        shown = tuple(read(g).cleaned for g in golds if may_be_symbolic(read(g)))
        if not shown or not may_be_symbolic(read(answer)):
            return _verdict(answer, decision)
        return _Waiting(answer, decision, shown, self._ask(read(answer).cleaned, shown), tuple(golds))

    def _ask(self, answer: str, golds: tuple[str, ...]) -> Future[Reply]:
        return self._pool.submit({"answer": answer, "golds": golds})

    def _finish(self, waiting: _Waiting) -> Verdict:
        while not wait([waiting.future], WAKE_S).done:  # a signal that comes just before a wait is seen after it
            pass
        reply = waiting.future.result()
        if waiting.audit is None:
            return self._judged(waiting, reply)
        verdict = _verdict(waiting.answer, waiting.decision)
        if reply.error is None and reply.value != bool(verdict.reward):
            self._log(waiting, verdict, reply)
        return verdict

    def _judged(self, waiting: _Waiting, reply: Reply) -> Verdict:
        """The symbolic grader's verdict. What an answer broke is wrong, or training would learn to break things; what
        the gold breaks beside the plainest answer too is an error of its row."""
        if reply.error is None:
            return Verdict(1.0 if reply.value else 0.0, "symbolic", waiting.answer)
        if reply.ours:
            return Verdict(0.0, "symbolic", waiting.answer, _kind(reply))
        plain = self._gold_check(waiting.golds).result()
        if plain.error is None:
            return Verdict(0.0, _kind(reply), waiting.answer)
        return Verdict(0.0, "symbolic", waiting.answer, _kind(plain) if plain.ours else f"gold_{_kind(plain)}")

    def _gold_check(self, golds: tuple[str, ...]) -> Future[Reply]:
        """The symbolic grader's reply to the answer 1; asked once, since a gold comes with many responses."""
        with self._lock:
            if len(self._gold_checks) > GOLD_CHECKS:
                self._gold_checks.clear()
            if golds not in self._gold_checks:
                self._gold_checks[golds] = self._ask("1", golds)
            return self._gold_checks[golds]

    def _log(self, waiting: _Waiting, verdict: Verdict, reply: Reply) -> None:
        assert self.disagreements is not None
        row = {
            "answer": waiting.answer,
            "gold": list(waiting.audit or ()),
            "rule": verdict.rule,
            "rules": bool(verdict.reward),
            "math_verify": reply.value,
        }
        with self._lock:
            self._counts["disagreements"] += 1
            with self.disagreements.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _count(self, verdict: Verdict) -> None:
        with self._lock:
            self._counts["answers"] += 1
            self._counts["right"] += int(verdict.reward)
            self._counts[f"rule/{verdict.rule}"] += 1
            if verdict.error:
                self._counts[f"error/{verdict.error}"] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An answer that waits for a worker; `audit` holds the golds where only the log wants to know."""

    answer: str
    decision: Decision
    golds: tuple[str, ...]
    future: Future[Reply]
    audit: tuple[str, ...] | None = None


def _kind(reply: Reply) -> str:
    """The failure in a word; of an exception its name."""
    return f"symbolic:{reply.message.partition(':')[0]}" if reply.error == "raised" else str(reply.error)


def _too_deep(golds: Sequence[str]) -> Decision:
    """For an answer that broke the rules: wrong, unless the golds break them beside the answer 1 too."""
    try:
        decide_any("1", golds)
    except (RecursionError, MemoryError):
        return GOLD_LIMIT
    return Decision(False, "limit")


def _verdict(answer: str | None, decision: Decision) -> Verdict:
    return Verdict(1.0 if decision.right else 0.0, decision.rule, answer, decision.error)


def _as_golds(at: int, response: object, gold: Gold) -> list[str]:
    if not isinstance(response, str):
        raise DataError(f"item {at}: the response must be a string, not {type(response).__name__}")
    golds = [gold] if isinstance(gold, str) else list(gold) if isinstance(gold, Iterable) else [gold]
    for one in golds:
        if not isinstance(one, str):
            raise DataError(f"item {at}: a gold must be a string or a list of strings, not {type(one).__name__}")
    return golds


shared = Verifier()  # costs nothing before its first symbolic question


def is_correct(response: str, gold: str | list[str]) -> bool:
    """Whether the final answer of a response equals the gold, or one of several.

    >>> is_correct(r"<think>...</think> The answer is \\boxed{\\frac{2}{4}}.", "0.5")
    True
    """
    return bool(shared.grade([(response, gold)])[0].reward)
