"""What a benchmark's JSON says of itself: commit, device, versions and settings, beside what was measured."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

VERSIONS = ("torch", "triton", "transformers", "vllm")


def record(args: argparse.Namespace, **parts: Any) -> dict[str, Any]:
    """The record of a run with these arguments, of which `commit` is one and `device` may be."""
    cuda = torch.cuda.is_available() and getattr(args, "device", "auto") != "cpu"
    found = {"commit": args.commit, "device": torch.cuda.get_device_name() if cuda else "cpu"}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "arguments": {name: str(value) for name, value in vars(args).items()}, **parts}


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes the record to `out`; after each part, so that a run that is stopped leaves what it had."""
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
