"""The policy: log-probabilities, gradients and steps equal those of plain code."""

import contextlib
import dataclasses
import importlib
import random
from types import SimpleNamespace

import compare
import pytest
import random_groups
import small_models
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses.fake_tensor import FakeTensorMode

import train_grpo
from common import attention, policy
from common.attention import token_logps
from common.batch import pack
from common.policy import Policy


@pytest.fixture
def made(make_args):
    """Return a policy whose adapter is far from zero, and a batch."""
    torch.manual_seed(0)
    policy = Policy(make_args())
    enlarge(policy)
    return policy, pack(*random_groups.groups())


def enlarge(policy, scale=0.05):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters:
            p += (torch.randn(p.shape, generator=generator) * scale).to(p)


def test_enlarging_reaches_parameters_on_a_gpu():
    """Use fake tensors, which fail where a GPU's tensors would and need no GPU. tests/gpu calls enlarge."""
    with FakeTensorMode():
        enlarge(SimpleNamespace(parameters=[torch.zeros(2, 2, device="cuda"), torch.zeros(2, dtype=torch.bfloat16)]))


def plain_logps(model, ids, temperature=1.0):
    """Return log p(ids[t] | ids[:t]) from a plain forward pass of one row; 0 at t = 0."""
    logits = model(input_ids=torch.tensor([ids]), segments=[(0, len(ids))]).logits[0].float() / temperature
    logps = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logps])


def gradient(policy, batch, args, micro_tokens):
    policy.optimizer.zero_grad()
    batch.weight = train_grpo.token_weights(batch, float, args)
    for micro in batch.micro(micro_tokens):
        loss, _ = train_grpo.policy_loss(policy.logps(micro), micro, args)
        loss.backward()
    return policy.gradient()


def close(a, b, relative=1e-5):
    return float((a - b).norm() / b.norm()) < relative


def test_logps_equal_a_plain_forward_of_each_row(made):
    policy, batch = made
    for temperature in (1.0, 0.7):
        policy.temperature = temperature
        logps = policy.logps(batch, grad=False)
        for segment in batch.segments:
            row = slice(segment.start, segment.end)
            plain = plain_logps(policy.model, batch.ids[row].tolist(), temperature)
            assert torch.allclose(logps[row], plain * batch.mask[row], atol=2e-5)
    assert float(logps[~batch.mask].abs().sum()) == 0


def test_our_attention_equals_the_models_own(made, qwen):
    """Compare with transformers' own attention, because plain_logps uses the segment attention too."""
    from transformers import AutoModelForCausalLM

    policy, batch = made
    ids = batch.ids[: batch.segments[0].end][None]
    own = AutoModelForCausalLM.from_pretrained(qwen, attn_implementation="eager", dtype=torch.float32)(
        input_ids=ids
    ).logits[0]
    with policy.model.disable_adapter():
        ours = policy.model(input_ids=ids, segments=[(0, ids.shape[1])]).logits[0]
    assert torch.allclose(own, ours, atol=1e-4)


def test_adapter_off_is_the_base_and_a_fresh_adapter_changes_nothing(make_args):
    policy, batch = Policy(make_args()), pack(*random_groups.groups())
    fresh = policy.logps(batch, grad=False)
    assert torch.equal(fresh, policy.logps(batch, adapter=False, grad=False))
    enlarge(policy)
    assert float((policy.logps(batch, grad=False) - fresh).abs().max()) > 0.01
    assert torch.equal(policy.logps(batch, adapter=False, grad=False), fresh)


def test_gradient_is_the_same_for_every_micro_batch_size_and_packing_order(made, make_args):
    policy, batch = made
    args = make_args()
    whole = gradient(policy, batch, args, 10**6)
    assert float(whole.norm()) > 0
    for micro_tokens in (1, 60, 150):
        assert close(gradient(policy, batch, args, micro_tokens), whole)
    groups, advantages = random_groups.groups()
    order = [2, 0, 1]
    shuffled = pack([groups[i] for i in order], [advantages[i] for i in order])
    assert close(gradient(policy, shuffled, args, 150), whole)
    for i, group in enumerate(groups):
        random.Random(i).shuffle(group.trajectories)
        random.Random(i).shuffle(advantages[i])
    assert close(gradient(policy, pack(groups, advantages), args, 150), whole)


def test_gradient_with_checkpointing_is_the_same(made, make_args):
    policy, batch = made
    args = make_args(grad_checkpoint=True)
    torch.manual_seed(0)
    other = Policy(args)
    enlarge(other)
    assert close(gradient(other, batch, args, 150), gradient(policy, batch, args, 150))


def test_chunked_head_equals_the_full_matrix_in_value_gradient_and_moments():
    """Compare three chunks of 64 (150 tokens over 2**18 words) with the full matrix in float64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(150, 8, requires_grad=True), torch.randn(2**18, 8) / 2
    ids, adv = torch.randint(0, 2**18, (150,)), torch.randn(150)
    for temperature in (1.0, 0.7):
        log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
        plain = log_p.gather(-1, ids[:, None])[:, 0]
        (slope,) = torch.autograd.grad((plain * adv).sum(), hidden)
        values, entropy, squares = token_logps(hidden, weight, ids, temperature, moments=["entropy", "squares"])
        (ours,) = torch.autograd.grad((values * adv).sum(), hidden)
        assert torch.allclose(values.double(), plain, atol=5e-5)
        assert close(ours, slope, 1e-3)  # float32 sums over 2**18 words; autograd in float32 is no closer
        assert torch.allclose(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=2e-4)
        assert torch.allclose(squares.double(), log_p.exp().square().sum(-1), rtol=1e-3)
        assert torch.equal(token_logps(hidden, weight, ids, temperature)[0], values)


def test_every_lora_matrix_learns_and_tokens_outside_the_mask_do_not_count(made, make_args):
    policy, batch = made
    gradient(policy, batch, make_args(), 10**6)
    assert all(float(p.grad.abs().max()) > 0 for p in policy.parameters)
    policy.optimizer.zero_grad()
    context = policy.logps(batch, positions=~batch.mask & (batch.position > 0))
    (context * batch.mask).sum().backward()
    assert float(policy.gradient().abs().max()) == 0


def test_positions_select_the_tokens(made):
    policy, batch = made
    wanted = batch.position > 0
    everything = policy.logps(batch, wanted, grad=False)
    assert torch.allclose(everything[batch.mask], policy.logps(batch, grad=False)[batch.mask], atol=1e-6)
    assert int((everything != 0).sum()) == int(wanted.sum())


def test_step_clips_once_and_returns_the_norm_before(made, make_args):
    policy, batch = made
    args = make_args()
    gradient(policy, batch, args, 10**6)
    norm = float(policy.gradient().norm())
    policy.grad_clip = norm / 2
    seen = {}
    policy.optimizer.step = lambda: seen.update(
        norm=float(torch.cat([p.grad.reshape(-1) for p in policy.parameters]).norm())
    )
    stats = policy.step(lr_scale=0.5)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5) and stats["skipped"] == 0
    assert stats["lr"] == pytest.approx(5e-4)
    assert seen["norm"] == pytest.approx(norm / 2, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(made, make_args, bad):
    policy, batch = made
    gradient(policy, batch, make_args(), 10**6)
    before = [p.detach().clone() for p in policy.parameters]
    policy.parameters[0].grad[0, 0] = bad
    assert policy.step()["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters))
    gradient(policy, batch, make_args(), 10**6)
    assert policy.step()["skipped"] == 0
    assert not torch.equal(before[0], policy.parameters[0])


@pytest.mark.parametrize("script", ["train_grpo", "train_tspo", "train_gtpo", "train_rtpo"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_of_the_engine_that_is_not_finite_spoils_one_token_only(made, make_args, script, bad):
    """Compare with weight 1 for its token: the same loss and gradient, and the step updates the policy."""
    policy, batch = made
    module = importlib.import_module(script)
    args = module.Args(**{f.name: getattr(make_args(), f.name) for f in dataclasses.fields(train_grpo.Args)})
    token = int(batch.mask.nonzero()[3])
    batch.weight = module.token_weights(batch, float, args)
    losses = []
    for value in (policy.logps(batch, grad=False)[token], bad):  # equal log-probabilities: weight 1
        policy.optimizer.zero_grad()
        batch.sampler[token] = value
        loss, stats = module.policy_loss(policy.logps(batch), batch, args)
        loss.backward()
        losses.append((float(loss.detach()), policy.gradient()))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6) and close(losses[1][1], losses[0][1], 1e-6)
    assert policy.step()["updates"] == 1 and all(torch.isfinite(value) for value in stats.values())


def test_a_ratio_beyond_e_to_the_20_stays_finite(made, make_args):
    policy, batch = made
    args = make_args(kl_coef=0.1)
    batch.weight = train_grpo.token_weights(batch, float, args)
    logp = policy.logps(batch)
    batch.old, batch.ref = logp.detach() - 300, logp.detach() + 300
    loss, _ = train_grpo.policy_loss(logp, batch, args)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(policy.gradient()).all()


def test_a_batch_without_trained_tokens_has_zero_gradients_and_makes_no_update(made, make_args):
    policy, batch = made
    gradient(policy, batch, make_args(), 10**6)
    assert policy.step()["grad_norm"] > 0  # from here on the optimizer has momentum
    before = [p.detach().clone() for p in policy.parameters]
    assert float(gradient(policy, pack([], []), make_args(), 100).abs().sum()) == 0
    assert policy.step() == {"grad_norm": 0, "lr": policy.lr, "skipped": 0, "updates": 0}
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters))


def test_the_canary_changes_the_model_and_puts_back_every_bit(made):
    policy, batch = made
    before = [p.detach().clone() for p in policy.parameters]
    plain = policy.logps(batch, grad=False)
    with policy.canary(0.1):
        assert float((policy.logps(batch, grad=False) - plain).abs().max()) > 0.01
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters))


def test_adamw_8bit_and_a_4bit_base_train_on_a_cpu(make_args):
    batch = pack(*random_groups.groups())
    for changes in (dict(optim="adamw_8bit"), dict(load_4bit=True), dict(dtype="bfloat16")):
        args = make_args(**changes)
        policy = Policy(args)
        start = policy.logps(batch, grad=False)
        for _ in range(3):
            grad = gradient(policy, batch, args, 150)
            assert torch.isfinite(grad).all() and float(grad.norm()) > 0
            assert policy.step()["skipped"] == 0
        moved = policy.logps(batch, grad=False)
        adv = batch.adv[batch.mask]
        assert float(((moved - start)[batch.mask] * adv).sum()) > 0  # log-probabilities follow the advantages
        assert all(p.dtype == torch.float32 for p in policy.parameters)


def test_a_saved_adapter_is_a_normal_peft_adapter_and_can_be_started_from(made, make_args, tmp_path, qwen):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy, batch = made
    policy.save_adapter(tmp_path / "adapter")
    again = Policy(make_args(adapter=str(tmp_path / "adapter")))
    assert torch.equal(again.logps(batch, grad=False), policy.logps(batch, grad=False))
    assert all(p.requires_grad for p in again.parameters) and len(again.parameters) == len(policy.parameters)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32), tmp_path / "adapter"
    )
    segment = batch.segments[0]
    ids = batch.ids[: segment.end]
    logps = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert torch.allclose(
        policy.logps(batch, grad=False)[1 : segment.end], logps * batch.mask[1 : segment.end], atol=2e-5
    )


def test_models_our_head_or_attention_would_get_wrong_are_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    path = small_models.random_qwen(tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    with pytest.raises(SystemExit, match="sliding-window"):
        policy.refuse_unsupported(AutoModelForCausalLM.from_pretrained(path))


def test_a_context_longer_than_the_model_takes_is_refused(make_args):
    with pytest.raises(SystemExit, match="--max_context 4096: this model takes 2048 tokens at most"):
        Policy(make_args(max_context=4096))


def test_a_sliding_window_without_layer_types_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    small = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    base = MistralForCausalLM(MistralConfig(**small, sliding_window=16))
    with pytest.raises(SystemExit, match="sliding-window"):
        policy.refuse_unsupported(base, 64)
    policy.refuse_unsupported(base, 16)


def test_an_adapter_trained_with_dropout_gives_the_same_log_probabilities_twice(made, make_args, tmp_path):
    import json

    policy, batch = made
    policy.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.5}))
    dropped = Policy(make_args(adapter=str(tmp_path), grad_checkpoint=True))
    assert torch.equal(dropped.logps(batch, grad=False), policy.logps(batch, grad=False))


def test_measuring_the_kl_changes_no_bit_of_a_run(make_args):
    """Make one update with signal and one without, in which momentum must not move the weights either."""
    groups, advantages = random_groups.groups()
    nothing = [[[0.0] * len(adv_K) for adv_K in adv_GK] for adv_GK in advantages]
    weights, kl = [], None
    for measured in ({}, {"kl_coef": float(compare.MEASURE_KL[1]), "kl": compare.MEASURE_KL[3]}):
        torch.manual_seed(0)
        args = make_args(**measured)
        policy = Policy(args)
        with torch.no_grad():
            for p in policy.parameters:
                p += 0.05 * torch.randn(p.shape)
        norms = []
        for adv in (advantages, nothing):
            batch = pack(groups, adv)
            train_grpo.prepare(batch, policy, args)
            batch.weight = train_grpo.token_weights(batch, float, args)
            loss, stats = train_grpo.policy_loss(policy.logps(batch), batch, args)
            loss.backward()
            norms.append(policy.step()["grad_norm"])
        kl = stats.get("kl_ref")
        weights.append(torch.cat([p.detach().flatten() for p in policy.parameters]))
        assert norms[0] > 0 and norms[1] == 0
    assert torch.equal(*weights) and float(kl.detach()) > 0.01


# ---- bfloat16


@contextlib.contextmanager
def adapter_in_float32(policy):
    """Let the adapter compute in float32, with a cast of every input, as PEFT does by default."""
    layers = [module for module in policy.model.modules() if isinstance(module, BaseTunerLayer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *words, **options: contextlib.nullcontext())
        for layer in layers:
            patch.setattr(layer, "cast_input_dtype_enabled", True)
        yield


SMALL_LAYERS = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=2, initializer_range=0.02)
LAYER_OF_3B = dict(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=1, num_attention_heads=16, initializer_range=0.02
)


@pytest.mark.parametrize(
    "shape",
    [
        SMALL_LAYERS,
        pytest.param(LAYER_OF_3B, marks=pytest.mark.sweep),
        pytest.param("smollm2", marks=pytest.mark.sweep),
    ],
    ids=["small", "layer of 3B", "smollm2"],
)
def test_an_adapter_in_bf16_has_the_gradient_of_one_in_float32_within_1_percent(
    shape, make_args, tmp_path, record_property
):
    """Compare a fresh adapter over the same bf16 base: the forward passes are equal. Once lora_B is not zero, any change
    of rounding is amplified by the base: then both gradients are equally far from float32 throughout (up to 2 x)."""
    model = shape if shape == "smollm2" else small_models.random_qwen(tmp_path, **shape)
    groups, advantages = random_groups.groups(count=1, size=2)
    batch, found = pack(groups, advantages), {}
    for dtype in ("bfloat16", "float32"):
        args = make_args(model=model, dtype=dtype)
        torch.manual_seed(0)
        policy = Policy(args)
        for adapter in ("fresh", "trained"):
            enlarge(policy, 0.005 if adapter == "trained" else 0)
            found[adapter, dtype] = gradient(policy, batch, args, 10**6)
            assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters)
            if dtype == "bfloat16":
                with adapter_in_float32(policy):
                    found[adapter, "mixed"] = gradient(policy, batch, args, 10**6)
    own = {adapter: relative(found[adapter, "bfloat16"], found[adapter, "mixed"]) for adapter in ("fresh", "trained")}
    far = {kind: relative(found["trained", kind], found["trained", "float32"]) for kind in ("bfloat16", "mixed")}
    figures = f"fresh {own['fresh']:.2%}, trained {own['trained']:.2%}; from float32 throughout "
    record_property("figures", figures + f"{far['bfloat16']:.1%}, an adapter in float32 {far['mixed']:.1%}")
    assert 0 < own["fresh"] < 0.01 and far["bfloat16"] < 2 * far["mixed"]


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_logits_of_a_bf16_model_are_summed_and_returned_in_float32():
    """Compare with float64 over the same rounded inputs. Logits rounded to bf16 would differ by up to 2**-9 of 20."""
    torch.manual_seed(0)
    hidden = (3 * torch.randn(40, 64)).bfloat16().requires_grad_()
    weight, ids = torch.randn(500, 64).bfloat16(), torch.randint(0, 500, (40,))
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    (values,) = token_logps(hidden, weight, ids, 1.0)
    assert values.dtype == torch.float32
    assert float((values - log_p.gather(-1, ids[:, None])[:, 0]).detach().abs().max()) < 1e-4
    (slope,) = torch.autograd.grad(log_p.gather(-1, ids[:, None]).sum(), hidden)
    (ours,) = torch.autograd.grad(values.sum(), hidden)
    assert relative(ours, slope) < 0.005


def test_the_trainer_leaves_no_tensor_on_the_cpu(make_args, monkeypatch):
    """Run forward and backward on the meta device, which fails where a tensor is on the CPU, as a GPU would."""
    monkeypatch.setattr(torch, "autocast", lambda *words, **options: contextlib.nullcontext())  # not known to "meta"
    policy = Policy(make_args())
    policy.model.to("meta")
    policy.device = torch.device("meta")
    batch = pack(*random_groups.groups())
    hidden = policy.hidden(batch)
    assert hidden.is_meta and hidden.shape == (len(batch), policy.head.shape[1])
    ids = batch.ids[batch.mask].to("meta")
    (logps,) = token_logps(hidden[: len(ids)], policy.head, ids, 1.0)
    logps.sum().backward()
    grads = [p.grad for p in policy.model.parameters() if p.requires_grad]
    assert grads and all(grad.is_meta and grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("dtype, heads, grouped", [(torch.bfloat16, 2, True), (torch.float32, 4, False)])
def test_attention_on_a_gpu_repeats_the_key_heads_only_where_no_fused_kernel_groups_them(
    dtype, heads, grouped, monkeypatch
):
    """In float32 the only kernel with grouped heads keeps n^2 scores. Use tensors that claim to be on a GPU."""
    seen = []

    class OnGPU(torch.Tensor):
        is_cuda = property(lambda self: True)

    def attend(q, k, v, is_causal, scale, enable_gqa):
        seen.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(attention, "attend", attend)
    query, key = (torch.zeros(1, n, 10, 8, dtype=dtype).as_subclass(OnGPU) for n in (4, 2))
    found, _ = attention.segment_attention(None, query, key, key, None, segments=[(0, 4), (4, 10)])
    assert found.shape == (1, 10, 4, 8) and seen == [(4, heads, heads, grouped)] * 2


def test_bitsandbytes_steps_between_two_synchronisations_on_a_gpu(made, make_args, monkeypatch):
    """Its kernels run on CUDA's default stream, and vLLM moves the trainer's thread to another one."""
    policy, batch = made
    calls = []
    for optim, expected in (("adamw_8bit", ["wait", "step", "wait"]), ("adamw", ["step"])):
        calls.clear()
        other = Policy(make_args(optim=optim))
        gradient(other, batch, make_args(), 10**6)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
        monkeypatch.setattr(other.optimizer, "step", lambda: calls.append("step"))
        other.device = torch.device("cuda")
        assert other.step()["updates"] == 1 and calls == expected


def test_layers_with_an_adapter_are_named_without_their_place(made):
    policy, _ = made
    assert policy.adapted_layers() == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
