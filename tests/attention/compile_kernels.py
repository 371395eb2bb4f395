"""Compiles kernels of sampler and learner for compute capability 9.0, those over pages also for 8.6 at large heads.

No GPU is needed. Prints a JSON object for each of the two.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnrl.attention import paged_triton, paths_triton
from attnrl.local import draw_triton, fused_triton, learn_triton, products_triton

WRITE = re.compile(r"\b(st|red|atom)\.global")
BF16, INT32, INT64, FLOAT = "*bf16", "*i32", "*i64", "*fp32"
POOL = {"Q": BF16, "KEYS": BF16, "VALUES": BF16, "TABLE": INT32, "LENGTHS": INT64, "ITEMS": INT32, "OUT": BF16}
POOL |= {"PART": FLOAT, "LSE": FLOAT, "BLOCKS": INT32, "SPLITS": INT32, "scale2": "fp32"}
ODD = POOL | {"inner2": "fp32", "SINKS": BF16}  # a soft-cap and sinks
HEADS = {"H": 12, "K": 2, "G": 6, "D": 128, "E": 128, "BD": 128, "BE": 128, "PAGE": 32, "WINDOW": False}
HEADS |= {"PRECISION": "tf32"}
LAYER = dict.fromkeys(
    (
        "X",
        "Y",
        "WEIGHT",
        "SUM",
        "NORMED",
        "Q",
        "KNEW",
        "VNEW",
        "COS",
        "SIN",
        "KEYS",
        "VALUES",
        "QNORM",
        "KNORM",
        "GATE",
        "UP",
        "OUT",
    ),
    BF16,
)
LAYER |= {"POSITIONS": INT64, "SLOTS": INT64, "eps": "fp32"}
PLACES = {"SLOTS": INT64, "POSITIONS": INT64, "last": "i64"}
DRAW = {
    "LOGITS": BF16,
    "TOPS": FLOAT,
    "SUMS": FLOAT,
    "UNIFORM": FLOAT,
    "LOGPROBS": FLOAT,
    "inverse": "fp32",
    "top_p": "fp32",
}
DRAW |= {"COLUMN": INT64, "TOKENS": INT64, "LENGTHS": INT64, "IDS": INT64}
LEARN = dict.fromkeys(("X", "WEIGHT", "G_NORMED", "G_SUM", "DX", "OUT", "COS", "SIN", "GATE", "UP", "G"), BF16)
LEARN |= {"LOGITS": BF16, "TARGETS": INT64, "DWEIGHT": FLOAT, "LOGPROBS": FLOAT, "ENTROPY": FLOAT}
LEARN |= {"G_LOGPROB": FLOAT, "G_ENTROPY": FLOAT, "eps": "fp32", "inverse": "fp32"}
PRODUCT = {"GATED": False, "BT": 64, "BN": 64, "BK": 128, "EVEN": True}
ROTATE = {"BH": 16, "BK": 2, "BHALF": 64}
BIASED = dict.fromkeys(("Q", "KNEW", "VNEW"), FLOAT) | dict.fromkeys(("Q_BIAS", "K_BIAS", "V_BIAS"), BF16)
TURN = {"H": 12, "D": 128, "BH": 16, "BHALF": 64}
NONE = ("inner2", "SINKS", "Q_BIAS", "K_BIAS", "V_BIAS")  # where a case does not give them
STARTED = {"EARLY": True, "AHEAD": 128}  # as on a GPU of this kind
# name, kernel, types, constants, warps, stages
KERNELS: list[tuple[str, Any, dict[str, str], dict[str, Any], int, int]] = [
    ("decode", paged_triton._decode, POOL, HEADS | {"BM": 16, "DIRECT": False}, 1, 3),
    ("shared", paged_triton._decode, POOL, HEADS | {"BM": 32, "DIRECT": False}, 2, 3),
    ("direct", paged_triton._decode, POOL, HEADS | {"BM": 16, "DIRECT": True}, 1, 3),
    ("join", paged_triton._join, POOL, HEADS | {"BS": 8}, 1, 3),
    ("paths", paths_triton._paths, POOL, HEADS | {"BM": 64, "BN": 64}, 4, 3),
    ("capped decode", paged_triton._decode, ODD, HEADS | {"BM": 16, "DIRECT": True, "SINKS": None}, 1, 3),
    ("sunk decode", paged_triton._decode, ODD, HEADS | {"BM": 16, "DIRECT": True, "inner2": None}, 1, 3),
    ("sunk join", paged_triton._join, ODD, HEADS | {"BS": 8}, 1, 3),
    ("sunk paths", paths_triton._paths, ODD, HEADS | {"BM": 64, "BN": 64}, 4, 3),
    ("places", paged_triton._places, POOL | PLACES, {"BR": 128, "PAGE": 32}, 4, 3),
    ("add_norm", fused_triton._add_norm, LAYER, {"BW": 2048, "PARTS": 1}, 4, 3),
    ("add_norm 4", fused_triton._add_norm, LAYER | {"Y": FLOAT}, {"BW": 2048, "PARTS": 4}, 4, 3),
    ("gated", products_triton._product, LAYER, PRODUCT | {"S": 1, "GATED": True, "BK": 64}, 4, 4),
    ("summed_apart", products_triton._product, LAYER | {"OUT": FLOAT}, PRODUCT | {"S": 4, "BT": 16}, 4, 3),
    ("rotate_store", fused_triton._rotate_store, LAYER, HEADS | ROTATE | {"NORM": True, "PARTS": 1}, 4, 3),
    ("rotate_store 4", fused_triton._rotate_store, LAYER | BIASED, HEADS | ROTATE | {"NORM": False, "PARTS": 4}, 1, 3),
    ("norm_back", learn_triton._norm_back, LEARN, {"BW": 2048, "ROWS": 32, "ADD": True}, 4, 3),
    ("rotate", learn_triton._rotate, LEARN, TURN | {"BACK": False}, 4, 3),
    ("rotate back", learn_triton._rotate, LEARN, TURN | {"BACK": True}, 4, 3),
    ("gate_back", learn_triton._gate_back, LEARN, {"B": 1024}, 4, 3),
    ("stats_back", learn_triton._stats_back, LEARN, {"BV": 4096}, 8, 3),
    ("gate", fused_triton._gate, LAYER, {"B": 2048}, 4, 3),
    ("chunk_stats", draw_triton._chunk_stats, DRAW, {"B": 4096}, 4, 3),
    ("find", draw_triton._find, DRAW, {"B": 4096, "BC": 64}, 8, 3),
    ("nucleus", draw_triton._nucleus, DRAW, {"B": 4096}, 16, 3),
    ("nucleus 32", draw_triton._nucleus, DRAW | {"LOGITS": FLOAT}, {"B": 4096}, 16, 3),
]


def build(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int, capability: int = 90
) -> Any:
    """The compiled kernel; pointers and pitches are multiples of 16, as they are in use."""
    names = kernel.arg_names
    none = {name: None for name in NONE if name not in types}
    known = {name: value for name, value in (STARTED | none | constants).items() if name in names}
    signature = {name: "constexpr" if name in known else types.get(name, "i32") for name in names}
    told = {name for name, parameter in zip(names, kernel.params, strict=True) if not parameter.do_not_specialize}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name.endswith("pitch") and name in told)
    }
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in known.items()}, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def read_first(kernel: Any, types: dict[str, str], constants: dict[str, Any], ptx: str) -> tuple[list[str], list[str]]:
    """The parameters behind what is loaded before the wait, and behind what is only asked for."""
    left_out = {*STARTED, *constants} | {name for name in NONE if name not in types}
    names = [name for name in kernel.arg_names if name not in left_out]
    behind: dict[str, set[str]] = {}
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for line in ptx.partition("griddepcontrol.wait")[0].splitlines():
        line = re.sub(r"^@!?%p\d+\s+", "", line.strip())
        if given := re.match(r"ld\.param\S*\s+(\{[^}]*\}|%\w+),\s*\[\w*_param_(\d+)", line):
            number = int(given[2])
            source = {names[number] if number < len(names) else "?"}
            behind.update((register, source) for register in re.findall(r"%\w+", given[1]))
        elif "ld.global" in line or "cp.async" in line:
            place = re.search(r"\[\s*(%\w+)", line)
            pointers = behind.get(place[1], {"?"}) if place else {"?"}
            found["prefetch" in line] |= {
                name for name in pointers if name == "?" or types.get(name, "").startswith("*")
            }
            behind |= {register: set() for register in re.findall(r"%\w+", line.partition("[")[0])}
        elif made := re.match(r"[a-z][\w.:]*\s+(%\w+)(?:\|%\w+)?,\s*(.*);", line):
            behind[made[1]] = set().union(*(behind.get(register, set()) for register in re.findall(r"%\w+", made[2])))
    return sorted(found[False]), sorted(found[True])


def on_small_gpus(dtype: str, tile: tuple[int, int, int], stages: int) -> dict[str, list[int]]:
    """Shared memory of the kernels over pages at head size 256, for the first and the last tile that is tried."""
    types = {name: dtype if kind == BF16 else kind for name, kind in POOL.items()}
    heads = HEADS | dict.fromkeys(("D", "E", "BD", "BE"), 256) | {"H": 8, "K": 4, "G": 2, "EARLY": False}
    heads["PRECISION"] = "ieee" if dtype == FLOAT else "tf32"

    def size(kernel: Any, constants: dict[str, Any], stages: int) -> int:
        return int(build(kernel, types, heads | constants, 4, stages, 86).metadata.shared)

    shared = [size(paged_triton._decode, {"BM": 32, "DIRECT": False}, n) for n in (stages, 1)]
    tiles = paths_triton.down_from(tile)
    paths = [size(paths_triton._paths, {"BM": 64, "BN": keys}, n) for keys, _, n in (tiles[0], tiles[-1])]
    return {"shared": shared, "paths": paths}


if __name__ == "__main__":
    report = {}
    for name, kernel, types, constants, warps, stages in KERNELS:
        built = build(kernel, types, constants, warps, stages)
        ptx = built.asm["ptx"]
        reads, asks = read_first(kernel, types, constants, ptx)
        until = ptx.partition("griddepcontrol.launch_dependents")[0]
        report[name] = {
            "shared": built.metadata.shared,
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "wide_copies": ptx.count("cp.async.cg.shared.global"),
            "early": "EARLY" in kernel.arg_names,
            "events": re.findall(r"griddepcontrol\.(\w+)", ptx),
            "reads_first": reads,
            "asks_first": asks,
            "writes_late": not WRITE.search(until),  # after it has waited and passed on
            "mma_after": len(re.findall(r"\bmma\.sync|wgmma\.mma_async", ptx))
            - len(re.findall(r"\bmma\.sync|wgmma\.mma_async", until)),
        }
    small = {"half": on_small_gpus(BF16, (64, 4, 3), 3), "float32": on_small_gpus(FLOAT, (32, 4, 2), 2)}
    print(json.dumps(report))
    print(json.dumps(small))
