"""The Triton kernels on small shapes, under Triton's interpreter, against dense float64 attention."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")


def test_small_grid_under_the_interpreter() -> None:
    # A process of its own: Triton reads TRITON_INTERPRET when kernels are defined.
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "kernel_grid.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    broken = rows.pop()
    assert broken["nan_steps"] == [True, True, False, False]  # the query lies in the third step, which has one after it
    assert broken["late_logprob_error"] < 1e-5
    assert broken["late_entropy_error"] < 1e-5
    head_rows = [rows.pop() for _ in range(2)]
    for row in head_rows:
        assert row["logprob_error"] < 2e-5, row
        assert row["entropy_error"] < 2e-5, row
        assert row["entropy"] > 0.5, row
    assert len(rows) == 12
    assert {row["head"] for row in rows} >= {16, 32, 64, 80, 128, 256}
    for row in rows:
        assert row["relative_error"] < 1e-5, row
        assert row["relative_error_max"] < 1e-5, row
        assert row["lse_error"] < 1e-5, row
        assert row["norm"] > 0.1 or row["steps"] == 1, row


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter test runs everywhere")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head", [64, 128])
def test_compiled_kernel_with_its_measured_tile(dtype: str, head: int) -> None:
    from kernel_grid import run_case

    row = run_case("cuda", lengths=[700, 33, 260], heads=6, groups=3, head=head, dtype=dtype, mean=12.0)
    assert row["relative_error"] < 1e-5, row
    assert row["norm"] > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads_first", [False, True])
def test_hopper_kernel(window: int | None, heads_first: bool) -> None:
    from kernel_grid import run_case

    from attnrl.scoring.fci_triton import Tile

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Gluon kernel is for compute capability 9")
    row = run_case(
        "cuda",
        lengths=[700, 33, 1, 260],
        heads=6,
        groups=3,
        head=128,
        dtype="bfloat16",
        mean=12.0,
        window=window,
        heads_first=heads_first,
        tile=Tile(128, 64, 4, 3, kernel="gluon"),
    )
    assert row["kinds"] == ["gluon"]
    assert row["relative_error"] < 1e-5, row
    assert row["norm"] > 0.1


def test_hopper_kernel_compiles_without_a_gpu() -> None:
    # A process of its own: Triton's compiler complains of its own leaks when the process ends.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_hopper.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    assert built["products"] > 0
    assert built["shared"] < 113 * 1024  # two programs share a multiprocessor


def test_tiles_on_disk_may_be_missing_broken_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnrl.scoring import fci_launch
    from attnrl.scoring.fci_triton import Tile

    monkeypatch.setenv("ATTNRL_CACHE", str(tmp_path / "cache"))
    assert fci_launch._remembered("a") is None
    fci_launch._remember("a", Tile(64, 32, 4, 2))
    fci_launch._remember("b", Tile())
    assert fci_launch._remembered("a") == Tile(64, 32, 4, 2)
    path = fci_launch.cache_file()
    path.write_text(json.dumps({"a": {"keys": 64}}))
    assert fci_launch._remembered("a") is None  # written by a version with other fields
    path.write_text('{"a": ')
    assert fci_launch._remembered("a") is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNRL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="for this process only"):
        fci_launch._remember("a", Tile())
