"""The trainer on one GPU, without vLLM:  pytest tests/gpu/test_gpu_policy.py    under a minute

Without a GPU the tests run on the CPU, except those of the GPU's memory.
"""

import math

import pytest
import random_groups
import test_memory
import test_policy
import torch

import train_grpo
from common.batch import pack
from common.policy import Policy
from view import estimate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(model, scale=0.02, **changes):
    """Return a policy whose adapter is not zero."""
    options = dict(task="tiny_search", lora_rank=8, lora_alpha=16, max_context=1024, micro_tokens=1024, lr=1e-3)
    torch.manual_seed(0)
    policy = Policy(train_grpo.Args(model=model, **(options | changes)), DEVICE)
    test_policy.enlarge(policy, scale)
    return policy


def gradients(policy, batch, micro_tokens):
    return test_policy.gradient(policy, batch, train_grpo.Args(task="tiny_search"), micro_tokens).double().cpu()


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_float32_packing_and_micro_batches_give_one_gradient(model):
    """Compare all rows at once with one row per forward pass: equal to 1e-4 (TF32 is off by default)."""
    policy, batch = make(model, dtype="float32"), pack(*random_groups.groups())
    whole = gradients(policy, batch, 10_000)
    assert relative(gradients(policy, batch, 1), whole) < 1e-4
    rows = [batch.select([i]) for i in range(len(batch.segments))]
    alone = torch.cat([policy.logps(row, grad=False) for row in rows])
    assert torch.allclose(policy.logps(batch, grad=False), alone, atol=1e-4)


def test_bfloat16_log_probabilities_are_those_of_float32_within_its_noise(model):
    batch = pack(*random_groups.groups())
    exact, rough = (make(model, dtype=dtype).logps(batch, grad=False) for dtype in ("float32", "bfloat16"))
    difference = (exact - rough)[batch.mask].abs()
    assert 0 < float(difference.mean()) < 0.02 and float(difference.max()) < 0.2


def test_attention_within_a_segment_is_the_models_own_in_bfloat16(model):
    from transformers import AutoModelForCausalLM

    policy, batch = make(model, dtype="bfloat16"), pack(*random_groups.groups())
    ids = batch.ids[: batch.segments[0].end][None].to(DEVICE)
    own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).to(DEVICE)
    with torch.no_grad(), policy.model.disable_adapter():
        ours = policy.model(input_ids=ids, segments=[(0, ids.shape[1])]).logits[0].float().log_softmax(-1)
        theirs = own(input_ids=ids).logits[0].log_softmax(-1)
    assert float((ours - theirs).abs().mean()) < 0.02


def test_checkpointing_gives_the_same_gradient(model):
    batch = pack(*random_groups.groups())
    plain, again = (gradients(make(model, dtype="float32", grad_checkpoint=on), batch, 1024) for on in (False, True))
    assert relative(again, plain) < 1e-5


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("load_4bit", [False, True])
def test_steps_in_bfloat16_lower_the_loss(model, load_4bit, optim):
    """Check that eight steps on one batch raise the log-probabilities of tokens with positive advantage and lower the
    others, over a 4-bit base too."""
    policy, batch = make(model, 0.0, dtype="bfloat16", load_4bit=load_4bit, optim=optim), pack(*random_groups.groups())
    reference = policy.logps(batch, adapter=False, grad=False)
    fresh = policy.logps(batch, grad=False)
    assert torch.equal(fresh, reference)  # B is zero
    for _ in range(8):
        batch.weight = train_grpo.token_weights(batch, float, train_grpo.Args(task="tiny_search"))
        (-(batch.weight * batch.adv * policy.logps(batch)).sum()).backward()
        assert policy.step()["updates"] == 1
    gain = (batch.weight * batch.adv * (policy.logps(batch, grad=False) - fresh)).sum()
    assert float(gain) > 0.01
    assert torch.equal(policy.logps(batch, adapter=False, grad=False), reference)  # the base has not moved
    assert all(math.isfinite(float(p.detach().abs().max())) for p in policy.parameters)


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_an_update_on_the_gpu_matches_the_plan_within_15_percent(model, grad_checkpoint, gpu):
    """Compare the allocator's peak beyond the model with the plan. (On a CPU: tests/engine/test_memory.py.)"""
    tokens = 2048
    policy = make(model, dtype="bfloat16", grad_checkpoint=grad_checkpoint, micro_tokens=tokens)
    batch = test_memory.packed(tokens, rows=2)

    def update():
        logp, _ = policy.logps(batch, moments=["entropy"])
        logp.sum().backward()

    update()
    policy.optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update()
    measured = torch.cuda.max_memory_allocated() - before
    args = train_grpo.Args(
        lora_rank=8, grad_checkpoint=grad_checkpoint, micro_tokens=tokens, max_context=1024, dtype="bfloat16"
    )
    rows = estimate.make(estimate.sizes(test_memory.empty_model(model)), args, 24 * 2**30).update
    planned = {row.name: row.bytes for row in rows}
    parts = ("trainer: activations", "trainer: last hidden states", "trainer: at the peak")
    total = planned["trainer: gradients"] // 2 + sum(planned[name] for name in parts)
    assert measured / total == pytest.approx(1, abs=0.15)
