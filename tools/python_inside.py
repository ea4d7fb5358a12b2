"""The part of the Python tool that runs beside the model's code: a server that forks a process for every call.

tools/python.py starts it, inside bubblewrap or, in unsafe mode, on the bare machine. It uses the standard library only, and finds what
it needs in its arguments. Two processes take part:

    server    makes a world and a runner for every message on its control socket (standard input), until that is closed; kills the
              world when the code has ended, is over time, or nobody waits any more
    runner    process 1 of that world: limits itself, gives up its rights, and runs the code; it holds nothing but its output

In unsafe mode there are no worlds: a keeper stands between the two and clears away what the code has left behind. Nothing the code
says is ever read by the server: how a call ended is known from the runner's exit alone.
"""

import ast
import contextlib
import ctypes
import gc
import json
import linecache
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import types

# Exit codes of a runner that came to the end of the code, and after an exception that the code did not catch. With any other, 0 too, the
# process died: code that leaves by itself, as by os._exit, leaves no session that could be rebuilt.
ENDED, RAISED = 100, 101
FRAMES = 8  # of a traceback that the model is shown
MIB = 2**20
LIMITS = {
    resource.RLIMIT_AS: 512 * MIB,  # of each process
    resource.RLIMIT_FSIZE: 16 * MIB,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
PROCESSES = 16  # and threads, of a call that has a user id to itself
# Else the system counts all processes of the user (of the sandbox alone since Linux 5.14), and none of root's.
SHARED = 256
TMP = b"size=16m,nr_inodes=1024,mode=1777"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC = 2, 4, 0x1000, 0x4000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CAPABILITIES = 64  # more than there are
UIDS = 32  # user ids that a server has for its calls
OUTPUT = 1000  # handle of a call's output while earlier codes run: beyond their RLIMIT_NOFILE, they neither close nor meet it
JOIN_SESSION_KEYRING, KEYCTL = 1, {"x86_64": 250, "aarch64": 219}
LIBC = ctypes.CDLL(None, use_errno=True)


def must(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- server


def serve(folder, uids):
    """folder: where calls get folders of their own; none inside bubblewrap. uids: what the calls run as, if any; more calls share them."""
    for name in ("numpy.random", "sympy"):  # slow to load, and every call gets what is loaded here
        with contextlib.suppress(Exception):
            __import__(name)
    gc.collect()
    gc.freeze()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= OUTPUT:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control.send(b"ready")
    poll, calls, count = select.poll(), {}, 0  # calls: by line and by process, as far as they are still watched
    poll.register(control, select.POLLIN)
    while True:
        deadlines = [call.deadline for call in calls.values() if not call.over_time]
        wait = max(min(deadlines) - time.monotonic(), 0) * 1000 if deadlines else None
        for handle, _ in poll.poll(
            wait
        ):  # the control socket comes first: handles opened for a new call are no old ones
            if handle in calls:
                call = calls.pop(handle)
                poll.unregister(handle)
                if handle == call.process:
                    call.end()
                    if calls.pop(call.line, None):
                        poll.unregister(call.line)
                    os.close(call.process)
                    os.close(call.line)
                else:  # hung up: nobody waits for the answer
                    call.kill()
            elif handle == control.fileno():
                message, handles, _, _ = socket.recv_fds(control, 64, 2)
                if not message:  # the trainer has ended
                    shutil.rmtree(folder, ignore_errors=True)
                    return
                count += 1
                line, output = handles
                taken = {call.uid for call in calls.values()}
                uid = uids and next((uid for uid in uids if uid not in taken), uids[count % len(uids)])
                try:
                    call = start(line, output, float(message), folder, uid)
                except OSError as error:  # no process to be had: the caller sees its line closed
                    os.write(output, str(error).encode())
                    os.close(line)
                else:
                    calls |= {line: call, call.process: call}
                    poll.register(line, 0)
                    poll.register(call.process, select.POLLIN)
                os.close(output)
        for call in calls.values():
            if not call.over_time and time.monotonic() >= call.deadline:
                call.over_time = True
                call.kill()


class Call:
    """A call under way. line: where it came from, and where its end is told; process: a handle of its runner, or of its keeper."""

    def __init__(self, line, process, number, seconds, safe, uid):
        self.line, self.process, self.number, self.safe, self.uid = line, process, number, safe, uid
        self.deadline, self.over_time = time.monotonic() + seconds, False

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL if self.safe else signal.SIGTERM)

    def end(self):
        """Write on the line how it ended: an exit code, -signal, or "timeout". The kernel has ended all of a world before its process 1."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        with contextlib.suppress(OSError):
            os.write(self.line, b"timeout" if self.over_time else str(code).encode())


def start(line, output, seconds, folder, uid):
    """Fork a runner, in unsafe mode with a keeper. -> Call"""
    safe = not folder
    itself = os.pidfd_open(os.getpid())
    if safe:
        must(LIBC.unshare(CLONE_NEWPID))  # from here on whatever is forked is process 1 of a new world
    try:
        number = os.fork()
        if number == 0:
            child(keep if folder else run, line, output, seconds, folder, uid)
    finally:
        if safe:
            must(LIBC.setns(itself, CLONE_NEWPID))
        os.close(itself)
    return Call(line, os.pidfd_open(number), number, seconds, safe, uid)


def child(work, line, output, *rest):
    """Do the work of a forked process, to its end."""
    status = 1
    try:
        status = work(line, output, *rest)
    except OSError as error:  # before the code began: a right that is missing
        os.write(output, str(error).encode())
    finally:
        os._exit(status)


# ---- keeper


def keep(line, output, seconds, folder, uid):
    """Where no world can be ended as a whole: have a runner do the call, end as it did, and kill whatever it has left."""
    must(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    folder = tempfile.mkdtemp(dir=folder)
    runner = os.fork()
    if runner == 0:
        child(run, line, output, seconds, folder, uid)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(runner, signal.SIGKILL))
    os.close(output)
    code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    sweep(runner)
    shutil.rmtree(folder, ignore_errors=True)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL is what it is
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def sweep(group):
    """Without a world to end: kill the runner's group, then whatever has left it and now is this process' child."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):  # no child is left, or this kernel does not list them
        while True:
            for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


# ---- runner


def run(line, output, seconds, folder, uid):
    """folder: the call's own; none in a sandbox, where it makes itself a /tmp. -> exit code, ENDED or RAISED"""
    os.setsid()  # signals to one's own group reach nobody else
    must(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if not folder:
        must(LIBC.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET))
        # Nobody may make a user namespace from inside a chroot; in one of its own the code could mount, say, the trainer's control group.
        must(LIBC.mount(b"/", b"/call", None, MS_BIND | MS_REC, None))
        os.chroot("/call")
        must(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, TMP))
    os.chdir(folder or "/tmp")
    os.dup2(output, OUTPUT)
    limit(seconds, PROCESSES if uid else SHARED)
    if not folder:
        drop(uid)
    with socket.socket(fileno=line) as request:
        request = request.makefile("rb")
        size = struct.unpack("!I", request.read(4))[0]
        request = json.loads(request.read(size))
    os.closerange(3, OUTPUT)
    for stream in (1, 2):
        os.dup2(0, stream)
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    return session(request["earlier"], request["code"])


def limit(seconds, processes):
    limits = LIMITS | {resource.RLIMIT_NPROC: processes, resource.RLIMIT_CPU: int(seconds) + 2}
    for what, value in limits.items():
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))


def drop(uid):
    """Give up every right for good."""
    for capability in range(CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    must(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    must(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    must(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # after the change of user, which clears it
    if number := KEYCTL.get(os.uname().machine):  # a keyring of its own, and not the trainer's
        LIBC.syscall(number, JOIN_SESSION_KEYRING, 0)


def session(earlier, code):
    """Rebuild a session from the codes of its earlier calls, their output thrown away, and run one more. -> ENDED or RAISED"""
    sys.modules["__main__"] = module = types.ModuleType("__main__")  # where pickle, say, looks for the code's classes
    space = module.__dict__
    sys.argv = [""]
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    for number, text in enumerate(earlier, 1):
        with contextlib.suppress(BaseException):  # what came before the exception counts, as it did then
            execute(text, f"<call {number}>", space)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(OUTPUT, stream)
    os.close(OUTPUT)
    status = ENDED
    try:
        execute(code, f"<call {len(earlier) + 1}>", space)
    except SystemExit as end:
        if end.code not in (None, 0):
            status = RAISED
            show(end)
    except BaseException as error:
        status = RAISED
        show(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return status


def execute(text, name, space):
    """As in a notebook: when the last statement is an expression, its value is shown."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # the lines that a traceback quotes
    body = ast.parse(text, name).body
    last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), space)
    exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), space)


def show(error):
    """The traceback without our own frames, on what standard error was at the start."""
    try:
        trace = error.__traceback__
        while trace and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES)
        text = "".join(lines).encode("utf-8", "backslashreplace")
    except BaseException:  # no memory is left, say
        text = type(error).__name__.encode()
    while text:
        text = text[os.write(2, text) :]


if __name__ == "__main__":
    folder, first_uid, packages = sys.argv[1:]
    if packages:
        sys.path.append(packages)
    serve(folder, range(int(first_uid), int(first_uid) + UIDS) if first_uid else None)
