"""The kernels over pages and of drawing on small shapes; prints one JSON line a case. Run under TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python paged_grid.py        # on a CPU; with a CUDA device and without the variable: compiled
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnrl.attention import paged_triton, paths_triton
from attnrl.attention.pages import PAGE, common_pages, cut, groups_of, pages_for
from attnrl.local import paged_state
from attnrl.local.draw import draw
from attnrl.local.draw_triton import draw_into
from attnrl.local.fused_triton import add_norm, rotate_store
from attnrl.local.products_triton import fits, gated, summed_apart
from attnrl.local.sampler import Sampler
from attnrl.types import Request, Sampling, as_ids

SCALE = 0.3
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def dense(
    q_HD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKE: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> Any:
    """Attention of the newest position over all, in float64: [H, E]."""
    groups = q_HD.shape[0] // k_SKD.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k_SKD, v_SKE))
    scores = torch.einsum("hd,shd->hs", q_HD.double(), k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, len(k) - window)] = -torch.inf
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.double()[:, None]], 1)
    return torch.einsum("hs,she->he", scores.softmax(-1)[:, : len(k)], v)


def scoring(heads: int, softcap: float | None, sinks: bool) -> dict[str, Any]:
    """A soft-cap, and sinks of which one is far below and one far above any score."""
    sinks_H = torch.linspace(-3, 3, heads, device=DEVICE)
    sinks_H[0], sinks_H[-1] = -300, 300
    return {"softcap": softcap, "sinks_H": sinks_H if sinks else None}


def filled(pages: int, kv: int, dim: int, value: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(pages, kv, PAGE, n, device=DEVICE).to(dtype) for n in (dim, value))  # type: ignore[return-value]


def run_of(pool: torch.Tensor, pages: Any, length: int) -> torch.Tensor:
    """The tokens of a path, [length, K, D]."""
    return pool[torch.as_tensor(pages).long().to(pool.device)].transpose(1, 2).flatten(0, 1)[:length]


def decode_case(
    lengths: list[int],
    *,
    heads: int = 4,
    kv: int = 2,
    dim: int = 16,
    value: int | None = None,
    window: int | None = None,
    shared: int = 0,
    chunk: int = 64,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Rows of these lengths (the newest token included), the first three sharing pages; one idle row at the end."""
    torch.manual_seed(0)
    value = value or dim
    rows, columns = len(lengths), pages_for(max(lengths))
    order = np.random.default_rng(0).permutation(rows * columns).astype(np.int32) + 1
    table = order.reshape(rows, columns)
    table[1:3, :shared] = table[0, :shared]
    keys, values = filled(rows * columns + 1, kv, dim, value, dtype)
    keys[0] = values[0] = torch.nan  # nobody's page
    for row, length in enumerate(lengths):  # what was never written may be anything
        if length < columns * PAGE:
            flat = torch.as_tensor(table[row]).long()[torch.arange(length, columns * PAGE) // PAGE]
            values[flat.to(DEVICE), :, (torch.arange(length, columns * PAGE) % PAGE).to(DEVICE)] = torch.nan
    held = np.array([pages_for(n) for n in lengths])
    groups = groups_of(common_pages(table, held), rows, 4)
    items = cut(groups, np.array(lengths), chunk)
    most = max(1, int(items.splits_R.max()))
    most = 1 << (most - 1).bit_length()
    to = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)  # noqa: E731
    q = torch.randn(rows + 1, heads, dim, device=DEVICE).to(dtype)
    part = torch.full((rows + 1, most, heads, value), torch.nan, device=DEVICE)
    how: dict[str, Any] = {"window": window, **scoring(heads, softcap, sinks)}
    splits = None if most == 1 else to(np.append(items.splits_R, 0).astype(np.int32))
    out = paged_triton.decode(
        q,
        keys,
        values,
        to(np.concatenate([table, np.zeros((1, columns), np.int32)])),
        to(np.append(np.array(lengths) - 1, 0)),
        to(np.concatenate([items.single_I5, np.zeros((2, 5), np.int32)])),  # padding does nothing
        to(items.shared_I5) if len(items.shared_I5) else None,
        splits,
        None if splits is None else (part, part[..., 0].contiguous()),
        scale=SCALE,
        **how,
        tile=(4, 2),
    )
    worst = 0.0
    for row, length in enumerate(lengths):
        expected = dense(q[row], run_of(keys, table[row], length), run_of(values, table[row], length), **how)
        worst = max(worst, float((out[row].view(heads, value).double() - expected).abs().max()))
    return {"kind": "decode", "error": worst, "shared": len(items.shared_I5), "splits": most}


def paths_case(*, dim: int = 16, value: int = 16, heads: int = 4, kv: int = 2, **how: Any) -> Any:
    """Two paths that share a page, queries in blocks: one starts in the middle of a page, one at the root."""
    torch.manual_seed(1)
    how = {"window": None, "softcap": None, "sinks": False} | how
    how |= scoring(heads, how["softcap"], how.pop("sinks"))
    keys, values = filled(8, kv, dim, value, torch.float32)
    table = np.array([[3, 1, 7], [3, 5, 0]], np.int32)
    blocks = [(0, 16, 40, 0), (16, 10, 56, 0), (26, 16, 0, 1), (42, 16, 16, 1), (58, 9, 32, 1)]
    q = torch.randn(67, heads, dim, device=DEVICE)
    arrays = (torch.from_numpy(table).to(DEVICE), torch.tensor(blocks, dtype=torch.int32, device=DEVICE))
    out = paths_triton.paths(q, keys, values, *arrays, 16, scale=SCALE, **how, tile=(32, 4, 2))
    worst = 0.0
    for first, count, position, path in blocks:
        for i in range(count):
            length = position + i + 1
            seen = (run_of(pool, table[path], length) for pool in (keys, values))
            expected = dense(q[first + i], *seen, **how)
            worst = max(worst, float((out[first + i].view(heads, value).double() - expected).abs().max()))
    return {"kind": "paths", "error": worst}


def places_case(rows: int, last: int) -> dict[str, Any]:
    """Where new tokens go, of rows at the ends of pages and of some that ran on past the last position."""
    lengths = torch.arange(rows, device=DEVICE) * 7 % (4 * PAGE)
    lengths[:3] = torch.tensor([0, PAGE - 1, PAGE])
    table = torch.randint(9000, (rows, 6), dtype=torch.int32, device=DEVICE)[:, :4]  # rows lie apart
    slots, positions = paged_triton.places(table, lengths, last)
    wrong = [
        int(slots[r]) != int(table[r, int(lengths[r]) // PAGE]) * PAGE + int(lengths[r]) % PAGE
        or int(positions[r]) != min(int(lengths[r]), last)
        for r in range(rows)
    ]
    return {"kind": "places", "error": float(sum(wrong)), "cut": int((lengths > last).sum())}


def draw_case(vocabulary: int, temperature: float, top_p: float = 1.0, dtype: Any = torch.float32) -> dict[str, Any]:
    """Draws against `draw`, with impossible and equal tokens, at uniform numbers with 0 and the last below 1."""
    torch.manual_seed(2)
    rows = 24
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
    logits[5:9] = logits[5:9].round()  # many equals
    logits[:, ::3] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[3, 0] = 1.0
    logits[4, vocabulary // 2] = torch.nan
    logits = logits.to(dtype)
    uniform = torch.rand(rows, 2, device=DEVICE)
    uniform[0, 1], uniform[1, 1] = 0.0, 1 - 2.0**-24
    tokens, lengths = torch.zeros(2, rows, dtype=torch.int64, device=DEVICE)
    ids, logprobs = torch.full((rows, 2), -1, device=DEVICE), torch.zeros(rows, 2, device=DEVICE)
    column = torch.ones(1, dtype=torch.int64, device=DEVICE)
    draw_into(logits, uniform, column, tokens, lengths, ids, logprobs, temperature, top_p)
    good = [row for row in range(rows) if row != 4]
    expected, expected_logprobs = draw(logits[good], uniform[good, 1], Sampling(temperature, top_p))
    return {
        "kind": "draw",
        "same": float((ids[good, 1] == expected).float().mean()),
        "error": float((logprobs[good, 1] - expected_logprobs).abs().max()),
        "nan_is_seen": bool(logprobs[4, 1].isnan()) and 0 <= int(ids[4, 1]) < vocabulary,
        "untouched": bool((ids[:, 0] == -1).all()),
        "state": bool((tokens == ids[:, 1]).all() and (lengths == 1).all()),
    }


def product_case(tokens: int, width: int, inner: int) -> dict[str, Any]:
    """A gated feed-forward part of few tokens, its sum with the residual and the norm, against float64."""
    torch.manual_seed(3)
    x, residual = torch.randn(2, tokens, width + 8, device=DEVICE).half()[..., :width]  # rows lie apart
    gate, up = (torch.randn(2, inner, width, device=DEVICE) / width**0.5).half()
    down, weight = (torch.randn(width, inner, device=DEVICE) / inner**0.5).half(), torch.rand(width, device=DEVICE)
    hidden = gated(x, torch.cat([gate, up]))
    parts = summed_apart(hidden, down)
    total, normed = add_norm(residual.contiguous(), parts, weight.half(), 1e-6)
    wide = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    expected = residual.double() + hidden.double() @ down.double().T
    scaled = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    pairs = ((hidden, wide), (parts.sum(0), hidden.double() @ down.double().T), (total, expected), (normed, scaled))
    return {
        "kind": "product",
        "error": max(float((ours.double() - theirs).abs().max()) for ours, theirs in pairs),
        "parts": len(parts),
        "fits": [fits(x), fits(x.float()), fits(x.new_zeros(65, width))],
    }


def turn_case(tokens: int, width: int, dim: int, *, bias: bool, norms: bool, whole: bool = False) -> dict[str, Any]:
    """Queries, keys and values projected in parts, or as a `whole`, turned and stored, against float64."""
    torch.manual_seed(4)
    heads, kv = 6, 2
    x = torch.randn(tokens, width, device=DEVICE).half()
    weight = (torch.randn((heads + 2 * kv) * dim, width, device=DEVICE) / width**0.5).half()
    shift = torch.randn(len(weight), device=DEVICE).half() if bias else None
    sizes = [heads * dim, kv * dim, kv * dim]
    parts = summed_apart(x, weight)
    wide = x.double() @ weight.double().T + (0.0 if shift is None else shift.double())
    given = (parts, shift) if not whole else (wide.half(), None)
    position = torch.randperm(90, device=DEVICE)[:tokens]
    angle = torch.rand(90, dim // 2, device=DEVICE).repeat(1, 2) * 6
    cos, sin = angle.cos().half(), angle.sin().half()
    slots = torch.randperm(8 * PAGE, device=DEVICE)[:tokens]
    keys, values = torch.zeros(2, 8, kv, PAGE, dim, device=DEVICE).half()
    scales = torch.rand(2, dim, device=DEVICE).half() + 0.5
    qkv, biases = (None if y is None else y.split(sizes, -1) for y in given)
    norm = (*scales, 1e-6) if norms else None
    turned = rotate_store(qkv, biases, cos, sin, position, slots, keys, values, norm)

    def expected(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # rounded where the modules round
        y = y.unflatten(1, (-1, dim)).float()
        if norms:
            y = ((y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).half() * scale).float()
        halves = torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
        turn, shift = ((table[position].float()[:, None] * x).half() for table, x in ((cos, y), (sin, halves)))
        return turn + shift

    q, k, v = wide.half().split(sizes, -1)
    stored = [pool[slots // PAGE, :, slots % PAGE] for pool in (keys, values)]
    wanted = expected(q, scales[0]), expected(k, scales[1]), v.unflatten(1, (-1, dim))
    gaps = [a - b for a, b in zip((turned.view(tokens, heads, dim), *stored), wanted, strict=True)]
    return {
        "kind": "turn",
        "error": max(float(gap.abs().max()) for gap in gaps),
        "same": min(float((gap == 0).float().mean()) for gap in gaps),
        "parts": 1 if whole else len(parts),
    }


def sampler_case(kind: str) -> dict[str, Any]:
    """The whole sampler over pages with fused kernels, against the one over slots with transformers' own forward."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4}
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    elif kind == "gemma2":
        sizes |= {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=9)).eval()
    elif kind == "gpt_oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        model = GptOssForCausalLM(GptOssConfig(**sizes, sliding_window=9)).eval()
    elif kind == "qwen3_5":
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
        kinds = ["linear_attention", "full_attention"]
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, layer_types=kinds)).eval()
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=9)).eval()
    rng = np.random.default_rng(0)
    base = as_ids(rng.integers(0, 37, 300))
    contexts = [base[:3], base[:3], base[:40], as_ids([*base, 5]), as_ids([*base, 6]), as_ids([*base, 6])]
    requests = [Request(context, 5, seed) for seed, context in enumerate(contexts)]
    expected = Sampler(model, stop_ids=[1]).generate(requests, Sampling(), version=0)
    model = model.to(DEVICE)
    sampler = Sampler(model, stop_ids=[1], rows=8, check_every=3, paged=True)
    sampler.generate(requests[:2], Sampling(), version=0)  # no position of these is as far as those to come
    got = sampler.generate(requests, Sampling(), version=0)
    return {
        "kind": "sampler",
        "model": kind,
        "fused": sampler.stats.fused,
        "same": float(np.mean([a.ids.tolist() == b.ids.tolist() for a, b in zip(expected, got, strict=True)])),
        "error": max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(expected, got, strict=True)),
        "tokens": sum(len(r.ids) for r in got),
    }


def half_case() -> dict[str, Any]:
    """The sampler in half precision, whose projections are summed in parts with biases, its attention cut as where it
    starts early; against the model's own log-probs in float32.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 288, "intermediate_size": 200, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05}
    wide = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    for name, parameter in wide.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.7)
    model = copy.deepcopy(wide).half().to(DEVICE)
    wide = copy.deepcopy(model).float()
    rng = np.random.default_rng(0)
    contexts = [as_ids(rng.integers(0, 61, length)) for length in (5, 33, 100, 290)]
    paged_state.room, paged_state.MIN_CHUNK = lambda device: 24, 32
    asked: list[int] = []
    whole, piece = paged_state.PagedState._plan_items, paged_state.piece

    def noted(*args: Any) -> int:
        asked.append(piece(*args))
        return asked[-1]

    shapes = set()

    def planned(state: Any, *args: Any) -> None:
        whole(state, *args)
        shapes.add(state.shape)

    paged_state.piece, paged_state.PagedState._plan_items = noted, planned  # type: ignore[method-assign]
    sampler = Sampler(model, stop_ids=[], rows=8, check_every=3, paged=True)
    rollouts = sampler.generate([Request(context, 7, i) for i, context in enumerate(contexts)], Sampling(), version=0)
    worst = 0.0
    with torch.no_grad():
        for context, rollout in zip(contexts, rollouts, strict=True):
            ids = torch.tensor(np.concatenate([context, rollout.ids]).astype(np.int64), device=DEVICE)
            of_TV = wide(input_ids=ids[None]).logits[0, len(context) - 1 : -1].log_softmax(-1)
            own = of_TV.gather(1, ids[len(context) :, None])[:, 0].cpu().numpy()
            worst = max(worst, float(np.abs(own - rollout.logprobs).max()))
    pieces = [sorted(set(asked)), any(shape.splits > 1 for shape in shapes)]
    return {"kind": "half", "error": worst, "fused": sampler.stats.fused, "pieces": pieces}


if __name__ == "__main__":
    cases = [
        decode_case([1, 33, 70, 64], chunk=32),
        decode_case([1, 33, 70, 64], chunk=1000),  # one piece a row: nothing to join
        decode_case([300, 290, 261, 40], shared=8, chunk=128),
        decode_case([300, 290, 261, 40], shared=8, chunk=128, window=37),
        decode_case([5, 90], heads=6, kv=1, dim=24, value=40, window=9, chunk=32),
        decode_case([70, 33], dim=64, dtype=torch.float16),
        decode_case([300, 290, 261, 40], shared=8, chunk=128, sinks=True),
        decode_case([1, 33, 70, 64], chunk=1000, softcap=0.8, sinks=True),
        decode_case([5, 90], heads=6, kv=1, window=9, chunk=32, softcap=0.8),
        paths_case(),
        paths_case(window=11),
        paths_case(dim=24, value=8, heads=3, kv=1),
        paths_case(softcap=0.8, sinks=True),
        paths_case(window=11, sinks=True),
        draw_case(61, 1.0),
        draw_case(9000, 0.7),
        draw_case(61, 1.0, 0.9),
        draw_case(9000, 0.6, 0.5),
        draw_case(700, 0.6, 0.95, torch.bfloat16),
        sampler_case("qwen3"),
        sampler_case("mistral"),
        sampler_case("gemma2"),
        sampler_case("gpt_oss"),
        sampler_case("qwen3_5"),
        product_case(3, 48, 200),  # neither width is whole turns
        product_case(17, 256, 64),
        product_case(64, 2048, 96),
        product_case(5, 64, 1100),  # the last part is shorter than the others
        turn_case(3, 400, 8, bias=True, norms=False),
        turn_case(17, 300, 24, bias=False, norms=True),
        turn_case(5, 64, 8, bias=False, norms=False, whole=True),
        half_case(),
        places_case(3, 1 << 40),
        places_case(300, 90),
    ]
    for case in cases:
        print(json.dumps(case))
