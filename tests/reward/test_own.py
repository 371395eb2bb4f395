"""Rewards of a user's own file: plain ones in worker processes, async ones in the event loop, failures told apart."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnrl.errors import ConfigError, DataError, TrainingError
from attnrl.reward import Rewards, build_rewards
from attnrl.reward.runners import PIECE, TRIED, InWorkers
from attnrl.types import Attempt, Verdict
from processes import alive, wait_until

OWN = '''
import asyncio, os, signal, sys, time
from pathlib import Path

import numpy as np

from attnrl.reward import declare
from attnrl.types import Verdict


def level(attempts, *, bonus=0.0, max_response_tokens=None):
    """Reads a column of the row; an option and a knob."""
    return [a.row["level"] / max_response_tokens + bonus for a in attempts]


def echo(attempts):
    a = attempts[0]
    said = [[b.problem, list(b.answers), b.response, b.finish, b.tokens, dict(b.row)] for b in attempts]
    return [Verdict(0.25, "echo", repr(x), right=True, parts={"inner": 2.0}) for x in said]


def numbers(attempts):
    kinds = {"bool": True, "int": 2, "numpy": np.float32(0.5), "array": np.ones(1)[0]}
    return [kinds[a.response] for a in attempts]


def hostile(attempts):
    for a in attempts:
        match a.response:
            case "raise":
                raise LookupError(f"no {a.problem}")
            case "hang":
                time.sleep(600)
            case "memory":
                bytearray(8 << 30)
            case "recurse":
                hostile([a]) if True else None
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "nan":
                return [float("nan")] * len(attempts)
            case "none":
                return [None] * len(attempts)
            case "text":
                return "1" * len(attempts)
            case "short":
                return []
    return [float(a.response) for a in attempts]


def sleeps(attempts, *, path):
    with open(path, "a") as file:
        print(len(attempts), file=file)
    time.sleep(600)


def of_one(attempt):
    return float(attempt.response == attempt.answers[0])


def needs_file(attempts, *, path):
    Path(path).exists() or os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0 for _ in attempts]


def sandbox(attempts):
    return [Verdict(0.0, "timeout") for _ in attempts]


def one_for_all(attempts, *, path):
    with open(path, "a") as file:
        file.write(f"{len(attempts)}\\n")
    return [1.0]


def slow(attempts):
    time.sleep(0.02 * len(attempts))
    return [float(a.response) for a in attempts]


@declare(whole_batch=True)
def rank(attempts):
    """The place of each response among all of the batch, by length."""
    order = sorted(range(len(attempts)), key=lambda i: len(attempts[i].response))
    return [float(order.index(i)) for i in range(len(attempts))]


@declare(whole_batch=True)
def whole_fails(attempts):
    raise OSError("disk")


@declare(truncated=True)
def sees_all(attempts):
    return [1.0 for a in attempts]


def pids(attempts):
    return [float(os.getpid()) for a in attempts]


running, most = 0, 0


async def judge(attempt, *, wait=0.0):
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(wait if attempt.response != "hang" else 600)
        if attempt.response == "raise":
            raise ConnectionError("no route")
        if attempt.response == "nan":
            return float("nan")
        if attempt.response == "verdict":
            return Verdict(0.5, "judged", "a", right=True)
        return float(attempt.response) + attempt.row.get("plus", 0)
    finally:
        running -= 1


async def own_timeout(attempt):
    raise TimeoutError("the service said so")


async def blocking(attempt):
    time.sleep(4.0)
    return 1.0


broken_import = 3


def keyed(attempts):
    return {i: 1.0 for i in range(len(attempts))}


def unheard(attempts):
    return [Verdict(1.0, "x", parts={"q": float("nan")}) for _ in attempts]


def starts_another(attempts):
    import subprocess
    child = subprocess.Popen(["sleep", "614"])
    Path(__file__).with_suffix(".child").write_text(str(child.pid))
    child.wait()


@declare(here=True)
def fails_here(attempts):
    return [1 / 0 for _ in attempts]


@declare(here=True)
def never_works(attempts):
    raise KeyError("service")


def yielding(attempts):
    yield from (1.0 for _ in attempts)


class Scorer:
    def __init__(self, attempts):
        pass


def two(attempts, level):
    return [1.0 for _ in attempts]


def typed(attempts, *, share: float = 0.5):
    return [share for _ in attempts]


async def stuck(attempt):
    await asyncio.to_thread(time.sleep, 600)


async def ends(attempt):
    sys.exit(2)
'''


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another module name each time: an imported one would stay."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def line_of(words: str) -> int:
    """Where the user's file says so, counted from 1."""
    return 1 + next(n for n, text in enumerate(OWN.splitlines()) if words in text)


def attempts(*responses: str, **row: Any) -> list[Attempt]:
    return [Attempt(f"p{i}", ("g",), response, row=row) for i, response in enumerate(responses)]


def built(name: str, function: str, options: dict[str, Any] | None = None, **settings: Any) -> Rewards:
    return build_rewards([(f"{name}:{function}", 1.0, options or {})], **{"workers": 1, **settings})


def test_a_function_reads_columns_options_and_knobs(own_file: str) -> None:
    with built(own_file, "level", {"bonus": 0.5}, knobs={"max_response_tokens": 8, "other": 1}) as rewards:
        assert [v.reward for v in rewards.grade(attempts("a", "b", level=2))] == [0.75, 0.75]
        assert rewards.metrics()["reward/level"] == 0.75
    with built(own_file, "level", {"max_response_tokens": 2}, knobs={"max_response_tokens": 8}) as rewards:
        assert [v.reward for v in rewards.grade(attempts("a", level=2))] == [1.0], "an option wins over a knob"


def test_everything_of_an_attempt_arrives_and_everything_of_a_verdict_returns(own_file: str) -> None:
    attempt = Attempt("1+1?", ("2", "two"), "é\ud800\n", "length", 7, {"id": [1, None], "deep": {"x": 0.5}})
    with built(own_file, "echo", grade_truncated=True) as rewards:
        (verdict,) = rewards.grade([attempt])
    said = ["1+1?", ["2", "two"], "é\ud800\n", "length", 7, {"id": [1, None], "deep": {"x": 0.5}}]
    assert verdict == Verdict(0.25, "echo", repr(said), None, True, {"echo": 0.25, "echo.inner": 2.0})


def test_numbers_of_every_kind_are_rewards(own_file: str) -> None:
    with built(own_file, "numbers") as rewards:
        verdicts = rewards.grade(attempts("bool", "int", "numpy", "array"))
    assert [v.reward for v in verdicts] == [1.0, 2.0, 0.5, 1.0]
    assert [v.right for v in verdicts] == [True, True, False, True]
    assert {v.rule for v in verdicts} == {"numbers"}


def test_many_attempts_come_back_in_order(own_file: str) -> None:
    count = 5 * PIECE + 3
    with built(own_file, "hostile", workers=2) as rewards:
        assert [v.reward for v in rewards.grade(attempts(*map(str, range(count))))] == list(range(count))


def test_one_that_raises_is_an_error_of_its_row_with_its_cause(own_file: str) -> None:
    with built(own_file, "hostile") as rewards:
        verdicts = rewards.grade(attempts("1", "raise", "2", "nan", "3", "none", "4", "5"))
        assert [v.error for v in verdicts] == [
            None,
            f"LookupError: no p1 ({own_file}.py, line {line_of('raise LookupError')})",
            None,
            "ValueError: a reward must be a finite number, not nan",
            None,
            "TypeError: a reward is a number or a Verdict, not None",
            None,
            None,
        ]
        assert [v.reward for v in verdicts] == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 5.0]
        metrics = rewards.metrics()
    assert {k: v for k, v in metrics.items() if k.startswith("reward/error_")} == {
        "reward/error_LookupError": 1.0,
        "reward/error_ValueError": 1.0,
        "reward/error_TypeError": 1.0,
    }
    assert metrics["reward/hostile"] == 3.0  # (1 + 2 + 3 + 4 + 5) / 5
    assert metrics["reward/hostile_errors"] == 3.0


@pytest.mark.parametrize(("response", "cause"), [("text", "not str"), ("short", "0 for 1 attempts")])
def test_a_list_of_the_wrong_kind_is_an_error(own_file: str, response: str, cause: str) -> None:
    with built(own_file, "hostile", max_error_share=1.0) as rewards:
        (verdict,) = rewards.grade(attempts(response))
    assert cause in str(verdict.error)


def test_what_the_response_breaks_is_wrong_and_spares_its_neighbours(own_file: str) -> None:
    with built(own_file, "hostile", timeout_s=2.0, memory_mb=1024, max_error_share=0.0) as rewards:
        verdicts = rewards.grade(attempts("1", "hang", "2", "memory", "3", "recurse", "4", "crash"))
        assert [v.error for v in verdicts] == [None] * 8
        assert [(v.reward, v.rule) for v in verdicts[1::2]] == [
            (0.0, "timeout"),
            (0.0, "memory"),
            (0.0, "limit"),
            (0.0, "crash"),
        ]
        assert [v.reward for v in verdicts[::2]] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("count", [1, 3, PIECE, 2 * PIECE + 1])
def test_a_function_that_no_attempt_survives_is_broken_itself_however_small_the_batch(
    own_file: str, count: int
) -> None:
    cause = rf"{count} of {count} rewards .*'hostile' \({count} times\): limit: RecursionError; no attempt of the batch"
    with built(own_file, "hostile") as rewards:
        with pytest.raises(TrainingError, match=cause):
            rewards.grade(attempts(*["recurse"] * count))
        almost = rewards.grade(attempts(*["recurse"] * count, "1"))
        assert [(v.reward, v.error) for v in almost] == [(0.0, None)] * count + [(1.0, None)]
        # it works, as the last one shows, which is asked about again: these responses did it
        assert [(v.rule, v.error) for v in rewards.grade(attempts(*["recurse"] * count))] == [("limit", None)] * count


def test_a_function_that_hangs_on_the_first_few_is_asked_no_more(own_file: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    said = r"20 of 20 rewards .*'sleeps' \(20 times\): timeout: .*; so it went with each of the first 4 attempts"
    with built(own_file, "sleeps", {"path": str(calls)}, timeout_s=1.0) as rewards:
        with pytest.raises(TrainingError, match=said):
            rewards.grade(attempts(*"a" * 20))
        assert calls.read_text().split() == ["1"] * TRIED


def test_a_function_for_one_attempt_is_told_that_it_gets_a_list(own_file: str) -> None:
    said = r"'list' object has no attribute 'response' \(.*, line \d+; a plain function gets a list of attempts"
    with built(own_file, "of_one") as rewards, pytest.raises(TrainingError, match=said):
        rewards.grade(attempts("a"))


def test_a_function_that_worked_and_breaks_now_is_broken(own_file: str, tmp_path: Path) -> None:
    with built(own_file, "needs_file", {"path": str(tmp_path / "there")}) as rewards:
        (tmp_path / "there").touch()
        assert [v.reward for v in rewards.grade(attempts("a", "b"))] == [1.0, 1.0]
        (tmp_path / "there").unlink()
        with pytest.raises(TrainingError, match=r"2 of 2 rewards .*crash: .*; no attempt of the batch could be graded"):
            rewards.grade(attempts("a", "b"))


def test_what_breaks_beside_what_raises_is_an_error_too_where_nothing_is_graded(own_file: str) -> None:
    with (
        built(own_file, "hostile") as rewards,
        pytest.raises(TrainingError, match=r"4 of 4 rewards .*\(2 times\)"),
    ):
        rewards.grade(attempts("raise", "recurse", "recurse", "nan"))


def test_rules_of_verdicts_are_the_function_s_own_words(own_file: str) -> None:
    """A sandbox may call its own rule "timeout": that is an answer."""
    with built(own_file, "sandbox") as rewards:
        verdicts = rewards.grade(attempts(*"ab" * PIECE))
    assert {(v.rule, v.error) for v in verdicts} == {("timeout", None)}


def test_one_entry_for_many_attempts_is_an_error_of_all_and_nobody_is_asked_again(
    own_file: str, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    with (
        built(own_file, "one_for_all", {"path": str(asked)}) as rewards,
        pytest.raises(
            TrainingError,
            match=r"4 of 4 rewards .* reward 'one_for_all' \(4 times\): ValueError: a reward returns one entry an "
            "attempt: 1 for 4 attempts",
        ),
    ):
        rewards.grade(attempts("a", "b", "c", "d"))
    assert asked.read_text() == "4\n"


def test_too_many_errors_stop_the_run_with_the_most_frequent_cause(own_file: str) -> None:
    with (
        built(own_file, "hostile") as rewards,
        pytest.raises(TrainingError, match=r"\(2 times\): ValueError: a reward"),
    ):
        rewards.grade(attempts("1", "nan", "raise", "nan"))


def test_workers_killed_at_random_lose_no_verdict(own_file: str) -> None:
    with built(own_file, "slow", workers=2) as rewards:
        (runner,) = (entry.runner for entry in rewards.entries)
        assert isinstance(runner, InWorkers)
        found: list[list[Verdict]] = []
        thread = threading.Thread(target=lambda: found.append(rewards.grade(attempts(*map(str, range(80))))))
        thread.start()
        killed, rng, seen = 0, random.Random(1), 10
        while thread.is_alive():
            time.sleep(0.01)
            left = runner.pool.open_jobs
            if 0 < left < seen and (pids := runner.pool.pids()):  # after a piece, so that a slow machine gets on too
                seen = left
                try:
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
        thread.join()
    assert killed >= 2
    assert [(v.reward, v.error) for v in found[0]] == [(float(n), None) for n in range(80)]


def test_a_function_of_the_whole_batch_is_called_once_with_all(own_file: str) -> None:
    with built(own_file, "rank", workers=2) as rewards:
        lengths = list(np.random.default_rng(0).permutation(3 * PIECE))
        assert [v.reward for v in rewards.grade(attempts(*("x" * n for n in lengths)))] == lengths
    with built(own_file, "whole_fails", max_error_share=1.0) as rewards:
        said = f"OSError: disk ({own_file}.py, line {line_of('raise OSError')})"
        assert [v.error for v in rewards.grade(attempts("a", "b"))] == [said] * 2


def test_a_function_declares_that_it_sees_cut_off_responses(own_file: str) -> None:
    cut = [Attempt("", (), "1", "length"), Attempt("", (), "1", "stop")]
    with build_rewards([(f"{own_file}:hostile", 1.0, {}), (f"{own_file}:sees_all", 1.0, {})], workers=1) as rewards:
        assert [v.parts for v in rewards.grade(cut)] == [
            {"hostile": 0.0, "sees_all": 1.0},
            {"hostile": 1.0, "sees_all": 1.0},
        ]


def test_plain_functions_run_in_other_processes_that_end_with_the_rewards(own_file: str) -> None:
    with built(own_file, "pids") as rewards:
        (first,), (second,) = rewards.grade(attempts("a")), rewards.grade(attempts("b"))
        assert first.reward == second.reward != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.reward), 0)


def test_rows_that_are_no_json_are_said(own_file: str) -> None:
    with built(own_file, "level") as rewards, pytest.raises(DataError, match=r"must be JSON values: .*type set"):
        rewards.grade(attempts("a", level={1}))


def test_a_file_that_imports_here_but_not_in_a_worker_is_an_error_of_ours(own_file: str, tmp_path: Path) -> None:
    with built(own_file, "slow", max_error_share=1.0) as rewards:
        (tmp_path / f"{own_file}.py").write_text("raise ImportError('gone')")
        (verdict,) = rewards.grade(attempts("1"))
        assert str(verdict.error).startswith("start: no worker can be started: ValueError: cannot import")
        assert rewards.metrics()["reward/error_start"] == 1.0


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("nothing", {}, "cannot import"),
        ("broken_import", {}, "is not a function but int"),
        ("level", {"bonuss": 1}, "no option 'bonuss'; did you mean 'bonus'"),
        ("judge", {"waits": 1}, "no option 'waits'; did you mean 'wait'"),
        ("yielding", {}, "must return its values; it yields them"),
        ("Scorer", {}, "must be a function, and Scorer is a class"),
        ("two", {}, r"must be callable as \(attempts\), .*'level'"),
        ("typed", {"share": "half"}, "option share = 'half': input should be a valid number"),
        ("never_works", {}, "KeyError: 'service'"),
    ],
)
def test_mistakes_are_said_before_work_starts(own_file: str, function: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(own_file, function, options)


@pytest.mark.parametrize("code", ["def f(:", "1 / 0", "import sys; sys.exit(4)"])
def test_a_file_that_fails_or_ends_while_it_is_imported_is_said(tmp_path: Path, code: str, own_file: str) -> None:
    (tmp_path / f"{own_file}_bad.py").write_text(code)
    with pytest.raises(ConfigError, match=r"cannot import .*: (SyntaxError|ZeroDivisionError|SystemExit): "):
        built(f"{own_file}_bad", "f")


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("keyed", "not dict"),
        ("unheard", "not q = nan"),
        ("fails_here", "ZeroDivisionError: "),
        ("ends", "SystemExit: 2"),
    ],
)
def test_what_is_no_list_of_finite_rewards_is_an_error_with_its_cause(own_file: str, function: str, cause: str) -> None:
    with built(own_file, function, max_error_share=1.0) as rewards:
        verdicts = rewards.grade(attempts("a", "b"))
    assert [cause in str(v.error) for v in verdicts] == [True, True]


def test_what_a_function_started_ends_with_its_worker(own_file: str, tmp_path: Path) -> None:
    with built(own_file, "starts_another", timeout_s=5.0, max_error_share=1.0) as rewards:
        (verdict,) = rewards.grade(attempts("a"))
        assert verdict.rule == "timeout"
        child = int((tmp_path / f"{own_file}.child").read_text())
        assert wait_until(lambda: not alive(child))


def test_a_call_that_hangs_in_a_thread_does_not_hold_up_the_end_of_the_program(own_file: str, tmp_path: Path) -> None:
    code = (
        "from attnrl.reward import build_rewards\nfrom attnrl.types import Attempt\n"
        f"with build_rewards([('{own_file}:stuck', 1.0, {{}})], async_timeout_s=0.2, max_error_share=1.0) as rewards:\n"
        "    print([v.error for v in rewards.grade([Attempt('', (), 'a')])])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, *sys.path]))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert "timeout: no answer within 0.2 s" in done.stdout


def test_async_functions_get_one_attempt_each_and_run_together(own_file: str) -> None:
    import importlib

    with built(own_file, "judge", {"wait": 0.2}, concurrency=5, async_timeout_s=30.0) as rewards:
        assert [v.reward for v in rewards.grade(attempts(*map(str, range(20)), plus=1))] == list(range(1, 21))
        assert importlib.import_module(own_file).most == 5, "the limit on concurrency is reached and kept"
        (verdict,) = rewards.grade(attempts("verdict"))
        assert verdict == Verdict(0.5, "judged", "a", None, True, {"judge": 0.5})


def test_an_async_function_that_fails_or_hangs_is_an_error_with_its_cause(own_file: str) -> None:
    with built(own_file, "judge", async_timeout_s=3.0, max_error_share=0.8) as rewards:
        verdicts = rewards.grade(attempts("1", "raise", "hang", "nan", "2"))
        assert [v.error for v in verdicts] == [
            None,
            "ConnectionError: no route",
            "timeout: no answer within 3 s",
            "ValueError: a reward must be a finite number, not nan",
            None,
        ]
        assert rewards.metrics()["reward/error_timeout"] == 1.0
    with built(own_file, "own_timeout", max_error_share=1.0) as rewards:
        assert [v.error for v in rewards.grade(attempts("1"))] == ["TimeoutError: the service said so"]


def test_an_async_function_that_blocks_its_loop_is_said(own_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnrl.reward.runners.GRACE", 0.1)
    with built(own_file, "blocking", async_timeout_s=0.1, max_error_share=1.0) as rewards:
        verdicts = rewards.grade(attempts("1", "2", "3"))
        assert {v.error for v in verdicts} == {
            "timeout: the event loop is blocked; an async reward must await what it waits for"
        }


def test_async_rewards_can_be_used_inside_a_running_event_loop(own_file: str) -> None:
    """A notebook has one of its own."""

    async def notebook() -> list[Verdict]:
        with built(own_file, "judge") as rewards:
            return rewards.grade(attempts("1", "2"))

    assert [v.reward for v in asyncio.run(notebook())] == [1.0, 2.0]


def test_the_loop_s_thread_ends_with_the_rewards(own_file: str) -> None:
    with built(own_file, "judge") as rewards:
        rewards.grade(attempts("1"))
        (thread,) = (t for t in threading.enumerate() if t.name == "attnrl-reward-judge")
    thread.join(30)
    assert not thread.is_alive()


def test_several_rewards_of_all_kinds_add_up(own_file: str) -> None:
    entries = [("math", 1.0, {}), (f"{own_file}:slow", 0.5, {}), (f"{own_file}:judge", 0.25, {})]
    with build_rewards(entries, workers=1) as rewards:
        (verdict,) = rewards.grade([Attempt("", ("4",), "4")])
        assert verdict.parts == {"math": 0.0, "slow": 4.0, "judge": 4.0}
        assert (verdict.reward, verdict.right) == (3.0, False)
