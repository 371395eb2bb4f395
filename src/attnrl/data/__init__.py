"""Prompts in: records from files and the hub, audits, the prompt stream, the benchmarks, made-up tasks."""

from attnrl.data.audit import clean, decontaminate
from attnrl.data.benchmarks import load_benchmark
from attnrl.data.prompts import render_prompts
from attnrl.data.records import load_records
from attnrl.data.stream import PromptStream

__all__ = ["PromptStream", "clean", "decontaminate", "load_benchmark", "load_records", "render_prompts"]
