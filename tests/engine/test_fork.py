"""Forking with the real engine: RTPO's siblings continue the exact context of their trunk."""

import pytest
import torch

import train_rtpo
from common.batch import pack
from common.environment import Action, Environment, Limits
from common.turns import Question


class Game(Environment):
    """A task in which texts of a length divisible by 3 end the episode and others call a tool."""

    def __init__(self, tokenizer, strip):
        super().__init__(tokenizer, Limits(turns=4, turn_tokens=12, stop=["e"], stop_ids=[tokenizer.eos_token_id]))
        self.strip = strip

    def take(self, n):
        return [Question(f"question {i}", "?", [], draw=i) for i in range(n)]

    def prompt_ids(self, question):
        return self.tokenizer.encode(f"{question.id}: where is the town?")

    def read(self, turn):
        return Action(None if len(turn.text) % 3 == 0 else "echo", turn.text)

    def call(self, turn, question, earlier):
        return f"heard {turn.text[:5]!r} after {len(earlier)}"

    def observe(self, turn, output):
        return output, self.tokenizer.encode(f"\n<information> {output} </information>\n")

    def next_context(self, turns):
        kept = [i for t in turns for i in t.action_ids[self.strip :] + t.observation_ids]
        return turns[0].context_ids + kept

    def finish(self, trajectory, question):
        trajectory.outcome = float(sum(i for t in trajectory.turns for i in t.action_ids) % 2)


@pytest.mark.parametrize("strip", [2, pytest.param(0, marks=pytest.mark.sweep)])
def test_siblings_continue_their_trunk_with_the_newest_policy(make_args, tmp_path, strip):
    """Strip that many ids of each earlier turn from later contexts."""
    from common import ranks, run
    from common.policy import Policy
    from common.rollout import Engine

    shared = vars(make_args(out=str(tmp_path / "out"), questions=3, max_turns=4, lr=0.02))
    args = train_rtpo.Args(**shared, trunks=2, siblings=2)
    args.group = 40
    run.setup(args)
    policy = Policy(args)
    engine = Engine(policy, args)
    engine.begin(1)
    trunks, last, moved = {}, None, 0
    for groups in train_rtpo.collect(engine, Game(policy.tokenizer, strip), args):
        assert engine.loaded == engine.version
        advantages = [train_rtpo.compute_advantages(g, args)[0] for g in groups]
        for g in groups:
            k = g.info.get("turn")
            if k is None:
                trunks[g.question.id] = g.trajectories
                continue
            assert last is None or k <= last
            last = k
            for t in g.trajectories:
                assert t.forked == k and len(t.turns) > k
                trunk = next(c for c in trunks[g.question.id] if all(a is b for a, b in zip(c.turns[:k], t.turns[:k])))
                assert t.turns[k].context_ids == trunk.turns[k].context_ids
        batch = pack(groups, advantages)
        assert len(batch.segments) == sum(len(g.trajectories) for g in groups if "turn" in g.info)
        gap = (policy.logps(batch, grad=False) - batch.sampler)[batch.mask]
        assert float(gap.abs().max()) < 1e-4  # the newest policy sampled every trained token in exactly this context
        batch.weight = train_rtpo.token_weights(batch, ranks.total, args)
        loss, _ = train_rtpo.policy_loss(policy.logps(batch), batch, args)
        loss.backward()
        before = policy.adapter_state()
        moved += policy.step()["grad_norm"] > 0
        assert all(torch.equal(a, b) for a, b in zip(before.values(), policy.adapter_state().values())) == (
            float(loss.detach()) == 0 and not batch.adv.any()
        )
        engine.publish(policy)
    assert last == 0 and moved >= 2
