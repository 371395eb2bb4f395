"""`attnrl train` over verl on the CPU: presets at one and two ranks, kill -9 of driver, rank and server, resume."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl: make test-verl", allow_module_level=True)

import tiny
from psutil import NoSuchProcess, Process

from attnrl.ranks.session import SHM, family, segments
from tiny_llama import make_model

OF_TIME = (
    "seconds/",
    "engine/",
    "score/seconds",
    "score/overhead",
    "generate/shared_context",
    "sync/",
)  # what a resumed run need not repeat
LIMIT_S = 900
ADAPTIVE = "delta = 1\nmax_prompts = 6"  # what AttnRL alone takes


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_model(folder / "model")
    return folder


def attnrl(*words: str, hold: Path | None = None) -> subprocess.Popen:
    environment = {**tiny.environment(), **({"ATTNRL_HOLD": str(hold)} if hold else {})}
    command = [sys.executable, "-m", "attnrl", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> tuple[int, list[str]]:
    """(exit code, lines) of a command, within the limit."""
    out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.strip().splitlines()


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows]


def started_by(driver: int) -> set[Process]:
    return family([Process(driver)]) - {Process(driver)}


def titled(processes: set[Process], title: str) -> list[int]:
    """Processes whose title contains the words, lowest pid first."""
    found = []
    for process in processes:
        with suppress(NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def nothing_left(processes: set[Process], mapped: set[int]) -> bool:
    until = time.monotonic() + 60
    while family(processes) and time.monotonic() < until:
        time.sleep(0.2)
    return not family(processes) and not {f.stat().st_ino for f in SHM.iterdir()} & mapped


def run_until(run: Path, iterations: int, *words: str) -> tuple[subprocess.Popen, set[Process], set[int]]:
    """A run that waits after so many iterations, its next responses drawn; its processes and the segments they map."""
    hold, held = run.with_suffix(".hold"), run.with_suffix(".held")
    held.unlink(missing_ok=True)
    hold.write_text(f"{iterations} {run}")
    process = attnrl("train", *words, "--run-dir", run, hold=hold)
    until = time.monotonic() + LIMIT_S
    while not held.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < until
        time.sleep(0.1)
    processes = started_by(process.pid)
    return process, processes, segments(processes)


@pytest.fixture(scope="module")
def whole(home) -> Path:
    """A run of AttnRL at two ranks that nothing interrupts."""
    preset = tiny.write_preset(home, "attnrl_1p5b", 2, algo=ADAPTIVE)
    code, lines = finish(attnrl("train", preset, "--run-dir", home / "whole"))
    assert code == 0, "\n".join(lines[-40:])
    return home / "whole"


def test_attnrl_trains_at_two_ranks(whole):
    rows = metrics(whole)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["policy/updates"] >= 1 and row["policy/grad_norm"] > 0 for row in rows)
    assert all(row["score/fci_max"] > 0 and row["trees/leaves"] > row["trees/count"] for row in rows)
    assert rows[0]["policy/behaviour_kl"] < rows[-1]["policy/kl"]
    state = json.loads((whole / "checkpoints" / "000005" / "verl.json").read_text())
    assert (state["version"], state["ranks"]) == (5, 2)
    assert "trainer.n_gpus_per_node=2" in state["overrides"]


@pytest.mark.parametrize(("preset", "ranks"), [("treerl_1p5b", 1), ("grpo_1p5b", 1)])
def test_baselines_train_at_one_rank(home, preset, ranks):
    code, lines = finish(attnrl("train", tiny.write_preset(home, preset, ranks), "--run-dir", home / preset))
    assert code == 0, "\n".join(lines[-40:])
    rows = metrics(home / preset)
    assert [row["policy/version"] for row in rows] == [1, 2, 3, 4, 5]
    drawn = [row["generate/rollouts"] for row in rows]  # four prompts, three trunks each
    assert min(drawn) > 12 if preset == "treerl_1p5b" else drawn == [12] * 5


def test_killed_driver_rank_and_server_then_resumed_equals_uninterrupted(home, whole):
    """kill -9 of each in turn: what is left ends by itself, with the cause in the last line, and nothing stays."""
    preset, run = home / "attnrl_1p5b_2.toml", home / "killed"
    driver, processes, mapped = run_until(run, 1, preset)
    assert mapped
    assert len(titled(processes, "vLLMHttpServer")) == 2
    driver.kill()
    driver.communicate()
    assert nothing_left(processes, mapped)
    kills = ((2, "VLLM::EngineCore"), (3, "vLLMHttpServer"), (4, "ray::Worker"))  # the last iteration needs no server
    for iterations, title in kills:
        driver, processes, mapped = run_until(run, iterations, preset, "--resume")
        os.kill(titled(processes, title)[0], signal.SIGKILL)
        run.with_suffix(".hold").unlink()
        code, lines = finish(driver)
        assert code == 2, "\n".join(lines[-40:])
        assert lines[-1].startswith("attnrl train: "), lines[-1]
        assert "failed: " in lines[-1]
        assert nothing_left(processes, mapped)
    code, lines = finish(attnrl("train", preset, "--run-dir", run, "--resume"))
    assert code == 0, "\n".join(lines[-40:])
    assert metrics(run) == metrics(whole)


def test_servers_of_their_own_draw_while_ranks_update_and_the_run_is_the_same(home):
    """The overlapped schedule with servers that take turns with the ranks, and with one on a GPU of its own."""
    preset = tiny.write_preset(home, "attnrl_1p5b", 1, algo=f'{ADAPTIVE}\nschedule = "overlapped"')
    for name, gpus in (("turns", 0), ("apart", 1)):
        words = [preset, "--run.iterations", 3, "--engine.verl.server_gpus", gpus, "--run-dir", home / name]
        code, lines = finish(attnrl("train", *words))
        assert code == 0, "\n".join(lines[-40:])
    assert [row["policy/version"] for row in metrics(home / "apart")] == [1, 2, 3]
    assert metrics(home / "apart") == metrics(home / "turns")


def test_other_commands_read_what_the_cluster_wrote(home, whole):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, lines = finish(attnrl("report", whole, "--output", home / "report.html"))
    assert code == 0, "\n".join(lines)
    assert "policy/" in (home / "report.html").read_text()
    problems = home / "problems.jsonl"
    flags = ["--benchmarks", problems, "--samples", 1, "--max-tokens", 8, "--engine.name", "local", "--device", "cpu"]
    for name, model in (("a", home / "model"), ("b", whole)):
        code, lines = finish(attnrl("eval", "--model", model, "--output", home / name, *flags))
        assert code == 0, "\n".join(lines[-20:])
    code, lines = finish(attnrl("eval", "--compare", f"{home / 'a'},{home / 'b'}"))
    assert code == 0, "\n".join(lines)
    folder = whole / "checkpoints" / "000005" / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = AutoTokenizer.from_pretrained(folder)("1 + 1", return_tensors="pt").input_ids
    assert loaded.dtype == torch.float32
    assert loaded(ids).logits.shape == (1, 5, 256)
    started = AutoModelForCausalLM.from_pretrained(home / "model")
    assert (loaded.lm_head.weight - started.lm_head.weight).abs().max() > 1e-4


@pytest.mark.parametrize(("preset", "ranks"), [("attnrl_1p5b", 1), ("grpo_1p5b", 2)])
def test_a_run_goes_on_at_another_number_of_ranks(home, whole, preset, ranks):
    """After iteration 4 two ranks become one, and one two: iteration 5 is that of the run that stayed."""
    stayed, moved = whole if preset == "attnrl_1p5b" else home / preset, home / f"{preset}_moved"
    shutil.copytree(stayed, moved)
    shutil.rmtree(moved / "checkpoints" / "000005")
    algo = ADAPTIVE if preset == "attnrl_1p5b" else ""
    words = [tiny.write_preset(home, preset, ranks, algo=algo), "--run-dir", moved, "--resume"]
    code, lines = finish(attnrl("train", *words))
    assert code == 0, "\n".join(lines[-40:])
    was, now = metrics(stayed)[4], metrics(moved)[4]
    by_rank = ("score/packs", "train/microbatches", "train/forward_tokens")  # ranks cut the work in their own way
    for name in was.keys() - set(by_rank):
        assert now[name] == pytest.approx(was[name], rel=1e-4, abs=1e-6), name
    state = json.loads((moved / "checkpoints" / "000005" / "verl.json").read_text())
    assert (state["version"], state["ranks"]) == (5, ranks)


def test_check_proves_an_installation(home):
    """`attnrl check` over the engine: sampler and learner agree, and an update at no rate moves nothing."""
    preset = tiny.write_preset(home, "attnrl_1p5b", 1, algo=ADAPTIVE)
    code, lines = finish(attnrl("check", preset))
    assert code == 0, "\n".join(lines[-40:])
    said = {words[1]: words[0] for line in lines if (words := line.split()) and words[0] in ("ok", "look", "wrong")}
    assert said.items() >= {"config": "ok", "data": "ok", "agreement": "ok", "update": "ok", "time": "ok"}.items()
    assert any("rounding in float32" in line for line in lines)
