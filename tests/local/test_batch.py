"""The sampler over pages, without its kernels, on a CPU: the same draws as over slots, with pages that come and go."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
)

from attnrl.attention.pages import PAGE, LayerShape, pages_for
from attnrl.errors import TrainingError
from attnrl.local import paged_state
from attnrl.local.batch import PagedBatch
from attnrl.local.flights import Flight, Mark, fly
from attnrl.local.paged_state import PagedState
from attnrl.local.rows import RowTable
from attnrl.local.sampler import Sampler
from attnrl.types import Request, Rollout, Sampling, as_ids

VOCABULARY = 61
STOPS = (3, 4)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
PAGE_BYTES = PAGE * 2 * 2 * (8 + 8) * 4  # layers, heads, key and value, float32


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, initializer_range=0.25, sliding_window=9)).eval()
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape, initializer_range=0.25)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.25)).eval()


def paged(model: Any, **settings: Any) -> tuple[Sampler, PagedBatch]:
    sampler = Sampler(model, stop_ids=settings.pop("stop_ids", STOPS), paged=True, **settings)
    assert isinstance(sampler.batch, PagedBatch)
    return sampler, sampler.batch


def branches() -> list[Request]:
    """Trunks and branches of three prompts, some longer than two pages, equal ones among them, in mixed order."""
    rng = np.random.default_rng(0)
    requests = []
    for prompt in (1, 33, 70):
        trunk = as_ids(rng.integers(0, VOCABULARY, prompt + 40))
        for kept in (0, 0, 31, 40, 40):
            requests.append(Request(trunk[: prompt + kept], int(rng.integers(3, 40)), int(rng.integers(2**60))))
    return [requests[i] for i in rng.permutation(len(requests))]


def assert_same(a: list[Rollout], b: list[Rollout]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.ids.tolist(), x.finish) == (y.ids.tolist(), y.finish)
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.3, top_p=0.8, top_k=9)])
def test_the_same_draws_as_over_slots(kind: str, sampling: Sampling) -> None:
    model = build(kind)
    requests = branches()
    expected = Sampler(model, stop_ids=STOPS, rows=4).generate(requests, sampling, version=0)
    assert {r.finish for r in expected} == {"stop", "length"}
    for settings in ({"rows": 1}, {"rows": 4, "check_every": 7, "prefill_tokens": 50}, {"rows": 64}):
        sampler, batch = paged(model, **settings)
        assert_same(expected, sampler.generate(requests, sampling, version=0))
        assert_same(expected, sampler.generate(requests, sampling, version=0))  # pages and state are kept between calls
        assert batch.pool is not None
        assert batch.pool.used == 0


def test_what_requests_share_is_not_allocated_twice() -> None:
    """Ten branches that share six pages: six, one or two of their own each, and what may stand beside them."""
    trunk = as_ids(np.arange(6 * PAGE) % VOCABULARY)
    requests = [Request(as_ids([*trunk, 1 + i]), 20, i) for i in range(10)]
    model = build()
    sampler, batch = paged(model, check_every=4, stop_ids=())
    expected = Sampler(model, stop_ids=()).generate(requests, Sampling(), version=0)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    assert batch.pool is not None
    need = 6 + 10 + 10 + 7 + 2  # a page of growth a row, the carry, page 0 and one to spare
    assert batch.pool.pages == need + need // 8
    assert sampler.stats.put_back == 0
    pool = batch.pool
    for tokens, kept in ((26, True), (28, False)):  # the latter is a page more a row
        longer = [Request(r.context, tokens, r.seed) for r in requests]
        expected = Sampler(model, stop_ids=()).generate(longer, Sampling(), version=0)
        assert_same(expected, sampler.generate(longer, Sampling(), version=0))
        assert (batch.pool is pool, sampler.stats.put_back) == (kept, 0)


def test_too_few_pages_put_rows_back_and_change_nothing() -> None:
    """Nine pages for ten requests that grow to three each: rows stop, wait, and go on where they were."""
    model = build()
    requests = [Request(as_ids([5 + i % 4, 6]), 70 + i, seed) for i, seed in enumerate(range(10))]
    expected = Sampler(model, stop_ids=()).generate(requests, Sampling(), version=0)
    sampler, batch = paged(model, stop_ids=(), cache_bytes=10 * PAGE_BYTES, check_every=5)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    assert sampler.stats.put_back > 0
    assert sampler.stats.cache_peak_bytes <= 9 * PAGE_BYTES
    assert batch.pool is not None
    assert batch.pool.used == 0


def test_the_pool_always_holds_the_longest_request() -> None:
    model = build()
    request = Request(as_ids(np.arange(50)), 150, 1)
    [expected] = Sampler(model, stop_ids=()).generate([request], Sampling(), version=0)
    sampler, _ = paged(model, stop_ids=(), cache_bytes=1)
    assert_same([expected] * 2, sampler.generate([request, request], Sampling(), version=0))


def test_what_rows_share_is_stored_once() -> None:
    """Six branches of one text of 100 tokens: three whole pages in common, and each its own last page."""
    model = build()
    trunk = as_ids(np.arange(100) % VOCABULARY)
    requests = [Request(trunk, 20, seed) for seed in range(6)]
    sampler, _ = paged(model, stop_ids=())
    sampler.generate(requests, Sampling(), version=0)
    assert sampler.stats.prefilled_tokens == 100
    assert sampler.stats.cache_peak_bytes == (3 + 6) * PAGE_BYTES
    lone = [Request(as_ids(np.append([seed], trunk)), 20, seed) for seed in range(6)]
    sampler.generate(lone, Sampling(), version=0)
    assert sampler.stats.cache_peak_bytes == 6 * 4 * PAGE_BYTES


def test_pages_held_are_little_more_than_tokens_alive() -> None:
    """Rows of mixed length: at the peak, half a page a row and the room of the coming steps."""
    model = build()
    requests = [Request(as_ids([7, i]), 10 + 23 * (i % 10), i) for i in range(30)]
    sampler, _ = paged(model, stop_ids=(), rows=10, check_every=4)
    sampler.generate(requests, Sampling(), version=0)
    stats = sampler.stats
    assert 0 < stats.cache_live_bytes < stats.cache_peak_bytes
    assert stats.cache_peak_bytes - stats.cache_live_bytes <= 10 * PAGE_BYTES


def test_the_host_is_a_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six contexts of 40 tokens in forwards of 80: three prefills and the first steps are queued before the host looks
    at what the first drew; from then on the next steps before it looks at the last. Nothing is there before the wait.
    """
    model = build()
    rng = np.random.default_rng(0)
    requests = [Request(as_ids(rng.integers(0, VOCABULARY, 40)), 9 if i else 1, i) for i in range(6)]
    expected = Sampler(model, stop_ids=()).generate(requests, Sampling(), version=0)
    sampler, batch = paged(model, stop_ids=(), prefill_tokens=80, check_every=4)
    seen: list[str] = []
    for name in ("_forward_contexts", "_draw", "_land"):
        inner = getattr(batch, name)
        monkeypatch.setattr(batch, name, lambda *a, name=name, inner=inner: (seen.append(name), inner(*a))[1])
    slow_copies(monkeypatch)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    first = ["_forward_contexts"] * 3 + ["_draw"] + ["_land"] * 3
    assert seen == [*first, "_draw", "_land", "_land"]
    assert sampler.stats.prefills == 3


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device has drawn comes to the host no sooner than the host waits for it, as on a GPU that is behind."""

    def late(request_R: Any, drawn_R: Any, ids_RC: Any, logprobs_RC: Any, begun: Mark | None = None) -> Flight:
        flight = fly(request_R, drawn_R, ids_RC, logprobs_RC, begun)
        there = flight.ids_RC.clone(), flight.logprobs_RC.clone()
        flight.ids_RC.fill_(-1), flight.logprobs_RC.fill_(torch.nan)
        wait = flight.landed.wait

        def arrive() -> None:
            wait()
            flight.ids_RC.copy_(there[0]), flight.logprobs_RC.copy_(there[1])

        monkeypatch.setattr(flight.landed, "wait", arrive)
        return flight

    monkeypatch.setattr("attnrl.local.batch.fly", late)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_ends_and_too_few_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of few prompts that end by stop tokens and limits, over few rows and few pages, with a host that sees
    everything late: what slots draw, no page lost.
    """
    rng = np.random.default_rng(seed)
    model = build()
    prompts = [as_ids(rng.integers(0, VOCABULARY, int(n))) for n in rng.integers(1, 90, 3)]
    requests = []
    for i in range(24):
        prompt = prompts[i % 3]
        kept = len(prompt) if rng.random() < 0.5 else int(rng.integers(1, len(prompt) + 1))
        requests.append(Request(prompt[:kept], int(rng.choice([1, 2, 5, 30, 90])), int(rng.integers(2**60))))
    stops = {0: (), 1: (3,)}.get(seed % 3, STOPS)
    expected = Sampler(model, stop_ids=stops).generate(requests, Sampling(), version=0)
    slow_copies(monkeypatch)
    settings = {"rows": int(rng.integers(1, 25)), "check_every": int(rng.choice([1, 3, 8, 64]))}
    settings |= {"prefill_tokens": int(rng.integers(1, 300)), "cache_bytes": int(rng.integers(1, 60)) * PAGE_BYTES}
    sampler, batch = paged(model, stop_ids=stops, **settings)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    assert batch.pool is not None
    assert batch.pool.used == 0


def test_a_call_that_breaks_off_leaves_the_next_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    requests = branches()
    sampler, batch = paged(model, rows=4)
    expected = sampler.generate(requests, Sampling(), version=0)
    forward = batch._forward.logits
    calls = itertools.count()

    def fails(*args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(batch._forward, "logits", fails)
    with pytest.raises(KeyboardInterrupt):
        sampler.generate(requests, Sampling(), version=0)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))
    sampler.close()
    assert batch.pool is None
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))


def test_a_call_that_breaks_off_between_pages_and_table_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of an ended row are dropped, the row still stands in the table, and a trunk is held for its branches."""
    model = build()
    trunk = as_ids(np.arange(70) % VOCABULARY)
    requests = [Request(as_ids([1, 2, 3]), 5, 0), *(Request(trunk, 40, i) for i in range(1, 6))]
    sampler, batch = paged(model, rows=2, check_every=2, stop_ids=())

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(RowTable, "keep", fails)
        with pytest.raises(KeyboardInterrupt):
            sampler.generate(requests, Sampling(), version=0)
    assert batch._carry is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    expected = Sampler(model, stop_ids=()).generate(requests, Sampling(), version=1)
    assert_same(expected, sampler.generate(requests, Sampling(), version=1))


def test_a_call_that_breaks_off_while_room_is_made_leaves_the_next_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few long rows stays where room for many short ones could not be had."""
    long, short = [Request(as_ids([5]), 200, 0)], [Request(as_ids([5]), 3, i) for i in range(20)]
    sampler, _ = paged(build(), rows=20, stop_ids=())
    expected = sampler.generate(long, Sampling(), version=0)

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("attnrl.local.batch.PagedState", fails)
        with pytest.raises(KeyboardInterrupt):
            sampler.generate(short, Sampling(), version=0)
    assert_same(expected, sampler.generate(long, Sampling(), version=0))


def test_weights_changed_in_place_are_seen_and_nan_stops_it() -> None:
    model = build()
    sampler, _ = paged(model, stop_ids=())
    request = Request(as_ids([5, 6, 7]), 20, 1)
    [old] = sampler.generate([request], Sampling(), version=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    [new] = sampler.generate([request], Sampling(), version=1)
    assert old.ids.tolist() != new.ids.tolist()
    assert_same([new], Sampler(model, stop_ids=()).generate([request], Sampling(), version=1))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        sampler.generate([request], Sampling(), version=2)


def test_learned_positions_up_to_the_last() -> None:
    """A model that is not fused, whose finished rows would run past its last position."""
    model = build("gpt2")
    rng = np.random.default_rng(0)
    requests = [Request(as_ids(rng.integers(0, VOCABULARY, n)), 48 - n, n) for n in (40, 45, 47, 20, 2)]
    expected = Sampler(model, stop_ids=STOPS).generate(requests, Sampling(), version=0)
    sampler, _ = paged(model, check_every=16)
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))


@pytest.mark.parametrize("look", [1, 16])
def test_rows_that_run_on_leave_the_frequencies_of_the_others(look: int) -> None:
    """A longrope model turns all rows of a step by other frequencies once one stands beyond its original length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.25, rope_parameters=rope)).eval()
    rng = np.random.default_rng(0)
    requests = [Request(as_ids(rng.integers(0, VOCABULARY, n)), new, n) for n, new in ((50, 14), (5, 50))]
    expected = Sampler(model, stop_ids=()).generate(requests, Sampling(), version=0)
    sampler, _ = paged(model, check_every=look, stop_ids=())
    assert_same(expected, sampler.generate(requests, Sampling(), version=0))


@pytest.mark.parametrize(
    ("lengths", "kv", "pieces", "longest"),
    [
        ([4097] * 64, 2, 384, 704),  # six a row: as many as there is room for
        ([4607] * 64, 2, 384, 768),
        ([4097] * 8, 2, 120, 288),  # no shorter than a piece may be
        ([32768, *[512] * 48], 16, 66, 1824),  # too many heads for two pieces a row: as where nothing starts early
    ],
)
def test_attention_that_starts_early_is_cut_into_as_many_pieces_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], kv: int, pieces: int, longest: int
) -> None:
    monkeypatch.setattr(paged_state, "has_kernels", lambda device: True)
    monkeypatch.setattr(paged_state, "room", lambda device: 792)
    config = Qwen2Config(hidden_size=64, num_attention_heads=16, num_key_value_heads=kv, num_hidden_layers=1)
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]), config=config)
    held = np.array([pages_for(length) for length in lengths])
    state = PagedState(model, [LayerShape(kv, 4, 4)], 64, int(held.max()), 16)
    table = np.arange(1, 1 + 64 * held.max(), dtype=np.int32).reshape(64, -1)[: len(lengths)]
    state._plan_items(64, np.array(lengths), table, held)
    items = state._single_I5[state._single_I5[:, 1] > 0].numpy()
    ends = np.minimum(items[:, 3], np.array(lengths)[items[:, 0]])
    assert (len(items), (ends - items[:, 2]).max()) == (pieces, longest)
    assert state.shape.single >= pieces
