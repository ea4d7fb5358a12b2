"""Fixtures for all tests: small random models, a finished run, and small arguments of train_grpo.py."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: engines of small models start faster
ROOT = Path(__file__).resolve().parent.parent
# Tests of other folders import test_memory.py and test_policy.py of tests/engine, and the programs of runs/.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "engine"), str(ROOT / "runs")]

import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """Skip the tests of the real engine on a machine with a GPU: they expect vLLM's CPU build in float32."""
    import torch

    if torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "engine":
                item.add_marker(pytest.mark.skip(reason="written for vLLM's CPU build in float32"))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """Return the path of a random 2-layer Qwen2 with an ordinary tokenizer."""
    import small_models

    return small_models.random_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Return the run directory of two steps of the tiny base, whose update is large enough to change its answers."""
    import commands

    out = tmp_path_factory.mktemp("tiny") / "run"
    words = f"--model tiny --steps 2 --questions 6 --lr 2e-3 --eval_questions 32 --out {out}"
    commands.here("train_grpo.py", *words.split())
    return out


@pytest.fixture(scope="session")
def two_ranks(qwen, tiny_run, tmp_path_factory):
    """Start two ranks once for several tests. Returns a folder: rank_worker.py writes gradient.0 and gradient.1 there,
    RTPO_ON_RANKS writes its run to rtpo, EVAL_ON_RANKS evaluates tiny_run in eval, and printed.txt has all output."""
    import commands

    folder = tmp_path_factory.mktemp("two_ranks")
    several = [
        ["rank_worker.py", qwen, f"{folder}/gradient"],
        [*commands.RTPO_ON_RANKS.split(), "--out", f"{folder}/rtpo"],
        [*commands.EVAL_ON_RANKS.split(), "--adapter", f"{tiny_run}/adapter", "--out", f"{folder}/eval"],
    ]
    done = commands.command("tests/helpers/in_turn.py", *map(json.dumps, several), ranks=2)
    (folder / "printed.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def small_model(qwen):
    """Return the --model of make_args. tests/unit overrides it with a model without weights."""
    return qwen


@pytest.fixture
def make_args(small_model):
    """Return a function that makes Args of train_grpo.py for the small model, with changes."""
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
