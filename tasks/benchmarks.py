"""Benchmarks for eval.py: lists of them, decoding settings, and the figures of questions and benchmarks."""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import tasks
from common import ranks
from common.log import STOPS
from common.turns import Question, Trajectory, sample
from tasks import loading, stats
from tasks.task import Task

if TYPE_CHECKING:
    from common.args import Sampling
    from common.rollout import Engine

SUITES = {  # benchmarks that papers report together; no name is that of a data set
    "search_qa": "nq triviaqa popqa hotpotqa 2wiki musique bamboogle".split(),  # Search-R1 (arXiv:2503.09516), table 2
    "math_sets": "aime24 aime25 math500 amc23 gsm8k svamp olympiadbench".split(),
}
DECODING = {  # settings of the papers' evaluations, as arguments of eval.py
    "own": {},
    "search_r1": dict(samples=0),  # greedy. The authors' code, from memory
    "rtpo": dict(samples=4, temperature=0.6, top_p=0.95),  # arXiv:2608.18682, app. E.3
}


def names(text: str) -> list[str]:
    """Return the benchmarks of --task, each once: names, files and suites, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    return list(dict.fromkeys(name for part in parts if part for name in SUITES.get(part, [part])))


def short(text: str) -> str:
    """Return --task as a part of a folder's name: the stem of each entry, or of the first ones and a hash of all."""
    stems = "-".join(Path(part.strip()).stem for part in text.split(",") if part.strip())
    return stems if len(stems) <= 60 else f"{stems[:50]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def args_of(args: "Sampling", name: str) -> "Sampling":
    """Return the arguments of a benchmark of --task. In a list, only those that search get --corpus or --retriever."""
    single = dataclasses.replace(args, task=name)
    if len(names(args.task)) > 1 and loading.task_maker(single) is not loading.search_task:
        return dataclasses.replace(single, corpus="", retriever="")
    return single


def load(args: "Sampling") -> dict[str, tuple[Task, list[Question]]]:
    """Return {name: (task, its questions)} of the benchmarks of --task. Raises SystemExit before a model is loaded."""
    found = {}
    for name in names(args.task):
        task = tasks.load(args_of(args, name), "all" if args.split == "all" else "eval")
        questions = (task.held_out if args.split == "dev" else task.test)[: args.limit or None]
        if not questions:
            raise SystemExit(f"--split {args.split}: {name} has no questions in that split.")
        found[name] = task, questions
    if not found:
        raise SystemExit(f"--task {args.task!r}: name a data set, a file, or one of the suites {', '.join(SUITES)}.")
    return found


def folder_of(folder: Path, tasks: dict, name: str) -> Path:
    """Return the folder of one benchmark's results: the run directory itself if it is the only benchmark."""
    return folder if len(tasks) == 1 else folder / re.sub(r"[^\w.-]+", "-", name.removesuffix(".jsonl"))


def evaluate(
    engine: "Engine", task: Task, args: "Sampling", questions: list[Question], system: str, name: str
) -> list[tuple[dict[str, float], list[dict]]]:
    """Return (figures, lines of samples.jsonl) of each question in order on rank 0, [] on other ranks.

    Every system samples with the same seeds.
    """
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


def measure(trajectory: Trajectory) -> dict[str, float]:
    """Return the figures of one trajectory."""
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


def result(args: "Sampling", name: str, questions: list[Question], items: dict[str, list[tuple]]) -> dict:
    """Return the content of one benchmark's eval.json. items: {system: result of evaluate()}."""
    results = {system: [figures for figures, _ in pairs] for system, pairs in items.items()}
    each = [{"id": q.id, "question": q.text} | dict(zip(results, f)) for q, *f in zip(questions, *results.values())]
    figures = stats.compare(results, args.seed)
    return {"args": dataclasses.asdict(args_of(args, name)), "figures": figures, "questions": each}
