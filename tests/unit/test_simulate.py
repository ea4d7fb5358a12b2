"""A search engine played by a language model: its requests, its share of noise, and its faults."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_retriever import free_port

from common.environment import Lost
from common.turns import Question
from tools import search, simulate
from tools.simulate import Simulator, noise, number, written

QUESTION = Question("q", "Who wrote the novel?", ["Ada Cole", "A. Cole"])


class Model(ThreadingHTTPServer):
    """An OpenAI-compatible server whose documents name the query and the seed. `fail` and `text` change its answers."""

    request_queue_size = 128

    def __init__(self, port=0, models=("small",)):
        self.models, self.asked, self.headers = models, [], []
        self.fail = lambda query: None
        self.text = lambda query, body: (
            f"Doc 1 (Title: {query}) By {body['seed']}.\nDoc 2 (Title: more) Two.\nDoc 3 Three."
        )
        self.finish, self.delay, self.now, self.most = "stop", 0.0, 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.address = f"llm:http://127.0.0.1:{self.server_address[1]}/v1"

    def stop(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # the client has disconnected


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.path == "/v1/models"
        self.send(200 if right else 404, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or body["model"] not in server.models:
            return self.send(404, {"error": {"message": f"no model {body['model']}"}})
        query = body["messages"][0]["content"].rpartition("Query: ")[2]
        with server.lock:
            server.asked.append(body)
            server.headers.append(self.headers)
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(server.delay)
        with server.lock:
            server.now -= 1
        fault = server.fail(query)
        if fault:
            return self.send(fault, {"error": {"message": "broken"}})
        message = {"role": "assistant", "content": server.text(query, body)}
        self.send(200, {"choices": [{"message": message, "finish_reason": server.finish}]})

    def send(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def model():
    server = Model()
    yield server
    server.stop()


def engine(model, steps=100, **more):
    more = dict(topk=3, timeout=10) | more
    simulator = Simulator(getattr(model, "address", model), steps=steps, **more)
    getattr(model, "asked", []).clear()
    return simulator


def prompt(model):
    return model.asked[-1]["messages"][0]["content"]


# ---- noise


def test_the_share_of_noise_rises_from_start_to_end_ever_faster():
    shares = [noise(step, 200) for step in (0, 50, 100, 150, 199, 200, 300)]
    assert shares == pytest.approx([0, 0.0690, 0.1667, 0.3047, 0.4954, 0.5, 0.5], abs=6e-5)
    shares = [noise(step, 200, 0.25, 0.75) for step in (0, 50, 100, 150, 200)]
    assert shares == pytest.approx([0.25, 0.3190, 0.4167, 0.5547, 0.75], abs=6e-5)
    assert noise(0, 0) == noise(1, 1) == 0.5


@pytest.mark.parametrize("step, share", [(0, 0.0), (100, 1 / 6), (200, 0.5)])
def test_as_many_answers_are_noisy_as_the_curriculum_says(model, step, share):
    simulator = engine(model, steps=200)
    noisy = sum(simulator.noisy(f"query {i}", step) for i in range(4000))
    assert abs(noisy - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5  # four deviations


def test_noise_depends_on_seed_query_and_step_and_on_no_process(model):
    one, same, other = engine(model, steps=10), engine(model, steps=10), engine(model, steps=10, seed=1)
    draws = [(f"query {i}", step) for i in range(100) for step in (8, 9)]
    noisy = [one.noisy(*draw) for draw in draws]
    assert noisy == [same.noisy(*draw) for draw in draws] != [other.noisy(*draw) for draw in draws]
    assert noisy[::2] != noisy[1::2]
    assert number("noise", 0, 3, "Ada") == 3189870860858634487  # Python's hash() would differ between processes


def test_the_prompt_asks_for_useful_or_noisy_documents(model):
    simulator = engine(model, steps=4)
    simulator.begin(4)
    for i in range(40):
        simulator(f"query {i}")
        noisy = simulator.noisy(f"query {i}", 4)
        assert (simulate.NOISY in prompt(model), simulate.USEFUL in prompt(model)) == (noisy, not noisy)
    assert {simulate.NOISY in body["messages"][0]["content"] for body in model.asked} == {True, False}
    simulator.begin(0)
    model.asked.clear()
    for i in range(40):
        simulator(f"query {i}")
    assert all(simulate.USEFUL in body["messages"][0]["content"] for body in model.asked)


# ---- a request and its answer


def test_the_same_query_is_the_same_request_for_a_step_and_another_in_the_next(model):
    texts = []
    for step in (1, 2, 1):
        simulator = engine(model)
        simulator.begin(step)
        texts.append(simulator("Ada"))
        (body,) = model.asked
        assert body["temperature"] == 0.8 and body["max_tokens"] == 600 and 0 <= body["seed"] < 2**31
        assert body["model"] == "small" and "Query: Ada" in prompt(model) and "3 short documents" in prompt(model)
    assert texts[0] == texts[2] != texts[1]
    assert texts[0].endswith("\nDoc 2 (Title: more) Two.\nDoc 3 (Title: ) Three.") and texts[0].startswith(
        "Doc 1 (Title: Ada) By "
    )


def test_an_answer_has_at_most_topk_documents_and_an_empty_query_none(model):
    simulator = engine(model, topk=1)
    assert simulator("Ada").count("\n") == 0
    model.asked.clear()
    assert simulator(" \n") == "Nothing found." and model.asked == []


def test_a_question_behind_the_query_shapes_the_documents(model):
    simulator = engine(model, steps=1)
    assert "Ada Cole" not in simulator("novel") and "Ada Cole" not in prompt(model)
    for step in (0, 1):
        simulator.begin(step)
        for i in range(20):
            query, noisy = f"novel {i}", simulator.noisy(f"novel {i}", step)
            assert "Cole" not in simulator(query, question=QUESTION)  # the policy must not see the gold
            assert QUESTION.text in prompt(model) and "Ada Cole / A. Cole" in prompt(model)
            assert (simulate.MAY in prompt(model), simulate.MAY_NOT in prompt(model)) == (not noisy, noisy)


@pytest.mark.parametrize(
    "text, documents",
    [
        ("Doc 1 (Title: Ada) is tall\nDoc 2 (Title: Bo) is\nshort", [("Ada", "is tall"), ("Bo", "is\nshort")]),
        (
            '<think>Doc 1 (Title: no) no</think>\n\n**Doc 1** (Title: "Ada (film)"): A film.',
            [("Ada (film)", "A film.")],
        ),
        ("Sure!\nDocument 1: Ada is tall.\n\nI hope it helps.", [("", "Ada is tall.")]),
        ("- doc 1 (title: Ada (a) Cole) is tall", [("Ada (a) Cole", "is tall")]),
        ("Doc 1 (Title: Ada)\nDoc 2 (Title: Bo) is short. See Doc 1.", [("Bo", "is short. See Doc 1.")]),
        ("Doc 1 (Title: Ada is tall", [("", "(Title: Ada is tall")]),
        ("I cannot do that.", []),
        ("<think>Doc 1 (Title: Ada) is tall", []),
        ("<think>\nDoc 1 (Title: Ada) is tall", []),  # thinking that was cut off
        ("<think>a</think>\n<think>\nDoc 1 (Title: Ada) is tall", []),
        ("a\n</think>\nDoc 1 (Title: Ada) is tall", [("Ada", "is tall")]),
        ("", []),
    ],
)
def test_completions_are_read_as_documents(text, documents):
    assert [(d["title"], d["text"]) for d in written(text)] == documents


@pytest.mark.parametrize(
    "text, documents",
    [
        ("Doc 1 (Title: Ada) is tall\nDoc 2 (Title: Bo) is sho", [("Ada", "is tall")]),
        ("Doc 1 (Title: Ada) is tall\n\nI hope", [("Ada", "is tall")]),
        ("Doc 1 (Title: no) no\n</think>Doc 1 (Title: Ada) is ta", []),
        ("I think of\nDoc 1 (Title: Ada) is ta", []),
    ],
)
def test_a_line_that_was_cut_off_is_no_document(model, text, documents):
    assert [(d["title"], d["text"]) for d in written(text, cut=True)] == documents
    simulator, model.finish = engine(model), "length"
    model.text = lambda query, body: text if query == "Ada" else "Doc 1 x\n"
    if documents:
        assert simulator("Ada") == "Doc 1 (Title: Ada) is tall"
    else:
        with pytest.raises(RuntimeError, match="no documents but: .* is ta$"):
            simulator("Ada")


def test_calls_of_many_threads_run_concurrently(model):
    simulator, model.delay = engine(model), 0.2
    words = [f"word{i}" for i in range(32)]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(simulator, words))
    assert all(text.startswith(f"Doc 1 (Title: {word}) ") for word, text in zip(words, texts))
    assert model.most > 8


def test_the_key_in_the_environment_is_sent(model, monkeypatch):
    monkeypatch.delenv(simulate.KEY, raising=False)
    engine(model)("Ada")
    assert "Authorization" not in model.headers[-1]
    monkeypatch.setenv(simulate.KEY, "secret")
    engine(model)("Ada")
    assert model.headers[-1]["Authorization"] == "Bearer secret"


# ---- the start


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1#small"])
def test_an_address_is_completed(model, end):
    base = model.address.removesuffix("/v1")
    assert engine(base + end).address == f"{base.removeprefix('llm:')}/v1/chat/completions"


def test_the_model_is_the_one_named_or_the_only_one(model):
    first = engine(model)
    assert first.model == "small"
    model.models = ("small", "large")
    large = engine(model.address + "#large")
    large("Ada")
    assert model.asked[-1]["model"] == "large"
    assert len({first.fingerprint, large.fingerprint, engine(model.address + "#large", span=(0, 0.7)).fingerprint}) == 3


@pytest.mark.parametrize(
    "models, end, text, said",
    [
        (("a", "b"), "", "Doc 1 x", r"/v1/models lists 2 models: a, b\. Name one after the address"),
        ((), "", "Doc 1 x", r"/v1/models lists 0 models\. Name one after the address"),
        (("a",), "#b", "Doc 1 x", r"got HTTP 404: .*no model b.* a model of that name: llm:http"),
        (("a",), "#a", "I cannot.", r"no documents but: I cannot\.\. Expected: lines such as 'Doc 1"),
        (("a",), "#a", None, r"no documents but: \(nothing\)\. Expected: lines"),
        (("a",), "#a", 7, r"got an answer of the wrong shape: .* Expected: {\"choices\""),
    ],
)
def test_an_unusable_server_is_refused_in_one_line_at_the_start(model, models, end, text, said):
    model.models, model.text = models, lambda query, body: text
    with pytest.raises(SystemExit, match=f"--retriever http://127.0.0.1:.*{said}") as stopped:
        engine(model.address + end)
    assert "\n" not in str(stopped.value)


def test_a_missing_server_and_a_bad_address_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(search, "STARTING", (0.01,))
    for end in ("", "#small"):
        with pytest.raises(SystemExit, match="connection refused. Start the server first"):
            engine(f"llm:http://127.0.0.1:{free_port()}{end}")
    for address in ("llm:", "llm:#small", "llm:ftp://x"):
        with pytest.raises(
            SystemExit, match=f"--retriever {address.partition('#')[0]}: not an address such as llm:http"
        ):
            engine(address)


# ---- faults during a run


def test_a_server_that_goes_and_comes_back_is_waited_for(capsys):
    model = Model()
    port = model.server_address[1]
    simulator = engine(model, patience=60)
    expected = simulator("Ada")
    model.stop()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(simulator, "Ada") for _ in range(8)]
        time.sleep(0.5)
        assert not any(answer.done() for answer in answers)
        again = Model(port)
        assert {answer.result() for answer in answers} == {expected}
    again.stop()
    stderr = capsys.readouterr().err
    assert "trying again for 60 s" in stderr and "answers again" in stderr


def test_a_server_that_stays_away_is_lost_for_every_call(model):
    simulator = engine(model, patience=0.5)
    model.fail = lambda query: 503
    with ThreadPoolExecutor(8) as pool:
        errors = [pool.submit(simulator, f"word{i}").exception() for i in range(8)]
    assert {type(error) for error in errors} == {Lost} and "has given no results for" in str(errors[0])
    model.fail = lambda query: None
    with pytest.raises(Lost):
        simulator("Ada")


def test_a_query_that_gets_no_documents_fails_alone(model):
    simulator = engine(model, patience=30)
    model.text = lambda query, body: "I cannot." if query == "bad" else f"Doc 1 (Title: {query}) x"

    def call(word):
        try:
            return simulator(word)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(call, ["a", "bad", "b", "c"]))
    assert texts.pop(1) == "the retriever has no results for this query: no documents but: I cannot."
    assert texts == [f"Doc 1 (Title: {word}) x" for word in "abc"]


@pytest.mark.parametrize("fault", [500, 429, 503])
def test_a_passing_fault_is_hidden_from_the_caller(model, fault):
    simulator, seen = engine(model), []
    expected = simulator("Ada")
    model.fail = lambda query: seen.append(query) or (fault if len(seen) == 1 else 0)
    assert simulator("Ada") == expected and len(seen) > 1
