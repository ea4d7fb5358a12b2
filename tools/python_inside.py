"""The part of the Python tool that runs beside the model's code: a server that forks a process for every call.

tools/python.py starts it inside bubblewrap or, in unsafe mode, directly on the machine. It uses only the standard
library and gets everything it needs as arguments. Two processes take part:

    server    creates a PID namespace and a runner for each message on its control socket (stdin), until that is closed;
              kills the namespace when the code has ended, is over time, or its caller has hung up
    runner    process 1 of that namespace: limits itself, drops its privileges and runs the code; holds only its output

In unsafe mode there are no namespaces: a keeper process between the two kills the processes and deletes the files that
the code leaves. The server never reads output of the code: the runner's exit status alone shows how a call ended.
"""

import ast
import contextlib
import ctypes
import errno
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

# Exit codes of a runner after the code finished, and after an uncaught exception. Any other exit code, even 0, means
# that the process died: code that ends its process, as with os._exit, leaves no session that could be rebuilt.
ENDED, RAISED = 100, 101
FRAMES = 8  # traceback frames that the model is shown
MIB = 2**20
LIMITS = {
    resource.RLIMIT_AS: 512 * MIB,  # per process
    resource.RLIMIT_FSIZE: 16 * MIB,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
PROCESSES = 16  # limit on processes and threads of a call with its own user id
# The limit for other calls: the system counts all processes of the user (since Linux 5.14 only the sandbox's).
# It counts none of root's.
SHARED = 256
TMP = b"size=16m,nr_inodes=1024,mode=1777"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 0x20, 0x1000, 0x4000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CAPABILITIES = 64  # more than exist
DEVICES = ("null", "zero", "full", "random", "urandom")
DIGITS = 100_000  # of an integer that is printed: converting more takes seconds (the default of Python is 4,300)
UIDS = 32  # user ids that a server has for its calls
OUTPUT = 1000  # file descriptor of the output while earlier code runs: above RLIMIT_NOFILE, out of that code's reach
JOIN_SESSION_KEYRING, KEYCTL = 1, {"x86_64": 250, "aarch64": 219}
LIBC = ctypes.CDLL(None, use_errno=True)
# System calls that the filter refuses with EPERM. Numbers of linux/include/uapi/asm/unistd_64.h and asm-generic/unistd.h.
REFUSED = {
    "x86_64": {
        "memory outside of the limits": (
            29,
            30,
            31,
            67,
            319,
            447,
        ),  # shmget shmat shmctl shmdt memfd_create memfd_secret
        "semaphores and messages": (64, 65, 66, 220, 68, 69, 70, 71, 240, 241),  # semget ... msgctl mq_open mq_unlink
        "keyrings": (248, 249, 250),
        "locks and events of shared files": (73, 253, 254, 294, 300, 301),  # flock inotify_* fanotify_*
        "other processes": (101, 310, 311, 312, 438, 440, 448),  # ptrace process_vm_* kcmp pidfd_getfd process_m*
        "the kernel": (
            321,
            323,
            298,
            425,
            426,
            427,
            175,
            313,
            176,
            246,
            320,
            103,
            169,
        ),  # bpf userfaultfd perf io_uring
        "mounts and namespaces": (165, 166, 155, 272, 308, 303, 304, 428, 429, 430, 431, 432, 433, 442),
    },
    "aarch64": {
        "memory outside of the limits": (194, 195, 196, 197, 279, 447),
        "semaphores and messages": (190, 191, 192, 193, 186, 187, 188, 189, 180, 181),
        "keyrings": (217, 218, 219),
        "locks and events of shared files": (32, 26, 27, 262, 263),
        "other processes": (117, 270, 271, 272, 438, 440, 448),
        "the kernel": (280, 282, 241, 425, 426, 427, 105, 273, 106, 104, 294, 116, 142),
        "mounts and namespaces": (40, 39, 41, 97, 268, 264, 265, 428, 429, 430, 431, 432, 433, 442),
    },
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the architecture of a system call, as the kernel names it
X32 = 0x40000000  # system calls from this number on belong to another ABI of x86_64
SOCKET, FCNTL = {"x86_64": (41, 53), "aarch64": (198, 199)}, {"x86_64": 72, "aarch64": 25}
FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink: a network namespace holds these, and not vsock
COMMANDS = (5, 36, 1024, 1026)  # F_GETLK F_OFD_GETLK F_SETLEASE F_NOTIFY: they tell of other calls' locks and accesses
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
KILL_PROCESS, ALLOW, ERRNO, EAFNOSUPPORT = 0x80000000, 0x7FFF0000, 0x50000, 97


def must(result: int) -> None:
    """Raise OSError if a call of libc has failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- server


def serve(folder: str, uids: range | None) -> None:
    """Serve calls until the control socket is closed.

    folder: where each call gets its own folder; "" inside bubblewrap. uids: user ids of the calls, shared if there are
    more calls than ids; None: calls run as the server's user.
    """
    for name in ("numpy.random", "sympy"):  # slow to load; every call inherits them
        with contextlib.suppress(Exception):
            __import__(name)
    for device in () if folder else DEVICES:  # writing to one does not change its times then, which other calls can see
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID
        must(LIBC.mount(None, f"/dev/{device}".encode(), None, flags, None))
    gc.collect()
    gc.freeze()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= OUTPUT:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control.send(b"ready")
    poll, calls, count = select.poll(), {}, 0  # calls: keyed by line and by process, while those are watched
    poll.register(control, select.POLLIN)
    while True:
        deadlines = [call.deadline for call in calls.values() if not call.over_time]
        wait = max(min(deadlines) - time.monotonic(), 0) * 1000 if deadlines else None
        # The control socket comes first, so descriptors of a new call cannot equal any that are closed in this loop.
        for descriptor, _ in poll.poll(wait):
            if descriptor in calls:
                call = calls.pop(descriptor)
                poll.unregister(descriptor)
                if descriptor == call.process:
                    call.end()
                    if calls.pop(call.line, None):
                        poll.unregister(call.line)
                    os.close(call.process)
                    os.close(call.line)
                else:  # the caller has hung up
                    call.kill()
            elif descriptor == control.fileno():
                message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
                if not message:  # the trainer has ended
                    shutil.rmtree(folder, ignore_errors=True)
                    return
                count += 1
                line, output = descriptors
                taken = {call.uid for call in calls.values()}
                uid = uids and next((uid for uid in uids if uid not in taken), uids[count % len(uids)])
                try:
                    call = start(line, output, float(message), folder, uid)
                except OSError as error:  # no process could be started: the caller sees its line closed
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
    """A running call. line: the socket to its caller; process, number: pidfd and process id of its runner or keeper."""

    def __init__(self, line: int, process: int, number: int, seconds: float, safe: bool, uid: int | None):
        self.line, self.process, self.number, self.safe, self.uid = line, process, number, safe, uid
        self.deadline, self.over_time = time.monotonic() + seconds, False

    def kill(self) -> None:
        """Kill the runner, or have the keeper kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL if self.safe else signal.SIGTERM)

    def end(self) -> None:
        """Report to the caller how the call ended: an exit code, -signal, or "timeout".

        The kernel ends all other processes of a PID namespace before its process 1.
        """
        code = os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])
        with contextlib.suppress(OSError):
            os.write(self.line, b"timeout" if self.over_time else str(code).encode())


def start(line: int, output: int, seconds: float, folder: str, uid: int | None) -> Call:
    """Fork a runner, in unsafe mode with a keeper. Returns the call."""
    safe = not folder
    itself = os.pidfd_open(os.getpid())
    if safe:
        must(LIBC.unshare(CLONE_NEWPID))  # the next fork is process 1 of a new namespace
    try:
        number = os.fork()
        if number == 0:
            child(keep if folder else run, line, output, seconds, folder, uid)
    finally:
        if safe:
            must(LIBC.setns(itself, CLONE_NEWPID))
        os.close(itself)
    return Call(line, os.pidfd_open(number), number, seconds, safe, uid)


def child(work, line: int, output: int, *rest) -> None:
    """Run work(line, output, ...) in a forked process and exit with the status that it returns."""
    status = 1
    try:
        status = work(line, output, *rest)
    except OSError as error:  # before the code began: a missing privilege
        os.write(output, str(error).encode())
    finally:
        os._exit(status)


# ---- keeper


def keep(line: int, output: int, seconds: float, folder: str, uid: int | None) -> int:
    """Run the call in a runner, kill the processes that it leaves, and end as it did: with its exit code or signal."""
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
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def sweep(group: int) -> None:
    """Kill the runner's process group, then the processes that left the group and are now children of this process."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):  # no child is left, or this kernel does not list children
        while True:
            for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


# ---- runner


def run(line: int, output: int, seconds: float, folder: str, uid: int | None) -> int:
    """Run a call. Returns its exit code, ENDED or RAISED. folder: for its files; "" in a sandbox, which gets a /tmp."""
    os.setsid()  # signals that the code sends to its own group reach no other process
    must(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if not folder:
        must(LIBC.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET))
        # Inside a chroot no user namespace can be created. In one, the code could mount the trainer's control group.
        must(LIBC.mount(b"/", b"/call", None, MS_BIND | MS_REC, None))
        os.chroot("/call")
        must(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, TMP))
    os.chdir(folder or "/tmp")
    os.dup2(output, OUTPUT)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # opened anew: other calls could see the flags of a shared one
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


def limit(seconds: float, processes: int) -> None:
    """Set the resource limits of this process."""
    limits = LIMITS | {resource.RLIMIT_NPROC: processes, resource.RLIMIT_CPU: int(seconds) + 2}
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop(uid: int | None) -> None:
    """Drop all privileges permanently."""
    for capability in range(CAPABILITIES):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    must(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    must(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    must(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # again: the change of user has cleared it
    machine = os.uname().machine
    if machine in REFUSED:
        LIBC.syscall(KEYCTL[machine], JOIN_SESSION_KEYRING, 0)  # a new keyring instead of the trainer's
        refuse(machine)


def refuse(machine: str) -> None:
    """Have the kernel refuse what REFUSED lists, other families of sockets and other ABIs, permanently (seccomp)."""
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06  # instructions: a word of the call's data, two jumps, return
    refused = (back, 0, 0, ERRNO | errno.EPERM)
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[machine]), (back, 0, 0, KILL_PROCESS)]
    program += [(load, 0, 0, 0), (at_least, 0, 1, X32), refused]
    for numbers in REFUSED[machine].values():
        for number in numbers:
            program += [(equal, 0, 1, number), refused]
    for number in SOCKET[machine]:  # the first argument is the family
        others = [(equal, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
        block = [(load, 0, 0, 16), *others, (back, 0, 0, ERRNO | EAFNOSUPPORT), (back, 0, 0, ALLOW)]
        program += [(equal, 0, len(block), number), *block]
    block = [(load, 0, 0, 24)]  # the second argument is the command
    for command in COMMANDS:
        block += [(equal, 0, 1, command), refused]
    program += [(equal, 0, len(block), FCNTL[machine]), *block, (back, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    must(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0))


def session(earlier: list[str], code: str) -> int:
    """Rebuild a session from earlier calls, discarding their output, and run `code`. Returns ENDED or RAISED."""
    # A module in sys.modules, because pickle, for example, looks there for the code's classes.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    namespace = module.__dict__
    sys.argv = [""]
    sys.set_int_max_str_digits(DIGITS)
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    for number, text in enumerate(earlier, 1):
        with contextlib.suppress(BaseException):  # statements before an exception count, as they did the first time
            execute(text, f"<call {number}>", namespace)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(OUTPUT, stream)
    os.close(OUTPUT)
    status = ENDED
    try:
        execute(code, f"<call {len(earlier) + 1}>", namespace)
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


def execute(text: str, name: str, namespace: dict) -> None:
    """Run code as a notebook does: if the last statement is an expression, print its value."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for the lines in tracebacks
    body = ast.parse(text, name).body
    last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), namespace)
    exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), namespace)


def show(error: BaseException) -> None:
    """Write the traceback, without frames of this file, to file descriptor 2."""
    try:
        trace = error.__traceback__
        while trace and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES)
        text = "".join(lines).encode("utf-8", "backslashreplace")
    except BaseException:  # for example when no memory is left
        text = type(error).__name__.encode()
    while text:
        text = text[os.write(2, text) :]


if __name__ == "__main__":
    folder, first_uid, packages = sys.argv[1:]
    if packages:
        sys.path.append(packages)
    serve(folder, range(int(first_uid), int(first_uid) + UIDS) if first_uid else None)
