"""Derived files that lie outside of run directories, each made once."""

import contextlib
import fcntl
import os
from pathlib import Path


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
