"""1 for a response whose last number is the sum, 0 else."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1].lstrip("0") == ground_truth.lstrip("0"))
