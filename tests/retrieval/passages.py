"""A small corpus on disk."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = {
    "Owl": "An owl hunts mice at night and turns its head.",
    "Rome": "Rome is the capital of Italy on the river Tiber.",
    "Paris": "Paris is the capital of France on the river Seine.",
    "Salt": "Salt melts at 801 degrees and dissolves in water.",
}


def write_corpus(folder: Path, *, form: str = "contents") -> Path:
    file = folder / "corpus.jsonl"
    rows = []
    for number, (title, text) in enumerate(TEXTS.items()):
        body = (
            {"contents": f'"{title}"\n{text}'}
            if form == "contents"
            else {"title": title, "text": text}
        )
        rows.append({"id": str(10 + number), **body})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def silent(what: str, done: int, of: int) -> None:
    """Progress that nobody watches."""
