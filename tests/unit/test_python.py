"""The Python tool: its answers, and that a model's code cannot reach the machine, the trainer or another call."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from common import run
from common.environment import Failed, Lost
from tools import bubblewrap, python
from tools.python import Python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
SECRET = "token-7391"  # in the environment of the process that has the tool
MARK = {"TEST_OF_PYTHON": str(os.getpid())}  # in the environment of all processes that the tool starts for these tests
SANDBOXES = ("bubblewrap", "bubblewrap, normal user", "pydantic-monty")

# A trainer in a separate process: a line of JSON for each call.
TRAINER = """
import json, signal, sys
sys.path.insert(0, sys.argv[1])
from common import run
from common.environment import Failed, Lost
from tools import bubblewrap, python
run.notice = lambda text: None
signal.signal(signal.SIGINT, lambda *_: None)
ways, mark, environment = python._ways, json.loads(sys.argv[3]), python._environment
python._environment = lambda: environment() | mark
python._ways = lambda unsafe: [way for way in ways(unsafe) if way[0].startswith(sys.argv[2])]
try:
    tool = python.Python(10.0, unsafe=sys.argv[2] == "--unsafe_python")
except SystemExit as stop:
    print(json.dumps(["refused", str(stop)]), flush=True)
    sys.exit()
print(json.dumps(["ready", tool.mode]), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    tool.timeout = call["timeout"]
    try:
        answer = ["ok", tool(call["code"], call["earlier"])]
    except Failed as failed:
        answer = [failed.status, str(failed), failed.lost]
    print(json.dumps(answer), flush=True)
"""


class Trainer:
    """The tool in another process, which may run as another user."""

    def __init__(self, mode, interpreter=sys.executable, before=()):
        command = [*before, interpreter, "-c", TRAINER, str(ROOT), mode, json.dumps(MARK)]
        path = os.pathsep.join([*(str(Path(binary).parent) for binary in bubblewrap.binaries()), os.environ["PATH"]])
        environment = os.environ | {"TOKEN": SECRET, "PATH": path} | MARK
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.lock, self.timeout = threading.Lock(), 10.0
        status, text = json.loads(self.process.stdout.readline() or '["refused", "it did not start"]')
        if status == "refused":
            pytest.skip(text)

    def __call__(self, code, earlier=()):
        with self.lock:
            self.ask(code, earlier)
            status, text, *lost = json.loads(self.process.stdout.readline())
        if status == "ok":
            return text
        raise Failed(text, status, *lost)

    def ask(self, code, earlier=()):
        self.process.stdin.write(json.dumps({"code": code, "earlier": list(earlier), "timeout": self.timeout}) + "\n")
        self.process.stdin.flush()


def as_nobody():
    """Return (words before a command, an interpreter that a normal user may start)."""
    if os.geteuid() != 0:
        pytest.skip("the tests run as a normal user: so does the mode before this one")
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is needed to become a normal user")
    before = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    test = f"import sys, os; assert sys.version_info >= (3, 11) and os.listdir({str(ROOT / 'tools')!r})"
    for interpreter in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        command = [*before, interpreter, "-c", test]
        if os.path.exists(interpreter) and subprocess.run(command, capture_output=True).returncode == 0:
            return before, interpreter
    pytest.skip("no Python 3.11 here that a normal user may start")


def made(mode):
    if mode == "bubblewrap, normal user":
        before, interpreter = as_nobody()
        return Trainer("bubblewrap", interpreter, before)
    with pytest.MonkeyPatch.context() as patch:
        ways, environment = python._ways, python._environment
        patch.setattr(python, "_environment", lambda: environment() | MARK)
        patch.setattr(python, "_ways", lambda unsafe: [way for way in ways(unsafe) if way[0].startswith(mode)])
        # monty's workers inherit all of it, but the code cannot read it.
        for name, value in ({"TOKEN": SECRET} | MARK).items():
            patch.setenv(name, value)
        try:
            return Python(10.0, unsafe=mode == "--unsafe_python")
        except SystemExit as stop:
            bare = ["--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "true"]
            able = any(subprocess.run([b, *bare], capture_output=True).returncode == 0 for b in bubblewrap.binaries())
            assert not (mode == "bubblewrap" and able), f"bubblewrap works here, and the sandbox does not: {stop}"
            assert mode != "--unsafe_python", str(stop)
            pytest.skip(str(stop))


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(one, marks=pytest.mark.sweep if "normal" in one else ()) for one in SANDBOXES),
        "--unsafe_python",
    ],
)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def tool(mode):
    before = ours()
    tool = made(mode)
    yield tool
    if isinstance(tool, Trainer):
        tool.process.kill()
        tool.process.wait()
    else:
        tool.backend.close()
    assert eventually(lambda: ours() <= before), "a process is left"


def ours():
    """Return the ids of living processes that carry the mark."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if MARK.items() <= process.environ().items():
                found.add(process.pid)
    return found


def alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def kill(server):
    """Kill a server with all its descendants."""
    server = psutil.Process(server)
    dying = [*server.children(recursive=True), server]
    for process in dying:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not psutil.wait_procs(dying, timeout=10)[1]


def eventually(condition):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def status_and_text(tool, code, earlier=(), timeout=10.0):
    tool.timeout = timeout
    try:
        return "ok", tool(code, earlier)
    except Failed as failed:
        return failed.status, str(failed)
    finally:
        tool.timeout = 10.0


# ---- answers


def test_printed_text_and_the_value_of_a_last_expression_are_shown(tool):
    assert tool("print('a')\nx = 3\nx * 2") == "a\n6"
    assert tool("x = 1") == "(no output)"
    assert tool("None") == "(no output)"
    assert tool("'ü'") == "'ü'"
    assert tool("(3,\n 4)  # ü\n# end") == "(3, 4)" == tool("'ü'; (3, 4) ;")
    assert tool("class A:\n    def __repr__(self):\n        return 'an A'\nA()") == "an A"
    assert tool("range(3)") == "range(0, 3)"


def test_a_session_is_rebuilt_from_its_earlier_calls(tool):
    earlier = ["import math\nx = 2\nprint('unseen')", "def twice(y):\n    return 2 * y\ny = 5\n1 / 0\ny = 6"]
    assert tool("print(twice(x) + y, math.pi > 3)", earlier) == "9 True"


def test_a_failed_call_reports_whether_its_session_is_lost(tool, mode):
    for code, lost in (("x = 1\n1 / 0", False), (LOOP, True), (LEAVE_AT_ONCE, True), ("exit(1)", False)):
        if mode != "pydantic-monty" or "exit" not in code:
            tool.timeout = 0.4 if code == LOOP else 10.0
            with pytest.raises(Failed) as failed:
                tool(code)
            tool.timeout = 10.0
            assert failed.value.lost == lost, code


def test_code_that_exits_with_code_0_is_an_error(tool, mode):
    """Exit early: the rebuilt session would end before the next call, like a success without output."""
    if mode == "pydantic-monty":
        pytest.skip("it cannot exit")
    for leave in ("os._exit(0)", "os.execvp('true', ['true'])", "if os.fork(): os._exit(0)"):
        with pytest.raises(Failed, match="42\nError: the process ended with exit code 0") as failed:
            tool(f"import os\nprint(42, flush=True)\n{leave}\nimport time\ntime.sleep(5)")
        assert failed.value.lost, leave


def test_earlier_calls_cannot_close_or_write_to_the_output_of_the_next(tool, mode):
    if mode == "pydantic-monty":
        pytest.skip("it has no handles")
    write = "import os\nfor n in range(3, 64):\n    try: os.write(n, b'forged')\n    except OSError: pass"
    assert tool("print(x)", ["import os\nos.closerange(3, 64)\nx = 5", write]) == "5"


def test_code_that_closes_its_output_may_run_until_its_timeout(tool, mode, monkeypatch):
    if mode in ("bubblewrap, normal user", "pydantic-monty"):
        pytest.skip("this process has no server")
    monkeypatch.setattr(python, "GRACE", 0.2)
    assert tool("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1)") == "(no output)"


def test_calls_at_the_same_time_do_not_share_a_user_id(tool, mode):
    if mode != "bubblewrap" or os.geteuid() != 0:
        pytest.skip("calls have separate user ids only as root")
    threads = "import threading, time\nstarted = [threading.Thread(target=time.sleep, args=({},)) for _ in range({})]\n"
    threads += "for thread in started: thread.start()"
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(tool, threads.format(4, 14) + "\ntime.sleep(4)")
        time.sleep(0.2)
        while not busy.done():  # often enough to reach each user id again
            assert tool(threads.format(0, 2)) == "(no output)"  # would exceed the limit of a user id with 15 threads
        assert busy.result() == "(no output)"


def test_a_tool_that_cannot_start_again_ends_the_run(mode, monkeypatch, tmp_path):
    if mode == "bubblewrap, normal user":
        pytest.skip("this process has no server")
    monkeypatch.setattr(python, "AGAIN", (0.01, 0.01))
    if mode == "pydantic-monty":
        binary = shutil.copy(shutil.which("monty", path=Path(sys.executable).parent), tmp_path / "monty")
        monkeypatch.setenv("MONTY_BIN", str(binary))
    tool = made(mode)
    try:
        if mode == "pydantic-monty":
            with tool.backend.pool.checkout() as session:
                os.kill(session.worker_pid, signal.SIGKILL)
            Path(binary).unlink()
        else:
            command, tool.backend.command = tool.backend.command, ["false"]
            kill(tool.backend.process.pid)
        with pytest.raises(Lost, match="does not start again"):
            tool("1")
        if mode != "pydantic-monty":  # it works again as soon as it can start
            tool.backend.command = command
            assert tool("1") == "1"
    finally:
        tool.backend.close()


def test_random_numbers_are_the_same_when_a_session_is_rebuilt(tool):
    first = tool("import random\nprint(random.random())")
    assert tool("print(x)", ["import random\nx = random.random()"]) == first


def test_siblings_do_not_see_each_other(tool):
    leave = (
        "import random\nx = 1\ntry:\n    random.x = 1\n    open('seen', 'w').write('x')\nexcept Exception:\n    pass"
    )
    assert tool(leave) == "(no output)"
    for look in ("print(x)", "import random\nprint(random.x)", "print(open('seen').read())"):
        assert status_and_text(tool, look)[0] == "error", look


def test_an_exception_is_shown_with_a_short_traceback_of_the_code_alone(tool, mode):
    status, text = status_and_text(tool, "print('before')\ndef f():\n    return 1 / 0\nf()")
    assert status == "error" and text.startswith("before\nTraceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero\n" if mode != "pydantic-monty" else "division by zero")
    assert "inside.py" not in text and text.count("File ") == 2 and "return 1 / 0" in text
    status, text = status_and_text(tool, "x = (")
    assert status == "error" and "SyntaxError" in text and "inside.py" not in text


def test_calls_from_many_threads_get_their_own_answers(tool):
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: tool("print(x * x)", [f"x = {i}"]), range(48)))
    assert answers == [str(i * i) for i in range(48)]


def test_an_object_s_address_is_the_same_in_every_process(tool, mode):
    if mode == "pydantic-monty":
        pytest.skip("its map is a list")
    assert tool("map(int, '12')") == "<map object at 0x0>" == tool("map(int, '12')", ["x = [1] * 1000"])


def test_modules_that_the_server_has_not_loaded_can_be_imported_and_devices_opened(tool, mode):
    if mode == "pydantic-monty":
        pytest.skip("it has neither")
    code = "import sys\nnew = {'wave', 'json.tool', 'colorsys'} - set(sys.modules)\nimport wave, json.tool, colorsys"
    assert (
        tool(f"{code}\nprint(len(new) > 0, len(open('/dev/zero', 'rb').read(8)), repr(open('/dev/null').read()))")
        == "True 8 ''"
    )


def test_installed_packages_can_be_used_in_cpython(tool, mode):
    if mode == "pydantic-monty":
        pytest.skip("it has no packages")
    status, text = status_and_text(tool, "import numpy\nprint(numpy.ones((300, 300)).sum())")
    assert text == "90000.0" or "No module named 'numpy'" in text


# ---- attacks

LOOP = "while True:\n    pass"
LEAVE_AT_ONCE = "import os\nos._exit(3)"
RECURSION = "def f(n):\n    return f(n + 1)\nf(0)"
LEAVE = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "98765"])
    os._exit(0)
os.wait()
print("left")
"""
ATTACKS = {  # name: (code, the statuses it may end with)
    "infinite loop": (LOOP, {"timeout"}),
    "sleep": ("import time\ntime.sleep(1000)", {"timeout"}),
    "loop that takes no signal": (
        f"import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n{LOOP}",
        {"timeout", "error"},
    ),
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        {"timeout", "error"},
    ),
    "10 GB at once": ("x = bytearray(10 * 2**30)", {"error"}),
    "10 GB bit by bit": ("x = []\nwhile True:\n    x.append('x' * 10**6 + str(len(x)))", {"error", "timeout"}),
    "output flood": ("while True:\n    print('x' * 1000)", {"error", "timeout"}),
    "one large file": ("with open('f', 'wb') as f:\n    while True:\n        f.write(bytes(2**20))", {"error"}),
    "disk fill": (
        "n = 0\nwhile True:\n    n += 1\n    with open(f'/tmp/{n}', 'wb') as f:\n        f.write(bytes(2**20))",
        {"error"},
    ),
    "many files": ("n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'w')", {"error"}),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 5)", {"error"}),
    "home folder": (f"import os\nos.listdir({str(Path.home())!r})", {"error"}),
    "repository": (f"import os\nos.listdir({str(ROOT)!r})", {"error"}),
    "environment": ("import os\nprint(dict(os.environ))", {"ok", "error"}),
    "environment of the parent": ("print(open('/proc/1/environ').read())", {"error"}),
    "kernel settings": ("open('/proc/sys/kernel/core_pattern', 'w').write('x')", {"error"}),
    "writing to the system": ("open('/usr/x', 'w')", {"error"}),
    "mounting": (
        "import ctypes\nif ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None): raise OSError",
        {"error"},
    ),
    "daemon": (LEAVE, {"ok", "error"}),
    "killing its parent": ("import os\nos.kill(os.getppid(), 9)\nprint('alive')", {"ok", "error"}),
    "killing everything": ("import os\nos.kill(-1, 9)\nprint('alive')", {"ok", "error"}),
    "killing itself": ("import os\nos.kill(os.getpid(), 9)\nos.abort()", {"error"}),
    "crash": ("import ctypes\nctypes.string_at(0)", {"error"}),
    "user namespace": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
        {"error"},
    ),
    "leaving at once": (LEAVE_AT_ONCE, {"error"}),
    "forged answers": (
        "import os\nfor n in range(3, 300):\n    try: os.write(n, b'0')\n    except OSError: pass",
        {"ok", "error"},
    ),
    "closed output": ("import sys, os\nsys.stdout.close()\nos.close(1)\nos.close(2)", {"ok", "error"}),
    "thread that stays": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
        {"ok", "error"},
    ),
    "deep recursion": (RECURSION, {"error"}),
    "bottomless recursion": (f"import sys\nsys.setrecursionlimit(10**9)\n{RECURSION}", {"error", "timeout"}),
    "deeply nested code": ("(" * 100_000, {"error"}),
    "small value with a text without end": ("x = 0\nfor i in range(60):\n    x = [x, x]\nx", {"error", "timeout"}),
    "huge integer": ("print(7 ** 10**6)", {"error"}),
    "input": ("input()", {"error"}),
    "half a character": ("print('\\ud800')", {"ok"}),
    "half a character in the code": ("print('\ud800')", {"ok", "error"}),
}
NEED_A_SANDBOX = {  # attacks that do harm without a sandbox
    "disk fill",
    "many files",
    "network",
    "home folder",
    "repository",
    "environment of the parent",
    "kernel settings",
    "writing to the system",
    "mounting",
    "user namespace",
    "killing everything",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_tool_survives(tool, mode, attack):
    if mode == "--unsafe_python" and (attack in NEED_A_SANDBOX or attack == "fork bomb" and os.geteuid() == 0):
        pytest.skip("without a sandbox this would do harm")
    before = ours()
    code, ends = ATTACKS[attack]
    status, text = status_and_text(tool, code, timeout=0.4 if "timeout" in ends else 10.0)
    assert status in ends, (status, text[-500:])
    assert len(text) < 21_000 and SECRET not in text
    assert tool("print(1)") == "1"
    assert eventually(lambda: ours() <= before), "a process is left"


def test_the_local_network_cannot_be_reached(tool, mode):
    if mode == "--unsafe_python":
        pytest.skip("it has the network")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, _ = status_and_text(tool, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
        assert status == "error"


def test_a_repository_below_usr_is_hidden(monkeypatch):
    place = Path("/usr/share")
    assert list(place.iterdir())
    monkeypatch.setattr(bubblewrap, "ROOT", place)
    tool = made("bubblewrap")
    assert tool("import os\nos.listdir('/usr/share'), os.listdir('/usr/bin') != []") == "([], True)"
    # Read-only, because calls would share its files.
    assert tool("import os\nbool(os.statvfs('/usr/share').f_flag & os.ST_RDONLY)") == "True"
    tool.backend.close()


def test_an_endless_earlier_call_times_out(tool):
    assert status_and_text(tool, "print(1)", [LOOP], timeout=0.4)[0] == "timeout"


def test_the_start_and_the_end_of_a_long_output_are_kept(tool):
    text = tool("print('first')\nfor i in range(20000):\n    print('middle')\nprint('last')")
    assert text.startswith("first\n") and text.endswith("last") and "bytes left out" in text and len(text) < 21_000


def test_a_server_that_dies_is_replaced_also_from_a_thread_that_ends(tool, mode):
    if mode in ("bubblewrap, normal user", "pydantic-monty"):
        pytest.skip("this process has no server")
    kill(tool.backend.process.pid)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: tool("print(1)"), range(8))) == {"1"}
    time.sleep(0.1)
    pid = tool.backend.process.pid
    assert tool("print(1)") == "1" and tool.backend.process.pid == pid


# ---- start and end


@pytest.mark.parametrize("mode", ["bubblewrap", "pydantic-monty", "--unsafe_python"])
def test_a_killed_trainer_leaves_no_process_and_ctrl_c_ends_no_call(mode):
    before = ours()
    trainer = Trainer(mode)
    os.killpg(trainer.process.pid, signal.SIGINT)
    assert trainer("print(1)") == "1"
    trainer.timeout = 1.0  # a busy worker of monty notices a dead trainer only at its timeout
    trainer.ask(LOOP if mode == "pydantic-monty" else LEAVE + LOOP)
    time.sleep(0.3)
    started = psutil.Process(trainer.process.pid).children(recursive=True)
    trainer.process.kill()
    trainer.process.wait()
    assert started and eventually(lambda: not any(map(alive, started)) and ours() <= before), "a process is left"


def test_the_start_reports_the_sandbox_and_why_there_is_no_better_one(monkeypatch, capsys, tmp_path):
    pytest.importorskip("pydantic_monty")
    binary = tmp_path / "bwrap"
    binary.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    binary.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "binaries", lambda: [str(binary)])
    notices = []
    monkeypatch.setattr(run, "notice", notices.append)
    Python(1.0).backend.close()
    assert len(notices) == 1 and notices[0].startswith("python: pydantic-monty")
    assert "No permissions to create" in notices[0]
    Python(1.0, unsafe=True).backend.close()
    assert "NO SANDBOX" in notices[1]


def test_without_a_sandbox_it_refuses_to_start(monkeypatch):
    monkeypatch.setattr(bubblewrap, "binaries", lambda: [])
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(SystemExit) as stop:
        Python(1.0)
    text = str(stop.value)
    assert "bubblewrap: not installed" in text and "pydantic-monty" in text and "--unsafe_python" in text
    assert "\n" not in text


@pytest.fixture(scope="module")
def monty():
    """Return a tool on the interpreter without packages."""
    tool = made("pydantic-monty")
    yield tool
    tool.backend.close()


def test_an_error_that_only_looks_like_a_limit_of_the_interpreter_is_an_error(monty):
    for words, status in (("limit exceeded", "error"), ("no limit", "error")):
        with pytest.raises(Failed, match="TimeoutError") as failed:
            monty(f"raise TimeoutError({words!r})")
        assert (failed.value.status, failed.value.lost) == (status, False)


def test_names_of_the_session_and_of_the_tool_do_not_collide_in_monty(monty):
    assert monty("_", ["_ = 5", "1 + 1"]) == "5"
    assert monty("[1, 2]", ["print = repr = 3"]) == "[1, 2]"


def test_a_traceback_of_monty_has_the_lines_of_the_code(monty):
    with pytest.raises(Failed) as failed:
        monty("def f():\n    return 1 / 0\nf()")
    lines = str(failed.value).splitlines()
    at = lines.index("    f()")
    assert (
        lines[at - 1].endswith("line 3, in <module>")
        and lines[at + 1] == "    ~~~"
        and "__show" not in str(failed.value)
    )


def test_monty_takes_f_strings_of_python_3_12(monty):
    newer = """d = {"a": "x" * 5000}\nf"{d["a"]}\""""
    assert monty(newer).strip("'")[:100] == "x" * 100


def test_an_output_of_monty_beyond_16_mib_loses_the_session(monty):
    for code in (f"print('x' * {2**24 + 10})", f"'x' * {2**24 + 10}", f"print('x' * {2**24 + 10})\nprint('END')"):
        with pytest.raises(Failed, match="more than 16 MiB") as failed:
            monty(code)
        assert failed.value.lost and "END" not in str(failed.value)


def test_a_low_limit_on_open_files_is_raised_inside(monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        tool = made("bubblewrap")
        assert tool("print(1)") == "1"
        tool.backend.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_timeout_is_part_of_the_fingerprint():
    tools = [Python(timeout, unsafe=True) for timeout in (10.0, 10.0, 11.0)]
    prints = [tool.fingerprint for tool in tools]
    for tool in tools:
        tool.backend.close()
    assert prints[0] == prints[1] != prints[2]


def test_a_killed_server_without_a_sandbox_leaves_no_folder():
    tool = Python(10.0, unsafe=True)
    folder = Path(tool.backend.folder)
    assert folder.exists() and tool("open('kept', 'w').write('x')") == "1"
    tool.backend.process.kill()
    tool.backend.process.wait()
    tool.backend.close()
    assert not folder.exists()
