"""Workers: the same verdicts from everywhere, killed workers replaced, hangs kept from the others, no orphans."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from attnrl.errors import ConfigError, DataError
from attnrl.types import Verdict
from attnrl.verify import Verifier
from attnrl.verify.pool import Served
from processes import alive, wait_until

SYMBOLIC = (r"\boxed{\int_0^1 x dx}", "0.5")  # needs a worker
ENDLESS = (r"\boxed{\lim_{x \to 0} 99999999!}", "5")  # keeps a worker until it is killed
ITEMS: list[tuple[str, str | list[str]]] = [
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{3}", "4"),
    SYMBOLIC,
    (r"\boxed{\sum_{i=1}^{3} i}", "7"),
    ("no idea", "4"),
    (r"\boxed{9^{9^{9^{9}}}}", "4"),
    (r"\boxed{1}", ""),
    (r"\boxed{B}", ["A", "B"]),
]
REWARDS = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
ERRORS = [None, None, None, None, None, None, "empty_gold", None]
JOIN = 240


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    with Verifier(workers=1) as shared:
        yield shared


@pytest.fixture(scope="module")
def expected(verifier: Verifier) -> list[Verdict]:
    verdicts = verifier.grade(ITEMS)
    assert [verdict.reward for verdict in verdicts] == REWARDS
    assert [verdict.error for verdict in verdicts] == ERRORS
    return verdicts


def test_threads_give_the_same_verdicts(verifier: Verifier, expected: list[Verdict]) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: verifier.grade(ITEMS), range(8))) == [expected] * 8


def test_asyncio_gives_the_same_verdicts(verifier: Verifier, expected: list[Verdict]) -> None:
    async def both() -> list[list[Verdict]]:
        return await asyncio.gather(verifier.agrade(ITEMS), verifier.agrade(ITEMS))

    assert asyncio.run(both()) == [expected, expected]


def test_a_spawned_process_pool_gives_the_same_verdicts(verifier: Verifier, expected: list[Verdict]) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(verifier.grade, ITEMS).result(JOIN) == expected


def test_a_forked_daemonic_process_gives_the_same_verdicts(verifier: Verifier, expected: list[Verdict]) -> None:
    """Daemonic processes may have no multiprocessing children; and the parent's worker threads do not exist there."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(verifier.grade, (ITEMS,)).get(JOIN) == expected
    assert verifier.grade(ITEMS) == expected  # the parent's worker was left alone


def test_a_pickled_verifier_keeps_its_settings() -> None:
    copy = pickle.loads(pickle.dumps(Verifier(workers=3, timeout=1.5, memory_mb=700, max_chars=99)))
    assert (copy.workers, copy.timeout, copy.memory_mb, copy.max_chars) == (3, 1.5, 700, 99)


def test_no_worker_starts_for_what_the_rules_decide() -> None:
    with Verifier() as verifier:
        verifier.grade([item for item in ITEMS if item != SYMBOLIC and r"\sum" not in item[0]])
        assert verifier.worker_pids() == []


def test_a_killed_worker_is_replaced_and_every_answer_comes_once() -> None:
    items = [(rf"\boxed{{\sum_{{i=1}}^{{{n}}} i}}", str(n * (n + 1) // 2 + n % 2)) for n in range(3, 33)]
    with Verifier(workers=2) as verifier:
        found: list[list[Verdict]] = []
        thread = threading.Thread(target=lambda: found.append(verifier.grade(items)))
        thread.start()
        killed = 0
        while thread.is_alive() and killed < 2:
            for pid in verifier.worker_pids()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
                time.sleep(0.5)
            thread.join(0.05)
        thread.join(JOIN)
        assert found, "answers are missing"
        assert killed >= 1
        assert [verdict.reward for verdict in found[0]] == [1.0 - n % 2 for n in range(3, 33)]
        assert verifier.counts["answers"] == len(items)
        assert not any(key.startswith("error/") for key in verifier.counts)


def test_others_are_graded_while_one_answer_hangs() -> None:
    with Verifier(workers=2, timeout=12.0) as verifier:
        verifier.grade([SYMBOLIC, SYMBOLIC])  # both workers run
        hanging = threading.Thread(target=verifier.grade, args=([ENDLESS],))
        hanging.start()
        others = verifier.grade(ITEMS * 5)
        assert hanging.is_alive(), "the others waited for the hanging answer"
        assert [verdict.reward for verdict in others] == REWARDS * 5
        hanging.join(JOIN)
        assert verifier.counts.get("rule/timeout") == 1, verifier.counts


def test_a_hanging_answer_is_wrong_by_timeout_and_counted() -> None:
    with Verifier(workers=1, timeout=0.5) as verifier:
        verdicts = verifier.grade([ENDLESS, (r"\boxed{4}", "4")])
        assert [(v.reward, v.rule, v.error) for v in verdicts] == [(0.0, "timeout", None), (1.0, "string", None)]
        assert verifier.counts == {"answers": 2, "right": 1, "rule/timeout": 1, "rule/string": 1}


def test_a_worker_that_cannot_start_is_an_error_not_a_wrong_answer() -> None:
    with Verifier(workers=1) as verifier:
        verifier._pool.served = Served("attnrl.verify.nowhere:grader")
        (verdict,) = verifier.grade([(r"\boxed{\sum_{i=1}^{3} i}", "7")])
        assert (verdict.reward, verdict.rule, verdict.error) == (0.0, "symbolic", "start")
        assert verifier.counts["error/start"] == 1


def test_workers_end_with_their_verifier() -> None:
    with Verifier(workers=1) as verifier:
        verifier.grade([SYMBOLIC])
        (pid,) = verifier.worker_pids()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PARENT = """
import sys, threading, time
from attnrl.verify import Verifier
from attnrl.verify.pool import Served
verifier = Verifier(workers=1, timeout=3)
threading.Thread(target=verifier.grade, args=([{item!r}],), daemon=True).start()
while not verifier.worker_pids():
    time.sleep(0.05)
print(verifier.worker_pids()[0], flush=True)
time.sleep(600)
"""


def test_a_busy_worker_does_not_outlive_a_killed_parent() -> None:
    """Also checks that a plain script without a main guard may grade."""
    root = str(Path(__file__).resolve().parents[2] / "src")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(item=ENDLESS)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert wait_until(lambda: not alive(worker)), "the worker outlived its parent"
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_workers_do_not_load_torch(verifier: Verifier, expected: list[Verdict]) -> None:
    (pid,) = verifier.worker_pids()
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "python" in loaded
    assert "torch" not in loaded


def test_disagreements_of_the_two_graders_are_logged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with Verifier(workers=1, disagreements=log) as verifier:
        verdicts = verifier.grade([(r"\boxed{x^2 - 4 = 0}", "0"), (r"\boxed{0.5}", r"\frac{1}{2}")])
        assert verifier.counts["disagreements"] == 1
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
    (row,) = map(json.loads, log.read_text().splitlines())
    assert row == {"answer": "x^2 - 4 = 0", "gold": ["0"], "rule": "number", "rules": False, "math_verify": True}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers"):
        Verifier(workers=0)
    for timeout in (0, -1.0, float("nan"), float("inf"), 1e300, 3601):
        with pytest.raises(ConfigError, match="timeout"):
            Verifier(timeout=timeout)
    with pytest.raises(ConfigError, match="memory_mb"):
        Verifier(memory_mb=255)
    with pytest.raises(DataError, match="item 1: a gold must be a string"):
        Verifier().grade([("a", "b"), ("a", 3)])  # type: ignore[list-item]
    with pytest.raises(DataError, match="item 0: the response must be a string"):
        Verifier().grade([(None, "b")])  # type: ignore[list-item]
