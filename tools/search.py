"""Retrieval for search agents: BM25 in the trainer's process over a JSONL corpus, or a retrieval server.

A corpus is a file of one JSON object a line, {"id", "title", "text"}, or {"id", "contents"} with the title on the first line of the
contents. The index (bm25s) is built once and cached on disk under a hash of the corpus' content, so a changed file is indexed anew
and an unchanged one is loaded in milliseconds.
Search reads and never writes: it is deterministic, has no state between calls, and may be called from several threads.

Retriever asks a server that speaks Search-R1's protocol. Both give the agent the same text for the same documents.
tools/serve.py is such a server (python -m tools.serve --help), tools/simulate.py a search engine played by a language model.
"""

import codecs
import hashlib
import ipaddress
import json
import queue
import re
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

from common import cache, ranks, run
from common.environment import Lost
from tools import Tool

BATCH = 256  # queries a request takes at most
PATIENCE = 120.0  # seconds a retrieval server may stay away before the run ends
REJECTED = 8  # queries in a row that fail before a server that answers its probe is given up
STARTING = (1.0, 2.0)  # seconds between the attempts to reach it at the start of a run
LONG = 50_000  # documents of a corpus whose indexing shows a progress bar
PROBE = "Which town is the home of the person?"
RESULTS = '{"result": [[{"document": {"id": ..., "contents": "title\\ntext"}, "score": ...}, ...], ...]}, a list for each query'


def as_text(documents):
    """What the agent reads: "Doc 1 (Title: ...) ...", one line a document; "Nothing found." when there are none."""
    lines = [f"Doc {i} (Title: {d['title']}) {d['text']}" for i, d in enumerate(documents, 1)]
    text = "\n".join(" ".join(line.split()) for line in lines) or "Nothing found."
    return text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair, and no tokenizer takes that


def documents_in(text):
    """Titles and texts out of what as_text made, without the words it puts around them: an answer such as "1" must not be found in these.
    The text may have been cut, in the middle of these words too."""
    return re.sub(
        r"^Doc \d+ \(Title: |^Nothing found\.$|^Doc(?: \d*(?: \([Title:]*)?)?\Z", "", text, flags=re.MULTILINE
    )


# ---- BM25


def read_corpus(path):
    """documents: list of {"id", "title", "text"}. Raises ValueError naming file and line of the first malformed one."""
    return [document for _, document in scan(path)]


def scan(path):
    """Yields (byte at which its line starts, document) for each document of a file. Raises ValueError as read_corpus does."""
    ids, start = set(), 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            place, start = start, start + len(line)
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                place, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                document = read_document(line)
                if document["id"] in ids:
                    raise ValueError(f"id {document['id']} occurs twice")
            except UnicodeDecodeError:
                raise ValueError(f"{path}, line {number}: not UTF-8 text") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not a document of id, title and text ({error})") from None
            ids.add(document["id"])
            yield place, document
    if not ids:
        raise ValueError(f"{path}: the corpus is empty")


def read_document(line):
    """{"id", "title", "text"} of one line (bytes) of a corpus. Raises ValueError saying what is wrong with it."""
    item = json.loads(line.decode("utf-8"))
    if not isinstance(item, dict):
        raise ValueError("not a JSON object")
    if "contents" in item and "text" not in item:
        if not isinstance(item["contents"], str):
            raise ValueError(f"contents is {json.dumps(item['contents'])[:40]}, not a string")
        item = {"id": item.get("id")} | _document({"contents": item["contents"]})
    document = {}
    for key in ("id", "title", "text"):
        if key not in item:
            raise ValueError(f"{key} is missing")
        value = "" if item[key] is None and key != "id" else item[key]
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"{key} is {json.dumps(value)[:40]}, not a string")
        document[key] = str(value)
    if not (document["title"].strip() or document["text"].strip()):
        raise ValueError("title and text are empty")
    return document


def fingerprint(documents):
    """A hash of what documents hold and of who indexes them."""
    import bm25s

    content = hashlib.sha256(bm25s.__version__.encode())
    for document in documents:  # one by one: the whole as one text would need the corpus' memory again
        content.update(json.dumps(document).encode())
    return content.hexdigest()[:16]


class Search(Tool):
    """The `topk` best documents of a corpus for a query, as the text between the information tags.

    corpus: a path, a list of documents, or a serve.Corpus. backend "numba" is faster on a large corpus and takes seconds to start;
    it may put documents of equal score in another order.
    """

    name = "search"

    def __init__(self, corpus, topk, backend="numpy"):
        import bm25s
        import Stemmer

        self.documents = read_corpus(corpus) if isinstance(corpus, (str, Path)) else corpus
        self.topk = min(topk, len(self.documents))
        self.bm25s, self.new_stemmer = bm25s, Stemmer.Stemmer
        self.fingerprint = getattr(self.documents, "fingerprint", None) or fingerprint(self.documents)
        index = cache.cache_dir() / "bm25" / self.fingerprint
        with cache.locked(index):
            if not index.exists():
                long = len(self.documents) > LONG
                tokens = self._tokenize([f"{d['title']} {d['text']}" for d in self.documents], show_progress=long)
                if not any(tokens.ids):
                    raise ValueError("the corpus holds no word to search for")
                built = bm25s.BM25()
                built.index(tokens, show_progress=long)
                beside = Path(f"{index}.new")
                shutil.rmtree(beside, ignore_errors=True)
                built.save(beside)
                beside.rename(index)  # whole or not at all
        self.index = bm25s.BM25.load(index, mmap=True)
        self.index.backend = backend

    def _tokenize(self, texts, show_progress=False):
        # A stemmer must not be shared by threads; making one takes microseconds.
        stemmer = self.new_stemmer("english")
        return self.bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=show_progress)

    def find_all(self, queries, topk):
        """A list of at most topk (document, score) for each query, the best first; a query without a known word finds none."""
        if not queries:
            return []
        topk, tokens, found = min(topk, len(self.documents)), self._tokenize(queries), [[] for _ in queries]
        asked = [i for i, ids in enumerate(tokens.ids) if ids]
        if asked:  # a query without a word must not come first: numba fails over it
            tokens = tokens._replace(ids=[tokens.ids[i] for i in asked])
            places, scores = self.index.retrieve(tokens, k=topk, show_progress=False, n_threads=0)
            for i, *one in zip(asked, places, scores):
                found[i] = [(self.documents[place], float(score)) for place, score in zip(*one) if score > 0]
        return found

    def find(self, query):
        """query -> documents, the best first."""
        return [document for document, _ in self.find_all([query], self.topk)[0]]

    def __call__(self, query, earlier=(), question=None):
        """Search. Neither earlier calls nor the question matter."""
        return as_text(self.find(query))


# ---- a retrieval server


class _NoResults(Exception):
    """A request that brought no results, and what to look at when it is the first one. Perhaps the fault of its queries."""

    def __init__(self, what, advice):
        super().__init__(what)
        self.advice = advice


class _NoServer(_NoResults):
    """There was no server to answer: not the fault of the queries."""


class Retriever(Tool):
    """The `topk` best documents for a query from a server that speaks Search-R1's protocol, as the same text as Search's.

    To be called from many threads at once: queries that come while a request is under way go out together in the next one.
    A request has `timeout` seconds. A server that does not answer is asked again, ever more slowly; when it has stayed away
    for `patience` seconds, every waiting and every later call raises tools.Lost. A query that the server cannot answer while it
    answers others is a RuntimeError. The constructor ends the program with a sentence when the server is not usable.
    """

    name = "search"
    keeps_time = True  # a limit around a call would give it up while it waits for the server to come back
    probed = PROBE  # what is asked to see whether the server answers
    expected = RESULTS
    listens = "Search-R1's server listens at /retrieve."
    slow = "Has it loaded its index?"

    def __init__(self, address, topk, timeout, patience=PATIENCE):
        import requests

        self.address, self.topk, self.timeout, self.patience = _whole(address), topk, timeout, patience
        # Keeps its connections: the probe uses one and then the sender, and a simulate.Simulator one for each caller.
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=BATCH))
        if _is_here(urlsplit(self.address).hostname):
            self.session.trust_env = False  # no proxy of the environment on the way to this machine
        self.waiting, self.sender, self.lock = queue.SimpleQueue(), None, threading.Lock()
        self.since = None  # when the first of the failures in a row was, if the last request was one
        self.rejected = []  # when queries were refused in a row, while the probe was answered
        self.warned, self.lost = False, ""  # whether it was told; why all is over
        self.probe()

    def __call__(self, query, earlier=(), question=None):
        """Search. Neither earlier calls nor the question matter."""
        if not query.strip():
            return as_text([])  # as Search does; some servers fail over it
        answer = Future()
        self.waiting.put((query, answer))
        with self.lock:
            if self.sender is None:
                self.sender = threading.Thread(target=self._send, daemon=True)
                self.sender.start()
        return answer.result()

    def probe(self):
        """Ask one real query. Raises SystemExit: a tool that cannot work must not teach the policy to do without it."""
        for pause in (*STARTING, None):
            try:
                found = self._request([self.probed])
            except _NoResults as error:
                if pause is None or not isinstance(error, _NoServer):
                    sent = _short(json.dumps(self._body([self.probed])))
                    raise SystemExit(
                        f"--retriever {self.address}: sent {sent} and got {error}. {error.advice}"
                    ) from None
                time.sleep(pause)  # it may be about to start
            else:
                break
        if found == [as_text([])] and ranks.rank() == 0:
            run.notice(f"warning: retriever {self.address} finds nothing for {PROBE!r}: is that the right corpus?")

    def _send(self):
        while True:
            calls = [self.waiting.get()]
            while len(calls) < BATCH and not self.waiting.empty():
                calls.append(self.waiting.get())
            try:
                self._serve(calls)
            except Exception as error:  # Lost, or a fault of our own: nobody may be left waiting
                for _, answer in calls:
                    if not answer.done():
                        answer.set_exception(error)

    def _serve(self, calls):
        """Give every call its text or its error. Raises Lost when the server stays away."""
        if self.lost:
            raise Lost(self.lost)
        suspect = False  # whether this query has failed and the probe was answered
        while True:
            try:
                texts = self._request([query for query, _ in calls])
            except _NoResults as failure:
                error = failure
            else:
                self.rejected = []
                for (_, answer), text in zip(calls, texts):
                    answer.set_result(text)
                return
            away = isinstance(error, _NoServer)
            well = not away and self._answers()
            if not well:
                # Of the first failure nothing is said: an idle connection that the server has closed looks like one.
                self._wait(error, silent=away and self.since is None)
            if not away and len(calls) > 1:  # one query may spoil it for all, or there are too many: ask in halves
                half = len(calls) // 2
                self._serve(calls[:half])
                self._serve(calls[half:])
                return
            if well and suspect:
                self._reject(calls[0][1], error)
                return
            suspect = suspect or well

    def _reject(self, answer, error):
        """The server is well and this query fails. Raises Lost when it is so with every query, for longer than `patience`."""
        self.rejected = rejected = [*self.rejected, time.monotonic()]
        if len(rejected) >= REJECTED and rejected[-1] - rejected[0] > self.patience:
            self.lost = (
                f"the retriever {self.address} answers its probe, and none of the last {len(rejected)} queries: {error}"
            )
            raise Lost(self.lost)
        answer.set_exception(RuntimeError(f"the retriever has no results for this query: {error}"))

    def _body(self, queries):
        return {"queries": queries, "topk": self.topk, "return_scores": True}

    def _texts(self, answer, queries):
        """A text for each query out of an answer of the server. Raises _NoResults, or an error of Python where the shape is wrong."""
        found = _listed(answer.json()["result"])
        if len(found) != len(queries):
            what = f"{len(found)} lists of documents where {len(queries)} were asked for"
            raise _NoResults(f"{what}: {_short(answer.content)}", f"Expected is {self.expected}.")
        return [as_text([_document(item) for item in _listed(items)[: self.topk]]) for items in found]

    def _request(self, queries):
        """One request -> a text for each query. Raises _NoServer or _NoResults."""
        answer = self._exchange(self.session.post, self.address, json=self._body(queries))
        try:
            texts = self._texts(answer, queries)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            what = f"an answer of the wrong shape: {_short(answer.content) or '(nothing)'}"
            raise _NoResults(what, f"Expected is {self.expected}.") from None
        if self.warned:
            run.notice(f"retriever {self.address}: answers again")
        self.since, self.warned = None, False
        return texts

    def _exchange(self, send, address, **what):
        """send(address, ...) -> an answer with status 200. Raises _NoServer or _NoResults."""
        import requests

        try:
            answer = send(address, timeout=self.timeout, **what)
        except requests.ReadTimeout:
            raise _NoResults(
                f"no answer within {self.timeout:g} s", f"{self.slow} --tool_timeout is the limit."
            ) from None
        except requests.RequestException as error:
            raise _NoServer(_cause(error), "Start the server first, or check host and port.") from None
        status = answer.status_code
        if status in (429, 502, 503, 504):  # overloaded, or a gateway whose server is away
            raise _NoServer(f"HTTP {status}", "Is the server behind that address running?")
        if status != 200:
            advice = f"Is the path right? {self.listens}" if status in (404, 405) else "Its log should say why."
            raise _NoResults(f"HTTP {status}: {_short(answer.content) or '(nothing)'}", advice)
        return answer

    def _answers(self):
        """Whether the server answers the probe."""
        try:
            return bool(self._request([self.probed]))
        except _NoResults:
            return False

    def _wait(self, error, silent):
        """Sleep for as long as the server has been away by now: each wait is about twice the one before. Raises Lost after `patience`."""
        now, since = time.monotonic(), self.since
        if since is None:
            since = self.since = now
        past = now - since
        if past >= self.patience:
            self.lost = f"the retriever {self.address} has given no results for {past:.0f} s: {error}"
            raise Lost(self.lost)
        if not silent and not self.warned:
            self.warned = True
            run.notice(f"retriever {self.address}: {error}; trying again for {self.patience:.0f} s")
        time.sleep(min(max(past, 0.1), 2.0, self.patience - past))


def _short(content):
    """The start of what was sent or answered, on one line."""
    text = content[:2000].decode("utf-8", "replace") if isinstance(content, bytes) else content[:2000]
    return " ".join(text.split())[:200]


def _whole(address, path="/retrieve", given=None, example="http://127.0.0.1:8000/retrieve"):
    """The address with scheme and path. Raises SystemExit for what is none."""
    whole = address.strip() if "://" in address else f"http://{address.strip()}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise SystemExit(f"--retriever {given or address}: not an address such as {example}.")
    return parts._replace(path=parts.path if parts.path.strip("/") else path).geturl()


def _is_here(host):
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def _cause(error):
    """What went wrong with a connection, from the bottom of the errors that are wrapped around it."""
    while below := error.__cause__ or error.__context__:
        error = below
    text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
    return text[:1].lower() + text[1:]


def _listed(items):
    if not isinstance(items, list):
        raise TypeError
    return items


def _document(item):
    """{"title", "text"} of one result: with its score around it or without; its text in `contents` below the title, or in `text`."""
    document = item.get("document", item)
    if isinstance(document.get("text"), str):
        return {"title": document.get("title") or "", "text": document["text"]}
    title, newline, text = document["contents"].partition("\n")
    if not newline:
        return {"title": "", "text": title}
    title = title.strip()
    return {"title": title[1:-1] if title[0:1] == title[-1:] == '"' else title, "text": text}


def contents(document):
    """A document as Search-R1's corpora and servers have it: its title in quotes, and its text from the second line on."""
    title = document["title"].replace("\n", " ")
    return f'"{title}"\n{document["text"]}'
