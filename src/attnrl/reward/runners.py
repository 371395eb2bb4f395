"""Where a reward function runs: here, in killable worker processes, or as calls of an event loop.

A runner starts a batch and returns what waits for its verdicts, in order; so several rewards work at the same time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from functools import partial
from math import ceil
from typing import Any, Protocol

from attnrl.errors import DataError
from attnrl.reward.verdicts import as_verdict, as_verdicts, attempt_row, verdict_row
from attnrl.types import Attempt, Verdict
from attnrl.verify.pool import Pool, Reply
from attnrl.verify.worker import reply_to

PIECE = 8  # attempts that a worker gets at a time
TRIED = 4  # attempts that a function is asked about by themselves before it has graded any
BROKEN = ("timeout", "memory", "limit", "crash")  # rules of a response that broke the function
GRACE = 5.0  # seconds past which an event loop that should have answered is blocked

Finish = Callable[[], list[Verdict]]


WORKER_KEYS = frozenset({"workers", "timeout_s", "memory_mb"})


class Runner(Protocol):
    """One reward function at work."""

    takes: frozenset[str]  # the keys of [verify] that bound it

    def start(self, attempts: Sequence[Attempt]) -> Finish:
        """Begins to grade the batch; the result waits for its verdicts."""
        ...

    def close(self, *, wait: bool = True) -> None:
        """Ends what runs; without `wait`, what has not begun is given up."""
        ...


class Here:
    """A function of ours, in the calling process; what it hands to the verifier runs in worker processes."""

    def __init__(self, function: partial[Any], label: str) -> None:
        self.function, self.label = function, label
        self.takes = WORKER_KEYS if "verifier" in function.keywords else frozenset[str]()

    def start(self, attempts: Sequence[Attempt]) -> Finish:
        def finish() -> list[Verdict]:
            reply = reply_to(lambda: as_verdicts(self.function(attempts), self.label, len(attempts)))
            if "error" in reply:  # as in a worker: what raises is an error with its cause
                return [Verdict(0.0, self.label, None, reply["message"])] * len(attempts)
            verdicts: list[Verdict] = reply["value"]
            return verdicts

        return finish

    def close(self, *, wait: bool = True) -> None:
        pass


class InWorkers:
    """A plain function in worker processes.

    Attempts are handed over in pieces. A piece that fails is taken apart and each attempt asked about alone, so that
    one attempt's failure is its own. What raises is an error; what hangs, fills the memory or ends the worker when
    asked about alone is the response's doing: wrong. Where no attempt of a batch could be graded, the last one that
    could is asked about again: if that fails too, or there was none, the function is broken and they are errors. One
    that has graded none yet is tried on a few first: where it hangs on all of these, nothing more is asked of it.
    """

    takes = WORKER_KEYS

    def __init__(self, pool: Pool, label: str, *, whole_batch: bool) -> None:
        self.pool, self.label, self.whole_batch = pool, label, whole_batch
        self.graded: Attempt | None = None  # the last attempt that the function could grade

    def start(self, attempts: Sequence[Attempt]) -> Finish:
        known = self.whole_batch or self.graded is not None or len(attempts) <= TRIED
        tried = [] if known else [self._submit([attempt]) for attempt in attempts[:TRIED]]
        rest = [] if tried else self._in_pieces(attempts)

        def finish() -> list[Verdict]:
            replies = [(one.result(), 1) for one in tried]
            if tried and all(reply.error == "timeout" for reply, _ in replies):
                cause = f"timeout: {replies[0][0].message}; so it went with each of the first {TRIED} attempts"
                return [Verdict(0.0, self.label, None, cause)] * len(attempts)
            pieces = rest or self._in_pieces(attempts[len(tried) :])
            again = [self._apart(piece, future.result()) for piece, future in pieces]
            for (piece, future), alone in zip(pieces, again, strict=True):
                replies += [(one.result(), 1) for one in alone] or [(future.result(), len(piece))]
            verdicts = [v for reply, count in replies for v in self._verdicts(reply, count)]
            broke = [count == 1 and reply.error in BROKEN for reply, count in replies for _ in range(count)]
            return self._not_all_broken(attempts, verdicts, broke)

        return finish

    def _in_pieces(self, attempts: Sequence[Attempt]) -> list[tuple[Sequence[Attempt], Future[Reply]]]:
        """The attempts in pieces, each with the question about it."""
        size = len(attempts) if self.whole_batch else min(PIECE, ceil(len(attempts) / self.pool.workers))
        pieces = [attempts[at : at + size] for at in range(0, len(attempts), max(1, size))]
        return [(piece, self._submit(piece)) for piece in pieces]

    def _submit(self, piece: Sequence[Attempt]) -> Future[Reply]:
        try:
            return self.pool.submit([attempt_row(attempt) for attempt in piece], self.pool.timeout * len(piece))
        except TypeError as error:
            raise DataError(f"reward {self.label}: the columns of a row must be JSON values: {error}") from error

    def _apart(self, piece: Sequence[Attempt], reply: Reply) -> list[Future[Reply]]:
        """Questions about each attempt of a piece that failed; none where it did not."""
        if reply.error is None or reply.ours or len(piece) == 1 or self.whole_batch:
            return []
        return [self._submit([attempt]) for attempt in piece]

    def _verdicts(self, reply: Reply, count: int) -> list[Verdict]:
        if reply.error is None and isinstance(reply.value, list):
            return [Verdict(**row) for row in reply.value]
        if reply.error is None:
            return [Verdict(0.0, self.label, None, f"ValueError: {reply.value}")] * count
        if reply.error == "raised":
            return [Verdict(0.0, self.label, None, reply.message)] * count
        if reply.ours or count > 1:  # of a whole batch nobody can tell who did it
            return [Verdict(0.0, self.label, None, f"{reply.error}: {reply.message}")] * count
        return [Verdict(0.0, reply.error, reply.message)]

    def _not_all_broken(self, attempts: Sequence[Attempt], verdicts: list[Verdict], broke: list[bool]) -> list[Verdict]:
        """The verdicts; errors of those that broke the function, where that is broken itself."""
        graded = [a for a, v, b in zip(attempts, verdicts, broke, strict=True) if v.error is None and not b]
        self.graded = graded[-1] if graded else self.graded
        if graded or not any(broke) or (self.graded and self._submit([self.graded]).result().error is None):
            return verdicts
        return [
            Verdict(0.0, v.rule, None, f"{v.rule}: {v.answer}; no attempt of the batch could be graded") if b else v
            for v, b in zip(verdicts, broke, strict=True)
        ]

    def close(self, *, wait: bool = True) -> None:
        self.pool.close(wait=wait)


class InLoop:
    """An async function, one call an attempt, in one event loop of a thread of its own.

    At most `concurrency` calls run at a time, each for at most `timeout_s` seconds. What it waits for is a service, so
    what raises or hangs is an error and no evidence against the response.
    """

    takes = frozenset({"concurrency", "async_timeout_s"})

    def __init__(self, function: Callable[..., Any], label: str, *, concurrency: int, timeout_s: float) -> None:
        self.function, self.label, self.concurrency, self.timeout_s = function, label, concurrency, timeout_s
        self.loop: asyncio.AbstractEventLoop | None = None
        self.owner = 0
        self.lock = threading.Lock()  # a batch is handed to a loop before that is told to stop, or to the next one

    def start(self, attempts: Sequence[Attempt]) -> Finish:
        with self.lock:
            future = asyncio.run_coroutine_threadsafe(self._all(attempts), self._running())
        rounds = ceil(len(attempts) / self.concurrency)

        def finish() -> list[Verdict]:
            try:
                return future.result(rounds * self.timeout_s + GRACE)
            except WaitTimeoutError:
                blocked = "timeout: the event loop is blocked; an async reward must await what it waits for"
                return [Verdict(0.0, self.label, None, blocked)] * len(attempts)
            finally:
                future.cancel()

        return finish

    async def _all(self, attempts: Sequence[Attempt]) -> list[Verdict]:
        free = asyncio.Semaphore(self.concurrency)

        async def one(attempt: Attempt) -> Verdict:
            async with free:
                value = await asyncio.wait_for(self._call(attempt), self.timeout_s)
            verdict = as_verdict(value, self.label)
            return Verdict(**verdict_row(verdict))

        ends = await asyncio.gather(*map(one, attempts), return_exceptions=True)
        return [end if isinstance(end, Verdict) else self._failed(end) for end in ends]

    async def _call(self, attempt: Attempt) -> Any:
        """The function's value; where it asks for the end of the program, an error: that would end the loop alone."""
        try:
            return await self.function(attempt)
        except (SystemExit, KeyboardInterrupt) as end:
            raise RuntimeError(f"{type(end).__name__}: {end}") from end

    def _failed(self, error: BaseException) -> Verdict:
        late = isinstance(error, TimeoutError) and not str(error)
        cause = f"timeout: no answer within {self.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
        return Verdict(0.0, self.label, None, cause[:500])

    def _running(self) -> asyncio.AbstractEventLoop:
        """The event loop; started with the first batch, and anew in a forked child."""
        if self.loop is None or self.owner != os.getpid():
            self.loop, self.owner = asyncio.new_event_loop(), os.getpid()
            self.loop.set_default_executor(Threads())  # of asyncio.to_thread
            threading.Thread(target=_serve, args=(self.loop,), daemon=True, name=f"attnrl-reward-{self.label}").start()
        return self.loop

    def close(self, *, wait: bool = True) -> None:
        with self.lock:
            if self.loop is not None and self.owner == os.getpid():
                self.loop.call_soon_threadsafe(self.loop.stop)
            self.loop = None


class Threads(ThreadPoolExecutor):
    """A thread for each call, and none that is waited for at the end of the program: a call that hangs holds up
    neither the next one nor the end.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **options))
                except BaseException as error:  # noqa: BLE001 - the caller's to raise
                    future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="attnrl-reward-call").start()
        return future


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped, and lets go what still waits in it."""
    loop.run_forever()
    loop.run_until_complete(_let_go())
    loop.close()


async def _let_go() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
