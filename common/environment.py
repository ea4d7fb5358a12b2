"""The interface between rollout loop and task: `Environment`, the base class of every task. Light on import."""

import math
from dataclasses import dataclass, field

from common.turns import Question, Trajectory, Turn


class Lost(Exception):
    """Raised by a tool whose service is gone. It is no observation: the run saves the last finished step and stops."""


class Failed(Exception):
    """Raised for a failed tool call, with the text shown to the model. status: "error" or "timeout". lost: the call
    left no effects, so it does not count as an earlier call of the next one."""

    def __init__(self, text: str, status: str = "error", lost: bool = False):
        super().__init__(text)
        self.status, self.lost = status, lost


@dataclass
class Action:
    """The action of a generation: a tool call with its input, or (tool None) the final answer."""

    tool: str | None
    text: str
    several: bool = field(default=False, compare=False)  # whether other calls follow, which do not run


@dataclass
class Limits:
    """The limits of a trajectory, a generation and a tool call."""

    turns: int  # generations of a trajectory; the last one runs no tool
    turn_tokens: int  # tokens of a generation
    stop: list[str] = field(default_factory=list)  # strings that end a generation; the string itself is part of it
    stop_ids: list[int] = field(default_factory=list)  # token ids that end a generation
    tool_seconds: float = math.inf  # timeout of a tool call
    score_seconds: float = math.inf  # timeout of `finish`: a late one ends the run


class Environment:
    """Everything in a trajectory but the model: prompts, parsing of actions, tools, observations, the score.

    The defaults describe an environment without tools or observations. Methods run in the loop's thread, except `call`
    and `finish`, which run in many threads at once.
    """

    def __init__(self, tokenizer, limits: Limits):
        self.tokenizer, self.limits = tokenizer, limits

    def begin(self, step: int) -> None:
        """Prepare for a rollout of a training step, or (0) for an evaluation."""

    def prompt_ids(self, question: Question) -> list[int]:
        """Return the token ids of the first context. With stop strings, no context may end within a character."""
        return self.tokenizer.encode(question.text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def unfinished(self, turn: Turn) -> bool:
        """Return whether a stop string ended the generation too early: it then continues as the same turn."""
        return False

    def read(self, turn: Turn) -> Action | None:
        """Return the action of the generation, or None if it has none. Only the turn's own text may be parsed."""
        return None

    def call(self, turn: Turn, question: Question, earlier: list[str]) -> str:
        """Run the turn's tool on its input. earlier: the inputs of this trajectory's earlier calls that ran the tool.

        Raises Failed for a failed call, Lost for a tool that is gone; any other exception becomes an observation too.
        """
        raise NotImplementedError

    def observe(self, turn: Turn, output: str | None) -> tuple[str, list[int]]:
        """Return (text shown to the model, its token ids) for a tool's output; None: the generation had no action."""
        raise NotImplementedError

    def next_context(self, turns: list[Turn]) -> list[int]:
        """Return the token ids of the context of the turn that follows `turns`."""
        last = turns[-1]
        return last.context_ids + last.action_ids + last.observation_ids

    def finish(self, trajectory: Trajectory, question: Question) -> None:
        """Score a finished trajectory: set its outcome, in [0, 1], and further numbers in its info.

        An exception ends the run, with the question and the answer: a missing score must not count as wrong.
        """
