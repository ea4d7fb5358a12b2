"""Questions, and what every family of tasks has in common.

Only what the model itself sampled is ever parsed.
"""

import functools
import hashlib
import math
import random
from dataclasses import replace

from common import ranks
from common.environment import Environment, Limits
from tasks import chat, tags, thinking


class Task(Environment):
    """Questions, and what every family of them has in common. A family (a class below) says what an answer scores, and may have
    worked examples; its tool decides what the prompt describes.

    tool                       has a name ("search" or "python") and turns the text of a call into the text of its answer; None: no tool
    train, held_out, test      questions to train on, to evaluate on while training (development), and to report (eval.py)
    take(n)                    this rank's share of the next n questions of the run
    The rest is what the rollout loop asks of an Environment.
    """

    examples = ()  # worked examples for --shots, as they stand in a prompt of the tags protocol
    question_format = "{}"  # what the prompt says around a question

    def __init__(self, args, tokenizer, tool, train, held_out, test=()):
        self.tool = tool
        self.train, self.held_out, self.test = train, held_out, list(test)
        if args.shots > len(self.examples):
            raise SystemExit(f"--shots {args.shots}: this task has {len(self.examples)} worked examples.")
        protocols = {"tags": tags.Tags, "chat": chat.Chat}
        self.protocol = protocols[args.protocol](args, tokenizer, tool and tool.name, self.examples[: args.shots])
        # A tool that waits for its server to come back, or ends what is over time, limits the time of a call itself.
        seconds = math.inf if tool and tool.keeps_time else args.tool_timeout
        stop, stop_ids = self.protocol.stop, self.protocol.stop_ids
        super().__init__(tokenizer, Limits(args.max_turns, args.max_turn_tokens, stop, stop_ids, seconds))
        self.context, self.window = args.context, args.window
        self.position = 0  # questions taken so far, over all ranks
        self.seed, self.order = args.seed, (None, [])

    def score(self, answer, question):
        """(outcome in [0, 1], further numbers by name) of an answer; None: there was no answer."""
        raise NotImplementedError

    # -- questions

    @functools.cached_property
    def fingerprint(self):
        """A hash of the questions and of what the tool answers: a run that is resumed on others is refused."""
        data = [(q.id, q.text, q.golds) for q in (*self.train, *self.held_out)]
        return hashlib.sha256(repr((data, self.tool and self.tool.fingerprint)).encode()).hexdigest()

    def take(self, n):
        """The next n questions of the run, of which this rank gets every world-th: possibly none. Each pass over the data is shuffled anew."""
        draws = range(self.position, self.position + n)
        self.position += n
        return [replace(self._at(draw), draw=draw) for draw in draws if draw % ranks.world_size() == ranks.rank()]

    def _at(self, position):
        epoch, place = divmod(position, len(self.train))
        if self.order[0] != epoch:
            order = list(range(len(self.train)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self.order = epoch, order
        return self.train[self.order[1][place]]

    # -- what the rollout loop asks

    def prompt_ids(self, question):
        """Ids of the first context."""
        return self.protocol.prompt_ids(self.question_format.replace("{}", question.text, 1))

    def begin(self, step):
        if self.tool:
            self.tool.begin(step)

    def own_text(self, turn):
        """The turn's own text, after the tag that opens its thinking where its context ends in that."""
        return "<think>" * thinking.begins(self.decode(turn.context_ids[-16:])) + turn.text

    def unfinished(self, turn):
        """Whether a stop string ended a generation in the middle of its thinking."""
        return turn.action_ids[-1] not in self.limits.stop_ids and self.protocol.thinks_on(self.own_text(turn))

    def read(self, turn):
        return self.protocol.parse(self.own_text(turn))

    def call(self, turn, question, earlier):
        return self.tool(turn.tool_input, earlier, question)

    def observe(self, turn, output):
        """(text as the model is shown it, ids) of a tool's output; None: of the message that answers an invalid action.

        Where the action has its end token already, the ids go on after it.
        """
        output = self.protocol.invalid_message if output is None else output
        shown, ids = self.protocol.observation(output, turn.tool)
        ended, stop_ids = turn.action_ids[-1:], self.limits.stop_ids
        doubled = ids and ended and ids[0] in stop_ids and ended[0] in stop_ids
        return shown, ids[1:] if doubled else ids

    def next_context(self, turns):
        """Ids of the context of the turn that follows the last of `turns`, by --context."""
        if self.context == "window":
            kept = turns[-self.window :]
            return turns[0].context_ids + [i for turn in kept for i in turn.action_ids + turn.observation_ids]
        last = turns[-1]
        context, action = last.context_ids, last.action_ids
        if self.context == "strip_think":
            context, action = thinking.without_thinking(context, action, self.decode)
        return context + action + last.observation_ids

    def finish(self, trajectory, question):
        """Score a trajectory that has ended."""
        trajectory.outcome, more = self.score(trajectory.answer, question)
        trajectory.info |= more
