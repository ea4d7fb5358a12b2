"""A retrieval server for tests and fault drills: Search-R1's protocol over our BM25 search, on the standard library.

    python tests/helpers/retrieval_server.py --port 8000 --corpus tiny [--delay 0.2] [--shape plain]

In a test: address, stop = start(DOCUMENTS, control). `control` may be changed while the server runs.
"""

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.search import Search, read_corpus  # noqa: E402

PATH = "/retrieve"


@dataclass
class Control:
    """How the server behaves, and the requests it got."""

    shape: str = "wrapped"
    """wrapped: with scores, as Search-R1; plain: documents alone; fields: documents with separate title and text"""
    delay: float = 0.0
    """seconds before each answer"""
    fail: Any = None
    """a function of a request's queries. Its result: None answers them, a number is an HTTP status, bytes are the body,
    HANG never answers"""
    batches: list[int] = field(default_factory=list)
    """the number of queries of each request so far"""


HANG = object()


def result(document, rank, shape):
    """Return a document in the shape of the answer."""
    if shape == "fields":
        return document
    plain = {"id": document["id"], "contents": f'"{document["title"]}"\n{document["text"]}'}
    return plain if shape == "plain" else {"document": plain, "score": 1 / rank}


class Server(ThreadingHTTPServer):
    """A server of a list of documents. It may reuse an address that was just in use."""

    request_queue_size = 128

    def __init__(self, documents, control, port):
        self.documents, self.control = documents, control
        self.searches, self.lock = {}, threading.Lock()
        self.stopped = threading.Event()
        self.search(3)  # imports and index before the first request
        super().__init__(("127.0.0.1", port), Handler)

    def search(self, topk):
        with self.lock:
            if topk not in self.searches:
                self.searches[topk] = Search(self.documents, topk)
            return self.searches[topk]

    def handle_error(self, request, client_address):
        pass  # the client has disconnected


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive
    disable_nagle_algorithm = True

    def do_POST(self):
        control = self.server.control
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != PATH:
            return self.send(404, b'{"detail":"Not Found"}')
        control.batches.append(len(asked["queries"]))
        self.server.stopped.wait(control.delay)
        fault = control.fail and control.fail(asked["queries"])
        if fault is HANG:
            self.server.stopped.wait()
            self.close_connection = True
        elif isinstance(fault, int):
            self.send(fault, b"Internal Server Error")
        elif isinstance(fault, bytes):
            self.send(200, fault)
        else:
            search = self.server.search(asked["topk"])
            found = [search.find(query) for query in asked["queries"]]
            body = [[result(d, rank, control.shape) for rank, d in enumerate(one, 1)] for one in found]
            self.send(200, json.dumps({"result": body}).encode())

    def send(self, status, body):
        if self.server.stopped.is_set():  # a stopped server must not answer on its open connections
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def load(corpus):
    """Return the documents of a list, a file, or "tiny" (the embedded world)."""
    if corpus == "tiny":
        from tasks.tiny import tiny_search

        return tiny_search.search_world()[0]
    return corpus if isinstance(corpus, list) else read_corpus(corpus)


def start(corpus="tiny", control=None, port=0):
    """Serve in a thread of this process. Returns (address, stop). Port 0 takes a free one."""
    server = Server(load(corpus), control or Control(), port)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop():
        server.stopped.set()
        server.shutdown()
        server.server_close()

    return f"http://127.0.0.1:{server.server_address[1]}{PATH}", stop


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--corpus", default="tiny", help='JSONL file of {"id", "title", "text"}, or tiny')
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--shape", choices=("wrapped", "plain", "fields"), default="wrapped")
    args = parser.parse_args()
    address, stop = start(args.corpus, Control(args.shape, args.delay), args.port)
    print(f"serving {args.corpus} at {address}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        stop()


if __name__ == "__main__":
    main()
