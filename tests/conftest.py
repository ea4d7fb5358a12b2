"""Shared by the tests: small random models, hand-made trajectories, and the arguments of train_grpo.py at small sizes."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
# tests/engine: other tests use the published sizes and the batches of its tests.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "engine")]

import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """Skip the tests of the real engine on a machine with a GPU, which has another build of it: they expect float32 on a CPU."""
    import torch

    if torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "engine":
                item.add_marker(pytest.mark.skip(reason="written for vLLM's CPU build in float32"))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Path of a random 2-layer Qwen2 with an ordinary tokenizer."""
    import small_models

    return small_models.random_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Run directory of two steps of the tiny base, with large enough an update that its answers change."""
    import commands

    out = tmp_path_factory.mktemp("tiny") / "run"
    words = f"--model tiny --steps 2 --questions 8 --lr 2e-3 --eval_questions 40 --out {out}"
    commands.command("train_grpo.py", *words.split())
    return out


@pytest.fixture(scope="session")
def small_model(qwen):
    """What make_args names as --model. tests/unit has one without weights."""
    return qwen


@pytest.fixture
def make_args(small_model):
    """Args of train_grpo.py for the small model, with changes."""
    import train_grpo

    def make(**changes):
        options = dict(
            model=small_model,
            task="tiny_search",
            lora_rank=8,
            lora_alpha=16,
            micro_tokens=4096,
            max_context=1024,
            lr=1e-3,
        )
        return train_grpo.Args(**(options | changes))

    return make
