"""A look at everything before the GPU hours are spent: `attnrl.check`.

Nothing is trained and nothing written. Each finding is "ok", "look" (it may be meant so) or "wrong".
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attnrl.algo.adaptive import most_points
from attnrl.algo.promises import trees_by
from attnrl.backend import generate_by, metrics_by, score_by, update_by
from attnrl.config import Config, load_config
from attnrl.console import time_span
from attnrl.iteration import Outcome
from attnrl.launch.data import (
    Say,
    check_room,
    evaluation_prompts,
    evaluation_records,
    evaluation_samples,
    prompt_stream,
    train_records,
    without_missing,
)
from attnrl.launch.evaluating import what_is_drawn
from attnrl.launch.forecast import GB, host_memory, memory, shape_of, work
from attnrl.launch.models import check_engine, decoder, load_tokenizer, open_engine
from attnrl.launch.parts import scoring_of, segmenting
from attnrl.launch.training import make_ready, say_plainly
from attnrl.launch.trying import Drawn, try_parts
from attnrl.types import (
    Attempt,
    Prompt,
    Request,
    Sample,
    Sampling,
    ScoreRequest,
    Scoring,
    Verdict,
    as_floats,
    counted,
)

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.data.records import Record
    from attnrl.reward import Rewards

Level = Literal["ok", "look", "wrong"]
NO_LR = 1e-30  # a learning rate that moves no float32 weight above 1e-22, and no score at all
GRADED = 5  # rows that are graded with gold and nonsense
NONSENSE = "I have no idea. \\boxed{\\text{nothing of the kind}}"
MEAN_GAP = {"float32": 1e-4, "bfloat16": 0.02}  # nats between sampler and learner that rounding explains
SAME = 1e-6  # nats: scores of unchanged weights


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check."""

    level: Level
    about: str
    said: str

    def __str__(self) -> str:
        first, *rest = self.said.split("\n")
        return "\n".join([f"{self.level:<6}{self.about:<10}{first}", *(" " * 16 + line for line in rest)])


@dataclass(slots=True)
class Findings:
    """What was found so far; each is said at once."""

    say: Say
    rows: list[Finding] = field(default_factory=list)

    def add(self, level: Level, about: str, said: str) -> None:
        self.rows.append(Finding(level, about, said))
        self.say(str(self.rows[-1]))

    def ok(self, good: bool, about: str, said: str, otherwise: Level = "look") -> None:
        self.add("ok" if good else otherwise, about, said)


def check(
    config: Config | str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    prompts: int = 2,
    responses: int = 4,
    say: Say = say_plainly,
) -> list[Finding]:
    """What a run of this config would meet, found in a minute: data, prompt, rewards, memory, a few responses, what the
    parts of [algo] make of them, whether sampler and learner agree, and whether an update at no learning rate leaves
    the policy as it is.

    `responses` are drawn for each of `prompts` prompts. Nothing is written. A mistake in the config or a part that
    breaks its promise raises, as it would in training.
    """
    config = load_config(config, overrides)
    found = Findings(say)
    ready = make_ready(config)
    bound, path = ready.bound, ready.model
    check_engine(ready.engine, config, path)
    found.add("ok", "config", f"parts, loss, rewards and engine {config.engine.name!r} are there; model {path}")
    config, missing = without_missing(config)
    for said in missing:
        found.add("wrong", "data", said)
    about_data: list[str] = []
    records = train_records(config, about_data.append)
    tokenizer = load_tokenizer(path)
    stream = prompt_stream(config, records, tokenizer, about_data.append)
    chosen, _ = stream.draw({}, prompts)
    found.add("ok", "data", "\n".join([f"{len(records):,} rows", *about_data]))
    held_out = {}
    if config.evaluation.every:
        held_out = evaluation_prompts(config, evaluation_records(config), tokenizer)
        look_at_evaluation(config, held_out, found)
    check_room(config, path, held_out, stream)
    look_at_prompt(chosen[0], tokenizer, found)
    with ready.rewards as rewards:
        grade_golds(config, records, rewards, found)
        forecast_memory(config, path, found)
        still = config.model_copy(update={"update": config.update.model_copy(update={"lr": NO_LR})})
        with open_engine(ready.engine, still, path, tokenizer) as backend:
            drawn = draw(config, bound, chosen, responses, backend, tokenizer)
            answers, decode = zip(drawn.prompts, drawn.rollouts, strict=True), decoder(tokenizer)
            verdicts = rewards.grade([Attempt.of(p, r.ids, r.finish, decode) for p, r in answers])
            look_at_responses(config, drawn, verdicts, tokenizer, found)
            look_at_parts(config, try_parts(config, bound, drawn, segmenting(bound, tokenizer), decode), found)
            compare_logprobs(getattr(backend, "dtype", None) or dtype_of(config), drawn, found)
            rates = update_nothing(drawn, backend, found)
            metrics_by(backend)
    trees = trees_by(bound["budget"], float(np.mean([v.right for v in verdicts])), config.algo.group)
    evaluated = sum(len(rows) * evaluation_samples(config)[name] for name, rows in held_out.items())
    forecast_time(config, drawn, trees, most_points(bound["rule"]) or 0, rates, evaluated, found)
    return found.rows


def look_at_evaluation(config: Config, prompts: Mapping[str, Sequence[Prompt]], found: Findings) -> None:
    """What an evaluation of the run draws, and whether it may take far longer than an iteration."""
    lines = [what_is_drawn(config, prompts)]
    limit, trained = config.evaluation.max_response_tokens, config.sampling.max_response_tokens
    if longer := limit > 4 * trained:
        lines.append(f"in training {trained:,}: see evaluation.max_response_tokens")
    found.ok(not longer, "held out", "\n".join(lines))


def look_at_prompt(prompt: Prompt, tokenizer: Any, found: Findings) -> None:
    """One prompt as the model will see it, special tokens and all."""
    ids = prompt.ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=False)
    said = f"{len(ids)} tokens, as the model sees them:\n{text}"
    odd, strange = [], ids.count(getattr(tokenizer, "unk_token_id", None))
    words = prompt.problem.split()
    if lost := sum(word in text for word in words) * 2 < len(words):
        odd.append("most of the problem is not in it: template or tokenizer drop it (is tokenizer.json in its place?)")
    if not getattr(tokenizer, "chat_template", None):
        odd.append("the tokenizer has no chat template: this is the bare text")
    if strange:
        odd.append(f"{strange} of its tokens are unknown to the tokenizer: the model cannot read them")
    if (start := getattr(tokenizer, "bos_token_id", None)) is not None and ids[:2] == [start, start]:
        odd.append("it begins with two start tokens")
    found.ok(not odd, "prompt", "\n".join([said, *odd]), "wrong" if lost or strange * 10 > len(ids) else "look")


def grade_golds(config: Config, records: Sequence[Record], rewards: Rewards, found: Findings) -> None:
    """Five rows over the whole of the data: golds must be right and earn more than nonsense, which must be wrong."""
    places = sorted({round(i) for i in np.linspace(0, len(records) - 1, GRADED)})
    rows = [records[i] for i in places]
    golds = rewards.grade([_answer(row, f"The answer is \\boxed{{{row.answers[0]}}}.") for row in rows])
    others = rewards.grade([_answer(row, NONSENSE) for row in rows])
    refused = [row for row, verdict in zip(rows, golds, strict=True) if not verdict.right]
    taken = [row for row, verdict in zip(rows, others, strict=True) if verdict.right]
    lines = [f"{len(rows)} rows: {len(rows) - len(refused)} golds right, {len(rows) - len(taken)} times nonsense wrong"]
    lines += [f"{row.where}: its own gold {row.answers[0]!r} is not right when boxed" for row in refused]
    lines += [f"{row.where}: nonsense is right against {row.answers[0]!r}" for row in taken]
    pairs = [pair for pair in zip(rows, golds, others, strict=True) if pair[1].right and not pair[2].right]
    unpaid = [(row, gold, other) for row, gold, other in pairs if gold.reward <= other.reward]
    lines += [f"{row.where}: its gold earns {gold.reward:g}, nonsense {other.reward:g}" for row, gold, other in unpaid]
    errors = {v.error for v in (*golds, *others) if v.error is not None}
    lines += [f"error: {error}" for error in sorted(errors)]
    own = ":" in config.reward[0].name  # what a reward of the user's own wants to read, nobody knows
    bad = refused or taken or unpaid or errors
    found.ok(not bad, "reward", "\n".join(lines), "look" if own and not taken else "wrong")


def _answer(row: Record, response: str) -> Attempt:
    return Attempt(row.problem, row.answers, response, "stop", 20, row.info)


def forecast_memory(config: Config, path: str, found: Findings) -> None:
    """The memory of one device that holds it all, by item, beside what there is."""
    if config.engine.name != "local":
        found.add("look", "memory", f"not forecast: engine {config.engine.name!r} spreads it in its own way")
        return
    import torch

    from attnrl.local.models import pick_device, pick_dtype
    from attnrl.local.sampler import ROWS

    device = pick_device(config.engine.local.device)
    cuda = device.type == "cuda"
    there = float(torch.cuda.get_device_properties(device).total_memory if cuda else _host_bytes())
    width = pick_dtype(config.model.dtype, device).itemsize
    shape = shape_of(path, config.model)
    rows = min(config.engine.local.rows or ROWS[device.type], config.algo.prompts * config.algo.group)
    items = memory(shape, config, weight_bytes=width, cached_rows=rows)
    away = host_memory(shape, config)
    if not cuda:
        items["offloaded"] = away
    fixed = sum(items.values()) - items["cache"]
    cache = min(items["cache"], max(0.0, (there - fixed) / 2)) if cuda else min(items["cache"], 4 * 2**30)
    lines = [f"{(fixed + cache) / GB:.2f} GB of {there / GB:.0f} GB on {device} ({shape.weights:,} weights):"]
    lines += [", ".join(f"{name} {size / GB:.2f}" for name, size in {**items, "cache": cache}.items() if size)]
    if cache < items["cache"]:
        lines.append(
            f"{rows} responses of full length need a cache of {items['cache'] / GB:.1f} GB: fewer will run at a time"
        )
    if fixed > there:
        lines.append(
            'lower update.microbatch_tokens, set update.gradient_checkpointing = "all", update.kl_weight = 0, '
            'update.optimizer = "adamw_offloaded" or model.lora_rank'
        )
    if cuda and away:
        lines.append(f"and {away / GB:.2f} GB of the host's {_host_bytes() / GB:.0f} GB for masters and Adam")
    short = fixed > there or away > _host_bytes()
    found.add("wrong" if short else "look" if fixed + cache > 0.9 * there else "ok", "memory", "\n".join(lines))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def draw(
    config: Config,
    bound: Mapping[str, Any],
    prompts: Sequence[Prompt],
    responses: int,
    backend: Backend,
    tokenizer: Any,
) -> Drawn:
    """Responses to each prompt, scored as in training; with what each phase ran over in a second."""
    segment, limit = segmenting(bound, tokenizer), config.sampling.max_response_tokens
    owners = [prompt for prompt in prompts for _ in range(responses)]
    requests = [Request(p.ids, limit, config.run.seed + i, f"{p.uid}/{i}") for i, p in enumerate(owners)]
    sampling = Sampling(config.sampling.temperature)
    generate_by(backend, [replace(request, max_tokens=1) for request in requests], sampling)  # compiles kernels
    begin = time.perf_counter()
    rollouts = generate_by(backend, requests, sampling)
    tokens = sum(len(r.ids) for r in rollouts)
    rate = tokens / (time.perf_counter() - begin)
    asked = [ScoreRequest(p.ids, r.ids, segment(r.ids)) for p, r in zip(owners, rollouts, strict=True)]
    scoring = scoring_of(config, [bound["rule"], bound["filter"]]) or Scoring(
        fci=False, temperature=config.sampling.temperature
    )
    return Drawn(owners, rollouts, asked, score_by(backend, asked, scoring), scoring, rate)


def look_at_responses(
    config: Config, drawn: Drawn, verdicts: Sequence[Verdict], tokenizer: Any, found: Findings
) -> None:
    """Whether the few leave something to learn from, and one response as it was drawn."""
    rollouts, limit = drawn.rollouts, config.sampling.max_response_tokens
    cut, right = sum(r.finish == "length" for r in rollouts), sum(v.right for v in verdicts)
    steps = float(np.median([len(request.steps) for request in drawn.requests]))
    length = float(np.mean([len(r.ids) for r in rollouts]))
    summary = (
        f"{len(rollouts)} responses of {length:.0f} tokens on average in {steps:.0f} steps, {right} right, "
        f"{cut} cut off at {limit} tokens"
    )
    first = tokenizer.decode(rollouts[0].ids.tolist(), skip_special_tokens=False)
    odd = []
    if cut * 2 > len(rollouts):
        wrong = "" if config.algo.grade_truncated else " and count as wrong"
        odd.append(f"most were cut off{wrong}: raise sampling.max_response_tokens")
    if len({v.reward for v in verdicts}) == 1:
        alike = (
            f"all are {'right' if right else 'wrong'}" if right in (0, len(rollouts)) else "all rewards are the same"
        )
        odd.append(f"{alike}: such prompts teach nothing; --prompts and --responses draw more of them")
    if drawn.scoring.fci and steps <= config.algo.delta:
        odd.append(
            f"responses have {steps:.0f} steps and algo.delta is {config.algo.delta}: FCI of every step is 0 in most, "
            "so it cannot choose where they branch"
        )
    errors = sorted({v.error for v in verdicts if v.error is not None})
    odd += [f"error of a reward: {error}" for error in errors]
    found.add(
        "wrong" if errors else "look" if odd else "ok", "responses", "\n".join([summary, *odd, "the first:", first])
    )


def look_at_parts(config: Config, tried: Sequence[Outcome], found: Findings) -> None:
    """What the parts made of a few iterations; none of them broke its promise."""
    forests = [forest for outcome in tried for forest in outcome.forests]
    dropped = sum(len(outcome.dropped) for outcome in tried)
    points = sum(len({branch.point for branch in tree.branches}) for forest in forests for tree in forest.trees)
    samples = sum(sample.has_signal for outcome in tried for sample in outcome.samples)
    said = (
        f"{len(tried)} iterations by {config.algo.schedule} over these responses, half, all and none of them taken as "
        f"right:\n{counted(len(forests), 'prompt')} kept and {dropped} dropped, {counted(points, 'branch point')}, "
        f"{counted(samples, 'sample')} with signal"
    )
    odd = "" if samples else "\nnothing to learn from, so not every part was tried"
    found.ok(not odd, "parts", said + odd)


def compare_logprobs(dtype: str, drawn: Drawn, found: Findings) -> None:
    """Log-probs of the tokens as the sampler drew them and as the scoring forward finds them."""
    gaps = np.concatenate(
        [np.abs(r.logprobs - s.logprobs) for r, s in zip(drawn.rollouts, drawn.scores, strict=True)]
    ).astype(np.float64)
    mean, bound = float(gaps.mean()), MEAN_GAP[dtype]
    level: Level = "ok" if mean <= bound else "look" if mean <= 10 * bound else "wrong"  # not a number: wrong
    found.add(
        level,
        "agreement",
        f"sampler and learner differ by {mean:.1e} nats a token on average, {gaps.max():.1e} at most "
        f"(up to {bound:g} on average is rounding in {dtype})",
    )


def dtype_of(config: Config) -> str:
    """float32 or bfloat16, where it is "auto" as the local engine picks it; an engine with a `dtype` says its own."""
    from attnrl.local.models import pick_device, pick_dtype

    picked = pick_dtype(config.model.dtype, pick_device(config.engine.local.device))
    return str(picked).removeprefix("torch.")


def update_nothing(drawn: Drawn, backend: Backend, found: Findings) -> tuple[float, float]:
    """An update at a learning rate of 1e-30: forward, backward, optimizer and the way back into the sampler run as in
    training, and no float32 weight above 1e-22 moves; so scores must stay what they were. Returns the tokens a second
    of scoring and update, each a second pass: the first one compiles.
    """
    samples = [
        Sample(p.ids, r.ids, as_floats([1.0 if i % 2 else -1.0] * len(r.ids)), r.logprobs, p.uid)
        for i, (p, r) in enumerate(zip(drawn.prompts, drawn.rollouts, strict=True))
    ]
    update_by(backend, samples)
    begin = time.perf_counter()
    metrics = update_by(backend, samples)
    updated = time.perf_counter()
    after = score_by(backend, drawn.requests, drawn.scoring)
    scored = time.perf_counter()
    moved = max(
        float(np.abs(b.logprobs.astype(np.float64) - a.logprobs).max())
        for a, b in zip(drawn.scores, after, strict=True)
    )
    norm, skipped = metrics.get("policy/grad_norm", float("nan")), metrics.get("policy/skipped_updates", 0.0)
    lines = [f"at no learning rate: log-probs moved by {moved:.1e} nats at most; gradient norm {norm:.3g}"]
    if skipped or not norm > 0:
        lines.append("the gradient is not finite or nothing had one: the policy would not learn")
    level: Level = "ok" if moved <= SAME else "look" if moved <= 1000 * SAME else "wrong"
    found.add("wrong" if skipped or not norm > 0 else level, "update", "\n".join(lines))
    return drawn.tokens / (scored - updated), drawn.tokens / (updated - begin)


def forecast_time(
    config: Config, drawn: Drawn, trees: float, points: int, rates: tuple[float, float], evaluated: int, found: Findings
) -> None:
    """Tokens and seconds of an iteration, from the lengths of the few responses and the speed of drawing, scoring and
    updating with them; and of the run's evaluations, of `evaluated` responses each.
    """
    score_rate, update_rate = rates
    length = float(np.mean([len(r.ids) for r in drawn.rollouts]))
    prompt = float(np.mean([len(p.ids) for p in drawn.prompts]))
    ahead = work(config, prompt=prompt, length=length, trees=trees, points=points)
    seconds = {
        "generate": ahead.generated / drawn.rate,
        "score": ahead.scored / score_rate if drawn.scoring.fci else 0.0,
        "update": ahead.trained / update_rate,
    }
    total = sum(seconds.values())
    run = total * config.run.iterations
    lines = [
        f"about {time_span(total)} an iteration at most, {time_span(run)} for {config.run.iterations}: "
        + ", ".join(f"{name} {time_span(spent)}" for name, spent in seconds.items() if spent),
        f"{ahead.generated:,.0f} tokens drawn at {drawn.rate:,.0f} a second, {ahead.trained:,.0f} trained on "
        f"at {update_rate:,.0f}; measured on {len(drawn.rollouts)} responses, full batches run faster",
    ]
    if evaluated:
        every, last = config.evaluation.every, config.run.iterations
        times, spent = len({0, *range(every, last, every), last}), evaluated * length / drawn.rate
        lines.append(
            f"and {counted(times, 'evaluation')} of {evaluated:,} responses: {time_span(times * spent)} if they are as "
            f"long ({length:,.0f} tokens, where {config.evaluation.max_response_tokens:,} are allowed)"
        )
    found.add("ok", "time", "\n".join(lines))
