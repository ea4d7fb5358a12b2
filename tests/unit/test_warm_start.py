"""runs/warm_start.py: scripted traces have exactly the contexts of the rollout loop."""

import random
import sys
from pathlib import Path

import pytest
import scripted_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runs"))
import warm_start

import tools
from common.batch import pack
from common.loop import Loop, Rollout
from common.turns import Trajectory
from tasks import search_qa
from tasks.tiny import tiny_search


@pytest.mark.parametrize("context", ["full", "strip_think", "window"])
def test_a_scripted_trace_has_the_contexts_of_the_rollout_loop(context):
    names = tiny_search._names()["pretraining"]
    trace = tiny_search._trace(random.Random(3), names, 3, flawed=False)
    completions, found = ([text for text, kind in trace if kind == wanted] for wanted in ("turn", "found"))
    answers = iter(found)

    class Tool(tools.Tool):
        name = "search"

        def __call__(self, query, earlier=(), question=None):
            return next(answers)

    engine = scripted_engine.Scripted(lambda question, sample, turn: completions[turn])
    engine.args.context, engine.args.window = context, 1
    task = search_qa.SearchQA(engine.args, scripted_engine.TOKENIZER, Tool(), [], [])
    made = warm_start.group(trace, task)
    played = Trajectory()
    Loop(engine, task, False).run([Rollout(made.question, played, 0)], lambda: None)
    ours = made.trajectories[0].turns
    assert len(ours) == 4 and [turn.context_ids for turn in ours] == [turn.context_ids for turn in played.turns]
    assert [turn.action_ids for turn in ours] == [turn.action_ids for turn in played.turns]
    batch = pack([made], [[[1.0] * 4]])
    assert int(batch.mask.sum()) == sum(len(turn.action_ids) for turn in ours)  # exactly the actions are trained
