"""The arithmetic of benchmarks/scale.py by hand, and that docs/scale.md shows what it prints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import scale
from scale import Drawn, Machine, Shape, Work

PAGE = Path(__file__).parents[1] / "docs/scale.md"

# A step takes the host 1 ms, the weights 4 ms and each sequence 2 ms (1,000 tokens of 1 MB); a forward 0.1 ms a token.
SHAPE = Shape("tiny", 1e9, 10, 10, 50_000, 0.8192, 1)
WORK = Work(trunks=4, branches=8, tokens=1000, longest=2000, longest_branch=500, prompt=400)
MACHINE = Machine(
    memory_gb=100.0, bandwidth=1e12, inside=1e9, decode_share=0.5, link_share=1.0, step_floor_s=0.001, memory_share=1.0
)


def approx(*values: float) -> list[object]:
    return [pytest.approx(value, rel=1e-9) for value in values]


def seconds(drawn: Drawn) -> list[float]:
    return [drawn.branches, drawn.all, drawn.longest]


def test_generation_by_hand() -> None:
    """Twelve sequences draw 8,000 tokens, 667 each; a branch 500; the longest response 2,000 and branch 500, alone."""
    one = scale.generate_s(SHAPE, 1, WORK, MACHINE)  # steps of 1 + 4 + 12 * 2 ms
    assert seconds(one) == approx(500 * 0.029, 8000 / 12 * 0.029, 2000 * 0.005)
    four = scale.generate_s(SHAPE, 4, WORK, MACHINE)  # 1 + 4 + 3 * 2 ms: 7.3 s, and the longest response takes longer
    assert seconds(four) == approx(500 * 0.011, 10.0, 10.0)
    many = scale.generate_s(SHAPE, 400, replace(WORK, longest_branch=1800), MACHINE)
    assert seconds(many) == approx(9.0, 10.0, 10.0)


def test_sequences_without_a_place_wait_and_branches_come_first() -> None:
    """Eight GB hold the weights and six sequences: steps of 1 + 4 + 12 ms, twelve sequences in two turns."""
    full = scale.generate_s(SHAPE, 1, WORK, replace(MACHINE, memory_gb=8.0))
    assert seconds(full) == approx(500 * 8 / 6 * 0.017, 8000 / 12 * 2 * 0.017, 10.0)
    half = scale.generate_s(SHAPE, 1, WORK, replace(MACHINE, memory_gb=16.0, memory_share=0.5))
    assert seconds(half) == seconds(full)
    # a server of two GPUs reads twice as fast and has twice the room: ten sequences, steps of 1 + 2 + 10 ms
    wide = scale.generate_s(replace(SHAPE, tensor_parallel=2), 2, WORK, replace(MACHINE, memory_gb=6.0))
    assert seconds(wide) == approx(500 * 0.013, 8000 / 12 * 1.2 * 0.013, 2000 * 0.003)


def test_an_iteration_in_turn_by_hand() -> None:
    """33,600 tokens are learned from (64 prompts of 400 and what was drawn), 5,600 scored, by two GPUs."""
    found = scale.in_turn(SHAPE, 2, WORK, MACHINE)
    parts = {"generate": 8000 / 12 * 0.017, "score": 0.28, "update": 8.4, "network": 0.0, "sync": 1.0}
    assert found == pytest.approx({**parts, "iteration": sum(parts.values()), "longest": 10.0})


def test_an_overlapped_iteration_by_hand() -> None:
    """One GPU draws, one learns: the update begins with the branches, at 14.5 s, and takes 16.8; trunks are there at
    19.3. Before: 1 s of weights; after: 0.56 s of scoring.
    """
    found = scale.overlapped(SHAPE, 1, 1, WORK, MACHINE)
    assert found == pytest.approx(
        {"branches": 14.5, "all drawn": 8000 / 12 * 0.029, "update": 16.8, "score": 0.56, "sync": 1.0}
        | {"iteration": 1.0 + 14.5 + 16.8 + 0.56}
    )
    # three ranks: 5.6 s, and 2.1867 of collectives that are not hidden: five of 1.333 s, less four forwards of 1.12
    found = scale.overlapped(SHAPE, 1, 3, WORK, MACHINE)
    assert found["update"] == pytest.approx(5.6 + 5 * 4 / 3 - 4.48)
    assert found["iteration"] == pytest.approx(1.5 + 14.5 + found["update"] + 0.56 / 3)
    # where drawing takes longer, the update is hidden
    quick = replace(SHAPE, forward_s=0.08192)
    assert scale.overlapped(quick, 1, 1, WORK, MACHINE)["iteration"] == pytest.approx(1.0 + 8000 / 12 * 0.029 + 0.056)


def test_the_best_split_by_hand() -> None:
    """Of four GPUs 1 + 3 takes 23.97 s, 2 + 2 18.68 s and 3 + 1 25.36 s. Ranks hold 18 GB in all and 0.95 each."""
    times = [scale.overlapped(SHAPE, n, 4 - n, WORK, MACHINE)["iteration"] for n in (1, 2, 3)]
    assert times == [pytest.approx(t, abs=0.005) for t in (23.97, 18.68, 25.36)]
    assert scale.best_split(SHAPE, 4, WORK, MACHINE) == (2, 2)
    assert scale.memory_gb(SHAPE, 2, WORK) == pytest.approx(9 + 0.0144 + 0.54 + 0.4, abs=1e-4)
    assert scale.best_split(SHAPE, 4, WORK, replace(MACHINE, memory_gb=9.0)) == (1, 3)
    assert scale.best_split(SHAPE, 4, WORK, replace(MACHINE, memory_gb=12.0, memory_share=0.75)) == (1, 3)
    assert scale.best_split(SHAPE, 4, WORK, replace(MACHINE, memory_gb=6.0)) is None
    # servers of two GPUs: 2 + 4 update by 7.5 + 4.2 + 4.14 s, 4 + 2 by 4.5 + 8.4 s; 3 + 3 is none
    assert scale.best_split(replace(SHAPE, tensor_parallel=2), 6, WORK, MACHINE) == (4, 2)


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    turns, splits = scale.tables(Work(), Machine())
    assert len(turns.splitlines()) == len(splits.splitlines()) == 2 + 3 * 5
    assert turns in page
    assert splits in page
    assert scale.against_one_gpu(Machine()) in page


def test_the_work_that_was_measured_by_hand() -> None:
    """48 trunks and 144 branches drew 383,496 tokens; 8 prompts of 101 are run over beside them."""
    work = scale.MEASURED[0].work
    assert (work.trunks, work.branches) == (48, 144)
    assert work.generated == pytest.approx(383_496)
    assert work.learned == pytest.approx(383_496 + 808)
    assert scale.learn_s(scale.ONE_GPU, 1, work, Machine())["update"] == pytest.approx(384_304 * 5 * 0.0872 / 8192)
