"""How a run ends: signals, errors, and what is done before the process exits."""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time

from common import ranks

CALLBACKS = []  # what is done before the process ends
EXITING, STOPPING = threading.Lock(), threading.Event()


def at_end(action):
    """Have `action()` called when the process ends, in whatever way but kill -9, the latest given first. It may be called from another
    thread; what it returns is said."""
    CALLBACKS.insert(0, action)
    atexit.register(action)


def exit_now(code, text=None):
    """End this process at once: say why, do what at_end was given, leave. The main thread may hang in a collective: it is not asked.

    Nothing may keep it from leaving: where the terminal or the reader of a pipe is gone, every word is an error.
    """
    if not EXITING.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    STOPPING.set()
    try:
        if text:
            _write_stderr(text)
        for action in CALLBACKS:
            try:
                said = action()
            except Exception as error:
                said = f"while the run ended: {error!r}"
            if said:
                _write_stderr(said)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(code)


def _write_stderr(text):
    """A line for people from a process that ends: a dead thread may hold the bar's lock, and a reader may have stopped reading."""

    def write():
        with contextlib.suppress(Exception):
            os.write(2, f"\n{str(text).strip()}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)


def watch_signals():
    """Watch for signals in a thread of its own: the main thread may be in a collective that never returns."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handled = [number for number in stops if signal.getsignal(number) != signal.SIG_IGN]  # not with nohup
    for number in handled:
        signal.signal(number, lambda *_: None)

    def in_child():
        """A process that a tool forks is no part of this: it dies of its signals."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in handled:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_child)
    parent, asked = os.getppid(), []

    def watch():
        while True:
            if select.select([reader], [], [], 1.0)[0]:
                number = os.read(reader, 1)[0]
                if number in stops:
                    name = signal.Signals(number).name
                    end(128 + number, f"{name}: saving the last finished step. Once more, after 3 s: leaving without.")
            elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not asked:
                end(1, "torchrun is gone.")

    def end(code, why):
        asked.append(time.monotonic())
        if asked[-1] - asked[0] > 3:  # twice, and not by a scheduler and torchrun at once: the disk may hang
            os._exit(code)
        threading.Thread(target=exit_now, args=(code, why if ranks.rank() == 0 else None), daemon=True).start()

    threading.Thread(target=watch, name="signals", daemon=True).start()
