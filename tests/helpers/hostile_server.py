"""A server that answers in every wrong way: python tests/helpers/hostile_server.py [--port 8000]

POST /KIND, or /KIND/v1/chat/completions for a simulator, gets the answer of that kind. /later-KIND answers the probe
well and every request after it in that kind; it counts the requests to each path. It prints its port.
"""

import argparse
import gzip
import json
import socketserver
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x1b[2J\u202e"
GOOD = {
    False: {"result": [[{"document": {"id": "1", "contents": '"Ada"\nis tall'}}]]},
    True: {"choices": [{"message": {"content": "Doc 1 (Title: Ada) is tall"}, "finish_reason": "stop"}]},
}


def http(body, status="200 OK", *headers):
    """Return a whole answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body


def found(*documents):
    return {"result": [list(documents)]}


def said(content):
    return {"choices": [{"message": {"content": content}}]}


def dribble(head, piece):
    """Yield a beginning, and then a piece every 0.05 seconds without end."""
    yield head
    while True:
        time.sleep(0.05)
        yield piece


def endless(head, piece):
    yield head
    while True:
        yield piece


def hang():
    time.sleep(3600)
    yield b""


OK = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(b" " * 2**26, 1) * 8  # 512 MiB of spaces
KINDS = {  # kind -> function of (whether a simulator asks) -> bytes, or an iterator of them
    "dribbled_headers": lambda sim: dribble(OK, b"X-More: 1\r\n"),
    "dribbled_header": lambda sim: dribble(OK + b"X-More: ", b"x"),
    "dribbled_status": lambda sim: dribble(b"", b"H"),
    "continue": lambda sim: dribble(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "dribbled_body": lambda sim: dribble(OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "dribbled_chunks": lambda sim: dribble(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "endless_body": lambda sim: endless(OK + b"\r\n", b" " * 65536),
    "endless_chunks": lambda sim: endless(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"
    ),
    "endless_chunk_size": lambda sim: endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 65536),
    "endless_trailers": lambda sim: endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: 1\r\n" * 10000),
    "endless_headers": lambda sim: endless(OK, b"X-More: " + b"x" * 60000 + b"\r\n"),
    "endless_header": lambda sim: endless(OK + b"X-More: ", b"x" * 65536),
    "endless_error": lambda sim: endless(b"HTTP/1.1 500 No\r\n\r\n", b" " * 65536),
    "endless_redirect": lambda sim: endless(b"HTTP/1.1 307 Go\r\nLocation: /good\r\n\r\n", b" " * 65536),
    "bomb": lambda sim: http(BOMB, "200 OK", "Content-Encoding: gzip"),
    "bad_gzip": lambda sim: http(b"no gzip", "200 OK", "Content-Encoding: gzip"),
    **{
        f"redirect_{n}": lambda sim, n=n: http(b"", f"{n} Go", "Location: /stolen/elsewhere")
        for n in (301, 302, 303, 307, 308)
    },
    "short_length": lambda sim: http(GOOD[sim]).replace(b"Content-Length: ", b"Content-Length: 9"),
    "negative_length": lambda sim: OK + b"Content-Length: -5\r\n\r\n{",
    "two_lengths": lambda sim: OK + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
    "chunk_garbage": lambda sim: OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "reset": lambda sim: iter([OK + b"Content-Length: 99\r\n\r\n{", None]),
    "silence": lambda sim: hang(),
    "http09": lambda sim: b"<html>welcome " + ESCAPE.encode() + b"</html>\r\n",
    "status_escape": lambda sim: b"HTTP/1.1 \x1b[31m Bad\r\n\r\n",
    "bad_header": lambda sim: OK + b"\x1b[31m no colon\r\nContent-Length: 2\r\n\r\n{}",
    "binary": lambda sim: http(bytes(range(256)) * 40),
    "not_utf8": lambda sim: http(b'{"result": [["\xff\xfe"]]}'),
    "not_json": lambda sim: http(b"<html><body>" + ESCAPE.encode() + b"</body>"),
    "empty": lambda sim: http(b""),
    "list": lambda sim: http([]),
    "null": lambda sim: http(None),
    "number": lambda sim: http(7),
    "nan": lambda sim: http(b'{"result": NaN, "choices": NaN}'),
    "nested": lambda sim: http(b"[" * 100_000),
    "nested_inside": lambda sim: http(b'{"result": [' + b"[" * 100_000),
    "long_number": lambda sim: http(b'{"result": ' + b"9" * 10**6 + b"}"),
    "no_keys": lambda sim: http({"a": 1}),
    "none_found": lambda sim: http({"result": [], "choices": []}),
    "too_many": lambda sim: http({"result": [[], []], "choices": {}}),
    "null_inside": lambda sim: http({"result": [None], "choices": [None]}),
    "number_inside": lambda sim: http(said(7) | found(7)),
    "wrong_types": lambda sim: http(said({"a": []}) | found({"document": {"text": 7, "contents": ["x"]}})),
    "wrong_title": lambda sim: http(said([1]) | found({"title": {"a": 1}, "text": "x"})),
    "million": lambda sim: http(b'{"choices": [' + b"{}," * 10**6 + b'{}], "result": [[' + b"{}," * 10**6 + b"{}]]}"),
    "empty_lists": lambda sim: http(b'{"choices": [' + b"[]," * 5 * 10**6 + b"[]]}"),
    "status_500": lambda sim: http(ESCAPE, "500 No"),
    "status_418": lambda sim: http(b"", "418 Teapot"),
    "status_429": lambda sim: http(b"", "429 Too Many", "Retry-After: 3600"),
    "escape": lambda sim: http(said(ESCAPE) | {"result": ESCAPE}),
}
LARGE = {  # well-formed answers that are large: taken, or refused, but within time and memory
    "large_text": lambda sim: http(
        said("Doc 1 (Title: a) " + "ab " * 5 * 10**6) | found({"title": "a", "text": "ab " * 10**6})
    ),
    "wide_text": lambda sim: http(
        (said if sim else lambda t: found({"title": "a", "text": t}))("Doc 1 (Title: a) \U0001f600" + "é" * 10**6)
    ),
    "cookies": lambda sim: http(GOOD[sim], "200 OK", *(f"Set-Cookie: a{n}={'x' * 60000}" for n in range(60))),
}


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        length, words = 0, self.rfile.readline().decode().split()
        while line := self.rfile.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.rfile.read(length)
        path = words[1]
        kind, simulator = path.split("/")[1], "/v1/" in path
        seen = self.server.seen
        seen[path] = seen.get(path, 0) + 1
        if kind == "seen":
            return self.wfile.write(http(seen))
        if kind == "good" or (kind.startswith("later-") and seen[path] == 1):
            return self.wfile.write(http(GOOD[simulator]).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        answer = (KINDS | LARGE).get(kind.removeprefix("later-"), lambda sim: http(b"", "404 No"))(simulator)
        try:
            for piece in [answer] if isinstance(answer, bytes) else answer:
                if piece is None:  # close with a reset
                    self.connection.setsockopt(1, 13, struct.pack("ii", 1, 0))
                    return self.connection.close()
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            pass  # the client has left


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 256

    def __init__(self, port=0):
        self.seen = {}
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, request, client_address):
        pass  # the client has left


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    server = Server(parser.parse_args().port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()  # until the test that started it closes it
