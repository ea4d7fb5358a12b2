"""Retrieval for search agents: BM25 over a JSONL corpus in the trainer's process, or a client of a retrieval server.

A corpus is a file with one JSON object per line: {"id", "title", "text"}, or {"id", "contents"} with the title on the
first line of the contents. The index (bm25s) is built once and cached on disk under a hash of the corpus' content, so a
changed file is indexed again and an unchanged one is loaded in milliseconds.
Search only reads: it is deterministic, keeps no state between calls, and may be called from several threads.

Retriever queries a server that speaks Search-R1's protocol. Both return the same text for the same documents.
tools/serve.py is such a server (python -m tools.serve --help); in tools/simulate.py a language model plays the server.
"""

import codecs
import hashlib
import json
import queue
import re
import shutil
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

from common import cache, ranks, run
from common.environment import Lost
from common.turns import Question
from tools import Tool

BATCH = 256  # most queries in a request
PATIENCE = 120.0  # seconds that a retrieval server may be away before the run ends
RETRIES = 8  # a server that answers wrongly or late is given up after at most RETRIES * timeout seconds, and a pause
LONGEST = 2**20  # characters of a title or a text in a server's answer that are read
REJECTED = 8  # consecutive failed queries before a server that answers its probe is given up
STARTING = (1.0, 2.0)  # seconds between attempts to reach the server at the start of a run
LONG = 50_000  # documents above which indexing a corpus shows a progress bar
TOKENS = 2  # version of the rules for BM25's tokens, TOKEN and plain(): an index by other rules is not used
# Scripts whose signs are tokens: Chinese, Japanese, Korean, Thai, Lao, Burmese, Khmer.
SIGN = (
    "[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Or one of the names C++, C#, F# ..., or a word, in Indic scripts with its vowel signs.
TOKEN = rf"(?u){SIGN}|(?<!\w)[a-z](?:\+\+|#)(?!\w)|(?:(?!{SIGN})[\w\u0900-\u0dff])+"
PROBE = "Which town is the home of the person?"
RESULTS = (
    '{"result": [[{"document": {"id": ..., "contents": "title\\ntext"}, "score": ...}, ...], ...]}, one list per query'
)
Document = dict[str, str]  # id, title and text


def as_text(documents: Iterable[Document]) -> str:
    """Return the text that the agent reads: one line per document, "Doc 1 (Title: ...) ...", or "Nothing found."."""
    lines = [f"Doc {i} (Title: {d['title']}) {d['text']}" for i, d in enumerate(documents, 1)]
    text = "\n".join(" ".join(line.split()) for line in lines) or "Nothing found."
    return text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair, which no tokenizer accepts


def documents_in(text: str) -> str:
    """Return as_text's output without the words that it adds to titles and texts.

    An answer such as "1" must not be found in the added words. The output may be cut off, even within them.
    """
    return re.sub(
        r"^Doc \d+ \(Title: |^Nothing found\.$|^Doc(?: \d*(?: \([Title:]*)?)?\Z", "", text, flags=re.MULTILINE
    )


# ---- BM25


def read_corpus(path: str | Path) -> list[Document]:
    """Return the documents of a file. Raises ValueError with file and line of the first malformed one."""
    return [document for _, document in scan(path)]


def scan(path: str | Path) -> Iterator[tuple[int, Document]]:
    """Yield (byte offset of its line, document) for each document of a file. Raises ValueError as read_corpus does."""
    ids, start = set(), 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            place, start = start, start + len(line)
            if line.startswith(codecs.BOM_UTF8):  # in the middle too: files of several editors put together
                place, line = place + len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                document = read_document(line)
                if document["id"] in ids:
                    raise ValueError(f"id {document['id']} occurs twice")
            except UnicodeDecodeError:
                raise ValueError(f"{path}, line {number}: not UTF-8 text") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not a document with id, title and text ({error})") from None
            ids.add(document["id"])
            yield place, document
    if not ids:
        raise ValueError(f"{path}: the corpus is empty")


def read_document(line: bytes) -> Document:
    """Return the document on one line of a corpus. Raises ValueError with the fault of a malformed line."""
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


def plain(text: str) -> str:
    """Return a text as BM25 compares it: without case, marks on letters, and compatible forms of a sign.

    Initials become one word, and the letter after an apostrophe is left out: "Z\u00fcrich's U.S. firm" is
    "zurich us firm".
    """
    if not text.isascii():
        text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        text = unicodedata.normalize("NFC", re.sub("[\u0300-\u036f]", "", text))
    text = re.sub(r"(?<=\w)['\u2019][a-z]\b", "", text.lower())
    return re.sub(r"\b(?:[a-z]\.){2,}", lambda found: found[0].replace(".", "") + " ", text)


def fingerprint(documents: Iterable[Document]) -> str:
    """Return a hash of the documents, of the version of bm25s and of the rules for tokens."""
    import bm25s

    content = hashlib.sha256(f"{bm25s.__version__}, tokens {TOKENS}".encode())
    for document in documents:  # one by one: a single text would need as much memory as the corpus
        content.update(json.dumps(document).encode())
    return content.hexdigest()[:16]


class Search(Tool):
    """A tool that returns the `topk` best documents of a corpus for a query, as the text between the information tags.

    corpus: a path, a list of documents, or a serve.Corpus. backend "numba" is faster on a large corpus but takes
    seconds to start, and may order documents of equal score differently. Raises OSError or ValueError for an unusable
    corpus.
    """

    name = "search"

    def __init__(self, corpus: str | Path | Sequence[Document], topk: int, backend: str = "numpy"):
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
                temporary = Path(f"{index}.new")
                shutil.rmtree(temporary, ignore_errors=True)
                built.save(temporary)
                temporary.rename(index)  # atomic: an interrupted build leaves no index
        self.index = bm25s.BM25.load(index, mmap=True)
        if ranks.rank() == 0:
            self._warn()
        self.index.backend = backend

    def _tokenize(self, texts, show_progress=False):
        # Threads must not share a stemmer; creating one takes microseconds.
        stemmer = self.new_stemmer("english")
        texts = [plain(text) for text in texts]
        options = dict(stopwords="en", stemmer=stemmer, show_progress=show_progress)
        return self.bm25s.tokenize(texts, token_pattern=TOKEN, **options)

    def _warn(self):
        """Print a warning if the corpus is in a script or a form in which little may be found."""
        count = len(self.documents)
        sample = [self.documents[i] for i in range(0, count, max(1, count // (8 if count <= LONG else 2)))][:8]
        signs = "".join(plain(f"{d['title']} {d['text'][:1000]}") for d in sample)
        letters = re.findall(r"[^\W\d_]", signs)
        foreign = [c for c in letters if c > "\u024f" and not re.match(SIGN, c)]
        if len(foreign) * 2 > len(letters):
            run.notice(
                "warning: most letters of the corpus are not Latin: search knows stems and common words of English "
                "only, so a word is found in the same form. --retriever takes another search engine."
            )
        titled = [d for d in sample if d["title"].strip()]
        lost = [d for d, found in zip(titled, self.find_all([d["title"] for d in titled], 10)) if not found]
        if lost and len(lost) * 2 >= len(titled):
            run.notice(f"warning: search finds nothing for a title of the corpus, such as {lost[0]['title'][:80]!r}")

    def find_all(self, queries: list[str], topk: int) -> list[list[tuple[Document, float]]]:
        """Return at most topk (document, score) per query, the best first; none for a query without a known word."""
        if not queries:
            return []
        topk, tokens, found = min(topk, len(self.documents)), self._tokenize(queries), [[] for _ in queries]
        known = [i for i, ids in enumerate(tokens.ids) if ids]
        if known:  # without the other queries: numba fails if one of them comes first
            tokens = tokens._replace(ids=[tokens.ids[i] for i in known])
            places, scores = self.index.retrieve(tokens, k=topk, show_progress=False, n_threads=0)
            for i, *hits in zip(known, places, scores):
                found[i] = [(self.documents[place], float(score)) for place, score in zip(*hits) if score > 0]
        return found

    def find(self, query: str) -> list[Document]:
        """Return the documents for a query, the best first."""
        return [document for document, _ in self.find_all([query], self.topk)[0]]

    def __call__(self, query: str, earlier: Sequence[str] = (), question: Question | None = None) -> str:
        """Return the text of the documents for a query. Earlier calls and the question do not matter."""
        return as_text(self.find(query))


# ---- a retrieval server


class _NoResults(Exception):
    """A request without results, perhaps because of its queries. advice: for a failure of the first request."""

    def __init__(self, message, advice):
        super().__init__(message)
        self.advice = advice


class _NoServer(_NoResults):
    """A request that no server answered, so its queries are not the cause.

    dropped: something took the connection and closed it. busy: a server did answer, but only that it has no time.
    """

    def __init__(self, message, advice, dropped=False, busy=False):
        super().__init__(message, advice)
        self.dropped, self.present = dropped, dropped or busy


class Retriever(Tool):
    """A tool that gets the `topk` best documents from a server of Search-R1's protocol, as the same text as Search's.

    Many threads may call it at once: queries that arrive during a request are sent together in the next one. A request
    times out after `timeout` seconds. If the server does not answer, requests are retried after growing pauses; when it
    has been away for `patience` seconds, all waiting and later calls raise common.environment.Lost. A query that fails
    while the server answers others raises RuntimeError. The constructor raises SystemExit if the server is not usable.
    """

    name = "search"
    keeps_time = True  # a timeout around a call would give it up while it waits for the server to return
    expected = RESULTS
    listens = "Search-R1's server listens at /retrieve."
    slow = "Has it loaded its index?"

    def __init__(self, address: str, topk: int, timeout: float, patience: float = PATIENCE, probe: str = PROBE):
        """Connect to the server. probe: the query that tests whether it answers; a question that it should know."""
        from tools import web

        self.web = web  # not at module level: --help works without requests
        self.address, self.topk, self.timeout, self.patience = _whole(address), topk, timeout, patience
        # It reuses connections: the probe and then the sender use one, a simulate.Simulator uses one per caller.
        self.session = web.session_for(self.address, BATCH)
        self.waiting, self.sender, self.lock = queue.SimpleQueue(), None, threading.Lock()
        self.since = None  # time of the first failure since the last successful request
        self.wrong = None  # time of the first wrong or late answer since a successful request, or since it was away
        self.rejected = []  # times of consecutive failed queries while the probe was answered
        self.warned, self.lost = False, ""  # whether a warning was printed; why the server was given up
        self.probe(probe[:1000])

    def __call__(self, query: str, earlier: Sequence[str] = (), question: Question | None = None) -> str:
        """Return the text of the documents for a query. Earlier calls and the question do not matter."""
        if not query.strip():
            return as_text([])  # as Search does; some servers fail on an empty query
        answer = Future()
        self.waiting.put((query, answer))
        with self.lock:
            if self.sender is None:
                self.sender = threading.Thread(target=self._send, daemon=True)
                self.sender.start()
        return answer.result()

    def probe(self, query: str) -> None:
        """Send a real query, also later when the server seems to fail. Raises SystemExit if it fails: a broken tool would teach the policy not to use it."""
        self.probed = self._probed(query)
        for pause in (*STARTING, None):
            try:
                found = self._request([self.probed])
            except _NoResults as error:
                if pause is None or not isinstance(error, _NoServer):
                    sent = self.web.clean(json.dumps(self._body([self.probed])))
                    raise SystemExit(
                        f"--retriever {self.address}: sent {sent} and got {error}. {error.advice}"
                    ) from None
                time.sleep(pause)  # it may still be starting
            else:
                break
        if found == [as_text([])] and ranks.rank() == 0:
            query = self.web.clean(query)
            run.notice(f"warning: retriever {self.address} finds nothing for {query!r}: is this the right corpus?")

    def _send(self):
        while True:
            calls = [self.waiting.get()]
            while len(calls) < BATCH and not self.waiting.empty():
                calls.append(self.waiting.get())
            try:
                self._serve(calls)
            except Exception as error:  # Lost, or a bug here: no caller may be left waiting
                for _, answer in calls:
                    if not answer.done():
                        answer.set_exception(error)

    def _serve(self, calls):
        """Set the text or the error of every call. Raises Lost when the server stays away."""
        if self.lost:
            raise Lost(self.lost)
        suspect = False  # whether these queries have failed before while the probe was answered
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
            healthy = not away and self._answers()
            if not healthy:
                self._wait(error)
            if not away and len(calls) > 1:  # one query may fail them all, or there are too many: send halves
                half = len(calls) // 2
                self._serve(calls[:half])
                self._serve(calls[half:])
                return
            if healthy and suspect:
                self._reject(calls[0][1], error)
                return
            suspect = suspect or healthy

    def _reject(self, answer, error):
        """Set the error of a query that fails on a healthy server. Raises Lost if all fail for too long."""
        self.rejected = rejected = [*self.rejected, time.monotonic()]
        if len(rejected) >= REJECTED and rejected[-1] - rejected[0] > self._limit():
            self.lost = (
                f"the retriever {self.address} answers its probe, but none of the last {len(rejected)} queries: {error}"
            )
            raise Lost(self.lost)
        answer.set_exception(RuntimeError(f"the retriever has no results for this query: {error}"))

    def _probed(self, probe):
        return probe

    def _body(self, queries):
        return {"queries": queries, "topk": self.topk, "return_scores": True}

    def _texts(self, body, queries):
        """Return a text per query from the body of an answer. Raises _NoResults, or a built-in error for a bad shape."""
        found = _listed(self.web.parsed(body)["result"])
        if len(found) != len(queries):
            message = f"{len(found)} lists of documents where {len(queries)} were asked for"
            raise _NoResults(f"{message}: {self.web.clean(body)}", f"Expected: {self.expected}.")
        return [as_text([_document(item) for item in _listed(items)[: self.topk]]) for items in found]

    def _request(self, queries):
        """Send one request and return a text for each query. Raises _NoServer or _NoResults."""
        body = self._exchange(self.session.post, self.address, json=self._body(queries))
        try:
            texts = self._texts(body, queries)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            message = f"an answer of the wrong shape: {self.web.clean(body) or '(nothing)'}"
            raise _NoResults(message, f"Expected: {self.expected}.") from None
        if self.warned:
            run.notice(f"retriever {self.address}: answers again")
        self.since, self.wrong, self.warned = None, None, False
        return texts

    def _exchange(self, send, address, **options):
        """Return the body of the answer to send(address, ...), with status 200. Raises _NoServer or _NoResults."""
        web = self.web
        try:
            status, body, elsewhere = web.exchange(send, address, self.timeout, **options)
        except web.Late as error:
            raise _NoResults(str(error), f"{self.slow} --tool_timeout sets the limit.") from None
        except web.Wrong as error:
            raise _NoResults(str(error), "Is this the right address?") from None
        except web.Absent as error:
            advice = "Start the server first, or check host and port."
            raise _NoServer(str(error), advice, error.dropped) from None
        if status in (429, 502, 503, 504):  # overloaded, or a gateway whose server is down
            raise _NoServer(f"HTTP {status}", "Is the server behind that address running?", busy=status == 429)
        if elsewhere:
            advice = f"Redirects are not followed. If you trust {web.clean(elsewhere)}, give that address."
            raise _NoResults(f"HTTP {status}: a redirect", advice)
        if status != 200:
            advice = f"Is the path right? {self.listens}" if status in (404, 405) else "Its log should show the reason."
            raise _NoResults(f"HTTP {status}: {web.clean(body) or '(nothing)'}", advice)
        return body

    def _answers(self):
        """Return whether the server answers the probe."""
        try:
            return bool(self._request([self.probed]))
        except _NoResults:
            return False

    def _wait(self, error):
        """Sleep as long as the server has been away, so pauses about double. Raises Lost when the time is over.

        That is after `patience` seconds, or sooner if the server answers, but wrongly or too late.
        """
        now, since, patience = time.monotonic(), self.since, self.patience
        # The first drop is silent: an idle connection that the server has closed looks like one.
        away = isinstance(error, _NoServer)
        silent = away and error.dropped and since is None
        if since is None:
            since = self.since = now
        if away and not error.present:
            self.wrong = None
        else:
            since = self.wrong = self.wrong or now
            patience = self._limit()
        past = now - since
        if past >= patience:
            self.lost = f"the retriever {self.address} has given no results for {past:.0f} s: {error}"
            raise Lost(self.lost)
        if not silent and not self.warned:
            self.warned = True
            run.notice(f"retriever {self.address}: {error}; trying again for {patience:.0f} s")
        time.sleep(min(max(past, 0.1), 2.0, patience - past))

    def _limit(self):
        """Return the seconds after which a server that answers wrongly or too late is given up.

        A try is a request and a probe, and both may take `timeout` seconds. The first and the last add theirs, so at
        most RETRIES * timeout seconds pass, and a pause.
        """
        return min(self.patience, (RETRIES - 4) * self.timeout)


def _whole(address, path="/retrieve", given=None, example="http://127.0.0.1:8000/retrieve"):
    """Return the address with scheme and path. Raises SystemExit if it is not an address."""
    whole = address.strip() if "://" in address else f"http://{address.strip()}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        usable = False
    if not usable:
        raise SystemExit(f"--retriever {given or address}: not an address such as {example}.")
    return parts._replace(path=parts.path if parts.path.strip("/") else path).geturl()


def _listed(items):
    if not isinstance(items, list):
        raise TypeError
    return items


def _document(item):
    """Return {"title", "text"} of a result, with or without a score, with `text` or with `contents` below the title."""
    document = item.get("document", item)
    if isinstance(document.get("text"), str):
        title = document.get("title") or ""
        if not isinstance(title, str | int | float):
            raise TypeError
        return {"title": str(title)[:LONGEST], "text": document["text"][:LONGEST]}
    title, newline, text = document["contents"][:LONGEST].partition("\n")
    if not newline:
        return {"title": "", "text": title}
    title = title.strip()
    return {"title": title[1:-1] if title[0:1] == title[-1:] == '"' else title, "text": text}


def contents(document: Document) -> str:
    """Return a document in the format of Search-R1: its title in quotes, and its text from the second line on."""
    title = document["title"].replace("\n", " ")
    return f'"{title}"\n{document["text"]}'


if __name__ == "__main__":
    raise SystemExit("The retrieval server has moved: python -m tools.serve --corpus documents.jsonl")
