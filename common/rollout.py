"""Rollouts with a vLLM engine in the trainer's process; common/loop.py lets the policy and its tools take turns.

There is no turn barrier: a trajectory continues as soon as its own tool returns, while others generate. Each request
has a seed made of (run seed, step, phase, question, sample, turn), so the schedule cannot change a sample.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from common import cpu_build, memory, ranks, run
from common.adapters import AdapterStore
from common.args import Sampling
from common.checkpoint import random_states, set_random_states
from common.environment import Environment
from common.loop import Loop, Rollout
from common.turns import Group, Question, Trajectory

if TYPE_CHECKING:
    from common.policy import Policy

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
MOST_AT_ONCE = 256  # concurrent generations
IDLE_STEPS = 2  # pairs of engine steps within which an engine without requests becomes idle


def lora_slot(rank: int) -> int:
    """Return the rank of the engine's adapter slot for an adapter of this rank. Raises SystemExit if there is none."""
    slot = next((r for r in LORA_RANKS if r >= rank), None)
    if slot is None:
        raise SystemExit(f"--adapter of rank {rank}: the engine takes adapters of rank {LORA_RANKS[-1]} at most.")
    return slot


def at_once(questions: int, group: int, world: int) -> int:
    """Return the number of concurrent generations: a rank's share of a step's trajectories, within bounds."""
    return min(max(-(-questions // world) * group, 64), MOST_AT_ONCE)


class Engine:
    """One vLLM engine per rank; it always samples with the newest published adapter."""

    def __init__(self, policy: "Policy", args: Sampling):
        self.args, self.cuda = args, policy.device.type == "cuda"
        # A CPU cannot free the engine's memory, and eval.py needs none for training.
        self.sleep_mode = args.sleep if policy.optimizer and self.cuda else "none"
        self.asleep = False
        self.version, self.request, self.loaded = 0, None, 0
        self.step, self.phase = 0, 0
        self.top_p = 1.0  # only eval.py changes it: training samples come from the whole distribution
        self.adapters = AdapterStore(policy, args)
        if self.cuda and ranks.rank() == 0:
            run.notice("starting the engine: it loads its copy of the base and records CUDA graphs (a minute or more)")
        started, before = time.monotonic(), memory.allocated()
        # vLLM seeds python, numpy and torch when it starts: all ranks would draw the same numbers afterwards.
        with keep_random_state():
            self.llm = self._start(policy, args)
        memory.ENGINE_BYTES = memory.allocated() - before
        if ranks.rank() == 0:
            run.notice(
                f"the engine started in {time.monotonic() - started:.0f} s, with {self.kv_tokens():,} tokens of KV cache"
            )
        self.publish(policy)

    def kv_tokens(self) -> int:
        """Return how many tokens' keys and values the engine can hold."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    def _start(self, policy, args):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        # FlashInfer's sampler compiles at its first use, and training samples need no top-k or top-p.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from vllm import LLM

        if not self.cuda:
            report = cpu_build.replace_lora_operator()
            if report and ranks.rank() == 0:
                run.notice(report)
        with warnings.catch_warnings(), contextlib.nullcontext() if self.cuda else cpu_build.hidden_from_start_up():
            warnings.simplefilter("ignore", FutureWarning)
            return LLM(**self.options(policy, args))

    def options(self, policy: "Policy", args: Sampling) -> dict:
        """Return the arguments of vLLM's LLM: fields of its EngineArgs."""
        step = (args.questions, args.group) if policy.optimizer else (64, 8)  # eval.py has no steps
        options = dict(
            model=policy.path,
            tokenizer=policy.path,
            dtype=str(policy.dtype).removeprefix("torch."),
            hf_overrides={"head_dtype": "float32"},  # logits in float32, as the trainer computes them
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=1,
            max_lora_rank=lora_slot(policy.lora_rank),
            lora_target_modules=policy.adapted_layers(),  # else vLLM wraps embeddings and output layer too
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer computes them
            generation_config="vllm",
            max_model_len=args.max_context,
            max_num_seqs=at_once(*step, ranks.world_size()),
            seed=args.seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if self.cuda:
            # FlashInfer's tuning runs collectives over all ranks and may download kernels.
            options |= dict(gpu_memory_utilization=args.gpu_memory, enable_flashinfer_autotune=False)
            options |= dict(enable_sleep_mode=self.sleep_mode != "none")
            if args.load_4bit:
                options |= dict(quantization="bitsandbytes")
        else:
            options |= dict(
                enforce_eager=True,
                block_size=32,  # the default, 128, finds no prefix in short contexts
                enable_chunked_prefill=False,  # this build crashes if it splits the prefill of a seeded request
                max_num_batched_tokens=max(args.max_context, 8192),
            )
        return options

    def publish(self, policy: "Policy") -> None:
        """Save the policy's adapter under a new name and path; all ranks call this. The next rollout loads it."""
        self.version += 1
        self.adapters.save(policy, self.version)

    def _load_newest(self):
        """Load the newest adapter. Its name and path are keys of the prefix cache, so there are no stale hits."""
        from vllm.lora.request import LoRARequest

        self._drain(self.llm.reset_prefix_cache)  # also because a resumed run starts with an empty cache
        if self.loaded != self.version:
            path = self.adapters.path(self.version)
            self.request = LoRARequest(f"v{self.version}", self.version, str(path))
            if not self.llm.llm_engine.add_lora(self.request):
                raise RuntimeError(f"vLLM did not load the adapter {path}")
            self.loaded = self.version

    # ---- memory

    def sleep(self) -> None:
        """Free GPU memory for training. full: park base weights in host memory and free KV pages; kv: free pages."""
        memory.note_free()
        if self.sleep_mode == "none" or self.asleep:
            return
        if self.sleep_mode == "full":
            self._drain(self.llm.reset_prefix_cache)
            self.llm.sleep(level=1)  # never level 2: with LoRA it leaves the adapter's buffers undefined
        else:
            self.llm.sleep(level=0)
            self._drain(self._release_kv)
        self.asleep = True

    def wake(self) -> None:
        memory.note_free()
        if self.asleep:
            torch.cuda.empty_cache()
            if not self.llm.wake_up() or self.llm.llm_engine.is_sleeping():
                raise RuntimeError("the engine did not wake up: generating now would hang")
            self.asleep = False

    def _drain(self, idle: Callable[[], bool]) -> None:
        """Run engine steps until no request is left and idle() returns True. Raises RuntimeError if it never does.

        Under asynchronous scheduling (vLLM's default on CUDA) a batch of finished requests is still queued after the
        last output; two idle steps remove it.
        """
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()
        for _ in range(IDLE_STEPS):
            engine.step()
            engine.step()
            if idle():
                return
        raise RuntimeError(f"the engine still holds requests after {2 * IDLE_STEPS} idle steps")

    def _release_kv(self):
        """Free the KV pages. Returns False while the engine is not idle."""
        try:
            self.llm.release_kv_cache_memory()
        except RuntimeError as error:
            if "completed pause" not in str(error):
                raise
            return False
        return True

    # ---- sampling

    def begin(self, step: int) -> None:
        """Start a step: its number, and that of each rollout within it, enter the seeds of its samples."""
        self.step, self.phase = step, 0

    def rollout(
        self, task: Environment, questions: list[Question], n: int, greedy: bool = False, progress: str | None = None
    ) -> list[Group]:
        """Sample `n` trajectories per question, as one Group per question. greedy: temperature 0, for evaluation."""
        groups = [Group(question, [Trajectory() for _ in range(n)]) for question in questions]
        rollouts = [
            Rollout(group.question, trajectory, sample)
            for group in groups
            for sample, trajectory in enumerate(group.trajectories)
        ]
        self._finish(task, rollouts, greedy, progress)
        return groups

    def fork(
        self, task: Environment, boundaries: list[tuple[Group, int, int]], n: int, progress: str | None = None
    ) -> list[Group]:
        """Sample `n` siblings at each boundary, as one Group per boundary with its turn in info["turn"].

        A boundary (group, trunk, k) is where trajectory number `trunk` of `group` was before its turn k (from 0).
        Siblings share the earlier turns and the exact context ids, and continue with the newest policy. Tools rebuild
        their state from a trajectory's earlier calls, so siblings cannot see each other.
        """
        groups, rollouts = [], []
        for group, trunk, k in boundaries:
            turns = group.trajectories[trunk].turns
            siblings = [Trajectory(turns[:k], forked=k) for _ in range(n)]
            groups.append(Group(group.question, siblings, {"turn": k}))
            rollouts += [
                Rollout(group.question, sibling, trunk * n + j, turns[k].context_ids)
                for j, sibling in enumerate(siblings)
            ]
        self._finish(task, rollouts, False, progress)
        return groups

    def _finish(self, task, rollouts, greedy, progress):
        """Run every rollout to its end."""
        self.wake()
        self._load_newest()
        self.phase += 1
        loop = Loop(self, task, greedy)
        with run.progress(total=len(rollouts), desc=progress, leave=False, shown=bool(progress)) as bar:
            loop.run(rollouts, bar.update)

    def add(self, request_id, ids, max_tokens, stop, stop_ids, temperature, seed) -> None:
        """Submit one generation to vLLM."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_p=self.top_p,
            top_k=0,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            stop=stop,
            stop_token_ids=stop_ids,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": ids}, params, lora_request=self.request)

    def advance(self) -> Iterator[tuple[str, list[int], list[float], str]]:
        """Run one engine step. Yields (request id, ids, log-probabilities, "stop" or "length") of finished ones."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                sampled = output.outputs[0]
                ids = list(sampled.token_ids)
                logps = [float(at[token].logprob) for token, at in zip(ids, sampled.logprobs)]
                yield output.request_id, ids, logps, sampled.finish_reason


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the global random states after the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
