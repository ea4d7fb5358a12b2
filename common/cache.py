"""The cache of derived files outside of run directories; each file is made once."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of derived files (tiny base, search indices, models): $TURNWISE_CACHE or ~/.cache/turnwise."""
    path = Path(os.environ.get("TURNWISE_CACHE") or Path.home() / ".cache" / "turnwise")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path`, so that one rank makes a derived file while the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
