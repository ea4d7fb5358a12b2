"""The part of the Python tool that runs beside the model's code: a server that forks a process for every call.

tools/python.py starts it, inside bubblewrap or, in unsafe mode, on the bare machine. It uses the standard library only, and finds what
it needs in its arguments. Three processes take part:

    server    forks a watcher for every message on its control socket (standard input), until that is closed
    watcher   makes the call's private world, and kills all of it when the code has ended, is over time, or nobody waits any more
    runner    process 1 of that world: limits itself, gives up its rights, and runs the code; it holds nothing but its output

Nothing the code says is ever read by the server or by a watcher: how a call ended is known from the runner's exit alone.
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
import traceback
import types

RAISED = 101  # exit code after an exception that the code did not catch; any other than 0 is a process that died
FRAMES = 8  # of a traceback that the model is shown
MIB = 2**20
LIMITS = {
    resource.RLIMIT_AS: 512 * MIB,  # of each process
    resource.RLIMIT_FSIZE: 16 * MIB,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
PROCESSES = 16  # and threads, of a call that has a user id to itself
SHARED = (
    256  # else: the system counts all processes of the user (of the sandbox alone since Linux 5.14), and none of root's
)
TMP = b"size=16m,nr_inodes=1024,mode=1777"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV = 2, 4
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CAPABILITIES = 64  # more than there are
UIDS = 32  # user ids that a server has for its calls
JOIN_SESSION_KEYRING, KEYCTL = 1, {"x86_64": 250, "aarch64": 219}
LIBC = ctypes.CDLL(None, use_errno=True)


def must(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- server


def serve(safe, uids):
    """safe: inside bubblewrap. uids: what the calls run as in turn; none where that cannot be changed."""
    for name in ("numpy.random", "sympy"):  # slow to load, and every call gets what is loaded here
        with contextlib.suppress(Exception):
            __import__(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers leave no zombies
    control = socket.socket(fileno=0)
    control.send(b"ready")
    folders = "" if safe else tempfile.mkdtemp(prefix="turnwise-python-")
    calls = 0
    while True:
        message, handles, _, _ = socket.recv_fds(control, 64, 2)
        if not message:  # the trainer has ended
            shutil.rmtree(folders, ignore_errors=True)
            return
        calls += 1
        with contextlib.suppress(OSError):  # no process to be had: the caller sees its line closed
            if os.fork() == 0:
                try:
                    watch(*handles, float(message), folders, uids and uids[calls % len(uids)])
                except OSError as error:  # before the code began: a right that is missing
                    os.write(handles[1], str(error).encode())
                finally:
                    os._exit(1)
        for handle in handles:
            os.close(handle)


# ---- watcher


def watch(line, output, seconds, folders, uid):
    """Have a runner do the call that is on the line, and write on the line how it ended: an exit code, -signal, or "timeout".

    folders: where to make a folder for the call's files; none in a sandbox, where a call gets its own /tmp.
    """
    safe = not folders
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # the control socket is the server's alone
    if safe:
        must(LIBC.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET))
        folder = "/tmp"
        must(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, TMP))
    else:
        must(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        folder = tempfile.mkdtemp(dir=folders)
    runner = os.fork()
    if runner == 0:
        os._exit(run(line, output, folder, seconds, safe, uid))
    os.close(output)
    poll = select.poll()
    poll.register(line, 0)  # hung up: nobody waits for the answer
    poll.register(os.pidfd_open(runner), select.POLLIN)
    over_time = not poll.poll(seconds * 1000)
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner, signal.SIGKILL)  # process 1: the kernel ends all of its world before it can be waited for
    code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
    if not safe:
        sweep(runner)
        shutil.rmtree(folder, ignore_errors=True)
    os.write(line, b"timeout" if over_time else str(code).encode())
    os._exit(0)


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


def run(line, output, folder, seconds, safe, uid):
    """-> exit code, 0 or RAISED"""
    os.setsid()  # signals to one's own group reach nobody else
    if not safe:
        must(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    os.chdir(folder)
    limit(seconds, PROCESSES if uid else SHARED)
    if safe:
        drop(uid)
    with socket.socket(fileno=line) as request:
        request = request.makefile("rb")
        size = struct.unpack("!I", request.read(4))[0]
        request = json.loads(request.read(size))
    os.dup2(output, 3)
    os.closerange(4, 1024)
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
    """Rebuild a session from the codes of its earlier calls, their output thrown away, and run one more. -> 0 or RAISED"""
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
        os.dup2(3, stream)
    os.close(3)
    status = 0
    try:
        execute(code, f"<call {len(earlier) + 1}>", space)
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else RAISED
        if status:
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
    mode, first_uid, packages = sys.argv[1:]
    if packages:
        sys.path.append(packages)
    serve(mode == "safe", range(int(first_uid), int(first_uid) + UIDS) if first_uid else None)
