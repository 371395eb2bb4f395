"""The Hopper kernels of attention's gradients against autograd over dense attention; prints one JSON line a case.

python back_grid.py --cpu       # their source on a CPU, see `gluon_on_cpu`; TRITON_INTERPRET=1
python back_grid.py --compile   # for compute capability 9.0, without a GPU: one JSON object
python back_grid.py             # compiled, on a Hopper GPU
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from grids import dense

CPU = "--cpu" in sys.argv
if CPU:
    import gluon_on_cpu

    gluon_on_cpu.install()

from attnrl.attention import back_hopper  # noqa: E402
from attnrl.attention.trie import Runs  # noqa: E402

DEVICE = "cpu" if CPU else "cuda"
Spans = list[tuple[int, int]]  # where a path's queries start and stop
EDGES: Spans = [(0, 1), (0, 33), (100, 230), (0, 130), (127, 128), (190, 257)]
LONG: Spans = [(0, n) for n in (1, 31, 64, 65, 127, 128, 129, 256, 257, 1500)] + [(60, 130), (1000, 1100), (333, 1777)]


def case(spans: Spans, heads: int, kv: int, dim: int) -> dict[str, Any]:
    torch.manual_seed(0)
    fresh, lengths = [stop - start for start, stop in spans], [stop for _, stop in spans]
    tokens, keys = sum(fresh), sum(lengths)
    product = torch.randn(tokens, (heads + 2 * kv) * dim).to(DEVICE, torch.bfloat16)
    q = (1.5 * product[:, : heads * dim]).view(tokens, heads, dim)
    k, v = torch.randn(2, keys, kv, dim).to(DEVICE, torch.bfloat16)
    g = torch.randn(tokens, heads, dim).to(DEVICE, torch.bfloat16)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    outs, sums = [], []
    split = zip(exact[0].split(fresh), exact[1].split(lengths), exact[2].split(lengths), spans, strict=True)
    for q_part, k_part, v_part, (start, _) in split:
        out, lse = dense(q_part, k_part, v_part, start)
        outs.append(out)
        sums.append(lse)
    out, lse = torch.cat(outs), torch.cat(sums, 1)
    wanted = torch.autograd.grad(out, exact, g.double())
    tables = Runs(tuple(fresh), tuple(lengths)).blocks(torch.device(DEVICE))
    given = (g, q, k, v, out.detach().bfloat16(), lse.detach().float().contiguous(), *tables)
    found = back_hopper.back(*given, scale=dim**-0.5)
    again = found if CPU else back_hopper.back(*given, scale=dim**-0.5)
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]
    worst = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, wanted, strict=True)]
    return {
        "shape": [heads, kv, dim, tokens, keys],
        "errors": errors,
        "worst": worst,
        "same": all(torch.equal(x, y) for x, y in zip(found, again, strict=True)),
    }


def build() -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def boxes(shape: str, swizzle: int, bits: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
        return f"tensordesc<{'bf16' if bits == 16 else 'fp32'}[{shape}],{layout!r}>"

    found = {}
    for name, rows, constants in (
        ("_queries_back", 128, {"G": 6, "WIDE": 6, "STAGES": 2}),
        ("_keys_back", 64, {"K": 2, "G": 6, "PARTS": 3, "STAGES": 4}),
    ):
        for head in (64, 128):
            kernel = getattr(back_hopper, name)
            names = kernel.arg_names
            types = dict.fromkeys(("queries", "grads"), boxes(f"64, {head}", 128, 16))
            types |= dict.fromkeys(("keys", "values"), boxes(f"{rows}, {head}", 128, 16))
            types |= {"stats": boxes("1, 64", 0, 32), "scale": "fp32", "scale2": "fp32", "DQ": "*bf16"}
            types |= dict.fromkeys(("DK", "DV", "STATS"), "*fp32")
            types |= dict.fromkeys(("STARTS", "BLOCKS", "SLOTS", "ITEMS"), "*i32")
            signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
            source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
            ptx = built.asm["ptx"]
            found[f"{name} {head}"] = {
                "threads": built.metadata.num_warps * 32,
                "shared": built.metadata.shared,
                "products": ptx.count("wgmma.mma_async"),
                "copies": ptx.count("cp.async.bulk.tensor.2d"),
            }
    return found


def main() -> None:
    torch.set_num_threads(1)
    if "--compile" in sys.argv:
        print(json.dumps(build()))
        return
    cases = [(EDGES, 4, 2, 128), (EDGES[1:4], 6, 2, 64), (EDGES[:3], 3, 1, 128)]
    if not CPU:
        cases = [(LONG, heads, kv, 128) for heads, kv in ((12, 2), (32, 8), (28, 4))] + cases
    for arguments in cases:
        print(json.dumps(case(*arguments)), flush=True)


if __name__ == "__main__":
    main()
