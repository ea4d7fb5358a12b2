"""Run all scripts on the embedded tasks, side by side. Fills docs/results.md and draws its pictures.

    make compare                                  # everything, about 90 minutes on 2 cores
    python runs/compare.py --part main --seeds 1  # a part of it
    python runs/compare.py --part smollm2         # with SmolLM2-135M, after a warm start: about 75 minutes
    python runs/compare.py --plot_only            # pictures and page from the existing finished runs
    python runs/compare.py --steps 2 --out /tmp/c --docs /tmp/d -- --questions 4    # arguments after -- go to every run

Runs are in out/compare/; --at_once of them run in parallel. A finished run is not repeated while its code and arguments
are unchanged, and an interrupted run is resumed. Any other directory in its place is renamed. If a run fails, it is
reported and the others continue. Only the part of the page between its two marks is rewritten.
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

import tasks  # noqa: E402, F401  (fills EMBEDDED)
from common import run  # noqa: E402
from common.args import parse_args  # noqa: E402
from common.models import EMBEDDED  # noqa: E402
from view import record  # noqa: E402

PARTS = ("main", "turns", "cost", "smollm2")  # smollm2 runs only with --part smollm2
ALONE = ("cost",)  # one run at a time, on all cores
# Seconds before a run's first step, and per step, with two runs at a time except for ALONE.
START, SECONDS = 25, {"main": 7.5, "turns": 6.5, "cost": 5.0, "smollm2": 105.0}
TASKS = {"tiny_search": "tiny", "tiny_math": "tiny-math"}  # task: model
SCRIPTS = {"GRPO": "train_grpo.py", "TSPO": "train_tspo.py", "GTPO": "train_gtpo.py", "RTPO": "train_rtpo.py"}
# Parts that start from an adapter of runs/warm_start.py: the tiny base has never seen a history without its thinking,
# and SmolLM2 has never seen the tags.
WARM = {
    "turns": "--model tiny --context strip_think --questions 4 --group 8 --steps 240 --lr 2e-3",
    "smollm2": "--model smollm2 --shots 0 --questions 4 --group 4 --steps 30 --temperature 1 --lr 2e-4",
}
# The KL to the reference is measured only if it is part of the loss. With this coefficient it vanishes in float32
# rounding, even if nothing else has a gradient (the norm is then 0): the run equals one without it, bit for bit, and
# takes one more forward pass per phase.
MEASURE_KL = ("--kl_coef", "1e-24", "--kl", "k3")


# ---- the mismatch: python runs/compare.py --mismatch -- <arguments of train_grpo.py>


def with_full_history(trajectory):
    """Return a copy of a trajectory in which every turn's context is the full history, whatever the policy saw."""
    turns, ids = [], trajectory.turns[0].context_ids if trajectory.turns else []
    for turn in trajectory.turns:
        turns.append(replace(turn, context_ids=ids))
        ids = ids + turn.action_ids + turn.observation_ids
    return replace(trajectory, turns=turns)


def mismatched(pack):
    """Return a pack() that ignores the sampled contexts of the turns, but keeps the engine's log-probabilities."""

    def pack_full_history(groups, advantages):
        full = [replace(g, trajectories=[with_full_history(t) for t in g.trajectories]) for g in groups]
        return pack(full, advantages)

    return pack_full_history


def mismatch(argv):
    """Run train_grpo.py with a deliberate error: sample on one history (--context strip_think) and train on another."""
    import train_grpo
    from common import batch

    batch.pack = mismatched(batch.pack)
    run.launch(train_grpo.main, parse_args(train_grpo.Args, argv))


# ---- the plan


@dataclass(frozen=True)
class Job:
    """A run. at: the task (main), "smollm2", --max_turns (turns) or None (cost). label: its name on the page."""

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
        """Return the command without the interpreter, as the run records it in environment.json."""
        wrapper = [str(Path(__file__).resolve()), "--mismatch", "--"]
        program = wrapper if self.label == MISMATCH else [str(ROOT / self.script)]
        return [*program, *self.words, "--out", str(self.folder)]


def plan(args):
    """Return the jobs of all parts, in order."""
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
        words += " --tis_cap 0"  # truncated importance sampling would partly correct the mismatch
        add("turns", f"max_turns-{limit}", label, seed, args.turn_steps, limit, words)
    words = f"--model smollm2 --task tiny_search --shots 0 --questions 4 --lr 3e-5 {warm['smollm2']}"
    for label in SCRIPTS:
        evaluated = f"{words} --eval_every 9 --eval_questions 100"
        add("smollm2", "smollm2", label, 1, args.smollm2_steps, "smollm2", evaluated)
    for label in ("GRPO", "RTPO"):
        add("cost", "cost", label, 1, args.cost_steps, None, f"{tiny} --group 16 --questions 8 --eval_questions 20")
    return jobs


def fingerprint(root, job):
    """Return a hash of a run's arguments and code. root: the folder of the code, the repository or a run directory."""
    digest = hashlib.sha256(repr(job.words).encode())
    if job.label == MISMATCH:
        digest.update((inspect.getsource(with_full_history) + inspect.getsource(mismatched)).encode())
    add_code(digest, root, job.script)
    return digest.hexdigest()


def add_code(digest, root, script):
    for path in (root / script, *(p for package in record.PACKAGES for p in sorted((root / package).rglob("*.py")))):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + (path.read_bytes() if path.exists() else b""))


def state(job):
    """Return new (nothing to keep), finished, resume (checkpoint of the same code and arguments) or stale (else)."""
    if not run.occupied(job.folder):
        return "new"
    if done := read_json(job.folder / "compare.json"):
        return "finished" if done["hash"] == fingerprint(ROOT, job) else "stale"
    same = read_json(job.folder / "environment.json").get("command", [])[1:] == job.command()
    if same and run.last_checkpoint(job.folder) and fingerprint(job.folder, job) == fingerprint(ROOT, job):
        return "resume"
    return "stale"


def states(jobs):
    """Return {job: state}. The two cost runs belong together: unless both are finished, both start again."""
    found = {job: state(job) for job in jobs}
    cost = [job for job in jobs if job.part == "cost"]
    if any(found[job] != "finished" for job in cost):
        found |= {job: "new" if found[job] == "new" else "stale" for job in cost}
    return found


# ---- running


def retire(folder):
    """Rename a run directory to make room for a new one: nothing is ever deleted."""
    names = (folder.with_name(f"{folder.name}-old-{n}") for n in itertools.count(1))
    folder.rename(next(path for path in names if not path.exists()))


def execute(job, before, on_steps, threads, stopping):
    """Execute one run, calling on_steps(finished steps). Returns None, or the reason for a failure with the log's end.

    threads: CPU threads of the run. Raises KeyboardInterrupt when `stopping` is set; the run then saves its last step.
    """
    if before == "stale":
        retire(job.folder)
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder.with_name(job.folder.name + ".log")  # not inside: a run directory must be empty at the start
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
        "hash": fingerprint(
            job.folder, job
        ),  # of the run's copy of its code: the files here may have changed since it started
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "runs/compare.py", *sys.argv[1:]]),
        "machine": machine(),
    }
    run.write_json(job.folder / "compare.json", record)
    return None


def execute_all(found, at_once):
    """Execute unfinished runs, `at_once` in parallel, those of ALONE one at a time. Returns {failed job: reason}."""
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
                if not stopping.is_set() and (reason := execute(job, found[job], on_steps, threads, stopping)):
                    failed[job] = reason
                    bar.write(f"FAILED {job.name}: {reason}", file=sys.stderr)
            except KeyboardInterrupt:
                return
            on_steps(job.steps)

        def interrupted(*_):
            stopping.set()
            raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):  # also SIGINT, which a shell's background job ignores
            signal.signal(number, interrupted)
        cores = os.cpu_count()
        for alone in (False, True):
            jobs = [job for job in todo if (job.part in ALONE) == alone]
            workers = 1 if alone else min(at_once, cores)
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(make, jobs, [cores // workers] * len(jobs)))
    return failed


def warm_folder(args, part):
    """Return the folder of a part's warm start. Its name holds a hash of the arguments and the code."""
    made_of = hashlib.sha256(WARM[part].encode())
    add_code(made_of, ROOT, "train_grpo.py")
    add_code(made_of, ROOT, "runs/warm_start.py")
    return args.out / f"warm-{part}-{made_of.hexdigest()[:8]}"


def warm_start(folder, part):
    """Train the adapter of a part's warm start if it does not exist. Returns None, or the reason why it failed."""
    if (folder / "adapter" / "adapter_config.json").exists():
        return None
    command = [sys.executable, "runs/warm_start.py", *WARM[part].split(), "--out", folder]
    code = subprocess.run(command, cwd=ROOT).returncode
    return f"its warm start failed with exit code {code}; its messages are above" if code else None


def machine():
    """Return the processor, number of cores and operating system of this machine."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


# ---- command line


def numbers(text):
    return [int(word) for word in text.split(",")]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Arguments after -- go to every run.")
    cut = argv.index("--") if "--" in argv else len(argv)
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="run only this part; repeatable (default: all but smollm2)"
    )
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="seeds of main (default: 1,2,3)")
    parser.add_argument("--steps", type=int, default=0, help="steps of main (default: the preset's)")
    parser.add_argument("--turn_seeds", type=numbers, default=[1], help="seeds of turns (default: 1)")
    parser.add_argument("--turn_steps", type=int, default=15, help="steps of turns (default: 15)")
    parser.add_argument("--max_turns", type=numbers, default=[2, 3, 4, 5], help="limits of turns (default: 2,3,4,5)")
    parser.add_argument(
        "--cost_steps", type=int, default=8, help="steps of cost; the first is not counted (default: 8)"
    )
    parser.add_argument("--smollm2_steps", type=int, default=18, help="steps of smollm2 (default: 18)")
    parser.add_argument("--at_once", type=int, default=2, help="parallel runs, which share the cores (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "compare", help="folder of the runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of results.md and the pictures")
    parser.add_argument("--plot_only", action="store_true", help="only draw the finished runs and write the page")
    parser.add_argument("--dry_run", action="store_true", help="only print the plan")
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
        print(f"{len(left)} of {len(found)} runs to do, about {minutes:.0f} minutes on 2 cores", flush=True)
        if args.dry_run:
            return
        try:
            for part in WARM:
                waiting = [job for job in left if job.part == part]
                if waiting and (reason := warm_start(warm_folder(args, part), part)):
                    failed |= dict.fromkeys(waiting, reason)
            failed |= execute_all({job: how for job, how in found.items() if job not in failed}, args.at_once)
        except KeyboardInterrupt:
            raise SystemExit("\nInterrupted. Run the same command again to continue.") from None
    stale = [job for job in jobs if (job.folder / "compare.json").exists() and state(job) == "stale"]
    for row in write(jobs, stale, args.docs):
        print("worse than GRPO, explain it under Remarks:", row)
    print(f"written: {args.docs / 'results.md'}")
    for job, reason in failed.items():
        print(f"FAILED {job.name}: {reason}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    if "--mismatch" in sys.argv[1:2]:
        mismatch(sys.argv[3:])
    else:
        main()
