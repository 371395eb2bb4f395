"""Signals sent to real commands: what they finish, write, say and leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

LIMIT = 240.0  # seconds for anything to happen: a machine may be busy
TINY = (
    "--algo.prompts 2 --algo.group 2 --run.iterations 50 --run.checkpoint_every 50 --evaluation.every 0 "
    "--data.train_tasks 100 --sampling.max_response_tokens 120"
)


class Command:
    """An attnrl command in a session of its own, its output in a file. What it starts carries its mark in the
    environment, whatever session that is in.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"ATTNRL_TEST_MARK={uuid4().hex}"
        self.file = folder / f"output-{time.monotonic_ns()}"
        with self.file.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "attnrl", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"} | dict([self.mark.split("=")]),
            )

    @property
    def output(self) -> str:
        return self.file.read_text()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < end, f"nothing came:\n{self.output}"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(timeout=LIMIT)

    def members(self) -> dict[int, str]:
        """Processes with its mark by their id, zombies left out."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = stat.read_text().rpartition(") ")
                command = (stat.parent / "cmdline").read_text().replace("\0", " ")
                marked = self.mark.encode() in (stat.parent / "environ").read_bytes().split(b"\0")
            except OSError:  # it ended just now
                continue
            if marked and rest.split()[0] != "Z":
                found[int(stat.parent.name)] = f"{name} {command}"
        return found

    def children(self) -> dict[int, str]:
        return {pid: words for pid, words in self.members().items() if pid != self.process.pid}

    def check_nothing_is_left(self) -> None:
        end = time.monotonic() + 20
        while (left := self.members()) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == {}, f"processes outlived the command: {left}"

    def kill(self) -> None:
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    begun: list[Command] = []

    def begin(*words: str) -> Command:
        begun.append(Command(tmp_path / "outputs", *words))
        return begun[-1]

    yield begin
    for command in begun:
        command.kill()


def recorded(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [int(json.loads(line)["iteration"]) for line in lines]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))


def test_a_demo_stopped_by_a_signal_says_how_it_goes_on(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("demo", "--output", str(tmp_path / "demo"), *TINY.split())
    command.wait_for(lambda: recorded(tmp_path / "demo/demo"))
    command.send(signal.SIGINT)
    assert command.end() == 128 + signal.SIGINT
    assert command.output.splitlines()[-1].endswith("demo/demo; the same command goes on from there")
    command.check_nothing_is_left()


OWN_REWARD = """
def odd_length(attempts):
    return [float(len(attempt.response) % 2) for attempt in attempts]
"""


def test_a_run_stopped_by_a_signal_keeps_its_iteration_and_goes_on_by_itself(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/own_reward.py").write_text(OWN_REWARD)  # runs in worker processes
    first = start("train", "demo", "--run-dir", str(run), "--reward", "own_reward:odd_length", *TINY.split())
    first.wait_for(lambda: recorded(run))
    assert first.children(), "the reward has a worker while it runs"
    first.send(signal.SIGINT)
    assert first.end() == 130, first.output
    first.check_nothing_is_left()
    done = recorded(run)[-1]
    assert 1 <= done < 50
    assert checkpoints(run) == [done], "checkpoint_every is 50: this one is the signal's"
    assert f"stopped after iteration {done}" in first.output
    assert f"attnrl train --resume --run-dir {run}" in first.output
    assert "Traceback" not in first.output

    second = start("train", "--resume", "--run-dir", str(run))
    second.wait_for(lambda: len(recorded(run)) > done)
    second.send(signal.SIGTERM)
    assert second.end() == 143, second.output
    second.check_nothing_is_left()
    assert f"goes on after iteration {done}" in second.output
    assert recorded(run) == list(range(1, recorded(run)[-1] + 1))
    assert checkpoints(run)[-1] == recorded(run)[-1] > done

    changed = start("train", "--resume", "--run-dir", str(run), "--algo.points", "3")
    assert changed.process.wait(LIMIT) == 2
    assert "algo.points: was 2, is now 3" in changed.output
    assert "what may change is" in changed.output
    assert "run.iterations" in changed.output


SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


MARKING_REWARD = """
import pathlib

def marking(attempts):
    pathlib.Path("asked").touch()
    return [float(len(attempt.response) % 2) for attempt in attempts]
"""


@SIGNALS
def test_a_second_signal_ends_a_run_at_once_and_a_model_of_a_run_starts_another(
    start: Callable[..., Command], tmp_path: Path, number: Any, code: int
) -> None:
    folder, run, other = (tmp_path / name for name in ("outputs", "run", "other"))
    assert start("train", "demo", "--run-dir", str(run), *TINY.split(), "--run.iterations", "1").end() == 0
    (folder / "marking_reward.py").write_text(MARKING_REWARD)
    # from the run's newest checkpoint; an iteration of more than a minute, whose beginning the two signals meet
    long = "--algo.prompts 48 --algo.group 40 --reward marking_reward:marking"
    words = ["--run-dir", str(other), *TINY.split(), "--model.path", str(run), *long.split()]
    command = start("train", "demo", *words)
    command.wait_for((folder / "asked").exists)  # responses come in, most are still to be drawn
    config = json.loads((other / "config.json").read_text())
    assert config["model"]["path"] == str(run / "checkpoints/000001/model")
    command.send(number)
    command.wait_for(lambda: "stopping after this iteration" in command.output)
    command.send(number)
    assert command.end() == code, command.output
    command.check_nothing_is_left()
    assert (recorded(other), checkpoints(other)) == ([], []), "the iteration was abandoned, not finished"
    assert "stopped after iteration" not in command.output
    assert "stopped; the same command with --resume goes on" in command.output


SLOW_REWARDS = """
import asyncio, pathlib, time

def asked():
    pathlib.Path("asked").touch()

async def judge(attempt):
    asked()
    await asyncio.sleep(3600)
    return 1.0

def tests(attempts):
    asked()
    time.sleep(3600)
    return [1.0] * len(attempts)
"""


@pytest.mark.parametrize(("reward", "limit"), [("judge", "async_timeout_s"), ("tests", "timeout_s")])
def test_a_second_signal_ends_a_run_whose_reward_is_at_work(
    start: Callable[..., Command], tmp_path: Path, reward: str, limit: str
) -> None:
    """It is graded beside the engine; nobody waits for what would take an hour."""
    folder, run = tmp_path / "outputs", tmp_path / "run"
    folder.mkdir()
    (folder / "slow_rewards.py").write_text(SLOW_REWARDS)
    words = ["--run-dir", str(run), "--reward", f"slow_rewards:{reward}", f"--verify.{limit}", "3600"]
    command = start("train", "demo", *words, *TINY.split())
    command.wait_for((folder / "asked").exists)
    command.send(signal.SIGINT)
    command.wait_for(lambda: "stopping after this iteration" in command.output)
    command.send(signal.SIGINT)
    assert command.end() == 130, command.output
    command.check_nothing_is_left()
    assert checkpoints(run) == []
    assert "Traceback" not in command.output
    assert "stopped; the same command with --resume goes on" in command.output


@SIGNALS
def test_verify_leaves_no_process(start: Callable[..., Command], tmp_path: Path, number: Any, code: int) -> None:
    endless = {"response": r"\boxed{\lim_{x \to 0} 99999999!}", "gold": "5"}  # keeps a worker until its time is up
    file = tmp_path / "rows.jsonl"
    file.write_text(4 * (json.dumps(endless) + "\n"))
    command = start("verify", str(file), "--workers", "2", "--timeout", "600")
    command.wait_for(lambda: len(command.children()) == 2)
    command.send(number)
    assert command.end() == code, command.output
    command.check_nothing_is_left()
    assert "Traceback" not in command.output
    assert not Path(f"{file}.verdicts.jsonl").exists()


@SIGNALS
def test_warmup_leaves_no_process(start: Callable[..., Command], tmp_path: Path, number: Any, code: int) -> None:
    model = tmp_path / "model"
    flags = "--seconds 600 --evaluations 600 --evaluation-tasks 4 --shape.width 32 --shape.heads 2 --shape.kv-heads 1"
    command = start("warmup", "--output", str(model), *flags.split())
    command.wait_for(lambda: "tokens/s" in command.output)
    assert command.children(), "batches are made in processes of their own"
    command.send(number)
    assert command.end() == code, command.output
    command.check_nothing_is_left()
    assert "Traceback" not in command.output


def test_eval_leaves_no_process(start: Callable[..., Command], tmp_path: Path) -> None:
    output = tmp_path / "eval"
    flags = "--benchmarks tasks --evaluation.tasks 200 --samples 8 --chunk 16 --evaluation.max_response_tokens 150"
    command = start("eval", "--model", "demo", "--output", str(output), *flags.split())
    kept = output / "responses.jsonl"
    command.wait_for(lambda: kept.exists() and kept.read_text().count("\n") >= 16)
    command.send(signal.SIGTERM)
    assert command.end() == 143, command.output
    command.check_nothing_is_left()
    assert "Traceback" not in command.output
