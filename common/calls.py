"""Tool calls and scores of a rollout: threads with a time limit, and a watchdog that names what a run waits for."""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from common import ranks, run
from common.environment import Lost

HANGING = 64  # running calls past their time limit at which the run ends: a thread cannot be killed
WATCHDOG = 60.0  # seconds without any result until a notice


class Late(Exception):
    """The error of a call that did not return within its time limit."""


class Calls:
    """Functions that run in daemon threads: one that hangs delays neither the others nor the exit.

    what      names such a call in messages
    workers   calls that run at the same time; 0: each runs at once in the calling thread, without a time limit
    seconds   time limit of a call
    """

    def __init__(self, what: str, workers: int, seconds: float):
        self.what, self.workers, self.seconds = what, workers, seconds
        self.waiting, self.done = deque(), queue.SimpleQueue()
        self.running = {}  # number -> (owner, started)
        self.number = 0

    def submit(self, owner: object, function: Callable[[], object]) -> None:
        """Run function() for an owner, at once or when a worker is free."""
        self.waiting.append((owner, function))
        self._start()

    def _start(self):
        while self.waiting and (self.workers == 0 or len(self.running) < self.workers):
            owner, function = self.waiting.popleft()
            self.number += 1
            self.running[self.number] = owner, time.monotonic()
            if self.workers == 0:
                self._work(self.number, function)
                continue
            threading.Thread(target=self._work, args=(self.number, function), name=self.what, daemon=True).start()
            alive = sum(thread.name == self.what for thread in threading.enumerate())
            if alive > self.workers + HANGING:
                raise SystemExit(f"{alive - len(self.running)} {self.what}s hang and cannot be ended. Mend the tool.")

    def _work(self, number, function):
        try:
            self.done.put((number, function(), None))
        except BaseException as error:  # also SystemExit: a tool must not end the run
            self.done.put((number, None, error))

    def finished(self, wait: bool) -> list[tuple]:
        """Return (owner, result, error or None) of the finished calls; with `wait`, wait briefly for one.

        Raises SystemExit if a call has raised Lost.
        """
        out = []
        with contextlib.suppress(queue.Empty):
            block = wait and bool(self.running)
            while True:
                number, result, error = self.done.get(block=block, timeout=0.05) if block else self.done.get_nowait()
                block = False
                if isinstance(error, Lost):
                    raise SystemExit(str(error))
                if number in self.running:  # else it was late
                    out.append((self.running.pop(number)[0], result, error))
        for number, (owner, started) in list(self.running.items()):
            if self.workers and time.monotonic() - started > self.seconds:
                del self.running[number]
                out.append((owner, None, Late(f"no answer within {self.seconds:g} seconds")))
        self._start()
        return out


class Watchdog:
    """Print a notice when nothing has finished for WATCHDOG seconds, even while the main thread is blocked.

    pending() returns the notice's list: a line for each kind of pending work. Use it as a context manager around the wait.
    """

    def __init__(self, pending: Callable[[], list[str]]):
        self.pending, self.ended, self.last = pending, threading.Event(), time.monotonic()

    def progress(self) -> None:
        """Record that something has finished."""
        self.last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()

    def _watch(self):
        while not self.ended.wait(WATCHDOG / 10):
            if time.monotonic() - self.last > WATCHDOG:
                self.progress()
                with contextlib.suppress(RuntimeError):  # a dictionary changed meanwhile: something has finished
                    pending = "; ".join(self.pending()) or "nothing"
                    run.notice(f"rank {ranks.rank()}: nothing has finished for {WATCHDOG:.0f} s; pending: {pending}")
