"""The self-test passes healthy pairs of engine and trainer and refuses broken ones, told apart by a factor of 3."""

import contextlib

import pytest
import torch

import train_grpo
from common import run
from common.policy import Policy
from common.rollout import Engine
from view import self_test

TOLD_APART = 3
SCALES = (1.05, 1.1, 1.2, 1.4, 1.8)  # of one decoder layer's output


def sweep(*values):
    return pytest.param(values, marks=pytest.mark.sweep)


@pytest.fixture(
    scope="module",
    params=[
        ("tiny", "bfloat16", 1),
        *(sweep(model, dtype, 5) for model in ("tiny", "smollm2") for dtype in ("float32", "bfloat16")),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def pair(request, tmp_path_factory):
    """Return (policy, engine, whether both compute in float32, number of seeds)."""
    model, dtype, seeds = request.param
    if (model, dtype) == ("smollm2", "bfloat16"):  # a CPU without bfloat16 takes minutes for 1,000 tokens
        fewer = pytest.MonkeyPatch()
        fewer.setattr(self_test, "TEXTS", self_test.TEXTS[:2])
        fewer.setattr(self_test, "TOKENS", 16)
        request.addfinalizer(fewer.undo)
    out = str(tmp_path_factory.mktemp("pair") / "out")
    args = train_grpo.Args(model=model, task="tiny_search", dtype=dtype, out=out, max_context=1024)
    run.setup(args)
    policy = Policy(args)
    return policy, Engine(policy, args), dtype == "float32", seeds


@contextlib.contextmanager
def scaled_layer(policy, scale):
    """Multiply the output of a decoder layer in the middle of the trainer's model."""
    layers = policy.model.get_base_model().get_decoder().layers

    def change(module, given, output):
        return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale

    hook = layers[len(layers) // 2].register_forward_hook(change)
    yield
    hook.remove()


@contextlib.contextmanager
def other_base(policy):
    """Add noise of a tenth of its spread to each matrix of the trainer's base."""
    generator = torch.Generator().manual_seed(0)
    base = [p for p in policy.model.parameters() if not p.requires_grad and p.ndim == 2]
    saved = [p.detach().clone() for p in base]
    with torch.no_grad():
        for p in base:
            p += 0.1 * p.std() * torch.randn(p.shape, generator=generator).to(p)
        yield
        for p, old in zip(base, saved):
            p.copy_(old)


@contextlib.contextmanager
def temperature(policy, value):
    policy.temperature, before = value, policy.temperature
    yield
    policy.temperature = before


def severities(policy, engine, exact, seed):
    """Return {what is wrong: severity of the gap}, from one sample of a healthy engine and one without the adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_A" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
    engine.begin(seed)
    engine.publish(policy)
    of_base = self_test.sample(engine, policy)  # lora_B is zero
    measured = {}
    with policy.canary(self_test.canary_strength(policy, of_base)):
        measured["adapter not applied"] = self_test.measure(policy, of_base)
        engine.publish(policy)
        batch = self_test.sample(engine, policy)
        measured["nothing"] = self_test.measure(policy, batch)
        with temperature(policy, 0.7):
            measured["temperature"] = self_test.measure(policy, batch)
        with other_base(policy):
            measured["other base"] = self_test.measure(policy, batch)
        for scale in SCALES:
            with scaled_layer(policy, scale):
                measured[f"layer x {scale}"] = self_test.measure(policy, batch)
    print(f"seed {seed}:", *(f"{name}: {gap}" for name, gap in measured.items()), sep="\n  ")
    return {name: gap.severity(exact) for name, gap in measured.items()}


def test_a_healthy_pair_passes_and_a_broken_one_is_refused(pair, record_property):
    """Compare severities over seeds: the largest healthy one is below 1, the smallest broken one three times as large
    and above 1. Of a scaled layer in bf16 the smallest scale told apart is reported."""
    policy, engine, exact, seeds = pair
    assert engine.llm.llm_engine.vllm_config.model_config.head_dtype == torch.float32  # of the logits, also in bf16
    found = [severities(policy, engine, exact, seed) for seed in range(seeds)]
    healthy = max(each["nothing"] for each in found)
    least = {name: min(each[name] for each in found) for name in found[0] if name != "nothing"}
    apart = [scale for scale in SCALES if least[f"layer x {scale}"] > max(1, TOLD_APART * healthy)]
    figures = f"healthy {healthy:.2g}, " + ", ".join(f"{name} {value:.2g}" for name, value in least.items())
    record_property("figures", figures)
    assert healthy <= 1
    for name in ("adapter not applied", "temperature", "other base", *(["layer x 1.05"] if exact else [])):
        assert least[name] > max(1, TOLD_APART * healthy), name
    assert apart, "no scale of a layer is told apart"
