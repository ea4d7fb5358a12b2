"""Retrieval for search agents: BM25 in the trainer's process over a JSONL corpus.

A corpus is a file of one JSON object a line, {"id", "title", "text"}. The index (bm25s) is built once and cached on disk under
a hash of the corpus' content, so a changed file is indexed anew and an unchanged one is loaded in milliseconds.
Search reads and never writes: it is deterministic, has no state between calls, and may be called from several threads.
"""

import hashlib
import json
import shutil
from pathlib import Path

from common import run


def read_corpus(path):
    """documents: list of {"id", "title", "text"}. Raises ValueError naming file and line of the first malformed one."""
    documents = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)
                documents.append({key: str(document[key]) for key in ("id", "title", "text")})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a document of id, title and text ({error!r})") from None
    if not documents:
        raise ValueError(f"{path}: the corpus is empty")
    return documents


class Search:
    """The `topk` best documents of a corpus (a path, or a list of documents) for a query, as the text between the information tags."""

    def __init__(self, corpus, topk):
        import bm25s
        import Stemmer

        self.documents = corpus if isinstance(corpus, list) else read_corpus(corpus)
        self.topk = min(topk, len(self.documents))
        self.bm25s, self.new_stemmer = bm25s, Stemmer.Stemmer
        content = json.dumps([bm25s.__version__, self.documents]).encode()
        index = run.cache_dir() / "bm25" / hashlib.sha256(content).hexdigest()[:16]
        with run.locked(index):
            if not index.exists():
                built = bm25s.BM25()
                texts = [f"{d['title']} {d['text']}" for d in self.documents]
                built.index(self._tokenize(texts), show_progress=len(texts) > 50_000)
                beside = Path(f"{index}.new")
                shutil.rmtree(beside, ignore_errors=True)
                built.save(beside)
                beside.rename(index)  # whole or not at all
        self.index = bm25s.BM25.load(index, mmap=True)

    def _tokenize(self, texts):
        # A stemmer must not be shared by threads; making one takes microseconds.
        return self.bm25s.tokenize(texts, stopwords="en", stemmer=self.new_stemmer("english"), show_progress=False)

    def __call__(self, query):
        """query -> "Doc 1 (Title: ...) ...", one line a document; a query without a known word finds nothing."""
        tokens = self._tokenize([query])
        places, scores = self.index.retrieve(tokens, k=self.topk, show_progress=False, n_threads=0)
        found = [self.documents[i] for i, score in zip(places[0], scores[0]) if score > 0]
        if not found:
            return "Nothing found."
        return "\n".join(f"Doc {i} (Title: {d['title']}) {d['text']}" for i, d in enumerate(found, 1))
