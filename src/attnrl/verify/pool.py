"""Worker processes that are killed and replaced from outside, and the queue before them."""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

START_LIMIT = 120.0  # seconds a worker may take to import its libraries
TRIES = 2  # workers that may die of one question
KILLS = 50  # workers that somebody else may kill while they are at one question
STARTS = 4  # of one worker, before its question is given up
PIPE = 4096  # bytes that a pipe with any room takes without blocking

# timeout, memory, limit, crash, raised: the question did it. killed, start, broken: ours.
Error = Literal["timeout", "memory", "limit", "crash", "raised", "killed", "start", "broken"]
OURS: frozenset[str] = frozenset(("killed", "start", "broken"))


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker returned, or why it did not, and the exception's own words."""

    value: Any = None
    error: Error | None = None
    message: str = ""

    @property
    def ours(self) -> bool:
        """Whether the failure says nothing of the question."""
        return self.error in OURS


@dataclass(frozen=True, slots=True)
class Served:
    """What workers serve: the function that `package.module:factory` makes from its options (JSON values)."""

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    heard: bool = False  # whether what it prints goes to our standard error


class WorkerGoneError(RuntimeError):
    """The worker process ended without an answer."""


class WorkerKilledError(WorkerGoneError):
    """Somebody else ended it."""


class NoWorkerError(WorkerGoneError):
    """None can be started."""


@dataclass(slots=True)
class Process:
    """One worker process and its pipes."""

    served: Served
    memory_mb: int
    popen: subprocess.Popen[bytes] | None = None
    buffer: bytes = b""
    asked: int = 0
    over: bool = False  # no further one is started

    def start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(dict.fromkeys([root, *(entry or os.getcwd() for entry in sys.path)]))
        # a fixed hash seed: what sympy finds may depend on the order of its sets
        fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [str(self.memory_mb), self.served.factory, json.dumps(dict(self.served.options))]
        self.buffer = b""
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "attnrl.verify.worker", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self.served.heard else subprocess.DEVNULL,
                env=os.environ | fixed | {"PYTHONPATH": path},
                start_new_session=True,  # what it starts itself ends with it
            )
        except OSError as error:
            raise NoWorkerError(str(error)) from error
        line = self.read_line(START_LIMIT)
        if line == b"":
            gone = self.gone()
            raise gone if isinstance(gone, WorkerKilledError) else NoWorkerError(str(gone))
        said = json.loads(line) if line else {"ready": False, "message": f"not ready within {START_LIMIT:g} s"}
        if not said["ready"]:
            self.kill()
            raise NoWorkerError(said["message"])

    def ready(self) -> None:
        """Sees to it that a worker runs; NoWorkerError where none can be started."""
        if self.popen is not None and self.popen.poll() is None:
            return
        for tries_left in reversed(range(STARTS)):
            self.kill()
            try:
                if not self.over:
                    self.start()
                if self.over:  # before, or while it started
                    self.kill()
                    raise NoWorkerError("it was closed")
                return
            except NoWorkerError:
                if not tries_left:
                    raise

    def ask(self, question: str, limit: float) -> Reply:
        """The worker's reply to a question (JSON) within the wall limit; on timeout the process is killed."""
        self.ready()
        assert self.popen is not None
        assert self.popen.stdin is not None
        self.asked += 1
        line = f'{{"id": {self.asked}, "limit": {json.dumps(limit)}, "question": {question}}}\n'
        try:
            raw = self.read_line(limit) if self.write(line.encode("ascii"), limit) else None
        except BrokenPipeError:
            raw = b""
        if raw is None:
            self.kill()
            return Reply(error="timeout", message=f"no answer within {limit:g} s")
        if not raw:
            raise self.gone()
        reply = json.loads(raw)
        if reply.pop("id") != self.asked:
            raise ValueError("the reply to another question")
        if reply.get("error") == "memory":
            self.kill()  # it ends by itself; the next question must not meet it
        return Reply(**reply)

    def write(self, line: bytes, limit: float) -> bool:
        """Hands a line over; False where the worker did not take it within the limit."""
        assert self.popen is not None
        assert self.popen.stdin is not None
        end, left = time.monotonic() + limit, memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdin, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return False
                left = left[os.write(self.popen.stdin.fileno(), left[:PIPE]) :]
        return True

    def gone(self) -> WorkerGoneError:
        """How the process ended: by itself, or by somebody else's SIGKILL or SIGTERM."""
        assert self.popen is not None
        code = self.popen.wait()
        self.kill()
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return WorkerKilledError(f"somebody ended it with signal {-code}")
        return WorkerGoneError(f"it ended with signal {-code}" if code < 0 else f"it ended with code {code}")

    def read_line(self, limit: float) -> bytes | None:
        """One line without its end; empty where the process ended, None where the limit passed first."""
        assert self.popen is not None
        assert self.popen.stdout is not None
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                if selector.select(left):
                    chunk = os.read(self.popen.stdout.fileno(), 65536)
                    if not chunk:
                        return b""
                    self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        if self.popen is None:
            return
        popen, self.popen = self.popen, None
        _end(popen)
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            if pipe:
                pipe.close()

    def give_up(self) -> None:
        """From another thread: the question at hand is answered with an error, and no other one taken."""
        self.over = True
        popen = self.popen
        if popen is not None:
            _end(popen)

    def forget(self) -> None:
        """In a forked child: closes the inherited pipes, leaves the parent's worker alone."""
        popen, self.popen = self.popen, None
        if popen is not None:
            popen.returncode = 0  # not our child: nothing to wait for
            for pipe in (popen.stdin, popen.stdout):
                if pipe:
                    pipe.close()


def _end(popen: subprocess.Popen[bytes]) -> None:
    """Kills a worker and what it started; the worker leads a process group of its own, which outlives it."""
    with suppress(ProcessLookupError, PermissionError):  # nobody left; on some systems, nobody but the dead
        os.killpg(popen.pid, signal.SIGKILL)
    popen.kill()


@dataclass(slots=True)
class Job:
    question: str  # JSON
    limit: float  # seconds
    future: Future[Reply] = field(default_factory=Future)


class Pool:
    """A queue of questions and up to `workers` processes behind it, each with a thread that watches it.

    Nothing starts before the first question. Safe to use from any thread, and from forked children.
    """

    def __init__(self, served: Served, workers: int, timeout: float, memory_mb: int) -> None:
        self.served, self.workers, self.timeout, self.memory_mb = served, workers, timeout, memory_mb
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.processes: list[Process] = []
        self.open_jobs = 0

    def submit(self, question: Any, limit: float | None = None) -> Future[Reply]:
        """A future of the reply to a question (JSON values); it always comes, and once.

        `limit` is its wall limit in seconds, by default the pool's.
        """
        job = Job(json.dumps(question), self.timeout if limit is None else limit)
        with self.lock:
            self.open_jobs += 1
            if len(self.threads) < min(self.workers, self.open_jobs):
                process = Process(self.served, self.memory_mb)
                thread = threading.Thread(
                    target=self._serve, args=(self.jobs, process), daemon=True, name="attnrl-verify"
                )
                self.processes.append(process)
                self.threads.append(thread)
                thread.start()
            self.jobs.put(job)
        return job.future

    def _serve(self, jobs: queue.SimpleQueue[Job | None], process: Process) -> None:
        """Answers jobs up to the closing mark. Should it end otherwise, what waits is answered with an error."""
        job: Job | None = None
        try:
            while (job := jobs.get()) is not None:
                self._resolve(job, self._answer(process, job))
        finally:
            process.kill()
            if job is not None:
                self._give_up(jobs, job)

    def _resolve(self, job: Job, reply: Reply) -> None:
        with self.lock:
            self.open_jobs -= 1
        job.future.set_result(reply)

    def _give_up(self, jobs: queue.SimpleQueue[Job | None], job: Job) -> None:
        """For a thread that ends before its time: nobody may wait for it, and the next question starts another."""
        waiting: list[Job | None] = [job]
        with self.lock:
            me = threading.current_thread()
            self.threads = [thread for thread in self.threads if thread is not me]
            self.processes = self.processes if self.threads else []
            while not jobs.empty():
                waiting.append(jobs.get())
        for one in waiting:
            if one is None:
                jobs.put(None)  # another thread's closing mark
            elif not one.future.done():
                self._resolve(one, Reply(error="broken", message="its thread broke"))

    def _answer(self, process: Process, job: Job) -> Reply:
        """The reply. A worker that somebody else kills costs a try more, never the answer."""
        deaths = kills = 0
        while True:
            try:
                return process.ask(job.question, job.limit)
            except NoWorkerError as error:
                return Reply(error="start", message=f"no worker can be started: {error}")
            except WorkerKilledError as error:
                kills += 1
                if kills == KILLS:
                    return Reply(error="killed", message=f"{kills} workers were killed, the last: {error}")
            except (WorkerGoneError, OSError, ValueError, OverflowError) as error:  # ValueError: a line that is no JSON
                process.kill()  # what it says from here on may answer an older question
                deaths += 1
                if deaths == TRIES:
                    return Reply(error="crash", message=f"{deaths} workers died of it, the last: {error}")

    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [p.popen.pid for p in list(self.processes) if p.popen is not None]

    def close(self, *, wait: bool = True) -> None:
        """Ends the workers; questions at hand and waiting are answered first, or given up where `wait` is False."""
        with self.lock:
            threads, self.threads = self.threads, []
            jobs, self.jobs = self.jobs, queue.SimpleQueue()
            processes, self.processes = self.processes, []
        while not wait:
            try:
                given_up = jobs.get_nowait()
            except queue.Empty:
                break
            assert given_up is not None
            self._resolve(given_up, Reply(error="broken", message="the pool was closed"))
        for process in processes if not wait else ():
            process.give_up()
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()

    def forget(self) -> None:
        """Start anew in a forked child."""
        for process in self.processes:
            process.forget()
        self._reset()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_pools() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_pools)
