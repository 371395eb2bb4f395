"""Phases end at their limit; sessions clear away what a killed driver started. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from psutil import Process

from attnrl.errors import TrainingError
from attnrl.verl_engine.session import family
from attnrl.verl_engine.watch import Watch


def test_a_phase_past_its_limit_says_where_it_stands_and_raises(capfd):
    lines: list[str] = []
    watch = Watch(0.3, lines.append, grace_s=0.3)
    start = time.monotonic()
    with (
        pytest.raises(TrainingError, match=r"score took longer than engine.verl.phase_limit_s \(0.3 s\)"),
        watch.phase("score"),
    ):
        time.sleep(30)
    assert time.monotonic() - start < 20
    assert lines == ["score exceeds its limit of 0.3 s; where driver and ranks stand:"]
    assert "test_a_phase_past_its_limit" in capfd.readouterr().err  # the stack of the main thread


def test_a_phase_within_its_limit_leaves_no_alarm_behind():
    lines: list[str] = []
    before = signal.getsignal(signal.SIGALRM)
    watch = Watch(0.2, lines.append, grace_s=0.0)
    for _ in range(2):
        with watch.phase("update"):
            time.sleep(0.01)
    time.sleep(0.4)
    assert lines == []
    assert signal.getsignal(signal.SIGALRM) is before
    assert watch.seconds.keys() == {"update"}
    assert watch.seconds["update"] >= 0.02


DRIVER = """
import os, subprocess, sys, time
from attnrl.verl_engine.session import Session
other = subprocess.Popen(["sleep", "600"])  # started before: not the run's
session = Session()
hold = "import time; from multiprocessing import shared_memory, resource_tracker; " \\
    "s = shared_memory.SharedMemory(create=True, size=4096); resource_tracker.unregister(s._name, 'shared_memory'); " \\
    "print(s.name, flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True, start_new_session=True)
name = worker.stdout.readline().strip()
session.note_children()
time.sleep(3)
print(other.pid, worker.pid, session.process.pid, name, flush=True)
if sys.argv[1] == "close":
    session.close()
    print("closed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_what_a_run_started_goes_and_nothing_else(how):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    other, worker, session, name = driver.stdout.readline().split()
    segment = Path("/dev/shm", name)
    started = {p for p in family(Process().children()) if p.pid in (int(other), int(worker), int(session))}
    try:
        assert len(started) == 3
        if how == "kill":
            assert segment.exists()
            driver.kill()
        else:
            assert driver.stdout.readline() == "closed\n"
        until = time.monotonic() + 40
        while {p.pid for p in family(started)} != {int(other)} and time.monotonic() < until:
            time.sleep(0.2)
        assert {p.pid for p in family(started)} == {int(other)}
        assert not segment.exists()
    finally:
        driver.kill()
        driver.wait()
        os.kill(int(other), signal.SIGKILL)
