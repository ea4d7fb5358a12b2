"""A retrieval server that speaks Search-R1's protocol: python -m tools.serve --corpus documents.jsonl [--dense MODEL]

    POST /retrieve  {"queries": [...], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}, one list per query;
                    only the documents without return_scores; --topk documents without topk
    GET /health     -> {"status": "ok", "documents": 21015324, "kind": "bm25"}

BM25 is that of tools/search.py, so a server and --corpus give an agent the same text. --dense finds the nearest
passages by the embeddings of a model: mean over tokens, length 1, inner product (faiss, exact).
Documents and index are mapped from disk, not read into memory: --workers processes share one copy. docs/retrieval.md
has the details.
"""

import contextlib
import hashlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common import cache, run
from tools import search

if TYPE_CHECKING:
    from fastapi import FastAPI
    from numpy import ndarray

SETTINGS = "TURNWISE_SERVE"  # environment variable that passes the arguments to worker processes
LENGTH = 256  # most tokens of a query or passage that are embedded
BATCH = 256  # passages embedded at a time
BAR = 50 * 2**20  # bytes of a corpus above which reading it shows a progress bar
QUERIES, FOUND = 10_000, 100_000  # most queries and documents of a request
E5 = re.compile(r"(?<![a-z])e5(?![a-z0-9])")  # in a model's name; e5-mistral pools differently and is refused


@dataclass
class Args:
    """A retrieval server that speaks Search-R1's protocol."""

    corpus: str
    """file with one document per line: {"id", "title", "text"}, or {"id", "contents"}"""
    dense: str = ""
    """embed with this model (a folder or hub id, such as intfloat/e5-base-v2) instead of BM25"""
    prefixes: Literal["auto", "e5", "none"] = "auto"
    """dense: put "query: " and "passage: " before texts, as E5 models need (auto: if the model's name contains E5)"""
    index: str = ""
    """dense: an existing faiss index of this corpus and this model, in the order of the lines, instead of a new one"""
    backend: Literal["numpy", "numba"] = "numpy"
    """BM25: numba is faster on a large corpus, and may order documents of equal score differently"""
    topk: int = 3
    """documents per query if the request does not set topk"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0: all addresses of this machine, open to anybody who can reach it"""
    port: int = 8000
    """port to listen on"""
    workers: int = 1
    """server processes"""


# ---- documents


class Corpus:
    """The documents of a file, each read on access. Raises OSError or ValueError as search.read_corpus does.

    The file is read through once, to check it and to find the start of each line. The starts are cached under the
    file's path, size and time.
    """

    def __init__(self, path: str | Path):
        path = Path(path).resolve()
        state = path.stat()
        key = hashlib.sha256(repr((str(path), state.st_size, state.st_mtime_ns, _version())).encode()).hexdigest()[:16]
        folder = cache.cache_dir() / "corpora" / key
        with cache.locked(folder):
            if not folder.exists():
                _note(path, state.st_size, folder)
        self.fingerprint = (folder / "fingerprint").read_text()
        self.starts = _numpy().load(folder / "starts.npy", mmap_mode="r")
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> search.Document:
        if not 0 <= i < len(self.starts):
            raise IndexError(i)  # ends a loop over documents
        start = int(self.starts[i])
        end = self.bytes.find(b"\n", start)
        return search.read_document(self.bytes[start : len(self.bytes) if end < 0 else end])


def _note(path, size, folder):
    starts = []
    with run.progress(total=size, unit="B", unit_scale=True, desc=f"reading {path.name}", shown=size >= BAR) as bar:

        def documents():
            for place, document in search.scan(path):
                starts.append(place)
                bar.update(place - bar.n)
                yield document

        fingerprint = search.fingerprint(documents())
    temporary = Path(f"{folder}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _numpy().save(temporary / "starts.npy", _numpy().array(starts, dtype="int64"))
    (temporary / "fingerprint").write_text(fingerprint)
    temporary.rename(folder)  # atomic: an interrupted run leaves no folder


def _numpy():
    import numpy  # not at module level: --help works without it

    return numpy


def _version():
    import bm25s

    return f"{bm25s.__version__}, tokens {search.TOKENS}"


# ---- embeddings


class Dense:
    """A search by embeddings, with the same find_all as Search. It embeds one batch at a time: that fills the device.

    The corpus is embedded once, with a progress bar, and cached on disk under a hash of corpus and model. On a GPU the
    model runs in half precision. Raises SystemExit if a package is missing, or model, index and corpus do not fit.
    """

    def __init__(
        self,
        documents: Sequence[search.Document],
        model: str,
        prefixes: str = "auto",
        index: str = "",
        threads: int = 0,
    ):
        for package in ("faiss", "torch", "transformers"):
            if not importlib.util.find_spec(package):
                pin = {"faiss": "faiss-cpu==1.15.1"}.get(package, package)
                raise SystemExit(f"--dense: {package} is not installed: .venv/bin/pip install {pin}")
        import faiss
        import torch
        from transformers import AutoModel, AutoTokenizer

        if threads:
            torch.set_num_threads(threads)
            faiss.omp_set_num_threads(threads)
        self.torch, self.faiss, self.documents = torch, faiss, documents
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        half = torch.bfloat16 if self.device == "cuda" and torch.cuda.is_bf16_supported() else torch.float16
        dtype = half if self.device == "cuda" else torch.float32
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            self.model = AutoModel.from_pretrained(model, dtype=dtype).to(self.device).eval()
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise SystemExit(f"--dense {model}: transformers could not load a model from there: {reason}") from None
        if getattr(self.model.config, "is_encoder_decoder", False) or "mistral" in str(self.model.config.model_type):
            raise SystemExit(
                f"--dense {model}: choose an encoder whose embedding is the mean over tokens, such as E5 or MiniLM."
            )
        e5 = prefixes == "e5" or (prefixes == "auto" and E5.search(Path(model).name.lower()) is not None)
        self.query, self.passage = ("query: ", "passage: ") if e5 else ("", "")
        self.length = min(LENGTH, self.tokenizer.model_max_length)
        self.lock = threading.Lock()
        self.index = self._given(index) if index else self._own()

    def _given(self, path):
        try:
            index = self._read(path)
        except RuntimeError as error:
            raise SystemExit(f"--index {path}: faiss cannot read it ({str(error).strip().splitlines()[-1]}).") from None
        size = self.model.config.hidden_size
        if (index.ntotal, index.d) != (len(self.documents), size):
            raise SystemExit(
                f"--index {path}: it holds {index.ntotal} vectors of {index.d} numbers; the corpus has "
                f"{len(self.documents)} documents and the model makes {size} numbers. Build it from this corpus."
            )
        return index

    def _own(self):
        from tqdm import trange

        path = cache.cache_dir() / "dense" / f"{self.documents.fingerprint}-{self._model_hash()}.faiss"
        with cache.locked(path):
            if not path.exists():
                index = self.faiss.IndexFlatIP(self.model.config.hidden_size)
                count = len(self.documents)
                for start in trange(0, count, BATCH, desc="embedding the corpus", disable=count <= 4 * BATCH):
                    batch = [self.documents[i] for i in range(start, min(start + BATCH, count))]
                    index.add(self.embed([self.passage + search.contents(document) for document in batch]))
                temporary = Path(f"{path}.new")
                self.faiss.write_index(index, str(temporary))
                temporary.rename(path)  # atomic: an interrupted build leaves no index
        return self._read(path)

    def _read(self, path):
        return self.faiss.read_index(str(path), self.faiss.IO_FLAG_MMAP_IFC)

    def _model_hash(self):
        content = hashlib.sha256(repr((self.passage, self.length, str(self.model.dtype))).encode())
        content.update(repr(sorted(self.tokenizer.get_vocab().items())).encode())
        for name, values in self.model.state_dict().items():
            content.update(name.encode())
            content.update(values.float().cpu().numpy().tobytes())
        return content.hexdigest()[:16]

    def embed(self, texts: list[str]) -> "ndarray":
        """Return (N, d) float32 embeddings of N texts: the last layer's mean over the tokens, scaled to length 1."""
        torch = self.torch
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # tokenizers reject half a surrogate pair
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        tokens = tokens.to(self.device)
        with torch.inference_mode():
            hidden = self.model(**tokens).last_hidden_state.float()
            mask = tokens["attention_mask"][..., None]
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()

    def find_all(self, queries: list[str], topk: int) -> list[list[tuple[search.Document, float]]]:
        """Return at most topk (document, score) per query, the best first; none for an empty query."""
        found, nonempty = [[] for _ in queries], [i for i, query in enumerate(queries) if query.strip()]
        for start in range(0, len(nonempty), BATCH):
            batch = nonempty[start : start + BATCH]
            with self.lock:
                vectors = self.embed([self.query + queries[i] for i in batch])
                scores, places = self.index.search(vectors, min(topk, len(self.documents)))
            for i, *hits in zip(batch, places.tolist(), scores.tolist()):
                found[i] = [(self.documents[place], score) for place, score in zip(*hits) if place >= 0]
        return found


# ---- the server


def open_index(args: Args, threads: int = 0) -> search.Search | Dense:
    """Return a Search, or a Dense with that many threads (0: all), for the corpus. Raises SystemExit for bad args."""
    try:
        documents = Corpus(args.corpus)
        if args.dense:
            return Dense(documents, args.dense, args.prefixes, args.index, threads)
        return search.Search(documents, args.topk, args.backend)
    except OSError as error:
        blamed = str(error.filename) in (str(args.corpus), str(Path(args.corpus).resolve()))
        raise SystemExit(f"--corpus {args.corpus}: {error.strerror}" if blamed else str(error)) from None
    except ValueError as error:
        raise SystemExit(f"--corpus: {error}") from None


def application(index: search.Search | Dense, args: Args) -> "FastAPI":
    """Return the FastAPI application that answers from an index."""
    from fastapi import FastAPI, Response
    from fastapi.exceptions import RequestValidationError
    from pydantic import BaseModel, Field

    class Request(BaseModel):
        queries: list[str] = Field(max_length=QUERIES)
        topk: int | None = Field(None, ge=1)
        return_scores: bool = False

    from tools import limits  # not at module level: --help works without uvicorn

    app = FastAPI(title="Turnwise retrieval")
    app.add_middleware(limits.Limits)
    kind = f"dense: {args.dense}" if args.dense else "bm25"

    def answer(content, status=200):
        # FastAPI's own encoding would fail on half a surrogate pair, which JSON, and so a corpus, can hold.
        return Response(json.dumps(content), status, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    def refuse(_, error):
        first = error.errors()[0]
        where = ".".join(
            str(part) for part in first["loc"][1:] if isinstance(part, str) or first["type"] != "json_invalid"
        )
        wanted = '{"queries": ["..."], "topk": 3, "return_scores": true}'
        return answer({"detail": f"{where or 'the body'}: {first['msg']}. Expected is {wanted}."}, 422)

    @app.post("/retrieve")
    def retrieve(request: Request):  # not async: it runs in one of 40 threads while /health answers
        topk = min(request.topk or args.topk, len(index.documents))
        if len(request.queries) * topk > FOUND:
            detail = f"topk: {len(request.queries)} queries of {topk} documents are more than {FOUND} documents"
            return answer({"detail": detail}, 422)
        found = index.find_all(request.queries, topk)
        plain = [[({"id": d["id"], "contents": search.contents(d)}, score) for d, score in hits] for hits in found]
        if request.return_scores:
            return answer({"result": [[{"document": d, "score": score} for d, score in hits] for hits in plain]})
        return answer({"result": [[d for d, _ in hits] for hits in plain]})

    @app.get("/health")
    async def health():  # async: it needs none of the threads, which may all be busy
        return {"status": "ok", "documents": len(index.documents), "kind": kind}

    return app


def worker() -> "FastAPI":
    """Return the application for one of several processes, which exits when the process that started it is gone."""
    args, parent = Args(**json.loads(os.environ[SETTINGS])), os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    return ready(args, max(1, (os.cpu_count() or 1) // args.workers))


def ready(args: Args, threads: int = 0) -> "FastAPI":
    """Return the application after a first query, which compiles the functions of numba, if it is used."""
    index = open_index(args, threads)
    index.find_all([search.PROBE], args.topk)
    return application(index, args)


def listen(args: Args) -> socket.socket:
    """Return a socket bound to host and port, before an index takes hours. Raises SystemExit if binding fails."""
    try:
        family = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((args.host, args.port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SystemExit(f"--host {args.host} --port {args.port}: {reason}. Choose another port or host.") from None
    return bound


def check(args: Args) -> None:
    """Raise SystemExit for arguments that cannot work, before any file is read."""
    for name in ("topk", "workers"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name} {getattr(args, name)}: must be at least 1.")
    for name in ("index", "prefixes"):
        if getattr(args, name) != getattr(Args, name) and not args.dense:
            raise SystemExit(f"--{name}: only with --dense.")
    missing = [name for name in ("fastapi", "uvicorn") if not importlib.util.find_spec(name)]
    missing += ["numba"] if args.backend == "numba" and not importlib.util.find_spec("numba") else []
    if missing:
        raise SystemExit(f"serve: missing packages: .venv/bin/pip install {' '.join(missing)}")
    if not Path(args.corpus).is_file():
        raise SystemExit(
            f"--corpus {args.corpus}: no such file. A corpus has a JSON object per line with id, title and text."
        )


def main(argv: list[str] | None = None) -> None:
    """Run the server with command-line arguments."""
    import tyro

    args = tyro.cli(Args, args=argv, prog="python -m tools.serve", use_underscores=True)
    check(args)
    import uvicorn

    bound = listen(args)
    if args.backend == "numba":
        run.notice("opening the index and compiling the search, which may take a minute (--backend numba)")
    app = ready(args)  # also with workers: errors are reported once, and workers find the index built
    serving = f"serving {args.corpus} ({args.dense or 'bm25'}) at http://{args.host}:{args.port}/retrieve"
    quiet = dict(log_level="warning", access_log=False, http="tools.limits:Impatient")
    if args.workers == 1:

        class Server(uvicorn.Server):
            async def startup(self, sockets=None):
                await super().startup(sockets)
                print(serving, flush=True)

        with contextlib.suppress(KeyboardInterrupt):
            Server(uvicorn.Config(app, **quiet)).run(sockets=[bound])
        return
    run.notice(f"the index is ready: starting {args.workers} workers, each of which opens it again")
    del app
    bound.close()
    os.environ[SETTINGS] = json.dumps(asdict(args))

    def announce():  # once a worker listens: each opens the index again first, which takes seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection((args.host, args.port), 1.0):
                return print(serving, flush=True)
            time.sleep(0.1)

    threading.Thread(target=announce, name="announce", daemon=True).start()
    uvicorn.run("tools.serve:worker", factory=True, workers=args.workers, host=args.host, port=args.port, **quiet)


if __name__ == "__main__":
    main()
