"""The memory plan of --dry_run, compared with real models, adapters, optimizers and backward passes.

python tests/engine/test_memory.py --fix       rewrites the tables of docs/gpu.md
"""

import dataclasses
import importlib
import json
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import commands  # noqa: E402
import pytest  # noqa: E402
import recipes  # noqa: E402
import small_models  # noqa: E402
import torch  # noqa: E402

import tasks  # noqa: E402
import train_grpo  # noqa: E402
from common import run  # noqa: E402
from common.args import parse_args  # noqa: E402
from common.attention import token_logps  # noqa: E402
from common.batch import Batch, Segment  # noqa: E402
from common.models import empty_model  # noqa: E402
from common.policy import Policy  # noqa: E402
from view import estimate, plan  # noqa: E402

GIB = 2**30
NUMBERS = {  # public values of config.json
    "Qwen2.5-3B": dict(
        model_type="qwen2",
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "Qwen2.5-7B": dict(
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
    "Llama-3.1-8B": dict(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
    "Qwen3-8B": dict(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    ),
}
LARGER = {  # (hidden, MLP, layers, heads); 8 KV heads, public values too
    "Qwen2.5-14B": (5120, 13824, 48, 40),
    "Qwen2.5-32B": (5120, 27648, 64, 40),
    "Qwen2.5-72B": (8192, 29568, 80, 64),
}
BOXES = (  # (box, its cards, ranks, command without "train_tspo.py --model")
    ("1 × 24 GB", "24 GB", 1, "Qwen2.5-3B --grad_checkpoint"),
    ("1 × 24 GB", "24 GB", 1, "Qwen2.5-7B --grad_checkpoint --load_4bit --gpu_memory 0.6"),
    ("1 × 48 GB", "48 GB", 1, "Qwen2.5-7B --grad_checkpoint --gpu_memory 0.6"),
    ("1 × 80 GB", "80 GB", 1, "Qwen2.5-3B --micro_tokens 8192"),
    ("1 × 80 GB", "80 GB", 1, "Qwen2.5-7B --grad_checkpoint --micro_tokens 16384"),
    ("8 × 80 GB", "80 GB", 8, "Qwen2.5-7B --grad_checkpoint --micro_tokens 16384 --questions 512"),
)
SMALL = dict(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)


def config_only(folder, name):
    """Make a folder with the config.json of a published model and a small tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    small_models.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(NUMBERS[name]))
    return str(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: config_only(folder / name, name) for name in NUMBERS}


@pytest.fixture(scope="module")
def published_sizes(published):
    return {name: estimate.sizes(empty_model(path)) for name, path in published.items()}


@pytest.fixture(
    scope="module", params=["qwen2", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("llama", "qwen3"))]
)
def small(request, tmp_path_factory):
    """Return the folder of a small random model with grouped heads, whose head_dim is not hidden / heads."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    config = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    made = small_models.tokenizer()
    tied = request.param == "qwen2"
    AutoModelForCausalLM.from_config(config(vocab_size=len(made), tie_word_embeddings=tied, **SMALL)).save_pretrained(
        folder
    )
    made.save_pretrained(folder)
    return str(folder)


def grpo_args(**changes):
    return train_grpo.Args(**(dict(task="tiny_search", lora_rank=8, max_context=1024) | changes))


def packed(tokens, rows):
    """Return a batch of equal rows, in which all tokens but the first of a row are trained."""
    mask, length = torch.ones(tokens, dtype=torch.bool), tokens // rows
    mask[::length] = False
    zeros, none = torch.zeros(tokens), torch.zeros(tokens, dtype=torch.long)
    segments = [Segment(i * length, (i + 1) * length, i) for i in range(rows)]
    ids = torch.randint(5, 300, (tokens,), generator=torch.Generator().manual_seed(0))
    position = torch.arange(length).repeat(rows)
    return Batch(segments, [0], ids, position, mask, mask, none, none, none, zeros, zeros, zeros)


def allocated(action):
    """Return (result, peak of the bytes that `action` allocated), from the profiler's record of the allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        result = action()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, most


# ---- counts


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen3-8B", 8_190_735_360),
    ],
)
def test_the_parameters_of_published_models_are_counted_to_the_last_one(published_sizes, name, parameters):
    assert published_sizes[name].parameters == parameters and published_sizes[name].unknown == 0


def test_parameters_and_adapter_are_those_of_the_model_that_is_trained(small):
    policy = Policy(grpo_args(model=small))
    found = estimate.sizes(empty_model(small))
    adapter = sum(p.numel() for p in policy.parameters)
    assert found.adapter(8) == adapter
    assert found.parameters == sum(p.numel() for p in policy.model.parameters()) - adapter
    assert estimate.base_bytes(found, 4, load_4bit=False) == 4 * found.parameters


def test_the_adapter_of_a_3b_model_by_hand(published_sizes):
    # a layer: q 2048+2048, k and v 2048+256 each, o 2048+2048, gate and up 2048+11008 each, down 11008+2048
    assert published_sizes["Qwen2.5-3B"].adapter(32) == 36 * 32 * (2 * 4096 + 2 * 2304 + 3 * 13056) == 59_867_136


@pytest.mark.parametrize(
    "name, by_hand",
    [
        ("Qwen2.5-3B", 2 * 36 * 2 * 128 * 2),
        ("Qwen2.5-7B", 2 * 28 * 4 * 128 * 2),
        ("Llama-3.1-8B", 2 * 32 * 8 * 128 * 2),
        ("Qwen3-8B", 2 * 36 * 8 * 128 * 2),
    ],
)
def test_bytes_of_the_keys_and_values_of_a_token(published_sizes, name, by_hand):
    assert estimate.kv_bytes(published_sizes[name], 2) == by_hand
    assert name != "Qwen2.5-3B" or by_hand == 36_864


def test_a_4bit_base_takes_the_bytes_that_bitsandbytes_gives_it(small):
    from bitsandbytes.nn import Params4bit

    policy = Policy(grpo_args(model=small, load_4bit=True, dtype="bfloat16"))
    total = 0
    for p in policy.model.get_base_model().parameters():
        if p.requires_grad:
            continue
        total += p.numel() * p.element_size()
        if isinstance(p, Params4bit):
            state = p.quant_state
            parts = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
            total += sum(t.numel() * t.element_size() for t in parts)
    assert total == estimate.base_bytes(estimate.sizes(empty_model(small)), 2, load_4bit=True)


def test_a_matrix_of_the_engine_s_4bit_base_takes_4_bytes_more_for_each_64_weights():
    """Unpack the scales to float32 and drop their tables, as vllm_bnb_plugin 0.0.3 (_dequantize_dq) does at load."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

    packed, state = quantize_4bit(torch.randn(96, 200), compress_statistics=True, quant_type="nf4")
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert scales.dtype == torch.float32
    assert packed.nbytes + scales.nbytes + state.code.nbytes == estimate.nf4_bytes(96 * 200, nested=False)
    assert estimate.nf4_bytes(96 * 200, nested=False) == 96 * 200 // 2 + 4 * 96 * 200 // 64 + 64


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_the_optimizer_takes_the_bytes_of_its_states(small, optim):
    policy = Policy(grpo_args(model=small, optim=optim, lora_rank=16))
    for p in policy.parameters:
        p.grad = torch.ones_like(p)
    policy.step()
    states = {}  # without the shared tables of the 8-bit code and the step counts
    for state in policy.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and not name.startswith("qmap"):
                states[value.data_ptr()] = value.numel() * value.element_size()
    assert sum(states.values()) == estimate.optimizer_bytes(estimate.sizes(empty_model(small)), 16, optim)


# ---- activations


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "4bit"])
def test_the_activations_of_a_forward_pass_match_the_plan_within_1_percent(small, kind):
    item, tokens = (4 if kind == "float32" else 2), 256
    policy = Policy(grpo_args(model=small, dtype="float32" if item == 4 else "bfloat16", load_4bit=kind == "4bit"))
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept = {}  # storages: a reference keeps the allocator from using an address twice

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.hidden(packed(tokens, rows=2))
    found = estimate.sizes(empty_model(small))
    measured = sum(s.nbytes() for pointer, s in kept.items() if pointer not in weights)
    copies = 2 * found.adapter(8) if item == 2 else 0  # the adapter in bf16, whatever the number of tokens
    planned = tokens * found.layers * estimate.saved_bytes(found, item, rank=8)
    assert (measured - copies) / planned == pytest.approx(1, abs=0.01)
    assert hidden.requires_grad


@pytest.mark.parametrize(
    "dtype, grad_checkpoint",
    [
        ("float32", False),
        ("float32", True),
        ("bfloat16", False),
        pytest.param("bfloat16", True, marks=pytest.mark.sweep),
    ],
)
def test_an_update_takes_as_much_as_the_plan_or_up_to_10_percent_less(small, dtype, grad_checkpoint):
    """In bf16 with checkpointing up to 20 % less: the last hidden states are free when a layer is recomputed."""
    tokens = 768 if dtype == "float32" else 384  # many CPUs compute bfloat16 slowly
    args = grpo_args(model=small, dtype=dtype, grad_checkpoint=grad_checkpoint, micro_tokens=tokens, max_context=tokens)
    policy, batch = Policy(args), packed(tokens, rows=2)

    def update():
        logp, _ = policy.logps(batch, moments=["entropy"])
        logp.sum().backward()

    update()
    policy.optimizer.zero_grad()
    _, measured = allocated(update)
    made = estimate.make(estimate.sizes(empty_model(small)), args, 24 * GIB)
    rows = {row.name: row.bytes for row in made.update}
    gradients = rows["trainer: gradients"] // 2  # the other half is the flat copy, made after the backward pass
    parts = ("adapter in bf16", "activations", "last hidden states", "at the peak")
    planned = gradients + sum(rows.get(f"trainer: {part}", 0) for part in parts)
    assert (0.8 if dtype == "bfloat16" and grad_checkpoint else 0.9) < measured / planned < 1.01


@pytest.mark.parametrize("tokens", [48, 838, 1676, 2500])  # part of a chunk of 838, one, two, nearly three
def test_logits_take_12_bytes_per_number_of_one_chunk(published_sizes, tokens):
    vocab, width = 20_000, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight, ids = torch.randn(vocab, width), torch.arange(tokens)
    _, measured = allocated(lambda: token_logps(hidden, weight, ids, 1.0, moments=["entropy"]))
    found = dataclasses.replace(published_sizes["Qwen2.5-3B"], vocab=vocab)
    assert estimate.chunk_bytes(found, tokens, cuda=False) == estimate.HEAD * min(tokens, 838) * vocab
    assert measured / estimate.chunk_bytes(found, tokens, cuda=False) == pytest.approx(1, abs=0.02)
    assert estimate.chunk_bytes(found, 10**6) == pytest.approx(estimate.HEAD * 2**27, rel=0.001)


# ---- the plan


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("load_4bit", [False, True])
def test_the_rows_add_up_and_those_of_the_engine_are_gpu_memory(published_sizes, name, load_4bit):
    card = 80 * GIB
    for sleep in ("none", "kv", "full"):
        args = grpo_args(load_4bit=load_4bit, sleep=sleep, gpu_memory=0.4)
        made = estimate.make(published_sizes[name], args, card)
        for moment in ("sampling", "update"):
            assert made.total(moment) == sum(row.bytes for row in getattr(made, moment))
            assert all(isinstance(row.bytes, int) for row in getattr(made, moment))
        engine = [row.bytes for row in made.sampling if row.name.startswith("engine")]
        assert sum(engine) == math.ceil(0.4 * card)
        trainer = [row for row in made.sampling if not row.name.startswith("engine")]
        assert made.update[: len(trainer)] == trainer  # the trainer's permanent memory


def test_each_sleep_mode_frees_its_part_of_the_engine(published_sizes):
    """none frees the working memory of a step, kv the pages too, full also the weights and the adapter's slot."""
    plans = {
        sleep: estimate.make(published_sizes["Qwen2.5-3B"], grpo_args(sleep=sleep), 80 * GIB)
        for sleep in ("none", "kv", "full")
    }
    engine = {row.name: row.bytes for row in plans["none"].sampling}
    total = {sleep: made.total("update") for sleep, made in plans.items()}
    assert total["none"] - total["kv"] == engine["engine: KV pages"]
    parked = engine["engine: base weights"] + engine["engine: adapter slot"]
    assert total["kv"] - total["full"] == parked and parked <= plans["full"].host <= 2 * parked
    assert plans["kv"].host == plans["none"].host == 0
    assert len({made.total("sampling") for made in plans.values()}) == 1


@pytest.mark.parametrize(
    "name, load_4bit, held, pinned",
    [  # MiB. Of each layer qkv, o, gate and up, down where they have 10 MiB or more; then embedding and output layer
        ("Qwen2.5-3B", False, 36 * (10 + 86 + 43) + 593.5, 36 * (16 + 128 + 64) + 1024),
        ("Qwen2.5-7B", False, 28 * (31.5 + 24.5 + 259 + 129.5) + 2 * 1039.5, 28 * (32 + 32 + 512 + 256) + 2 * 2048),
        ("Qwen2.5-7B", True, 28 * (64.75 + 32.375) + 2 * 1039.5, 28 * (128 + 64) + 2 * 2048),
        ("Llama-3.1-8B", False, 32 * (48 + 32 + 224 + 112) + 2 * 1002, 32 * (64 + 32 + 256 + 128) + 2 * 1024),
    ],
)
def test_parked_matrices_take_the_next_power_of_two_and_small_ones_twice_their_size(
    published_sizes, name, load_4bit, held, pinned
):
    parked = estimate.base_bytes(published_sizes[name], 2, load_4bit, nested=False) + 1000  # bytes of an adapter slot
    small = parked - int(held * 2**20)
    assert 0 < small < 0.2 * parked
    assert estimate.host_bytes(published_sizes[name], 2, load_4bit, parked) == pinned * 2**20 + 2 * small


def test_kv_pages_and_full_trajectories(published_sizes):
    made = estimate.make(published_sizes["Qwen2.5-3B"], grpo_args(max_context=4096), 80 * GIB)
    pages = {row.name: row.bytes for row in made.sampling}["engine: KV pages"]
    assert made.kv_tokens == pages // (16 * 36_864) * 16 and made.at_once == made.kv_tokens // 4096
    odd = estimate.make(published_sizes["Qwen2.5-3B"], grpo_args(max_context=4097), 80 * GIB)
    assert odd.at_once == odd.kv_tokens // 4112  # a page holds 16 tokens and belongs to one trajectory


def test_a_micro_batch_is_at_least_one_full_trajectory(published_sizes):
    def activations(**changes):
        made = estimate.make(published_sizes["Qwen2.5-3B"], grpo_args(**changes), 80 * GIB)
        return {row.name: row.bytes for row in made.update}["trainer: activations"]

    assert activations(micro_tokens=1024, max_context=4096) == activations(micro_tokens=4096, max_context=4096)
    assert activations(micro_tokens=8192, max_context=4096) == 2 * activations(micro_tokens=4096, max_context=4096)


def test_more_ranks_sample_fewer_trajectories_each(published_sizes):
    args = grpo_args(questions=64, group=8)
    requests = [estimate.make(published_sizes["Qwen2.5-3B"], args, 80 * GIB, world=n).requests for n in (1, 4, 8, 64)]
    assert requests == [256, 128, 64, 8]


def test_the_advised_flags_make_it_fit_and_each_is_needed(published_sizes):
    advised = set()
    for found in published_sizes.values():
        for gib in (12, 16, 23.6, 47.4, 79.2):
            for start in (dict(), dict(sleep="none", micro_tokens=16384), dict(gpu_memory=0.9)):
                args, card = grpo_args(**(dict(lora_rank=32, max_context=4096) | start)), int(gib * GIB)
                flags = estimate.remedy(found, args, card)
                advised.add(flags)
                if flags is None:
                    continue
                words = flags.split("--")[1:]
                parsed = [parse_args(train_grpo.Args, ["--task", "tiny_search", *f"--{w}".split()]) for w in words]
                changes = {w.split()[0]: getattr(p, w.split()[0]) for w, p in zip(words, parsed)}
                assert estimate.make(found, dataclasses.replace(args, **changes), card).problems() == []
                for name in changes:
                    rest = {k: v for k, v in changes.items() if k != name}
                    assert estimate.make(found, dataclasses.replace(args, **rest), card).problems()
    assert {None, "", "--grad_checkpoint"} < advised and any(f and "load_4bit" in f for f in advised)
    assert any(f and "gpu_memory" in f for f in advised)


# ---- --dry_run


@pytest.fixture
def dry(published, tmp_path, capsys, monkeypatch):
    """Return a function that runs --dry_run in this process for the usual cards and returns its stdout."""
    usual = [plan.Card(name, int(size * GIB), int(size * GIB)) for name, size in estimate.CARDS.items()]
    monkeypatch.setattr(plan, "cards", lambda: usual)

    def look(*words, script="train_grpo", model="Qwen2.5-3B"):
        module = importlib.import_module(script)
        given = ["--model", published.get(model, model), "--out", str(tmp_path / "run"), "--dry_run", *words]
        args = parse_args(module.Args, given if "--task" in words else [*given, "--task", "tiny_search"])
        plan.dry_run(args, tasks.load(args))
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().out

    return look


@pytest.mark.parametrize("script", ["train_grpo", "train_tspo", "train_gtpo", "train_rtpo"])
def test_every_script_plans_without_weights_and_leaves_nothing_behind(dry, script):
    shown = dry(script=script)
    assert "3,085,938,688 parameters, 36,864 bytes of keys and values per token" in shown
    assert "weights: none in" in shown and "nothing was loaded" in shown
    for moment in ("while sampling", "while updating"):
        rows = shown.partition(moment)[2].partition("together")[0].splitlines()[1:-1]
        together = shown.partition(moment)[2].partition("together, GiB")[2].split()
        columns = [sum(float(row[32 + 11 * c : 43 + 11 * c]) for row in rows) for c in range(len(plan.cards()))]
        for column, total in zip(columns, together):
            assert column == pytest.approx(float(total), abs=0.006 * len(rows))


def test_a_dry_run_ends_with_0_and_leaves_no_folder(published, tmp_path):
    words = ["--model", published["Qwen2.5-3B"], "--task", "tiny_search", "--out", tmp_path / "run", "--dry_run"]
    with pytest.raises(SystemExit) as done:
        commands.here("train_tspo.py", *words)
    assert done.value.code in (None, 0) and not (tmp_path / "run").exists()


def test_the_first_prompt_is_shown_as_the_model_sees_it(dry, published):

    shown = dry("--seed", "3")
    args = parse_args(train_grpo.Args, ["--model", published["Qwen2.5-3B"], "--task", "tiny_search", "--seed", "3"])
    task = tasks.load(args)
    ids = task.prompt_ids(task.take(1)[0])
    assert task.decode(ids) in shown
    assert f"{len(ids)} tokens of prompt; {5120 - len(ids)} of --max_context 5120 are left" in shown


def test_the_warning_of_a_too_long_trajectory_is_exact_to_the_token(dry):
    words = "--max_turns 3 --max_turn_tokens 100 --max_observation_tokens 50".split()
    longest = int(dry(*words).partition("observed = ")[2].split()[0])
    assert longest > 3 * 100 + 2 * 50
    assert "does not fit: it ends" not in dry(*words, "--max_context", str(longest))
    shown = dry(*words, "--max_context", str(longest - 1))
    assert f"It needs --max_context {longest}\n" in shown


def test_a_dry_run_finds_faults_of_data_and_model(dry, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "answers": []}\n')
    with pytest.raises(SystemExit, match="q.jsonl, line 1: answers must be"):
        dry("--task", str(tmp_path / "q.jsonl"), "--task_kind", "math")
    with pytest.raises(SystemExit, match="takes 32768 tokens at most"):
        dry("--max_context", "40000")
    config_only(tmp_path / "sliding", "Qwen3-8B")
    changed = json.loads((tmp_path / "sliding/config.json").read_text()) | dict(
        use_sliding_window=True, sliding_window=512, max_window_layers=2
    )
    (tmp_path / "sliding/config.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="sliding-window attention"):
        dry(model=str(tmp_path / "sliding"))


def test_weights_are_compared_with_the_configuration(dry, small, tmp_path):
    import shutil

    assert "1 file(s) with as many parameters as config.json implies" in dry("--max_context", "1024", model=small)
    other = Path(shutil.copytree(small, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 3, "layer_types": None}
    (other / "config.json").write_text(json.dumps(config))
    assert "warning: weights: " in dry("--max_context", "1024", model=str(other))


def test_a_card_that_is_too_small_gets_advice(dry):
    shown = dry()
    assert "24 GB: does not fit; update needs" in shown and "It fits with --grad_checkpoint." in shown
    assert "80 GB: fits" in shown


def test_resume_goes_with_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = parse_args(train_grpo.Args, ["--model", "tiny"])
    folder = run.directory(begun)
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(begun)))
    assert parse_args(train_grpo.Args, ["--out", str(folder), "--resume", "--dry_run"]).dry_run


# ---- on a GPU: the plan is asked before anything is loaded


def card(gib, used=0.0, capability=(8, 0)):
    return plan.Card("a card", int(gib * GIB), int((gib - used) * GIB), capability)


@pytest.fixture
def fit(published, monkeypatch):
    """Return a function that fits a command line to a faked card. TRAIN: a script, without its .py."""
    monkeypatch.setattr(run, "RESOLVED", {})

    def fit(words, on, script="train_grpo", world=1):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        args = parse_args(importlib.import_module(script).Args, ["--task", "tiny_search", *words.split()])
        return plan.fit_gpu(dataclasses.replace(args, model=published.get(args.model, args.model)), on)

    return fit


@pytest.mark.parametrize("gib", estimate.CARDS.values())
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "recipe", [None, *(f"{r} {m}" for r in ("grpo", "tspo", "gtpo", "rtpo") for m in ("8x80gb", "1x24gb"))]
)
def test_a_run_fits_the_card_or_stops_with_flags_that_make_it_fit(fit, gib, name, recipe):
    """Ask for each recipe (None: the defaults), each model and each card."""
    script, words, world = "train_grpo", "", 1
    if recipe:
        script, machine = f"train_{recipe.split()[0]}", recipe.split()[1]
        world, _ = recipes.arguments(recipe.split()[0], machine)
        words = " ".join(recipes.words(recipe.split()[0], machine)[3:])
    try:
        args = fit(f"{words} --model {name}", card(gib), script, world)
        assert args.sleep in estimate.SLEEP
    except SystemExit as stop:
        message = str(stop)
        assert "does not fit" in message and "TURNWISE_PLAN=off starts the run anyway" in message
        advised = message.partition("It fits with ")[2].partition(". --dry_run")[0]
        if not advised:
            assert "No flag makes it fit: use a smaller model or a larger card." in message
            assert gib < 30  # a larger card holds each of them
            return
        assert fit(f"{words} --model {name} {advised}", card(gib), script, world).sleep in estimate.SLEEP


@pytest.mark.parametrize(
    "words, gib, mode", [("", 79.1, "none"), ("--gpu_memory 0.85", 79.1, "kv"), ("--gpu_memory 0.55", 17, "full")]
)
def test_the_engine_sleeps_no_more_than_the_card_demands(fit, words, gib, mode):
    """3B on 80 GB needs no sleep; with most of the card for the engine its KV pages must go; on 17 GiB its weights too."""
    assert fit(f"--model Qwen2.5-3B --grad_checkpoint {words}", card(gib)).sleep == mode
    assert run.RESOLVED == {"sleep": {"given": "auto", "value": mode}}


def test_3b_on_24_gb_without_checkpointing_is_stopped_before_it_is_loaded(fit):
    with pytest.raises(
        SystemExit, match=r"update needs .* more than the card has free.* It fits with --grad_checkpoint\."
    ):
        fit("--model Qwen2.5-3B", card(23.6))


def test_what_other_processes_use_counts(fit, monkeypatch):
    words = "--model Qwen2.5-3B --grad_checkpoint --gpu_memory 0.8"
    assert fit(words, card(47.4)).sleep in estimate.SLEEP
    with pytest.raises(
        SystemExit, match=r"Other processes use 20\.0 GiB of the card \(nvidia-smi\)\. It fits with --gpu_memory"
    ):
        fit(words, card(47.4, used=20))
    monkeypatch.setenv("TURNWISE_PLAN", "off")
    assert fit(words, card(47.4, used=20)).sleep == "full"


def test_an_evaluation_needs_no_memory_for_an_update(published):
    import eval as evaluation

    args = parse_args(
        evaluation.Args, ["--model", published["Qwen2.5-3B"], "--task", "tiny_search", "--gpu_memory", "0.6"]
    )
    assert plan.fit_gpu(args, card(23.6)) is args
    with pytest.raises(SystemExit, match="does not fit"):
        plan.fit_gpu(args, card(12))


@pytest.mark.parametrize(
    "capability, dtype, message",
    [
        ((7, 0), "float32", "has compute capability 7.0: the CUDA 13 builds of torch and vLLM need 7.5"),
        ((7, 5), "auto", "no bfloat16, which needs 8.0 .Ampere. or newer: give --dtype float32"),
        ((7, 5), "bfloat16", "no bfloat16"),
        ((7, 5), "float32", None),
        ((9, 0), "auto", None),
    ],
)
def test_cards_before_ampere_are_refused_in_bfloat16(fit, capability, dtype, message):
    words = f"--model Qwen2.5-3B --grad_checkpoint --dtype {dtype}"
    if message is None:
        fit(words, card(80, capability=capability))
        return
    with pytest.raises(SystemExit, match=message):
        fit(words, card(80, capability=capability))


def test_the_card_of_a_rank_is_asked_with_its_number(monkeypatch):
    """The CUDA context that the question itself makes is not counted twice: the plan has a row for it."""
    asked = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: asked.append(n) or (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: f"card {n}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: (9, 0))
    assert plan.this_gpu() == ("card 3", 80 * GIB, 71 * GIB, (9, 0)) and asked == [3]


def test_on_a_cpu_sleep_is_off(monkeypatch):
    monkeypatch.setattr(run, "RESOLVED", {})
    args = parse_args(train_grpo.Args, ["--model", "tiny"])
    assert plan.fit(args, None).sleep == "none" and args.sleep == "auto"


# ---- docs/gpu.md


def tables(found):
    """Return {name of a table in docs/gpu.md: its lines} for the Sizes of the published models."""

    def row(*cells):
        return "| " + " | ".join(map(str, cells)) + " |"

    def head(*cells):
        return [row(*cells), "|" + "---|" * len(cells)]

    def made(name, card=79.1, **changes):
        options = dict(lora_rank=32, max_context=4096, micro_tokens=4096) | changes
        return estimate.make(found[name], grpo_args(**options), int(card * GIB))

    def gib(count):
        return f"{count / GIB:.1f}"

    parts = head("model", "parameters", "base, bf16", "base, NF4", "adapter, its gradients", "adamw", "adamw_8bit")
    for name, sizes in found.items():
        bases = [gib(estimate.base_bytes(sizes, 2, packed)) for packed in (False, True)]
        states = [f"{estimate.optimizer_bytes(sizes, 32, optim) / GIB:.2f}" for optim in ("adamw", "adamw_8bit")]
        adapter = f"{4 * sizes.adapter(32) / GIB:.2f}, {8 * sizes.adapter(32) / GIB:.2f}"
        parts.append(row(name, f"{sizes.parameters:,}", *bases, adapter, *states))

    update = head("model", "base", "4,096, no checkpoint", "4,096", "8,192", "16,384", "`--sleep kv` adds")
    for name in found:
        for packed in (False, True):
            options = [dict(), *(dict(grad_checkpoint=True, micro_tokens=n) for n in (4096, 8192, 16384))]
            plans = [made(name, load_4bit=packed, sleep="full", **o) for o in options]
            kv = made(name, load_4bit=packed, sleep="kv").total("update")
            cells = [gib(each.total("update")) for each in plans] + [gib(kv - plans[0].total("update"))]
            update.append(row(name, "NF4" if packed else "bf16", *cells))

    cards = head("model", "base", *(f"{name} card" for name in estimate.CARDS))
    for name in found:
        for packed in (False, True):
            cells = []
            for card in estimate.CARDS.values():
                one = made(name, card, load_4bit=packed, grad_checkpoint=True, gpu_memory=0.6)
                cells.append("does not fit" if one.problems() else f"{gib(one.total('sampling'))} GiB, {one.at_once}")
            cards.append(row(name, "NF4" if packed else "bf16", *cells))

    boxes = head("box", "command", "`--sleep auto` is", "GiB sampling", "GiB updating", "full trajectories at once")
    for box, card, world, words in BOXES:
        args = parse_args(train_grpo.Args, ["--task", "tiny_search", "--model", *words.split()])
        launch = f"torchrun --nproc_per_node {world}" if world > 1 else "python"
        one = estimate.make(found[args.model], args, int(estimate.CARDS[card] * GIB), world=world)
        assert not one.problems()
        totals = [gib(one.total(moment)) for moment in ("sampling", "update")]
        boxes.append(row(box, f"`{launch} train_tspo.py --model {words}`", one.sleep, *totals, one.at_once))

    largest = head("model", "bf16", "`--load_4bit`")
    for name, (hidden, mlp, layers, heads) in LARGER.items():
        shape = dict(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads)
        sizes, cells = sizes_of(NUMBERS["Qwen2.5-7B"] | shape | dict(num_key_value_heads=8)), []
        for packed in (False, True):
            options = dict(load_4bit=packed, grad_checkpoint=True, max_context=4096, sleep="auto", lora_rank=32)
            shares = [percent / 100 for percent in range(90, 20, -5)]
            plans = [estimate.make(sizes, grpo_args(gpu_memory=share, **options), int(79.1 * GIB)) for share in shares]
            fitting = [(share, one) for share, one in zip(shares, plans) if not one.problems()]
            share, one = max(fitting, key=lambda found: found[1].at_once, default=(0, None))
            cells.append(
                f"`--gpu_memory {share:g}`, --sleep {one.sleep}: {one.at_once} at once" if one else "does not fit"
            )
        largest.append(row(name, *cells))
    return {"parts": parts, "update": update, "cards": cards, "boxes": boxes, "largest": largest}


def sizes_of(numbers):
    """Return the Sizes of a model from the numbers of its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return estimate.sizes(AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers)))


def fixed_page(page, found):
    """Return docs/gpu.md with the tables of the plan."""
    for name, lines in tables(found).items():
        before, begin, rest = page.partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        assert begin and end, f"docs/gpu.md has no marks for the table {name}"
        page = before + begin + "\n".join(lines) + "\n" + end + after
    return page


def test_the_tables_of_docs_gpu_are_those_of_the_plan(published_sizes):
    page = (ROOT / "docs/gpu.md").read_text()
    assert fixed_page(page, published_sizes) == page, "python tests/engine/test_memory.py --fix"


def test_the_host_memory_in_docs_is_that_of_the_plan(published_sizes):
    def host(name):
        args = grpo_args(lora_rank=32, max_context=4096, sleep="full")
        return estimate.make(published_sizes[name], args, 80 * GIB).host / GIB

    page = (ROOT / "docs/gpu.md").read_text()
    assert f"for a rank of Qwen2.5-7B {host('Qwen2.5-7B'):.0f} GiB, for 8 ranks {8 * host('Qwen2.5-7B'):.0f}." in page


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: config_only(Path(scratch) / name, name) for name in NUMBERS}
        known = {name: estimate.sizes(empty_model(folder)) for name, folder in folders.items()}
    target = ROOT / "docs/gpu.md"
    target.write_text(fixed_page(target.read_text(), known))
