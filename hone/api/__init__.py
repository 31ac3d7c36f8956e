"""Training, generation and evaluation from Python: `hone.train`, `hone.sft`, `hone.evaluate`, `hone.LLM`.

The functions compose the same configs as the command line and run the same programs.
"""

from __future__ import annotations

from hone.api.llm import LLM, Response
from hone.api.runs import Trained, evaluate, sft, train

__all__ = ["LLM", "Response", "Trained", "evaluate", "sft", "train"]
