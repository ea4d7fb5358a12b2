"""What eval.py reports: lists of benchmarks, decoding settings, and the figures of questions and benchmarks."""

import dataclasses
import hashlib
import re
from pathlib import Path

import tasks
from common import ranks
from common.log import STOPS, sample
from tasks import loading, stats

SUITES = {  # what papers report together; no name is that of a data set
    "search_qa": "nq triviaqa popqa hotpotqa 2wiki musique bamboogle".split(),  # Search-R1 (arXiv:2503.09516), table 2
    "math_sets": "aime24 aime25 math500 amc23 gsm8k svamp olympiadbench".split(),
}
DECODING = {  # of the papers' evaluations, as arguments of eval.py
    "own": {},
    "search_r1": dict(samples=0),  # greedy. The authors' code, from memory
    "rtpo": dict(samples=4, temperature=0.6, top_p=0.95),  # arXiv:2608.18682, app. E.3
}


def names(text):
    """--task as a list: names, files and suites, separated by commas; each once."""
    parts = [part.strip() for part in text.split(",")]
    return list(dict.fromkeys(name for part in parts if part for name in SUITES.get(part, [part])))


def short(text):
    """--task as a part of a folder's name: the stem of each entry; of a long list the first ones and a hash of all."""
    stems = "-".join(Path(part.strip()).stem for part in text.split(",") if part.strip())
    return stems if len(stems) <= 60 else f"{stems[:50]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def args_of(args, name):
    """The arguments of one benchmark of --task. Of several, --corpus and --retriever concern those that search."""

    of_one = dataclasses.replace(args, task=name)
    if len(names(args.task)) > 1 and loading.task_maker(of_one) is not loading.search_task:
        return dataclasses.replace(of_one, corpus="", retriever="")
    return of_one


def load(args):
    """{name: (task, its questions)} of the benchmarks in --task. Raises SystemExit before anything heavy is loaded."""

    found = {}
    for name in names(args.task):
        task = tasks.load(args_of(args, name), "all" if args.split == "all" else "eval")
        questions = (task.held_out if args.split == "dev" else task.test)[: args.limit or None]
        if not questions:
            raise SystemExit(f"--split {args.split}: {name} has no such questions.")
        found[name] = task, questions
    if not found:
        raise SystemExit(f"--task {args.task!r}: name a data set, a file, or one of the lists {', '.join(SUITES)}.")
    return found


def folder_of(folder, tasks, name):
    """Where the results of one benchmark lie: the run directory itself where there is no other."""
    return folder if len(tasks) == 1 else folder / re.sub(r"[^\w.-]+", "-", name.removesuffix(".jsonl"))


def evaluate(engine, task, args, questions, system, name):
    """On rank 0: (figures, lines of samples.jsonl) of each question, in order. Every system samples with the same seeds."""
    mine = list(enumerate(questions))[ranks.rank() :: ranks.world_size()]
    groups = []
    for kind, n in ("greedy", 1), ("sampled", args.samples):
        engine.begin(0)
        groups.append(
            engine.rollout(task, [q for _, q in mine], n, kind == "greedy", n and f"{name}: {system}, {kind}")
        )
    items = []
    for (place, question), greedy, sampled in zip(mine, *groups):
        right = sum(trajectory.outcome >= 1 for trajectory in sampled.trajectories)
        passes = {f"pass@{k}": stats.pass_at(k, args.samples, right) for k in stats.budgets(args.samples)}
        lines = [
            sample(0, f"{system} {kind}", question, number, trajectory, [None] * len(trajectory.turns))
            for kind, group in (("greedy", greedy), ("sampled", sampled))
            for number, trajectory in enumerate(group.trajectories)
        ]
        items.append((place, measure(greedy.trajectories[0]) | passes, lines))
    return [item[1:] for item in sorted(ranks.gather(items), key=lambda item: item[0])]


def measure(trajectory):
    """The figures of one trajectory."""
    calls = len(trajectory.calls)
    return {
        "em": trajectory.outcome,
        **{name: trajectory.info[name] for name in ("f1",) if name in trajectory.info},
        "turns": len(trajectory.turns),
        "tool_calls": calls,
        "tool_used": float(calls > 0),
        "tokens": sum(len(turn.action_ids) for turn in trajectory.turns),
        **{f"stop_{stop}": float(trajectory.stop == stop) for stop in STOPS},
    }


def result(args, name, questions, items):
    """The content of eval.json of one benchmark. items: {system: what evaluate() returned}."""
    results = {system: [figures for figures, _ in of_system] for system, of_system in items.items()}
    each = [{"id": q.id, "question": q.text} | dict(zip(results, f)) for q, *f in zip(questions, *results.values())]
    figures = stats.compare(results, args.seed)
    return {"args": dataclasses.asdict(args_of(args, name)), "figures": figures, "questions": each}
