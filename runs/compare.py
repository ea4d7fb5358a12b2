"""All scripts on the embedded tasks, side by side: fills docs/results.md and draws its pictures.

    make compare                                  # everything, about 90 minutes on 2 cores
    python runs/compare.py --part main --seeds 1  # less of it
    python runs/compare.py --part smollm2         # the four scripts with SmolLM2-135M, after a warm start: about 75 minutes
    python runs/compare.py --plot_only            # pictures and page from the finished runs that are there
    python runs/compare.py --steps 2 --out /tmp/c --docs /tmp/d -- --questions 4    # what follows -- goes to every run

Runs lie below out/compare/ and are made --at_once of them at a time. A finished run whose script, common/, tools/ and arguments are unchanged is not
made again; an interrupted one goes on; whatever else is in the way gets another name. A run that fails is reported and the others go on.
On the page only what lies between its two marks is written anew.
"""

import argparse
import hashlib
import inspect
import itertools
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compare_page import MISMATCH, read_json, read_lines, write  # noqa: E402

from common import run  # noqa: E402
from common.args import parse_args  # noqa: E402
from common.models import EMBEDDED  # noqa: E402

PARTS = ("main", "turns", "cost", "smollm2")  # the last one only when it is asked for
ALONE = ("cost",)  # one at a time, on all cores
# Of a run: before its first step, and of each step, two at a time where they are.
START, SECONDS = 25, {"main": 7.5, "turns": 6.5, "cost": 5.0, "smollm2": 105.0}
TASKS = {"tiny_search": "tiny", "tiny_math": "tiny-math"}  # task: model
SCRIPTS = {"GRPO": "train_grpo.py", "TSPO": "train_tspo.py", "GTPO": "train_gtpo.py", "RTPO": "train_rtpo.py"}
# What a part begins with: an adapter of runs/warm_start.py. The tiny base has never seen a history without its thinking, and SmolLM2 no tags.
WARM = {
    "turns": "--model tiny --context strip_think --questions 4 --group 8 --steps 240 --lr 2e-3",
    "smollm2": "--model smollm2 --shots 0 --questions 4 --group 4 --steps 30 --temperature 1 --lr 2e-4",
}
# The KL to the reference is only measured where it is part of the loss. So little of it is lost in float32's rounding, also where nothing
# else has a gradient (the norm of what is left is 0): the run is the one without it, bit for bit, and takes one more forward pass a phase.
MEASURE_KL = ("--kl_coef", "1e-24", "--kl", "k3")


# ---- the mismatch: python runs/compare.py --mismatch -- <arguments of train_grpo.py>


def with_full_history(trajectory):
    """A copy of a trajectory in which every turn's context is all that was said and heard before it, whatever the policy was shown."""
    turns, ids = [], trajectory.turns[0].context_ids if trajectory.turns else []
    for turn in trajectory.turns:
        turns.append(replace(turn, context_ids=ids))
        ids = ids + turn.action_ids + turn.observation_ids
    return replace(trajectory, turns=turns)


def mismatched(pack):
    """turns.pack of a trainer that ignores how the history was sampled; the engine's log-probabilities stay as they were sampled."""

    def pack_full_history(groups, advantages):
        full = [replace(g, trajectories=[with_full_history(t) for t in g.trajectories]) for g in groups]
        return pack(full, advantages)

    return pack_full_history


def mismatch(argv):
    """train_grpo.py with one error made on purpose: sampled on one history (--context strip_think), trained on another."""
    import train_grpo
    from common import batch

    batch.pack = mismatched(batch.pack)
    run.launch(train_grpo.main, parse_args(train_grpo.Args, argv))


# ---- what is to be run


@dataclass(frozen=True)
class Job:
    """A run: its folder, what it is called on the page, its script and arguments. `at`: the task (main), or --max_turns (turns)."""

    part: str
    folder: Path
    label: str
    words: tuple
    seed: int
    steps: int
    at: object

    @property
    def script(self):
        return SCRIPTS["GRPO" if self.label == MISMATCH else self.label]

    @property
    def name(self):
        return f"{self.folder.parent.name}/{self.folder.name}"

    def command(self):
        """The command without the interpreter, as the run itself writes it down."""
        on_purpose = [str(Path(__file__).resolve()), "--mismatch", "--"]
        own = on_purpose if self.label == MISMATCH else [str(ROOT / self.script)]
        return [*own, *self.words, "--out", str(self.folder)]


def plan(args):
    """The jobs of all parts, in order."""
    jobs = []

    def add(part, place, label, seed, steps, at, words):
        script = "train_grpo-mismatch" if label == MISMATCH else Path(SCRIPTS[label]).stem
        words = (*shlex.split(words), "--seed", str(seed), "--steps", str(steps), *args.extra)
        jobs.append(Job(part, args.out / place / f"{script}-s{seed}", label, words, seed, steps, at))

    for (task, model), seed, label in itertools.product(TASKS.items(), args.seeds, SCRIPTS):
        steps = args.steps or EMBEDDED[model].preset["steps"]
        add("main", task, label, seed, steps, task, f"--model {model} --task {task} {' '.join(MEASURE_KL)}")
    tiny = "--model tiny --task tiny_search --eval_every 0"
    warm = {part: shlex.join(["--adapter", str(warm_folder(args, part) / "adapter")]) for part in WARM}
    for seed, limit, label in itertools.product(args.turn_seeds, args.max_turns, ("GRPO", "RTPO", MISMATCH)):
        words = f"{tiny} {warm['turns']} --context strip_think --max_turns {limit}"
        words += " --tis_cap 0"  # or it would half correct the mismatch
        add("turns", f"max_turns-{limit}", label, seed, args.turn_steps, limit, words)
    words = f"--model smollm2 --task tiny_search --shots 0 --questions 4 --lr 3e-5 {warm['smollm2']}"
    for label in SCRIPTS:
        more = f"{words} --eval_every 9 --eval_questions 100"
        add("smollm2", "smollm2", label, 1, args.smollm2_steps, "smollm2", more)
    for label in ("GRPO", "RTPO"):
        add("cost", "cost", label, 1, args.cost_steps, None, f"{tiny} --group 16 --questions 8 --eval_questions 20")
    return jobs


def fingerprint(root, job):
    """A hash of everything of ours that a run follows from: code below `root` (the repository, or a run directory) and arguments."""
    digest = hashlib.sha256(repr(job.words).encode())
    if job.label == MISMATCH:
        digest.update((inspect.getsource(with_full_history) + inspect.getsource(mismatched)).encode())
    add_code(digest, root, job.script)
    return digest.hexdigest()


def add_code(digest, root, script):
    for path in (root / script, *(p for package in run.PACKAGES for p in sorted((root / package).rglob("*.py")))):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + (path.read_bytes() if path.exists() else b""))


def state(job):
    """One of new (nothing to keep), finished, resume (a checkpoint of the same code and arguments), stale (anything else)."""
    if not run.occupied(job.folder):
        return "new"
    if done := read_json(job.folder / "compare.json"):
        return "finished" if done["hash"] == fingerprint(ROOT, job) else "stale"
    same = read_json(job.folder / "environment.json").get("command", [])[1:] == job.command()
    if same and run.last_checkpoint(job.folder) and fingerprint(job.folder, job) == fingerprint(ROOT, job):
        return "resume"
    return "stale"


def states(jobs):
    """{job: state}. The two sides of the cost are measured in one sitting: both are finished, or both begin anew."""
    found = {job: state(job) for job in jobs}
    cost = [job for job in jobs if job.part == "cost"]
    if any(found[job] != "finished" for job in cost):
        found |= {job: "new" if found[job] == "new" else "stale" for job in cost}
    return found


# ---- running


def retire(folder):
    """Move a run directory out of the way: nothing is ever deleted."""
    names = (folder.with_name(f"{folder.name}-old-{n}") for n in itertools.count(1))
    folder.rename(next(path for path in names if not path.exists()))


def execute(job, before, on_steps, threads, stopping):
    """Make one run; on_steps(n) is told how many steps it has finished. Returns None, or why it failed: the last lines of its log.

    threads: of the processor for this run. Raises KeyboardInterrupt when `stopping` is set: the run then saves its last finished step.
    """
    if before == "stale":
        retire(job.folder)
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder.with_name(job.folder.name + ".log")  # beside: a run directory must be empty when its run begins
    command = [sys.executable, *job.command(), *(["--resume"] if before == "resume" else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with open(log, "ab" if before == "resume" else "wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if stopping.wait(0.5):
                process.terminate()
                process.wait()
                raise KeyboardInterrupt
            on_steps(max(0, len(read_lines(job.folder / "metrics.jsonl")) - 1))
    if process.returncode:
        lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
        return f"exit code {process.returncode}; the end of {log}:\n" + "\n".join(lines[-12:])
    record = {
        "hash": fingerprint(job.folder, job),  # of the copy made when it began: the files here may have changed since
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "runs/compare.py", *sys.argv[1:]]),
        "machine": machine(),
    }
    run.write_json(job.folder / "compare.json", record)
    return None


def execute_all(found, at_once):
    """Make every run that is not finished, `at_once` of them side by side; those whose time is measured (cost) alone. Returns {job: why it
    failed}."""
    from tqdm import tqdm

    todo, failed, stopping = [job for job in found if found[job] != "finished"], {}, threading.Event()
    done = dict.fromkeys(todo, 0)
    interval = 0.5 if sys.stderr.isatty() else 60
    with tqdm(total=sum(job.steps for job in todo), unit="step", mininterval=interval, desc="compare") as bar:

        def make(job, threads):
            def on_steps(steps):
                done[job] = steps
                bar.update(sum(done.values()) - bar.n)

            try:
                if not stopping.is_set() and (why := execute(job, found[job], on_steps, threads, stopping)):
                    failed[job] = why
                    bar.write(f"FAILED {job.name}: {why}", file=sys.stderr)
            except KeyboardInterrupt:
                return
            on_steps(job.steps)

        def interrupted(*_):
            stopping.set()
            raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT also where a shell's background job ignores it
            signal.signal(number, interrupted)
        cores = os.cpu_count()
        for alone in (False, True):
            jobs = [job for job in todo if (job.part in ALONE) == alone]
            workers = 1 if alone else min(at_once, cores)
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(make, jobs, [cores // workers] * len(jobs)))
    return failed


def warm_folder(args, part):
    """Where the adapter lies that a part begins with. Its name holds what it is made from: arguments and code."""
    made_of = hashlib.sha256(WARM[part].encode())
    add_code(made_of, ROOT, "train_grpo.py")
    add_code(made_of, ROOT, "runs/warm_start.py")
    return args.out / f"warm-{part}-{made_of.hexdigest()[:8]}"


def warm_start(folder, part):
    """Make that adapter, if it is not there. Returns None, or why it failed."""
    if (folder / "adapter" / "adapter_config.json").exists():
        return None
    command = [sys.executable, "runs/warm_start.py", *WARM[part].split(), "--out", folder]
    code = subprocess.run(command, cwd=ROOT).returncode
    return f"its warm start ended with exit code {code}; it has said why above" if code else None


def machine():
    """Processor, cores and system of this machine."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


# ---- command line


def numbers(text):
    return [int(word) for word in text.split(",")]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="What follows -- goes to every run.")
    cut = argv.index("--") if "--" in argv else len(argv)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated (default: all)")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="of main (default: 1,2,3)")
    parser.add_argument("--steps", type=int, default=0, help="of main (default: the preset's)")
    parser.add_argument("--turn_seeds", type=numbers, default=[1], help="of turns (default: 1)")
    parser.add_argument("--turn_steps", type=int, default=15, help="of turns (default: 15)")
    parser.add_argument("--max_turns", type=numbers, default=[2, 3, 4, 5], help="of turns (default: 2,3,4,5)")
    parser.add_argument("--cost_steps", type=int, default=8, help="of cost, whose first is left out (default: 8)")
    parser.add_argument("--smollm2_steps", type=int, default=18, help="of smollm2 (default: 18)")
    parser.add_argument("--at_once", type=int, default=2, help="runs side by side, sharing the cores (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "compare", help="where the runs lie")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where results.md and the pictures go")
    parser.add_argument("--plot_only", action="store_true", help="pictures and page from the finished runs")
    parser.add_argument("--dry_run", action="store_true", help="print the plan only")
    args = parser.parse_args(argv[:cut])
    args.part, args.extra = args.part or PARTS[:3], argv[cut + 1 :]
    args.out, args.docs = args.out.resolve(), args.docs.resolve()
    return args


def main():
    args = parse(sys.argv[1:])
    jobs, failed = plan(args), {}
    if not args.plot_only:
        found = states([job for job in jobs if job.part in args.part])
        for job, how in found.items():
            print(f"{how:<10}{job.name}")
        left = [job for job in found if found[job] != "finished"]
        shared = {part: 1 if part in ALONE else args.at_once for part in PARTS}
        minutes = sum((START + job.steps * SECONDS[job.part]) / shared[job.part] for job in left) / 60
        print(f"{len(left)} of {len(found)} runs to make, about {minutes:.0f} minutes on 2 cores", flush=True)
        if args.dry_run:
            return
        try:
            for part in WARM:
                waiting = [job for job in left if job.part == part]
                if waiting and (why := warm_start(warm_folder(args, part), part)):
                    failed |= dict.fromkeys(waiting, why)
            failed |= execute_all({job: how for job, how in found.items() if job not in failed}, args.at_once)
        except KeyboardInterrupt:
            raise SystemExit("\nInterrupted. The same command goes on where it stopped.") from None
    stale = [job for job in jobs if (job.folder / "compare.json").exists() and state(job) == "stale"]
    for row in write(jobs, stale, args.docs):
        print("worse than GRPO, to be explained under Remarks:", row)
    print(f"written: {args.docs / 'results.md'}")
    for job, why in failed.items():
        print(f"FAILED {job.name}: {why}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    if "--mismatch" in sys.argv[1:2]:
        mismatch(sys.argv[3:])
    else:
        main()
