"""The cache of derived files outside of run directories; each file is made once."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of derived files (tiny base, search indices, models): $TURNWISE_CACHE or ~/.cache/turnwise."""
    path = None
    try:
        path = Path(os.environ.get("TURNWISE_CACHE") or Path.home() / ".cache" / "turnwise")
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise unusable(path or "~/.cache/turnwise", error) from None
    return path


def unusable(path: Path | str, error: Exception) -> SystemExit:
    """Return the exit for a derived file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return SystemExit(
        f"{path}: derived files cannot be written there ({reason}). Make room or set TURNWISE_CACHE to another folder."
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path`, so that one rank makes a derived file while the others wait.

    Raises SystemExit if it cannot be written: a caller must not take that for a fault of what the file is made from.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(f"{path}.lock", "w")
    except OSError as error:
        raise unusable(path, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
            if full or str(error.filename).startswith(str(path)):
                raise unusable(path, error) from None
            raise
