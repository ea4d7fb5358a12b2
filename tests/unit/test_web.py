"""Hostile servers: whatever one answers, a client ends in time, with little memory and one clean sentence."""

import contextlib
import gc
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile_server
import pytest
import requests

from common.environment import Lost
from tools import search
from tools.search import RETRIES, Retriever
from tools.simulate import Simulator

pytestmark = pytest.mark.slow

TIMEOUT = 0.3
CLIENTS = {"retriever": "{}/{}", "simulator": "llm:{}/{}/v1#small"}
TWICE = [(client, kind) for client in CLIENTS for kind in hostile_server.KINDS]


@pytest.fixture(scope="module")
def hostile():
    """Yield the address of a server in another process, so that its memory is not counted."""
    process = subprocess.Popen(
        [sys.executable, hostile_server.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.stdin.close()
    process.wait()


def connect(client, address, path, timeout=TIMEOUT):
    words = CLIENTS[client].format(address, path)
    return Retriever(words, 3, timeout) if client == "retriever" else Simulator(words, 3, timeout, 10)


def memory(name):
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@contextlib.contextmanager
def little(mib):
    """Assert that the memory of this process grows by less than that many MiB at any time in the block."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < mib


@pytest.mark.parametrize("client, kind", TWICE)
def test_a_hostile_server_is_refused_at_the_start(hostile, monkeypatch, client, kind):
    monkeypatch.setattr(search, "STARTING", (0.01, 0.01))
    began = time.monotonic()
    with little(100), pytest.raises(SystemExit) as stopped:
        connect(client, hostile, kind)
    assert time.monotonic() - began < 3 * TIMEOUT + 10
    assert str(stopped.value).isprintable() and len(str(stopped.value)) < 1000


def test_a_server_that_turns_hostile_is_lost_in_time(hostile, capfd):
    """Ask all kinds at once, with as many clients: each waits most of the time."""

    clients = [connect(client, hostile, f"later-{kind}", 10) for client, kind in TWICE]

    def call(client):
        client.timeout, began = TIMEOUT, time.monotonic()
        try:
            answer = client("Who is Ada?")
        except (Lost, RuntimeError) as error:
            answer = error
        return answer, time.monotonic() - began

    with ThreadPoolExecutor(32) as pool:
        results = list(zip(TWICE, pool.map(call, clients)))
    late = [result for result in results if result[1][1] > RETRIES * TIMEOUT + 10]
    assert not late
    for pair, (answer, _) in results:
        assert type(answer) is Lost and str(answer).isprintable(), (pair, answer)
    err = capfd.readouterr().err
    assert err.replace("\n", "").isprintable() and "Traceback" not in err


def test_nothing_is_sent_to_another_address(hostile):
    seen = requests.get(f"{hostile}/seen", timeout=10).json()
    assert not [path for path in seen if path.startswith("/stolen")] and "/redirect_307" in seen


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", hostile_server.LARGE)
def test_a_large_answer_takes_little_memory(hostile, client, kind):
    with little(100), contextlib.suppress(SystemExit):
        asked = connect(client, hostile, kind)
        for _ in range(3):
            assert asked("Ada")
        assert not list(asked.session.cookies)
