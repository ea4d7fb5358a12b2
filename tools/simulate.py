"""A search engine played by a language model, as in ZeroSearch (arXiv:2505.04588): --retriever llm:http://host:8000/v1#model

The model is asked to write documents for a query: useful ones, or noisy ones that are of no help. The share of noisy answers grows
over training, so that the policy first learns to search, and then to do with bad results. It takes a server of the OpenAI kind
(POST /v1/chat/completions), such as vLLM's, and no corpus.

Whether an answer is noisy depends on seed, query and training step alone. The request carries a seed of the same three, so where the
server samples by it, the same query for the same question gets the same documents for a whole step, and a resumed run sees what
it saw.
"""

import hashlib
import os
import re
from concurrent.futures import Future

from tools.search import PATIENCE, PROBE, Retriever, _NoResults, _short, _whole, as_text

NOISE = (0.0, 0.5)  # share of noisy answers at the first step and at the last
BASE = 4.0  # how much of the rise comes late: 1 would be a straight line
TEMPERATURE, MAX_TOKENS = 0.8, 600
WORDS = 30  # length of a document that is asked for
KEY = "OPENAI_API_KEY"  # environment variable; what is in it goes to the server, as other clients of this protocol do
DOCUMENT = re.compile(r"^\W*doc(?:ument)?\W{0,3}\d+\b[^\w(\n]*", re.IGNORECASE | re.MULTILINE)
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


def noise(step, steps, start=NOISE[0], end=NOISE[1], base=BASE):
    """Share of noisy answers at a step of `steps`: from start to end, ever faster (ZeroSearch's curriculum, its equation for p_i)."""
    if step >= steps:
        return end
    return start + (base ** (step / steps) - 1) / (base - 1) * (end - start)


def number(*what):
    """63 bits that depend on `what` alone, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1


def written(text, cut=False):
    """Documents {"title", "text"} in what the model wrote; its thoughts, and lines that belong to no document, are left out.

    cut: whether the text was cut off, so that its last line is no document.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:  # it was still thinking
        return []
    if cut:
        text = text.rpartition("\n")[0]
    starts = [match.span() for match in DOCUMENT.finditer(text)]
    documents = []
    for (_, start), (end, _) in zip(starts, [*starts[1:], (len(text), 0)]):
        body = text[start:end].strip() + " "
        title = TITLE.match(body)
        body = (
            (body[title.end() :] if title else body).split("\n\n")[0].strip(" \n*")
        )  # what comes after an empty line is a remark
        if body:
            documents.append({"title": title[1].strip(' *"') if title else "", "text": body})
    return documents


class Simulator(Retriever):
    """Documents that a language model writes for a query, as the same text as Search's.

    address: llm:<url of an OpenAI-compatible server>, followed by #<model> where it serves several. steps, seed: of the training run.
    A tool call is a request of its own, for such a server batches what comes together. Faults are dealt with as Retriever's are.
    """

    expected = '{"choices": [{"message": {"content": "Doc 1 (Title: ...) ..."}}]}'
    listens = (
        "Such a server listens at /v1/chat/completions, and knows its models by name: llm:http://host:8000/v1#model."
    )
    slow = "Is its model loaded, and the server not overloaded?"

    def __init__(self, address, topk, timeout, steps, seed=0, span=NOISE, patience=PATIENCE):
        """span: share of noisy answers at the first step and at the last."""
        url, _, self.model = address.removeprefix("llm:").partition("#")
        base = _whole(url, "/v1", f"llm:{url}", "llm:http://127.0.0.1:8000/v1#model").rstrip("/")
        base = base.removesuffix("/chat/completions")
        self.models, self.step, self.steps, self.seed, self.span = f"{base}/models", 0, steps, seed, span
        self.probed = (PROBE, 0, None)
        super().__init__(f"{base}/chat/completions", topk, timeout, patience)
        # A run that is resumed on another model would see other documents.
        self.fingerprint = f"simulated by {self.model}, noise {span[0]:g} to {span[1]:g}"

    def begin(self, step):
        """Name the training step: from here on its share of answers is noisy. 0, as at the start: the smallest share."""
        self.step = step

    def noisy(self, query, step):
        """Whether the answer to this query is noisy at this step."""
        return number("noise", self.seed, step, query) / 2**63 < noise(step, self.steps, *self.span)

    def __call__(self, query, earlier=(), question=None):
        """question: the Question behind the query. Its golds tell the model what useful documents lead to, and noisy ones avoid."""
        if not query.strip():
            return as_text([])
        answer = Future()
        self._serve([((query, self.step, question), answer)])
        return answer.result()

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
            "seed": number("text", self.seed, step, query) >> 32,  # 31 bits: every server takes these
        }

    def _texts(self, answer, calls):
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] or ""
        documents = written(text, choice.get("finish_reason") == "length")[: self.topk]
        if not documents:
            raise _NoResults(
                f"no documents but: {_short(text) or '(nothing)'}",
                f"Wanted are lines such as 'Doc 1 (Title: ...) ...' within {MAX_TOKENS} tokens: another model may write them.",
            )
        return [as_text(documents)]

    def _request(self, calls):
        if not self.model:
            self.model = self._only_model()
        return super()._request(calls)

    def _exchange(self, send, address, **what):
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return super()._exchange(send, address, headers=headers, **what)

    def _only_model(self):
        """The name of the one model that the server has. Raises _NoServer or _NoResults."""
        answer = self._exchange(self.session.get, self.models)
        try:
            names = [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            names = []
        if len(names) != 1:
            what = f"{self.models} lists {len(names)} models{': ' if names else ''}{', '.join(names[:5])}"
            raise _NoResults(what, "Name one behind a #: llm:http://host:8000/v1#model.")
        return names[0]
