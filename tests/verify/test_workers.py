"""The pool of worker processes by itself: what a question did to its worker, and what somebody else did, told apart."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from attnrl.verify import Verifier
from attnrl.verify.pool import Pool, Process, Reply, Served
from processes import alive, wait_until

JOIN = 120

SERVED = """
import os, signal, sys, time
from pathlib import Path

def make(log, fail=None):
    with open(log, "a") as file:
        file.write(f"start {os.getpid()}\\n")
    if fail == "raise":
        raise KeyError("no such thing")
    if fail == "slow":
        time.sleep(600)
    if fail == "exit":
        sys.exit(7)
    if fail == "once" and Path(log).read_text().count("start") == 1:
        raise OSError("not yet")

    def serve(question):
        do, *values = question
        with open(log, "a") as file:
            file.write(f"{do}\\n")
        times = Path(log).read_text().splitlines().count(do)
        if do == "kill" and times <= values[0]:
            os.kill(os.getpid(), getattr(signal, values[1] if len(values) > 1 else "SIGKILL"))
        if do == "die" and times <= values[0]:
            os.kill(os.getpid(), getattr(signal, values[1])) if len(values) > 1 else os._exit(3)
        if do == "raise":
            raise ValueError("a bad question " + "!" * values[0])
        if do == "memory":
            return len(bytearray(8 << 30))
        if do == "recurse":
            return serve(question)
        if do == "sleep":
            time.sleep(values[0])
        if do == "write":  # where replies go
            pipes = [fd for fd in range(3, 20) if os.path.exists(f"/proc/self/fd/{fd}")]
            os.write(pipes[0], values[0].encode())
            time.sleep(values[1])
        if do == "spawn":
            child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
            Path(values[0]).write_text(str(child))
            time.sleep(600)
        if do == "leave":
            values = [os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")]
        if do == "environ":
            values = [os.environ.get(name) for name in values]
        if do == "print":
            print('{"id": 1, "value": "from print"}', flush=True)
        return {"pid": os.getpid(), "values": values}

    return serve
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "served_here.py").write_text(SERVED)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "log"


def pool_of(log: Path, workers: int = 1, timeout: float = 20.0, **options: Any) -> Pool:
    return Pool(Served("served_here:make", {"log": str(log), **options}), workers, timeout, memory_mb=1024)


def ask(pool: Pool, *question: Any, limit: float | None = None) -> Reply:
    return pool.submit(list(question), limit).result(JOIN)


def starts(log: Path) -> int:
    return sum(line.startswith("start") for line in log.read_text().splitlines())


def test_every_question_is_answered_in_its_own_future(log: Path) -> None:
    pool = pool_of(log, workers=3)
    replies = [pool.submit(["echo", n, "\ud800é" * n]) for n in range(30)]
    assert [reply.result(JOIN).value["values"] for reply in replies] == [[n, "\ud800é" * n] for n in range(30)]
    assert len({reply.result().value["pid"] for reply in replies}) <= 3
    assert {(reply.result().error, reply.result().message) for reply in replies} == {(None, "")}
    pool.close()
    assert pool.pids() == []


def test_a_question_larger_than_a_pipe_arrives_whole(log: Path) -> None:
    pool = pool_of(log)
    text = "x" * 3_000_000
    assert ask(pool, "echo", text).value["values"] == [text]
    pool.close()


@pytest.mark.parametrize(("kills", "how"), [(1, "SIGKILL"), (7, "SIGKILL"), (4, "SIGTERM")])
def test_a_worker_killed_by_somebody_costs_a_try_and_no_answer(log: Path, kills: int, how: str) -> None:
    pool = pool_of(log)
    assert ask(pool, "kill", kills, how).value["values"] == [kills, how]
    assert starts(log) == kills + 1
    pool.close()


def test_a_question_at_which_workers_are_killed_without_end_is_an_error_of_ours(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnrl.verify.pool.KILLS", 4)
    pool = pool_of(log)
    reply = ask(pool, "kill", 4)
    assert (reply.value, reply.error, reply.ours) == (None, "killed", True)
    assert "signal 9" in reply.message
    assert starts(log) == 4
    assert ask(pool, "echo", 1).error is None
    pool.close()


def test_a_worker_that_dies_once_is_replaced_and_asked_again(log: Path) -> None:
    pool = pool_of(log)
    assert ask(pool, "die", 1).value["values"] == [1]
    assert starts(log) == 2
    pool.close()


@pytest.mark.parametrize(("how", "said"), [((), "code 3"), (("SIGSEGV",), "signal 11"), (("SIGABRT",), "signal 6")])
def test_a_question_that_workers_die_of_is_given_up_as_its_own_doing(log: Path, how: tuple[str], said: str) -> None:
    pool = pool_of(log)
    reply = ask(pool, "die", 99, *how)
    assert (reply.value, reply.error, reply.ours) == (None, "crash", False)
    assert said in reply.message
    assert log.read_text().splitlines().count("die") == 2
    assert ask(pool, "echo", 1).value["values"] == [1]
    pool.close()


def test_what_is_raised_is_told_with_its_cause_and_the_worker_lives(log: Path) -> None:
    pool = pool_of(log)
    before = ask(pool, "echo").value["pid"]
    reply = ask(pool, "raise", 1)
    assert reply == Reply(None, "raised", "ValueError: a bad question !")
    assert not reply.ours
    assert len(ask(pool, "raise", 9999).message) == 500
    assert ask(pool, "echo").value["pid"] == before
    pool.close()


def test_memory_and_recursion_are_limits_and_a_full_heap_is_not_used_again(log: Path) -> None:
    pool = pool_of(log)
    before = ask(pool, "echo").value["pid"]
    assert ask(pool, "recurse").error == "limit"
    assert ask(pool, "echo").value["pid"] == before
    assert ask(pool, "memory").error == "memory"
    assert pool.pids() == [], "it is gone before the next question can meet it"
    after = [ask(pool, "echo") for _ in range(3)]
    assert {reply.value["pid"] for reply in after} != {before}
    assert starts(log) == 2
    pool.close()


def test_the_wall_limit_is_the_questions_own_or_the_pools(log: Path) -> None:
    pool = pool_of(log, timeout=2.5)
    reply = ask(pool, "sleep", 600)
    assert (reply.error, reply.ours) == ("timeout", False)
    assert "2.5 s" in reply.message
    assert pool.pids() == [], "what hangs is killed"
    assert log.read_text().splitlines().count("sleep") == 1, "a question that hangs is not asked again"
    assert ask(pool, "sleep", 3, limit=60).value["values"] == [3]
    pool.close()


def test_half_a_reply_of_a_killed_worker_does_not_enter_the_next(log: Path) -> None:
    pool = pool_of(log)
    assert ask(pool, "write", '{"id": 1, "value": ', 600, limit=4.0).error == "timeout"
    assert ask(pool, "echo", 1).value["values"] == [1]
    assert starts(log) == 2
    pool.close()


def test_what_a_question_started_ends_with_its_worker(log: Path, tmp_path: Path) -> None:
    pool = pool_of(log)
    assert ask(pool, "spawn", str(tmp_path / "child"), limit=5.0).error == "timeout"
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: not alive(child))
    pool.close()


def test_what_an_idle_worker_left_behind_ends_when_the_next_one_starts(log: Path) -> None:
    pool = pool_of(log)
    reply = ask(pool, "leave").value
    os.kill(reply["pid"], signal.SIGKILL)
    assert wait_until(lambda: not alive(reply["pid"]))
    (child,) = reply["values"]
    assert alive(child)
    assert ask(pool, "echo", 1).value["values"] == [1]
    assert wait_until(lambda: not alive(child))
    pool.close()


def test_a_killed_worker_leaves_no_open_pipe(log: Path) -> None:
    process = Process(Served("served_here:make", {"log": str(log)}), memory_mb=1024)
    process.start()
    assert process.popen is not None
    pipes = process.popen.stdin, process.popen.stdout
    process.kill()
    assert [pipe is not None and pipe.closed for pipe in pipes] == [True, True]


def test_what_imports_take_is_not_counted_and_what_a_question_takes_is(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "large_here.py").write_text(
        "import mmap\n"
        "LIBRARY = mmap.mmap(-1, 3 << 30)\n"  # as torch with CUDA maps at import
        "def make():\n"
        "    return lambda size: len(bytearray(size << 20)) >> 20\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = Pool(Served("large_here:make"), 1, 20.0, memory_mb=512)
    replies = [pool.submit(size, None).result(JOIN) for size in (200, 900, 100)]
    pool.close()
    assert [(r.value, r.error) for r in replies] == [(200, None), (None, "memory"), (100, None)]


def test_two_lines_that_came_at_once_are_read_one_by_one() -> None:
    process = Process(Served("nowhere:make"), memory_mb=64)
    process.popen = subprocess.Popen([sys.executable, "-c", "print('a\\nb')"], stdout=subprocess.PIPE)
    process.popen.wait()
    assert [process.read_line(JOIN) for _ in range(3)] == [b"a", b"b", b""]
    process.kill()


def test_a_worker_that_does_not_read_is_a_timeout(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(log, timeout=4.0)
    pid = ask(pool, "echo").value["pid"]
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.delattr(Process, "read_line")  # nobody waits a second time, for the reply
        assert ask(pool, "echo", "x" * 3_000_000).error == "timeout"
    assert ask(pool, "echo", 1).value["values"] == [1]
    pool.close()


def test_a_worker_has_one_thread_and_one_order_of_sets_whatever_its_parent_has(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    for name in names:
        monkeypatch.setenv(name, "7" if name != "PYTHONIOENCODING" else "ascii")
    pool = pool_of(log)
    assert ask(pool, "environ", *names).value["values"] == list(names.values())
    pool.close()


def test_what_is_printed_does_not_enter_the_replies(log: Path) -> None:
    pool = pool_of(log)
    assert ask(pool, "print", 5).value["values"] == [5]
    pool.close()


@pytest.mark.parametrize("heard", [True, False])
def test_what_is_printed_is_heard_where_that_is_asked_for(
    log: Path, heard: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    more = {"heard": True} if heard else {}
    pool = Pool(Served("served_here:make", {"log": str(log)}, **more), 1, 20.0, memory_mb=1024)
    ask(pool, "print", 5)
    pool.close()
    assert ("from print" in capfd.readouterr().err) == heard


def test_modules_beside_the_caller_are_found_as_python_finds_them(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry of sys.path is the working directory."""
    monkeypatch.chdir(log.parent)
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if entry != str(log.parent))])
    pool = pool_of(log)
    assert ask(pool, "echo", 1).value["values"] == [1]
    pool.close()


@pytest.mark.parametrize(("fail", "said"), [("raise", "KeyError: 'no such thing'"), ("exit", "code 7")])
def test_what_cannot_start_is_an_error_of_ours_with_its_cause(log: Path, fail: str, said: str) -> None:
    pool = pool_of(log, fail=fail)
    reply = ask(pool, "echo", 1)
    assert (reply.value, reply.error, reply.ours) == (None, "start", True)
    assert said in reply.message
    assert starts(log) == 4
    pool.close()


def test_a_worker_that_is_not_ready_in_time_is_an_error_of_ours(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnrl.verify.pool.START_LIMIT", 0.7)
    pool = pool_of(log, fail="slow")
    reply = ask(pool, "echo", 1)
    assert (reply.error, reply.ours) == ("start", True)
    assert reply.message.endswith("not ready within 0.7 s")
    pool.close()


def test_a_reply_to_another_question_is_not_taken(log: Path) -> None:
    pool = pool_of(log)
    reply = ask(pool, "write", '{"id": 0, "value": "not asked for"}\n', 0)
    assert (reply.value, reply.error, reply.ours) == (None, "crash", False)
    assert "another question" in reply.message
    assert ask(pool, "echo", 1).value["values"] == [1]
    pool.close()


def test_a_worker_that_does_not_start_at_once_is_started_again(log: Path) -> None:
    pool = pool_of(log, fail="once")
    assert ask(pool, "echo", 1).value["values"] == [1]
    assert starts(log) == 2
    pool.close()


def test_workers_killed_at_random_during_a_batch_lose_no_answer(log: Path) -> None:
    pool, rng = pool_of(log, workers=2), random.Random(0)
    replies = [pool.submit(["sleep", 0.02, n]) for n in range(40)]
    killed = seen = 0
    while (done := sum(reply.done() for reply in replies)) < 40:
        time.sleep(0.01)
        if done >= seen + 3 and (pids := pool.pids()):  # after some answers, so that a slow machine gets on too
            seen = done
            try:
                os.kill(rng.choice(pids), rng.choice([signal.SIGKILL, signal.SIGTERM]))
                killed += 1
            except ProcessLookupError:
                pass
    assert killed >= 3
    assert [reply.result().error for reply in replies] == [None] * 40
    assert [reply.result().value["values"][1] for reply in replies] == list(range(40))
    pool.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_leaves_nobody_waiting(log: Path) -> None:
    pool = pool_of(log, timeout="soon")  # type: ignore[arg-type]
    futures: list[Future[Reply]] = [pool.submit(["echo"]) for _ in range(3)]
    assert [(f.result(JOIN).error, f.result().ours) for f in futures] == [("broken", True)] * 3
    assert futures[0].result().message == "its thread broke"
    assert ask(pool, "echo").error == "broken"
    pool.close()
    assert pool.open_jobs == 0
    for thread in threading.enumerate():
        if thread.name == "attnrl-verify":
            thread.join(JOIN)  # its exception belongs to this test


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_leaves_the_others_their_workers(log: Path) -> None:
    pool = pool_of(log, workers=2)
    sleeps = pool.submit(["sleep", 600], 600)
    while not log.exists() or "sleep" not in log.read_text().splitlines():
        time.sleep(0.05)
    (pid,) = pool.pids()
    assert pool.submit(["echo"], "soon").result(JOIN).error == "broken"  # type: ignore[arg-type]
    assert pid in pool.pids()
    pool.close(wait=False)
    assert sleeps.result(JOIN).ours
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("at_hand", [True, False])
def test_closing_answers_what_waits_or_gives_it_up(log: Path, at_hand: bool) -> None:
    pool = pool_of(log)
    waiting = [pool.submit(["sleep", 0.05]) for _ in range(4)]
    pool.close()
    assert [reply.result(0).error for reply in waiting] == [None] * 4
    waiting = [pool.submit(["sleep", 600], 600) for _ in range(10)]
    while at_hand and log.read_text().splitlines().count("sleep") < 5:
        time.sleep(0.05)  # until the first is at hand; otherwise its worker only starts
    closing = threading.Thread(target=pool.close, kwargs={"wait": False}, daemon=True)
    closing.start()
    closing.join(JOIN)
    assert not closing.is_alive(), "it waited for what it should give up"
    assert [(reply.result(0).error, reply.result(0).ours) for reply in waiting[1:]] == [("broken", True)] * 9
    assert waiting[0].result(0).error in (("start",) if at_hand else ("start", "broken"))


def test_closed_workers_are_gone_and_the_next_question_starts_another(log: Path) -> None:
    pool = pool_of(log)
    pid = ask(pool, "echo").value["pid"]
    assert pool.pids() == [pid]
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ask(pool, "echo").value["pid"] != pid
    pool.close()


def test_no_more_workers_than_questions_or_than_allowed(log: Path) -> None:
    pool = pool_of(log, workers=2)
    assert pool.pids() == []
    for _ in range(3):  # one after the other
        ask(pool, "echo")
        assert len(pool.pids()) == 1
    for reply in [pool.submit(["sleep", 0.3]) for _ in range(6)]:
        reply.result(JOIN)
    assert len(pool.pids()) == 2
    assert all(thread.daemon for thread in pool.threads), "a pool left open would hold up the end of the program"
    pool.close()


def _in_a_fork(check: Any) -> Any:
    """What `check` returns in a forked child; fails where the child hangs."""
    context = multiprocessing.get_context("fork")
    ends = context.Queue()
    child = context.Process(target=lambda: ends.put(check()))
    child.start()
    try:
        return ends.get(timeout=60)
    finally:
        child.kill()
        child.join()


def test_a_forked_child_has_workers_of_its_own_and_leaves_the_parents_alone(log: Path) -> None:
    pool = pool_of(log)
    pid = ask(pool, "echo").value["pid"]
    popen = pool.processes[0].popen
    assert popen is not None
    assert popen.stdin is not None
    pipe = os.readlink(f"/proc/self/fd/{popen.stdin.fileno()}")

    def in_child() -> tuple[int, bool]:
        found = ask(pool, "echo").value["pid"]
        pool.close()
        return found, pipe in map(_target, os.listdir("/proc/self/fd"))

    assert pipe in map(_target, os.listdir("/proc/self/fd"))
    child_pid, still_open = _in_a_fork(in_child)
    assert child_pid != pid
    assert not still_open, "the parent's worker would not see its input end"
    assert ask(pool, "echo").value["pid"] == pid
    pool.close()


def test_a_forked_child_has_nothing_to_say_of_the_parents_workers(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(log)
    ask(pool, "echo")
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: seen.append(str(message)))
        said = _in_a_fork(lambda: (gc.collect(), list(seen))[1])
    pool.close()
    assert not [one for one in said if "subprocess" in one]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing itself
        return ""


@pytest.mark.parametrize("holder", ["pool", "verifier"])
def test_a_lock_held_at_the_fork_does_not_stay_locked_in_the_child(log: Path, holder: str) -> None:
    verifier = Verifier(workers=1)
    pool = pool_of(log)
    lock = pool.lock if holder == "pool" else verifier._lock
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            leave.wait(JOIN)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def in_child() -> float:
        if holder == "pool":
            return float(ask(pool, "echo", 1.0).value["values"][0])
        return verifier.grade([(r"\boxed{4}", "4")])[0].reward

    try:
        assert _in_a_fork(in_child) == 1.0
    finally:
        leave.set()
        thread.join()
