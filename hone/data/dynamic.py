"""New rows while training: a user's generator asked after each batch (data.datagen).

A data set class of one's own may override `on_batch_end` instead (data.custom_cls).
Leaves out when rows join: loader.py draws them from the next epoch on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hone.config.data import CustomClassConfig, DataConfig
from hone.data.dataset import RLHFDataset
from hone.data.objects import load_object
from hone.data.rows import DataError
from hone.data.samplers import Stateful
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.protocol import DataProto


class AbstractDataGenerator(ABC):
    """Makes rows from the data set as it stands; may keep `state_dict`/`load_state_dict`."""

    def __init__(self, config: CustomClassConfig) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Sequence[Row]:
        """New rows in verl's schema; `dataset.last_batch` is the batch that just ended."""


class DynamicGenDataset(RLHFDataset):
    """RLHFDataset whose rows grow by what data.datagen's generator makes after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator = _generator(self.settings)
        self.last_batch: DataProto | None = None

    def on_batch_end(self, batch: DataProto) -> Sequence[Row] | None:
        self.last_batch = batch
        return list(self.generator.generate(self))

    def state_dict(self) -> Row:
        state = self.generator.state_dict() if isinstance(self.generator, Stateful) else None
        return {**super().state_dict(), "generator": state}

    def load_state_dict(self, state: Settings) -> None:
        super().load_state_dict(state)
        if state["generator"] is not None and isinstance(self.generator, Stateful):
            self.generator.load_state_dict(state["generator"])


def _generator(config: DataConfig) -> AbstractDataGenerator:
    path, name = config.datagen.path, config.datagen.name
    if not path:
        raise DataError(
            "data.datagen needs path, a file or module with the class, or file.py:Class"
        )
    generator = load_object(path, name, "data.datagen")(config.datagen)
    if not hasattr(generator, "generate"):
        raise DataError(f"data.datagen: {name or path} needs a method generate(dataset) -> rows")
    return generator
