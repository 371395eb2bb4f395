"""Minibatches hold every sample once, are even, and keep prompts together as far as that allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.algo.minibatches import plan_minibatches

names = st.lists(st.integers(0, 9).map(str), max_size=40)


def plan(uids: list[str], seed: int = 0, **size: int | None) -> list[list[int]]:
    return plan_minibatches(uids, **{"minibatches": None, "samples": None, **size}, rng=np.random.default_rng(seed))


@settings(max_examples=80)
@given(uids=names, size=st.integers(1, 6), seed=st.integers(0, 3), by_number=st.booleans())
def test_every_sample_once_in_even_parts_of_whole_prompts(
    uids: list[str], size: int, seed: int, by_number: bool
) -> None:
    parts = plan(uids, seed, **{"minibatches" if by_number else "samples": size})
    assert sorted(i for part in parts for i in part) == list(range(len(uids)))
    sizes = [len(part) for part in parts]
    assert len(parts) == (min(size, len(uids)) if by_number else -(-len(uids) // size))
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    if not by_number:
        assert max(sizes, default=0) <= size
    # only neighbours share a prompt, and at most one: the one a cut falls into
    held = [{uids[i] for i in part} for part in parts]
    for a in range(len(held)):
        for b in range(a + 1, len(held)):
            between = [held[c] for c in range(a + 1, b)]
            common = held[a] & held[b]
            assert len(common) <= 1
            assert all(prompts == common for prompts in between) or not common


def test_by_hand() -> None:
    """Ten samples in two: five each. In four: 3, 3, 2, 2. At most four each: 4, 3, 3. Two samples in five: one each."""
    uids = [uid for uid in "abcde" for _ in range(2)]
    assert [len(p) for p in plan(uids, minibatches=2)] == [5, 5]
    assert [len(p) for p in plan(uids, minibatches=4)] == [3, 3, 2, 2]
    assert [len(p) for p in plan(uids, samples=4)] == [4, 3, 3]
    assert [len(p) for p in plan(["a", "a"], minibatches=5)] == [1, 1]
    assert plan([], minibatches=2) == plan([], samples=2) == []


def test_a_prompt_of_many_samples_is_cut_and_one_of_few_is_not() -> None:
    uids = ["big"] * 8 + ["small"] * 2
    for seed in range(6):
        first, second = plan(uids, seed, minibatches=2)
        assert (len(first), len(second)) == (5, 5)
        assert sorted(len({8, 9} & set(part)) for part in (first, second)) == [0, 2]


def test_order_follows_the_generator_and_mixes_prompts() -> None:
    uids = [str(i // 3) for i in range(30)]
    assert plan(uids, 1, minibatches=2) == plan(uids, 1, minibatches=2)
    firsts = {tuple(sorted({uids[i] for i in plan(uids, seed, minibatches=2)[0]})) for seed in range(40)}
    assert len(firsts) > 20
    with_zero = sum("0" in prompts for prompts in firsts) / len(firsts)
    assert 0.2 < with_zero < 0.8


@pytest.mark.parametrize("size", [{}, {"minibatches": 2, "samples": 4}])
def test_one_way_to_say_it(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="number or by their size"):
        plan(["a"], **size)
