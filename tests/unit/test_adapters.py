"""Adapters of other origins: what the engine serves is accepted, all else is refused before the base is loaded."""

import json

import peft
import pytest
import safetensors.torch
import small_adapters
import small_models
import torch

from common import adapters, policy
from view import plan

LAYER = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the path of a model without weights: a refusal that comes after loading the base would raise OSError."""
    return small_models.without_weights(tmp_path_factory.mktemp("base"))


@pytest.fixture
def write(base, tmp_path):
    """Return a function that writes an adapter for the base and returns its folder."""
    return lambda config=None, **changes: small_adapters.write(tmp_path / "adapter", base, config, **changes)


def configured(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def weights(folder, change):
    file = folder / "adapter_model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file)


@pytest.mark.parametrize("make", small_adapters.SERVED)
def test_an_adapter_that_the_engine_serves_is_accepted(make, write, base):
    adapters.refuse_unfit(str(write(**small_adapters.SERVED[make])), base)


def test_files_of_other_programs_that_hold_plain_lora_are_accepted(write, base):
    folder = write()
    configured(folder, auto_mapping={"parent_library": "x", "unsloth_fixed": True}, revision="main", a_later_field=None)
    weights(folder, lambda found: {name: tensor.bfloat16() for name, tensor in found.items()})
    adapters.refuse_unfit(str(folder), base)
    torch.save(safetensors.torch.load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()  # as PEFT wrote until 2023
    adapters.refuse_unfit(str(folder), base)
    short = dict(peft_type="LORA", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], base_model_name_or_path=base)
    (folder / "adapter_config.json").write_text(json.dumps(short))
    adapters.refuse_unfit(str(folder), base)


Q, V = ["q_proj"], ["v_proj"]
ODD = {  # what PEFT writes for other kinds of adapters: (changes or a configuration, words of the refusal)
    "IA3": (
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "peft_type.*IA3",
    ),
    "LoHa": (peft.LoHaConfig(r=4, target_modules=Q), "peft_type.*LOHA"),
    "prompt": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type.*PROMPT_TUNING"),
    "DoRA": (dict(use_dora=True), "use_dora"),
    "bias": (dict(bias="lora_only"), "bias.*lora_only"),
    "all biases": (dict(bias="all"), "bias.*all"),
    "bias of LoRA": (dict(lora_bias=True), "lora_bias"),
    "modules_to_save": (dict(modules_to_save=["lm_head"]), "modules_to_save.*lm_head"),
    "tokens": (dict(trainable_token_indices=[1, 2]), "trainable_token_indices"),
    "PiSSA": (dict(init_lora_weights="pissa"), "init_lora_weights.*pissa"),
    "OLoRA": (dict(init_lora_weights="olora"), "init_lora_weights.*olora"),
    "copied layers": (dict(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "classifier": (dict(task_type="TOKEN_CLS"), "task_type.*TOKEN_CLS"),
    "output layer": (dict(target_modules=["q_proj", "lm_head"]), "outside of its layers: base_model.model.lm_head"),
    "embeddings": (dict(target_modules=["q_proj", "embed_tokens"]), "outside of its layers: .*embed_tokens"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("how", ["first start", "resume"])
def test_a_kind_that_the_engine_cannot_serve_is_refused_before_the_base_is_loaded(
    kind, how, write, make_args, base, tmp_path
):
    config, words = ODD[kind]
    folder = write(**config) if isinstance(config, dict) else write(config)
    refused_by_policy(folder, words, make_args, base, tmp_path if how == "resume" else None)


def refused_by_policy(folder, words, make_args, base, last=None):
    with pytest.raises(SystemExit, match=rf"(?s)^--adapter {folder}: .*{words}") as stopped:
        policy.Policy(make_args(model=base, adapter=str(folder)), last=last)
    assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code and len(stopped.value.code) < 900
    plan.adapter_rank(make_args(model=base, adapter=str(folder)))  # asked before: it must not raise anything else


CONFIGS = {
    "unknown kind": (dict(peft_type="WARP"), "peft_type.*WARP"),
    "a kind without a name": (dict(peft_type=None), "peft_type.*None"),
    "a later feature": (dict(use_gates=True, gate_size=3), "use_gates"),
    "no modules": (dict(target_modules=["query", "value"]), "does not fit .*query"),
    "another layer": (dict(layers_to_transform=[7]), "does not fit"),
    "modules_to_save without weights": (dict(modules_to_save=["embed_tokens"]), "modules_to_save"),
    "rank 0": (dict(r=0), "does not fit"),
    "rank as text": (dict(r="4"), "does not fit"),
    "a higher rank": (dict(r=8), "size mismatch.*layers.0.self_attn.q_proj"),
    "ranks that the file does not have": (dict(rank_pattern={"q_proj": 20}), "size mismatch.*q_proj"),
    "a rank pattern of text": (dict(rank_pattern="q_proj"), "does not fit"),
    "more layers": (dict(target_modules=["q_proj", "v_proj", "o_proj"]), "missing.*o_proj"),
    "fewer layers": (dict(target_modules=Q), "unknown.*v_proj"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_does_not_describe_its_file_is_refused(kind, write, make_args, base):
    changes, words = CONFIGS[kind]
    folder = write()
    configured(folder, **changes)
    refused_by_policy(folder, words, make_args, base)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "null", "{", '"r"', "[[1, 2, 3]]", "version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_configuration_that_is_no_object_is_refused(text, write, make_args, base):
    folder = write()
    (folder / "adapter_config.json").write_text(text)
    refused_by_policy(folder, "its adapter_config.json cannot be read", make_args, base)


def one_more(name, of=lambda found: torch.zeros(2, 2)):
    return lambda found: found | {name: of(found)}


FILES = {
    "git-lfs pointer": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"),
        "git-lfs",
    ),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "incomplete"),
    "cut in its head": (lambda file: file.write_bytes(file.read_bytes()[:60]), "incomplete"),
    "empty": (lambda file: file.write_bytes(b""), "incomplete"),
    "a web page": (lambda file: file.write_text("<!doctype html><html>not found</html>"), "incomplete"),
    "gone": (lambda file: file.unlink(), "missing"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "incomplete"),
    "a pickle": (lambda file: torch.save({}, file), "incomplete"),
}
KEYS = {
    "one less": (
        lambda found: {name: found[name] for name in sorted(found)[1:]},
        "missing.*layers.0.self_attn.q_proj.lora_A",
    ),
    "none": (lambda found: {}, "missing"),
    "embeddings too": (one_more("base_model.model.model.embed_tokens.weight"), "unknown.*embed_tokens"),
    "a head too": (one_more("base_model.model.lm_head.weight"), "unknown.*lm_head"),
    "magnitudes too": (one_more(LAYER.format(0, "q_proj", "magnitude_vector")), "unknown.*magnitude_vector"),
    "a layer that the model lacks": (one_more(LAYER.format(2, "q_proj", "A")), "unknown.*layers.2"),
    "without the prefix": (lambda found: {k.removeprefix("base_model.model."): v for k, v in found.items()}, "unknown"),
    "with the adapter's name": (
        lambda found: {k.replace("weight", "default.weight"): v for k, v in found.items()},
        "unknown",
    ),
    "of a model with a tower": (
        lambda found: {k.replace("model.layers", "language_model.layers"): v for k, v in found.items()},
        "unknown",
    ),
    "transposed": (lambda found: {k: v.T.contiguous() for k, v in found.items()}, "size mismatch"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_without_its_weights_is_refused(kind, write, make_args, base):
    change, words = FILES[kind]
    folder = write()
    change(folder / "adapter_model.safetensors")
    refused_by_policy(folder, words, make_args, base)


@pytest.mark.parametrize("kind", KEYS)
def test_a_file_with_other_weights_is_refused(kind, write, make_args, base):
    change, words = KEYS[kind]
    folder = write()
    weights(folder, change)
    refused_by_policy(folder, words, make_args, base)


def test_a_pickle_that_runs_a_command_is_refused(write, make_args, base, tmp_path):
    class Command:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    folder = write()
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Command()}, folder / "adapter_model.bin")
    refused_by_policy(folder, "incomplete", make_args, base)
    assert not (tmp_path / "ran").exists()
