"""Measure the queries per second of a retrieval server.

    python runs/qps.py http://127.0.0.1:8000/retrieve --corpus documents.jsonl

Every client has its own connection and sends one request after the other. The output has a line per batch size, as in
docs/retrieval.md. Queries are the titles of random documents, with a fixed seed. Without an address, BM25 is measured
in this process, in one thread. The clients share one Python process: beyond a few thousand requests per second they are
the bottleneck.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import requests

from tools import serve
from tools.search import Search

QUERIES = 5000  # documents drawn for queries


def titles(corpus, seed=0):
    """Return the titles of random documents, or the first words of those without a title."""
    rng = random.Random(seed)
    picked = (corpus[rng.randrange(len(corpus))] for _ in range(QUERIES))
    return [document["title"].strip() or " ".join(document["text"].split()[:6]) for document in picked]


def over_http(address, topk):
    """Return a function that makes a client, which is a function that sends queries in one request."""

    def client():
        session = requests.Session()

        def ask(queries):
            body = {"queries": queries, "topk": topk, "return_scores": True}
            answer = session.post(address, json=body, timeout=600)
            answer.raise_for_status()
            assert len(answer.json()["result"]) == len(queries)

        return ask

    return client


def measure(client, queries, batch, clients, seconds):
    """Return (queries per second, median and 95th percentile of milliseconds per request) of concurrent clients."""
    waits, failed = [], []
    begin = time.monotonic()

    def work(number):
        try:
            ask, rng = client(), random.Random(number)
            while time.monotonic() - begin < seconds:
                start = time.monotonic()
                ask(rng.choices(queries, k=batch))
                waits.append(time.monotonic() - start)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"A request failed: {failed[0]}")
    spent = time.monotonic() - begin
    ranked = sorted(waits)
    return len(waits) * batch / spent, 1000 * statistics.median(waits), 1000 * ranked[int(0.95 * (len(ranked) - 1))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", nargs="?", help="address of a server (default: BM25 in this process)")
    parser.add_argument("--corpus", required=True, help="the corpus that the server has: its titles are the queries")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256], help="queries per request")
    parser.add_argument("--clients", type=int, default=16, help="concurrent requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per batch size")
    parser.add_argument("--topk", type=int, default=3, help="documents per query")
    parser.add_argument("--backend", default="numpy", help="of BM25 in this process: numpy or numba")
    args = parser.parse_args()
    corpus = serve.Corpus(args.corpus)
    queries = titles(corpus)
    if args.address:
        client, clients = over_http(args.address, args.topk), args.clients
    else:
        search, clients = Search(corpus, args.topk, args.backend), 1

        def client():
            return lambda queries: search.find_all(queries, args.topk)

    print(
        "| documents | queries/request | clients | queries/s | ms/request: median | 95 % |\n|---|---|---|---|---|---|"
    )
    for batch in args.batch:
        measure(client, queries, batch, 1, min(1.0, args.seconds))  # warm-up
        rate, median, late = measure(client, queries, batch, clients, args.seconds)
        print(f"| {len(corpus):,} | {batch} | {clients} | {rate:,.0f} | {median:.1f} | {late:.1f} |", flush=True)


if __name__ == "__main__":
    main()
