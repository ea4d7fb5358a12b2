"""An engine that answers from a script, and a rollout loop driven by it."""

from types import SimpleNamespace

import small_models

import tools
import train_grpo
from common import loop
from common.turns import Group, Question, Trajectory
from tasks import search_qa
from tools.search import Search

DOCUMENTS = [
    {"id": "1", "title": "Ada Cole", "text": "Ada Cole works for Nova Labs."},
    {"id": "2", "title": "Nova Labs", "text": "Nova Labs is led by Bo Hale."},
]
TOKENIZER = small_models.tokenizer()


class Scripted:
    """An engine that completes with `script(question id, sample, turn)`: text, or ids, or (text or ids, "length")."""

    def __init__(self, script, tokenizer=TOKENIZER, **changes):
        self.args, self.tokenizer = train_grpo.Args(**changes), tokenizer
        self.script, self.limit, self.step, self.phase = script, self.args.max_context, 1, 1
        self.queue, self.seen = [], []

    def add(self, request_id, ids, max_tokens, stop, stop_ids, temperature, seed):
        assert max_tokens >= 1 and len(ids) + max_tokens <= self.limit
        self.queue.append(request_id)
        self.seen.append(
            SimpleNamespace(id=request_id, ids=list(ids), max_tokens=max_tokens, seed=seed, temperature=temperature)
        )

    def advance(self):
        if self.queue:
            request_id = self.queue.pop()  # last in first out: the order must not matter
            question, sample, turn, _ = request_id.split("/")
            completion, reason = self.script(question, int(sample), int(turn)), "stop"
            if isinstance(completion, tuple):
                completion, reason = completion
            ids = self.tokenizer.encode(completion) if isinstance(completion, str) else completion
            yield request_id, ids, [-0.5] * len(ids), reason


class Tool(tools.Tool):
    """A tool that calls a function."""

    name = "search"

    def __init__(self, function):
        self.function = function
        self.keeps_time = getattr(function, "keeps_time", False)

    def __call__(self, text, earlier=(), question=None):
        return self.function(text)


def play(script, count=1, golds=("Bo Hale",), tool=None, greedy=False, tokenizer=TOKENIZER, **changes):
    """Play `count` trajectories of one question. Returns (trajectories, engine)."""
    engine = Scripted(script, tokenizer, **changes)
    task = search_qa.SearchQA(engine.args, tokenizer, Tool(tool or Search(DOCUMENTS, 1)), [], [])
    group = Group(Question("q", "Who leads the firm of Ada Cole?", list(golds)), [Trajectory() for _ in range(count)])
    episodes = [loop.Rollout(group.question, t, i) for i, t in enumerate(group.trajectories)]
    ended = []
    loop.Loop(engine, task, greedy).run(episodes, lambda: ended.append(1))
    assert len(ended) == count
    return group.trajectories, engine
