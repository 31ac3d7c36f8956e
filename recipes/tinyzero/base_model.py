"""A fresh decoder and its tokenizer: the words of the prompt, the tags, and one token a digit.

`--coarse` makes texts a third as long, for a CPU: one token for each stretch of the prompt that never
changes, and one a number up to 99.

Usage: python recipes/tinyzero/base_model.py OUT --hidden 384 --layers 6
"""

from __future__ import annotations

import argparse
import re
import string
import sys
from collections.abc import Iterable
from pathlib import Path

from hone.data.preprocess.countdown import TEMPLATES
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.models.writing import staged_folder

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SIGNS = (" + ", " - ", " * ", " / ", " = ", ", yes\n", ", no\n")


def vocabulary() -> list[str]:
    """Whole words of the template, tags and signs; the longest first, since the first match wins."""
    text = TEMPLATES["base"]
    for tag in TAGS:
        text = text.replace(tag, "")
    words = {*re.findall(r" ?[A-Za-z]{2,}", text), *SIGNS}
    return [*TAGS, *longest_first(words)]


def coarse_vocabulary() -> list[str]:
    """The three stretches of the template between its fields, tags, signs and two-digit numbers."""
    stretches = re.split(r"\{\w+\}", TEMPLATES["base"].removesuffix("<think>"))
    return longest_first({*stretches, *TAGS, *SIGNS, ", ", *map(str, range(10, 100))})


def longest_first(words: Iterable[str]) -> list[str]:
    return sorted(words, key=lambda word: (-len(word), word))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coarse", action="store_true", help="fewer, longer tokens")
    chosen = parser.parse_args()
    if chosen.out.exists():
        parser.error(f"{chosen.out} is there already: remove it, or name another folder")
    words = coarse_vocabulary() if chosen.coarse else vocabulary()
    tokenizer = character_tokenizer(string.printable[:95] + "\n", words=words)
    lm = tiny_lm(
        len(tokenizer),
        hidden=chosen.hidden,
        layers=chosen.layers,
        heads=chosen.heads,
        kv_heads=chosen.heads,
        mlp=4 * chosen.hidden,
        max_positions=1024,
        seed=chosen.seed,
    )
    # `reproduce.sh` takes a folder that is there for whole, so it appears when it is.
    with staged_folder(chosen.out) as temporary:
        save_pretrained(lm, tokenizer, temporary)
    count = sum(p.numel() for p in lm.parameters())
    sys.stdout.write(f"{chosen.out}: {count:,} parameters, {len(tokenizer)} tokens\n")


if __name__ == "__main__":
    main()
