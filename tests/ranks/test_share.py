"""Who computes what: invariants of the shares, by brute force."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnrl.policy.packing import input_ids
from attnrl.ranks.share import deal, share_packs
from attnrl.types import Sample, as_floats, as_ids


def sample(prompt, response):
    zeros = as_floats(np.zeros(len(response)))
    return Sample(as_ids(prompt), as_ids(response), zeros, zeros, str(prompt))


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 5))
def test_deal_gives_everything_once_and_as_many_to_each_within_one_of_even(costs, ranks):
    shares = deal(costs, ranks)
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    counts = [len(share) for share in shares]
    assert len(counts) == ranks
    assert max(counts) - min(counts) <= 1
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(8, 200), st.booleans())
def test_packs_hold_every_sample_once_within_the_budget(trees, ranks, budget, shared):
    rng = np.random.default_rng(trees * 7 + ranks)
    samples = []
    for tree in range(trees):
        trunk = rng.integers(4, 99, 12)
        samples += [sample([tree + 100], np.concatenate([trunk[:k], rng.integers(4, 99, 3)])) for k in (4, 8, 12)]
    shares = share_packs(samples, range(len(samples)), ranks, budget, share=shared)
    assert sorted(samples.index(s) for mine in shares for pack in mine for s in pack) == list(range(len(samples)))
    for pack in itertools.chain(*shares):
        ids = [input_ids(s).tolist() for s in pack]
        distinct = {tuple(row[: k + 1]) for row in ids for k in range(len(row))}
        size = len(distinct) if shared else sum(map(len, ids))
        assert size <= budget or len(pack) == 1


def test_a_rank_without_work_appears_only_where_there_are_too_few_samples():
    four = [sample([k], [5, 6, 7]) for k in range(4)]
    assert [len(mine) for mine in share_packs(four, range(4), 4, 10_000, share=True)] == [1, 1, 1, 1]
    assert [len(mine) for mine in share_packs(four, [2], 2, 10_000, share=True)] == [1, 0]


def test_samples_of_a_tree_stay_together():
    trunks = [np.arange(10 * k, 10 * k + 20) for k in range(1, 5)]
    samples = [sample(t[:4], np.concatenate([t[4:], [90 + b]])) for t in trunks for b in range(3)]
    shares = share_packs(samples, range(12), 2, 100, share=True)
    packs = list(itertools.chain(*shares))
    trees = [{samples.index(s) // 3 for s in pack} for pack in packs]
    assert sum(len(t) for t in trees) == 4  # no tree is in two packs
