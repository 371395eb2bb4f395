"""Phases end at their limit, and say where they stand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from attnrl.errors import TrainingError
from attnrl.ranks.watch import Watch
from processes import LIMIT


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


def test_an_interrupt_within_the_limit_stays_one():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it may be ignored
    watch = Watch(60.0, print, key="limit_s")
    try:
        with pytest.raises(KeyboardInterrupt), watch.phase("score"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_phase_past_its_limit_ends_where_libraries_drop_errors_of_handlers():
    """As ray.get does: of what a handler raises, it passes on KeyboardInterrupt and SystemExit alone."""
    watch = Watch(0.2, lambda line: None, key="limit_s", grace_s=0.1)

    def wait() -> None:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            with suppress(Exception):
                time.sleep(0.05)

    with pytest.raises(TrainingError, match="update took longer than limit_s"), watch.phase("update"):
        wait()


def test_a_phase_within_its_limit_leaves_no_alarm_behind():
    lines: list[str] = []
    before = signal.getsignal(signal.SIGALRM)
    watch = Watch(2.0, lines.append, key="limit_s", grace_s=0.0)
    for _ in range(2):
        with watch.phase("update"):
            time.sleep(0.01)
    time.sleep(2.4)
    assert lines == []
    assert signal.getsignal(signal.SIGALRM) is before
    took = watch.metrics()
    assert took.keys() == {"engine/update_seconds"}
    assert took["engine/update_seconds"] >= 0.02
    assert watch.metrics() == {}


RANK = """
import sys, time
from attnrl.ranks.watch import traced

def stand(printed):
    while "in stand" not in open(printed).read():
        time.sleep(0.05)
    time.sleep(0.5)

with traced(2.0):
    pass
time.sleep(2.4)
print("cancelled", file=sys.stderr, flush=True)
with traced(0.1):
    stand(sys.argv[1])
"""


def test_a_rank_past_the_limit_prints_where_it_stands_once(tmp_path):
    printed = tmp_path / "err"
    with printed.open("w") as err:
        subprocess.run([sys.executable, "-c", RANK, str(printed)], stderr=err, timeout=LIMIT, check=True)
    within, past = printed.read_text().split("cancelled\n")
    assert within == ""
    assert past.count("Timeout (") == 1
    assert "in stand" in past
