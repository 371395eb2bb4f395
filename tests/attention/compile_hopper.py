"""Compiles the Hopper kernel over pages for compute capability 9.0, without a GPU, and prints what came out as JSON."""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attnrl.attention.paths_hopper import _paths

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
BOX = f"tensordesc<bf16[32, 64],{LAYOUT!r}>"
TYPES = {"keys": BOX, "values": BOX, "TABLE": "*i32", "BLOCKS": "*i32", "OUT": "*bf16", "scale2": "fp32"}
CONSTANTS = {"K": 2, "G": 6, "BN": 128, "STAGES": 2}


def build(head: int) -> dict[str, int]:
    names = _paths.arg_names
    types = TYPES | {"queries": f"tensordesc<bf16[64, {head}],{LAYOUT!r}>"}
    signature = {name: "constexpr" if name in CONSTANTS else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("OUT", "out_pitch")}
    source = GluonASTSource(_paths, signature, {(names.index(n),): v for n, v in CONSTANTS.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = built.asm["ptx"]
    return {
        "threads": built.metadata.num_warps * 32,
        "shared": built.metadata.shared,
        "products": ptx.count(f"wgmma.mma_async.sync.aligned.m64n{head}k16.f32.bf16.bf16"),
        "copies": ptx.count("cp.async.bulk.tensor.2d"),
        "wide_stores": ptx.count("st.global.v4.b32"),
        "registers": max(int(n) for n in re.findall(r"setmaxnreg.dec.sync.aligned.u32\s+(\d+)", ptx)),
    }


if __name__ == "__main__":
    print(json.dumps({str(head): build(head) for head in (64, 128)}))
