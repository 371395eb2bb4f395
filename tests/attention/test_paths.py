"""Packed attention gives every sequence what it gets alone."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from fci_oracle import CONFIGS, longrope_model, tiny

from attnrl.attention import interface, paths
from attnrl.attention.decoder import lone_from
from attnrl.attention.paths import attend, attention_kind, packed_attention, packed_positions
from attnrl.attention.trie import apart, make_trie
from attnrl.errors import ConfigError

LENGTHS = [7, 1, 23, 14]


def packed_ids(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (1, n), generator=generator) for n in LENGTHS]


def forward(model: torch.nn.Module, ids: list[torch.Tensor]) -> torch.Tensor:
    return model(
        input_ids=torch.cat(ids, 1), position_ids=packed_positions(LENGTHS), attention_mask=None, use_cache=False
    ).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_one_by_one(name: str) -> None:
    model, ids = tiny(name), packed_ids()
    with torch.no_grad():
        want = torch.cat([model(input_ids=row, use_cache=False).logits for row in ids], 1)
        with packed_attention(model, LENGTHS) as pack:
            got = forward(model, ids)
    assert (got - want).abs().max() < 2e-5 * want.abs().max()
    assert pack.calls == 2
    windowed = "window" in name
    assert (paths.BLOCKS in pack.kinds) == windowed
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["qwen2", "gemma2_window_softcap", "gpt_oss_window_sinks"])
def test_gradients_equal_one_by_one_under_checkpointing(name: str) -> None:
    model, ids = tiny(name), packed_ids(1)
    weights = [p for p in model.parameters() if p.requires_grad]
    want_loss = sum(model(input_ids=row, use_cache=False).logits.square().mean() for row in ids)
    want = torch.autograd.grad(want_loss, weights)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with packed_attention(model, LENGTHS) as pack:
        parts = forward(model, ids).split(LENGTHS, 1)
        got = torch.autograd.grad(sum(part.square().mean() for part in parts), weights)
    assert pack.calls == 4, "each layer attends again in the backward pass"
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6


def test_gradients_of_sinks_equal_the_models_own() -> None:
    model, row = tiny("gpt_oss_window_sinks"), packed_ids(1)[2]
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    want = torch.autograd.grad(model(input_ids=row, use_cache=False).logits.square().mean(), sinks)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in sinks:  # they alone are trained: the first layer's queries ask for no gradient
        parameter.requires_grad_(True)
    with packed_attention(model, [row.shape[1]]):
        got = torch.autograd.grad(model(input_ids=row, use_cache=False).logits.square().mean(), sinks)
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 1e-3
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_long_sequences_cross_block_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "BLOCK", 8)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(30, n, 4, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    for window in (None, 1, 5, 100):
        got, _, kind = attend(q, k, v, apart((19, 11)), scale=0.7, window=window, softcap=2.0)
        assert kind == paths.BLOCKS
        for start, stop in ((0, 19), (19, 30)):
            for t in range(start, stop):
                left = start if window is None else max(start, t - window + 1)
                for h in range(4):
                    s = 2.0 * torch.tanh(k[left : t + 1, h // 2] @ q[t, h] * 0.7 / 2.0)
                    assert torch.allclose(got[t, h], s.softmax(0) @ v[left : t + 1, h // 2], atol=1e-12)


def seen_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: np.ndarray,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of the last token of a path, head by head: [H, D]."""
    left = 0 if window is None else max(0, len(path) - window)
    keys, groups = torch.from_numpy(path[left:]), q.shape[1] // k.shape[1]
    outs = []
    for h in range(q.shape[1]):
        s = k[keys, h // groups] @ q[path[-1], h] * 0.7
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        weights = s.exp() / (s.exp().sum() + (0 if sinks is None else sinks[h].exp()))
        outs.append(weights @ v[keys, h // groups])
    return torch.stack(outs)


ROWS = [np.array(row) for row in ([7, 8, 1, 2, 3], [7, 8, 1, 2, 3, 4, 4], [7, 8, 1, 9, 9, 9], [5, 5], [7, 8, 1, 9])]


SINKS = torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, SINKS), (2.0, SINKS)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_runs_along_shared_paths_by_hand(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "BLOCK", 2)
    trie = make_trie(ROWS)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(len(trie.ids_T), n, 4, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    got, _, kind = attend(q, k, v, trie.runs("cpu"), scale=0.7, window=window, softcap=softcap, sinks_H=sinks)
    assert kind == (paths.SDPA if window is softcap is sinks is None else paths.BLOCKS)
    assert len(trie.ids_T) == 12 < sum(map(len, ROWS))
    for path in trie.paths:
        for n in range(1, len(path) + 1):
            assert torch.allclose(got[path[n - 1]], seen_by_hand(q, k, v, path[:n], window, softcap, sinks), atol=1e-12)


def parts(q, k, v, q_ends, k_ends, how):  # type: ignore[no-untyped-def]
    """Of each sequence its slices of queries and keys, its scores, and keys and values repeated for the query heads.

    As torch's flash kernel over sequences of different lengths is documented: both masks are aligned to the last query
    and the last key.
    """
    left, right = how["window_size_left"], how["window_size_right"]
    for (a, b), (c, d) in zip(*(itertools.pairwise(e.tolist()) for e in (q_ends, k_ends)), strict=True):
        ahead = torch.arange(d - c) - torch.arange(b - a)[:, None] - ((d - c) - (b - a))  # key minus query
        seen = ahead <= (right if right >= 0 else 0)
        seen &= ahead >= (-left if left >= 0 else -d)
        key, value = (x[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        s = torch.einsum("qhd,khd->hqk", q[a:b], key) * how["scale"]
        yield slice(a, b), slice(c, d), s.masked_fill(~seen, -torch.inf), key, value


def varlen(q, k, v, q_ends, k_ends, q_most, k_most, dropout, causal, debug, **how):  # type: ignore[no-untyped-def]
    """The kernel in plain torch."""
    assert (q_most, k_most) == (int(q_ends.diff().max()), int(k_ends.diff().max()))
    assert not dropout
    assert causal == (how["window_size_right"] < 0)
    assert q.shape[2] % 8 == 0
    found = list(parts(q, k, v, q_ends, k_ends, how))
    out = torch.cat([torch.einsum("hqk,khd->qhd", s.softmax(-1), value) for _, _, s, _, value in found])
    return out, torch.cat([s.logsumexp(-1) for _, _, s, _, _ in found], 1)


def varlen_back(g, q, k, v, out, lse, q_ends, k_ends, *rest, **how):  # type: ignore[no-untyped-def]
    """Its gradients, as the kernel computes them from the outputs and log-sum-exps that it is given."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, s, key, value in parts(q, k, v, q_ends, k_ends, how):
        p = torch.exp(s - lse[:, queries, None])
        taken = (g[queries] * out[queries]).sum(-1).t()[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", g[queries], value) - taken) * how["scale"]
        dq[queries] = torch.einsum("hqk,khd->qhd", ds, key)
        of_key, of_value = torch.einsum("hqk,qhd->khd", ds, q[queries]), torch.einsum("hqk,qhd->khd", p, g[queries])
        for mine, whole in ((dk, of_key), (dv, of_value)):
            mine[keys] = whole.unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("head", [8, 12])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("share", [False, True])
def test_the_flash_call_describes_the_paths(
    head: int, window: int | None, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA devices are asked for, with a stand-in for the device's kernel."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen)
    monkeypatch.setattr(paths, "attention_kind", lambda *_, **__: paths.FLASH)
    trie = make_trie(ROWS, share=share)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(len(trie.ids_T), n, head, generator=generator, dtype=torch.float64) for n in (4, 2))
    v = torch.randn(len(trie.ids_T), 2, head - 3, generator=generator, dtype=torch.float64)
    got, _, _ = attend(q, k, v, trie.runs("cpu"), scale=0.7, window=window)
    for path in trie.paths:
        for n in range(1, len(path) + 1):
            assert torch.allclose(got[path[n - 1]], seen_by_hand(q, k, v, path[:n], window, None), atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("share", [False, True])
def test_flash_with_sinks_equals_blocks(window: int | None, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, log-sum-exps and gradients, the sinks' own among them, of a kernel that knows no sinks."""
    runs = make_trie(ROWS, share=share).runs("cpu")
    generator = torch.Generator().manual_seed(6)
    tokens = sum(runs.fresh)
    leaves = [torch.randn(tokens, n, 12, generator=generator, dtype=torch.float64) for n in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in (*leaves, SINKS.clone())]
    g = torch.randn(tokens, 4, 12, generator=generator, dtype=torch.float64)
    q, k, v, sinks = leaves
    want, _, kind = attend(q, k, v, runs, scale=0.7, window=window, sinks_H=sinks)
    assert kind == paths.BLOCKS
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", varlen_back)
    monkeypatch.setattr(paths, "attention_kind", lambda *_, **__: paths.FLASH)
    got, lse, kind = attend(q, k, v, runs, scale=0.7, window=window, sinks_H=sinks)
    assert kind == paths.FLASH
    assert torch.allclose(got, want, atol=1e-12)
    for ours, own in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        assert own.abs().max() > 0.1
        assert torch.allclose(ours, own, atol=1e-12)
    first = k.detach()[0].repeat_interleave(2, 0)  # of a path's first token there are two logits: its own and the sink
    own_H = (q.detach()[0] * first).sum(-1) * 0.7
    assert torch.allclose(lse[:, 0], torch.logaddexp(own_H, SINKS), atol=1e-12)


def test_collector_sees_every_layer_after_rotation() -> None:
    model, seen = tiny("qwen3"), []

    def collector(q, k, lse, *, scale, window, softcap, sinks_H):  # type: ignore[no-untyped-def]
        seen.append((q.shape, k.shape, scale, window, softcap, sinks_H, torch.is_grad_enabled()))

    with packed_attention(model, LENGTHS, collector=collector):
        forward(model, packed_ids())
    total = sum(LENGTHS)
    assert seen == [((total, 4, 16), (total, 2, 16), 0.25, None, None, None, False)] * 2


def test_nothing_is_left_behind_after_an_error() -> None:
    model = tiny("llama")
    with packed_attention(model, LENGTHS):
        assert model.config._attn_implementation == interface.NAME
    with pytest.raises(ConfigError), packed_attention(model, LENGTHS):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)
    assert model.config._attn_implementation == "eager"
    assert not interface._ACTIVE


def test_refusals_name_the_reason() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError, match="the pack has 45 tokens, the model got 5"), packed_attention(model, LENGTHS):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)
    with pytest.raises(ConfigError, match="one row"), packed_attention(model, [5]):
        model(input_ids=torch.ones(2, 5, dtype=torch.long), use_cache=False)
    with pytest.raises(ConfigError, match="at least one token"), packed_attention(model, [5, 0]):
        pass
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ConfigError, match="chunked_attention"), packed_attention(model, [5]):
        pass
    dropping = tiny("qwen2").train()
    dropping.config.attention_dropout = 0.1
    for block in dropping.model.layers:
        block.self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="dropout"), packed_attention(dropping, [5]):
        dropping(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)


def test_kinds_by_device_and_shape() -> None:
    half, full = torch.bfloat16, torch.float32
    assert attention_kind("cuda", half, 256, window=128) == paths.FLASH
    assert attention_kind("cuda", half, 128, softcap=30.0) == paths.BLOCKS
    assert attention_kind("cuda", half, 512) == paths.SDPA
    assert attention_kind("cuda", half, 192, value_size=128) == paths.FLASH
    assert attention_kind("cuda", full, 128) == paths.SDPA
    assert attention_kind("cpu", full, 192, value_size=128) == paths.BLOCKS
    assert attention_kind("cuda", half, 64, sinks=True) == paths.FLASH
    assert attention_kind("cuda", full, 64, sinks=True) == paths.BLOCKS


def test_positions_restart() -> None:
    assert np.array_equal(packed_positions([1, 3])[0].numpy(), [0, 0, 1, 2])


def test_rope_that_depends_on_length_refuses_to_mix() -> None:
    model = longrope_model()
    with (
        pytest.raises(ConfigError, match="40 tokens cannot share a pack: beyond 16 tokens"),
        packed_attention(model, [14, 40]),
    ):
        pass
    for lengths in ([14, 16], [40]):
        with packed_attention(model, lengths):
            pass
    assert lone_from(tiny("llama")) is None


def test_an_exchanged_layer_is_noticed() -> None:
    model, ids = tiny("llama"), packed_ids()
    with torch.no_grad():
        with packed_attention(model, LENGTHS):
            want = forward(model, ids)
        model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # with a config of its own
        with packed_attention(model, LENGTHS) as pack:
            got = forward(model, ids)
    assert pack.calls == 2
    assert torch.equal(got, want)


def test_threads_take_turns_on_one_model() -> None:
    model = tiny("qwen2")
    cases = [(packed_ids(seed), LENGTHS) for seed in range(2)]
    with torch.no_grad():
        wants = []
        for ids, lengths in cases:
            with packed_attention(model, lengths):
                wants.append(forward(model, ids))
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            with torch.no_grad(), packed_attention(model, LENGTHS):
                if not torch.equal(forward(model, cases[index][0]), wants[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model.config._attn_implementation == "eager"
    assert not interface._ACTIVE
