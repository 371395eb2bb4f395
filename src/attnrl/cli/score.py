"""attnrl score --model MODEL --input FILE --output FILE.parquet

FCI, entropy and branch points of every step of stored responses.

The input is JSON lines (plain or .gz) or parquet: rows with `prompt` and
`response` (text), with `prompt_ids` and `response_ids`, or with `problem` and
`response`, which is what `attnrl eval` keeps in responses.jsonl; of a run's
forests (forests/*.parquet) the trunks are scored. A problem gets the template
that the model was trained with: "demo", run directories and checkpoints in them
say it, any other model gets the paper's.

The output has one row per step: row (of the input, from 1), step, start, stop
(token range in the response), text, fci, entropy (mean over the step's tokens,
nats), position_null (the FCI of uniform attention), thinking, branch_point, and
why a step is none. Its metadata names the model, of a run its checkpoint.
With --html also a page to look at: steps shaded by FCI, beside the position
null, the entropy and the step-to-step attention of the head that decides.

Examples:
  attnrl score --model Qwen/Qwen3-0.6B --input responses.jsonl \\
    --output scores.parquet
  attnrl score --model demo --input results/demo/responses.jsonl \\
    --output scores.parquet --html scores.html
  attnrl score --model runs/a --input runs/a/forests/000020.parquet \\
    --output scores.parquet
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich.console import Console

from attnrl.cli.files import check_file, check_folder, read_file
from attnrl.cli.flags import read_flags, show
from attnrl.config import Section
from attnrl.errors import ConfigError, DataError, MissingFileError
from attnrl.launch.models import pin_model
from attnrl.launch.scoring import Scored, check_scoring, position_correlations, score, score_settings
from attnrl.types import counted

if TYPE_CHECKING:
    import pyarrow as pa

SHORT = {
    "delta": "algo.delta",
    "key_reduce": "algo.key_reduce",
    "top_fraction": "algo.top_fraction",
    "points": "algo.points",
    "min_gap_tokens": "algo.min_gap_tokens",
    "token_budget": "update.microbatch_tokens",
    "device": "engine.local.device",
    "dtype": "model.dtype",
}


class ScoreFlags(Section):
    """The flags of `attnrl score`."""

    model: str
    """Directory or hub name of a Hugging Face model; "demo" (comes with attnrl); or a run directory: its newest
    checkpoint."""
    input: Path
    """JSON lines, plain or .gz, or parquet."""
    output: Path
    """The parquet file to write."""
    chat: bool = False
    """The prompts are a user's words: put them in the model's chat template first."""
    html: Path | None = None
    """A page of the responses to look at, one HTML file."""
    html_rows: int = Field(12, ge=1)
    """How many responses that page shows, from the first on."""


def main(argv: list[str]) -> None:
    flags, overrides = read_flags(ScoreFlags, argv, str(__doc__), short=SHORT)
    check_folder("output", flags.output)
    if flags.output.suffix not in ("", ".parquet"):
        raise ConfigError(f"--output {flags.output}: the table is a Parquet file; let its name end in .parquet")
    check_folder("html", flags.html)
    model = pin_model(flags.model, show)
    where, config = score_settings(model, overrides)
    check_input(flags.input)
    check_scoring(model, config)
    rows = read_rows(flags.input)
    import pyarrow.parquet as pq

    if where and any("problem" in row for _, row in rows):
        show(f"template from {where} where no flag says otherwise")

    metrics: dict[str, float] = {}
    maps = flags.html_rows if flags.html is not None else 0
    responses = [row for _, row in rows]
    scored = score(model, responses, config=config, chat=flags.chat, maps=maps, metrics=metrics)
    numbers = [number for number, _ in rows]
    steps = ({"row": n, **step} for n, s in zip(numbers, scored, strict=True) for step in s.steps)
    pq.write_table(to_table(steps, model), flags.output)
    summary(Console(), flags.output, scored, metrics, config.algo.delta)
    if flags.html is not None:
        from attnrl.analysis.score_page import build_score_page, response_page
        from attnrl.checkpoint import write_whole

        rows_shown = zip(numbers, scored[:maps], strict=False)
        pages = [response_page(f"{flags.input.name}, row {n}", s.text, s.steps, s.map) for n, s in rows_shown]
        print(f"page: {write_whole(flags.html, build_score_page(model, pages, config.algo.delta))}")


def check_input(path: Path) -> None:
    """Refuse what is no file; of a run directory its files are named."""
    if path.is_dir():
        forests = sorted((path / "forests").glob("*.parquet"))
        hint = f"the responses of this run are in files such as {forests[-1]}" if forests else "give a file in it"
        raise MissingFileError(f"--input {path} is a directory; {hint}")
    check_file(path)


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of every response in the file; of forests, of every trunk."""
    found = []
    for number, row in enumerate(read_file(path), start=1):
        given, kind = row.columns, row.columns.get("kind")
        if kind == "trunk":  # of a forest file, which has its token ids
            given = {"problem": given["problem"], "response_ids": given["ids"]}
        if kind != "branch":
            found.append((number, {**given, "where": row.where}))
    if not found:
        raise DataError(f"{path}: no rows")
    return found


def to_table(rows: Iterable[dict[str, Any]], model: str) -> pa.Table:
    """The rows as a table of fixed types, with the model that scored them in the file's metadata."""
    import pyarrow as pa

    types = {
        **dict.fromkeys(("row", "step", "start", "stop"), pa.int32()),
        "text": pa.string(),
        **dict.fromkeys(("fci", "entropy", "position_null"), pa.float32()),
        **dict.fromkeys(("thinking", "branch_point"), pa.bool_()),
        "why": pa.string(),
    }
    return pa.Table.from_pylist(list(rows), schema=pa.schema(types, metadata={"model": model}))


def summary(console: Console, output: Path, scored: Sequence[Scored], metrics: dict[str, float], delta: int) -> None:
    """What was scored, how fast and by which kernels, and how FCI goes with position."""
    position, null = position_correlations(scored, delta)
    correlation = (
        f"rank correlation of FCI with step position {position:+.3f}, with the position null {null:+.3f} "
        "(mean over responses)"
        if position == position
        else f"no correlation of FCI with position: it takes {delta + 3} steps or more, and FCI that differs"
    )
    steps = sum(len(one.steps) for one in scored)
    short = sum(len(one.steps) <= delta for one in scored)
    zero = f"FCI is 0 throughout {counted(short, 'response')}: no step there has {delta} steps after it (--delta)"
    kinds = {
        of: "+".join(sorted(k.removeprefix(f"score/{of}_") for k in metrics if k.startswith(f"score/{of}_")))
        for of in ("attention", "fci")
    }
    tokens, seconds = metrics.get("score/tokens", 0.0), metrics.get("score/seconds", 0.0)
    for line in (
        f"{counted(len(scored), 'response')}, {counted(steps, 'step')}, {tokens:.0f} tokens in {seconds:.1f} s "
        f"({tokens / max(seconds, 1e-9):.0f} tokens/s; attention {kinds['attention']}, FCI {kinds['fci']})",
        correlation,
        *([zero] if short else []),
        f"one row per step in {output}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
