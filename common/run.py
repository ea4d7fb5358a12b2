"""The run around an algorithm: processes, seeds, the run directory.

Light on import (neither torch nor vllm), so that --help and a wrong flag return at once.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import random
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common import ending, ranks

if TYPE_CHECKING:
    import torch
    import tqdm

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 600.0  # seconds that training retries a failed write
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)  # these may pass
FIRST_SECONDS = float(os.environ.get("TURNWISE_FIRST_SECONDS", 60))  # for the first exchange between ranks
RESOLVED = {}  # flag -> the given value, such as auto, and the value that the run uses
CLAIMS = []  # open lock files of run directories: released when the process ends


def notice(text: str) -> None:
    """Print a line to stderr, above any progress bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def progress(items: Iterable | None = None, shown: bool = True, **options) -> "tqdm.tqdm":
    """Return a progress bar on rank 0. Without a terminal it prints a line after a minute, and one a minute."""
    from tqdm import tqdm

    quiet = {} if sys.stderr.isatty() else {"delay": 60, "mininterval": 60}
    return tqdm(items, disable=not shown or ranks.rank() > 0, **quiet, **options)


def launch(main: Callable, args) -> None:
    """Run a script's main. However it ends (Ctrl-C, SIGTERM, an error, torchrun's death), the at_end callbacks run."""
    ending.watch_signals()
    try:
        if args and ranks.rank() == 0:
            refuse_early(args)
        main(args)
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        ending.exit_now(*((code,) if isinstance(code, int) else (1, code)))
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        text = str(error) if full else "".join(traceback.format_exception(error))
        if ranks.world_size() > 1:
            text += f"\nThis was rank {ranks.rank()}. If another rank ended first, see its own message."
        ending.exit_now(1, text)
    if ranks.world_size() > 1 or ("torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()):
        # Everything is written. Tearing down NCCL and the engine may hang, and gloo aborts if rank 0 has ended first.
        ending.exit_now(0)
    with ending.EXITING:  # waits for another thread that is exiting
        pass


def retry_write(what: str | Path, action: Callable):
    """Run an action that writes to disk, and retry up to PATIENCE seconds (disk full, quota, file server away)."""
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
                notice(f"{what} cannot be written ({error}). Training retries for up to {PATIENCE:.0f} s.")
            if time.monotonic() > until or ending.STOPPING.wait(2.0):
                raise


def append(path: Path, lines: list[str]) -> None:
    """Append lines to a file, all or none."""
    size = path.stat().st_size if path.exists() else 0

    def write():
        try:
            with open(path, "a", encoding="utf-8", errors="replace") as out:
                out.truncate(size)  # drops a failed attempt
                out.writelines(line + "\n" for line in lines)
        except BaseException:  # this may be the last attempt
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise

    retry_write(path, write)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, completely or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.rename(path)


def setup(args) -> "tuple[torch.device, Path | None]":
    """Set up process group, seeds and run directory. Returns (device of this rank, checkpoint to resume from or None).

    Raises SystemExit if the run directory holds another run: nothing finished is overwritten.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if ranks.world_size() == 1:  # as torchrun would set it
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
            raise SystemExit(f"Local rank {ranks.local_rank()} has no GPU: {seen} are visible.")
        device = torch.device("cuda", ranks.local_rank())
        torch.cuda.set_device(device)
        if ranks.rank() == 0 and seen > used:
            notice(f"{used} of {seen} visible GPUs used. For all: torchrun --nproc_per_node {seen} and the same flags")
    if args.load_4bit and device.type == "cpu":
        raise SystemExit("--load_4bit: the engine's CPU build has no 4-bit base. Leave it out without a GPU.")
    if not dist.is_initialized():
        # Ranks generate at their own pace between collectives: the timeout is for a dead rank, not for a slow one.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
        first_collective(device)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(args.seed)
    folder = directory(args)
    wrong = last = None
    if ranks.rank() == 0 and not (wrong := claim(args, folder)):
        try:
            last = last_checkpoint(folder) if args.resume else None
        except SystemExit as stop:
            wrong = stop.code
    wrong, last = ranks.from_rank_0((wrong, last))
    if wrong:
        raise SystemExit(wrong)
    return device, last


def first_collective(device: "torch.device") -> None:
    """Sum a number over all ranks. Exits with a message after FIRST_SECONDS: a broken box must not wait for two hours."""
    import torch
    import torch.distributed as dist

    where = "NCCL" if device.type == "cuda" else "gloo"
    failed = (
        f"Rank {ranks.rank()}: the ranks cannot exchange data over {where}. In a container start it with --ipc=host or "
        "--shm-size=8g. NCCL_DEBUG=INFO prints the reason; NCCL_P2P_DISABLE=1 helps on some boards without NVLink."
    )
    box = torch.ones(1, device=device)
    patience = threading.Timer(
        FIRST_SECONDS,
        ending.exit_now,
        (1, f"{failed} (No answer in {FIRST_SECONDS:.0f} s; TURNWISE_FIRST_SECONDS allows more.)"),
    )
    patience.daemon = True
    patience.start()
    try:
        dist.all_reduce(box)
        if box.item() != ranks.world_size():
            raise SystemExit(f"{failed} (The sum over {ranks.world_size()} ranks is {box.item():g}.)")
    except RuntimeError as error:
        raise SystemExit(f"{failed} ({error})") from None
    finally:
        patience.cancel()


def resolve(args, **values):
    """Return a copy of the arguments with flags such as --sleep auto resolved. args.json keeps the given value."""
    RESOLVED.update({name: {"given": getattr(args, name), "value": value} for name, value in values.items()})
    return dataclasses.replace(args, **values)


def directory(args) -> Path:
    """Return the run directory: --out, or out/<script>-<model>-<task>-s<seed>."""
    if args.out:
        return Path(args.out)
    script = Path(sys.argv[0]).stem
    name = "-".join((script, Path(args.model).name, Path(args.task).stem, f"s{args.seed}"))
    return Path("out") / name


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run directory, oldest first. A rename gives a complete one its name."""
    named = [path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted((path for path in named if (path / "state.pt").exists()), key=step_of)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None without any. Prints those left out. Raises SystemExit if all are damaged."""
    torn = []
    for path in reversed(checkpoints(folder)):
        if not (fault := damage(path)):
            if torn:
                notice(f"warning: {folder}: {path.name} is used, and left out: {'; '.join(torn)}")
            return path
        torn.append(f"{path.name} ({fault})")
    if torn:
        raise SystemExit(f"{folder} has no whole checkpoint: {'; '.join(torn)}. Start again with another --out.")
    return None


def sums(checkpoint: Path) -> str:
    """Return the text of a checkpoint's file `sha256`, as sha256sum writes it: a hash and a name per file."""
    out = []
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name not in ("sha256", "README.md")):
        with open(path, "rb") as file:
            out.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(checkpoint)}\n")
    return "".join(out)


def damage(checkpoint: Path) -> str | None:
    """Return which files of a checkpoint are damaged, or None. One without hashes, of an earlier version, counts as whole."""
    try:
        if not (checkpoint / "sha256").exists():
            return None
        was, now = (set(text.splitlines()) for text in ((checkpoint / "sha256").read_text(), sums(checkpoint)))
        changed = sorted(line[66:] for line in was - now) if was else ["sha256"]
        return f"{', '.join(changed)[:200]} changed since it was saved" if changed else None
    except (OSError, ValueError) as error:
        return str(error)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def saved_progress(folder: Path) -> str | None:
    """Return the name of the results in a run directory: its last checkpoint, or "benchmarks" (eval.py). Else None."""
    evaluated = any(folder.glob("eval.json")) or any(folder.glob("*/eval.json"))
    return saved[-1].name if (saved := checkpoints(folder)) else "benchmarks" if evaluated else None


def stray(folder: Path) -> Path | None:
    """Return a file in a folder that leads out of it (a link) or is no plain file: writing to it would do harm."""
    home = os.path.realpath(folder) + os.sep
    plain = lambda p: os.path.realpath(p).startswith(home) and (p.is_file() or p.is_dir() or p.is_symlink())  # noqa: E731
    return next((path for path in folder.rglob("*") if not plain(path)), None)


def refuse_early(args) -> None:
    """Refuse a run directory that is taken, and end at once for a run that is complete: before torch is imported."""
    folder = directory(args)
    if getattr(args, "dry_run", False) or (not args.resume and not occupied(folder)):
        return
    if not args.resume:
        raise SystemExit(taken(folder))
    last = max(checkpoints(folder), key=step_of, default=None)
    if last and step_of(last) >= getattr(args, "steps", float("inf")) and not damage(last):
        if (folder / "adapter").resolve() == (last / "adapter").resolve():  # else the links need a repair
            page = shlex.join(["python", "-m", "view", "report", str(folder)])
            notice(f"all {step_of(last)} steps are done: continue with a larger --steps, or look at them: {page}")
            raise SystemExit


def taken(folder: Path) -> str | None:
    """Return why a new run may not use a folder, or None."""
    advice = "continue it with --resume, " if saved_progress(folder) else ""
    wrong = f"{folder} exists, and nothing is overwritten: {advice}give another --out or move it away."
    return wrong if occupied(folder) else None


def occupied(folder: Path) -> bool:
    """Return whether a folder must be kept: it holds anything but a run that ended before its first checkpoint."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    return bool(saved_progress(folder)) or not (folder / "lock").exists()


def claim(args, folder: Path) -> str | None:
    """Claim the run directory until this process ends. Returns the reason for a refusal, in one line, or None."""
    try:
        if not args.resume and (wrong := taken(folder)):
            return wrong
        if path := stray(folder):
            return f"{path} leads out of the run directory or is no plain file: nothing is written there. Remove it."
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a")
    except OSError as error:
        return f"--out {folder}: cannot be written ({error.strerror}). Give another --out."
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return f"{folder}: another process is using it."
    CLAIMS.append(lock)
    return None
