"""A run of the embedded mathematics task."""

import commands


def test_the_math_base_starts_between_0_1_and_0_5_and_computes(tmp_path):
    words = "--model tiny-math --steps 1 --questions 2 --group 4 --eval_questions 24 --unsafe_python"
    commands.here("train_grpo.py", *words.split(), "--out", tmp_path / "run")
    metrics = commands.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert 0.1 <= metrics[0]["eval/em"] <= 0.5
    assert metrics[0]["eval/tool_used"] > 0.9 and metrics[1]["rollout/tool_success"] > 0.9
