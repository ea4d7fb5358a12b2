"""Storage for published adapters until the engine loads them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path

import torch.distributed as dist

from common import ending, ranks, run


class AdapterStore:
    """The folder of published adapters: memory-backed if there is room, else in the run directory. One copy per node.
    A live run holds the lock of its folder; folders left behind by dead runs are removed."""

    def __init__(self, policy, args):
        need = 3 * sum(p.numel() * p.element_size() for p in policy.parameters)
        memory = Path("/dev/shm")
        if ranks.local_rank() == 0:
            self._remove_dead(memory)
            roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need
            parent = memory if roomy else Path(run.directory(args))
            parent.mkdir(parents=True, exist_ok=True)
            self._remove_dead(parent)
            name = f"turnwise-{os.getuid()}-"
            # Renamed once locked, so that no other run removes it as dead.
            fresh = Path(tempfile.mkdtemp(prefix=f".{name}", dir=parent))
            self.lock = open(fresh / "lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            folder = fresh.rename(parent / fresh.name.removeprefix("."))
            ending.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
        else:
            folder = None
        self.folder = ranks.from_local_rank_0(folder)
        self.versions = deque()

    def _remove_dead(self, parent):
        name = f"turnwise-{os.getuid()}-*"
        for folder in (*parent.glob(name), *parent.glob(f".{name}")):
            with contextlib.suppress(OSError):
                starting = folder.name.startswith(".") or not (folder / "lock").exists()
                if starting and time.time() - folder.stat().st_mtime < 60:
                    continue
                with open(folder / "lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def save(self, policy, version: int) -> None:
        """Write an adapter, once per node; all ranks call this and wait for it. Only the last two versions are kept."""
        if ranks.local_rank() == 0:
            run.retry_write(f"adapter {version} in {self.folder}", lambda: policy.save_adapter(self.path(version)))
            self.versions.append(version)
            while len(self.versions) > 2:  # a slower rank may still have to load the previous one
                shutil.rmtree(self.path(self.versions.popleft()), ignore_errors=True)
        if ranks.world_size() > 1:
            dist.barrier()
