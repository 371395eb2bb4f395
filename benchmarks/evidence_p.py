"""Testbed P: a pretrained model of 135M weights on grade-school problems: its data and its weights, ready for a queue.

    ATTNRL_DATA=... python benchmarks/evidence_p.py data runs/p_data      # to warm up on, train on, measure on
    python benchmarks/evidence_p.py model FILE.gguf runs/smollm2          # of a GGUF file
    python benchmarks/evidence.py run benchmarks/evidence_p.toml

Warm-up: GSM8K train and the problems of ASDiv whose formula is plain arithmetic, as steps with blank lines between them
and the answer in a box. Training: three quarters of the MAWPS sets, ASDiv and GSM8K train. Held out: the other quarter
of MAWPS, SVAMP and GSM8K test. A problem's side depends on its words alone, so copies of it in other sets go along.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from attnrl.types import content_hash

MAWPS = ("singleop", "addsub", "multiarith", "singleeq")
SIGNS = {ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub)}
SIGNS |= {ast.Mult: ("*", operator.mul), ast.Div: ("/", operator.truediv)}
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


def held_out(problem: str) -> bool:
    """One problem in four, by its words: spacing, case and punctuation do not count."""
    return int(content_hash(re.sub(r"\W+", " ", problem.lower()).strip()), 16) % 4 == 0


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def make_data(source: Path) -> dict[str, list[Row]]:
    """The files of the testbed, by name."""
    mawps = {
        row["input"]: number(row["target"]) for name in MAWPS for row in read(source / f"easy/mawps_{name}.jsonl.gz")
    }
    made: dict[str, list[Row]] = {"warmup": [], "train": [], "mawps": [], "svamp": [], "gsm8k": []}
    for problem, answer in mawps.items():
        made["mawps" if held_out(problem) else "train"].append({"problem": problem, "answer": answer})
    for row in read(source / "easy/asdiv.jsonl.gz"):
        problem, steps = f"{row['body']} {row['question']}", steps_of(row["formula"])
        if steps and not held_out(problem):
            answer = steps[-1].rpartition("= ")[2]
            made["warmup"].append({"prompt": problem, "response": worked(steps, answer)})
            made["train"].append({"problem": problem, "answer": answer})
    for row in read(source / "train/gsm8k_train.jsonl.gz"):
        response, answer = gsm8k(row)
        made["warmup"].append({"prompt": row["question"], "response": response})
        made["train"].append({"problem": row["question"], "answer": answer})
    for row in read(source / "easy/svamp.jsonl.gz"):
        made["svamp"].append({"problem": f"{row['Body']} {row['Question']}", "answer": number(row["Answer"])})
    made["gsm8k"] = [
        {"problem": row["question"], "answer": gsm8k(row)[1]} for row in read(source / "eval/gsm8k_test.jsonl.gz")
    ]
    return made


def convert(file: Path, output: Path) -> None:
    """Writes the model of a GGUF file as a bfloat16 model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain by now
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(output)
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
