"""Compiles the Hopper kernel for compute capability 9.0, which needs no GPU, and prints what came out as JSON."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attnrl.scoring.fci_hopper import WARPS, _column_sums

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TYPES = {
    "queries": f"tensordesc<bf16[64, 128],{LAYOUT!r}>",
    "K": "*bf16",
    "BIAS": "*fp32",
    "QMIN": "*i32",
    "TABLE": "*i32",
    "OUT": "*fp32",
    "scale2": "fp32",
}
CONSTANTS = {"G": 6, "N": 64, "STAGES": 3, "WINDOW": True}

if __name__ == "__main__":
    names = _column_sums.arg_names
    source = GluonASTSource(
        _column_sums,
        {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in CONSTANTS.items()},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    products = built.asm["ptx"].count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
    print(json.dumps({"products": products, "shared": built.metadata.shared}))
