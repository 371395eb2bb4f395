"""The disruption experiment from Python: draw responses, hide a step of each from what follows, draw the rest anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrl.analysis.disruption import Trial, choose_steps
from attnrl.analysis.pages import step_means
from attnrl.backend import generate_by, score_by
from attnrl.config import Config, check_taken, check_used
from attnrl.errors import ConfigError
from attnrl.evaluation.log import open_lines
from attnrl.evaluation.sampling import all_jobs, fingerprint, request_seed
from attnrl.launch.data import check_room, evaluation_prompts, evaluation_records, evaluation_samples
from attnrl.launch.evaluating import DRAWN, begun_with, settings_of
from attnrl.launch.models import (
    check_model,
    decoder,
    find_engine,
    load_tokenizer,
    open_engine,
    open_rewards,
    pin_model,
    reward_keys,
)
from attnrl.launch.parts import FCI_KEYS, check_parts, segmenting
from attnrl.run import check_no_run
from attnrl.types import (
    Attempt,
    Grade,
    Ids,
    Prompt,
    Request,
    Sampling,
    ScoreRequest,
    Scores,
    Scoring,
    Step,
)

if TYPE_CHECKING:
    from attnrl.local.backend import LocalBackend

TAKES = {"algo.segmenter", "algo.segmenter_options", "update.microbatch_tokens"}  # beside what an evaluation does
FILE = "trials.jsonl"
Job = tuple[int, Prompt, int]  # number of the response, its prompt, its seed


def disrupt(
    model: str,
    output: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    chunk: int = 64,
    say: Callable[[str], None] = lambda line: None,
) -> list[Trial]:
    """The trials of the experiment over the problems a model is evaluated on, kept in `output` as they come.

    Settings are those `attnrl.evaluate` takes; the same call goes on after an interruption. Paper: Sec. 3.1.2.
    """
    check_no_run(Path(output))
    config = settings_of(model, overrides)[1]
    check_used(config, "the experiment", DRAWN | reward_keys(config) | FCI_KEYS | TAKES)
    if config.engine.name != "local":
        raise ConfigError(f"engine.name = {config.engine.name!r}: hiding a step from later text needs the local engine")
    bound = check_parts(config)
    model = pin_model(model, say, begun_with(output))
    engine, rewards, path = find_engine(config), open_rewards(config), check_model(model, config)
    check_taken(config, rewards.takes | FCI_KEYS)
    records, samples = evaluation_records(config), evaluation_samples(config)
    tokenizer = load_tokenizer(path)
    prompts = evaluation_prompts(config, records, tokenizer)
    check_room(config, path, prompts)
    jobs = numbered_jobs(prompts, samples, seed)
    asked = {"model": "demo" if model == "demo" else path, "seed": seed, **_settings(config, prompts, samples)}
    with (
        open_lines(Path(output) / FILE, asked, "experiment") as log,
        rewards,
        open_engine(engine, config, path, tokenizer, learn=False) as backend,
    ):
        segment, done = segmenting(bound, tokenizer), {line["response"]: line for line in map(json.loads, log.lines)}
        missing = [job for job in jobs if job[0] not in done]
        for start in range(0, len(missing), chunk):
            chosen = missing[start : start + chunk]  # by the local engine, as checked above
            lines = run_chunk(chosen, config, backend, tokenizer, segment, rewards.grade)  # type: ignore[arg-type]
            log.append(map(json.dumps, lines))
            done |= {line["response"]: line for line in lines}
            say(f"{len(done)} of {len(jobs)} responses, {sum(len(line['trials']) for line in done.values())} trials")
    return [Trial(**trial) for number in sorted(done) for trial in done[number]["trials"]]


def numbered_jobs(prompts: Mapping[str, Sequence[Prompt]], samples: Mapping[str, int], seed: int) -> list[Job]:
    """Every response to draw, numbered; sample by sample over all prompts, so that a part is a fair part."""
    asked = sorted(all_jobs(prompts, samples), key=lambda job: job[2])
    return [(i, prompt, request_seed(seed, name, row - 1, n)) for i, (name, row, n, prompt) in enumerate(asked)]


def run_chunk(
    jobs: Sequence[Job],
    config: Config,
    backend: LocalBackend,
    tokenizer: Any,
    segment: Callable[[Ids], tuple[Step, ...]],
    grade: Grade,
) -> list[dict[str, Any]]:
    """For each response one line: what it was, and its trials."""
    from attnrl.local.disrupt import continue_without
    from attnrl.local.sampler import ROWS

    algo, wanted, decode = config.algo, config.evaluation, decoder(tokenizer)
    sampling, limit = Sampling(wanted.temperature, wanted.top_p), wanted.max_response_tokens
    requests = [Request(p.ids, limit, s) for _, p, s in jobs]
    originals = generate_by(backend, requests, sampling)
    steps = [segment(rollout.ids) for rollout in originals]
    asked = [ScoreRequest(p.ids, r.ids, s) for (_, p, _), r, s in zip(jobs, originals, steps, strict=True)]
    scores = score_by(backend, asked, Scoring(True, algo.delta, algo.key_reduce, wanted.temperature))
    chosen = [choices(*row) for row in zip(jobs, steps, scores, strict=True)]
    spots = [(i, kind, k) for i, found in enumerate(chosen) for kind, k in found.items()]
    requests, hidden = [], []
    for i, _, k in spots:
        _, prompt, stream = jobs[i]
        stop = steps[i][k].stop
        context = np.concatenate([prompt.ids, originals[i].ids[:stop]])
        requests.append(Request(context, max(limit - stop, 1), stream + 1 + k))
        hidden.append((len(prompt.ids) + steps[i][k].start, len(prompt.ids) + stop))
    drawn = (
        backend.generate(requests, sampling),
        continue_without(backend.model, tokenizer, requests, hidden, sampling, config.engine.local.rows or ROWS["cpu"]),
    )
    whole = [
        [
            (i, np.concatenate([originals[i].ids[: steps[i][k].stop], r.ids]), r)
            for (i, _, k), r in zip(spots, row, strict=True)
        ]
        for row in drawn
    ]
    responses = [*((i, r.ids, r) for i, r in enumerate(originals)), *whole[0], *whole[1]]
    verdicts = grade([Attempt.of(jobs[i][1], ids, r.finish, decode) for i, ids, r in responses])
    first, intact, disrupted = (verdicts[: len(jobs)], verdicts[len(jobs) :][: len(spots)], verdicts[-len(spots) :])
    lines: list[dict[str, Any]] = [
        {"response": number, "prompt": p.uid, "tokens": len(r.ids), "steps": len(s), "right": v.right, "trials": []}
        for (number, p, _), r, s, v in zip(jobs, originals, steps, first, strict=True)
    ]
    for (i, kind, k), a, b in zip(spots, intact, disrupted if spots else [], strict=True):
        if first[i].error is None and a.error is None and b.error is None:
            position = steps[i][k].start / len(originals[i].ids)
            trial = Trial(jobs[i][1].uid, jobs[i][0], kind, k, position, first[i].right, a.right, b.right)
            lines[i]["trials"].append(asdict(trial))
    return lines


def choices(job: Job, steps: Sequence[Step], scores: Scores) -> dict[str, int]:
    """The step of each type to hide; drawn by the response's own number."""
    entropy = step_means(scores.entropy, [step.start for step in steps])
    return choose_steps(scores.fci.tolist(), entropy, steps, np.random.default_rng(job[2]))


def _settings(config: Config, prompts: Mapping[str, Sequence[Prompt]], samples: Mapping[str, int]) -> dict[str, Any]:
    """What the results of an experiment depend on, beside model and seed."""
    keys = {"segmenter", "segmenter_options", "delta", "key_reduce", "grade_truncated"}
    return {
        "prompts": {name: fingerprint(rows) for name, rows in prompts.items()},
        "samples": dict(samples),
        **config.evaluation.model_dump(include={"temperature", "top_p", "max_response_tokens"}),
        **config.algo.model_dump(include=keys),
        "reward": [reward.model_dump() for reward in config.reward],
        "dtype": config.model.dtype,
    }
