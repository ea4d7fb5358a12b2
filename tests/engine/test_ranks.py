"""One rank and two ranks: the same gradient and samples, also where a rank has no work."""

import commands
import pytest
import rank_worker
import torch
from commands import RTPO_ON_RANKS


@pytest.fixture(scope="module")
def results(qwen, two_ranks, tmp_path_factory):
    """Return (results of rank_worker.py on one rank, [those of each of two ranks])."""
    alone = tmp_path_factory.mktemp("ranks") / "gradient"
    rank_worker.main(qwen, alone)
    load = lambda path: torch.load(path, weights_only=False)  # noqa: E731
    return load(f"{alone}.0"), [load(two_ranks / f"gradient.{rank}") for rank in (0, 1)]


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


def test_ranks_know_whether_a_number_is_the_same_on_all(results):
    assert results[0]["alike"] == [True, True] and [r["alike"] for r in results[1]] == [[True, False]] * 2


RTPO, GRPO = "train_rtpo.py --questions 3", "train_grpo.py --questions 1"


@pytest.fixture(
    scope="module",
    params=[RTPO_ON_RANKS, pytest.param(RTPO_ON_RANKS.replace(RTPO, GRPO), marks=pytest.mark.sweep)],
    ids=["rtpo", "grpo"],
)
def runs(request, two_ranks, tmp_path_factory):
    """Return (metrics, samples) of the tiny model on one rank and on two. GRPO: in each step one of two ranks has no
    question. RTPO: one rank has the boundaries of two questions, the other those of one, and not at every turn."""
    words, alone, both = request.param.split(), tmp_path_factory.mktemp("run") / "of1", two_ranks / "rtpo"
    commands.here(*words, "--out", alone)
    if request.param != RTPO_ON_RANKS:
        both = alone.with_name("of2")
        commands.command(*words, "--out", both, ranks=2)
    return [
        (commands.read_lines(out / "metrics.jsonl"), commands.read_lines(out / "samples.jsonl"))
        for out in (alone, both)
    ]


def test_two_ranks_sample_the_same_as_one(runs):
    key = lambda s: (s["kind"], s["step"], s["question_id"], s["forked"], s["sample"])  # noqa: E731
    texts = [
        [(key(s), [t["text"] for t in s["turns"]], s["outcome"]) for s in sorted(samples, key=key)]
        for _, samples in runs
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2 * 5 + sum(line["rollout/trajectories"] or 0 for line in runs[0][0])


def test_two_ranks_learn_as_one(runs):
    one, two = (metrics for metrics, _ in runs)
    assert any(line["optim/grad_norm"] for line in one[1:])
    for a, b in zip(one, two):
        for name in (
            "reward/mean",
            "rollout/trajectories",
            "rollout/sampled_tokens",
            "rollout/action_tokens",
            "policy/entropy",
            "loss/policy",
            "optim/grad_norm",
            "optim/updates",
            "eval/em",
        ):
            assert b[name] == (None if a[name] is None else pytest.approx(a[name], rel=1e-3, abs=1e-7)), name
        if b["policy/sampler_maxdiff"] is not None:
            assert b["policy/sampler_maxdiff"] < 1e-4
