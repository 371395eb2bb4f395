"""Prompts and responses of a file as a source of warm-up batches. No torch here.

One row per pair, in any file that training data may come in: a column with the prompt (text, or a chat with one user
message) and a column with the response.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.data.files import iterate_rows
from attnrl.data.prompts import render_prompts
from attnrl.data.records import Record, chat_text, last_boxed
from attnrl.errors import DataError
from attnrl.local.examples import Example, Examples, lay_out
from attnrl.types import as_ids, content_hash

HELD_OUT = 16  # one prompt in this many


@dataclass(frozen=True, slots=True)
class PairFile:
    """Where pairs of prompt and response are."""

    file: str  # or a directory, or a hub name
    prompt: str = "prompt"  # column
    response: str = "response"  # column
    template: str = "{problem}"  # text around the prompt, before the model's chat template


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a file in token ids. Whole prompts are held out: by their text, not by their place in the file."""

    origin: PairFile
    train: tuple[Example, ...]
    test: tuple[Example, ...]
    tokens: int  # T of a batch
    seed: int = 0
    left_out: tuple[str, ...] = ()  # rows longer than a batch

    def batches(self, workers: int = 0) -> Generator[Examples, None, None]:
        """Epoch after epoch in a new order, as many whole pairs in a batch as fit; needs no other process."""
        chosen: list[Example] = []
        room = self.tokens
        for epoch in itertools.count():
            for i in np.random.default_rng([self.seed, epoch]).permutation(len(self.train)):
                length = len(self.train[i].prompt) + len(self.train[i].solution)
                if length > room:
                    yield lay_out(chosen, self.tokens)
                    chosen, room = [], self.tokens
                chosen.append(self.train[i])
                room -= length

    def held_out(self, count: int) -> list[Example]:
        return list(self.test[:count])

    def described(self) -> dict[str, Any]:
        return {
            "data": {name: getattr(self.origin, name) for name in ("file", "prompt", "response", "template")},
            "pairs": {"train": len(self.train), "held_out": len(self.test), "too_long": len(self.left_out)},
        }


def load_pairs(origin: PairFile, tokenizer: Any, *, tokens: int, seed: int = 0) -> Pairs:
    """The pairs of a file; those longer than a batch of `tokens` are left out."""
    records, responses = _read(origin)
    prompts, _ = render_prompts(records, tokenizer, template=origin.template, max_prompt_tokens=2**31, unique=False)
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    kept: list[tuple[str, Example]] = []
    left_out = []
    for record, prompt, response, ids in zip(records, prompts, responses, encoded, strict=True):
        if len(prompt.ids) + len(ids) + 1 > tokens:
            left_out.append(record.where)
            continue
        solution = as_ids([*ids, tokenizer.eos_token_id])
        kept.append((content_hash(record.problem), Example(prompt.ids, solution, final_answer(response))))
    names = sorted({name for name, _ in kept})
    if len(names) < 2:
        raise DataError(
            f"{origin.file}: {len(names)} different prompts of at most {tokens} tokens with their response, where at "
            f"least 2 are needed, one of them held out; {len(left_out)} rows are longer: raise --batch-tokens"
        )
    test = set(names[: -(-len(names) // HELD_OUT)])
    return Pairs(
        origin,
        tuple(example for name, example in kept if name not in test),
        tuple(example for name, example in kept if name in test),
        tokens,
        seed,
        tuple(left_out),
    )


def _read(origin: PairFile) -> tuple[list[Record], list[str]]:
    records, responses = [], []
    for row in iterate_rows(origin.file, "train"):
        columns = {name.lower(): value for name, value in row.columns.items()}
        for name in (origin.prompt, origin.response):
            if name.lower() not in columns:
                raise DataError(
                    f"{row.where}: no column {name!r}; columns found: {', '.join(row.columns) or 'none'}; name them "
                    "with --prompt and --response"
                )
        text, system = chat_text(columns[origin.prompt.lower()])
        response = columns[origin.response.lower()]
        if not text or not text.strip():
            raise DataError(f"{row.where}: {origin.prompt} is no text and no chat with one user message; fix the row")
        if not isinstance(response, str) or not response.strip():
            raise DataError(f"{row.where}: {origin.response} is no text or empty; fix or remove the row")
        records.append(Record(text, (), Path(origin.file).name, row.where, system=system))
        responses.append(response)
    return records, responses


def final_answer(text: str) -> str | None:
    r"""What a text states as its answer: its last box, or what follows its last ####; None where it has neither.

    >>> final_answer(r"So \boxed{\frac{1}{2}}."), final_answer("2 + 2 = 4 #### 4"), final_answer("No.")
    ('\\frac{1}{2}', '4', None)
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2].strip() if "####" in text else None
