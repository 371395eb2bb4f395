"""States follow their rows; runs of models that remember, whole and resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

import attnrl
from attnrl.errors import ConfigError, TrainingError
from attnrl.local.batch import PagedBatch
from attnrl.local.memory import Memory
from attnrl.local.models import load_weights
from attnrl.local.paged_state import PagedState
from attnrl.local.sampler import Sampler
from attnrl.local.slots import SlotBatch
from attnrl.local.stats import step_rows
from attnrl.types import Request, Sampling, as_ids
from tiny_llama import make_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from families import BASE, FAMILIES, tiny

SMALL = {
    "data.train_tasks": 60, "algo.prompts": 2, "algo.max_prompts": 4, "algo.group": 2, "algo.delta": 1,
    "algo.segmenter": "every_n_tokens", "algo.segmenter_options": {"tokens": 4}, "reward": "parity:even",
    "evaluation.every": 0, "sampling.max_response_tokens": 24, "run.iterations": 2, "run.checkpoint_every": 1,
    "engine.local.device": "cpu", "update.lr": 1e-3,
}  # fmt: skip


def filled(model: object, ids: list[list[int]]) -> Memory:
    memory = Memory(model)  # type: ignore[arg-type]
    with torch.no_grad():
        model(input_ids=torch.tensor(ids), past_key_values=memory, use_cache=True)  # type: ignore[operator]
    return memory


def test_states_are_put_and_moved_row_by_row() -> None:
    model = tiny("qwen3_5_text")
    a, b, c = (filled(model, [ids]) for ids in ([5, 6, 7], [8, 9, 10], [11, 12, 13]))
    memory = a.room(5)
    assert memory.nbytes == 5 * a.nbytes > 0
    for rows, one in (([0, 3], b), ([1, 4], a), ([2], c)):
        memory.put(torch.tensor(rows), one)
    memory.move(torch.tensor([2, 1]), torch.tensor([0, 3]))
    want = [filled(model, [ids, ids]) for ids in ([11, 12, 13], [5, 6, 7])]  # c a c a a
    pairs = list(zip(memory.states(), *(x.states() for x in want), strict=True))
    assert len(pairs) == 6  # a window of the convolution and a state, in three of four layers
    for (states, index), (of_c, _), (of_a, _) in pairs:
        rows = [of_c[index], of_a[index]]
        torch.testing.assert_close(states[index], torch.cat([rows[0][:1], rows[1][:1], rows[0][:1], rows[1]]))


def test_the_first_rows_are_kept_in_place() -> None:
    memory = filled(tiny("lfm2"), [[5, 6, 7]]).room(3)
    for states, index in memory.first(2).states():
        states[index].add_(1)  # as a step that is replayed writes where it wrote when it was captured
    for states, index in memory.states():
        assert (states[index][:2] == 1).all()
        assert not states[index][2:].any()


@pytest.mark.parametrize("paged", [False, True])
def test_contexts_that_are_alike_run_once_and_others_share_nothing(paged: bool) -> None:
    sampler = Sampler(tiny("lfm2"), stop_ids=[2], rows=4, paged=paged)
    assert (sampler.metrics(), sampler.stats.requests) == ({}, 0)  # what it tried is gone
    contexts = [[5, 6, 7], [5, 6, 7], [5, 6, 8], [5, 6]]
    requests = [Request(as_ids(context), max_tokens=4, seed=i) for i, context in enumerate(contexts)]
    sampler.generate(requests, Sampling(), version=0)
    assert (sampler.stats.prefilled_tokens, sampler.stats.saved_tokens, sampler.stats.prefills) == (8, 3, 3)


def test_rows_have_room_for_their_states() -> None:
    model = tiny("qwen3_5_text")
    request = Request(as_ids([5, 6, 7]), max_tokens=4, seed=0)
    sampler = Sampler(model, stop_ids=[2], cache_bytes=100_000)
    sampler.generate([request] * 9, Sampling(), version=0)
    per_row = 128 * 2 * 2 * 8 * 4 + filled(model, [[5]]).nbytes  # 128 positions of keys and values of two heads of 8
    assert sampler.stats.rows == 100_000 // per_row


def calls(requests: int) -> list[Request]:
    """Responses of different lengths, some of one context."""
    contexts = [as_ids(np.arange(5, 5 + length) % 61) for length in (1, 17, 40)]
    return [Request(contexts[i % 3], max_tokens=3 + 3 * i, seed=i) for i in range(requests)]


def same_draws(model: object, sampler: Sampler, requests: list[Request]) -> bool:
    expected = Sampler(model, stop_ids=[2], paged=False).generate(requests, Sampling(), version=0)
    found = sampler.generate(requests, Sampling(), version=0)
    return all(np.array_equal(a.ids, b.ids) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(("cache_bytes", "rows"), [(3_000_000, 40), (800_000, 32), (500_000, 16)])
def test_states_beside_pages_take_half_of_the_cache_at_most(cache_bytes: int, rows: int) -> None:
    """Twice the states, since a step that is captured is undone from a copy; as many rows as a step of these has."""
    model = tiny("qwen3_5_text")
    sampler = Sampler(model, stop_ids=[2], paged=True, cache_bytes=cache_bytes)
    assert same_draws(model, sampler, calls(40))
    stats, states = sampler.stats, step_rows(rows) * filled(model, [[5]]).nbytes
    assert stats.rows == rows
    assert 2 * states <= cache_bytes // 2
    assert states < stats.cache_bytes <= cache_bytes - states


def test_rows_that_made_room_are_prefilled_again_with_what_they_drew() -> None:
    model = tiny("lfm2")
    sampler = Sampler(model, stop_ids=[2], rows=8, paged=True, check_every=4, cache_bytes=60_000)
    for _ in range(2):
        assert same_draws(model, sampler, calls(24))
        assert sampler.stats.put_back > 0


def test_a_cache_holds_states_and_pages_of_any_call() -> None:
    """Few long responses, whose pages fill it, then many short ones, whose states need half of it."""
    sampler = Sampler(tiny("qwen3_5_text"), stop_ids=[2], paged=True, cache_bytes=2_000_000)
    for count, new in ((4, 200), (40, 8), (4, 200), (40, 8)):
        requests = [Request(as_ids([5 + i % 7, 6]), max_tokens=new, seed=i) for i in range(count)]
        sampler.generate(requests, Sampling(), version=0)
        batch = sampler.batch
        assert isinstance(batch, PagedBatch)
        assert batch.pool is not None
        assert batch._state.memory is not None
        assert batch.pool.nbytes + 2 * batch._state.memory.nbytes <= 2_000_000
        assert sampler.stats.rows == count


def test_room_for_states_is_kept_where_fewer_rows_run() -> None:
    sampler, rooms = Sampler(tiny("lfm2"), stop_ids=[2], paged=True), set()
    sampler.generate(calls(20), Sampling(), version=0)
    for count in (6, 20, 3, 17):
        rooms.add(id(sampler.batch._state))  # type: ignore[attr-defined]  # captured steps hold its addresses
        sampler.generate(calls(count), Sampling(), version=0)
    assert len(rooms) == 1


@pytest.mark.parametrize("fault", [None, RuntimeError("no such kernel"), TrainingError("logits are not finite")])
def test_where_pages_are_wrong_slots_take_their_place(fault: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, remember = tiny("lfm2"), PagedState.remember

    def nothing(state: PagedState, rows: Any, memory: Memory) -> None:
        if fault is not None:
            raise fault
        remember(state, rows[:0], memory)

    monkeypatch.setattr(PagedState, "remember", nothing)
    reason = "log-probs of drawn tokens are wrong by" if fault is None else str(fault)
    with pytest.warns(UserWarning, match=f"Lfm2ForCausalLM draws from slots of one cache .* over pages: {reason}"):
        sampler = Sampler(model, stop_ids=[2], paged=True)
    assert isinstance(sampler.batch, SlotBatch)
    assert same_draws(model, sampler, calls(9))


def test_a_checkpoint_with_a_vision_tower_is_read_as_text(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = {**BASE, **FAMILIES["qwen3_5_text"], "rope_parameters": rope}
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=tower)).float().eval()
    whole.save_pretrained(tmp_path)
    model, ids = load_weights(tmp_path, device="cpu"), torch.arange(30)[None]
    assert model.config.model_type == "qwen3_5_text"
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    Sampler(model, stop_ids=[2])


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnrl.local.memory.transformers.__version__", "5.13.1")
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM carries .* with transformers 5\.14 or newer, not 5\.13\.1"):
        Sampler(tiny("lfm2"), stop_ids=[2])


LORA = {"model.lora_rank": 4, "model.lora_targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("family", "more"), [("qwen3_5_text", {}), ("lfm2", {"update.kl_weight": 0.01}), ("nemotron_h", LORA)]
)
def test_runs_are_trained_checked_and_resumed(
    family: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parity.py").write_text("def even(attempts):\n    return [a.tokens % 2 == 0 for a in attempts]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = make_model(tmp_path / "model")
    sizes = {"vocab_size": 256, "max_position_embeddings": 1024, "eos_token_id": 1, "bos_token_id": 2}
    tiny(family, **sizes).save_pretrained(path)
    config = {**SMALL, **more, "model.path": str(path)}
    said: list[str] = []
    attnrl.train("demo", tmp_path / "whole", overrides=config, say=said.append)
    attnrl.train("demo", tmp_path / "half", overrides={**config, "run.iterations": 1}, say=said.append)
    attnrl.train(run_dir=tmp_path / "half", resume=True, overrides={"run.iterations": 2}, say=said.append)
    whole, half = (load_file(last_model(tmp_path / name)) for name in ("whole", "half"))
    start = load_file(path / "model.safetensors")
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    assert max(float((whole[name] - start[name]).abs().max()) for name in start) > 1e-4
    found = {finding.about: finding for finding in attnrl.check("demo", overrides=config)}
    assert (found["agreement"].level, found["update"].level) == ("ok", "ok"), found["agreement"]


def last_model(run: Path) -> Path:
    """The weights of the run's last checkpoint."""
    return sorted(run.glob("checkpoints/*/**/model/model.safetensors"))[-1]
