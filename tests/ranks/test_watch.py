"""Phases end at their limit, and say where they stand."""

from __future__ import annotations

import signal
import time

import pytest

from attnrl.errors import TrainingError
from attnrl.ranks.watch import Watch, traced
from processes import wait_until


def test_a_phase_past_its_limit_says_where_it_stands_and_raises(capfd):
    lines: list[str] = []
    watch = Watch(0.3, lines.append, key="engine.mine.limit_s", grace_s=0.3)
    start = time.monotonic()
    with (
        pytest.raises(TrainingError, match=r"score took longer than engine\.mine\.limit_s \(0.3 s\)"),
        watch.phase("score"),
    ):
        time.sleep(30)
    assert time.monotonic() - start < 20
    assert lines == ["score exceeds its limit of 0.3 s; where driver and ranks stand:"]
    assert "test_a_phase_past_its_limit" in capfd.readouterr().err  # the stack of the main thread


def test_a_phase_within_its_limit_leaves_no_alarm_behind():
    lines: list[str] = []
    before = signal.getsignal(signal.SIGALRM)
    watch = Watch(0.2, lines.append, key="limit_s", grace_s=0.0)
    for _ in range(2):
        with watch.phase("update"):
            time.sleep(0.01)
    time.sleep(0.4)
    assert lines == []
    assert signal.getsignal(signal.SIGALRM) is before
    assert watch.seconds.keys() == {"update"}
    assert watch.seconds["update"] >= 0.02


def test_a_rank_past_the_limit_prints_where_it_stands_once(capfd):
    said: list[str] = []

    def printed() -> str:
        said.append(capfd.readouterr().err)
        return "".join(said)

    with traced(600.0):
        pass  # cancelled with the end of the verb
    with traced(0.1):
        assert wait_until(lambda: "in test_a_rank_past_the_limit" in printed())
        time.sleep(0.4)
    time.sleep(0.3)
    assert printed().count("Timeout (") == 1
