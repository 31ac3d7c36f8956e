"""A small corpus on disk, and the service over it in a thread."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

from hone.retrieval.serve import IndexOptions, open_index

TEXTS = {
    "Owl": "An owl hunts mice at night and turns its head.",
    "Rome": "Rome is the capital of Italy on the river Tiber.",
    "Paris": "Paris is the capital of France on the river Seine.",
    "Salt": "Salt melts at 801 degrees and dissolves in water.",
}


def write_corpus(folder: Path, *, layout: str = "contents") -> Path:
    file = folder / "corpus.jsonl"
    rows = []
    for number, (title, text) in enumerate(TEXTS.items()):
        body = (
            {"contents": f'"{title}"\n{text}'}
            if layout == "contents"
            else {"title": title, "text": text}
        )
        rows.append({"id": str(10 + number), **body})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Retriever:
    """The retrieval service over the small corpus, in a thread of this process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder, self._port = folder, port
        self.url = ""

    def __enter__(self) -> Retriever:
        from hone.retrieval.server import Service

        corpus, index = open_index(IndexOptions(write_corpus(self._folder)))
        self._server = Service(corpus, index, topk=3).server("127.0.0.1", self._port)
        self.url = f"{self._server.address}/retrieve"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answered(self) -> int:
        """Returns the number of queries that the service has answered."""
        with urllib.request.urlopen(self.url.replace("retrieve", "health"), timeout=60) as response:
            return int(json.load(response)["answered"])
