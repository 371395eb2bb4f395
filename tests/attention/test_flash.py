"""Which flash kernels run, what they are asked for, and what happens where ours differ from aten's.

The kernels have stand-ins in plain torch here; `back_grid.py` and `hopper_grid.py` run their own source.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from grids import dense, on_hopper, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnrl.attention import flash, paths
from attnrl.attention.trie import QUERY_BLOCK, Runs, block_slots, key_blocks, make_trie, path_blocks
from attnrl.local.recompute import _attention_kept

back_hopper = pytest.importorskip("attnrl.attention.back_hopper", reason="triton is published for Linux on x86-64 only")
ROWS = [np.array(row) for row in ([7, 8, 9, 1, 2], [7, 8, 5], [7, 8, 9, 4, 4, 4], [3, 3])]
SCALE = 0.7


def along(q: Tensor, k: Tensor, v: Tensor, fresh: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Each run along its path, [T, H, D], and the log-sum-exp [H, T]."""
    runs = zip(q.split(fresh), k.split(lengths), v.split(lengths), strict=True)
    both = [dense(*run, len(run[1]) - len(run[0]), SCALE) for run in runs]
    return torch.cat([out for out, _ in both]), torch.cat([lse for _, lse in both], 1)


class Kernels:
    """Stand-ins for both libraries' kernels: they count their calls and can be made wrong."""

    def __init__(self, runs: Runs) -> None:
        self.parts = list(runs.fresh), list(runs.lengths)
        self.tables = runs.blocks(torch.device("cpu"))
        self.calls: list[str] = []
        self.off: dict[str, float] = {}

    def packed_fits(self, *x: Tensor) -> bool:
        return True

    def packed(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, blocks: Tensor, *, scale: float) -> Any:
        assert scale == SCALE
        assert all(torch.equal(*both) for both in zip((starts, blocks), self.tables[:2], strict=True))
        self.calls.append("ours")
        if "fails" in self.off:
            raise RuntimeError("no such instruction")
        out, lse = along(q, k, v, *self.parts)
        return out * (1 + self.off.get("out", 0)), lse + self.off.get("lse", 0)

    def aten(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Any:
        self.calls.append("aten")
        return *along(q, k, v, *self.parts), None, None, None

    def _gradients(self, g: Tensor, *qkv: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in qkv]
            return torch.autograd.grad(along(*leaves, *self.parts)[0], leaves, g)

    def back(self, g: Tensor, *given: Tensor, scale: float) -> Any:
        assert all(torch.equal(*both) for both in zip(given[5:], self.tables, strict=True))
        self.calls.append("our gradients")
        dq, dk, dv = self._gradients(g, *given[:3])
        return dq + self.off.get("noise", 0), dk * (1 + self.off.get("dk", 0)), dv

    def aten_back(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> Any:
        self.calls.append("aten's gradients")
        return self._gradients(g, q, k, v)


@pytest.fixture
def runs() -> Runs:
    return make_trie(ROWS).runs("cpu")


@pytest.fixture
def kernels(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels(runs)
    monkeypatch.setattr(flash, "hopper", made)
    monkeypatch.setattr(flash, "_left", set())
    monkeypatch.setattr(flash, "_seen", set())
    monkeypatch.setattr(back_hopper, "back", made.back)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", made.aten)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", made.aten_back)
    monkeypatch.setattr(paths, "attention_kind", lambda *_, **__: paths.FLASH)
    return made


def inputs(runs: Runs) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(runs.fresh), n, 8, requires_grad=True) for n in (4, 2, 2)]


def gradients(runs: Runs, *, again: Any = None, layers: int = 1) -> tuple[list[Tensor], str]:
    """Gradients of queries, keys and values through path attention, and whose kernels ran last.

    `again`: layers run again in backward, with this context.
    """
    given, kinds = inputs(runs), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _, kind = paths.attend(q * 1.5, k, v, runs, scale=SCALE)
        kinds.append(kind)
        return out

    q, k, v = given
    for _ in range(layers):
        q = checkpoint(attend, q, k, v, use_reentrant=False, **again) if again is not None else attend(q, k, v)
    q.square().sum().backward()
    return [x.grad for x in given if x.grad is not None], kinds[-1]


def by_hand(runs: Runs, layers: int = 1) -> list[Tensor]:
    assert runs.paths_S is not None
    q, k, v = inputs(runs)
    out = q
    for _ in range(layers):
        out, _ = along(out * 1.5, k[runs.paths_S], v[runs.paths_S], list(runs.fresh), list(runs.lengths))
    return list(torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_ours_run_where_they_fit_and_are_compared_once(runs: Runs, kernels: Kernels) -> None:
    assert runs.fresh != runs.lengths, "prefixes are shared"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            found, kind = gradients(runs)
            assert kind == flash.OURS
            for ours, wanted in zip(found, by_hand(runs), strict=True):
                assert torch.allclose(ours, wanted, atol=1e-5)
    assert kernels.calls == ["ours", "aten", "our gradients", "aten's gradients", "ours", "our gradients"]


def test_a_layer_that_runs_again_keeps_what_ours_returned(runs: Runs, kernels: Kernels) -> None:
    gradients(runs)
    kernels.calls.clear()
    found, _ = gradients(runs, again={"context_fn": _attention_kept})
    assert kernels.calls == ["ours", "our gradients"]
    for ours, wanted in zip(found, by_hand(runs), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize("again", [None, {}, {"context_fn": _attention_kept}], ids=["once", "again", "kept"])
@pytest.mark.parametrize(
    ("wrong", "by", "why"),
    [
        ("out", 0.1, "gives outputs that differ from aten's by"),
        ("out", torch.nan, "gives outputs that differ from aten's by nan"),
        ("lse", 0.1, "gives log-sum-exps that differ from aten's by"),
        ("dk", -0.1, "gives gradients that differ from aten's by 10"),
        ("fails", 1.0, "fails .RuntimeError: no such instruction"),
    ],
)
def test_ours_are_left_where_they_differ(
    runs: Runs, kernels: Kernels, wrong: str, by: float, why: str, again: dict[str, Any] | None
) -> None:
    kernels.off = {wrong: by}
    with pytest.warns(RuntimeWarning, match=f"our attention {why}.*; aten's is used"):
        found, _ = gradients(runs, again=again, layers=3)
    for ours, wanted in zip(found, by_hand(runs, 3), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-4, rtol=1e-4)  # nothing wrong was used
    kernels.calls.clear()
    _, kind = gradients(runs)
    assert kind == flash.FLASH
    assert kernels.calls == ["aten", "aten's gradients"]


def test_rounding_of_a_gradient_that_is_zero_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    """A lone token sees itself whatever its query: the gradients of query and key are 0, ours up to rounding."""
    lone = make_trie([np.array([5])]).runs("cpu")
    kernels.parts, kernels.tables = ([1], [1]), lone.blocks(torch.device("cpu"))
    kernels.off = {"noise": 1e-6}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradients(lone)[1] == flash.OURS


def test_want_of_memory_is_no_reason_to_leave_ours(
    runs: Runs, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as there:
        there.setattr(kernels, "packed", full)
        with pytest.raises(torch.OutOfMemoryError):
            gradients(runs)
    assert gradients(runs)[1] == flash.OURS


def test_each_kind_of_input_is_compared(runs: Runs, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, several, and several that share: a kernel can be right for one and wrong for another."""
    for each in (make_trie(ROWS[:1]).runs("cpu"), make_trie(ROWS, share=False).runs("cpu"), runs):
        fresh = Kernels(each)
        monkeypatch.setattr(flash, "hopper", fresh)
        monkeypatch.setattr(back_hopper, "back", fresh.back)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", fresh.aten)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", fresh.aten_back)
        for calls in (["ours", "aten", "our gradients", "aten's gradients"], ["ours", "our gradients"]):
            gradients(each)
            assert fresh.calls == calls
            fresh.calls.clear()


def test_log_sum_exps_have_no_gradient(runs: Runs, kernels: Kernels) -> None:
    out, lse, _ = paths.attend(*inputs(runs), runs, scale=SCALE)
    assert lse is not None
    assert (out.requires_grad, lse.requires_grad) == (True, False)


def test_a_window_is_atens(runs: Runs, kernels: Kernels) -> None:
    q, k, v = inputs(runs)
    assert paths.attend(q, k, v, runs, scale=SCALE, window=3)[2] == flash.FLASH
    assert kernels.calls == ["aten"]


def test_rows_are_copied_only_where_the_copy_engine_asks_for_it() -> None:
    wide = torch.zeros(5, 32)
    part = wide[:, 8:24].view(5, 2, 8)
    assert flash._in_rows(part) is part
    assert flash._in_rows(wide[:, 2:18].view(5, 2, 8)).is_contiguous()  # no multiple of 16 bytes
    turned = torch.zeros(2, 5, 8).transpose(0, 1)
    assert flash._in_rows(turned).is_contiguous()


@pytest.mark.parametrize("seed", range(20))
def test_tables_cover_every_pair_of_query_and_key(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fresh = rng.integers(1, 200, 5).tolist()
    lengths = [n + int(rng.integers(0, 300)) for n in fresh]
    firsts, keys = np.cumsum([0, *fresh]), np.cumsum([0, *lengths])
    for j in range(5):
        wanted = {(firsts[j] + q, keys[j] + k) for q in range(fresh[j]) for k in range(lengths[j] - fresh[j] + q + 1)}
        blocks = [b for b in path_blocks(fresh, lengths).tolist() if b[3] == j]
        seen = {(b[0] + i, keys[j] + k) for b in blocks for i in range(b[1]) for k in range(b[2] + i + 1)}
        assert seen == wanted
        items = [b for b in key_blocks(fresh, lengths).tolist() if keys[j] <= b[0] < keys[j + 1]]
        seen = {
            (first + q, key + k)
            for key, at, first, before, count, _ in items
            for k in range(min(128, lengths[j] - at))
            for q in range(max(0, at + k - before), count)
        }
        assert seen == wanted
        assert {b[2] for b in items} == {firsts[j]}
        assert {b[5] % QUERY_BLOCK for b in items} == {0}
        assert {block_slots(fresh)[firsts[j]]} == {b[5] for b in items}
    assert len(set(block_slots(fresh).tolist())) == sum(fresh)
    work = [count - max(at - before, 0) for _, at, _, before, count, _ in key_blocks(fresh, lengths).tolist()]
    assert work == sorted(work, reverse=True)


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert max(row["errors"]) < 4e-3, row  # of what bfloat16 rounds: 2.7e-3
        assert max(row["worst"]) < 1e-2, row
        assert row["same"], row


def test_gradient_kernels_on_a_cpu() -> None:
    rows = run("back_grid.py", "--cpu", TRITON_INTERPRET="1")
    assert [row["shape"][:3] for row in rows] == [[4, 2, 128], [6, 2, 64], [3, 1, 128]]  # type: ignore[index]
    check(rows)


@pytest.mark.gpu
@on_hopper
def test_gradient_kernels_compiled() -> None:
    rows = run("back_grid.py")
    assert len(rows) == 6
    check(rows)


def test_gradient_kernels_compile_for_hopper_without_a_gpu() -> None:
    [built] = run("back_grid.py", "--compile")
    for name, kernel in built.items():
        assert kernel["threads"] == 384, name  # type: ignore[index]
        assert kernel["shared"] <= 227 * 1024, name  # type: ignore[index]
        assert kernel["products"] > 0, name  # type: ignore[index]
        assert kernel["copies"] > 0, name  # type: ignore[index]
