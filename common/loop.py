"""The rollout loop: the policy and its tools take turns, without a barrier between turns."""

import contextlib
import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from common import ranks, run
from common.environment import Environment, Failed, Lost
from common.turns import Question, Trajectory, Turn

LONGEST_OUTPUT = 50_000  # characters kept of a tool output; far more than any --max_observation_tokens
HANGING = 64  # running calls past their timeout at which the tool counts as lost: a thread cannot be killed
WATCHDOG = 60.0  # seconds without a finished generation or tool call until a notice


@dataclass
class Rollout:
    """A trajectory in progress. begun: (ids, log-probabilities) of a turn that a stop string has interrupted."""

    question: Question
    trajectory: Trajectory
    sample: int
    context: list[int] = field(default_factory=list)
    begun: tuple[list[int], list[float]] = ([], [])


class Loop:
    """The continuous loop: generations run in the engine, tools in threads, and no trajectory waits for the slowest."""

    def __init__(self, engine, task: Environment, greedy: bool):
        self.engine, self.task, self.args = engine, task, engine.args
        self.temperature = 0.0 if greedy else engine.args.temperature
        self.limits = task.limits
        self.tools = Tools(task, engine.args.tool_workers, self.limits.tool_seconds)
        task.begin(0 if greedy else engine.step)
        self.generating = {}  # request id -> rollout
        self.scorer = ThreadPoolExecutor(1, "scorer")  # comparing two formulas may take seconds
        self.scores = []

    def run(self, rollouts: list[Rollout], on_end: Callable[[], object]) -> None:
        """Run every rollout to its end, with a call of on_end() after each."""
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
        left, last_event = len(ready), time.monotonic()
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
            last_event = self._watch(last_event, events)

    def _submit(self, ready, on_end):
        """Submit generations to the engine. Returns how many trajectories ended here because their context is full."""
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
                min(self.limits.turn_tokens, room) - len(begun),
                self.limits.stop,
                self.limits.stop_ids,
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
        """Record a turn. Returns True if the trajectory has ended; otherwise its tool runs, or it is ready again."""
        trajectory, task = rollout.trajectory, self.task
        new_ids, (ids, logps) = ids, (rollout.begun[0] + ids, rollout.begun[1] + logps)
        turn = Turn(rollout.context, ids, logps, task.decode(ids))
        cut = reason == "length"
        if not cut and new_ids and task.unfinished(turn):
            if len(ids) < min(self.limits.turn_tokens, self.args.max_context - len(rollout.context)):
                rollout.begun = ids, logps
                ready.append(rollout)
                return False
            cut = True
        rollout.begun = [], []
        trajectory.turns.append(turn)
        action = None if cut else task.read(turn)
        last = len(trajectory.turns) >= self.limits.turns
        if cut:  # trained as sampled, but half a tool call does not run
            full = len(rollout.context) + len(ids) >= self.args.max_context
            trajectory.stop = "context" if full else "length"
        elif action is None:
            turn.tool_status = "invalid"  # also on the last turn, which gets no observation
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
            self._observed(rollout, None, "invalid")
            ready.append(rollout)
        else:
            earlier = [t.tool_input for t in trajectory.calls if t.tool == turn.tool and "lost" not in t.info]
            self.tools.call(rollout, earlier)
        return False

    def _ended(self, rollout):
        self.scores.append(self.scorer.submit(self.task.finish, rollout.trajectory, rollout.question))

    def _observed(self, rollout, output, status):
        turn = rollout.trajectory.turns[-1]
        if status != "invalid":
            output = str(output).encode(errors="replace").decode()  # a lone surrogate cannot be tokenized
            if len(output) > LONGEST_OUTPUT:
                output = f"{output[:LONGEST_OUTPUT]} [cut: {len(output)} characters]"
        turn.tool_status = status
        turn.tool_output, turn.observation_ids = self.task.observe(turn, output)
        rollout.context = self.task.next_context(rollout.trajectory.turns)

    def _watch(self, last_event, events):
        """Print a notice when nothing has finished for a while: a silent wait is hard to diagnose."""
        now = time.monotonic()
        if events:
            return now
        if now - last_event > WATCHDOG:
            run.notice(
                f"rank {ranks.rank()}: nothing has finished for {WATCHDOG:.0f} s; pending: "
                f"{len(self.generating)} generations; tools: {self.tools.awaited() or 'none'}"
            )
            return now
        return last_event


class Tools:
    """Tool calls in daemon threads: one that hangs delays neither the others nor the exit. `Lost` ends the run.
    workers = 0 runs each call at once in the calling thread, without a time limit."""

    def __init__(self, task: Environment, workers: int, timeout: float):
        self.task, self.workers, self.timeout = task, workers, timeout
        self.waiting, self.done = deque(), queue.SimpleQueue()
        self.calls = {}  # number -> (rollout, turn, started)
        self.number = 0

    def call(self, rollout: Rollout, earlier: list[str]) -> None:
        """Run the tool of the rollout's last turn, at once or when a worker is free."""
        self.waiting.append((rollout, rollout.trajectory.turns[-1], earlier))
        self._start()

    def _start(self):
        while self.waiting and (self.workers == 0 or len(self.calls) < self.workers):
            rollout, turn, earlier = self.waiting.popleft()
            self.number += 1
            self.calls[self.number] = (rollout, turn, time.monotonic())
            run_call = self._work if self.workers == 0 else self._thread
            run_call(self.number, turn, rollout.question, earlier)

    def _thread(self, *call):
        threading.Thread(target=self._work, args=call, name="tool call", daemon=True).start()
        running = sum(thread.name == "tool call" for thread in threading.enumerate())
        if running > self.workers + HANGING:
            raise SystemExit(f"{running - len(self.calls)} calls of the tool hang and cannot be ended: it is broken.")

    def _work(self, number, turn, question, earlier):
        try:
            self.done.put((number, self.task.call(turn, question, earlier), "ok"))
        except Lost as lost:
            self.done.put((number, str(lost), "lost"))
        except Failed as failed:
            if failed.lost:
                turn.info["lost"] = 1.0
            self.done.put((number, str(failed), failed.status))
        except BaseException as error:  # becomes an observation: the trajectory continues, the failure is counted
            self.done.put((number, f"Error: {type(error).__name__}: {error}", "error"))

    def answered(self, wait: bool) -> list[tuple[Rollout, str, str]]:
        """Return (rollout, output, status) of the finished calls; with `wait`, wait briefly for one."""
        out = []
        with contextlib.suppress(queue.Empty):
            block = wait and bool(self.calls)
            while True:
                number, output, status = self.done.get(block=block, timeout=0.05) if block else self.done.get_nowait()
                block = False
                if status == "lost":
                    raise SystemExit(output)
                if number in self.calls:  # else it had timed out
                    out.append((self.calls.pop(number)[0], output, status))
        for number, (rollout, _, started) in list(self.calls.items()):
            if self.workers and time.monotonic() - started > self.timeout:
                del self.calls[number]
                out.append((rollout, f"Error: no answer within {self.timeout:g} seconds", "timeout"))
        self._start()
        return out

    def awaited(self) -> str:
        now = time.monotonic()
        calls = [f"{t.tool}({t.tool_input[:40]!r}) {now - started:.0f} s" for _, t, started in self.calls.values()]
        return ", ".join(calls[:4]) + (f" and {len(calls) - 4} more" if len(calls) > 4 else "")
