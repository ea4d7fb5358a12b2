"""Run math-verify in processes that can be killed: a comparison of two formulas can take forever (10^{10^{10}}).

    process     `python -m tasks.worker` loads sympy once and forks a child that compares; it never loads torch. math-verify
                limits its time by signals, which only work in the main thread, so the trainer cannot run it
    limit       a comparison may take SECONDS of CPU time. The kernel then kills the child, a new one is forked in
                milliseconds, and the answer counts as wrong
    hurry       the more time slow comparisons have taken in the last minute, the shorter the limit, down to LEAST: 512
                different endless answers take one or two minutes, not 43
    memory      a comparison that was decided is remembered (REMEMBERED pairs)
    a notice    a comparison that ran out of time, and scoring that takes longer than a minute, print one line

A process is started when no other is free, at most PROCESSES of them. They end with the trainer, even if it is killed.
"""

import collections
import contextlib
import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import ending, ranks, run

PROCESSES = 2  # of this rank
SECONDS = 5.0  # CPU time of a comparison
LEAST = 0.1  # the same, after many comparisons have run out of time
WALL = 30.0  # seconds until a process that does not answer at all is killed
START = 60.0  # timeout of the start of a process
MINUTE = 60.0  # seconds between two lines
MEMORY = 2 * 2**30  # limit of a process' address space in bytes
REMEMBERED = 20_000  # comparisons
DIGITS = 1000  # of a number that is not rational
# What math-verify and sympy do slowly the first time is done before a child is forked.
WARM = (
    *(("x(x+1)", "x^2+x"), ("y=2-x/3", "x+3y-6=0"), (r"\frac{\pi}{2}+\sqrt{3}", r"\sqrt[3]{5}"), (r"\{1,2\}", "(1,2)")),
    *(
        (r"\sin(x)^2+\cos x^2", "1"),
        (r"e^{2}\log 2-5!", r"3\cdot 4"),
        ("1,2", "2,1"),
        ("x < 5", "5 > x"),
        ("3i+2", "|x-2|"),
    ),
)


class Late(Exception):
    """Raised for a comparison that ran out of a shortened time: it is wrong now, and is tried again another time."""


class Pool:
    """The trainer's side of the processes. Any thread may call `ask`; PROCESSES calls run at once."""

    def __init__(self):
        self.lock, self.slots = threading.Lock(), threading.Semaphore(PROCESSES)
        self.free, self.all, self.registered = [], [], False
        self.slow = collections.deque(maxlen=1000)  # (time, seconds, whether out of time) of slow comparisons
        self.asking, self.since, self.ended, self.told = 0, 0.0, 0.0, -MINUTE
        self.decided = functools.lru_cache(REMEMBERED)(self._decide)

    def ask(self, pairs: list[tuple[str, str]]) -> bool:
        """Return whether in one of the pairs (answer, gold) of LaTeX formulas both are equal. False if that fails."""
        self._begin()
        try:
            return self.decided(tuple(pairs))
        except Late:
            return False
        except OSError as error:
            self._tell(f"{error}: formulas count as wrong unless they are written as the gold is")
            return False
        finally:
            self._end()

    def limit(self) -> float:
        """Return the CPU seconds that the next comparison may take."""
        spent = sum(seconds for _, seconds, _ in self._recent()) / SECONDS
        return max(LEAST, SECONDS / 4 ** max(0, spent - 1))

    def close(self) -> None:
        """Kill all processes."""
        for process in self.all[:]:
            process.kill()
        self.all.clear()
        self.free.clear()

    def _decide(self, pairs):
        with self.slots:
            process, limit, started = self._take(), self.limit(), time.monotonic()
            try:
                result = process.ask(pairs, limit)
            finally:
                with self.lock:
                    if process.alive():
                        self.free.append(process)
        late, seconds = result == "late", min(limit, time.monotonic() - started)
        if late or seconds > LEAST / 2:
            self.slow.append((time.monotonic(), seconds, late))
        if late:
            self._tell(f"an answer took longer than {limit:.2g} s to compare and counts as wrong: {pairs[0][0][:60]!r}")
            if limit < SECONDS:
                raise Late
        return result == "1"

    def _take(self):
        with self.lock:
            if not self.registered:
                self.registered = True
                ending.at_end(self.close)
            while self.free:
                if (process := self.free.pop()).alive():
                    return process
            self.all = [process for process in self.all if process.alive()]
            process = Process()
            self.all.append(process)
        process.start()
        return process

    def _begin(self):
        with self.lock:
            now = time.monotonic()
            if not self.asking and now - self.ended > 1:
                self.since = now
            self.asking += 1

    def _end(self):
        with self.lock:
            self.asking, self.ended = self.asking - 1, time.monotonic()
        if self.ended - self.since > MINUTE:
            self._tell(f"comparing answers has taken {self.ended - self.since:.0f} s without a pause")

    def _recent(self):
        now = time.monotonic()
        return [one for one in tuple(self.slow) if now - one[0] < MINUTE]

    def _tell(self, text):
        """Print a line, at most one a minute."""
        now = time.monotonic()
        with self.lock:
            if now - self.told < MINUTE:
                return
            self.told = now
        late = sum(late for *_, late in self._recent())
        run.notice(f"rank {ranks.rank()}: {text}. Answers that ran out of time in the last minute: {late}.")


class Process:
    """One process that compares formulas, as the trainer sees it."""

    def __init__(self):
        self.popen, self.number = None, 0

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises OSError."""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tasks.worker"],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the trainer only, which then ends this process
        )
        if self._line(START) != "ready":
            self.kill()
            raise OSError("math-verify does not start")

    def alive(self) -> bool:
        """Return whether it is running."""
        return self.popen is not None and self.popen.poll() is None

    def ask(self, pairs, limit) -> str:
        """Return "1" (equal), "0", or "late". Raises OSError if the process ends or does not answer."""
        self.number += 1
        while select.select([self.popen.stdout], [], [], 0)[0] and os.read(self.popen.stdout.fileno(), 4096):
            pass  # a late word on an earlier question
        try:
            self.popen.stdin.write(json.dumps([self.number, limit, pairs]).encode() + b"\n")
            self.popen.stdin.flush()
            while True:
                number, result = self._line(WALL).split()
                if number in (str(self.number), "?"):
                    return result
        except (OSError, ValueError):
            self.kill()
            raise OSError("math-verify does not answer") from None

    def kill(self) -> None:
        """Kill the process and its child."""
        if self.popen is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            for pipe in (self.popen.stdin, self.popen.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _line(self, seconds):
        """Return the next line of the process, "" if it has ended or does not answer in time."""
        text, until = b"", time.monotonic() + seconds
        while not text.endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            if not select.select([self.popen.stdout], [], [], left)[0]:
                return ""
            if not (byte := os.read(self.popen.stdout.fileno(), 1)):
                return ""
            text += byte
        return text.decode().strip()


# ---- in the process


def same_number(one, other) -> bool:
    """Return whether two numbers of sympy are equal: rationals exactly, others to DIGITS, those with decimals to 12."""
    from sympy import Float

    one, other = one.doit(), other.doit()
    if not (one.is_finite and other.is_finite):  # 1/0 equals nothing
        return bool(one == other and one.is_extended_real)
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    size = max(abs(one.evalf(15)), abs(other.evalf(15)))
    if one.has(Float) or other.has(Float):
        return bool(abs((one - other).evalf(30)) <= size * Float(10) ** -12)
    # evalf computes with more digits until it knows those of the difference, or until DIGITS.
    return bool(abs((one - other).evalf(15, maxn=DIGITS)) <= size * Float(10) ** -(DIGITS - 50))


def same_curve(one, other) -> bool:
    """Return whether two equations are equal up to a constant factor, such as y = 2 - x/3 and x + 3y - 6 = 0."""
    from sympy import cancel

    sides = [equation.lhs - equation.rhs for equation in (one, other)]
    if any(side.is_number for side in sides):
        return False
    ratio = cancel(sides[0] / sides[1])
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def right(answer: str, gold: str) -> bool:
    """Return whether two LaTeX formulas are equal, as math-verify reads them."""
    from math_verify import parse, verify
    from sympy import Eq, Expr

    answer, gold = (parse(f"${text}$", parsing_timeout=None) for text in (answer, gold))
    first = [found[0] for found in (answer, gold) if found]
    if len(first) == 2 and all(isinstance(each, Expr) and each.is_number for each in first):
        return same_number(*first)
    if len(first) == 2 and all(isinstance(each, Eq) for each in first):
        return same_curve(*first)
    return verify(gold, answer, float_rounding=12, timeout_seconds=None)


def compare(out: int) -> None:
    """Answer each line of stdin with `number 1` or `number 0`, until the trainer has ended. Run in the child."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rest = b""
    while True:
        # Read without Python's buffer: its bytes would be lost when the child is killed.
        while b"\n" not in rest:
            if not (part := os.read(0, 65536)):
                return
            rest += part
        line, _, rest = rest.partition(b"\n")
        number, seconds, pairs = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process, also inside of C code
        found = False
        with contextlib.suppress(Exception):
            found = any(right(*pair) for pair in pairs)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(out, f"{number} {int(found)}\n".encode())


def serve() -> None:
    """Load sympy, and fork a child that compares; fork another one whenever it was killed."""
    out = os.dup(1)
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    for pair in WARM:
        with contextlib.suppress(Exception):
            right(*pair)
    os.write(out, b"ready\n")
    while True:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                compare(out)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        os.write(out, b"? late\n" if late else b"? 0\n")


if __name__ == "__main__":
    serve()
