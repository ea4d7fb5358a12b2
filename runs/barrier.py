"""Compare the continuous rollout with a turn-by-turn barrier, in one process: python runs/barrier.py

The tiny base samples 32 trajectories of 4 turns; tool calls take exponentially distributed times of mean 0.25 s. With
the barrier, no trajectory generates before all tools have answered. Checks that both sample the same token ids, and
prints the ratio of wall times.
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks
from common import calls, environment, loop, rollout, run
from common.args import parse_args
from common.policy import Policy
from tasks import search_qa
from train_grpo import Args

PAIRS, MEAN = 7, 0.25


class FourTurns(search_qa.SearchQA):
    """A search task that treats every turn as a search, so that every trajectory has --max_turns turns."""

    def read(self, turn):
        action = super().read(turn)
        return environment.Action("search", action.text if action else turn.text)

    def call(self, turn, question, earlier):
        time.sleep(next(self.waits))
        return self.tool(turn.tool_input)


class BarrierTools(calls.Calls):
    """Tool calls whose answers are held back until no generation and no tool call is running."""

    def __init__(self, loop, *args):
        super().__init__(*args)
        self.loop, self.ready = loop, []

    def finished(self, wait):
        self.ready += super().finished(wait)
        if self.running or self.waiting or self.loop.generating:
            return []
        ready, self.ready = self.ready, []
        return ready


class BarrierLoop(loop.Loop):
    def __init__(self, engine, task, greedy):
        super().__init__(engine, task, greedy)
        self.tools = BarrierTools(self, "tool call", engine.args.tool_workers, engine.args.tool_timeout)


def waits(seed):
    """Return exponential waits, the n-th for the n-th call: the same for both sides of a pair."""
    rng = random.Random(seed)
    return iter([rng.expovariate(1 / MEAN) for _ in range(1000)])


def timed(engine, task, questions, kind, pair):
    task.waits = waits(pair)
    rollout.Loop = kind
    engine.begin(1)
    start = time.monotonic()
    groups = engine.rollout(task, questions, 8)
    seconds = time.monotonic() - start
    rollout.Loop = loop.Loop
    trajectories = [t for g in groups for t in g.trajectories]
    return seconds, [[turn.action_ids for turn in t.turns] for t in trajectories]


def main():
    args = parse_args(
        Args, ["--model", "tiny", "--max_turns", "4", "--tool_workers", "32", "--out", tempfile.mkdtemp()]
    )
    plain = tasks.load(args)
    run.setup(args)
    policy = Policy(args)
    engine = rollout.Engine(policy, args)
    task = FourTurns(args, plain.tokenizer, plain.tool, plain.train, plain.held_out)
    questions = task.train[:4]
    continuous = loop.Loop
    for kind in (BarrierLoop, continuous):  # warm-up
        timed(engine, task, questions, kind, -1)
    ratios, seconds = [], []
    for pair in range(PAIRS):
        with_barrier, ids = timed(engine, task, questions, BarrierLoop, pair)
        without, same = timed(engine, task, questions, continuous, pair)
        assert ids == same, "the schedule changed a sample"
        ratios.append(with_barrier / without)
        seconds.append((with_barrier, without))
    barrier, free = (statistics.median(column) for column in zip(*seconds))
    turns = sum(map(len, ids))
    print(
        f"{len(ids)} trajectories, {turns} turns, {sum(len(a) for t in ids for a in t)} sampled tokens, {PAIRS} pairs, "
        "identical ids"
    )
    print(f"barrier {barrier:.2f} s, continuous {free:.2f} s (medians)")
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
