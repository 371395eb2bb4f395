"""FCI against the dense matrices, by hand, and under changes that must not matter."""

import importlib

import numpy as np
import pytest
import torch
from fci_oracle import CONFIGS, dense_fci, random_case, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnrl.errors import ConfigError, DataError
from attnrl.scoring import fci, position_null
from attnrl.scoring.fci import step_scores
from attnrl.scoring.plan import key_blocks, make_plan, query_blocks


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_dense_eager_attention_on_a_ragged_pack(name: str) -> None:
    model, rng = tiny(name), np.random.default_rng(1)
    cases = [random_case(rng, n) for n in (40, 9, 67, 2)]
    ids, spans = [c[0] for c in cases], [c[1] for c in cases]
    for delta, key_reduce in ((4, "mean"), (1, "sum")):
        heads = fci(model, ids, spans, delta=delta, key_reduce=key_reduce, reduce="none")
        best = fci(model, ids, spans, delta=delta, key_reduce=key_reduce)
        for index in range(len(cases)):
            want = dense_fci(model, ids[index], spans[index], delta, key_reduce)
            assert heads[index].shape == want.shape
            assert np.allclose(heads[index], want, rtol=0, atol=1e-5)
            assert np.allclose(best[index], want.max((0, 1)), rtol=0, atol=1e-5)
            if len(spans[index]) > delta:
                assert want.max() > 0.05, "the oracle must have something to say"


def test_hand_computed() -> None:
    # One head, head size 1, scale 1. q = 0 gives uniform rows; the last row has scores 0, 0, log 2, 0.
    q = torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None, None]
    k = torch.tensor([0.0, 0.0, np.log(2.0), 0.0])[:, None, None]
    spans = [[(0, 1), (1, 2), (2, 4)]]
    plan = make_plan([4], spans, delta=1)
    weight, qmin = torch.from_numpy(plan.weight_T), torch.from_numpy(plan.qmin_T)
    got = step_scores(q, k, plan, weight, qmin, scale=1.0)
    # rows: [1], [1/2 1/2], [1/3 1/3 1/3], [1/5 1/5 2/5 1/5]; step 2 weighs its rows by 1/2
    assert np.allclose(got[0], [1 / 2 + (1 / 3 + 1 / 5) / 2, (1 / 3 + 1 / 5) / 2, 0.0])
    plan = make_plan([4], spans, delta=2)
    got = step_scores(q, k, plan, weight, torch.from_numpy(plan.qmin_T), scale=1.0)
    assert np.allclose(got[0], [(1 / 3 + 1 / 5) / 2, 0.0, 0.0])
    # two keys in the attended step: mean halves what sum adds
    plan = make_plan([4], [[(1, 3), (3, 4)]], delta=1)
    args = (torch.from_numpy(plan.weight_T), torch.from_numpy(plan.qmin_T))
    assert np.allclose(step_scores(q, k, plan, *args, scale=1.0)[0], [(1 / 5 + 2 / 5) / 2, 0.0])


def test_one_sequence_may_come_as_a_tokenizer_returns_it() -> None:
    model, (ids, spans) = tiny("qwen2"), random_case(np.random.default_rng(2), 40)
    want = fci(model, ids, spans)
    assert want.max() > 0.05
    for given_ids in (torch.tensor([ids]), np.array([ids]), torch.tensor(ids)):
        np.testing.assert_array_equal(fci(model, given_ids, spans), want)
    with pytest.raises(DataError, match=r"\[T\] or \[1, T\]"):
        fci(model, torch.tensor([ids, ids]), [spans, spans])


def test_prompt_has_no_score_but_takes_attention() -> None:
    model = tiny("qwen2")
    ids = list(range(3, 33))
    with_prompt = fci(model, ids, [(10, 15), (15, 20), (20, 30)], delta=1)
    want = dense_fci(model, ids, [(10, 15), (15, 20), (20, 30)], 1).max((0, 1))
    assert np.abs(with_prompt - want).max() < 1e-5
    alone = fci(model, ids[10:], [(0, 5), (5, 10), (10, 20)], delta=1)
    assert np.abs(alone[:2] - with_prompt[:2]).min() > 1e-3, "the softmax runs over the prompt too"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_packing_and_its_order_do_not_matter(seed: int, delta: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, int(rng.integers(2, 40))) for _ in range(count)]
    order = rng.permutation(count)
    together = fci(MODEL, [c[0] for c in cases], [c[1] for c in cases], delta=delta)
    shuffled = fci(MODEL, [cases[i][0] for i in order], [cases[i][1] for i in order], delta=delta)
    for place, index in enumerate(order):
        alone = fci(MODEL, cases[index][0], cases[index][1], delta=delta)
        assert np.allclose(together[index], alone, rtol=0, atol=1e-6)
        assert np.allclose(shuffled[place], alone, rtol=0, atol=1e-6)
        assert not alone[max(0, len(alone) - delta) :].any(), "no step follows at that distance"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from(["mean", "sum"]))
def test_position_null_is_the_score_of_uniform_attention(seed: int, delta: int, key_reduce: str) -> None:
    _, spans = random_case(np.random.default_rng(seed), 30)
    prompt = spans[0][0]
    got = position_null([(a - prompt, b - prompt) for a, b in spans], prompt, delta=delta, key_reduce=key_reduce)
    for k, (a, b) in enumerate(spans):
        total = 0.0
        for c, d in spans[k + delta :]:
            rows = [1.0 / (query + 1) for query in range(c, d)]
            total += sum(rows) / len(rows) * (1 if key_reduce == "mean" else b - a)
        assert got[k] == pytest.approx(total, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_key_blocks_cover_what_counts(seed: int, delta: int, size: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 90, 3)]
    plan = make_plan(lengths, [random_case(rng, n)[1] for n in lengths], delta=delta)
    seen = np.zeros(sum(lengths), int)
    ends = np.repeat(np.cumsum(lengths), lengths)
    work = []
    for start, stop, low, full, tail, last in key_blocks(plan, size, window):
        assert 0 < stop - start <= size
        assert low % 16 == 0
        seen[start:stop] += 1
        work.append(last - low)
        for key in range(start, stop):
            end = ends[key] if window is None else min(ends[key], key + window)
            counting = range(plan.qmin_T[key], end)
            assert low <= min(counting, default=low)
            assert max(counting, default=last - 1) < last
            assert plan.qmin_T[key] <= full, "from `full` on no query is too early for any key"
            assert tail <= max(end, low) or tail <= end, "before `tail` no query is too late for any key"
    assert work == sorted(work, reverse=True)
    scoring = np.concatenate(
        [np.arange(a, b) for (a, b), live in zip(plan.step_S, plan.live_S, strict=True) if live] or [[]]
    )
    assert (seen[scoring.astype(int)] == 1).all()
    blocks = query_blocks(lengths, size)
    assert sorted(t for _, a, b in blocks for t in range(a, b)) == list(range(sum(lengths)))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", ["qwen2", "gemma2_window_softcap"])
def test_no_square_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("attnrl.scoring.fci")  # the package's name for it is the function
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    monkeypatch.setattr("attnrl.attention.paths.BLOCK", 4)
    model = tiny(name)
    sizes = []
    for length in (350, 700):
        ids, spans = random_case(np.random.default_rng(0), length)
        with Largest() as largest:
            fci(model, ids, spans)
        sizes.append(largest.elements)
        assert largest.elements < length * length / 4
    assert sizes[1] <= 2.1 * sizes[0], "linear in the tokens"


def test_bad_input_says_what_to_do() -> None:
    ids = [3, 4, 5, 6]
    with pytest.raises(DataError, match=r"sequence 0: step \(2, 5\)"):
        fci(MODEL, ids, [(0, 2), (2, 5)])
    with pytest.raises(DataError, match="after the step before it"):
        fci(MODEL, ids, [(0, 2), (1, 3)])
    with pytest.raises(DataError, match="delta must be at least 1"):
        fci(MODEL, ids, [(0, 2)], delta=0)
    with pytest.raises(DataError, match="1 sequences but 2"):
        fci(MODEL, [ids], [[(0, 2)], [(2, 3)]])
    with pytest.raises(DataError, match="padding"):
        fci(MODEL, torch.ones(2, 4, dtype=torch.long), [])
    with pytest.raises(DataError, match="sequence 1: token ids"):
        fci(MODEL, [ids, []], [[], []])
    with pytest.raises(ConfigError, match="no FCI implementation"):
        fci(MODEL, ids, [(0, 2)], kind="dense")
    for odd in ([(0, 2, 3), (3, 4, 4)], [0, 2, 2, 4], [(0.0, 2.0)], [[(0, 2)]], [(0, 2), (2,)], [None]):
        with pytest.raises(DataError, match=r"sequence 1: steps must be a list of \(start, stop\) token pairs"):
            fci(MODEL, [ids, ids], [[(0, 2)], odd])
    with pytest.raises(DataError, match="sequence 1: token id 61 is outside the model's vocabulary of 61"):
        fci(MODEL, [ids, [3, 61]], [[], []])
    with pytest.raises(DataError, match="delta must be at least 1 and whole"):
        fci(MODEL, ids, [(0, 2)], delta=2.0)
    assert fci(MODEL, ids, []).shape == (0,)
    assert fci(MODEL, [], []) == []


MODEL = tiny("qwen2")
