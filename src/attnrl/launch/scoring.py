"""Scores from Python: `attnrl.score`, FCI, entropy and branch points of every step of finished responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.intervals import rank_correlation
from attnrl.algo.promises import points_by
from attnrl.algo.reasons import declared_by, step_reasons
from attnrl.analysis.score_page import HeadMap
from attnrl.backend import Backend, metrics_by, score_by
from attnrl.config import Config, check_taken, check_used, load_config
from attnrl.errors import ConfigError, DataError
from attnrl.launch.data import wording
from attnrl.launch.evaluating import settings_of
from attnrl.launch.looking import head_maps
from attnrl.launch.models import check_engine, check_model, decoder, find_engine, load_tokenizer, open_engine
from attnrl.launch.parts import FCI_KEYS, check_parts, segmenting, taken_by
from attnrl.types import Ids, Prompt, Rollout, ScoreRequest, Scores, Scoring, Trunk, Verdict, as_ids

TAKES = {
    "model.dtype",
    "engine",
    "sampling.temperature",
    "update.microbatch_tokens",
    *(f"data.{key}" for key in ("template", "system", "chat_options")),
    *(f"algo.{key}" for key in ("segmenter", "segmenter_options", "rule", "rule_options", "points", "top_fraction")),
    *(f"algo.{key}" for key in ("min_gap_tokens", "mode")),
    *FCI_KEYS,
}
FIELDS = "the fields are prompt and response (text), prompt_ids and response_ids (token ids), or problem and response"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One response, cut into steps and scored."""

    prompt: Ids
    response: Ids
    scores: Scores
    steps: list[dict[str, Any]]  # step, start, stop, text, fci, entropy, position_null, thinking, branch_point, why
    text: str  # of the prompt
    map: HeadMap | None = None  # the attention of the head that decides, where it was asked for


def score(
    model: str | Path,
    responses: Sequence[Row | tuple[str, str]],
    *,
    config: Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    chat: bool = False,
    maps: int = 0,
    metrics: dict[str, float] | None = None,
) -> list[Scored]:
    """Log-probs, entropy and FCI of each response, its steps, and where the config's rule would branch.

    A response is a pair (prompt, response) or a row with those fields, or with `prompt_ids` and `response_ids`, or with
    `problem`, which then gets the template of [data] (without a `config` the one that the model was trained with) and
    the model's chat template. `chat`: prompts are a user's words and get the chat template, with the system message and
    chat options of [data]. The first `maps` responses get the step-to-step attention of the head that decides.
    `metrics` is filled with what the engine says of the pass. Paper: Eq. 4-7.
    """
    config = score_settings(str(model), overrides)[1] if config is None else load_config(config, overrides)
    from attnrl.local.models import load_weights

    bound, engine, path = check_scoring(str(model), config)
    rows = [as_row(number, row) for number, row in enumerate(responses, start=1)]
    tokenizer = load_tokenizer(path)
    segment, vocabulary = segmenting(bound, tokenizer), vocabulary_of(path, tokenizer)
    algo = config.algo
    scoring = Scoring(True, algo.delta, algo.key_reduce, config.sampling.temperature)
    requests = []
    for number, row in enumerate(rows, start=1):  # before the model loads: a row may be wrong
        where = str(row.get("where") or f"response {number}")
        prompt, response = encode(where, row, tokenizer, config, chat=chat, vocabulary=vocabulary)
        requests.append(ScoreRequest(prompt, response, segment(response)))
    with open_engine(
        engine, as_long_as(requests, config), path, tokenizer, learn=False, verbs=("score", "metrics")
    ) as backend:
        found = score_by(backend, requests, scoring)
        if metrics is not None:
            metrics.update(metrics_by(backend))
        load = partial(load_weights, path, device=config.engine.local.device, dtype=config.model.dtype)
        drawn = head_maps(backend, load, requests[:maps], found[:maps], scoring)
    decode = decoder(tokenizer, special=True)
    return [
        Scored(r.prompt, r.response, s, step_records(r, s, decode, bound["rule"], config), decode(r.prompt), m)
        for r, s, m in zip_longest(requests, found, drawn)
    ]


def check_scoring(model: str, config: Config) -> tuple[dict[str, partial[Any]], Callable[..., Backend], str]:
    """The parts of [algo], the engine and where the model is; raises where one does not fit, before rows are read."""
    bound = check_parts(config)
    check_taken(config, taken_by(config, bound) | FCI_KEYS)
    engine, path = find_engine(config), check_model(model, config)
    check_engine(engine, as_long_as((), config), path, learn=False)
    return bound, engine, path


def as_long_as(requests: Sequence[ScoreRequest], config: Config) -> Config:
    """The config with the lengths of what is scored as its limits: an engine makes room for no more."""
    longest = {
        f"max_{name}_tokens": max((len(getattr(r, name)) for r in requests), default=1)
        for name in ("prompt", "response")
    }
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=longest)})


def as_row(number: int, given: Row | tuple[str, str]) -> Row:
    """A response as a row; DataError where it is neither a row nor a pair."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(given) != 2:
        what = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
        raise DataError(f"response {number}: give a pair (prompt, response) or a row, not {what}; {FIELDS}")
    return {"prompt": given[0], "response": given[1]}


def score_settings(model: str, overrides: Mapping[str, Any] | None = None) -> tuple[str, Config]:
    """Where it is written how the prompts of a model read, empty for the defaults; and the paper's config with that
    template, system message and chat options, and overrides on top, of keys that scoring takes."""
    where, own = settings_of(model)
    known = {f"data.{key}": value for key, value in wording(own).items()} if where else {}
    config = load_config("", overrides, known=known)
    check_used(config, "scoring", TAKES)
    return where, config


def encode(where: str, row: Row, tokenizer: Any, config: Config, *, chat: bool, vocabulary: int) -> tuple[Ids, Ids]:
    """The token ids of prompt and response; DataError says where one is missing or the model does not know it."""
    texts = {name: _text(where, row, name) for name in ("prompt", "problem", "response")}
    prompt, response = _ids(where, row, "prompt"), _ids(where, row, "response")
    if prompt is None and texts["prompt"] is not None:
        words = wording(config) | {"template": "{problem}"} if chat else None
        prompt = _prompt_ids(texts["prompt"], tokenizer, words)
    if prompt is None and texts["problem"] is not None:
        prompt = _problem_ids(texts["problem"], tokenizer, **wording(config))
    if response is None and texts["response"] is not None:
        response = tokenizer(texts["response"], add_special_tokens=False)["input_ids"]
    found = []
    for name, ids in (("prompt", prompt), ("response", response)):
        if ids is None:
            raise DataError(f"{where}: field {name!r} is missing; {FIELDS}")
        if not ids:
            raise DataError(f"{where}: the {name} is empty; drop the line")
        if max(ids) >= vocabulary:
            raise DataError(f"{where}: {name} token {max(ids)} is outside the model's vocabulary of {vocabulary}")
        found.append(as_ids(ids))
    return found[0], found[1]


def _text(where: str, row: Row, name: str) -> str | None:
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: field {name!r} must be text, not {type(text).__name__}")
    return text


def vocabulary_of(model: str, tokenizer: Any) -> int:
    """How many tokens a model knows: by its config where it lies in a directory, else by its tokenizer."""
    file = Path(model) / "config.json"
    known = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    size = known.get("vocab_size") or known.get("text_config", {}).get("vocab_size") or len(tokenizer)
    return int(size)


def _ids(where: str, row: Row, name: str) -> list[int] | None:
    ids = row.get(f"{name}_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise DataError(f"{where}: field '{name}_ids' must be a list of token ids")
    return ids


def _prompt_ids(text: str, tokenizer: Any, words: dict[str, Any] | None) -> list[int]:
    if words is None:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat: this model's tokenizer has no chat template; leave the flag out")
    return _problem_ids(text, tokenizer, **words)


def _problem_ids(problem: str, tokenizer: Any, **words: Any) -> list[int]:
    from attnrl.data.prompts import render_prompts
    from attnrl.data.records import Record

    record = Record(problem, ("",), "", ":1")
    (prompt,), _ = render_prompts([record], tokenizer, max_prompt_tokens=2**31 - 1, **words)
    ids: list[int] = prompt.ids.tolist()
    return ids


def step_records(
    request: ScoreRequest, scores: Scores, decode: Callable[[Ids], str], rule: Callable[..., Any], config: Config
) -> list[dict[str, Any]]:
    """One record per step of a scored response: what it says, its scores, and whether the rule branches there."""
    from attnrl.scoring import position_null

    algo = config.algo
    spans = [(s.start, s.stop) for s in request.steps]
    null = position_null(spans, len(request.prompt), delta=algo.delta, key_reduce=algo.key_reduce)
    prompt = Prompt(uid="", ids=request.prompt, answers=())
    rollout = Rollout(request.response, scores.logprobs, "stop", 0)
    trunk = Trunk(rollout, Verdict(0.0, "none"), request.steps, scores)
    chosen = points_by(rule, prompt, trunk, np.random.default_rng(0))
    declared = declared_by(rule)
    reasons = step_reasons(
        trunk,
        chosen,
        by_fci="fci" in declared["reads"],
        by_quantile=declared["by_quantile"],
        delta=algo.delta,
        top_fraction=algo.top_fraction,
        min_gap_tokens=algo.min_gap_tokens,
        mode=algo.mode,
        prompt_tokens=len(request.prompt),
    )
    return [
        {
            "step": index,
            "start": step.start,
            "stop": step.stop,
            "text": decode(request.response[step.start : step.stop]),
            "fci": float(scores.fci[index]),
            "entropy": float(scores.entropy[step.start : step.stop].mean()),
            "position_null": float(null[index]),
            "thinking": step.thinking,
            "branch_point": step.start in chosen,
            "why": reasons[index],
        }
        for index, step in enumerate(request.steps)
    ]


def position_correlations(scored: Sequence[Scored], delta: int) -> tuple[float, float]:
    """Rank correlation of FCI with step position, and with the position null, each a mean over responses.

    The last steps have score 0 by definition: nothing follows at distance delta. They are left out, and so are
    responses with fewer than three steps left or with one score for all of them; NaN where none is left.
    """
    pairs = []
    for one in scored:
        count = len(one.steps) - delta
        if count >= 3:
            fci, null = one.scores.fci[:count], np.array([record["position_null"] for record in one.steps[:count]])
            pairs.append((rank_correlation(fci, np.arange(count)), rank_correlation(fci, null)))
    defined = np.array([pair for pair in pairs if not np.isnan(pair).any()])
    means = defined.mean(axis=0) if len(defined) else (np.nan, np.nan)
    return float(means[0]), float(means[1])
