"""The rollout loop: the policy and its tools take turns, without a barrier between turns."""

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.calls import Calls, Late, Watchdog
from common.environment import Environment, Failed
from common.turns import Question, Trajectory, Turn

LONGEST_OUTPUT = 50_000  # characters kept of a tool output; far more than any --max_observation_tokens


@dataclass
class Rollout:
    """A trajectory in progress. begun: (ids, log-probabilities) of a turn that a stop string has interrupted."""

    question: Question
    trajectory: Trajectory
    sample: int
    context: list[int] = field(default_factory=list)
    begun: tuple[list[int], list[float]] = ([], [])

    def __str__(self) -> str:
        return f"question {self.question.id}, sample {self.sample}"


class Loop:
    """The continuous loop: generations run in the engine, tools in threads, and no trajectory waits for the slowest."""

    def __init__(self, engine, task: Environment, greedy: bool):
        self.engine, self.task, self.args = engine, task, engine.args
        self.temperature = 0.0 if greedy else engine.args.temperature
        self.limits = task.limits
        self.tools = Calls("tool call", engine.args.tool_workers, self.limits.tool_seconds)
        self.scores = Calls("score", max(engine.args.tool_workers, 1), self.limits.score_seconds)
        task.begin(0 if greedy else engine.step)
        self.generating = {}  # request id -> rollout

    def run(self, rollouts: list[Rollout], on_end: Callable[[], object]) -> None:
        """Run every rollout to its end, with a call of on_end() after each."""
        ready = deque()
        for rollout in rollouts:
            rollout.context = rollout.context or self.task.prompt_ids(rollout.question)
            ready.append(rollout)
        left = len(ready)
        with Watchdog(self._pending) as watchdog:
            while left or self.scores.running:
                left -= self._submit(ready, on_end)
                events = 0
                if self.generating:
                    for request_id, ids, logps, reason in self.engine.advance():
                        rollout = self.generating.pop(request_id)
                        events += 1
                        if self._acted(rollout, ids, logps, reason, ready):
                            left -= 1
                            on_end()
                for rollout, output, error in self.tools.finished(wait=left and not self.generating and not ready):
                    events += 1
                    self._observed(rollout, *self._answer(rollout.trajectory.turns[-1], output, error))
                    ready.append(rollout)
                for rollout, _, error in self.scores.finished(wait=not left):
                    events += 1
                    self._scored(rollout, error)
                if events:
                    watchdog.progress()

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
            # vLLM would find stop strings in such a context itself, and end each generation after one token.
            if self.limits.stop and not begun and self.task.decode(rollout.context[-8:]).endswith("\ufffd"):
                where = f"question {rollout.question.id}, turn {turn}: {type(self.task).__name__}.{'observe' if turn else 'prompt_ids'}"
                raise SystemExit(
                    f"{where} ends within a character, where stop strings do not work. Let it end in a whole one."
                )
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
            turn.tool, turn.tool_input, turn.several = action.tool, action.text, action.several
            trajectory.stop = "max_turns" if last else ""
        if trajectory.stop:
            self._ended(rollout)
            return True
        if action is None:
            self._observed(rollout, None, "invalid")
            ready.append(rollout)
        else:
            earlier = [t.tool_input for t in trajectory.calls if t.tool == turn.tool and "lost" not in t.info]
            self.tools.submit(rollout, functools.partial(self.task.call, turn, rollout.question, earlier))
        return False

    def _ended(self, rollout):
        self.scores.submit(rollout, functools.partial(self.task.finish, rollout.trajectory, rollout.question))

    def _scored(self, rollout, error):
        """Raise for a failed score: a score that is missing must not count as wrong."""
        if error is None:
            return
        what = f"The score of {rollout}"
        answer = f"Its answer: {(rollout.trajectory.answer or '')[:200]!r}."
        if isinstance(error, Late):
            raise SystemExit(
                f"{what}: {error} (--tool_timeout). Raise --tool_timeout, or mend the task's score(). {answer}"
            )
        raise RuntimeError(f"{what}: the task's score() raised {type(error).__name__}. {answer}") from error

    def _answer(self, turn, output, error):
        """Return (output, status) of a tool call. A failure becomes an observation: it is counted, the run continues."""
        if error is None:
            return output, "ok"
        if isinstance(error, Late):
            return f"Error: {error}", "timeout"
        if isinstance(error, Failed):
            turn.info |= {"lost": 1.0} if error.lost else {}
            return str(error), error.status
        return f"Error: {type(error).__name__}: {error}", "error"

    def _observed(self, rollout, output, status):
        turn = rollout.trajectory.turns[-1]
        if status != "invalid":
            output = str(output).encode(errors="replace").decode()  # a lone surrogate cannot be tokenized
            if len(output) > LONGEST_OUTPUT:
                output = f"{output[:LONGEST_OUTPUT]} [cut: {len(output)} characters]"
        turn.tool_status = status
        turn.tool_output, turn.observation_ids = self.task.observe(turn, output)
        rollout.context = self.task.next_context(rollout.trajectory.turns)

    def _pending(self):
        """Return a line for each kind of pending work: generations, tool calls, scores."""

        def named(rollout, started, turn):
            return f"{rollout}, turn {turn}" + (f", for {time.monotonic() - started:.0f} s" if started else "")

        generations = [named(r, None, len(r.trajectory.turns) + 1) for r in list(self.generating.values())]
        calls, scores = (list(kind.running.values()) for kind in (self.tools, self.scores))
        called = [
            f"{turns[-1].tool}({turns[-1].tool_input[:40]!r}) of {named(r, started, len(turns))}"
            for r, started in calls
            if (turns := r.trajectory.turns)
        ]
        scored = [named(r, started, len(r.trajectory.turns)) for r, started in scores]
        return [
            f"{kind}: {len(items)} ({'; '.join(items[:4])}{'; ...' if len(items) > 4 else ''})"
            for kind, items in {"generations": generations, "tool calls": called, "scores": scored}.items()
            if items
        ]
