"""Shared by the tests: small random models, hand-made trajectories, and the arguments of train_grpo.py at small sizes."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """The tests of the real engine hold it to float32 on a CPU. A machine with a GPU has another build of it."""
    import torch

    if torch.cuda.is_available():
        for item in items:
            if item.path.name in (
                "test_engine.py",
                "test_ranks.py",
                "test_smoke.py",
                "test_eval.py",
                "test_checkpoint.py",
                "test_context.py",
                "test_rtpo.py",
                "test_data_runs.py",
            ):
                item.add_marker(pytest.mark.skip(reason="written for vLLM's CPU build in float32"))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Path of a random 2-layer Qwen2 with an ordinary tokenizer."""
    import models

    return models.random_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Run directory of two steps of the tiny base, with large enough an update that its answers change."""
    import commands

    out = tmp_path_factory.mktemp("tiny") / "run"
    words = f"--model tiny --steps 2 --questions 8 --lr 2e-3 --eval_questions 40 --out {out}"
    commands.command("train_grpo.py", *words.split())
    return out


@pytest.fixture
def make_args(qwen):
    """Args of train_grpo.py for the random model, with changes."""
    import train_grpo

    def make(**changes):
        options = dict(
            model=qwen, task="tiny_search", lora_rank=8, lora_alpha=16, micro_tokens=4096, max_context=1024, lr=1e-3
        )
        return train_grpo.Args(**(options | changes))

    return make
