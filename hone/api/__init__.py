"""Training, generation and evaluation: `hone.train`, `hone.sft`, `hone.dpo`, `hone.evaluate`, `hone.LLM`.

The functions compose the same configs as the command line and run the same programs.
"""

from __future__ import annotations

from hone.api.llm import LLM, Response
from hone.api.runs import Trained, dpo, evaluate, sft, train

__all__ = ["LLM", "Response", "Trained", "dpo", "evaluate", "sft", "train"]
