"""attnrl eval --model MODEL --output DIR [--benchmarks NAME,NAME]

pass@1 and pass@k on benchmarks, from a model or from stored responses, with
95 % intervals; and the paired difference of two evaluations.

With --model: draw, grade, report. The output directory gets responses.jsonl (as
they come), problems.parquet, results.json and results.md. The same command
goes on after an interruption.

A model that attnrl trained is evaluated as its run was: "demo", a run directory
(its newest checkpoint) or a checkpoint in it take benchmarks, task settings and
sampling from the run's config, and a model of `attnrl warmup` takes its tasks.
Flags overrule it. Any other model gets the paper's settings, shown below.

Examples:
  attnrl eval --model demo --output results/demo
  attnrl eval --model runs/demo/demo --output results/trained
  attnrl eval --compare results/demo results/trained
  attnrl eval --model M --benchmarks aime24,math500 --output results/m
  attnrl eval --responses responses.jsonl --k 1 8
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from attnrl.cli.flags import read_flags, show, unset
from attnrl.cli.tasks import TaskFlags
from attnrl.data.benchmarks import BENCHMARKS, SIX, load_benchmark
from attnrl.data.prompts import TEMPLATE
from attnrl.errors import ConfigError, MissingFileError

if TYPE_CHECKING:
    from attnrl.config import Config
    from attnrl.data.records import Record
    from attnrl.evaluation import Report
    from attnrl.types import Prompt


@dataclass(frozen=True)
class EvalFlags:
    """The flags of `attnrl eval`."""

    model: Annotated[str | None, unset("MODEL")] = None
    """Directory or hub name of a Hugging Face model, a run directory, or "demo" (comes with attnrl)."""
    responses: Annotated[Path | None, unset("FILE")] = None
    """File of stored responses (jsonl, json, parquet) with response and gold, or benchmark and row."""
    compare: Annotated[tuple[Path, Path] | None, unset("DIR_A DIR_B")] = None
    """Two output directories A and B; prints B - A per benchmark, paired by problem."""
    benchmarks: str = ",".join(SIX)
    """Names, separated by commas: known benchmarks, data files, "tasks" (made-up ones), or gym:NAME (reasoning-gym)."""
    data_dir: Annotated[Path | None, unset("DIR")] = None
    """Directory with the benchmark files; by default $ATTNRL_DATA, then the hub."""
    samples: Annotated[int | None, unset("INT")] = None
    """Responses per problem; by default each benchmark's own number (4 for files and tasks)."""
    k: Annotated[tuple[int, ...] | None, unset("INT ...")] = None
    """The k of pass@k; at most the number of samples; by default each benchmark's own."""
    temperature: float = 0.6
    """Softmax temperature; 0 is greedy."""
    top_p: float = 0.95
    """Nucleus; 1 switches it off."""
    max_tokens: int = 32_768
    """Response limit. A response cut off by it counts as wrong."""
    seed: int = 0
    """Seed of sampling and of the bootstrap."""
    output: Annotated[Path | None, unset("DIR")] = None
    """Output directory; needed with --model."""
    template: Annotated[str | None, unset("TEXT")] = None
    """Text around {problem}; by default the paper's, and the bare problem for made-up tasks."""
    max_prompt_tokens: int = 4096
    """A longer prompt is an error: leaving problems out would change the benchmark."""
    grade_truncated: bool = False
    """Grade responses that the length limit cut off instead of counting them as wrong."""
    chunk: int = 512
    """Responses drawn between two writes to the output directory."""
    rows: int = 256
    """Responses drawn at the same time."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    dtype: str = "auto"
    """float32, bfloat16, or auto."""
    task_count: int = 256
    """How many held-out tasks, for "tasks" and gym:NAME."""
    task_seed: int = 0
    """Seed of those tasks."""
    tasks: TaskFlags = field(default_factory=TaskFlags)


def main(argv: list[str]) -> int:
    flags = read_flags(EvalFlags, argv, str(__doc__))
    if flags.model is not None and (known := known_settings(flags.model)):
        where, default = known
        show(f"settings from {where} where no flag says otherwise")
        flags = read_flags(EvalFlags, argv, str(__doc__), default)
    chosen = [name for name in ("model", "responses", "compare") if getattr(flags, name) is not None]
    if len(chosen) != 1:
        raise ConfigError(
            f"give exactly one of --model, --responses and --compare, not {' and '.join(chosen) or 'none'}"
        )
    for name, least in (("samples", 1), ("chunk", 1), ("seed", 0), ("max_tokens", 1), ("task_count", 1)):
        if (value := getattr(flags, name)) is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    return {"model": evaluate_model, "responses": evaluate_stored, "compare": compare_two}[chosen[0]](flags)


def known_settings(model: str) -> tuple[str, EvalFlags] | None:
    """Where it is written how a model is evaluated, and the flags that say so; None for a model from elsewhere."""
    from attnrl.config import Config, load_config

    path = Path(model)
    inside = path.is_dir() and path.absolute().match("checkpoints/*/model")
    run = path.absolute().parents[2] if inside else path
    if model == "demo":
        return "preset demo", flags_of(load_config("demo"))
    if (run / "checkpoints").is_dir() and (file := run / "config.json").is_file():
        return str(file), flags_of(Config.model_validate_json(file.read_text("utf-8")))
    if (file := path / "warmup.json").is_file():
        made = json.loads(file.read_text("utf-8"))
        made["task"].pop("seed", None)
        tasks, temperature = TaskFlags(**made["task"]), made["options"]["temperature"]
        return str(file), EvalFlags(
            benchmarks="tasks", tasks=tasks, temperature=temperature, top_p=1.0, max_tokens=1024
        )
    return None


def flags_of(config: Config) -> EvalFlags:
    """The flags of an evaluation as a run with this config makes it."""
    wanted, tasks = config.evaluation, config.data.tasks.model_dump()
    return EvalFlags(
        benchmarks=",".join(wanted.benchmarks),
        data_dir=Path(config.data.directory) if config.data.directory is not None else None,
        samples=wanted.samples,
        k=wanted.ks,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        max_tokens=wanted.max_response_tokens,
        template=config.data.template,
        grade_truncated=config.algo.grade_truncated,
        rows=config.sampling.rows,
        device=config.model.device,
        dtype=config.model.dtype,
        task_count=wanted.tasks,
        task_seed=tasks.pop("seed"),
        tasks=TaskFlags(**tasks),
    )


def evaluate_model(flags: EvalFlags) -> int:
    """Draw, grade and report. Everything that can be wrong with the flags is found before the model loads."""
    from attnrl.cli.assemble import decoder, grade_attempts, newest_model
    from attnrl.evaluation import check_samples, evaluate
    from attnrl.types import Sampling
    from attnrl.verify import Verifier

    assert flags.model is not None
    if flags.output is None:
        raise ConfigError(
            "--output DIR is needed with --model: responses are kept there, so that a killed run continues"
        )
    model = newest_model(flags.model)
    names = [name.strip() for name in flags.benchmarks.split(",") if name.strip()]
    samples = {label(name): flags.samples or default_samples(name) for name in names}
    if len(samples) < len(names):
        raise ConfigError(f"--benchmarks {flags.benchmarks}: a name occurs twice")
    check_samples(samples, flags.k)
    records = {label(name): load(name, flags) for name in names}
    from attnrl.local import BackendOptions, load_backend  # torch: only once the flags are known to be right

    options = BackendOptions(rows=flags.rows)
    backend, tokenizer = load_backend(model, device=flags.device, dtype=flags.dtype, options=options)
    prompts = {label(name): render(records[label(name)], tokenizer, name, flags) for name in names}
    with Verifier() as verifier:
        report = evaluate(
            backend,
            prompts,
            decode=decoder(tokenizer),
            grade=grade_attempts(verifier, flags.grade_truncated),
            samples=samples,
            sampling=Sampling(flags.temperature, flags.top_p),
            max_tokens=flags.max_tokens,
            seed=flags.seed,
            ks=flags.k,
            out_dir=flags.output,
            settings={
                "model": "demo" if flags.model == "demo" else model,
                "dtype": flags.dtype,
                "grade_truncated": flags.grade_truncated,
            },
            chunk=flags.chunk,
            progress=True,
        )
    show_report(report, flags.output)
    return 0


def label(name: str) -> str:
    """The name of a benchmark in tables: a file's without directory and suffix.

    >>> label("data/test.jsonl.gz"), label("aime24")
    ('test', 'aime24')
    """
    return name if name in BENCHMARKS or name.startswith("gym:") else Path(name).name.split(".")[0]


def default_samples(name: str) -> int:
    return BENCHMARKS[name].samples if name in BENCHMARKS else 4


def load(name: str, flags: EvalFlags) -> list[Record]:
    """The records of one benchmark: known, made up, of reasoning-gym, or a file."""
    from attnrl.data.gym import gym_records
    from attnrl.data.records import load_records
    from attnrl.data.tasks import as_records

    if name in BENCHMARKS:
        return load_benchmark(name, flags.data_dir)
    if name == "tasks":
        return as_records(flags.tasks.spec(), "test", flags.task_count, flags.task_seed)
    if name.startswith("gym:"):
        return gym_records(name.removeprefix("gym:"), "test", flags.task_count, flags.task_seed)
    if not Path(name).exists():
        known = ", ".join(BENCHMARKS)
        raise MissingFileError(f"--benchmarks {name}: no file of that name, and no benchmark; known are {known}, tasks")
    return list(load_records(name, strict=True))


def render(records: Sequence[Record], tokenizer: Any, name: str, flags: EvalFlags) -> list[Prompt]:
    """The prompts of one benchmark, all of them."""
    from attnrl.data.prompts import render_benchmark

    template = flags.template or ("{problem}" if name == "tasks" else TEMPLATE)
    return render_benchmark(name, records, tokenizer, template=template, max_prompt_tokens=flags.max_prompt_tokens)


def evaluate_stored(flags: EvalFlags) -> int:
    """Grade stored responses and report."""
    from attnrl.cli.assemble import grade_attempts
    from attnrl.evaluation import Report, grade_stored
    from attnrl.verify import Verifier

    assert flags.responses is not None
    if not flags.responses.is_file():
        raise MissingFileError(f"--responses {flags.responses}: no such file")
    with Verifier() as verifier:
        responses = grade_stored(
            flags.responses,
            grade_attempts(verifier, flags.grade_truncated, progress=True),
            lambda name: load_benchmark(name, flags.data_dir),
        )
    report = Report(responses, ks=flags.k, settings={"responses": str(flags.responses)}, seed=flags.seed)
    if flags.output is not None:
        report.save(flags.output)
    show_report(report, flags.output)
    return 0


def compare_two(flags: EvalFlags) -> int:
    """Print the paired differences, and write them as JSON and Markdown where --output says."""
    from attnrl.evaluation.compare import compare, comparison_rows
    from attnrl.evaluation.results import markdown

    assert flags.compare is not None
    a, b = flags.compare
    comparisons = compare(a, b, seed=flags.seed)
    show_table(f"A = {a}   B = {b}", comparison_rows(comparisons))
    if flags.output is not None:
        flags.output.mkdir(parents=True, exist_ok=True)
        rows = [asdict(c) | {"difference": c.difference} for c in comparisons]
        text = json.dumps({"a": str(a), "b": str(b), "comparisons": rows}, indent=2)
        (flags.output / "comparison.json").write_text(text + "\n", encoding="utf-8")
        (flags.output / "comparison.md").write_text(markdown(comparison_rows(comparisons)), encoding="utf-8")
    return 0


def show_report(report: Report, output: Path | None) -> None:
    from attnrl.evaluation.results import table_rows

    show_table("percent [95 % interval, bootstrap over problems]", table_rows(report))
    if output is not None:
        Console().print(f"results in {output}", highlight=False)


def show_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A table on screen, intervals below their numbers where it is narrow; as wide as need be where there is none."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=not name.startswith("pass@"))
    for row in rows[1:]:
        table.add_row(*row, end_section=False)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
