"""Engine and trainer together on one GPU: self-test in bf16, sleep and wake, a 4-bit base, five steps of TSPO.

Takes a few minutes. Without a GPU, the checks that do not need one run on the CPU in float32.
"""

import json

import commands
import engine_check
import pytest
import torch

CUDA = torch.cuda.is_available()
MIB = 2**20


def check(*words):
    """Return the figures of engine_check.py: of a separate process on a GPU, where each engine needs one."""
    if not CUDA:
        return engine_check.main(*map(str, words))
    done = commands.command("tests/gpu/engine_check.py", *words)
    return json.loads(done.stdout.partition("SEEN ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def look(model, tmp_path_factory):
    """Return a function from flags to the figures of engine_check.py. Each set of flags runs once."""
    seen = {}

    def run(flags):
        if flags not in seen:
            out = tmp_path_factory.mktemp("engine") / "run"
            seen[flags] = check(model, out, *flags.split())
        return seen[flags]

    return run


def test_the_self_test_passes_in_the_type_of_the_machine(look):
    """Check in bf16 on a GPU and in float32 on a CPU, before sleep and after three rounds of sleep and wake."""
    seen = look("--sleep full")
    limit = 0.02 if CUDA else 1e-4
    assert seen["difference"] < limit and seen["again"] < limit


@pytest.mark.parametrize("sleep", ["full", "kv", "none"])
def test_sleep_does_not_change_the_samples(look, sleep):
    if not CUDA and sleep != "full":
        pytest.skip("sleep has no effect on a CPU: one mode is enough")
    first, *later = look(f"--sleep {sleep}")["ids"]
    same = [sum(a == b for a, b in zip(first, ids)) / max(len(first), len(ids)) for ids in later]
    # Greedy. In bf16 a near tie may fall either way from batch to batch; a lost adapter would change nearly all ids.
    assert same == [1.0] * 3 if not CUDA else min(same) >= 0.75


@pytest.mark.parametrize("sleep", ["full", "kv", "none"])
def test_sleep_gives_memory_back_and_waking_takes_no_more_than_before(look, sleep, gpu):
    """Check that kv frees the pages (nearly all of --gpu_memory for so small a model), full the weights too, none
    nothing, and that memory does not grow over rounds."""
    seen = look(f"--sleep {sleep}")
    freed = [asleep - awake for asleep, awake in zip(seen["asleep"], seen["awake"])]
    if sleep == "none":
        assert max(map(abs, freed)) < 64 * MIB
    else:
        assert min(freed) > 0.5 * 0.4 * seen["total"]
    assert max(seen["awake"]) - min(seen["awake"]) < 64 * MIB
    assert max(seen["asleep"]) - min(seen["asleep"]) < 64 * MIB


def test_full_sleep_also_frees_the_weights(look, gpu):
    more = look("--sleep full")["asleep"][0] - look("--sleep kv")["asleep"][0]
    assert more > 0.8 * look("--sleep full")["weights"] - 64 * MIB


def test_a_4bit_base_with_adapter_is_the_same_in_engine_and_trainer(look, gpu):
    seen = look("--load_4bit --sleep full")
    assert seen["difference"] < 0.02 and seen["again"] < 0.02
    assert seen["weights"] < look("--sleep full")["weights"]


def test_five_steps_of_tspo_on_the_embedded_model(tmp_path):
    """Check that engine and trainer differ by less than 0.01 nats a token (mean of each step), that no step is skipped,
    and that some step updates the policy."""
    out = tmp_path / "run"
    words = f"--model tiny --steps 5 --questions 4 --group 8 --eval_questions 4 --eval_every 0 --out {out}"
    train = commands.command if CUDA else commands.here
    train("train_tspo.py", *words.split())
    steps = commands.read_lines(out / "metrics.jsonl")[1:]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(line["policy/sampler_absdiff"] for line in steps) < (0.01 if CUDA else 2e-5)
    assert sum(line["optim/updates"] for line in steps) >= 1 and sum(line["optim/skipped"] for line in steps) == 0
