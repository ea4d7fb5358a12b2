"""The contexts of --context with the real engine: training uses the sampled contexts."""

import pytest
import scripted_engine
import torch

import train_grpo
from common import environment, rollout, run
from common.batch import pack
from common.policy import Policy
from common.turns import Question
from tasks import search_qa
from tools.search import Search

SECRET = "zzz"  # occurs in thinking only


class Restless(search_qa.SearchQA):
    """A task in which every completion is a search, and text between an `a` and an `e` counts as thinking."""

    def decode(self, ids):
        return super().decode(ids).replace("a", "<think>").replace("e", "</think>")

    def read(self, turn):
        return environment.Action("search", "Ada Cole")


@pytest.fixture(scope="module")
def engine(qwen, tmp_path_factory):
    """Return (policy with a large random adapter, engine, args)."""
    args = train_grpo.Args(
        model=qwen,
        out=str(tmp_path_factory.mktemp("engine") / "out"),
        lora_rank=8,
        lora_alpha=16,
        max_context=1024,
        max_turn_tokens=100,
        max_turns=4,
        questions=4,
    )
    run.setup(args)
    policy = Policy(args)
    made = rollout.Engine(policy, args)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    made.publish(policy)
    return policy, made, args


@pytest.mark.parametrize(
    "context, window",
    [
        ("strip_think", 2),
        ("window", 1),
        *(pytest.param(*one, marks=pytest.mark.sweep) for one in (("full", 2), ("window", 2))),
    ],
)
def test_engine_and_trainer_agree_on_contexts_that_do_not_grow(engine, context, window):
    policy, made, args = engine
    changes = vars(args) | dict(context=context, window=window)
    task = Restless(train_grpo.Args(**changes), policy.tokenizer, Search(scripted_engine.DOCUMENTS, 1), [], [])
    task.limits.stop = ["t"]
    made.begin(1)
    groups = made.rollout(task, [Question(str(i), f"Who is {i}?", []) for i in range(3)], 3)
    trajectories = [t for g in groups for t in g.trajectories]
    batch = pack(groups, [[[1.0] * len(t.turns) for t in g.trajectories] for g in groups])
    ratio = (policy.logps(batch, grad=False) - batch.sampler)[batch.mask].exp()
    assert (ratio - 1).abs().max() < 1e-4
    assert int(batch.mask.sum()) == sum(len(turn.action_ids) for t in trajectories for turn in t.turns) > 300
    more = len(batch.segments) - len(trajectories)
    assert more == 0 if context == "full" else more > len(trajectories) / 2  # rows beyond one per trajectory
