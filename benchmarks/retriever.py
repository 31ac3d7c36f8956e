"""The retrieval service against a bare loop of single-query bm25s calls: queries per second and latency.

The corpus is `../shared/data/wiki_corpus` where it is there, else 20,000 made-up passages. 32 clients each
send one query at a time over HTTP; the service runs in a process of its own on this machine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import bm25s

from hone.retrieval.serve import IndexOptions, open_index

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "wiki_corpus"
CLIENTS, QUERIES, ROUNDS, TOPK = 32, 2000, 5, 3
WANTED_PER_S, WANTED_RATIO, WANTED_INDEX_S = 300, 0.5, 10


def corpus_and_queries(folder: Path) -> tuple[Path, list[str]]:
    if SHARED.is_dir():
        with gzip.open(SHARED / "questions.jsonl.gz", "rt", encoding="utf-8") as lines:
            queries = [json.loads(line)["question"] for line in lines][:QUERIES]
        return SHARED / "passages.jsonl.gz", queries
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 9))) for _ in range(30_000)]
    file = folder / "passages.jsonl"
    with file.open("w") as out:
        for number in range(20_000):
            text = " ".join(words[min(int(rng.paretovariate(0.7)), 29_999)] for _ in range(90))
            out.write(
                json.dumps({"id": str(number), "title": rng.choice(words), "text": text}) + "\n"
            )
    return file, [" ".join(rng.choices(words, k=9)) for _ in range(QUERIES)]


def loop_per_s(index: bm25s.BM25, queries: list[str]) -> float:
    started = time.perf_counter()
    for query in queries:
        index.retrieve(bm25s.tokenize(query, show_progress=False), k=TOPK, show_progress=False)
    return len(queries) / (time.perf_counter() - started)


async def over_http(url: str, queries: list[str]) -> tuple[float, list[float]]:
    """Queries per second of all clients together, and the milliseconds of each query."""
    waits: list[float] = []
    todo = iter(queries)

    async def client(session: aiohttp.ClientSession) -> None:
        for query in todo:
            started = time.perf_counter()
            order = {"queries": [query], "topk": TOPK, "return_scores": True}
            async with session.post(url, json=order) as answer:
                assert len((await answer.json())["result"][0]) == TOPK
            waits.append(1000 * (time.perf_counter() - started))

    async with aiohttp.ClientSession() as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        return len(waits) / (time.perf_counter() - started), waits


def start(corpus: Path, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["serve-retriever", "--corpus", corpus, "--index-folder", folder, "--port", port]
    service = subprocess.Popen([sys.executable, "-m", "hone.cli", *map(str, command)])
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return service, f"http://127.0.0.1:{port}/retrieve"
        time.sleep(0.05)
    service.kill()
    raise RuntimeError("the service did not start within 30 s")


def main() -> dict[str, Any]:
    """Print both rates and their ratio; return the numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file, queries = corpus_and_queries(folder)
        started = time.perf_counter()
        corpus, _ = open_index(IndexOptions(file, folder=folder / "index"))
        index_s = time.perf_counter() - started
        bare = bm25s.BM25.load(folder / "index" / "bm25", load_corpus=False)
        service, url = start(file, folder / "index")
        try:
            asyncio.run(over_http(url, queries[:200]))  # warm
            loops, rates, waits = [], [], []
            for _ in range(ROUNDS):
                loops.append(loop_per_s(bare, queries[:500]))
                rate, some = asyncio.run(over_http(url, queries))
                rates.append(rate)
                waits += some
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(20)
    cuts = statistics.quantiles(waits, n=100)
    loop, http = statistics.median(loops), statistics.median(rates)
    print(f"{len(corpus):,} passages indexed in {index_s:.1f} s (asked: below {WANTED_INDEX_S})")
    print(f"HTTP, {CLIENTS} clients: {http:.0f} queries/s (asked: {WANTED_PER_S})")
    print(
        f"loop of single bm25s calls: {loop:.0f}/s, ratio {http / loop:.2f} (asked: {WANTED_RATIO})"
    )
    print(f"latency p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms")
    return {
        "passages": len(corpus),
        "index_s": index_s,
        "http_per_s": http,
        "loop_per_s": loop,
        "ratio": http / loop,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
        "clients": CLIENTS,
    }


if __name__ == "__main__":
    main()
