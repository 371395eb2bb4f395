"""One trie: the layout holds every sequence, and hidden states over it are those of each sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from attnrl.attention.paths import can_share, path_attention
from attnrl.attention.trie import continue_trie, fill_shared_bins, make_trie, sorted_rows
from attnrl.types import as_ids

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


@settings(max_examples=80)
@given(sequences)
def test_a_trie_holds_each_sequence_and_each_prefix_once(rows: list[list[int]]) -> None:
    trie = make_trie(arrays(rows))
    assert sorted(trie.order) == list(range(len(rows)))
    for index, path in zip(trie.order, trie.paths, strict=True):
        assert trie.ids_T[path].tolist() == rows[index]
        assert trie.positions_T[path].tolist() == list(range(len(rows[index])))
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(trie.ids_T) == sum(trie.fresh) == len(prefixes)


@given(sequences, st.integers(1, 12))
def test_carried_tries_hold_every_distinct_prefix_once(rows: list[list[int]], budget: int) -> None:
    """Over all passes, each distinct prefix is laid out exactly once, and each path spells its context."""
    contexts = [as_ids(rows[i]) for i in sorted_rows(arrays(rows))]
    carried = None
    seen: list[tuple[int, ...]] = []
    while contexts:
        trie = continue_trie(contexts, carried, budget)
        count = len(trie.paths)
        assert trie.order == tuple(range(count))
        assert count == 1 or len(trie.ids_T) <= budget
        tokens = np.concatenate([[] if carried is None else carried, trie.ids_T]).astype(int)
        stop = 0
        for context, path, new, run in zip(contexts[:count], trie.paths, trie.fresh, trie.run_of, strict=True):
            spelled = tokens[path].tolist()
            assert spelled == context.tolist()
            assert path[-1] - trie.carried == (trie.ends[run - 1] if run else -1)
            start, stop = stop, stop + new
            assert trie.positions_T[start:stop].tolist() == list(range(len(spelled) - new, len(spelled)))
            seen += [tuple(spelled[:n]) for n in range(len(spelled) - new + 1, len(spelled) + 1)]
        carried = contexts[count - 1]
        contexts = contexts[count:]
    assert len(seen) == len(set(seen))
    assert set(seen) == {tuple(c[:n]) for c in rows for n in range(1, len(c) + 1)}


@given(sequences, st.integers(4, 30))
def test_bins_partition_within_the_budget(rows: list[list[int]], budget: int) -> None:
    bins = fill_shared_bins(arrays(rows), budget)
    assert sorted(i for b in bins for i in b) == list(range(len(rows)))
    for b in bins:
        distinct = len(make_trie(arrays([rows[i] for i in b])).ids_T)
        assert len(b) == 1 or distinct <= budget


@settings(max_examples=15, deadline=None)
@given(sequences)
def test_hidden_states_and_gradients_equal_each_sequence_alone(rows: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    weight = model.model.layers[0].self_attn.k_proj.weight
    trie = make_trie(arrays(rows))
    with path_attention(model, trie.runs("cpu")):
        ids, positions = torch.from_numpy(trie.ids_T)[None], torch.from_numpy(trie.positions_T)[None]
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        shared = [hidden[torch.from_numpy(path)] for path in trie.paths]
        torch.cat(shared).sin().sum().backward()
    grad = weight.grad.clone()
    model.zero_grad()
    alone = [model.model(input_ids=torch.tensor([rows[i]])).last_hidden_state[0] for i in trie.order]
    torch.cat(alone).sin().sum().backward()
    torch.testing.assert_close(torch.cat(shared), torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, weight.grad, atol=1e-4, rtol=1e-4)


def test_sliding_windows_and_soft_caps_are_not_shared() -> None:
    assert can_share(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))
    assert not can_share(Gemma2ForCausalLM(Gemma2Config(**SHAPE)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_runs_equal_sequences_alone_on_cuda() -> None:
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 11, 300)
    rows = [np.concatenate([trunk[:n], rng.integers(0, 11, m)]) for n, m in ((300, 0), (100, 150), (100, 7), (250, 90))]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(SHAPE | {"head_dim": 32}))).cuda().bfloat16().eval()
    trie = make_trie(rows)
    ids, positions = (torch.from_numpy(x)[None].cuda() for x in (trie.ids_T, trie.positions_T))
    with path_attention(model, trie.runs("cuda")):
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        shared = torch.cat([hidden[torch.from_numpy(path).cuda()] for path in trie.paths])
        shared.float().sin().sum().backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    grad = weight.grad.float()
    model.zero_grad()
    alone = torch.cat(
        [model.model(input_ids=torch.tensor(rows[i][None]).cuda()).last_hidden_state[0] for i in trie.order]
    )
    alone.float().sin().sum().backward()
    assert (shared.float() - alone.float()).abs().mean() < 0.02
    cosine = torch.nn.functional.cosine_similarity(grad.flatten(), weight.grad.float().flatten(), dim=0)
    assert cosine > 0.99
