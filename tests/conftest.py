"""Shared by the tests: small random models, hand-made trajectories, and the arguments of train_grpo.py at small sizes."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Path of a random 2-layer Qwen2 with an ordinary tokenizer."""
    import models

    return models.random_qwen(tmp_path_factory.mktemp("qwen"))


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
