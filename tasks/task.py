"""The base class of the task families.

Only text that the model itself sampled is ever parsed.
"""

import functools
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common import ranks
from common.environment import Action, Environment, Limits
from common.turns import Question, Trajectory, Turn
from tasks import chat, tags, thinking
from tasks.wordings import SEVERAL
from tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from common.args import Sampling


class Task(Environment):
    """Questions with a tool and a protocol. A family is a subclass that defines `score` and may have worked examples.

    tool                       its name ("search" or "python") decides which tool the prompt describes; None: no tool
    train, held_out, test      questions for training, for evaluation during training (development), and for eval.py
    """

    examples: tuple[str, ...] = ()  # worked examples for --shots, as text of the tags protocol
    question_format = "{}"  # the prompt's text around a question
    # Whether `score` itself limits its time; otherwise a call that takes longer than --tool_timeout ends the run.
    score_keeps_time = False
    nonsense = ("banana", "qwxz vkjq", "?", "0", "1", "nan", "[]", "1/0")  # answers that no scorer may pay: nonsense.py

    def __init__(
        self,
        args: "Sampling",
        tokenizer: "PreTrainedTokenizerBase",
        tool: Tool | None,
        train: list[Question],
        held_out: list[Question],
        test: Sequence[Question] = (),
    ):
        self.tool = tool
        self.train, self.held_out, self.test = train, held_out, list(test)
        if args.shots > len(self.examples):
            raise SystemExit(
                f"--shots {args.shots}: this task has {len(self.examples)} worked examples. Lower --shots."
            )
        protocols = {"tags": tags.Tags, "chat": chat.Chat}
        self.protocol = protocols[args.protocol](args, tokenizer, tool and tool.name, self.examples[: args.shots])
        # Such a tool limits the time of a call itself: it waits for a lost server, or ends code that runs too long.
        seconds = math.inf if tool and tool.keeps_time else args.tool_timeout
        score_seconds = math.inf if self.score_keeps_time else args.tool_timeout
        stop, stop_ids = self.protocol.stop, self.protocol.stop_ids
        limits = Limits(args.max_turns, args.max_turn_tokens, stop, stop_ids, seconds, score_seconds)
        super().__init__(tokenizer, limits)
        self.context, self.window = args.context, args.window
        self.position = 0  # questions taken so far by all ranks together
        self.seed, self.order = args.seed, (None, [])

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        """Return (outcome in [0, 1], further numbers by name) of an answer; None: the trajectory has no answer.

        Runs in many threads at once.
        """
        raise NotImplementedError

    # -- questions

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the questions and the tool's fingerprint: a run cannot be resumed with another one."""
        data = [(q.id, q.text, q.golds) for q in (*self.train, *self.held_out)]
        return hashlib.sha256(repr((data, self.tool and self.tool.fingerprint)).encode()).hexdigest()

    def take(self, n: int) -> list[Question]:
        """Return this rank's share of the next n questions of the run: every world-th, possibly none.

        Each pass over the data has its own order. All ranks must call this equally often: raises SystemExit otherwise.
        """
        if not ranks.alike(self.position):
            raise SystemExit(
                f"Rank {ranks.rank()} has taken {self.position} questions, and other ranks another number: collect() must call "
                "task.take() equally often on every rank. Let a loop end on ranks.total(...), which is the same on all."
            )
        draws = range(self.position, self.position + n)
        self.position += n
        return [replace(self._at(draw), draw=draw) for draw in draws if draw % ranks.world_size() == ranks.rank()]

    def _at(self, position):
        epoch, index = divmod(position, len(self.train))
        if self.order[0] != epoch:
            order = list(range(len(self.train)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self.order = epoch, order
        return self.train[self.order[1][index]]

    # -- the methods of Environment

    def prompt_ids(self, question: Question) -> list[int]:
        """Return the token ids of the first context."""
        return self.protocol.prompt_ids(self.question_format.replace("{}", question.text, 1))

    def begin(self, step: int) -> None:
        if self.tool:
            self.tool.begin(step)

    def own_text(self, turn: Turn) -> str:
        """Return the turn's text, with <think> in front if its context ends in that tag."""
        return "<think>" * thinking.begins(self.decode(turn.context_ids[-16:])) + turn.text

    def unfinished(self, turn: Turn) -> bool:
        """Return whether a stop string ended the generation in the middle of its thinking."""
        return turn.action_ids[-1] not in self.limits.stop_ids and self.protocol.thinks_on(self.own_text(turn))

    def read(self, turn: Turn) -> Action | None:
        return self.protocol.parse(self.own_text(turn))

    def call(self, turn: Turn, question: Question, earlier: list[str]) -> str:
        return self.tool(turn.tool_input, earlier, question)

    def observe(self, turn: Turn, output: str | None) -> tuple[str, list[int]]:
        """Return (text as the model sees it, token ids) of a tool's output; None: of the reply to an invalid action.

        If the action already has its end token, the ids do not repeat it.
        """
        output = self.protocol.invalid_message if output is None else output
        shown, ids = self.protocol.observation(output, turn.tool, SEVERAL if turn.several else "")
        ended, stop_ids = turn.action_ids[-1:], self.limits.stop_ids
        doubled = ids and ended and ids[0] in stop_ids and ended[0] in stop_ids
        return shown, ids[1:] if doubled else ids

    def next_context(self, turns: list[Turn]) -> list[int]:
        """Return the token ids of the context of the turn after the last of `turns`, according to --context."""
        if self.context == "window":
            kept = turns[-self.window :]
            return turns[0].context_ids + [i for turn in kept for i in turn.action_ids + turn.observation_ids]
        last = turns[-1]
        context, action = last.context_ids, last.action_ids
        if self.context == "strip_think":
            context, action = thinking.without_thinking(context, action, self.decode)
        return context + action + last.observation_ids

    def finish(self, trajectory: Trajectory, question: Question) -> None:
        """Score a trajectory that has ended."""
        trajectory.outcome, numbers = self.score(trajectory.answer, question)
        trajectory.info |= numbers
