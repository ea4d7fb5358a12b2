"""The retrieval server: Search-R1's protocol over BM25 and embeddings, with documents that stay on disk."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests
from test_retriever import DOCUMENTS, WORDS, ask, free_port, number

from tools import limits, serve
from tools.search import Retriever, Search, contents, read_corpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
HALF = {"id": "half", "title": "surrogate\npair", "text": "half \ud83d of it"}


def write(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write(tmp_path_factory.mktemp("corpus") / "documents.jsonl", [*DOCUMENTS, HALF])


@pytest.fixture(scope="module")
def local(corpus):
    return Search(corpus, 3)


def serving(index, args):
    """Run the application in a thread. Returns (address without path, stop)."""
    import uvicorn

    place = serve.listen(args)
    server = uvicorn.Server(
        uvicorn.Config(serve.application(index, args), log_level="warning", access_log=False, http=limits.Impatient)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{place.getsockname()[1]}"
    wait(address)

    def stop():
        server.should_exit = True
        thread.join()

    return address, stop


def wait(address):
    """Wait until a server answers. Returns the JSON of /health."""
    end = time.monotonic() + 120
    while True:
        try:
            return requests.get(f"{address}/health", timeout=10).json()
        except requests.ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(corpus):
    args = serve.Args(str(corpus), port=0)
    address, stop = serving(serve.open_index(args), args)
    yield address
    stop()


def post(address, **body):
    return requests.post(f"{address}/retrieve", json=body, timeout=30)


def start(*words, **more):
    """Start the command with a free port. Returns (process, address)."""
    port, env = free_port(), os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tools.serve", "--port", str(port), *words]
    return subprocess.Popen(words, cwd=ROOT, env=env, **more), f"http://127.0.0.1:{port}"


# ---- the protocol


@pytest.mark.parametrize("count", [1, 16, 256])
def test_a_client_of_search_r1_gets_the_results_of_search(server, local, count):
    rng = random.Random(count)
    queries = [f"{rng.choice(WORDS)} {rng.choice(['Ada', 'number', 'title', 'zzz'])}" for _ in range(count)]
    body = post(server, queries=queries, topk=3, return_scores=True).json()
    assert list(body) == ["result"] and len(body["result"]) == count
    for query, items in zip(queries, body["result"]):
        ((*found,),) = local.find_all([query], 3)
        assert [item["document"] for item in items] == [{"id": d["id"], "contents": contents(d)} for d, _ in found]
        assert [item["score"] for item in items] == [score for _, score in found]
        assert [item["score"] for item in items] == sorted((item["score"] for item in items), reverse=True)
    plain = post(server, queries=queries, topk=3).json()["result"]
    assert plain == [[item["document"] for item in items] for items in body["result"]]


def test_topk_comes_from_the_request_or_the_server_and_is_limited_by_the_documents(server):
    for asked, count in (({"topk": 1}, 1), ({"topk": 2}, 2), ({}, 3), ({"topk": None}, 3), ({"topk": 10**6}, 64)):
        assert len(post(server, queries=["number"], **asked).json()["result"][0]) == count
    assert post(server, queries=[]).json() == {"result": []}
    assert post(server, queries=["", "zzz", "word7"], topk=1).json()["result"] == [
        [],
        [],
        [{"id": "w7", "contents": '"word7"\nThe number of word7 is 7.'}],
    ]


def test_our_client_reads_our_server_as_search_does(server, local):
    retriever = Retriever(server, 3, 30)
    for query in ("Ada", "no title", "text", "word7", "surrogate pair", "zzz", " ", "", "½ ☃ \n", "the"):
        assert retriever(query) == local(query)
    assert retriever("surrogate") == "Doc 1 (Title: surrogate pair) half ? of it"


def test_64_threads_get_their_own_answers(server):
    assert ask(Retriever(server, 1, 30), WORDS * 4) == [number(i) for i in range(64)] * 4


def test_health_describes_the_index(server):
    assert wait(server) == {"status": "ok", "documents": len(DOCUMENTS) + 1, "kind": "bm25"}


def test_health_answers_while_64_requests_wait_for_the_index():
    """Send more requests than the server's 40 threads."""

    class Slow:
        documents, done = DOCUMENTS, threading.Event()

        def find_all(self, queries, topk):
            self.done.wait(30)
            return [[] for _ in queries]

    address, stop = serving(Slow(), serve.Args("", port=0))
    with ThreadPoolExecutor(64) as pool:
        try:
            answers = [pool.submit(post, address, queries=["Ada"]) for _ in range(64)]
            time.sleep(1)
            assert requests.get(f"{address}/health", timeout=5).json()["documents"] == len(DOCUMENTS)
            assert not any(answer.done() for answer in answers)
        finally:
            Slow.done.set()
        assert [answer.result().json() for answer in answers] == [{"result": [[]]}] * 64
    stop()


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "the body: "),
        (b"{", "the body: JSON"),
        (b"[]", "the body: "),
        (b"{}", "queries: Field required"),
        (b'{"queries": "Ada"}', "queries: .*list"),
        (b'{"queries": [1]}', "queries.*string"),
        (b'{"queries": ["Ada"], "topk": 0}', "topk: .*greater than or equal to 1"),
        (b'{"queries": ["Ada"], "topk": "many"}', "topk: .*integer"),
        (b'{"queries": ["Ada"], "return_scores": 7}', "return_scores: .*boolean"),
    ],
)
def test_a_bad_request_gets_an_explanation(server, body, words):
    answer = requests.post(f"{server}/retrieve", data=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert detail.endswith('Expected is {"queries": ["..."], "topk": 3, "return_scores": true}.') and "\n" not in detail
    assert re.match(words, detail), detail
    assert requests.get(f"{server}/retrieve", timeout=30).status_code == 405
    assert requests.post(f"{server}/other", json={}, timeout=30).status_code == 404


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"POST /ret",
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\n",
        b"POST /retrieve HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_half_a_request_is_held_for_a_limited_time(server, monkeypatch, begin):
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2])), 20) as half:
        half.sendall(begin)
        answer = b"".join(iter(lambda: half.recv(4096), b""))
    assert (b" 408 " in answer) == (b"Length" in begin) == bool(answer)
    assert post(server, queries=["Ada"]).status_code == 200


def test_a_request_is_limited_in_size(server, monkeypatch):
    for queries, more, status, detail in (
        (["x" * 2**24], {}, 413, "the body has more than 16777216 bytes"),
        (["Ada"] * 10_001, {}, 422, "queries: List should have at most 10000 items"),
        (["Ada"] * 2000, {"topk": 10**9}, 422, "topk: 2000 queries of 69 documents are more than 100000 documents"),
        (["word7"] * 2560, {}, 200, ""),
    ):
        answer = post(server, queries=queries, **more)
        assert answer.status_code == status and detail in answer.json().get("detail", "")


def test_numba_finds_the_same_scores(corpus, local):
    other = Search(corpus, 3, backend="numba")
    queries = ["It is not", *WORDS[:8], "Ada", "number", "", "zzz"]  # the first has stop words only
    for one, two in zip(local.find_all(queries, 3), other.find_all(queries, 3), strict=True):
        assert [score for _, score in one] == pytest.approx([score for _, score in two], rel=1e-6)
    for first in ("It is not", "", "zzz"):
        assert local.find_all([first, "word5"], 1) == other.find_all([first, "word5"], 1)
        assert [[d["id"] for d, _ in one] for one in other.find_all([first, "word5", first], 1)] == [[], ["w5"], []]
        assert local.find_all([first] * 2, 1) == other.find_all([first] * 2, 1) == [[], []]
    assert [other.find(word) for word in WORDS[:8]] == [local.find(word) for word in WORDS[:8]]


# ---- documents


def test_a_corpus_on_disk_equals_one_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "c.jsonl", [*DOCUMENTS, HALF])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n  \n", 3).rstrip(b"\n"))
    memory = read_corpus(path)
    for _ in range(2):  # the second time from the cache
        disk = serve.Corpus(path)
        assert len(disk) == len(memory) == 69 and list(disk) == memory and disk[68] == memory[-1]
        assert Search(disk, 1).fingerprint == Search(memory, 1).fingerprint
    with pytest.raises(IndexError):
        disk[69]
    assert len(list((tmp_path / "cache" / "corpora").glob("*/starts.npy"))) == 1


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "c.jsonl", DOCUMENTS[4:6])
    size, first = path.stat().st_size, serve.Corpus(path).fingerprint
    os.utime(write(path, DOCUMENTS[6:8]), ns=(1, 1))
    assert path.stat().st_size == size and serve.Corpus(path).fingerprint != first
    assert list(serve.Corpus(path)) == DOCUMENTS[6:8]


def test_the_corpus_of_search_r1_is_read(tmp_path):
    lines = [
        {"id": "0", "contents": '"Ada Cole"\nis tall\nand old'},
        {"id": 1, "contents": "no title"},
        {"id": "2", "contents": "Bo\nis short", "more": 1},
        {"id": "3", "title": "own title", "text": "own text", "contents": "other\nthings"},
    ]
    assert read_corpus(write(tmp_path / "c.jsonl", lines)) == [
        {"id": "0", "title": "Ada Cole", "text": "is tall\nand old"},
        {"id": "1", "title": "", "text": "no title"},
        {"id": "2", "title": "Bo", "text": "is short"},
        {"id": "3", "title": "own title", "text": "own text"},
    ]
    for bad, words in (({"contents": "x"}, "id is null"), ({"id": 9, "contents": ["x"]}, r'contents is \["x"\]')):
        with pytest.raises(ValueError, match=f"line 2: .*{words}"):
            read_corpus(write(tmp_path / "c.jsonl", [lines[0], bad]))


# ---- refusals


@pytest.mark.parametrize(
    "words, said",
    [
        ("--corpus missing.jsonl", r"--corpus missing.jsonl: no such file\. A corpus has"),
        ("--corpus {bad}", r"bad.jsonl, line 1: not a document"),
        ("--corpus {empty}", "empty.jsonl: the corpus is empty"),
        ("--corpus {good} --topk 0", "--topk 0: must be at least 1"),
        ("--corpus {good} --workers 0", "--workers 0: must be at least 1"),
        ("--corpus {good} --index x.index", "--index: only with --dense"),
        ("--corpus {good} --host nowhere.invalid", "--host nowhere.invalid --port 8000: .* Choose another port"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tmp_path, corpus, words, said):
    (tmp_path / "bad.jsonl").write_text('{"id": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    port = [] if "8000" in said else ["--port", str(free_port())]
    words = words.format(bad=tmp_path / "bad.jsonl", empty=tmp_path / "empty.jsonl", good=corpus)
    with pytest.raises(SystemExit, match=said) as stopped:
        serve.main([*words.split(), *port])
    assert "\n" not in str(stopped.value)


def test_a_port_in_use_is_reported_before_the_corpus_is_read(server, tmp_path):
    (tmp_path / "bad.jsonl").write_text("no document")
    with pytest.raises(SystemExit, match="Address already in use. Choose another port"):
        serve.main(["--corpus", str(tmp_path / "bad.jsonl"), "--port", server.rpartition(":")[2]])


@pytest.mark.parametrize("package, pin", [("faiss", "faiss-cpu=="), ("transformers", "transformers")])
def test_a_package_that_dense_needs_is_named(corpus, monkeypatch, package, pin):
    if package != "faiss":
        pytest.importorskip("faiss")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"--dense: {package} is not installed: .venv/bin/pip install {pin}"):
        serve.main(["--corpus", str(corpus), "--dense", "x", "--port", str(free_port())])


# ---- processes


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_is_killed_and_started_again_is_waited_for(corpus, workers):
    process, address = start("--corpus", str(corpus), "--workers", str(workers))
    port = address.rpartition(":")[2]
    try:
        wait(address)
        retriever = Retriever(address, 1, 30, patience=100)
        with ThreadPoolExecutor(1) as pool:
            done = threading.Event()

            def many():
                answers = []
                while not done.is_set() or len(answers) < 3:
                    answers.append(ask(retriever, WORDS, 8))
                return answers

            results = pool.submit(many)
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL)
            process.wait()
            until_free(port)
            process = subprocess.Popen(process.args, cwd=ROOT)
            wait(address)
            done.set()
            assert all(answers == [number(i) for i in range(64)] for answers in results.result())
    finally:
        process.terminate()
        assert process.wait() in (0, -signal.SIGTERM)
    until_free(port)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_workers_answer_as_soon_as_serving_is_printed(corpus, workers):
    process, address = start("--corpus", str(corpus), "--workers", workers, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == f"serving {corpus} (bm25) at {address}/retrieve\n"
        assert requests.get(f"{address}/health", timeout=10).json()["documents"] == len(DOCUMENTS) + 1
    finally:
        process.terminate()
        rest, _ = process.communicate()
    assert rest == ""  # the line is printed once


def until_free(port):
    """Wait until a port is free: a worker whose parent was killed takes a moment to end."""
    end = time.monotonic() + 30
    while True:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=5)
        except requests.ConnectionError:
            return
        except requests.ReadTimeout:
            pass
        assert time.monotonic() < end, "a process still listens"
        time.sleep(0.2)


# ---- embeddings


def bert(folder, seed=0):
    """Save a random BERT of 2 layers with a tokenizer of whole words. Returns its folder."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = sorted({w for d in DOCUMENTS for w in pre_words(contents(d))} | {"query", "passage", ":"})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    plain.normalizer, plain.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pre_words(text):
    from tokenizers import pre_tokenizers

    return [word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text.lower())]


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Return a function that opens a Dense index of DOCUMENTS with a random model in a folder of a given name."""
    pytest.importorskip("faiss")
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "c.jsonl", DOCUMENTS)

    def open_dense(name="small", seed=0, **args):
        model = bert(tmp_path / name, seed)
        return serve.open_index(serve.Args(str(path), dense=model, **args))

    return open_dense


def alone(index, text):
    """Compute the embedding of one text by itself with plain code."""
    import torch

    ids = index.tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
    with torch.no_grad():
        mean = index.model(**ids).last_hidden_state[0].mean(0)
    return (mean / mean.norm()).numpy()


@pytest.mark.parametrize(
    "name, prefixes, query, passage",
    [
        ("small", "auto", "", ""),
        ("e5-small", "auto", "query: ", "passage: "),
        ("multilingual-E5-base", "auto", "query: ", "passage: "),
        ("blue5", "auto", "", ""),
        ("small", "e5", "query: ", "passage: "),
        ("e5-small", "none", "", ""),
    ],
)
def test_dense_finds_the_largest_inner_products(dense, name, prefixes, query, passage):
    import numpy as np

    index = dense(name, prefixes=prefixes)
    vectors = np.stack([alone(index, passage + contents(d)) for d in DOCUMENTS])
    queries = ["The number of word5", "Ada", "has no title"]
    *results, nothing = index.find_all([*queries, " "], 3)
    assert nothing == []
    for text, found in zip(queries, results):
        scores = vectors @ alone(index, query + text)
        best = np.sort(scores)[::-1][:3]
        assert [score for _, score in found] == pytest.approx(best.tolist(), abs=1e-5)
        assert [scores[DOCUMENTS.index(d)] for d, _ in found] == pytest.approx(best.tolist(), abs=1e-5)


def test_embeddings_are_made_once_for_a_corpus_and_a_model(dense, tmp_path):
    def files():
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "dense").glob("*.faiss")}

    dense()
    made = files()
    assert len(made) == 1
    dense("again")
    assert files() == made  # the weights are the same, the folder is not
    dense("other", seed=1)
    dense("again", prefixes="e5")
    assert len(files()) == 3 and made.items() < files().items()


def test_a_given_index_is_used_when_it_fits(dense, tmp_path):
    import faiss

    own = dense()
    vectors = own.embed([contents(d) for d in DOCUMENTS])
    for name, rows in (("good.index", vectors), ("short.index", vectors[1:]), ("narrow.index", vectors[:, :16])):
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows.copy())
        faiss.write_index(index, str(tmp_path / name))
    given = dense(index=str(tmp_path / "good.index"))
    assert given.find_all(WORDS, 2) == own.find_all(WORDS, 2)
    for name, said in (("short.index", "67 vectors of 32"), ("narrow.index", "68 vectors of 16")):
        with pytest.raises(SystemExit, match=f"--index .*{name}: it holds {said} numbers; the corpus has 68 documents"):
            dense(index=str(tmp_path / name))
    with pytest.raises(SystemExit, match="--index .*c.jsonl: faiss cannot read it"):
        dense(index=str(tmp_path / "c.jsonl"))
    with pytest.raises(SystemExit, match="--index .*missing: faiss cannot read it"):
        dense(index=str(tmp_path / "missing"))


def test_a_folder_without_a_model_is_refused(dense, tmp_path, corpus):
    with pytest.raises(SystemExit, match="--dense .*: transformers could not load a model") as stopped:
        serve.open_index(serve.Args(str(corpus), dense=str(tmp_path)))
    assert "\n" not in str(stopped.value)


def test_only_workers_divide_the_threads_among_them(corpus, monkeypatch):
    """Embed the corpus in the parent with all threads (0), then start 4 workers with 2 threads each."""
    args, taken = serve.Args(str(corpus), dense="small", workers=4), []
    monkeypatch.setattr(serve, "Dense", lambda *given: taken.append(given[-1]) or Search(DOCUMENTS, 1))
    monkeypatch.setattr(serve, "threading", Mock())  # no thread that watches the parent
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv(serve.SETTINGS, json.dumps(asdict(args)))
    serve.ready(args)
    serve.worker()
    assert taken == [0, 2]


def test_dense_is_served_to_many_at_once(dense):
    index = dense()
    address, stop = serving(index, serve.Args("", dense="small", port=0, topk=2))
    try:
        alone = [items for (items,) in (index.find_all([word], 2) for word in WORDS)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda word: post(address, queries=[word], return_scores=True), WORDS))
        for answer, items in zip(answers, alone):
            got = answer.json()["result"][0]
            assert [item["document"]["id"] for item in got] == [d["id"] for d, _ in items]
            assert [item["score"] for item in got] == pytest.approx([score for _, score in items], abs=1e-6)
        assert wait(address) == {"status": "ok", "documents": 68, "kind": "dense: small"}
    finally:
        stop()
