"""Evaluate a base model and an adapter side by side: the same questions, prompts, seeds and budgets, in the same engine.

    python eval.py --adapter out/RUN                           # model, task and budgets as in that run; base and adapter
    python eval.py --adapter out/RUN/adapter --samples 16      # pass@1, 2, 4, 8 and 16 too; any script runs under torchrun
    python eval.py --model Qwen2.5-3B --task hotpotqa,2wiki,musique --out out/three        # benchmarks, one after the other
    python eval.py --resume --out out/three                    # those that are not finished yet
    python eval.py --model Qwen2.5-3B --task test.jsonl --corpus documents.jsonl --split all

The base is the model with a blank adapter, as training evaluates it at step 0. Figures are of one greedy trajectory per question; pass@k is
the chance that at least one of k sampled trajectories is right. Intervals: 95 %, percentile bootstrap over questions; the difference
between the two systems is paired by question.

Writes eval.json (all figures, also per question), eval.md (the table) and samples.jsonl (every trajectory, as training writes them).
Several benchmarks get a folder each, and benchmarks.md beside them.
"""

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import ranks, run
from common.args import UNSAFE, Sampling, parse_args, read
from tasks import benchmarks
from view import show, tables

OWN = ("adapter", "limit", "out", "gpu_memory", "resume", *UNSAFE)  # never taken from the adapter's run


@dataclass
class Args(Sampling):
    """The flags that only evaluation has, and those of common/args.py that have another meaning here."""

    adapter: str = ""
    """LoRA adapter to evaluate, or a run directory (its newest); flags that are not given here are taken from that run"""
    systems: Literal["both", "base", "adapter"] = "both"
    """what to evaluate (without --adapter: the base)"""
    task: str = "hotpotqa"
    """a data set (docs/data.md), tiny_search, tiny_math, reasoning_gym:<name>, or a JSONL file of {"question", "answers"} lines; several
    with commas between them; search_qa, math_sets: lists of data sets"""
    split: Literal["dev", "test", "all"] = "test"
    """dev: the held-out questions of training; test: those training never sees; all: the whole file, for one that is a test set itself"""
    limit: int = 0
    """evaluate on the first so many questions only (0: all)"""
    samples: int = 0
    """sampled trajectories per question, for pass@k (0: greedy only)"""
    decoding: Literal["own", "search_r1", "rtpo"] = "own"
    """sampling as a paper evaluates: sets --samples, --temperature and --top_p where they are not given"""
    out: str = ""
    """run directory (default: out/eval-<model>-<task>-<split>-<run of the adapter>)"""
    resume: bool = False
    """continue the evaluation in that directory: benchmarks that are finished are left as they are"""
    seed: int = 1
    """of sampling and of the bootstrap"""
    temperature: float = 1.0
    """of --samples"""
    top_p: float = 1.0
    """of --samples: the most likely tokens of so much probability are left"""
    gpu_memory: float = 0.5
    """share of a GPU's memory for the engine"""


def run_of(adapter: str) -> tuple[str, dict]:
    """Return (name, arguments) of the training run that the adapter's folder is in, or the folder's name and {}.

    out/RUN/adapter may be a link to a checkpoint.
    """
    here = Path(adapter).absolute()
    for path in (here, here.resolve()):
        for folder in (path, *path.parents)[:4]:
            if (taken := read(folder, Args)) is not None:
                inside = [part for part in path.relative_to(folder).parts if part not in ("adapter", "checkpoints")]
                return "-".join((folder.name, *inside)), taken
    return here.name, {}


def adapter_in(folder: Path) -> Path:
    """Return the newest adapter in a run directory. Raises SystemExit if there is none."""
    if last := run.last_checkpoint(folder):
        link = folder / "adapter"
        return link if link.resolve() == (last / "adapter").resolve() else last / "adapter"
    raise SystemExit(f"--adapter {folder}: this run has no checkpoint yet, and so no adapter.")


def parse(argv: list[str] | None = None) -> Args:
    """Parse the command line. Flags that are not given come from the adapter's run, except OWN."""
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    given = tyro.cli(Args, args=argv, use_underscores=True, description=__doc__.partition("\n")[0])
    if ((folder := Path(given.adapter)) / "args.json").exists():  # a run directory
        argv = [*argv, f"--adapter={adapter_in(folder)}"]
        given = tyro.cli(Args, args=argv, use_underscores=True)
    name, taken = run_of(given.adapter) if given.adapter else ("", {})
    task = tyro.cli(Args, args=argv, use_underscores=True, default=Args(task=taken.get("task", ""))).task
    # The run's corpus belongs to the run's questions: other questions or another corpus replace it.
    replaced = ("corpus", "retriever") if given.corpus or given.retriever or task != taken.get("task") else ()
    dropped = "".join(f"; not --{k} {taken[k]}" for k in (*replaced, *UNSAFE) if taken.get(k) and not getattr(given, k))
    shared = [f.name for f in dataclasses.fields(Args) if f.name not in (*OWN, *replaced)]
    taken = {k: taken[k] for k in shared if k in taken}
    of_paper = benchmarks.DECODING[given.decoding]
    words = [
        f"--{k}={v}" if not isinstance(v, bool) else f"--{k}" if v else f"--no-{k}"
        for k, v in (taken | of_paper).items()
    ]
    args = parse_args(Args, [*words, *argv, "--no-resume"])  # if a flag occurs twice, the last one counts
    parts = ("eval", Path(args.model).name, benchmarks.short(args.task), args.split, name)
    args.out = args.out or "out/" + "-".join(filter(None, parts))
    if given.resume:  # the other flags come from that evaluation
        return parse_args(Args, [*argv, f"--out={args.out}"])
    if args.systems == "adapter" and not args.adapter:
        raise SystemExit("--systems adapter needs --adapter, the folder of a LoRA adapter.")
    args.systems = args.systems if args.adapter else "base"
    if ranks.rank() == 0 and taken:
        kept = [f"--{k} {v}" for k, v in taken.items() if v not in ("", False) and getattr(args, k) == v]
        run.notice(f"as in the run {name}: {' '.join(kept)}{dropped}")
    return args


def main(args: Args) -> None:
    todo = benchmarks.load(args)
    # Here and not above: --help and a wrong --task are answered without torch.
    from common.policy import Policy
    from common.rollout import Engine
    from view import plan, record, self_test

    args = plan.fit(args, todo)
    device, last = run.setup(args)
    record.write(args, __file__, last)
    folders = {name: benchmarks.folder_of(run.directory(args), todo, name) for name in todo}
    left = ranks.from_rank_0([name for name, folder in folders.items() if not (folder / "eval.json").exists()])
    policy = Policy(args, device, train=False)
    engine = Engine(policy, args)
    self_test.check(engine, policy)
    engine.top_p = args.top_p  # after the test: the trainer's log-probabilities are of the whole distribution
    for name in left:
        items, (task, questions) = {}, todo[name]
        for system in ("base", "adapter") if args.systems == "both" else [args.systems]:
            with policy.blank() if system == "base" else contextlib.nullcontext():
                engine.publish(policy)
            if ranks.rank() == 0 and not sys.stderr.isatty():  # in place of a progress bar
                run.notice(f"{name}: {system}, {len(questions)} questions")
            items[system] = benchmarks.evaluate(engine, task, args, questions, system, name)
        if ranks.rank() == 0:
            lines = [line for of_system in items.values() for _, more in of_system for line in more]
            text = tables.write(folders[name], benchmarks.result(args, name, questions, items), lines)
            with show.until_closed():
                print(f"\n{text}\nFigures per question and trajectories: {folders[name]}/", flush=True)
    if ranks.rank() == 0 and len(todo) > 1:
        with show.until_closed():
            print(f"\n{tables.overview(run.directory(args), folders)}")


if __name__ == "__main__":
    run.launch(main, parse())
