"""The evaluation itself: draw, grade, keep. The same function serves the command and the evaluation during training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnrl.algo.intervals import RESAMPLES
from attnrl.backend import Sampler, generate_by
from attnrl.errors import ConfigError
from attnrl.evaluation.log import Log, open_log
from attnrl.evaluation.results import Report, Response
from attnrl.progress import watched
from attnrl.types import Attempt, Grade, Ids, Prompt, Request, Sampling, content_hash, counted

Job = tuple[str, int, int, Prompt]  # benchmark, row (from 1), sample, prompt


def evaluate(
    sampler: Sampler,
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    decode: Callable[[Ids], str],
    grade: Grade,
    samples: int | Mapping[str, int],
    sampling: Sampling,
    max_tokens: int,
    seed: int = 0,
    ks: Sequence[int] | None = None,
    out_dir: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    chunk: int | None = None,
    resamples: int = RESAMPLES,
) -> Report:
    """The report over `samples` responses to every prompt of every benchmark.

    Each response has a random stream of its own, made of seed, benchmark, row and sample number: chunks, order and
    interruptions do not change it. With `out_dir` the responses are kept there as they come, `chunk` at a time, and a
    second call with the same settings continues where the first ended, to the same report; `settings` adds entries
    (the model's name, the reward's options) that must agree too. `ks` None is each benchmark's own k (`Report.own_k`).
    What a response cut off by the length limit is worth, `grade` says: it sees how each one finished.
    """
    counts = {name: samples if isinstance(samples, int) else samples[name] for name in prompts}
    check_samples(counts, ks)
    if max_tokens < 1:
        raise ConfigError(f"max_tokens = {max_tokens}: must be at least 1")
    jobs = all_jobs(prompts, counts)
    asked = {
        **(settings or {}),
        "samples": counts,
        **asdict(sampling),
        "max_tokens": max_tokens,
        "seed": seed,
        "prompts": {name: fingerprint(rows) for name, rows in prompts.items()},
    }

    def draw(batch: Sequence[Job]) -> list[Response]:
        requests = [
            Request(p.ids, max_tokens, request_seed(seed, name, row - 1, n), f"{p.uid}/{n}")
            for name, row, n, p in batch
        ]
        rollouts = generate_by(sampler, requests, sampling)
        attempts = [Attempt.of(job[-1], r.ids, r.finish, decode) for job, r in zip(batch, rollouts, strict=True)]
        graded = zip(batch, attempts, grade(attempts), strict=True)
        return [Response.of(*job[:3], attempt, verdict) for job, attempt, verdict in graded]

    with open_log(out_dir, asked) as (done, log):
        responses = _draw_all(jobs, draw, done, log, chunk or (512 if log is not None else len(jobs)))
    report = Report(responses, ks=None if ks is None else tuple(ks), settings=asked, seed=seed, resamples=resamples)
    if out_dir is not None:
        report.save(out_dir)
    return report


def all_jobs(prompts: Mapping[str, Sequence[Prompt]], samples: Mapping[str, int]) -> list[Job]:
    """Every response to draw, in the order of the report; raises where a benchmark has no problems."""
    if empty := [name for name, rows in prompts.items() if not rows]:
        raise ConfigError(f"benchmark {empty[0]} has no problems")
    return [
        (name, row, sample, prompt)
        for name, rows in prompts.items()
        for row, prompt in enumerate(rows, start=1)
        for sample in range(samples[name])
    ]


def _draw_all(
    jobs: Sequence[Job],
    draw: Callable[[Sequence[Job]], list[Response]],
    done: Sequence[Response],
    log: Log | None,
    chunk: int,
) -> list[Response]:
    """All responses in the order of the jobs: those that are done, and the missing ones, drawn and logged."""
    found = {(r.benchmark, r.row, r.sample): r for r in done}
    missing = [job for job in jobs if job[:3] not in found]
    with _bar(len(jobs)) as advance:
        advance(found.values())
        for start in range(0, len(missing), chunk):
            responses = draw(missing[start : start + chunk])
            if log is not None:
                log.append(response.to_json() for response in responses)
            found |= {(r.benchmark, r.row, r.sample): r for r in responses}
            advance(responses)
    return [found[job[:3]] for job in jobs]


def request_seed(seed: int, benchmark: str, row: int, sample: int) -> int:
    """The random stream of one response: 63 bits that depend on these four alone; the row counts from 0 here.

    >>> request_seed(0, "aime24", 3, 1) == request_seed(0, "aime24", 3, 1) != request_seed(0, "aime24", 3, 2)
    True
    """
    digest = hashlib.sha256(repr((seed, benchmark, row, sample)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def check_samples(samples: Mapping[str, int], ks: Sequence[int] | None = None) -> None:
    """Raise where pass@k cannot be estimated from that many samples; callers ask before they load a model."""
    if not samples:
        raise ConfigError(
            "nothing to evaluate: name at least one benchmark; a run without any has evaluation.every = 0"
        )
    if ks is not None and (not ks or min(ks) < 1):
        raise ConfigError(f"k = {list(ks)}: give one or more numbers of at least 1")
    for name, count in samples.items():
        if count < 1:
            raise ConfigError(f"samples = {count} for benchmark {name}: must be at least 1")
        if ks is not None and max(ks) > count:
            raise ConfigError(
                f"pass@{max(ks)} cannot be estimated from {counted(count, 'sample')} per problem of benchmark "
                f"{name}; raise samples to at least {max(ks)} or ask for a smaller k"
            )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Identity of a list of prompts: token ids and answers, in order."""
    return content_hash(*(f"{p.ids.tolist()} {p.answers}" for p in prompts))


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Iterable[Response]], None]]:
    """Progress on stderr, with the share of right responses so far: a bar where that is a terminal, else lines."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    usual, right = Progress.get_default_columns(), TextColumn("{task.fields[right]}")
    columns = (*usual, TimeElapsedColumn(), MofNCompleteColumn(), right)
    done: list[bool] = []
    console = Console(stderr=True)
    seen = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not seen) as bar:
        task = bar.add_task("responses", total=total, right="")

        def advance(responses: Iterable[Response]) -> None:
            done.extend(response.right for response in responses)
            share = f"{100 * sum(done) / len(done):.1f} % right" if done else ""
            bar.update(task, completed=len(done), right=share)
            if not seen and 0 < len(done) < total:
                console.print(f"{len(done):,} of {total:,} responses, {share}", highlight=False)

        def drawing(what: str, now: int, of: int) -> None:
            if what.startswith("generate"):
                bar.update(task, completed=len(done) + now)

        with watched(drawing) if seen else nullcontext():
            yield advance
