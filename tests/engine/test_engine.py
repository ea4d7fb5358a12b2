"""The real vLLM engine with a small random model: engine and trainer agree, and the schedule cannot change a sample."""

import random
import time

import pytest
import torch

import train_grpo
from common import loop, run, turns
from common.batch import pack
from common.environment import Action, Environment, Limits
from common.policy import Policy
from common.rollout import Engine
from common.turns import Question
from view import self_test


class Echo(Environment):
    """A task in which every generation ends at an `e` and calls a tool, which quotes its input after a random wait."""

    def __init__(self, tokenizer, longest_wait=0.0, prompt_tokens=90):
        super().__init__(tokenizer, Limits(turns=4, turn_tokens=24, stop=["e"], stop_ids=[tokenizer.eos_token_id]))
        self.longest_wait, self.prompt_tokens = longest_wait, prompt_tokens
        self.waits = random.Random(time.time_ns())

    def prompt_ids(self, question):
        rng = random.Random(question.id)
        return [rng.randrange(1, 300) for _ in range(self.prompt_tokens - 1)] + self.tokenizer.encode(".")

    def read(self, turn):
        return Action("echo", turn.text)

    def call(self, turn, question, earlier):
        time.sleep(self.waits.random() * self.longest_wait)
        return f"heard {len(turn.text)} letters of {turn.text[:8]!r}"

    def observe(self, turn, output):
        return output, self.tokenizer.encode(f"\n<information> {output} </information>\n")


@pytest.fixture(scope="module", params=["", "asynchronous"])
def made(request, qwen, tmp_path_factory):
    """Return (policy, engine, whether torch, numpy and random drew the same numbers with and without a new engine).

    asynchronous: with the scheduling that vLLM has on CUDA, where outputs come a step late; its CPU build turns it off.
    """
    import numpy
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config
    forced = pytest.MonkeyPatch()
    if request.param:
        forced.setattr(
            CpuPlatform,
            "check_and_update_config",
            classmethod(lambda cls, config: own(config) or setattr(config.scheduler_config, "async_scheduling", True)),
        )

    out = str(tmp_path_factory.mktemp("engine") / "out")
    args = train_grpo.Args(
        model=qwen,
        task="tiny_search",
        out=out,
        lora_rank=8,
        lora_alpha=16,
        max_context=1024,
        max_turn_tokens=24,
        questions=16,
        micro_tokens=8192,
    )
    run.setup(args)
    policy = Policy(args)
    draw = lambda: (random.random(), numpy.random.rand(), float(torch.rand(1)))  # noqa: E731
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    engine = Engine(policy, args)
    forced.undo()
    assert bool(core(engine).batch_queue is not None) == bool(request.param)
    yield policy, engine, expected == draw()


def core(engine):
    return engine.llm.llm_engine.engine_core.engine_core


def questions(n):
    return [Question(f"question {i}", "?", []) for i in range(n)]


def enlarge(policy, seed):
    """Make the adapter large and random, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)


def ids(groups):
    return [[[turn.action_ids for turn in t.turns] for t in g.trajectories] for g in groups]


def packed(groups):
    return pack(groups, [[[1.0] * len(t.turns) for t in g.trajectories] for g in groups])


def test_starting_the_engine_leaves_the_random_states_alone(made):
    assert made[2]


def test_self_test_passes_and_leaves_the_adapter_as_it_was(made):
    policy, engine, _ = made
    before = [p.detach().clone() for p in policy.parameters]
    found = self_test.check(engine, policy)
    assert found.difference < 2e-5 and found.to_base > 0.4 and found.tokens > 500
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters))


def test_self_test_stops_when_the_adapter_is_not_applied(made, monkeypatch):
    policy, engine, _ = made
    monkeypatch.setattr(engine, "publish", lambda policy: None)
    with pytest.raises(SystemExit, match="the adapter was not applied"):
        self_test.check(engine, policy)


@pytest.mark.parametrize(
    "changed, factor, cause",
    [
        ("model.layers.1.mlp.down_proj.base_layer", 3.0, "compute the model differently"),
        ("model.norm", 1.25, r"samples at another temperature: about 1\.25 instead of 1"),  # scales all logits
    ],
)
def test_self_test_stops_when_engine_and_trainer_compute_different_models(made, changed, factor, cause):
    policy, engine, _ = made
    weight = policy.model.get_base_model().get_submodule(changed).weight
    kept = weight.detach().clone()
    weight.data *= factor
    try:
        with pytest.raises(SystemExit, match=cause):
            self_test.check(engine, policy)
    finally:
        weight.data.copy_(kept)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.sweep)])
def test_engine_and_trainer_agree_over_versions_with_a_large_adapter_and_prefix_hits(made, temperature, monkeypatch):
    policy, engine, _ = made
    engine.args.temperature = policy.temperature = temperature
    cached, step = [], engine.llm.llm_engine.step
    watched = lambda: [cached.append(o.num_cached_tokens or 0) or o for o in step()]  # noqa: E731
    monkeypatch.setattr(engine.llm.llm_engine, "step", watched)
    seen = []
    for version in range(3):
        enlarge(policy, version)
        engine.publish(policy)
        engine.begin(1)
        groups = engine.rollout(Echo(policy.tokenizer), questions(4), 4)
        batch = packed(groups)
        gap = (policy.logps(batch, grad=False) - batch.sampler)[batch.mask].abs()
        assert float(gap.mean()) < 2e-5 and float(gap.max()) < 1e-4
        base = (policy.logps(batch, adapter=False, grad=False) - batch.sampler)[batch.mask].abs()
        assert float(base.mean()) > 0.05  # the adapter matters
        seen.append(ids(groups))
    engine.args.temperature = policy.temperature = 1.0
    assert seen[0] != seen[1] != seen[2]
    assert max(cached) >= 64  # samples and turns share prompts of 90 tokens, in blocks of 32


@pytest.mark.parametrize("mode", ["none", "kv", "full"])
def test_the_engine_sleeps_and_wakes_and_samples_the_same(made, mode, monkeypatch):
    """Use the real scheduler, and record the calls that would free memory. A new adapter version with the same weights
    is loaded in every round."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    policy, engine, _ = made
    calls = []
    for name in ("sleep", "wake_up", "discard"):
        record = lambda worker, *words, name=name, **options: calls.append((name, words, options))  # noqa: E731
        monkeypatch.setattr(CPUWorker, name, record)
    monkeypatch.setattr(engine, "sleep_mode", mode)
    asleep = {"none": [], "kv": [("discard", (("kv_cache",),), {})], "full": [("sleep", (), {"level": 1})]}[mode]
    seen = []
    for _ in range(5):
        engine.begin(2)
        seen.append(ids(engine.rollout(Echo(policy.tokenizer, 0.01), questions(3), 2)))
        before = len(calls)
        engine.sleep()
        engine.sleep()
        assert calls[before:] == asleep
        assert engine.llm.llm_engine.is_sleeping() == bool(asleep)
        assert not asleep or not (core(engine).batch_queue or core(engine).scheduler.has_unfinished_requests())
        engine.publish(policy)
        engine.wake()
    assert all(each == seen[0] for each in seen)
    assert [name for name, *_ in calls].count("wake_up") == 5 * len(asleep)


def test_an_engine_that_does_not_become_idle_is_an_error(made):
    _, engine, _ = made
    with pytest.raises(RuntimeError, match="still holds requests after 4 idle steps"):
        engine._drain(lambda: False)


def test_tool_latency_cannot_change_a_sample(made):
    policy, engine, _ = made
    runs = []
    for wait in (0.05, 0.0, 0.05):
        engine.begin(3)
        runs.append(engine.rollout(Echo(policy.tokenizer, wait), questions(6), 4))
    assert ids(runs[0]) == ids(runs[1]) == ids(runs[2])
    assert len({str(a) for g in ids(runs[0]) for a in g}) == 24  # no two samples are alike
    assert sum(len(t.turns) for g in runs[0] for t in g.trajectories) > 60


def test_one_at_a_time_gives_the_same_ids(made):
    policy, engine, _ = made
    engine.begin(4)
    together = engine.rollout(Echo(policy.tokenizer, 0.02), questions(3), 2)
    alone = []
    for question in questions(3):
        engine.begin(4)
        engine.phase = 0
        group = turns.Group(question, [turns.Trajectory() for _ in range(2)])
        for sample, trajectory in enumerate(group.trajectories):
            engine.begin(4)
            engine._finish(Echo(policy.tokenizer), [loop.Rollout(question, trajectory, sample)], False, None)
        alone.append(group)
    assert ids(alone) == ids(together)
    worst = (packed(alone).sampler - packed(together).sampler).abs().max()
    assert float(worst) < 1e-4  # other batch sizes use other kernels: the ids are the same, the last digits are not


def test_a_queue_that_overfills_prefill_changes_nothing(made):
    """Queue 60 prompts of 400 tokens for steps of 8,192 tokens."""
    policy, engine, _ = made
    long = lambda: Echo(policy.tokenizer, prompt_tokens=400)  # noqa: E731
    engine.begin(5)
    together = engine.rollout(long(), questions(60), 1)
    assert sum(len(g.trajectories[0].turns[0].context_ids) for g in together) > 2 * 8192
    for i in (0, 30, 59):
        engine.begin(5)
        (single,) = engine.rollout(long(), [questions(60)[i]], 1)
        assert ids([single]) == ids([together[i]])


def test_only_the_newest_version_is_kept_on_disk_and_it_is_loaded_lazily(made):
    policy, engine, _ = made
    loaded = engine.loaded
    for _ in range(3):
        engine.publish(policy)
    assert engine.loaded == loaded
    engine.rollout(Echo(policy.tokenizer), questions(1), 1)
    assert engine.loaded == engine.version
    assert len([f for f in engine.adapters.folder.iterdir() if f.is_dir()]) <= 2


def test_a_context_that_fills_up_ends_with_stop_context(made):
    policy, engine, _ = made
    groups = engine.rollout(Echo(policy.tokenizer, prompt_tokens=1015), questions(2), 2)
    stops = {t.stop for g in groups for t in g.trajectories}
    assert stops <= {"context"} and stops
    groups = engine.rollout(Echo(policy.tokenizer, prompt_tokens=1024), questions(1), 2)
    assert [(t.stop, len(t.turns)) for t in groups[0].trajectories] == [("context", 0)] * 2


def test_the_engine_has_the_trainer_s_tokenizer(made):
    policy, engine, _ = made
    assert engine.llm.get_tokenizer().get_vocab() == policy.tokenizer.get_vocab()


def test_vllm_s_own_lora_operator_and_ours_give_the_same_log_probabilities(made):
    """Compare our operator, which is installed in punica_cpu, with the original in lora_ops."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    torch.manual_seed(0)
    x, a, b = torch.randn(7, 32), torch.randn(1, 1, 8, 32), torch.randn(1, 1, 24, 8)
    slot = torch.zeros(7, dtype=torch.long)
    lengths = (None, torch.tensor([3, 4]), torch.tensor([0, 0]), 2, 4, 7)
    results = []
    for module in (lora_ops, punica_cpu):
        shrunk, out = torch.zeros(7, 8), torch.ones(7, 40)
        module.bgmv_shrink(x, a, shrunk, slot, 0.5)
        module.bgmv_expand(shrunk, b, out, slot, True)
        module.bgmv_expand_slice(shrunk, b, out, slot, 8, 24, True)
        module.sgmv_shrink(x, a, shrunk, *lengths, 0.25)
        module.sgmv_expand(shrunk, b, out, *lengths, True)
        module.sgmv_expand_slice(shrunk, b, out, *lengths, 16, 24, True)
        results.append(out.clone())
        module.sgmv_expand(shrunk, b, out, *lengths)
        results.append(out)
    assert punica_cpu.bgmv_shrink is not lora_ops.bgmv_shrink
    assert torch.allclose(results[0], results[2], atol=1e-4) and torch.allclose(results[1], results[3], atol=1e-4)


def test_vllm_ends_a_generation_after_one_token_where_the_context_ends_within_a_character(made):
    """The rollout loop refuses such contexts. If this fails, vLLM has changed and the refusal can be removed."""
    policy, engine, _ = made
    emoji = policy.tokenizer.encode("Write </answer> at the end: 🙂")
    for cut, expected in ((0, "length"), (1, "stop")):
        lengths = []
        for seed in range(8):
            engine.add(f"{cut}/{seed}", emoji[: len(emoji) - cut], 12, ["</answer>"], [], 1.0, seed)
        while len(lengths) < 8:
            lengths += [(len(found), reason) for _, found, _, reason in engine.advance()]
        assert all((reason == expected) and (n == 12) == (not cut) for n, reason in lengths), lengths
