"""What common/rollout.py relies on in the installed vLLM, CUDA build or CPU build: their Python files are the same.

A failure names the line of ours to look at when vLLM's version changes.
"""

import inspect
import typing
from types import SimpleNamespace

import pytest
import torch

import train_grpo
from common import rollout
from common.rollout import Engine


@pytest.fixture
def started(monkeypatch):
    """Return a function that starts an Engine as if on CUDA, and returns the arguments that LLM was called with."""
    import vllm

    def start(sleep_mode="kv", lora_rank=32, **changes):
        seen = {}
        monkeypatch.setattr(vllm, "LLM", lambda **options: seen.update(options))
        engine = Engine.__new__(Engine)
        engine.cuda, engine.sleep_mode = True, sleep_mode
        layers = ["down_proj", "q_proj"]
        policy = SimpleNamespace(
            path="a-model", dtype=torch.bfloat16, lora_rank=lora_rank, optimizer=object(), adapted_layers=lambda: layers
        )
        engine._start(policy, train_grpo.Args(**changes))
        return seen

    return start


def test_every_option_is_a_field_of_vllm_s_arguments(started):
    from vllm.engine.arg_utils import EngineArgs

    fields = set(inspect.signature(EngineArgs).parameters)
    for options in (started(), started(load_4bit=True), started(sleep_mode="none")):
        assert set(options) <= fields, f"Engine.options: {set(options) - fields} are no arguments of vLLM any more"
        made = EngineArgs(**options)
        for name, value in options.items():
            assert getattr(made, name) == value, f"Engine.options: vLLM changes {name}"


def test_the_start_on_cuda_asks_for_what_the_design_says(started, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    options = started(load_4bit=True, gpu_memory=0.6, max_context=2048, questions=64, group=8, lora_rank=20)
    expected = dict(
        dtype="bfloat16",
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.6,
        enable_sleep_mode=True,
        enable_flashinfer_autotune=False,
        quantization="bitsandbytes",
        max_model_len=2048,
        max_num_seqs=64,
        max_lora_rank=32,
        hf_overrides={"head_dtype": "float32"},
        lora_target_modules=["down_proj", "q_proj"],
    )
    assert {name: options[name] for name in expected} == expected
    only_on_a_cpu = {"enforce_eager", "block_size", "enable_chunked_prefill", "max_num_batched_tokens"}
    assert not only_on_a_cpu & set(options)
    assert not started(sleep_mode="none")["enable_sleep_mode"] and "quantization" not in started()


def test_ranks_of_adapters_are_those_that_vllm_accepts():
    from vllm.config.lora import MaxLoRARanks

    assert typing.get_args(MaxLoRARanks) == rollout.LORA_RANKS, "common/rollout.py: LORA_RANKS"


@pytest.mark.parametrize(
    "line, owner, name, parameters",
    [
        ("Engine.sleep", "vllm.entrypoints.llm.LLM", "sleep", {"level": 1, "mode": "abort"}),
        ("Engine.wake", "vllm.entrypoints.llm.LLM", "wake_up", {"tags": None}),
        ("Engine._release_kv", "vllm.entrypoints.llm.LLM", "release_kv_cache_memory", {}),
        (
            "Engine._load_newest",
            "vllm.entrypoints.llm.LLM",
            "reset_prefix_cache",
            {"reset_running_requests": False, "reset_connector": False},
        ),
        (
            "Engine._load_newest",
            "vllm.v1.engine.llm_engine.LLMEngine",
            "add_lora",
            {"lora_request": inspect.Parameter.empty},
        ),
        ("Engine.advance", "vllm.v1.engine.llm_engine.LLMEngine", "step", {}),
        ("Engine._drain", "vllm.v1.engine.llm_engine.LLMEngine", "has_unfinished_requests", {}),
        ("Engine.wake", "vllm.v1.engine.llm_engine.LLMEngine", "is_sleeping", {}),
    ],
)
def test_signatures_are_those_that_the_engine_calls(line, owner, name, parameters):
    module, _, of = owner.rpartition(".")
    method = getattr(getattr(__import__(module, fromlist=[of]), of), name)
    found = {p.name: p.default for p in inspect.signature(method).parameters.values() if p.name != "self"}
    assert found == parameters, f"common/rollout.py, {line}: {of}.{name} has other parameters"


def test_light_sleep_keeps_weights_and_state_and_frees_the_pages(monkeypatch):
    """Record what level 1 asks of the allocator: it offloads weights, runtime state and CUDA graphs, drops the rest."""
    from vllm import device_allocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    asked = []
    recorder = SimpleNamespace(
        sleep=lambda offload_tags: asked.append(offload_tags), discard=lambda tags: asked.append(tags)
    )
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: recorder)
    backend = CuMemBackend()
    backend.suspend(1)
    backend.discard(("kv_cache",))
    assert asked == [("weights", "runtime", "cudagraph"), ("kv_cache",)], "Engine.sleep: level 1 frees something else"


def test_a_release_before_the_pause_is_complete_says_so():
    """Engine._release_kv waits while vLLM refuses with these words, and raises any other error."""
    from vllm.v1.engine.core import EngineCore

    assert "requires a completed pause" in inspect.getsource(EngineCore.release_kv_cache_memory)


def test_each_rank_has_an_engine_alone():
    """external_launcher with tensor_parallel_size 1 gives every rank a group of one: no rank waits for another."""
    from vllm.config import ParallelConfig

    made = ParallelConfig(tensor_parallel_size=1, distributed_executor_backend="external_launcher")
    assert made.world_size == 1


def test_a_float32_output_layer_is_known_to_vllm():
    from vllm.config.model import ModelConfig
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    assert "head_dtype" in vars(ModelConfig), "Engine.options: hf_overrides"
    assert "head_dtype" in inspect.getsource(LogitsProcessor._apply_head), "Engine.options: hf_overrides"
