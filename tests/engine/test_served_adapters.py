"""Adapters of other origins are trained and served alike."""

import pytest
import small_adapters
import torch

import train_grpo
from common import run
from common.policy import Policy
from common.rollout import Engine
from view import self_test

WIDE = dict(target_modules="all-linear", rank_pattern={"q_proj": 20, "down_proj": 12}, alpha_pattern={"v_proj": 3})


@pytest.fixture(scope="module", params=["wide", "narrow"])
def made(request, qwen, tmp_path_factory):
    """Return (engine, function that makes a policy of an adapter). narrow: started for an adapter of two layers."""
    folder = tmp_path_factory.mktemp(request.param)

    def policy(name, **changes):
        adapter = small_adapters.write(folder / name, qwen, **changes)
        args = train_grpo.Args(
            model=qwen, task="tiny_search", out=str(folder / "run"), max_context=1024, adapter=str(adapter)
        )
        return args, Policy(args)

    args, first = policy(
        "first", **(WIDE if request.param == "wide" else small_adapters.SERVED["ranks by layer, above r"])
    )
    run.setup(args)
    engine = Engine(first, args)
    assert first.lora_rank == 20
    self_test.check(engine, first)
    makes = small_adapters.SERVED if request.param == "wide" else ["two layers", "one layer", "rank-stabilized"]
    return engine, {name: policy(name, **small_adapters.SERVED[name])[1] for name in makes}


def test_trainer_and_engine_agree_on_adapters_of_every_make(made):
    """The self-test compares them; its limits would let an adapter pass that is served with another scale on few layers."""
    engine, policies = made
    for name, policy in policies.items():
        found = self_test.check(engine, policy)
        assert found.difference < 2e-5 and found.to_base > 0.4, (name, found)


def test_an_adapter_of_another_make_is_saved_as_it_came(made, tmp_path, qwen):
    engine, policies = made
    for name, policy in policies.items():
        policy.save_adapter(tmp_path / name)
        again = Policy(train_grpo.Args(model=qwen, max_context=1024, adapter=str(tmp_path / name)))
        states = policy.adapter_state(), again.adapter_state()
        assert states[0].keys() == states[1].keys() and again.lora_rank == policy.lora_rank
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name
