"""Tracking: the run folder, the metrics, and the backends that show them."""

from __future__ import annotations

from hone.tracking.atomic import atomic_path, atomic_write_bytes, atomic_write_text
from hone.tracking.console import progress
from hone.tracking.contract import RunInfo, Tracker, TrackerError
from hone.tracking.metrics_file import MetricsFile, read_metrics, series
from hone.tracking.run_folder import RunFolder
from hone.tracking.timer import simple_timer
from hone.tracking.tracking import Tracking, ValidationGenerationsLogger

__all__ = [
    "MetricsFile",
    "RunFolder",
    "RunInfo",
    "Tracker",
    "TrackerError",
    "Tracking",
    "ValidationGenerationsLogger",
    "atomic_path",
    "atomic_write_bytes",
    "atomic_write_text",
    "progress",
    "read_metrics",
    "series",
    "simple_timer",
]
