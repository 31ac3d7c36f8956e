"""vLLM in slow motion: a logits processor that changes nothing and sleeps while a file exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

SECONDS_PER_TOKEN = 0.05


class SlowMotion(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, *_: Any) -> None:
        self._file = Path(os.environ["HONE_SLOW_MOTION"])

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Any) -> Any:
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Is called once per step, whatever the sampler does."""
        if self._file.exists():
            time.sleep(SECONDS_PER_TOKEN)
