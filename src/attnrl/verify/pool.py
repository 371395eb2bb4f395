"""Worker processes that are killed and replaced from outside, and the queue before them."""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

START_LIMIT = 120.0  # seconds a worker may take to import its libraries
TRIES = 2  # of one question; a worker that somebody else killed meanwhile costs one
STARTS = 4  # of one worker, before its question is given up


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker said: right or wrong, or an error kind."""

    right: bool
    error: str | None = None


class WorkerGoneError(RuntimeError):
    """The worker process ended without an answer."""


@dataclass(slots=True)
class Process:
    """One worker process and its pipes."""

    memory_mb: int
    timeout: float
    popen: subprocess.Popen[bytes] | None = None
    buffer: bytes = b""
    asked: int = 0

    def start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *(p for p in (os.environ.get("PYTHONPATH"),) if p)])
        # a fixed hash seed: what sympy finds may depend on the order of its sets
        fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        environment = os.environ | fixed | {"PYTHONPATH": path}
        self.buffer = b""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "attnrl.verify.worker", str(self.memory_mb), str(self.timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        if self.read_line(START_LIMIT) != b"ready":
            self.kill()
            raise WorkerGoneError("a verifier worker did not start")

    def ready(self) -> None:
        """Sees to it that a worker runs; WorkerGoneError where none can be started."""
        if self.popen is not None and self.popen.poll() is None:
            return
        for tries_left in reversed(range(STARTS)):
            self.kill()
            try:
                self.start()
                return
            except WorkerGoneError:
                if not tries_left:
                    raise

    def ask(self, answer: str, golds: Sequence[str]) -> Reply:
        """The worker's reply within the wall limit; on timeout the process is killed."""
        self.ready()
        assert self.popen is not None
        assert self.popen.stdin is not None
        self.asked += 1
        line = json.dumps({"id": self.asked, "answer": answer, "golds": list(golds)}) + "\n"
        try:
            self.popen.stdin.write(line.encode("ascii"))
            raw = self.read_line(self.timeout)
        except BrokenPipeError:
            raw = b""
        if raw is None:
            self.kill()
            return Reply(False, "timeout")
        if not raw:
            self.kill()
            raise WorkerGoneError("a verifier worker died")
        reply = json.loads(raw)
        assert reply["id"] == self.asked
        return Reply(bool(reply.get("right")), reply.get("error"))

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
        popen.kill()
        popen.wait()
        for pipe in (popen.stdin, popen.stdout):
            if pipe:
                pipe.close()

    def forget(self) -> None:
        """In a forked child: closes the inherited pipes, leaves the parent's worker alone."""
        popen, self.popen = self.popen, None
        if popen is not None:
            popen.returncode = 0  # not our child: nothing to wait for
            for pipe in (popen.stdin, popen.stdout):
                if pipe:
                    pipe.close()


@dataclass(slots=True)
class Job:
    answer: str
    golds: tuple[str, ...]
    future: Future[Reply] = field(default_factory=Future)


class Pool:
    """A queue of symbolic questions and up to `workers` processes behind it, each with a thread that watches it.

    Nothing starts before the first question. Safe to use from any thread, and from forked children.
    """

    def __init__(self, workers: int, timeout: float, memory_mb: int) -> None:
        self.workers, self.timeout, self.memory_mb = workers, timeout, memory_mb
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.processes: list[Process] = []
        self.open_jobs = 0

    def submit(self, answer: str, golds: Sequence[str]) -> Future[Reply]:
        """A future of the reply; it always comes, and once."""
        job = Job(answer, tuple(golds))
        with self.lock:
            self.open_jobs += 1
            if len(self.threads) < min(self.workers, self.open_jobs):
                process = Process(self.memory_mb, self.timeout)
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
                self._resolve(one, Reply(False, "crash"))

    def _answer(self, process: Process, job: Job) -> Reply:
        for _ in range(TRIES):
            try:
                return process.ask(job.answer, job.golds)
            except (WorkerGoneError, OSError, ValueError, OverflowError):  # ValueError: a line that is no JSON
                process.kill()  # what it says from here on may answer an older question
        return Reply(False, "crash")

    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return [p.popen.pid for p in list(self.processes) if p.popen is not None]

    def close(self) -> None:
        """Ends the workers; questions still waiting are answered first."""
        with self.lock:
            threads, self.threads = self.threads, []
            jobs, self.jobs = self.jobs, queue.SimpleQueue()
            self.processes = []
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
