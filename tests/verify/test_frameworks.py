"""The verifier under TRL's and verl's own code, in an environment of its own where this one has not got them.

`make test-verl` runs it; ATTNRL_FRAMEWORKS_PATH is a folder with packages beside those of the interpreter. By hand:

python -m venv .venv-frameworks && .venv-frameworks/bin/pip install -e . trl datasets verl tensordict ray
ATTNRL_FRAMEWORKS_PYTHON=.venv-frameworks/bin/python pytest tests/verify/test_frameworks.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnrl.errors import DataError
from attnrl.verify import trl_reward, verl_reward

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "src/attnrl/assets/demo_model"


def run_there(package: str, script: str, *args: str) -> dict:
    """What a script prints last, run by the interpreter that has the package; skips where none has."""
    python = os.environ.get("ATTNRL_FRAMEWORKS_PYTHON", sys.executable)
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("ATTNRL_FRAMEWORKS_PATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    probe = subprocess.run([python, "-c", f"import {package}"], env=environment, capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"{python} has no {package}; set ATTNRL_FRAMEWORKS_PYTHON to one that has it")
    ran = subprocess.run(
        [python, "-c", script, *args], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


TRL = r"""
import json, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from attnrl.verify import trl_reward

model, out = sys.argv[1:]
data = Dataset.from_list([{"prompt": "1+1?", "answer": "2"}] * 4)
settings = GRPOConfig(
    output_dir=out, per_device_train_batch_size=2, num_generations=2, max_completion_length=4, max_steps=1,
    use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no",
)
trainer = GRPOTrainer(model=model, reward_funcs=trl_reward, args=settings, train_dataset=data)
trainer.train()
rows = [{"prompt": "q", "answer": gold} for gold in ("0.5", "0.5", "", "3")]
texts = [r"\boxed{\frac{1}{2}}", r"\boxed{2}", r"\boxed{1}", r"\boxed{99999999!}"]
plain = trainer._calculate_rewards(rows, ["q"] * 4, texts, [[1]] * 4)
chats = [[{"role": "assistant", "content": text}] for text in texts]
chat = trainer._calculate_rewards(rows, [[{"role": "user", "content": "q"}]] * 4, chats, [[1]] * 4)
print(json.dumps({"log": trainer.state.log_history[0], "plain": str(plain.tolist()), "chat": str(chat.tolist())}))
"""


@pytest.mark.slow
def test_trl_trains_with_it_and_leaves_errors_out(tmp_path: Path) -> None:
    said = run_there("trl", TRL, str(MODEL), str(tmp_path))
    assert 0.0 <= said["log"]["rewards/trl_reward/mean"] <= 1.0
    assert said["plain"] == said["chat"] == "[[1.0], [0.0], [nan], [0.0]]"


VERL = r"""
import asyncio, json
import numpy as np, torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

class Letters:
    def decode(self, ids, skip_special_tokens):
        return bytes(ids.tolist()).decode()

tokenizer = Letters()
config = OmegaConf.create({"reward": {
    "custom_reward_function": {"path": "pkg://attnrl.verify", "name": "verl_reward", "reward_kwargs": {}},
    "reward_manager": {"source": "register", "name": "naive"},
}})

async def graded(text, gold):
    ids = torch.tensor([list(text.encode())])
    tensors = {"prompts": ids[:, :1], "responses": ids, "attention_mask": torch.ones(1, ids.shape[1] + 1).long()}
    others = {"data_source": ["math"], "reward_model": [{"ground_truth": gold}], "extra_info": [{}]}
    data = DataProto.from_dict(tensors, {k: np.array(v, dtype=object) for k, v in others.items()})
    return await load_reward_manager(config, tokenizer).run_single(data)

async def main():
    return [await graded("The answer is 12", "12.0"), await graded("The answer is 12", "13"),
            await graded("The answer is 12", np.array(["13", "12"])), await graded("The answer is 12", "")]

print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.slow
def test_verl_finds_it_by_its_name_and_takes_its_scores() -> None:
    said = run_there("verl", VERL)
    assert [row["reward_score"] for row in said] == [1.0, 0.0, 1.0, 0.0]
    assert [row["reward_extra_info"]["acc"] for row in said] == [1.0, 0.0, 1.0, 0.0]
    assert [row["reward_extra_info"]["verify_error"] for row in said] == [0.0, 0.0, 0.0, 1.0]
    assert {row["reward_extra_info"]["pred"] for row in said[:3]} == {"12"}


def test_golds_of_every_layout_are_understood() -> None:
    golds = ["4", 4, ["3", "4"], np.array(["3", "4"]), 4.0, None, [None], ""]
    texts = [r"\boxed{4}"] * len(golds)
    assert trl_reward(prompts=texts, completions=texts, ground_truth=golds) == [1.0] * 5 + [None] * 3
    assert [verl_reward("", r"\boxed{4}", gold, {"a": 1}, other=2)["score"] for gold in golds] == [1.0] * 5 + [0.0] * 3


def test_the_first_known_column_is_the_gold_and_none_is_said() -> None:
    said = trl_reward(["q"], [r"\boxed{4}"], solution=["5"], answer=["4"], completion_ids=[[1]], trainer_state=None)
    assert said == [1.0]
    with pytest.raises(DataError, match="name one of answer, final_answer"):
        trl_reward(["q"], ["4"], label=["4"])
