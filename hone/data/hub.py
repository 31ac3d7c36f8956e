"""Datasets of the Hugging Face Hub, read with the package `datasets`."""

from __future__ import annotations

import io
from typing import Any, TypeVar

from hone.data.rows import DataError
from hone.types import Row

_T = TypeVar("_T")


def hub_splits(name: str, config_name: str | None) -> dict[str, list[Row]]:
    """Returns every split of a Hub dataset as plain rows."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"reading {name} from the Hub needs the package `datasets` (pip install datasets); or"
            " give --source_dir, a folder with its files"
        ) from error
    try:
        # Without a config name, `datasets` uses the dataset's only or default config.
        arguments = (name, config_name) if config_name else (name,)
        splits = datasets.load_dataset(*arguments)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} could not be read from the Hub: {error}; without a network, give --source_dir,"
            " a folder with its files"
        ) from error
    return {
        split: [{column: _encode_images(value) for column, value in row.items()} for row in rows]
        for split, rows in splits.items()
    }


def as_hf_dataset(rows: list[Row]) -> Any:
    """Converts rows to a `datasets.Dataset`; returns the list if the package is not installed."""
    try:
        import datasets
    except ImportError:
        return rows
    # `Dataset.from_list` would take the column names from the first row only.
    names = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})


def _encode_images(value: _T) -> _T | Row | list[Any]:
    """Converts decoded images back to {bytes, path}, as in parquet."""
    if isinstance(value, list):
        return [_encode_images(item) for item in value]
    if hasattr(value, "save") and hasattr(value, "size"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return {"bytes": buffer.getvalue(), "path": None}
    return value
