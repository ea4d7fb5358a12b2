"""One rank and two ranks: the same gradient, the same samples, and a rank without work takes part."""

import json

import commands
import pytest
import torch


@pytest.fixture(scope="module")
def results(qwen, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        commands.command("tests/rank_worker.py", qwen, out / f"of{ranks}", ranks=ranks)
    load = lambda name: torch.load(out / name, weights_only=False)  # noqa: E731
    return load("of1.0"), [load("of2.0"), load("of2.1")]


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize("average", ["token", "turn", "trajectory", "constant"])
def test_two_ranks_give_the_gradient_of_one(results, count, average):
    one, two = results[0][count, average], [r[count, average] for r in results[1]]
    assert float(one.norm()) > 0
    assert torch.equal(*two)
    assert float((two[0] - one).norm() / one.norm()) < 1e-5


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(results):
    assert [r["skipped"] for r in results[1]] == [1, 1]
    assert all(r["unchanged"] for r in results[1])


def test_training_on_two_ranks_samples_and_learns_as_on_one(qwen, tmp_path):
    """--questions 1: one of the two ranks has no question at all in each step. The real engine on both ranks."""
    corpus, questions = tmp_path / "c.jsonl", tmp_path / "q.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Oakford", "text": "Oakford is a town."}) + "\n")
    questions.write_text(
        "".join(json.dumps({"question": f"Which town is {i}?", "answers": ["Oakford"]}) + "\n" for i in range(9))
    )
    runs = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        words = f"--steps 2 --questions 1 --group 4 --max_turns 2 --max_turn_tokens 16 --max_context 512 --eval_questions 3 --out {out}"
        # a learning rate of nearly nothing: whatever differs in the second step was not caused by the first
        more = f"--lr 1e-9 --lora_rank 8 --kl_coef 0.1 --adv_std --model {qwen} --task {questions} --corpus {corpus}"
        commands.command("train_grpo.py", *words.split(), *more.split(), ranks=ranks)
        runs.append((commands.read_lines(out / "metrics.jsonl"), commands.read_lines(out / "samples.jsonl")))
    key = lambda s: (s["step"], s["question_id"], s["sample"])  # noqa: E731
    texts = [[(key(s), [t["text"] for t in s["turns"]]) for s in sorted(samples, key=key)] for _, samples in runs]
    assert texts[0] == texts[1] and len(texts[0]) == 2 * 3 + 2 * 4
    for one, two in zip(*(metrics for metrics, _ in runs)):
        for name in (
            "reward/mean",
            "rollout/turns",
            "rollout/action_tokens",
            "policy/entropy",
            "optim/updates",
            "eval/turns",
            "loss/kl_ref",
        ):
            assert two[name] == (None if one[name] is None else pytest.approx(one[name], rel=1e-4, abs=1e-7)), name
