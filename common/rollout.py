"""Rollouts: a vLLM engine in the trainer's process, and the loop that lets a policy and its tools take turns.

There is no turn barrier. Each trajectory goes on as soon as its own tool has answered, and tools run beside generation. Every
request carries a seed made of (run seed, step, phase, question, sample, turn), so the schedule cannot change a sample.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import queue
import shutil
import tempfile
import threading
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import cpu_build, run
from common.checkpoint import random_states, set_random_states
from common.turns import Group, Question, Trajectory, Turn, pack
from tools import Failed, Lost

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as max_lora_rank
LONGEST_OUTPUT = 50_000  # characters of a tool output that are kept; far beyond any --max_observation_tokens
HANGING = 64  # given up calls that still run, at which the tool is taken for lost: a thread cannot be ended
WATCHDOG = 60.0  # seconds without a finished generation or tool call before a line says what is awaited


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
        self.asleep = False
        self.version, self.request, self.loaded = 0, None, 0
        self.step, self.phase = 0, 0
        self.adapters = AdapterStore(policy, args)
        # vLLM seeds python, numpy and torch anew when it starts: every rank would draw the same numbers from here on.
        with keep_random_state():
            self.llm = self._start(policy, args)
        if args.sleep != "none" and not self.cuda and run.rank() == 0:
            run.say(f"--sleep {args.sleep} has no effect on a CPU: the engine keeps its memory while the policy trains")
        self.publish(policy)

    def _start(self, policy, args):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from vllm import LLM

        rank = policy.lora_rank
        if rank > LORA_RANKS[-1]:
            raise SystemExit(f"--adapter of rank {rank}: the engine takes adapters of rank {LORA_RANKS[-1]} at most.")
        share = -(-args.questions // run.world_size()) * args.group
        options = dict(
            model=policy.path,
            tokenizer=policy.path,
            dtype=str(policy.dtype).removeprefix("torch."),
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=1,
            max_lora_rank=min(r for r in LORA_RANKS if r >= rank),
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # after the temperature, as the trainer computes them
            generation_config="vllm",
            max_model_len=args.max_context,
            max_num_seqs=min(max(share, 64), 256),
            seed=args.seed,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if self.cuda:
            options |= dict(gpu_memory_utilization=args.gpu_memory, enable_sleep_mode=args.sleep != "none")
            if args.load_4bit:
                options |= dict(quantization="bitsandbytes")
        else:
            done = cpu_build.replace_lora_operator()
            if run.rank() == 0:
                run.say(done)
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
        if not self.cuda or self.args.sleep == "none" or self.asleep:
            return
        if self.args.sleep == "full":
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
        with tqdm(total=len(rollouts), desc=progress, leave=False, disable=not progress or run.rank() > 0) as bar:
            loop.run(rollouts, bar.update)

    def add(self, request_id, ids, max_tokens, stop, stop_ids, temperature, seed):
        """Submit one generation to vLLM."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_p=getattr(
                self.args, "top_p", 1.0
            ),  # of eval.py alone: what is trained is sampled from the whole distribution
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
            probe = Probe(policy.tokenizer)
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
        if difference > 0.02 and run.rank() == 0:
            run.say(
                f"warning: engine and trainer differ by {difference:.2g} nats a token (self-test); --tis_cap corrects for it"
            )
        return difference


class Probe:
    """What the self-test asks the engine to continue: two prompts, one generation each."""

    texts = ("The quick brown fox jumps over the lazy dog and", "Question: where is the town of the river? Answer:")
    stop, stop_ids, max_turns, max_turn_tokens = [], [], 1, 16

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def prompt_ids(self, question):
        return self.tokenizer.encode(question.text, add_special_tokens=False)

    def decode(self, ids):
        return self.tokenizer.decode(ids)

    def parse(self, text):
        return None

    def finish(self, trajectory, question):
        pass


@dataclass
class Rollout:
    """A trajectory under way. begun: (ids, their log-probabilities) of a turn that a stop string has interrupted."""

    question: object
    trajectory: Trajectory
    sample: int
    context: list[int] = field(default_factory=list)
    begun: tuple = ([], [])


class Loop:
    """The continuous loop: generations run in the engine, tools in threads, and no one waits for the slowest."""

    def __init__(self, engine, task, greedy):
        self.engine, self.task, self.args = engine, task, engine.args
        self.temperature = 0.0 if greedy else engine.args.temperature
        # A client that waits for its server to come back keeps the time itself.
        timeout = math.inf if getattr(task, "keeps_time", False) else engine.args.tool_timeout
        self.tools = Tools(task, engine.args.tool_workers, timeout)
        if begin := getattr(getattr(task, "tool", None), "begin", None):
            begin(0 if greedy else engine.step)  # the noise of a simulated search engine is for training
        self.said = getattr(task, "said", lambda turn: turn.text)
        self.thinks_on = getattr(task, "thinks_on", lambda text: False)
        self.generating = {}  # request id -> rollout
        self.scorer = ThreadPoolExecutor(1, "scorer")  # a comparison of two formulas may take seconds
        self.scores = []

    def run(self, rollouts, on_end):
        """Run all to the end; on_end() after each."""
        try:
            self._run(rollouts, on_end)
            for score in self.scores:
                try:
                    score.result()
                except Lost as lost:
                    raise SystemExit(str(lost)) from None
        finally:
            self.scorer.shutdown(wait=False, cancel_futures=True)

    def _run(self, rollouts, on_end):
        ready = deque()
        for rollout in rollouts:
            rollout.context = rollout.context or self.task.prompt_ids(rollout.question)
            ready.append(rollout)
        left, heard = len(ready), time.monotonic()
        while left:
            left -= self._submit(ready, on_end)
            events = 0
            if self.generating:
                for request_id, ids, logps, reason in self.engine.advance():
                    rollout = self.generating.pop(request_id)
                    events += 1
                    if self._acted(rollout, ids, logps, reason, ready):
                        left -= 1
                        on_end()
            for rollout, output, status in self.tools.answered(wait=not self.generating and not ready):
                events += 1
                self._observed(rollout, output, status)
                ready.append(rollout)
            heard = self._watch(heard, events)

    def _submit(self, ready, on_end):
        """Hand contexts to the engine. Returns how many trajectories ended here because their context is full."""
        ended = 0
        while ready:
            rollout = ready.popleft()
            room = self.args.max_context - len(rollout.context)
            if room < 1:
                rollout.trajectory.stop = "context"
                self._ended(rollout)
                ended += 1
                on_end()
                continue
            turn, begun = len(rollout.trajectory.turns), rollout.begun[0]
            request_id = f"{rollout.question.id}/{rollout.sample}/{turn}/{id(rollout)}"
            self.engine.add(
                request_id,
                rollout.context + begun,
                min(self.task.max_turn_tokens, room) - len(begun),
                self.task.stop,
                self.task.stop_ids,
                self.temperature,
                self._seed(rollout, (turn, len(begun)) if begun else turn),
            )
            self.generating[request_id] = rollout
        return ended

    def _seed(self, rollout, turn):
        if self.temperature == 0:
            return None
        question = rollout.question
        key = (self.args.seed, self.engine.step, self.engine.phase, question.id, question.draw, rollout.sample, turn)
        return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()[:7], "big")

    def _acted(self, rollout, ids, logps, reason, ready):
        """Record a turn. Returns True when the trajectory has ended; otherwise its tool is on the way, or it is ready again."""
        trajectory, task = rollout.trajectory, self.task
        more, (ids, logps) = ids, (rollout.begun[0] + ids, rollout.begun[1] + logps)
        turn = Turn(rollout.context, ids, logps, task.decode(ids))
        cut, said = reason == "length", self.said(turn)
        if not cut and more and more[-1] not in task.stop_ids and self.thinks_on(said):
            if len(ids) < min(task.max_turn_tokens, self.args.max_context - len(rollout.context)):
                rollout.begun = ids, logps
                ready.append(rollout)
                return False
            cut = True
        rollout.begun = [], []
        trajectory.turns.append(turn)
        action = None if cut else task.parse(said)
        last = len(trajectory.turns) >= task.max_turns
        if cut:  # trained as it was sampled, but half a tool call is not run
            full = len(rollout.context) + len(ids) >= self.args.max_context
            trajectory.stop = "context" if full else "length"
        elif action is None:
            turn.tool_status = "invalid"  # also of a last turn, which is not answered any more
            trajectory.stop = "invalid" if last else ""
        elif action.tool is None:
            trajectory.answer = action.text
            trajectory.stop = "answer"
        else:
            turn.tool, turn.tool_input = action.tool, action.text
            trajectory.stop = "max_turns" if last else ""
        if trajectory.stop:
            self._ended(rollout)
            return True
        if action is None:
            self._observed(rollout, task.invalid_message, "invalid")
            ready.append(rollout)
        else:
            earlier = [t.tool_input for t in trajectory.calls if t.tool == turn.tool and "lost" not in t.info]
            self.tools.call(rollout, turn.tool, turn.tool_input, earlier)
        return False

    def _ended(self, rollout):
        self.scores.append(self.scorer.submit(self.task.finish, rollout.trajectory, rollout.question))

    def _observed(self, rollout, output, status):
        turn = rollout.trajectory.turns[-1]
        output = str(output).encode(errors="replace").decode()  # a lone surrogate cannot be tokenized
        if len(output) > LONGEST_OUTPUT:
            output = f"{output[:LONGEST_OUTPUT]} [cut: {len(output)} characters]"
        turn.tool_status = status
        turn.tool_output, turn.observation_ids = self.task.observation(output, turn)
        rollout.context = self.task.next_context(rollout.trajectory.turns)

    def _watch(self, heard, events):
        """One line when nothing has finished for a while: a silent wait is the hardest fault to find."""
        now = time.monotonic()
        if events:
            return now
        if now - heard > WATCHDOG:
            run.say(
                f"rank {run.rank()}: nothing has finished for {WATCHDOG:.0f} s; awaited: {len(self.generating)} generations; "
                f"tools: {self.tools.awaited() or 'none'}"
            )
            return now
        return heard


class Tools:
    """Tool calls in daemon threads, so that one that hangs holds up neither the others nor the end of the program.

    workers = 0 runs each call at once in the calling thread, without a time limit. tools.Lost ends the run.
    """

    def __init__(self, task, workers, timeout):
        self.task, self.workers, self.timeout = task, workers, timeout
        self.waiting, self.done = deque(), queue.SimpleQueue()
        self.calls = {}  # number -> (rollout, tool, input, started)
        self.number = 0

    def call(self, rollout, tool, text, earlier):
        self.waiting.append((rollout, tool, text, earlier))
        self._start()

    def _start(self):
        while self.waiting and (self.workers == 0 or len(self.calls) < self.workers):
            rollout, tool, text, earlier = self.waiting.popleft()
            self.number += 1
            self.calls[self.number] = (rollout, tool, text, time.monotonic())
            if self.workers == 0:
                self._work(self.number, tool, text, earlier)
            else:
                self._thread(self.number, tool, text, earlier)

    def _thread(self, *call):
        threading.Thread(target=self._work, args=call, name="tool call", daemon=True).start()
        running = sum(thread.name == "tool call" for thread in threading.enumerate())
        if running > self.workers + HANGING:
            raise SystemExit(
                f"{running - len(self.calls)} calls of the tool hang and cannot be ended: it is out of order."
            )

    def _work(self, number, tool, text, earlier):
        call = self.calls[number]  # which may have been given up by the time it ends
        try:
            wants = getattr(self.task.tool, "wants_question", False)
            more = {"question": call[0].question} if wants else {}
            self.done.put((number, self.task.run_tool(tool, text, earlier, **more), "ok"))
        except Lost as lost:
            self.done.put((number, str(lost), "lost"))
        except Failed as failed:
            if failed.lost:
                call[0].trajectory.turns[-1].info["lost"] = 1.0
            self.done.put((number, str(failed), failed.status))
        except (
            BaseException
        ) as error:  # an observation like any other: the trajectory goes on, and the failure is counted
            self.done.put((number, f"Error: {type(error).__name__}: {error}", "error"))

    def answered(self, wait):
        """(rollout, output, status) of the calls that have ended; with `wait`, a moment is spent waiting for one."""
        out = []
        with contextlib.suppress(queue.Empty):
            block = wait and bool(self.calls)
            while True:
                number, output, status = self.done.get(block=block, timeout=0.05) if block else self.done.get_nowait()
                block = False
                if status == "lost":
                    raise SystemExit(output)
                if number in self.calls:  # not one that was given up
                    out.append((self.calls.pop(number)[0], output, status))
        for number, (rollout, _, _, started) in list(self.calls.items()):
            if self.workers and time.monotonic() - started > self.timeout:
                del self.calls[number]
                out.append((rollout, f"Error: no answer within {self.timeout:g} seconds", "timeout"))
        self._start()
        return out

    def awaited(self):
        now = time.monotonic()
        calls = [f"{tool}({text[:40]!r}) {now - started:.0f} s" for _, tool, text, started in self.calls.values()]
        return ", ".join(calls[:4]) + (f" and {len(calls) - 4} more" if len(calls) > 4 else "")


class AdapterStore:
    """Where published adapters lie: memory-backed storage when it has room, else the run directory; one copy per node.

    A folder belongs to a live run as long as its lock is held; those that dead runs left in memory are removed.
    """

    def __init__(self, policy, args):
        need = 3 * sum(p.numel() * p.element_size() for p in policy.parameters)
        memory = Path("/dev/shm")
        if run.local_rank() == 0:
            self._remove_dead(memory)
            roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need
            parent = memory if roomy else Path(run.directory(args))
            parent.mkdir(parents=True, exist_ok=True)
            self._remove_dead(parent)
            name = f"turnwise-{os.getuid()}-"
            # Renamed when locked: nobody takes it for dead.
            fresh = Path(tempfile.mkdtemp(prefix=f".{name}", dir=parent))
            self.lock = open(fresh / "lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            folder = fresh.rename(parent / fresh.name.removeprefix("."))
            run.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
        else:
            folder = None
        self.folder = run.from_local_rank_0(folder)
        self.versions = deque()

    def _remove_dead(self, parent):
        name = f"turnwise-{os.getuid()}-*"
        for folder in (*parent.glob(name), *parent.glob(f".{name}")):
            with contextlib.suppress(OSError):
                starting = folder.name.startswith(".") or not (folder / "lock").exists()
                if starting and time.time() - folder.stat().st_mtime < 60:
                    continue
                with open(folder / "lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)

    def path(self, version):
        return self.folder / f"v{version}"

    def save(self, policy, version):
        """All ranks together: one rank per node writes, none goes on before it is there, and the version before the last is deleted."""
        if run.local_rank() == 0:
            run.patiently(f"adapter {version} in {self.folder}", lambda: policy.save_adapter(self.path(version)))
            self.versions.append(version)
            while len(self.versions) > 2:  # the one before may not have been loaded yet by a slower rank
                shutil.rmtree(self.path(self.versions.popleft()), ignore_errors=True)
        if run.world_size() > 1:
            dist.barrier()


@contextlib.contextmanager
def keep_random_state():
    """Leave the global random states as they were before the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
