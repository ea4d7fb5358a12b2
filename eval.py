"""Evaluate a base model and an adapter side by side: the same questions, prompts, seeds and budgets, in the same engine.

    python eval.py --adapter out/RUN/adapter                   # model, task and budgets as in that run; base and adapter
    python eval.py --adapter out/RUN/adapter --samples 16      # pass@1, 2, 4, 8 and 16 too; any script runs under torchrun
    python eval.py --model Qwen2.5-3B --task hotpotqa,2wiki,musique --out out/three        # benchmarks, one after the other
    python eval.py --resume --out out/three                    # those that are not finished yet
    python eval.py --model Qwen2.5-3B --task test.jsonl --corpus documents.jsonl --split all

The base is the model with a blank adapter, as training evaluates it at step 0. Figures are of one greedy trajectory for each question; pass@k
is the chance that one of k sampled ones is right. Intervals: 95 %, percentile bootstrap over questions; the difference is paired by question.

Writes eval.json (all figures, also of each question), eval.md (the table) and samples.jsonl (every trajectory, as training writes them);
of several benchmarks each into a folder of its own, and benchmarks.md beside them.
"""

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import benchmark, run

OWN = ("adapter", "limit", "out", "gpu_memory", "resume")  # never taken from the run an adapter comes from


@dataclass
class Args:
    model: str = "Qwen2.5-3B"
    """a folder, a hub id, a short name such as Qwen2.5-7B-Instruct, or an embedded model: tiny, smollm2"""
    adapter: str = ""
    """LoRA adapter to evaluate; where it lies in a run directory, what is not given here is as in that run"""
    systems: Literal["both", "base", "adapter"] = "both"
    """what to evaluate (without --adapter: the base)"""
    task: str = "hotpotqa"
    """a data set (docs/data.md), tiny_search, tiny_math, reasoning_gym:<name>, or a JSONL file of {"question", "answers"} lines; several
    with commas between them; search_qa, math_sets: lists of data sets"""
    task_kind: Literal["search", "math"] = "search"
    """of a JSONL file: search (with --corpus or --retriever; exact match) or math (with Python; answers compared by value)"""
    corpus: str = ""
    """JSONL file of documents {"id", "title", "text"} to search in"""
    retriever: str = ""
    """search with a server instead of a corpus: the address of a Search-R1 compatible one, such as http://127.0.0.1:8000/retrieve,
    or llm:<OpenAI-compatible address>#<model>, a language model that plays the search engine (ZeroSearch)"""
    topk: int = 3
    """documents a search returns"""
    split: Literal["dev", "test", "all"] = "test"
    """dev: the held-out questions of training; test: those training never sees; all: the whole file, for one that is a test set itself"""
    limit: int = 0
    """evaluate on the first so many questions only (0: all)"""
    samples: int = 0
    """sampled trajectories per question, for pass@k (0: greedy only)"""
    decoding: Literal["own", "search_r1", "rtpo"] = "own"
    """sampling as a paper evaluates: sets --samples, --temperature and --top_p where they are not given"""
    shots: int = 0
    """worked examples in the prompt, at most 2: for models that do not know the tags"""
    template: Literal["auto", "on", "off"] = "auto"
    """put the prompt through the tokenizer's chat template (auto: when it has one)"""
    protocol: Literal["tags", "chat"] = "tags"
    """how a tool is called: by tags in the text, or as the model's own chat template has it"""
    tools: Literal["on", "off"] = "on"
    """whether the model has a tool; off: it answers by itself"""
    answer: Literal["tags", "boxed"] = "tags"
    """where its answer stands: in <answer> tags, or in \\boxed{} as in most work on mathematics"""
    context: Literal["full", "strip_think", "window"] = "full"
    """what of its earlier turns the model sees again: all, all but its thinking, or the last --window turns"""
    window: int = 2
    """turns that --context window keeps"""
    out: str = ""
    """run directory (default: out/eval-<model>-<task>-<split>-<run of the adapter>)"""
    resume: bool = False
    """go on with the evaluation in that directory: benchmarks that are finished are left as they are"""
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
    top_p: float = 1.0
    """of --samples: the most likely tokens of so much probability are left"""
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
    lora_rank, lora_alpha, questions, group, sleep = 8, 16, 64, 8, "none"


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
    task = tyro.cli(Args, args=argv, use_underscores=True, default=Args(task=taken.get("task", ""))).task
    # A given place to search in stands for the run's own, which goes with the run's questions only.
    replaced = ("corpus", "retriever") if given.corpus or given.retriever or task != taken.get("task") else ()
    dropped = "".join(f"; not --{k} {taken[k]}" for k in replaced if taken.get(k))
    shared = [f.name for f in dataclasses.fields(Args) if f.name not in (*OWN, *replaced)]
    taken = {k: taken[k] for k in shared if k in taken}
    of_paper = benchmark.DECODING[given.decoding]
    words = [
        f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" if v else f"--no-{k}"
        for k, v in (taken | of_paper).items()
    ]
    args = run.parse(Args, [*words, *argv, "--no-resume"])
    parts = ("eval", Path(args.model).name, benchmark.short(args.task), args.split, name)
    args.out = args.out or "out/" + "-".join(filter(None, parts))
    if given.resume:  # what is not given is as it was there
        return run.parse(Args, [*argv, f"--out={args.out}"])
    if args.systems == "adapter" and not args.adapter:
        raise SystemExit("--systems adapter needs --adapter, the folder of a LoRA adapter.")
    args.systems = args.systems if args.adapter else "base"
    if run.rank() == 0 and taken:
        kept = [f"--{k} {v}" for k, v in taken.items() if v not in ("", False) and getattr(args, k) == v]
        run.say(f"as in the run {name}: {' '.join(kept)}{dropped}")
    return args


def main(args):
    from common.policy import Policy  # here and not above: --help answers without torch
    from common.rollout import Engine

    todo = benchmark.load(args)
    device = run.setup(args, __file__)
    folders = {name: benchmark.folder_of(run.directory(args), todo, name) for name in todo}
    left = run.from_rank_0([name for name, folder in folders.items() if not (folder / "eval.json").exists()])
    policy = Policy(args, device)
    engine = Engine(policy, args)
    engine.self_test(policy)
    for name in left:
        items, (task, questions) = {}, todo[name]
        for system in ("base", "adapter") if args.systems == "both" else [args.systems]:
            with policy.blank() if system == "base" else contextlib.nullcontext():
                engine.publish(policy)
            items[system] = benchmark.evaluate(engine, task, args, questions, system, name)
        if run.rank() == 0:
            text = benchmark.write(folders[name], args, name, questions, items)
            print(f"\n{text}\nFigures of each question, trajectories: {folders[name]}/", flush=True)
    if run.rank() == 0 and len(todo) > 1:
        print(f"\n{benchmark.overview(run.directory(args), folders)}", flush=True)


if __name__ == "__main__":
    run.launch(main, parse())
