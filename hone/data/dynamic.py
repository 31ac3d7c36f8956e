"""Loads user classes, and adds generated rows during training (data.datagen)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hone.config.data import CustomClassConfig
from hone.data.dataset import RLHFDataset
from hone.data.loader import is_stateful
from hone.data.rows import DataError
from hone.plugins import PluginError, load_extern_object
from hone.plugins import load_object as load_object_by_path
from hone.types import Fields, Function, Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto


def load_object(path: str, name: str | None, config_key: str) -> Function:
    """Loads the object `name` of a file or module; without `name`, the path is `file.py:Class`."""
    if not name and ":" not in path.removeprefix("pkg://").removeprefix("file://"):
        raise DataError(
            f"{config_key}: {path} needs the name of the class in it; write {path}:Class"
        )
    try:
        return load_extern_object(path, name) if name else load_object_by_path(path)
    except PluginError as error:
        raise DataError(f"{config_key}: {error}") from error


class AbstractDataGenerator(ABC):
    """Generates rows from the current dataset; a subclass may define `state_dict` and `load_state_dict`."""

    def __init__(self, config: CustomClassConfig) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Sequence[Row]:
        """Returns new rows in verl's schema; `dataset.last_batch` is the last trained batch."""


class DynamicGenDataset(RLHFDataset):
    """An RLHFDataset to which the generator of data.datagen adds rows after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        datagen = self.settings.datagen
        if not datagen.path:
            raise DataError(
                "data.datagen.path is not set; give file.py:Class, or a file or module and the name"
            )
        self.generator = load_object(datagen.path, datagen.name, "data.datagen")(datagen)
        if not hasattr(self.generator, "generate"):
            name = datagen.name or datagen.path
            raise DataError(f"data.datagen: {name} needs a method generate(dataset) -> rows")
        self.last_batch: DataProto | None = None

    def on_batch_end(self, batch: DataProto) -> Sequence[Row] | None:
        self.last_batch = batch
        return list(self.generator.generate(self))

    def state_dict(self) -> Fields:
        state = self.generator.state_dict() if is_stateful(self.generator) else None
        return {**super().state_dict(), "generator": state}

    def load_state_dict(self, state: Settings) -> None:
        super().load_state_dict(state)
        if state["generator"] is not None and is_stateful(self.generator):
            self.generator.load_state_dict(state["generator"])
