"""A fresh decoder for the made-up world: one token per syllable, word, tag and frame of a passage.

Usage: python recipes/search_r1/small_model.py OUT
"""

from __future__ import annotations

import sys

from world import RELATIONS, SYLLABLES

from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

FRAMES = (
    "Question: ",
    "<think> I look it up. </think>\n<search> ",
    "<think> I know this. </think>\n<answer> ",
    " says it. </think>\n<answer> ",
    "<think> ",
    " </search>",
    " </answer>",
    "\n\n<information>",
    "</information>\n\n",
    'Doc 1(Title: "',
    '") ',
    " of ",
    " is ",
)


def main() -> None:
    words = sorted({*FRAMES, *RELATIONS, *SYLLABLES}, key=lambda word: (-len(word), word))
    tokenizer = character_tokenizer(words=words)
    lm = tiny_lm(
        len(tokenizer), hidden=96, layers=3, heads=4, mlp=192, kv_heads=4, max_positions=256
    )
    save_pretrained(lm, tokenizer, sys.argv[1])


if __name__ == "__main__":
    main()
