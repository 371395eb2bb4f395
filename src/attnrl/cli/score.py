"""attnrl score --model MODEL --input FILE --output FILE.parquet

FCI, entropy and branch points of every step of stored responses.

Each line of the input is a JSON object with `prompt` and `response` (text), or
`prompt_ids` and `response_ids`. The output has one row per step: row (input
line, from 0), step, start, stop (token range in the response), text, fci,
entropy (mean over the step's tokens, nats), position_null (the FCI of uniform
attention) and branch_point.

Examples:
  attnrl score --model Qwen/Qwen3-0.6B --input responses.jsonl \\
    --output scores.parquet
  attnrl score --model demo --input responses.jsonl --output scores.parquet
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console

from attnrl.algo.branching import fci as fci_rule
from attnrl.algo.steps import blank_lines
from attnrl.cli.assemble import newest_model
from attnrl.cli.flags import read_flags
from attnrl.cli.lines import read_lines
from attnrl.errors import ConfigError, DataError, MissingFileError
from attnrl.types import Ids, Prompt, Rollout, ScoreRequest, Scores, Trunk, Verdict, as_ids

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = "the fields are prompt and response (text), or prompt_ids and response_ids (token ids)"


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of `attnrl score`."""

    model: str
    """Directory or hub name of a Hugging Face model; "demo" (comes with attnrl); or a run directory: its newest
    checkpoint."""
    input: Path
    """JSON lines, plain or .gz."""
    output: Path
    """The parquet file to write."""
    delta: int = 4
    """A step's FCI counts the attention of steps at least this many later (Eq. 5)."""
    key_reduce: Literal["mean", "sum"] = "mean"
    """How the tokens of the attended step are reduced."""
    top_fraction: float = 0.2
    """Share of steps that may be branch points, by FCI (Eq. 7)."""
    points: int = 2
    """Branch points marked per response."""
    min_gap_tokens: int = 0
    """Smallest distance of a branch point from the start and from another."""
    chat: bool = False
    """The prompts are a user's words: put them in the model's chat template first."""
    token_budget: int = 16384
    """Tokens of one forward pass; a longer response gets a pass of its own."""
    device: str = "auto"
    """auto, cpu, or cuda[:n]."""
    dtype: str = "auto"
    """auto (bfloat16 on CUDA, float32 elsewhere), float32, bfloat16 or float16."""


def read_rows(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """(file:line, line from 0, row) of every object in the file; DataError names file:line where one is wrong."""
    rows = read_lines(path, FIELDS)
    for where, _, row in rows:
        _check_row(where, row)
    return rows


def _check_row(where: str, row: dict[str, Any]) -> None:
    for name in ("prompt", "response"):
        ids, text = row.get(f"{name}_ids"), row.get(name)
        if ids is not None:
            if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
                raise DataError(f"{where}: field '{name}_ids' must be a list of token ids")
        elif text is None:
            raise DataError(f"{where}: field {name!r} is missing; {FIELDS}")
        elif not isinstance(text, str):
            raise DataError(f"{where}: field {name!r} must be text, not {type(text).__name__}")
        if not (text if ids is None else ids):
            raise DataError(f"{where}: the {name} is empty; drop the line")


def encode(where: str, row: dict[str, Any], tokenizer: Any, *, chat: bool, vocabulary: int) -> tuple[Ids, Ids]:
    """The token ids of prompt and response."""
    if "prompt_ids" in row:
        prompt = row["prompt_ids"]
    elif chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("--chat: this model's tokenizer has no chat template; leave the flag out")
        message = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        prompt = tokenizer(row["prompt"])["input_ids"]
    response = row.get("response_ids")
    if response is None:
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    for name, ids in (("prompt", prompt), ("response", response)):
        if not ids:
            raise DataError(f"{where}: the {name} has no tokens; drop the line")
        if max(ids) >= vocabulary:
            raise DataError(f"{where}: {name} token {max(ids)} is outside the model's vocabulary of {vocabulary}")
    return as_ids(prompt), as_ids(response)


def step_rows(
    row: int, request: ScoreRequest, scores: Scores, decode: Callable[[Ids], str], options: Options
) -> list[dict[str, Any]]:
    """One record per step of a scored response."""
    from attnrl.scoring import position_null

    spans = [(s.start, s.stop) for s in request.steps]
    null = position_null(spans, len(request.prompt), delta=options.delta, key_reduce=options.key_reduce)
    prompt = Prompt(uid=str(row), ids=request.prompt, answers=())
    rollout = Rollout(request.response, scores.logprobs, "stop", 0)
    trunk = Trunk(rollout, Verdict(0.0, "none"), request.steps, scores)
    chosen = fci_rule(
        prompt,
        trunk,
        np.random.default_rng(0),
        points=options.points,
        top_fraction=options.top_fraction,
        min_gap_tokens=options.min_gap_tokens,
    )
    return [
        {
            "row": row,
            "step": index,
            "start": step.start,
            "stop": step.stop,
            "text": decode(request.response[step.start : step.stop]),
            "fci": float(scores.fci[index]),
            "entropy": float(scores.entropy[step.start : step.stop].mean()),
            "position_null": float(null[index]),
            "branch_point": step.start in chosen,
        }
        for index, step in enumerate(request.steps)
    ]


def to_table(records: Iterable[dict[str, Any]]) -> pa.Table:
    """The records as a parquet table."""
    import pyarrow as pa

    kinds = {"row": pa.int64(), "step": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "text": pa.string()}
    kinds |= {"fci": pa.float32(), "entropy": pa.float32(), "position_null": pa.float32(), "branch_point": pa.bool_()}
    return pa.Table.from_pylist(list(records), schema=pa.schema(kinds))


def position_correlations(scored: Sequence[tuple[Scores, Sequence[dict[str, Any]]]], delta: int) -> tuple[float, float]:
    """Mean over responses of the rank correlation of FCI with position, and with the position null.

    Steps that score 0 because none follows at distance delta are left out, and so are responses with fewer than three
    steps left.
    """
    from attnrl.scoring import rank_correlation

    with_position, with_null = [], []
    for scores, records in scored:
        count = len(scores.fci) - delta
        if count >= 3:
            null = np.array([record["position_null"] for record in records[:count]])
            with_position.append(rank_correlation(scores.fci[:count], np.arange(count)))
            with_null.append(rank_correlation(scores.fci[:count], null))
    nothing = float("nan")
    return (
        float(np.nanmean(with_position)) if with_position else nothing,
        float(np.nanmean(with_null)) if with_null else nothing,
    )


def _check(options: Options) -> None:
    if options.delta < 1:
        raise ConfigError(f"--delta must be at least 1, not {options.delta}")
    if not 0 < options.top_fraction <= 1:
        raise ConfigError(f"--top-fraction must be above 0 and at most 1, not {options.top_fraction}")
    if options.points < 1 or options.min_gap_tokens < 0 or options.token_budget < 1:
        raise ConfigError("--points and --token-budget must be at least 1, --min-gap-tokens at least 0")
    if not options.output.parent.is_dir():
        raise MissingFileError(f"no directory {options.output.parent} for --output")


def main(argv: list[str]) -> int:
    options = read_flags(Options, argv, str(__doc__))
    _check(options)
    rows = read_rows(options.input)
    import pyarrow.parquet as pq

    from attnrl.data.texts import TokenTexts
    from attnrl.local.models import load_model
    from attnrl.scoring import ScoreReport, score

    console = Console()
    model, tokenizer = load_model(newest_model(options.model), device=options.device, dtype=options.dtype)
    token_texts = TokenTexts(tokenizer)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    requests = []
    for where, _, row in rows:
        prompt, response = encode(where, row, tokenizer, chat=options.chat, vocabulary=vocabulary)
        requests.append(ScoreRequest(prompt, response, blank_lines(token_texts(response))))
    report = ScoreReport()
    scores = score(
        model,
        requests,
        delta=options.delta,
        key_reduce=options.key_reduce,
        token_budget=options.token_budget,
        progress=console.is_terminal,
        report=report,
    )
    records = [
        step_rows(index, request, scored, lambda ids: tokenizer.decode(ids.tolist()), options)
        for (_, index, _), request, scored in zip(rows, requests, scores, strict=True)
    ]
    pq.write_table(to_table(record for group in records for record in group), options.output)
    _summary(console, options, list(zip(scores, records, strict=True)), report)
    return 0


def _summary(
    console: Console, options: Options, scored: list[tuple[Scores, list[dict[str, Any]]]], report: Any
) -> None:
    position, null = position_correlations(scored, options.delta)
    steps = sum(len(records) for _, records in scored)
    kinds, fci_kinds = "+".join(sorted(report.attention_kinds)), "+".join(sorted(report.fci_kinds))
    lines = [
        f"{len(scored)} responses, {steps} steps, {report.tokens} tokens in {report.seconds:.1f} s "
        f"({report.tokens / max(report.seconds, 1e-9):.0f} tokens/s; attention {kinds}, FCI {fci_kinds})",
        f"rank correlation of FCI with step position {position:+.3f}, with the position null {null:+.3f} "
        "(mean over responses)",
        f"one row per step in {options.output}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
