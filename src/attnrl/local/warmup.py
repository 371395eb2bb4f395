"""Supervised warm-up on solutions of made-up tasks, for a base policy without any download, or on the user's own."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnrl.attention.trie import apart
from attnrl.config import TaskConfig
from attnrl.data.texts import stop_token_ids
from attnrl.errors import ConfigError, TrainingError
from attnrl.local.examples import Example, Examples, Recipe, Source, lay_out
from attnrl.local.models import (
    DTYPES,
    check_model_path,
    load_tokenizer,
    load_weights,
    pick_device,
    pick_dtype,
    quiet,
)
from attnrl.local.optimizer import MasterAdamW
from attnrl.local.pairs import PairFile, final_answer, load_pairs
from attnrl.local.sampler import Sampler
from attnrl.local.shape import Shape, new_model
from attnrl.local.warmup_options import WarmupOptions
from attnrl.policy.logprobs import pack_attention, pack_logprobs, token_logprobs
from attnrl.policy.packing import Pack
from attnrl.types import Request, Sampling

MARK = "\u241f"  # stands for the problem while the chat template is taken apart
# Share of the budget used, and the metrics known by then: none before the first update. Called from the start on, after
# every forward and backward pass, but for checks at most once a second.
Observer = Callable[[float, dict[str, float]], None]
BATCH_TOKENS, MICROBATCH_TOKENS = {"cuda": 32_768, "cpu": 4096}, {"cuda": None, "cpu": 1024}


def template_ends(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a problem; a line break after it where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n"
    message = [{"role": "user", "content": MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition(MARK)
    return before, after


@dataclass(slots=True)
class Warmup:
    """One warm-up run: `train` it, then `save` it."""

    model: Any
    tokenizer: Any
    source: Source
    options: WarmupOptions
    log: Path | None = None  # metrics as JSON lines
    updates: int = 0
    tokens: int = 0
    accuracy: float | None = None  # None: not known, or no held-out solution states an answer
    history: list[dict[str, float]] = field(default_factory=list)
    optimizer: MasterAdamW = field(init=False)
    sampler: Sampler = field(init=False)
    held_out: list[Example] = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self.optimizer = MasterAdamW(
            self.model.parameters(),
            betas=options.betas,
            weight_decay=options.weight_decay,
            clip_norm=options.clip_norm,
        )
        self.sampler = Sampler(self.model, stop_ids=stop_token_ids(self.model.generation_config, self.tokenizer))
        self.held_out = self.source.held_out(options.evaluation_tasks)
        if options.target_accuracy is not None and all(e.answer is None for e in self.held_out):
            raise ConfigError("target_accuracy: no held-out response states an answer in a \\boxed{} or after ####")

    def train(self, observer: Observer | None = None) -> dict[str, float]:
        """Run until the budget or the target is reached; returns the metrics of the last check."""
        options = self.options
        workers = min(14, max(1, (os.cpu_count() or 2) - 1)) if options.workers is None else options.workers
        start, checks = 0.0, 0
        losses: list[torch.Tensor] = []
        tell = _Teller(observer)
        tell(0.0, dict, known=0)
        with closing(self.source.batches(workers)) as stream:
            for batch in stream:
                now = time.monotonic()
                start = start or now  # the clock starts when the first batch is there
                share = self.share(now - start)
                if share >= (checks + 1) / options.evaluations or share >= 1.0:
                    checks += 1
                    metrics = self._check(losses, now - start)
                    losses.clear()
                    reached = options.reached(self.accuracy or 0.0, metrics["warmup/loss"])
                    if observer:
                        observer(share, metrics)
                    if share >= 1.0 or reached:
                        break

                def told(tokens: int, share: float = share) -> None:
                    def by_now() -> dict[str, float]:
                        loss = {"warmup/loss": losses[-1].item()} if losses else {}
                        return {**loss, "warmup/tokens": float(self.tokens + tokens)}

                    tell(share, by_now, known=2 if losses else 1)

                losses.append(self.update(batch, options.learning_rate(share, self.updates), told))
                told(0)
        return metrics

    def share(self, seconds: float) -> float:
        """Of the budget used so far."""
        by_time = seconds / self.options.seconds if self.options.seconds else 0.0
        by_tokens = self.tokens / self.options.tokens if self.options.tokens else 0.0
        return max(by_time, by_tokens)

    def update(self, batch: Examples, lr: float, told: Callable[[int], None] | None = None) -> torch.Tensor:
        """One optimizer step on the mean negative log-prob of the solution tokens; returns it, on the device.

        `told` hears after each forward and backward pass how many tokens of the batch are done.
        """
        total = torch.zeros((), device=self.model.device)
        done = 0
        for pack in _packs(batch, self.model.device, self.options.microbatch_tokens):
            with pack_attention(self.model, pack):
                logprobs_N, _ = token_logprobs(self.model, pack)
                loss = -logprobs_N.sum() / len(batch.targets_N)
                loss.backward()
            total += loss.detach()
            done += pack.tokens
            if told is not None:
                told(min(done, batch.tokens))
        self.optimizer.step(lr, self.optimizer.gradient_norm())
        self.updates += 1
        self.tokens += batch.tokens
        return total

    def check(self) -> dict[str, float]:
        """Held-out accuracy by sampling: share of prompts with a known answer whose sampled one is exactly that.

        Of the user's own pairs also the mean negative log-prob of the held-out response tokens.
        """
        metrics: dict[str, float] = {}
        asked = [e for e in self.held_out if e.answer is not None]
        if asked:
            metrics |= self._sampled(asked)
        own = [e for e in self.held_out if e.task is None]
        if own:
            batch = lay_out(own, 0)
            packs = _packs(batch, self.model.device, self.options.microbatch_tokens)
            total = sum(pack_logprobs(self.model, pack).sum().item() for pack in packs)
            metrics["warmup/held_out_loss"] = -total / len(batch.targets_N)
        return metrics

    def _sampled(self, asked: list[Example]) -> dict[str, float]:
        longest = max(len(e.solution) for e in asked)
        limit = longest + longest // 2
        requests = [Request(e.prompt, limit, seed=i) for i, e in enumerate(asked)]
        rollouts = self.sampler.generate(requests, Sampling(temperature=self.options.temperature), version=0)
        right = []
        for example, rollout in zip(asked, rollouts, strict=True):
            found = final_answer(self.tokenizer.decode(rollout.ids.tolist(), skip_special_tokens=True))
            right.append(found == example.answer and rollout.finish == "stop")
        self.accuracy = float(np.mean(right))
        levels = np.array([e.task.difficulty if e.task is not None else 0 for e in asked])
        by_level = {
            f"warmup/accuracy_{d}": float(np.mean(np.array(right)[levels == d])) for d in sorted(set(levels)) if d
        }
        return {
            "warmup/accuracy": self.accuracy,
            **by_level,
            "warmup/length": float(np.mean([len(r.ids) for r in rollouts])),
            "warmup/truncated": float(np.mean([r.finish == "length" for r in rollouts])),
        }

    def _check(self, losses: list[torch.Tensor], seconds: float) -> dict[str, float]:
        loss = torch.stack(losses).mean().item() if losses else math.nan
        if losses and not math.isfinite(loss):
            raise TrainingError("the warm-up's loss is not finite; try a lower --lr")
        metrics = {
            "warmup/updates": float(self.updates),
            "warmup/tokens": float(self.tokens),
            "warmup/seconds": seconds,
            "warmup/tokens_per_second": self.tokens / max(seconds, 1e-9),
            "warmup/loss": loss,
            **self.check(),
        }
        self.history.append(metrics)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
        return metrics

    def save(self, path: Path) -> None:
        """Write model and tokenizer in Hugging Face format, and what they were made of to warmup.json."""
        exported = copy.deepcopy(self.model).to(torch.float32)
        exported.load_state_dict(self._float32_weights())
        with quiet():
            exported.to(DTYPES[self.options.save_dtype]).save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        record = {
            **self.source.described(),
            "options": self.options.model_dump(),
            "result": self.history[-1] if self.history else {},
        }
        (path / "warmup.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _float32_weights(self) -> dict[str, torch.Tensor]:
        """The optimizer's masters by name: a float32 file of a bfloat16 run loses nothing."""
        masters = {id(p): m for p, m in zip(self.optimizer.parameters, self.optimizer.masters, strict=True)}
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: masters[id(p)].detach() for name, p in named}


def prepare_warmup(
    output: Path,
    spec: TaskConfig,
    options: WarmupOptions,
    *,
    shape: Shape | None = None,
    model: str | Path | None = None,
    pairs: PairFile | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> Warmup:
    """A warm-up of a new model of `shape`, or of the existing `model`, that logs to output/metrics.jsonl.

    It learns the solutions of made-up tasks, or the responses of `pairs`.
    """
    if (output / "config.json").exists():
        raise ConfigError(f"{output} already holds a model; choose another --output")
    if pairs is not None and model is None:
        raise ConfigError("--data needs --model: a new model's tokenizer knows the words of made-up tasks alone")
    target = pick_device(device)
    kind = "cuda" if target.type == "cuda" else "cpu"
    tokens = options.batch_tokens or BATCH_TOKENS[kind]
    passes = options.microbatch_tokens or MICROBATCH_TOKENS[kind]
    options = options.model_copy(update={"batch_tokens": tokens, "microbatch_tokens": passes})
    if model is not None:
        path = check_model_path(model)
        loaded, tokenizer = load_weights(path, device=str(target), dtype=dtype), load_tokenizer(path)
    else:
        from attnrl.data.task_tokenizer import task_tokenizer

        tokenizer = task_tokenizer(spec)
        loaded = new_model(shape or Shape(), tokenizer, seed=options.seed).to(target, pick_dtype(dtype, target))
    log = output / "metrics.jsonl"
    if pairs is not None:
        source: Source = load_pairs(pairs, tokenizer, tokens=tokens, seed=options.seed)
        output.mkdir(parents=True, exist_ok=True)
        return Warmup(loaded, tokenizer, source, options, log=log)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output)
    before, after = template_ends(tokenizer)
    source = Recipe(
        spec=spec,
        tokenizer_file=str(output / "tokenizer.json"),
        before=before,
        after=after,
        end=int(tokenizer.eos_token_id),
        tokens=tokens,
        seed=options.seed,
    )
    return Warmup(loaded, tokenizer, source, options, log=log)


class _Teller:
    """An observer that hears the first word at once, the first metrics as soon as there are some, then one a second."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._last = 0.0
        self._known = -1

    def __call__(self, share: float, metrics: Callable[[], dict[str, float]], known: int) -> None:
        """Metrics are asked for only where they are told: a loss waits for the device."""
        now = time.monotonic()
        if self._observer is None or (now - self._last < 1.0 and known <= self._known):
            return
        self._last, self._known = now, max(known, self._known)
        self._observer(share, metrics())


def _packs(batch: Examples, device: torch.device, tokens: int | None) -> list[Pack]:
    """The batch as packs of about `tokens` tokens, whole sequences each."""
    starts = np.cumsum([0, *batch.lengths])
    groups = (starts[:-1] // tokens if tokens else np.zeros(len(batch.lengths), np.int64)).astype(np.int64)
    packs = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        low, high = int(starts[members[0]]), int(starts[members[-1] + 1])
        kept = (batch.source_N >= low) & (batch.source_N < high)
        if not kept.any():
            continue
        lengths = tuple(int(batch.lengths[m]) for m in members)

        def tensor(values: np.ndarray) -> torch.Tensor:
            made = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
            return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)

        nothing = torch.zeros(0, device=device)
        packs.append(
            Pack(
                ids_T=tensor(batch.ids_T[low:high]),
                positions_T=tensor(np.concatenate([np.arange(n) for n in lengths])),
                lengths=lengths,
                runs=apart(lengths),
                source_U=tensor(batch.source_N[kept] - low),
                targets_U=tensor(batch.targets_N[kept]),
                advantages_N=nothing,
                behaviour_N=nothing,
                rows=(),
                counts=(int(kept.sum()),),
            )
        )
    return packs
