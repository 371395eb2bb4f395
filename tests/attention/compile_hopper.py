"""Compiles the Hopper kernel, over pages and over packed keys, for compute capability 9.0, without a GPU.

Prints what came out, one JSON line a kernel.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attnrl.attention.paths_hopper import LAYOUT, _paths

TYPES = {"TABLE": "*i32", "BLOCKS": "*i32", "OUT": "*bf16", "LSE": "*fp32", "scale2": "fp32"}
CONSTANTS = {"K": 2, "G": 6, "BN": 128, "STAGES": 2}


def build(head: int, packed: bool) -> dict[str, object]:
    names = _paths.arg_names
    box = [128 if packed else 32, 64]
    shapes = {"queries": [64, head], "keys": box, "values": box}
    types = TYPES | {name: f"tensordesc<bf16{shape},{LAYOUT!r}>" for name, shape in shapes.items()}
    constants = CONSTANTS if packed else CONSTANTS | {"LSE": None, "lse_pitch": None}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("OUT", "out_pitch")}
    source = GluonASTSource(_paths, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = built.asm["ptx"]
    return {
        "head": head,
        "packed": packed,
        "threads": built.metadata.num_warps * 32,
        "shared": built.metadata.shared,
        "products": ptx.count(f"wgmma.mma_async.sync.aligned.m64n{head}k16.f32.bf16.bf16"),
        "copies": ptx.count("cp.async.bulk.tensor.2d"),
        "wide_stores": ptx.count("st.global.v4.b32"),
        "lse_stores": ptx.count("st.global.b32"),
        "registers": max(int(n) for n in re.findall(r"setmaxnreg.dec.sync.aligned.u32\s+(\d+)", ptx)),
    }


if __name__ == "__main__":
    for packed in (False, True):
        for head in (64, 128):
            print(json.dumps(build(head, packed)))
