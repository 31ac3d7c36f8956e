"""The counts of the mini-batch under way, for `agg_loss(..., **config.global_batch_info)`.

The aggregation announces them; a config only hands them on, so this file knows no tensors.
"""

from __future__ import annotations

from contextvars import ContextVar

from hone.types import Settings

announced: ContextVar[Settings] = ContextVar("hone_batch_info", default={})  # noqa: B039
"""`batch_num_tokens` and `global_batch_size` inside a mini-batch, nothing outside."""
