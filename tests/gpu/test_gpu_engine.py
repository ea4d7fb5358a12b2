"""Engine and trainer together on one GPU: self-test in bf16, sleep and wake, a 4-bit base, five steps of TSPO.   A few minutes

Without a GPU the same checks run on the CPU in float32, but for what is said to need one. Each engine has a process of its own.
"""

import json
import os

import commands
import pytest
import torch

CUDA = torch.cuda.is_available()
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import small_models

    folder = tmp_path_factory.mktemp("model")
    return small_models.random_qwen(
        folder, hidden_size=512, intermediate_size=1536, num_attention_heads=8, initializer_range=0.03
    )


@pytest.fixture(scope="module")
def look(model, tmp_path_factory):
    """What engine_check.py sees, by its flags; each is run once."""
    seen = {}

    def run(flags):
        if flags not in seen:
            out = tmp_path_factory.mktemp("engine") / "run"
            done = commands.command("tests/gpu/engine_check.py", model, out, *flags.split())
            line = next(line for line in done.stdout.splitlines() if line.startswith("SEEN "))
            seen[flags] = json.loads(line.removeprefix("SEEN "))
        return seen[flags]

    return run


def test_the_self_test_passes_in_the_type_of_the_machine(look):
    """bf16 on a GPU, float32 on a CPU; before sleep and after three rounds of sleep and wake."""
    seen = look("--sleep full")
    limit = 0.02 if CUDA else 1e-4
    assert seen["difference"] < limit and seen["again"] < limit


@pytest.mark.parametrize("sleep", ["full", "kv", "none"])
def test_an_engine_that_slept_samples_what_it_sampled_before(look, sleep):
    if not CUDA and sleep != "full":
        pytest.skip("sleep has no effect on a CPU: one mode is enough")
    first, *later = look(f"--sleep {sleep}")["ids"]
    same = [sum(a == b for a, b in zip(first, ids)) / max(len(first), len(ids)) for ids in later]
    # Greedy. In bf16 a near tie may fall either way from one batch to the next; a base without its adapter changes nearly all.
    assert same == [1.0] * 3 if not CUDA else min(same) >= 0.75


@pytest.mark.parametrize("sleep", ["full", "kv", "none"])
def test_sleep_gives_memory_back_and_waking_takes_no_more_than_before(look, sleep, gpu):
    """kv frees the pages, nearly all of --gpu_memory with so small a model; full the weights too; none nothing. No growth over rounds."""
    seen = look(f"--sleep {sleep}")
    freed = [asleep - awake for asleep, awake in zip(seen["asleep"], seen["awake"])]
    if sleep == "none":
        assert max(map(abs, freed)) < 64 * MIB
    else:
        assert min(freed) > 0.5 * 0.4 * seen["total"]
    assert max(seen["awake"]) - min(seen["awake"]) < 64 * MIB
    assert max(seen["asleep"]) - min(seen["asleep"]) < 64 * MIB


def test_full_frees_the_weights_beyond_what_kv_frees(look, gpu):
    more = look("--sleep full")["asleep"][0] - look("--sleep kv")["asleep"][0]
    assert more > 0.8 * look("--sleep full")["weights"] - 64 * MIB


def test_a_4bit_base_with_adapter_is_the_same_in_engine_and_trainer(look, gpu):
    seen = look("--load_4bit --sleep full")
    assert seen["difference"] < 0.02 and seen["again"] < 0.02
    assert seen["weights"] < look("--sleep full")["weights"]


def test_five_steps_of_tspo_on_the_embedded_model(tmp_path):
    """Engine and trainer stay within 0.01 nats a token of each other (mean of each step), every step is finite, and some update the policy."""
    out = tmp_path / "run"
    words = f"--model tiny --steps 5 --questions 8 --group 8 --eval_questions 16 --eval_every 0 --out {out}"
    commands.command("train_tspo.py", *words.split(), env={"OMP_NUM_THREADS": str(os.cpu_count() or 1)})
    steps = commands.read_lines(out / "metrics.jsonl")[1:]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(line["policy/sampler_absdiff"] for line in steps) < (0.01 if CUDA else 2e-5)
    assert sum(line["optim/updates"] for line in steps) >= 1 and sum(line["optim/skipped"] for line in steps) == 0
