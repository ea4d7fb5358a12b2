"""Runs in bfloat16 on a CPU, in place of a GPU: the same path, with the rounding that a GPU has."""

import commands
import pytest

from common import run


def sweep(*names):
    return [pytest.param(name, marks=pytest.mark.sweep) for name in names]


@pytest.mark.parametrize("script", ["train_rtpo.py", *sweep("train_grpo.py", "train_tspo.py", "train_gtpo.py")])
def test_five_steps_in_bfloat16_with_a_resume_between(script, tmp_path, record_property):
    """Engine and trainer stay within 0.05 nats a token and a KL of 0.01; the float32 adapter moves in every step."""
    task = "tiny_math" if script == "train_gtpo.py" else "tiny_search"
    words = (
        f"--model {'tiny-math' if task == 'tiny_math' else 'tiny'} --task {task} --dtype bfloat16 --out {tmp_path}/run"
    )
    words += " --questions 4 --group 4 --eval_questions 4 --eval_every 0 --max_turns 3"
    commands.here(script, *words.split(), "--steps", "3")
    run.CLAIMS.pop().close()  # as at the end of a process
    commands.here(script, "--out", f"{tmp_path}/run", "--resume", "--steps", "5")
    lines = commands.read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    trained = [line for line in lines if line["policy/sampler_absdiff"] is not None]
    worst = {name: max(line[f"policy/sampler_{name}"] for line in trained) for name in ("absdiff", "kl", "maxdiff")}
    ratio = [line["policy/sampler_ratio"] for line in trained]
    figures = ", ".join(f"{name} {value:.2g}" for name, value in worst.items())
    record_property("figures", f"{figures}, ratio {min(ratio):.4f} to {max(ratio):.4f}")
    assert len(trained) >= 3 and worst["absdiff"] < 0.05 and worst["kl"] < 0.01
    assert all(0.98 < each < 1.02 for each in ratio)
    assert all(not line["optim/skipped"] for line in lines) and sum(line["optim/updates"] or 0 for line in lines) >= 1
