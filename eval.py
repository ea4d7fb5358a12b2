"""Evaluate a base model and an adapter side by side: the same questions, prompts, seeds and budgets, in the same engine.

    python eval.py --adapter out/RUN/adapter                   # model, task and budgets as in that run; base and adapter
    python eval.py --adapter out/RUN/adapter --samples 16      # pass@1, 2, 4, 8 and 16 too; any script runs under torchrun
    python eval.py --model Qwen2.5-3B --task test.jsonl --corpus documents.jsonl --split all

The base is the model with a blank adapter, as training evaluates it at step 0. Figures are of one greedy trajectory for each question; pass@k
is the chance that one of k sampled ones is right. Intervals: 95 %, percentile bootstrap over questions; the difference is paired by question.

Writes eval.json (all figures, also of each question), eval.md (the table) and samples.jsonl (every trajectory, as training writes them).
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import run, stats
from common.log import STOPS, sample

OWN = ("adapter", "limit", "out", "gpu_memory")  # never taken from the run an adapter comes from


@dataclass
class Args:
    model: str = "Qwen2.5-3B"
    """a folder, a hub id, a short name such as Qwen2.5-7B-Instruct, or an embedded model: tiny, smollm2"""
    adapter: str = ""
    """LoRA adapter to evaluate; where it lies in a run directory, what is not given here is as in that run"""
    systems: Literal["both", "base", "adapter"] = "both"
    """what to evaluate (without --adapter: the base)"""
    task: str = ""
    """tiny_search, tiny_math, reasoning_gym:<name>, or a JSONL file of {"question", "answers"} lines"""
    task_kind: Literal["search", "math"] = "search"
    """of a JSONL file: search (with --corpus or --retriever; exact match) or math (with Python; answers compared by value)"""
    corpus: str = ""
    """JSONL file of documents {"id", "title", "text"} to search in"""
    retriever: str = ""
    """address of a Search-R1 compatible retrieval server to search with instead of a corpus, such as http://127.0.0.1:8000/retrieve"""
    topk: int = 3
    """documents a search returns"""
    split: Literal["dev", "test", "all"] = "test"
    """dev: the held-out questions of training; test: those training never sees; all: the whole file, for one that is a test set itself"""
    limit: int = 0
    """evaluate on the first so many questions only (0: all)"""
    samples: int = 0
    """sampled trajectories per question, for pass@k (0: greedy only)"""
    shots: int = 0
    """worked examples in the prompt, at most 2: for models that do not know the tags"""
    template: Literal["auto", "on", "off"] = "auto"
    """put the prompt through the tokenizer's chat template (auto: when it has one)"""
    protocol: Literal["tags", "chat"] = "tags"
    """how a tool is called: by tags in the text, or as the model's own chat template has it"""
    context: Literal["full", "strip_think", "window"] = "full"
    """what of its earlier turns the model sees again: all, all but its thinking, or the last --window turns"""
    window: int = 2
    """turns that --context window keeps"""
    out: str = ""
    """run directory (default: out/eval-<model>-<task>-<split>-<run of the adapter>)"""
    seed: int = 1
    """of sampling and of the bootstrap"""
    eval_questions: int = 200
    """held-out questions"""
    max_turns: int = 5
    """generations per trajectory; the last one runs no tool"""
    max_turn_tokens: int = 512
    """tokens per generation"""
    max_observation_tokens: int = 512
    """tokens per tool output, its tags included"""
    max_context: int = 4096
    """tokens of context and generation together; a trajectory that reaches it ends"""
    temperature: float = 1.0
    """of --samples"""
    tool_workers: int = 16
    """tool calls at once (0: one after the other, without a time limit)"""
    tool_timeout: float = 30.0
    """seconds until a tool call is given up"""
    unsafe_python: bool = False
    """run the model's Python where no sandbox works; limits on time, memory and output remain"""
    load_4bit: bool = False
    """NF4 base (bitsandbytes) in trainer and engine"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """of the base (auto: bfloat16 on a GPU, float32 on a CPU)"""
    gpu_memory: float = 0.5
    """share of a GPU's memory for the engine"""
    # What Policy and Engine ask for and only training needs: without a type these are no fields, and so no flags.
    lr, optim, grad_clip, grad_checkpoint, micro_tokens = 0.0, "adamw", 0.0, False, 4096
    lora_rank, lora_alpha, questions, group, sleep, resume = 8, 16, 64, 8, "none", False


def run_of(adapter):
    """(name, arguments) of the training run an adapter lies in, or its own name and {}. out/RUN/adapter may be a link to a checkpoint."""
    here = Path(adapter).absolute()
    for path in (here, here.resolve()):
        for folder in (path, *path.parents)[:4]:
            if (folder / "args.json").exists():
                inside = [part for part in path.relative_to(folder).parts if part not in ("adapter", "checkpoints")]
                return "-".join((folder.name, *inside)), json.loads((folder / "args.json").read_text())
    return here.name, {}


def parse(argv=None):
    """The arguments. Those of the adapter's run stand before the given ones: of a flag that occurs twice the last one counts."""
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    given = tyro.cli(Args, args=argv, use_underscores=True)
    name, taken = run_of(given.adapter) if given.adapter else ("", {})
    replaced = {"corpus": given.retriever, "retriever": given.corpus}  # there is one place to search in
    shared = [f.name for f in dataclasses.fields(Args) if f.name not in OWN and not replaced.get(f.name)]
    taken = {k: taken[k] for k in shared if k in taken}
    words = [f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" if v else f"--no-{k}" for k, v in taken.items()]
    args = run.parse(Args, [*words, *argv])
    if args.systems == "adapter" and not args.adapter:
        raise SystemExit("--systems adapter needs --adapter, the folder of a LoRA adapter.")
    args.systems = args.systems if args.adapter else "base"
    words = ("eval", Path(args.model).name, Path(args.task).stem, args.split, name)
    args.out = args.out or "out/" + "-".join(filter(None, words))
    if run.rank() == 0 and taken:
        kept = [f"--{k} {v}" for k, v in taken.items() if v not in ("", False) and getattr(args, k) == v]
        run.say(f"as in the run {name}: {' '.join(kept)}")
    return args


def evaluate(engine, task, args, questions, system):
    """On rank 0: (figures, lines of samples.jsonl) of each question, in order. Every system samples with the same seeds."""
    mine = list(enumerate(questions))[run.rank() :: run.world_size()]
    groups = []
    for kind, n in ("greedy", 1), ("sampled", args.samples):
        engine.begin(0)
        groups.append(engine.rollout(task, [q for _, q in mine], n, kind == "greedy", n and f"{system}, {kind}"))
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
    return [item[1:] for item in sorted(run.gather(items), key=lambda item: item[0])]


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


def main(args):
    from common import tasks  # here and not above: --help answers without torch
    from common.policy import Policy
    from common.rollout import Engine

    task = tasks.load(args, whole=args.split == "all")
    questions = (task.held_out if args.split == "dev" else task.test)[: args.limit or None]
    device = run.setup(args, __file__)
    policy = Policy(args, device)
    engine = Engine(policy, args)
    engine.self_test(policy)
    folder, results = run.directory(args), {}
    for system in ("adapter", "base") if args.systems == "both" else [args.systems]:
        if system == "base":  # a blank adapter, as before the first step of training
            for weight in (p for name, p in policy.model.named_parameters() if "lora_B" in name):
                weight.data.zero_()
        engine.publish(policy)
        items = evaluate(engine, task, args, questions, system)
        results = {system: [figures for figures, _ in items]} | results
        if run.rank() == 0:
            run.append(folder / "samples.jsonl", [json.dumps(x, ensure_ascii=False) for _, more in items for x in more])
    if run.rank() > 0:
        return
    summaries = stats.compare(results, args.seed)
    what = f"{args.model} {args.adapter}".strip() + f": {len(questions)} questions ({args.split}) of {args.task}"
    text = f"{what}, greedy, with 95 % intervals over questions\n\n{stats.table(summaries)}"
    each = [{"id": q.id, "question": q.text} | dict(zip(results, f)) for q, *f in zip(questions, *results.values())]
    whole = {"args": dataclasses.asdict(args), "figures": summaries, "questions": each}
    (folder / "eval.md").write_text(text)
    run.write_json(folder / "eval.json", whole)
    print(f"\n{text}\nFigures of each question, trajectories: {folder}/", flush=True)


if __name__ == "__main__":
    run.launch(main, parse())
