"""Where published adapters lie until the engine loads them."""

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
    """Where published adapters lie: memory-backed storage when it has room, else the run directory; one copy per node.

    A folder belongs to a live run as long as its lock is held; those that dead runs left in memory are removed.
    """

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
            # Renamed when locked: nobody takes it for dead.
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

    def path(self, version):
        return self.folder / f"v{version}"

    def save(self, policy, version):
        """All ranks together: one rank per node writes, none goes on before it is there, and the version before the last is deleted."""
        if ranks.local_rank() == 0:
            run.retry_write(f"adapter {version} in {self.folder}", lambda: policy.save_adapter(self.path(version)))
            self.versions.append(version)
            while len(self.versions) > 2:  # the one before may not have been loaded yet by a slower rank
                shutil.rmtree(self.path(self.versions.popleft()), ignore_errors=True)
        if ranks.world_size() > 1:
            dist.barrier()
