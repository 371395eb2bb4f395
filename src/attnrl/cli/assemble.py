"""From a config to the parts of a run: the only place that knows both. Heavy imports happen inside the functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrl.algo.adaptive import BUDGETS
from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.branching import RULES, needs_scores
from attnrl.algo.parts import bind
from attnrl.algo.steps import SEGMENTERS
from attnrl.cli.flags import show
from attnrl.config import Config
from attnrl.errors import ConfigError, DataError, MissingFileError
from attnrl.run import Run
from attnrl.types import Ids, Sampling, Verdict

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.data.records import Record
    from attnrl.data.tasks import Split
    from attnrl.iteration import Grade, Parts, Stream
    from attnrl.local.backend import LocalBackend
    from attnrl.trainer import Evaluate
    from attnrl.verify import Verifier

KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "segmenter": SEGMENTERS,
    "rule": RULES,
    "budget": BUDGETS,
    "estimator": ESTIMATORS,
}


def check_parts(config: Config) -> dict[str, Callable[..., Any]]:
    """The named parts of the algorithm with their options bound; a wrong name or option raises ConfigError."""
    knobs = config.algo.model_dump()
    bound = {}
    for kind, table in KINDS.items():
        try:
            bound[kind] = bind(table, knobs[kind], knobs[f"{kind}_options"], knobs)
        except ValueError as error:
            raise ConfigError(f"algo.{kind}: {error}") from None
    return bound


def build_parts(
    config: Config, *, backend: Backend, stream: Stream, texts: Callable[[Ids], list[str]], grade: Grade
) -> Parts:
    """The parts of an iteration over a backend, a stream of prompts, the token texts and a grader."""
    from attnrl.iteration import Parts

    bound = check_parts(config)
    algo = config.algo
    segmenter = bound["segmenter"]
    return Parts(
        backend=backend,
        stream=stream,
        segment=lambda ids: segmenter(texts(ids)),
        grade=grade,
        rule=bound["rule"],
        budget=bound["budget"],
        estimator=bound["estimator"],
        sampling=Sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k),
        max_response_tokens=config.sampling.max_response_tokens,
        prompts=algo.prompts,
        group=algo.group,
        points=algo.points if algo.rule != "none" else 0,
        width=algo.width,
        filter=algo.filter,
        mode=algo.mode,
        needs_scores=needs_scores(algo.rule) or algo.filter != "none",
        adaptive_batch=algo.adaptive_batch,
        history=algo.history,
        max_prompts=algo.max_prompts,
        drop=algo.drop,
        grade_truncated=algo.grade_truncated,
        activity=getattr(backend, "activity", dict),
    )


def build_grade(verifier: Verifier, decode: Callable[[Ids], str]) -> Grade:
    """A grader of token ids: decode, then verify."""

    def grade(items: Any) -> list[Verdict]:
        return verifier.grade([(decode(ids), answers) for ids, answers in items])

    return grade


def grade_attempts(verifier: Verifier, grade_truncated: bool, **options: Any) -> Callable[..., list[Verdict]]:
    """A grader of attempts: those cut off by the length limit are wrong unless they are to be graded."""

    def grade(attempts: Any) -> list[Verdict]:
        verdicts = verifier.grade([(a.response, a.answers) for a in attempts], **options)
        cut = Verdict(0.0, "truncated")
        whole = zip(attempts, verdicts, strict=True)
        return [v if grade_truncated or a.finish != "length" else cut for a, v in whole]

    return grade


def decoder(tokenizer: Any) -> Callable[[Ids], str]:
    """Token ids -> text, special tokens left out."""

    def decode(ids: Ids) -> str:
        text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text

    return decode


def train_records(config: Config) -> list[Record]:
    """The training problems of a config: files, hub names and made-up tasks; with `data.decontaminate`, without the
    benchmarks' own problems, leaked answers and conflicting or repeated rows. Says what was left out.
    """
    from attnrl.data.audit import clean, decontaminate
    from attnrl.data.benchmarks import load_benchmark
    from attnrl.data.records import load_records

    if not config.data.train:
        raise ConfigError("data.train names no data set; give files, hub names or tasks")
    records: list[Record] = []
    for source in config.data.train:
        if source == "tasks":
            records += task_records(config, "train", config.data.train_tasks)
            continue
        found = load_records(source, strict=not config.data.drop_bad_rows, columns=config.data.columns)
        if not found.records:
            raise DataError(f"{source}: no row can be trained on; {found.report()}")
        if found.skipped:
            show(f"{source}: {found.report()}")
        records += found.records
    if config.data.decontaminate:
        benchmarks = [load_benchmark(name, config.data.directory) for name in config.data.decontaminate]
        without = decontaminate(records, [record for rows in benchmarks for record in rows])
        show(without.report())
        records = list(without.records)
    if config.data.clean:
        kept = clean(records)
        show(kept.report())
        records = list(kept.records)
    return records


def task_records(config: Config, split: Split, count: int) -> list[Record]:
    """Made-up tasks of a split as records."""
    from attnrl.data.tasks import as_records

    return as_records(config.data.tasks, split, count)


def evaluation_records(config: Config) -> dict[str, list[Record]]:
    """The held-out problems of a config, by benchmark."""
    from attnrl.data.benchmarks import BENCHMARKS, load_benchmark
    from attnrl.data.records import load_records

    records: dict[str, list[Record]] = {}
    for name in config.evaluation.benchmarks:
        if name == "tasks":
            records[name] = task_records(config, "test", config.evaluation.tasks)
        elif name in BENCHMARKS:
            records[name] = load_benchmark(name, config.data.directory)
        else:
            records[Path(name).name.split(".")[0]] = list(load_records(name))
    return records


def build_evaluate(
    config: Config, records: Mapping[str, list[Record]], backend: LocalBackend, verifier: Verifier
) -> Evaluate:
    """The held-out evaluation of a run: metrics `eval/<benchmark>/...`; the same seeds each time."""
    from attnrl.data.benchmarks import BENCHMARKS
    from attnrl.data.prompts import render_benchmark
    from attnrl.evaluation import evaluate

    wanted = config.evaluation
    prompts = {
        name: render_benchmark(
            name,
            rows,
            backend.tokenizer,
            template=config.data.template,
            max_prompt_tokens=wanted.max_prompt_tokens,
            system=config.data.system,
            chat_options=config.data.chat_options,
        )
        for name, rows in records.items()
    }
    samples = {n: wanted.samples or (BENCHMARKS[n].samples if n in BENCHMARKS else 1) for n in prompts}

    def measure(iteration: int) -> dict[str, float]:
        report = evaluate(
            backend,
            prompts,
            decode=decoder(backend.tokenizer),
            grade=grade_attempts(verifier, config.algo.grade_truncated),
            samples=samples,
            sampling=Sampling(wanted.temperature, wanted.top_p),
            max_tokens=wanted.max_response_tokens,
            ks=wanted.ks,
            progress=True,
        )
        backend.activity()  # what the evaluation cost is not the next iteration's
        return report.metrics()

    return measure


def model_path(name: str) -> str:
    """Where a model is: "demo" names the tiny one that comes with attnrl."""
    if name != "demo":
        return name
    from importlib import resources

    return str(Path(str(resources.files("attnrl"))) / "assets" / "demo_model")


def newest_model(name: str) -> str:
    """Where a model is, a run directory standing for its newest checkpoint."""
    if not (Path(name) / "checkpoints").is_dir():
        return model_path(name)
    found = Run(Path(name)).checkpoints
    if not found:
        raise MissingFileError(f"{name}: a run directory without a checkpoint yet; give a model, or wait for one")
    return str(found[-1] / "model")
