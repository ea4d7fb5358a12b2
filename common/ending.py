"""How a run ends: signals, errors, and callbacks before the process exits."""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from common import ranks

CALLBACKS = []  # run before the process exits
EXITING, STOPPING = threading.Lock(), threading.Event()


def at_end(action: Callable[[], object]) -> None:
    """Call `action()` at any exit but kill -9, in any thread; last registered, first called. Its result is printed."""
    CALLBACKS.insert(0, action)
    atexit.register(action)


def exit_now(code: int, text: str | None = None) -> NoReturn:
    """Exit now: print why, run the at_end callbacks. Do not wait for the main thread: it may hang in a collective."""
    if not EXITING.acquire(blocking=False):
        threading.Event().wait()  # another thread is exiting
    STOPPING.set()
    try:
        if text:
            _write_stderr(text)
        for action in CALLBACKS:
            try:
                report = action()
            except Exception as error:
                report = f"error in a callback at exit: {error!r}"
            if report:
                _write_stderr(report)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(code)


def _write_stderr(text):
    """Print without blocking or raising: a dead thread may hold the bar's lock, terminal and pipe may be gone."""

    def write():
        with contextlib.suppress(Exception):
            os.write(2, f"\n{str(text).strip()}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)


def watch_signals() -> None:
    """Watch for signals in a separate thread: the main thread may be in a collective that never returns."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handled = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in handled:
        signal.signal(number, lambda *_: None)

    def in_child():
        """Restore the default signals in a process that a tool forks."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in handled:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_child)
    parent, requests = os.getppid(), []

    def watch():
        while True:
            if select.select([reader], [], [], 1.0)[0]:
                number = os.read(reader, 1)[0]
                if number in stops:
                    name = signal.Signals(number).name
                    end(128 + number, f"{name}: saving the last finished step. Repeat after 3 s to skip saving.")
            elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not requests:
                end(1, "torchrun has died.")

    def end(code, why):
        requests.append(time.monotonic())
        if requests[-1] - requests[0] > 3:  # again, and not from scheduler and torchrun at once: the disk may hang
            os._exit(code)
        threading.Thread(target=exit_now, args=(code, why if ranks.rank() == 0 else None), daemon=True).start()

    threading.Thread(target=watch, name="signals", daemon=True).start()
