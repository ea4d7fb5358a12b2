"""The retriever client with a real server: the same text as Search, batches, and every kind of fault."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import retrieval_server as server
from retrieval_server import HANG, Control

from common.environment import Lost
from tools import search
from tools.search import PROBE, Retriever, Search

pytestmark = pytest.mark.slow

DOCUMENTS = [
    {"id": "0", "title": "Town", "text": "Homes of a person or two."},  # the probe finds it
    {"id": "1", "title": '"Ada" and "Bo"', "text": "Two lines about Ada:\nAda is  tall.\r\n"},
    {"id": "2", "title": "", "text": "Ada has no title."},
    {"id": "3", "title": "Ada has no text", "text": ""},
    *({"id": f"w{i}", "title": f"word{i}", "text": f"The number of word{i} is {i}."} for i in range(64)),
]
WORDS = [f"word{i}" for i in range(64)]


@pytest.fixture
def start():
    """Return retrieval_server.start for DOCUMENTS. Its servers are stopped at the end."""
    stops = []

    def start(control=None, port=0):
        address, stop = server.start(DOCUMENTS, control, port)
        stops.append(stop)
        return address, stop

    yield start
    for stop in stops:
        stop()


def ask(retriever, queries, threads=64):
    """Ask all queries at once. Returns a list of texts or exceptions."""

    def call(query):
        try:
            return retriever(query)
        except Exception as error:
            return error

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, queries))


def number(i):
    return f"Doc 1 (Title: word{i}) The number of word{i} is {i}."


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- answers


@pytest.mark.parametrize("shape", ["wrapped", "plain", "fields"])
def test_every_shape_reads_as_search_does(start, shape):
    address, _ = start(Control(shape))
    for topk in (1, 3):
        retriever, local = Retriever(address, topk, 10), Search(DOCUMENTS, topk)
        for query in ("Ada", "no title", "text", "word7", "number", "zzz", " ", "", "½ ☃ \n", "the"):
            assert retriever(query) == local(query)
    assert retriever("tall Ada").startswith(
        'Doc 1 (Title: "Ada" and "Bo") Two lines about Ada: Ada is tall.\nDoc 2 (Title: '
    )
    assert retriever("zzz") == retriever("") == "Nothing found."


@pytest.mark.parametrize(
    "item, line",
    [
        ({"document": {"contents": "Ada\nis tall\nand old"}}, "Doc 1 (Title: Ada) is tall and old"),
        ({"contents": '"Ada" \r\nis tall'}, "Doc 1 (Title: Ada) is tall"),
        ({"contents": '"Ada" Cole\nis tall'}, 'Doc 1 (Title: "Ada" Cole) is tall'),
        ({"contents": "no title"}, "Doc 1 (Title: ) no title"),
        ({"title": None, "text": "is tall", "contents": "other"}, "Doc 1 (Title: ) is tall"),
        (
            {"document": {"title": "Ada", "text": "half \ud83d a pair"}, "score": None},
            "Doc 1 (Title: Ada) half ? a pair",
        ),
    ],
)
def test_documents_of_other_servers(start, item, line):
    control = Control()
    retriever = Retriever(start(control)[0], 1, 10)
    control.fail = lambda queries: json.dumps({"result": [[item, item] for _ in queries]}).encode()
    assert retriever("Ada") == line  # no more than topk documents


def test_64_threads_get_their_own_answers_in_a_few_requests(start):
    control = Control(delay=0.1)
    retriever = Retriever(start(control)[0], 1, 10)
    assert ask(retriever, WORDS) == [number(i) for i in range(64)]
    assert sum(control.batches[1:]) == 64 and len(control.batches) < 16


def test_a_request_is_no_larger_than_its_limit(start, monkeypatch):
    monkeypatch.setattr(search, "BATCH", 10)
    control = Control(delay=0.05)
    retriever = Retriever(start(control)[0], 1, 10)
    assert ask(retriever, WORDS) == [number(i) for i in range(64)]
    assert max(control.batches) == 10


def test_no_thread_or_socket_is_left(start):
    control = Control()
    retriever = Retriever(start(control)[0], 1, 10)
    assert [retriever(word) for word in WORDS] == [number(i) for i in range(64)]
    assert control.batches == [1] * 65
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert ask(retriever, WORDS * 30, threads=16) == [number(i) for i in range(64)] * 30
    assert [retriever(word) for word in WORDS] == [number(i) for i in range(64)]
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_two_retrievers_do_not_mix(start):
    first, second = (Retriever(start()[0], topk, 10) for topk in (1, 2))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda retriever: ask(retriever, WORDS, threads=8), (first, second))
    assert one == [number(i) for i in range(64)] and all(text.startswith(line) for text, line in zip(two, one))


@pytest.mark.parametrize(
    "given, whole",
    [
        ("host:8000", "http://host:8000/retrieve"),
        (" http://host:8000/ ", "http://host:8000/retrieve"),
        ("https://host", "https://host/retrieve"),
        ("http://host/v1/search?key=1", "http://host/v1/search?key=1"),
        ("[::1]:80", "http://[::1]:80/retrieve"),
    ],
)
def test_an_address_is_completed(given, whole):
    assert search._whole(given) == whole


@pytest.mark.parametrize("address", ["", "http://", "host:port", "host:99999", "ftp://host/x", "http://[::1"])
def test_a_bad_address_is_refused(address):
    with pytest.raises(SystemExit, match="--retriever .*not an address such as"):
        Retriever(address, 1, 10)


def test_no_proxy_is_used_for_this_machine(start, monkeypatch):
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    address, _ = start()
    assert Retriever(address, 1, 10)("word5") == number(5)
    assert Retriever(address.replace("127.0.0.1", "localhost"), 1, 10)("word5") == number(5)


# ---- the start


@pytest.mark.parametrize(
    "path, fail, words",
    [
        ("/other", None, r'HTTP 404: {"detail":"Not Found"}\. Is the path right\?'),
        ("/retrieve", 500, "HTTP 500: Internal Server Error. Its log"),
        ("/retrieve", 503, "HTTP 503. Is the server behind"),
        ("/retrieve", HANG, "no answer within 0.5 s.*--tool_timeout"),
        (
            "/retrieve",
            b"<html>\n<body>Welcome</body>\n" + b"x" * 5000,
            r'wrong shape: <html> <body>Welcome</body> x{170,180}\. .*"contents"',
        ),
        ("/retrieve", b"", r"wrong shape: \(nothing\)"),
        ("/retrieve", b'{"result": []}', r'0 lists of documents where 1 were asked for: {"result": \[\]}'),
        ("/retrieve", b'{"result": [[], []]}', "2 lists of documents where 1 were"),
        ("/retrieve", b'{"result": {"0": []}}', "wrong shape"),
        ("/retrieve", b'{"result": [""]}', "wrong shape"),
        ("/retrieve", b'{"results": [[]]}', "wrong shape"),
        ("/retrieve", b'{"result": [[{"document": "Ada"}]]}', "wrong shape"),
        ("/retrieve", b'{"result": [[{"document": {"id": 1}}]]}', "wrong shape"),
        ("/retrieve", b'{"result": [[{"title": ["x"], "text": 1}]]}', "wrong shape"),
        ("/retrieve", b"[" * 100_000, "wrong shape"),
        ("/retrieve", b"\xff\xfe{}", "wrong shape"),
    ],
)
def test_an_unusable_server_is_refused_in_one_line_at_the_start(start, monkeypatch, path, fail, words):
    monkeypatch.setattr(search, "STARTING", (0.01, 0.01))
    address, _ = start(Control(fail=lambda queries: fail))
    with pytest.raises(SystemExit, match=words) as stopped:
        Retriever(address.replace("/retrieve", path), 3, 0.5 if fail is HANG else 10)
    message = str(stopped.value)
    assert "\n" not in message and len(message) < 700
    assert message.startswith(f"--retriever {address.replace('/retrieve', path)}: sent ")
    assert f'"queries": ["{PROBE}"], "topk": 3' in message


def test_a_server_that_is_not_there_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr(search, "STARTING", (0.01, 0.01))
    with pytest.raises(SystemExit, match="got connection refused. Start the server first") as stopped:
        Retriever(f"127.0.0.1:{free_port()}", 3, 10)
    assert "\n" not in str(stopped.value)
    with pytest.raises(SystemExit, match="Start the server first, or check host"):
        Retriever("http://no-such-host.invalid", 3, 10)


def test_a_server_that_is_just_starting_is_waited_for(start, monkeypatch):
    monkeypatch.setattr(search, "STARTING", (0.1,) * 100)
    port = free_port()
    threading.Timer(0.3, start, kwargs={"port": port}).start()
    assert Retriever(f"127.0.0.1:{port}", 1, 10)("word5") == number(5)


def test_a_probe_that_finds_nothing_is_a_warning(capsys):
    address, stop = server.start([{"id": "1", "title": "Ada", "text": "is tall"}])
    Retriever(address, 1, 10)
    stop()
    assert f"warning: retriever {address} finds nothing for '{PROBE}'" in capsys.readouterr().err


# ---- faults during a run


def test_a_server_that_is_killed_and_started_again_is_waited_for(tmp_path, capsys):
    corpus, port = tmp_path / "corpus.jsonl", free_port()
    corpus.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    command = [
        sys.executable,
        str(Path(server.__file__)),
        "--port",
        str(port),
        "--corpus",
        str(corpus),
        "--delay",
        "0.05",
    ]

    def serve():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().startswith("serving")
        return process

    process = serve()
    try:
        retriever = Retriever(f"127.0.0.1:{port}", 1, 10, patience=60)
        with ThreadPoolExecutor(1) as pool:
            results = pool.submit(ask, retriever, WORDS * 6, 16)
            time.sleep(0.3)
            assert not results.done()
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = serve()
            assert results.result() == [number(i) for i in range(64)] * 6
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    stderr = capsys.readouterr().err
    assert f"retriever http://127.0.0.1:{port}/retrieve: connection " in stderr
    assert "; trying again for 60 s\n" in stderr and "answers again" in stderr and "Error" not in stderr


def test_a_server_that_stays_away_is_lost_for_every_call(start):
    control = Control(delay=0.3)
    address, stop = start(control)
    retriever = Retriever(address, 1, 10, patience=1.0)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, retriever, WORDS, 8)
        time.sleep(0.1)
        began = time.monotonic()
        stop()
        errors = [answer for answer in answers.result() if isinstance(answer, Exception)]
    assert len(errors) > 50 and {type(error) for error in errors} == {Lost}
    assert 1.0 <= time.monotonic() - began < 30
    assert str(errors[0]) == f"the retriever {address} has given no results for 1 s: connection refused"
    control.batches.clear()
    start(control, port=int(address.split(":")[2].split("/")[0]))
    assert {str(error) for error in ask(retriever, WORDS)} == {str(errors[0])}  # a lost server is not asked again
    assert control.batches == []


def test_a_gateway_without_its_server_is_waited_for(start, capsys):
    control, seen = Control(), []

    def fail(queries):
        seen.append(queries)
        return (None, 503, 502, 504, 429)[len(seen)] if len(seen) < 5 else None

    retriever = Retriever(start(control)[0], 1, 10, patience=60)
    control.fail = fail
    assert retriever("word5") == number(5) and seen == [["word5"]] * 5
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("fault", [500, b'{"result": []}', HANG])
def test_a_query_that_the_server_cannot_answer_fails_alone(start, capsys, fault):
    control = Control(delay=0.01)
    retriever = Retriever(start(control)[0], 1, 0.3)
    control.fail = lambda queries: fault if "word3" in queries else None
    answers = ask(retriever, WORDS[:8])
    error = answers.pop(3)
    assert type(error) is RuntimeError and str(error).startswith("the retriever has no results for this query: ")
    assert answers == [number(i) for i in range(8) if i != 3]
    assert type(ask(retriever, ["word3"])[0]) is RuntimeError and retriever("word8") == number(8)
    assert retriever.since is None and not capsys.readouterr().err


@pytest.mark.parametrize(
    "fault, words, count",
    [
        (500, "s: HTTP 500: Internal Server Error", 1),
        (500, "s: HTTP 500: Internal Server Error", 20),
        (b"<html>", "wrong shape: <html>", 20),
        (b'{"result": []}', "0 lists of documents where ", 1),
        (HANG, "s: no answer within 0.2 s", 1),
        (HANG, "s: no answer within 0.2 s", 20),
    ],
)
def test_a_server_that_stops_answering_is_lost(start, fault, words, count):
    control = Control()
    retriever = Retriever(start(control)[0], 1, 0.2, patience=0.3)
    control.fail = lambda queries: fault
    began = time.monotonic()
    errors = ask(retriever, WORDS[:count])
    assert {type(error) for error in errors} == {Lost} and words in str(errors[0]) and "\n" not in str(errors[0])
    assert 0.3 <= time.monotonic() - began < 30


@pytest.mark.parametrize("fault", [500, HANG])
def test_a_passing_fault_is_hidden_from_the_callers(start, fault):
    control, seen = Control(), []
    retriever = Retriever(start(control)[0], 1, 0.3)
    control.fail = lambda queries: seen.append(queries) or (fault if len(seen) in (1, 4) else None)
    assert [retriever(word) for word in WORDS[:4]] == [number(i) for i in range(4)]
    seen.clear()
    assert ask(retriever, WORDS) == [number(i) for i in range(64)]


def test_a_batch_that_takes_too_long_is_asked_in_parts(start):
    control = Control(delay=0.05)
    retriever = Retriever(start(control)[0], 1, 0.3)
    control.fail = lambda queries: HANG if len(queries) > 20 else None
    assert ask(retriever, WORDS) == [number(i) for i in range(64)]
    assert max(control.batches) > 20


def test_a_server_that_works_one_request_at_a_time_is_asked_in_parts_too(start):
    """Send the probe while the server is busy with a timed-out batch: the same batch must not be sent again."""
    control, busy = Control(), threading.Lock()
    retriever = Retriever(start(control)[0], 1, 0.5, patience=20)

    def slow(queries):
        with busy:
            time.sleep(0.02 * len(queries))

    control.fail = slow
    assert ask(retriever, WORDS) == [number(i) for i in range(64)]
    assert max(control.batches) > 25


def test_a_server_that_answers_nothing_but_the_probe_is_lost(start):
    control = Control()
    retriever = Retriever(start(control)[0], 1, 5, patience=0.5)
    control.fail = lambda queries: None if queries == [PROBE] else 500
    errors = []
    end = time.monotonic() + 30
    while not any(isinstance(error, Lost) for error in errors):
        assert time.monotonic() < end
        errors += ask(retriever, WORDS[:4])
    assert sum(isinstance(error, RuntimeError) for error in errors) >= search.REJECTED - 1
    assert "answers its probe, but none of the last" in str(errors[-1])
    with pytest.raises(Lost):
        retriever("word1")


def test_an_exception_in_the_client_leaves_no_caller_waiting(start, monkeypatch):
    retriever = Retriever(start()[0], 1, 10)
    monkeypatch.setattr(retriever.session, "post", lambda *_, **__: 1 / 0)
    assert {type(error) for error in ask(retriever, WORDS)} == {ZeroDivisionError}
    monkeypatch.undo()
    assert retriever("word5") == number(5)
