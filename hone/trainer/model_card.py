"""Writes the model card of an export: model, data, training settings, curves and evaluation.

Local folders and secrets are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone import __version__
from hone.config.convert import show_value
from hone.redaction import redact
from hone.tracking import RunFolder
from hone.tracking.curve import draw_curve
from hone.tracking.metrics_file import series
from hone.types import JsonObject, JsonValue, Row

CARD_FILE, CURVES_FILE = "README.md", "curves.png"
_CURVE_METRICS = (
    "critic/score/mean", "response_length/mean", "actor/entropy", "actor/ppo_kl", "train/loss", "val/loss",
)  # fmt: skip
_RESULT_METRICS = re.compile(r"val-core/.*|val/loss|critic/score/mean|train/loss")
_PRIVATE_KEY = re.compile(r"cookie|headers|proxy|env_vars|^ray_kwargs", re.IGNORECASE)
"""Settings of the machine that trained, which are left out."""


def write_card(folder: Path, checkpoint: Path, name: str) -> None:
    """Writes the card of the model in `folder`, exported from `checkpoint`."""
    config: JsonObject = {}
    origins: Mapping[str, str] = {}
    metric_rows: list[Row] = []
    run_folders = [path for path in checkpoint.parents[:3] if (path / "config.yaml").is_file()]
    if run_folders:
        run = RunFolder(run_folders[0])
        config, origins = redact(run.read_config_or_empty()), run.read_config_origins()
        metric_rows = list(run.metrics.rows())
    if step_match := re.search(r"global_step_(\d+)", str(checkpoint)):
        metric_rows = [row for row in metric_rows if row["step"] <= int(step_match[1])]
    curve_metrics = [key for key in _CURVE_METRICS if len(series(metric_rows, key)[0]) > 1]
    curve_metrics += sorted(
        {key for row in metric_rows for key in row if key.startswith("val-core/")}
    )[:2]
    if curve_metrics:
        draw_curve(run_folders[0], curve_metrics, folder / CURVES_FILE, "")
    text = "\n".join(_card_lines(name, config, origins, metric_rows, bool(curve_metrics))) + "\n"
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def _card_lines(
    name: str,
    config: JsonObject,
    origins: Mapping[str, str],
    metric_rows: list[Row],
    has_curves: bool,
) -> Iterator[str]:
    """Yields the lines of the card, in Markdown."""
    model = str(
        _config_value(config, "actor_rollout_ref.model.path")
        or _config_value(config, "model.path")
        or ""
    )
    is_on_hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", model)) and not Path(model).exists()
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    if is_on_hub:
        yield f"base_model: {model}"
    estimator = _config_value(config, "algorithm.adv_estimator")
    yield from ("tags:", "- hone", "- reinforcement-learning" if estimator else "- sft", "---", "")
    yield from (f"# {name}", "")
    base_model = f" from `{_without_folders(model)}`" if model else ""
    method = f"reinforcement learning (`{estimator}`)" if estimator else "supervised fine-tuning"
    step_count = f", {metric_rows[-1]['step']} steps" if metric_rows else ""
    summary = f"Trained{base_model} by {method}{step_count}, with hone {__version__}."
    yield summary if config else "Exported by hone."
    files = {key: _config_value(config, f"data.{key}_files") for key in ("train", "val")}
    if any(files.values()):
        yield from ("", "## Data", "", "| | files |", "|---|---|")
        yield from (
            f"| {key} | {_without_folders(names)} |" for key, names in files.items() if names
        )
    keys = [key for key in sorted(origins) if not _PRIVATE_KEY.search(key)]
    if keys:
        yield from ("", "## Configuration", "", "The keys that were set; others are defaults.", "")
        yield "```yaml"
        yield from (f"{key}: {_without_folders(_config_value(config, key))}" for key in keys)
        yield "```"
    if has_curves:
        yield from ("", "## Curves", "", f"![metrics by step]({CURVES_FILE})")
    metrics = sorted({key for row in metric_rows for key in row if _RESULT_METRICS.fullmatch(key)})
    if metrics:
        yield from ("", "## Evaluation", "", "| metric | first | last |", "|---|---|---|")
    for key in metrics:
        steps, values = series(metric_rows, key)
        if steps:
            first, last = (f"{values[i]:.4g} (step {steps[i]})" for i in (0, -1))
            yield f"| `{key}` | {first} | {last} |"


def _config_value(config: JsonObject, key: str) -> JsonValue:
    """Returns the value of a dotted key; None if the config does not have it."""
    value: JsonValue = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _without_folders(value: JsonValue) -> str:
    """Returns a value with each path reduced to its name."""
    if isinstance(value, list):
        return ", ".join(map(_without_folders, value)) or "[]"
    if isinstance(value, str) and "://" in value:
        return value
    if isinstance(value, str) and ("/" in value or "\\" in value):
        is_hub_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", value)) and not Path(value).exists()
        return value if is_hub_name else Path(value).name
    return show_value(value)
