"""A language model that plays a search engine, as in ZeroSearch (arXiv:2505.04588).

Flag: --retriever llm:http://host:8000/v1#model. The model writes documents for a query: useful ones, or noisy ones that
do not help. The share of noisy answers grows over training, so the policy first learns to search, and then to cope with
bad results. This needs an OpenAI-compatible server (POST /v1/chat/completions), such as vLLM's, and no corpus.

Whether an answer is noisy depends only on seed, query and training step. The request carries a seed made of the same
three, so if the server samples by it, the same query for the same question gets the same documents for a whole step,
and a resumed run sees the same documents.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future

from common.turns import Question
from tools.search import PATIENCE, PROBE, Document, Retriever, _NoResults, _whole, as_text

NOISE = (0.0, 0.5)  # share of noisy answers at the first step and at the last
BASE = 4.0  # how late the share rises: towards 1, the rise becomes a straight line
TEMPERATURE, MAX_TOKENS = 0.8, 600
WORDS = 30  # requested length of a document
KEY = "OPENAI_API_KEY"  # environment variable with the key sent to the server, as in other clients of this protocol
DOCUMENT = re.compile(r"^[^\w\n]*doc(?:ument)?\W{0,3}\d+\b[^\w(\n]*", re.IGNORECASE | re.MULTILINE)
TITLE = re.compile(r"\(\s*title\s*:\s*((?:[^()\n]|\([^()\n]*\))*)\)\W*?\s", re.IGNORECASE)

ASK = """You play a search engine for a game. Write {topk} short documents that it finds for the query at the end. Each reads like a \
passage of an encyclopedia of about {words} words and stands on one line of its own, in exactly this form:
Doc 1 (Title: what the passage is about) the passage

{kind}
{question}Write the documents only, in the language of the query.

Query: {query}"""
USEFUL = "The documents are useful: a reader finds in them what the query asks for."
NOISY = (
    "The documents are noise: they share words and subject with the query, and a reader does not find in them what it asks for. "
    "They speak of something close by, or get the facts wrong."
)
BEHIND = """
The query was made on the way to the answer to this question: {text}
The right answer to that question is: {gold}
{rule}
"""
MAY = "Where the query asks for that answer, a document states it; where it asks for a step before, the documents state that step."
MAY_NOT = "No document may state or hint at that answer."


def noise(step: int, steps: int, start: float = NOISE[0], end: float = NOISE[1], base: float = BASE) -> float:
    """Return the share of noisy answers at a step of `steps`.

    It rises from start to end, ever faster (ZeroSearch's curriculum, its equation for p_i).
    """
    if step >= steps:
        return end
    return start + (base ** (step / steps) - 1) / (base - 1) * (end - start)


def number(*values) -> int:
    """Return 63 bits that depend only on the values, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


def written(text: str, cut: bool = False) -> list[Document]:
    """Return the documents {"title", "text"} in a model's output, without its thoughts and lines outside of documents.

    cut: whether the output was cut off, so that its last line is incomplete.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:  # the thought was cut off
        return []
    if cut:
        text = text.rpartition("\n")[0]
    starts = [match.span() for match in DOCUMENT.finditer(text)]
    documents = []
    for (_, start), (end, _) in zip(starts, [*starts[1:], (len(text), 0)]):
        body = text[start:end].strip() + " "
        title = TITLE.match(body)
        # Text after an empty line is a remark.
        body = (body[title.end() :] if title else body).split("\n\n")[0].strip(" \n*")
        if body:
            documents.append({"title": title[1].strip(' *"') if title else "", "text": body})
    return documents


class Simulator(Retriever):
    """A tool that returns documents written by a language model, as the same text as Search's.

    address: llm:<url of an OpenAI-compatible server>, followed by #<model> if it serves several. steps, seed: of the
    training run. Each tool call is a separate request, because such a server batches concurrent requests. Faults are
    handled as in Retriever.
    """

    expected = '{"choices": [{"message": {"content": "Doc 1 (Title: ...) ..."}}]}'
    listens = "The server must have /v1/chat/completions and a model of that name: llm:http://host:8000/v1#model."
    slow = "Is its model loaded? Is the server overloaded?"

    def __init__(
        self,
        address: str,
        topk: int,
        timeout: float,
        steps: int,
        seed: int = 0,
        span: tuple[float, float] = NOISE,
        patience: float = PATIENCE,
        probe: str = PROBE,
    ):
        """Connect to the server. span: share of noisy answers at the first step and at the last. probe: as Retriever's."""
        url, _, self.model = address.removeprefix("llm:").partition("#")
        base = _whole(url, "/v1", f"llm:{url}", "llm:http://127.0.0.1:8000/v1#model").rstrip("/")
        base = base.removesuffix("/chat/completions")
        self.models, self.step, self.steps, self.seed, self.span = f"{base}/models", 0, steps, seed, span
        super().__init__(f"{base}/chat/completions", topk, timeout, patience, probe)
        # A run resumed with a different model would see different documents.
        self.fingerprint = f"simulated by {self.model}, noise {span[0]:g} to {span[1]:g}"

    def begin(self, step: int) -> None:
        """Set the training step, which determines the share of noisy answers: the smallest at 0, the initial step."""
        self.step = step

    def noisy(self, query: str, step: int) -> bool:
        """Return whether the answer to this query is noisy at this step."""
        return number("noise", self.seed, step, query) / 2**63 < noise(step, self.steps, *self.span)

    def __call__(self, query: str, earlier: Sequence[str] = (), question: Question | None = None) -> str:
        """Return the text of the documents that the model writes for a query.

        question: the question behind the query. The model sees its golds: useful documents lead to them, noisy ones
        avoid them.
        """
        if not query.strip():
            return as_text([])
        answer = Future()
        self._serve([((query, self.step, question), answer)])
        return answer.result()

    def _probed(self, probe):
        return probe, 0, None

    def _body(self, calls):
        ((query, step, question),) = calls
        noisy, behind = self.noisy(query, step), ""
        if question is not None:
            rule = MAY_NOT if noisy else MAY
            behind = BEHIND.format(text=question.text, gold=" / ".join(question.golds[:5]), rule=rule)
        kind = NOISY if noisy else USEFUL
        ask = ASK.format(topk=self.topk, words=WORDS, kind=kind, question=behind, query=" ".join(query.split()))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": ask}],
            "temperature": TEMPERATURE,
            "max_tokens": MAX_TOKENS,
            "seed": number("text", self.seed, step, query) >> 32,  # 31 bits, which every server accepts
        }

    def _texts(self, body, calls):
        choice = self.web.parsed(body)["choices"][0]
        text = (choice["message"]["content"] or "")[: 100 * MAX_TOKENS]  # a server may ignore the limit
        documents = written(text, choice.get("finish_reason") == "length")[: self.topk]
        if not documents:
            raise _NoResults(
                f"no documents but: {self.web.clean(text) or '(nothing)'}",
                f"Expected: lines such as 'Doc 1 (Title: ...) ...' within {MAX_TOKENS} tokens. Try another model.",
            )
        return [as_text(documents)]

    def _request(self, calls):
        if not self.model:
            self.model = self._only_model()
        return super()._request(calls)

    def _exchange(self, send, address, **options):
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return super()._exchange(send, address, headers=headers, **options)

    def _only_model(self):
        """Return the name of the server's only model. Raises _NoServer or _NoResults."""
        body = self._exchange(self.session.get, self.models)
        try:
            names = [self.web.clean(str(model["id"])) for model in self.web.parsed(body)["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            names = []
        if len(names) != 1:
            message = f"{self.models} lists {len(names)} models{': ' if names else ''}{', '.join(names[:5])}"
            raise _NoResults(message, "Name one after the address: llm:http://host:8000/v1#model.")
        return names[0]
