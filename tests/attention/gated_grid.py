"""The Hopper kernel of gate and up against float32 products; prints one JSON line a case.

python gated_grid.py --cpu       # its source on a CPU, see `gluon_on_cpu`; without an option: compiled, on a Hopper GPU
python gated_grid.py --compile   # what comes out of the compiler for compute capability 9.0, without a GPU
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

CPU = "--cpu" in sys.argv
if CPU:
    import gluon_on_cpu

    gluon_on_cpu.install()

from attnrl.local import gated_hopper  # noqa: E402

if CPU:
    gated_hopper._silu = torch.nn.functional.silu
    gated_hopper.gdc_wait = lambda: None
    gated_hopper.early = lambda device: {"EARLY": True}
DEVICE = "cpu" if CPU else "cuda"


def case(
    tokens: int,
    columns: int,
    inputs: int,
    programs: int | None,
    wide: int | None,
    order: tuple[int, int] = (32, 2),
) -> dict[str, object]:
    """Tokens are part of a wider matrix; a product of float32 is rounded where the modules round."""
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs + 8).to(DEVICE, torch.bfloat16)[:, :inputs]
    weight = (torch.randn(2 * columns, inputs) * inputs**-0.5).to(DEVICE, torch.bfloat16)
    gate, up = (x.float() @ weight.float().T).bfloat16().float().chunk(2, 1)
    truth = torch.nn.functional.silu(gate).bfloat16().float() * up
    wide = wide or gated_hopper.width(x, weight)
    out = gated_hopper.gated(x, weight, programs=programs, wide=wide, order=order).float()
    gap = ((out - truth).abs() / (truth.abs() + 0.25)).nan_to_num(torch.inf)
    return {"error": float(gap.max()), "shape": list(out.shape), "fits": gated_hopper.fits(x, weight)}


def build(wide: int) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = {"tokens_from": [64, 64], "weights_from": [wide, 64], "to": [64, wide]}
    constants = {"STAGES": gated_hopper.STAGES[wide], "GROUP": 32, "LEAD": 2, "EARLY": True}
    names = gated_hopper._gated.arg_names
    types = {name: f"tensordesc<bf16{box},{layout!r}>" for name, box in boxes.items()}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(gated_hopper._gated, signature, {(names.index(n),): v for n, v in constants.items()}, {})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = built.asm["ptx"]
    return {
        "wide": wide,
        "threads": built.metadata.num_warps * 32,
        "shared": built.metadata.shared,
        "products": ptx.count(f"wgmma.mma_async.sync.aligned.m64n{2 * wide}k16.f32.bf16.bf16"),
        "copies": ptx.count("cp.async.bulk.tensor.2d"),
        "matrix_stores": ptx.count("stmatrix.sync.aligned.m8n8.x4"),
        "waits": ptx.count("griddepcontrol.wait"),
        "loops_from": sorted(set(re.findall(r"scf.for %\w+ = %c(-?\d+)_", built.asm["ttgir"]))),
        "registers": max(int(n) for n in re.findall(r"setmaxnreg.dec.sync.aligned.u32\s+(\d+)", ptx)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--compile" in sys.argv:
        for wide in gated_hopper.STAGES:
            print(json.dumps(build(wide)))
        sys.exit()
    cases: list[tuple[Any, ...]] = [
        (200, 264, 512, 2, 128, (2, 2)),
        (70, 136, 392, 3, 64, (16, 3)),
        (1100, 128, 400, 4, 128, (4, 0)),
        (300, 280, 512, 4, 64),
        (130, 296, 448, 2, 64, (1, 5)),
    ]
    if not CPU:
        cases += [(tokens, 8960, 1536, None, None) for tokens in (384, 512, 640, 1024, 1999, 16384)]
    for arguments in cases:
        print(json.dumps(case(*arguments)))
