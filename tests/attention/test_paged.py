"""The kernels over pages under Triton's interpreter and compiled for Hopper, and the bookkeeping of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from grids import on_hopper, run
from hypothesis import given
from hypothesis import strategies as st

from attnrl.attention.pages import ENDLESS, PAGE, LayerShape, PagePool, common_pages, cut, groups_of, pages_for

SMALL_GPU = 99 * 1024  # shared memory that one program may have on the GPUs that have the least


def check_grid(rows: list[dict[str, Any]]) -> None:
    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["kind"], []).append(row)
    counts = {"decode": 9, "paths": 5, "draw": 5, "sampler": 5, "product": 4, "turn": 3, "half": 1, "places": 2}
    assert {kind: len(found) for kind, found in of.items()} == counts
    for row in rows:
        half = row is of["decode"][5] or row["kind"] in ("product", "turn", "half")
        assert row["error"] < (2e-2 if half else 1e-4), row
    assert [row["splits"] for row in of["decode"]] == [2, 1, 4, 4, 2, 1, 4, 1, 2]
    assert [row["shared"] for row in of["decode"][2:4]] == [2, 2]
    for row in of["draw"]:
        assert (row["same"], row["nan_is_seen"], row["untouched"], row["state"]) == (1.0, True, True, True), row
    for row in of["product"]:
        assert row["fits"] == [True, False, False], row
    assert [row["parts"] for row in of["product"] + of["turn"]] == [2, 1, 1, 5, 4, 3, 1]
    assert all(row["same"] > 0.98 for row in of["turn"]), of["turn"]
    assert of["half"][0]["fused"]
    assert of["half"][0]["pieces"] == [[64], True]
    assert of["places"][1]["cut"] > 0
    fused = {"qwen3": True, "mistral": True, "gemma2": False, "gpt_oss": False, "qwen3_5": False}
    assert {row["model"]: row["fused"] for row in of["sampler"]} == fused
    for row in of["sampler"]:
        assert row["same"] == 1.0, row
        assert row["tokens"] >= 12, row


def test_kernels_and_sampler_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    check_grid(run("paged_grid.py", TRITON_INTERPRET="1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter test runs everywhere")
def test_kernels_and_sampler_compiled() -> None:
    check_grid(run("paged_grid.py"))


def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    built, small = run("compile_kernels.py")
    assert built["decode"]["mma"] > 0  # type: ignore[index]
    assert built["paths"]["wgmma"] > 0  # type: ignore[index]
    for name, kernel in built.items():
        assert kernel["shared"] < 113 * 1024, name  # type: ignore[index]
    early = {name for name, kernel in built.items() if kernel["early"]}  # type: ignore[index]
    known = {"decode", "join", "add_norm", "gated", "summed_apart", "rotate_store", "gate", "find", "nucleus"}
    assert known <= early
    # Until a kernel waits it reads only what was there before the last one that was launched plainly.
    tables = {
        "decode": ["ITEMS", "LENGTHS", "TABLE"],
        "join": ["SPLITS"],
        "rotate_store": ["COS", "POSITIONS", "SIN", "SLOTS"],
    }
    attention = {"shared": "decode", "direct": "decode", "capped decode": "decode", "sunk decode": "decode"}
    same = attention | {"sunk join": "join", "rotate_store 4": "rotate_store"}
    for name in early:
        kernel: dict[str, object] = built[name]  # type: ignore[assignment]
        kind = same.get(name, name)
        assert kernel["events"] == ["wait", "launch_dependents"], name
        assert kernel["writes_late"], name
        assert kernel["reads_first"] == tables.get(kind, []), name
        asked = {"decode": ["KEYS", "VALUES"], "gated": ["WEIGHT"], "summed_apart": ["WEIGHT"]}
        assert kernel["asks_first"] == asked.get(kind, []), name
        assert kind != "decode" or kernel["mma_after"] == 0, "what starts earlier takes the place of pieces"
    sizes = [tried for kernels in small.values() for tried in kernels.values()]  # type: ignore[attr-defined]
    assert any(first > SMALL_GPU for first, _ in sizes), "else no smaller tile is needed"
    assert all(last <= SMALL_GPU for _, last in sizes), small


def test_the_first_tile_that_fits_is_launched_and_remembered() -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is published for Linux on x86-64 only")
    from attnrl.attention.fitting import launch

    asked = []

    def run_with(room: int) -> Callable[[int], None]:
        def run(size: int) -> None:
            asked.append(size)
            if size > room:
                raise errors.OutOfResources(size, room, "shared memory")

        return run

    for _ in range(2):
        launch("small", [4, 3, 2, 1], run_with(2))
    assert asked == [4, 3, 2, 2]
    with pytest.raises(errors.OutOfResources, match="shared memory"):
        launch("none", [2, 1], run_with(0))


def test_hopper_kernel_on_a_cpu() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    rows = run("hopper_grid.py", "--cpu")
    assert [row["items"] for row in rows] == [24, 36, 4, 48, 30, 40]  # more than programs: each takes several in turn
    assert not any(row["fits"] for row in rows[:3]), "a CPU is no Hopper GPU"
    for row in rows:
        assert row["error"] < 2e-2, row  # type: ignore[operator]
    for row in rows[3:]:
        assert row["fits"] == [False] * 4, row
        assert row["lse"] < 1e-4, row  # type: ignore[operator]


def test_hopper_gate_and_up_on_a_cpu() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    rows = run("gated_grid.py", "--cpu")
    assert [row["shape"] for row in rows] == [[200, 264], [70, 136], [1100, 128], [300, 280], [130, 296]]
    for row in rows:
        assert not row["fits"], "a CPU is no Hopper GPU"
        assert row["error"] < 2e-2, row  # type: ignore[operator]


def test_hopper_gate_and_up_compile_without_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    kernels = run("gated_grid.py", "--compile")
    assert [built["wide"] for built in kernels] == [128, 64]
    for built in kernels:
        assert all(built[name] for name in ("products", "copies", "matrix_stores", "waits")), built
        assert built["loops_from"] == ["0"], "a number that changes from turn to turn became a constant"
        assert built["shared"] <= 227 * 1024, built  # type: ignore[operator]


@pytest.mark.gpu
@on_hopper
def test_hopper_gate_and_up_compiled() -> None:
    rows = run("gated_grid.py")
    assert all(row["fits"] for row in rows[5:]), rows
    for row in rows:
        assert row["error"] < 2e-2, row  # type: ignore[operator]


@pytest.mark.gpu
@on_hopper
def test_hopper_kernel_compiled() -> None:
    rows = run("hopper_grid.py")
    assert len(rows) == 12
    assert all(row["fits"] for row in rows[:6])
    for row in rows:
        assert row["error"] < 3e-2, row  # type: ignore[operator]
    for row in rows[6:]:
        assert row["fits"] == [True, False, False, False], row
        assert row["lse"] < 1e-3, row  # type: ignore[operator]


def test_hopper_kernel_compiles_without_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    kernels = run("compile_hopper.py")
    assert [(k["head"], k["packed"]) for k in kernels] == [(64, False), (128, False), (64, True), (128, True)]
    for kernel in kernels:
        head = int(kernel["head"])  # type: ignore[call-overload]
        assert kernel["threads"] == 384, kernel
        assert kernel["shared"] < 227 * 1024, kernel  # type: ignore[operator]
        assert kernel["products"] > 0, kernel  # type: ignore[operator]
        parts = 2 if kernel["packed"] else 4  # whole tiles, in the loop and in its first turn ahead of it; or pages
        assert kernel["copies"] == 2 * head // 64 * (parts + 1), kernel
        assert kernel["wide_stores"] == head // 8, kernel
        assert kernel["lse_stores"] == (4 if kernel["packed"] else 0), kernel  # two rows a thread, two warpgroups
        assert kernel["registers"] >= 216, kernel  # type: ignore[operator]  # what keeps the loop from spilling


def test_pages_are_held_shared_and_let_go() -> None:
    pool = PagePool([LayerShape(2, 4, 6), LayerShape(1, 4, 2)], 6, torch.float32, torch.device("cpu"))
    assert pool.page_bytes == PAGE * 4 * (2 * 10 + 6)
    a = pool.take(3)
    b = np.concatenate([pool.share(a[:2]), pool.take(1)])
    assert sorted({*a.tolist(), *b.tolist()}) == [1, 2, 3, 4]  # never page 0
    assert (pool.used, pool.free, pool.peak) == (4, 1, 4)
    pool.drop(a)
    assert pool.used == 3  # b still holds two of a's
    pool.drop(b)
    assert (pool.used, pool.peak) == (0, 4)
    with pytest.raises(AssertionError):
        pool.take(6)


def test_tokens_are_stored_in_slots_and_copied() -> None:
    pool = PagePool([LayerShape(2, 4, 4)], 4, torch.float32, torch.device("cpu"))
    keys = torch.arange(24.0).view(3, 2, 4)
    slots = torch.tensor([PAGE + 5, 2 * PAGE, 3 * PAGE - 1])
    pool.store(0, slots, keys, -keys)
    assert torch.equal(pool.keys[0][1, :, 5], keys[0])
    assert torch.equal(pool.values[0][2, :, 0], -keys[1])
    pool.copy(0, slots[1:], torch.tensor([3 * PAGE + 7, PAGE]))
    assert torch.equal(pool.keys[0][3, :, 7], keys[1])
    assert torch.equal(pool.values[0][1, :, 0], -keys[2])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.lists(st.integers(0, 12), min_size=9, max_size=9),
    st.integers(1, 400),
    st.integers(1, 6),
)
def test_every_token_of_every_row_is_read_by_exactly_one_item(
    pages: list[int], alike: list[int], chunk: int, most: int
) -> None:
    """Also where neighbours share beginnings, and whatever the pieces' size; an item's rows hold the same pages."""
    table = np.zeros((len(pages), 40), np.int32)
    free = iter(range(1, 10_000))
    for row, count in enumerate(pages):
        shared = min(alike[row], count - 1, pages[row - 1] - 1) if row else 0
        own = [next(free) for _ in range(count - shared)]
        table[row, :count] = [*table[row - 1, :shared], *own]
    lengths = np.array(pages) * PAGE - np.arange(len(pages)) % PAGE
    groups = groups_of(common_pages(table, np.array(pages)), len(pages), most)
    items = cut(groups, lengths, chunk)
    read = [np.zeros(n, int) for n in lengths]
    splits: list[list[int]] = [[] for _ in pages]
    for first, rows, start, end, split in [*items.single_I5.tolist(), *items.shared_I5.tolist()]:
        assert rows <= most
        for row in range(first, first + rows):
            stop = int(lengths[row]) if end == ENDLESS else end
            assert (table[row, : pages_for(stop)] == table[first, : pages_for(stop)])[start // PAGE :].all()
            read[row][start:stop] += 1
            splits[row].append(split)
    assert all((tokens == 1).all() for tokens in read)
    assert [sorted(s) for s in splits] == [list(range(n)) for n in items.splits_R]
