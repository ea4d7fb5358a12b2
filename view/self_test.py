"""The self-test at start-up: does the engine sample from the policy that the trainer trains?

A canary adapter that visibly changes the model is published and sampled with. Trainer and engine then compare the
log-probabilities of the sampled tokens, over all ranks, so that all ranks decide alike.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common import ranks, run
from common.batch import Batch, pack
from common.environment import Environment, Limits
from common.turns import Question

if TYPE_CHECKING:
    from common.policy import Policy

TEXTS = (
    "The quick brown fox jumps over the lazy dog and",
    "Question: where is the town of the river? Answer:",
    "The capital of the country is a city that",
    "To find the number of apples, we first add",
    "In the year of the great storm, the people of the village",
    "Search: who wrote the book about the sea? Result:",
    "def square(x):\n    return",
    "Let me think about this step by step. First,",
)
SAMPLES, TOKENS = 4, 32  # per text: 1,000 sampled tokens over all ranks, more on more than four
VISIBLE = 0.5  # nats a token by which the canary must change the trainer's log-probabilities
FLOAT32_LIMIT = 1e-3  # nats a token, mean absolute difference of trainer and engine
KL_LIMIT = 0.01  # nats a token, in bf16 or over a 4-bit base
NEARER = 5  # the engine must be so many times nearer to the policy than to its base
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


@dataclass
class Gap:
    """The gap between engine and trainer on `tokens` sampled tokens of all ranks, in nats a token.

    difference    mean |trainer - engine| of log-probabilities
    kl            KL of engine from trainer, estimated by k3
    to_base       mean |base without adapter - engine|
    """

    tokens: int
    difference: float
    kl: float
    to_base: float

    def severity(self, exact: bool) -> float:
        """Return the gap as a share of what rounding explains: above 1 (or nan) the self-test fails.

        exact: both sides compute in float32.
        """
        own = self.difference / FLOAT32_LIMIT if exact else self.kl / KL_LIMIT
        return max(own, NEARER * self.difference / max(self.to_base, 1e-9))

    def __str__(self):
        return (
            f"{self.difference:.2g} nats a token apart on average (KL {self.kl:.2g}; against the base {self.to_base:.2g}; "
            f"{self.tokens} tokens)"
        )


class Probe(Environment):
    """The task of the self-test: prompts of one generation each."""


def check(engine, policy: "Policy") -> Gap:
    """Return the gap between an Engine and the trainer. Raises SystemExit if rounding cannot explain it."""
    exact = policy.dtype == torch.float32 and not engine.args.load_4bit
    with policy.canary(canary_strength(policy, sample(engine, policy))):
        engine.publish(policy)
        batch = sample(engine, policy)
        gap = measure(policy, batch)
        if not gap.severity(exact) <= 1:  # nan fails too
            limit = (
                f"{FLOAT32_LIMIT:g} nats" if exact else f"a KL of {KL_LIMIT:g}, and {NEARER} times nearer than the base"
            )
            raise SystemExit(
                f"Self-test failed: engine and trainer are {gap}. The limit is {limit}. Most likely {cause(policy, batch, gap)}."
            )
    engine.publish(policy)
    if ranks.rank() == 0:
        run.notice(f"self-test passed: engine and trainer are {gap}")
    return gap


def sample(engine, policy: "Policy") -> Batch:
    """Return this rank's samples of an Engine's newest adapter."""
    probe = Probe(policy.tokenizer, Limits(turns=1, turn_tokens=TOKENS))
    # The id enters the seed of a sample: ranks must not repeat each other's.
    questions = [Question(f"self-test-{ranks.rank()}-{i}", text, []) for i, text in enumerate(TEXTS)]
    groups = engine.rollout(probe, questions, max(SAMPLES // ranks.world_size(), 1))
    return pack(groups, [[[1.0] * len(t.turns) for t in g.trajectories] for g in groups])


def measure(policy: "Policy", batch: Batch) -> Gap:
    """Return the gap on the sampled tokens of all ranks' batches."""
    on = batch.mask
    difference = (policy.logps(batch, grad=False) - batch.sampler)[on].double()
    to_base = (policy.logps(batch, adapter=False, grad=False) - batch.sampler)[on]
    k3 = difference.exp() - difference - 1
    count = ranks.total(on.sum())
    means = [ranks.total(values.sum()) / count for values in (difference.abs(), k3, to_base.abs())]
    return Gap(int(count), *means)


def canary_strength(policy: "Policy", batch: Batch) -> float:
    """Return the strength at which a canary moves the log-probabilities of a batch by VISIBLE nats or more on average."""
    before = policy.logps(batch, grad=False)
    strength = 0.01
    for _ in range(12):
        strength *= 2
        with policy.canary(strength):
            change = (policy.logps(batch, grad=False) - before)[batch.mask].abs().mean()
        if ranks.total(change) >= VISIBLE * ranks.world_size():
            break
    return strength


def cause(policy: "Policy", batch: Batch, gap: Gap) -> str:
    """Return the most likely cause of a gap, as the end of a sentence."""
    if gap.to_base < gap.difference / 3:
        return "the engine samples from the base model: the adapter was not applied"
    at_start = policy.temperature
    differences = {}
    for policy.temperature in TEMPERATURES:
        differences[policy.temperature] = float(
            (policy.logps(batch, grad=False) - batch.sampler)[batch.mask].abs().mean()
        )
    policy.temperature = at_start
    best = min(differences, key=differences.get)
    if differences[best] < gap.difference / 3:
        return f"the engine samples at another temperature: about {best:g} instead of {at_start:g}"
    return "they compute the model differently (weights, tokenizer, an unsupported layer)"
