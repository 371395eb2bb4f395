"""The benchmarks as one table: where each comes from, how many rows it must have, how many samples the paper draws."""

from __future__ import annotations

import os
from dataclasses import dataclass

from attnrl.data.files import data_directory
from attnrl.data.records import Record, load_records
from attnrl.errors import ConfigError, DataError, MissingFileError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One evaluation set.

    >>> BENCHMARKS["aime24"].samples
    32
    """

    hub: str  # source of load_records
    file: str  # name under a data directory, or under its folder eval
    rows: int
    samples: int  # per problem


BENCHMARKS = {
    "aime24": Benchmark("hf:HuggingFaceH4/aime_2024:train", "aime24.parquet", 30, 32),
    "aime25": Benchmark("hf:math-ai/aime25:test", "aime25.parquet", 30, 32),
    "amc23": Benchmark("hf:math-ai/amc23:test", "amc23.parquet", 40, 32),
    "math500": Benchmark("hf:HuggingFaceH4/MATH-500:test", "math500.parquet", 500, 4),
    "minerva": Benchmark("hf:math-ai/minervamath:test", "minerva.parquet", 272, 4),
    "olympiad": Benchmark("hf:math-ai/olympiadbench:test", "olympiad.parquet", 674, 4),
    "gsm8k": Benchmark("hf:openai/gsm8k/main:test", "gsm8k_test.jsonl.gz", 1319, 4),
}


def load_benchmark(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Record]:
    """All records of a benchmark, its row count checked.

    They come from `data_dir`, else from the directory ATTNRL_DATA names, else from the hub. A directory that was named
    is never passed over: a file missing there is an error. Several answers in a row are alternatives.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"benchmark {name!r} is unknown; known are {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    directory = data_directory(data_dir)
    source = benchmark.hub
    if directory is not None:
        places = [directory / "eval" / benchmark.file, directory / benchmark.file]
        found = [place for place in places if place.is_file()]
        if not found:
            raise MissingFileError(
                f"benchmark {name}: neither {places[0]} nor {places[1]} exists; put the file there, or "
                f"unset ATTNRL_DATA and data_dir to take {benchmark.hub} from the hub"
            )
        source = str(found[0])
    try:
        records = load_records(source, strict=True)
    except MissingFileError as error:
        raise MissingFileError(
            f"benchmark {name}: {error}; to use a copy, point ATTNRL_DATA (or data.directory, `attnrl eval "
            f"--data-dir`) to a folder that holds eval/{benchmark.file}"
        ) from error
    if len(records) != benchmark.rows:
        raise DataError(
            f"benchmark {name}: {source} has {len(records)} rows, not {benchmark.rows}; results would not compare with "
            f"published ones, get the full set ({benchmark.hub})"
        )
    return list(records)
