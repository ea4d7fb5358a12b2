"""What the rollout loop asks of a task: `Environment`, the class that every task derives from. Light on import."""

import math
from dataclasses import dataclass, field

from common.turns import Question, Trajectory, Turn


class Lost(Exception):
    """Raised by a tool whose service is gone and stayed away: not an observation. The run saves what is finished and stops."""


class Failed(Exception):
    """A tool call that did not succeed; its text is what the model is shown. status: "error" or "timeout".

    lost: nothing that the call did is left, so it is not to be among the earlier calls of the next one.
    """

    def __init__(self, text: str, status: str = "error", lost: bool = False):
        super().__init__(text)
        self.status, self.lost = status, lost


@dataclass
class Action:
    """What a generation asks for: a tool with its input, or (tool None) the final answer."""

    tool: str | None
    text: str


@dataclass
class Limits:
    """Where a trajectory, a generation and a tool call end."""

    turns: int  # generations of a trajectory; the last one runs no tool
    turn_tokens: int  # tokens of a generation
    stop: list[str] = field(default_factory=list)  # strings that end a generation; the string itself is part of it
    stop_ids: list[int] = field(default_factory=list)  # token ids that do
    tool_seconds: float = math.inf  # until a tool call is given up


class Environment:
    """The side of a trajectory that is not the model: prompts, the reading of actions, tools, observations, the score.

    The defaults are those of an environment without tools, whose generations are never answered. Methods run in the loop's
    thread, except `call` and `finish`, which run in threads of their own, many calls at once.
    """

    def __init__(self, tokenizer, limits: Limits):
        self.tokenizer, self.limits = tokenizer, limits

    def begin(self, step: int) -> None:
        """Prepare for a rollout of a training step, or (0) for an evaluation."""

    def prompt_ids(self, question: Question) -> list[int]:
        """Return the token ids of the first context."""
        return self.tokenizer.encode(question.text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def unfinished(self, turn: Turn) -> bool:
        """Return whether a stop string ended the generation too early: it is then continued, as the same turn."""
        return False

    def read(self, turn: Turn) -> Action | None:
        """Return the action that the generation asks for, None where it has none. Only the turn's own text may be parsed."""
        return None

    def call(self, turn: Turn, question: Question, earlier: list[str]) -> str:
        """Run the turn's tool on its input. earlier: the inputs of this trajectory's earlier calls of the same tool that ran.

        Raises Failed for a call that did not succeed, Lost for a tool that is gone; any other exception is an observation too.
        """
        raise NotImplementedError

    def observe(self, turn: Turn, output: str | None) -> tuple[str, list[int]]:
        """Return (text as the model is shown it, its token ids) of a tool's output; None: the generation held no action."""
        raise NotImplementedError

    def next_context(self, turns: list[Turn]) -> list[int]:
        """Return the token ids of the context of the turn after the last of `turns`."""
        last = turns[-1]
        return last.context_ids + last.action_ids + last.observation_ids

    def finish(self, trajectory: Trajectory, question: Question) -> None:
        """Score a trajectory that has ended: set its outcome, in [0, 1], and further numbers in its info."""
