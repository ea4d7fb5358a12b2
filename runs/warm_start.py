"""Train a LoRA adapter on scripted traces of the embedded search task, by supervised steps. It teaches the tags and the
contexts of --context to models that have never seen them: smollm2, or the tiny base without its earlier thinking.

    python runs/warm_start.py --model smollm2 --shots 0 --steps 30 --out out/warm-smollm2
    python train_tspo.py --model smollm2 --shots 0 --adapter out/warm-smollm2/adapter

Takes the arguments of train_grpo.py. The traces are those on which the tiny base is pretrained: from another world than
the questions (no names in common), and often one search short, so that there is something left to learn.
"""

import random
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks
import train_grpo  # noqa: E402
from common import run, turns
from common.args import parse_args  # noqa: E402
from common.batch import pack  # noqa: E402
from tasks import wordings
from tasks.tiny import tiny_search

HOPS = 3
HEAD = len(wordings.INSTRUCTION + "Question: ")  # length of a trace's prompt before the question


def group(trace, task):
    """Return a Group of one Trajectory with the turns of a scripted trace, in the contexts that the task builds."""
    (prompt, _), *rest = trace
    question = turns.Question("scripted", prompt[HEAD:].strip(), [])
    made, context = [], task.prompt_ids(question)
    for text, kind in rest:
        if kind == "turn":
            ids = task.tokenizer.encode(text, add_special_tokens=False)
            made.append(turns.Turn(context, ids, [0.0] * len(ids), text))  # no engine sampled them
        else:
            made[-1].tool = "search"
            _, made[-1].observation_ids = task.observe(made[-1], text)
            context = task.next_context(made)
    return turns.Group(question, [turns.Trajectory(made)])


def main(args):
    from common.policy import Policy
    from view import plan

    if args.task != "tiny_search" or args.protocol != "tags":
        raise SystemExit("A warm start needs --task tiny_search and --protocol tags: its traces are made for them.")
    task = tasks.load(args)
    args = plan.fit(args, task)
    policy = Policy(args, run.setup(args)[0])
    rng, names = random.Random(args.seed), tiny_search._names()["pretraining"]
    with tqdm(range(args.steps), desc="warm start") as steps:
        for _ in steps:
            count = args.questions * args.group
            groups = [
                group(tiny_search._trace(rng, names, rng.randint(1, HOPS), flawed=True), task) for _ in range(count)
            ]
            batch = pack(groups, [[[1.0] * len(g.trajectories[0].turns)] for g in groups])
            total, loss = int(batch.mask.sum()), 0.0
            for micro in batch.micro(args.micro_tokens):
                part = -policy.logps(micro)[micro.mask].sum() / total
                part.backward()
                loss += float(part.detach())
            policy.step()
            steps.set_postfix(loss=f"{loss:.3f}")
    policy.save_adapter(run.directory(args) / "adapter")
    run.notice(f"adapter: {run.directory(args)}/adapter (last loss {loss:.3f} nats per token)")


if __name__ == "__main__":
    run.launch(main, parse_args(train_grpo.Args))
