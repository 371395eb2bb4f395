"""One iteration the plain way: what a trainer does that takes its parts as they come.

vLLM draws every response (its prefix cache on; a branch is a new prompt, prefilled again where the cache lost it), or
transformers' `generate` where vLLM is not installed; FCI from dense attention in the model's dtype, a layer at a time;
the update over padded paths, each leaf by itself, full logits in float32, transformers' own kernels and checkpointing,
torch's AdamW over float32 weights under autocast. It replays what our own iteration did: the same contexts and numbers
of new tokens, the same responses scored, the same samples trained on.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from attnrl.types import Ids, Request, Sample, ScoreRequest

PAD = 0
PHASES = ("generate", "score", "update")


@dataclass(slots=True)
class Work:
    """What one iteration asked of its engine."""

    requests: list[Request] = field(default_factory=list)
    scored: list[ScoreRequest] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class Clock:
    """Seconds and peak GPU memory by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_gb: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize()
            self.peak_gb[name] = torch.cuda.max_memory_allocated() / 1e9
        self.seconds[name] = time.perf_counter() - began


def run(folder: str, work: Work, phases: Sequence[str], *, group_tokens: int, delta: int) -> dict[str, Any]:
    """Seconds and memory of these phases over the work. `group_tokens`: padded tokens of a microbatch."""
    clock = Clock()
    found: dict[str, Any] = {"seconds": clock.seconds, "peak_gb": clock.peak_gb}
    if "generate" in phases:
        found["sampler"] = generate(folder, work.requests, clock)
    if "score" in phases:
        model = load(folder)
        with clock.phase("score"):
            for request in work.scored:
                dense_fci(model, request, delta)
        del model
    if "update" in phases:
        update(folder, work.samples, group_tokens, clock)
        found["update_tokens"] = sum(len(s.response) for s in work.samples)
    return found


def load(folder: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).to(device).eval()


def generate(folder: str, requests: Sequence[Request], clock: Clock) -> str:
    """Draws as many tokens as each request got in our run; the time to start the sampler does not count."""
    try:
        import vllm
    except ImportError:
        model = load(folder)
        with clock.phase("generate"):
            for request in requests:  # lengths differ: one by one
                ids = torch.from_numpy(request.context.astype(np.int64))[None].to(model.device)
                new = {"min_new_tokens": request.max_tokens, "max_new_tokens": request.max_tokens}
                model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, pad_token_id=PAD, **new)
        return "transformers"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # in this process it would keep its memory from what follows
    longest = max(len(r.context) + r.max_tokens for r in requests)
    engine = vllm.LLM(folder, dtype="bfloat16", max_model_len=longest + 1, gpu_memory_utilization=0.85, seed=0)
    prompts = [{"prompt_token_ids": r.context.tolist()} for r in requests]

    def settings(request: Request) -> Any:
        new = {"max_tokens": request.max_tokens, "min_tokens": request.max_tokens}
        return vllm.SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False, **new)

    short = replace(requests[0], max_tokens=4)
    engine.generate(prompts[:2], [settings(short)] * 2, use_tqdm=False)  # compiles what log-probs take
    with clock.phase("generate"):
        engine.generate(prompts, [settings(r) for r in requests], use_tqdm=False)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"vllm {vllm.__version__}"


@torch.no_grad()
def dense_fci(model: Any, request: ScoreRequest, delta: int) -> np.ndarray:
    """FCI of every step (Eq. 4-6) from each layer's whole attention matrix; the response's log-probs come with it."""
    from transformers import AttentionInterface

    length, count = len(request.prompt) + len(request.response), len(request.steps)
    means = torch.zeros(count, length, device=model.device, dtype=model.dtype)  # row by row, the mean over a step
    for number, step in enumerate(request.steps):
        means[number, len(request.prompt) + step.start : len(request.prompt) + step.stop] = 1 / (step.stop - step.start)
    later = torch.ones(count, count, device=model.device, dtype=torch.bool).tril(-delta)
    future = torch.ones(length, length, dtype=torch.bool, device=model.device).triu(1)
    best = torch.zeros(count, device=model.device)

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any = None, scaling: float = 1.0, **_: Any) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(-1, -2) * scaling).masked_fill_(future, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        by_step = torch.einsum("qi,hij,kj->hqk", means, weights[0], means).float()
        torch.maximum(best, (by_step * later).sum(1).amax(0), out=best)
        return (weights @ v).transpose(1, 2), None

    AttentionInterface.register("plain_dense", attention)
    before, model.config._attn_implementation = model.config._attn_implementation, "plain_dense"
    try:
        ids = torch.from_numpy(np.concatenate([request.prompt, request.response]).astype(np.int64))[None]
        model(input_ids=ids.to(model.device), use_cache=False).logits[0].float().log_softmax(-1)
    finally:
        model.config._attn_implementation = before
    found: np.ndarray = best.cpu().numpy()
    return found


def update(folder: str, samples: Sequence[Sample], group_tokens: int, clock: Clock, updates: int = 2) -> None:
    """Two optimizer steps over padded rows, with the frozen reference's log-probs; a first small one warms up."""
    policy, reference = load(folder, torch.float32), load(folder)
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=policy.device.type == "cuda")
    shortest = min(samples, key=lambda s: len(s.prompt) + len(s.response))
    step(policy, reference, [[shortest]], adam)
    halves = [list(samples[i::updates]) for i in range(updates)]
    with clock.phase("update"):
        for half in halves:
            step(policy, reference, padded_groups(half, group_tokens), adam)


def padded_groups(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    """Samples of like length together, so that padding costs little."""
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: -len(s.prompt) - len(s.response)):
        width = max((len(s.prompt) + len(s.response) for s in groups[-1]), default=0) if groups else 0
        if groups and width * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def step(policy: Any, reference: Any, groups: Sequence[Sequence[Sample]], adam: torch.optim.Optimizer) -> None:
    total = sum(len(s.response) for group in groups for s in group)
    for group in groups:
        rows, mask, kept = padded([np.concatenate([s.prompt, s.response]) for s in group], policy.device)
        for i, s in enumerate(group):
            kept[i, : len(s.prompt)] = False
        advantages, old = torch.zeros(2, *rows.shape, device=policy.device)
        for i, s in enumerate(group):
            at = slice(len(s.prompt), len(s.prompt) + len(s.response))
            advantages[i, at] = torch.from_numpy(np.array(s.advantages)).to(policy.device)
            old[i, at] = torch.from_numpy(np.array(s.logprobs)).to(policy.device)
        with torch.no_grad():
            base = token_logprobs(reference, rows, mask)
        with torch.autocast(policy.device.type, torch.bfloat16):
            new = token_logprobs(policy, rows, mask)
        keep, advantages, old = kept[:, 1:], advantages[:, 1:], old[:, 1:]
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        kl = (base - new).exp() - (base - new) - 1
        (((0.001 * kl - gain) * keep).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    adam.step()
    adam.zero_grad()


def padded(rows: Sequence[Ids], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [B, T] padded on the right, the attention mask, and the same as bool."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[i, : len(row)] = 1
    return ids.to(device), mask.to(device), mask.bool().to(device)


def token_logprobs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens 1.. of each row, from full logits. [B, T - 1]"""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
