"""Prompts in: records from files and the hub, audits, the prompt stream, the benchmarks, made-up tasks."""

from attnrl.data.audit import clean, contamination, decontaminate, duplicates, leaks
from attnrl.data.benchmarks import BENCHMARKS, SIX, Benchmark, load_benchmark
from attnrl.data.prompts import TEMPLATE, Dropped, render_benchmark, render_prompts
from attnrl.data.records import Record, Records, Skipped, load_records
from attnrl.data.stream import PromptStream

__all__ = [
    "BENCHMARKS",
    "SIX",
    "TEMPLATE",
    "Benchmark",
    "Dropped",
    "PromptStream",
    "Record",
    "Records",
    "Skipped",
    "clean",
    "contamination",
    "decontaminate",
    "duplicates",
    "leaks",
    "load_benchmark",
    "load_records",
    "render_benchmark",
    "render_prompts",
]
