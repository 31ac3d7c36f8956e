"""From config to objects: the data set class, its sampler and the loader of a run.

A user's own class comes from a file or a module (data.custom_cls, data.sampler).
Leaves out where the config comes from: it is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

from hone.config.data import DataConfig
from hone.config.sft import SFTDataConfig
from hone.data.dataset import RLHFDataset
from hone.data.dynamic import DynamicGenDataset
from hone.data.loader import Dataset, PromptLoader
from hone.data.objects import load_object
from hone.data.reading import rows_of
from hone.data.rows import BadRows, DataError, Files, expand_files, read_file
from hone.data.samplers import Mixture, Sampler
from hone.data.sft import MultiTurnSFTDataset, SFTDataset
from hone.tokenizer import Processor, Tokenizer


def dataset_class(config: DataConfig, is_train: bool = True) -> Callable[..., Dataset]:
    """The class that data.custom_cls names; else one that grows by data.datagen; else plain."""
    if not config.custom_cls.path:
        return DynamicGenDataset if config.datagen.path and is_train else RLHFDataset
    found = load_object(config.custom_cls.path, config.custom_cls.name, "data.custom_cls")
    if not (
        isinstance(found, type) and hasattr(found, "__getitem__") and hasattr(found, "__len__")
    ):
        raise DataError(
            f"data.custom_cls: {config.custom_cls.name or config.custom_cls.path} must be a class"
            " with __len__ and __getitem__ (a subclass of hone.data.RLHFDataset is the easy way)"
        )
    return found


def create_rl_dataset(
    data_paths: Files,
    data_config: DataConfig,
    tokenizer: Tokenizer | None,
    processor: Processor | None = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The data set of a run; by verl's name and arguments."""
    return dataset_class(data_config, is_train)(
        data_files=data_paths,
        tokenizer=tokenizer,
        config=data_config,
        processor=processor,
        max_samples=max_samples,
    )


def run_dataset(
    given: Dataset | None,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    processor: Processor | None = None,
    *,
    is_train: bool,
) -> Dataset:
    """The data set that a program hands over (as it is, or made of its rows), or that of the files."""
    if given is not None:
        rows = rows_of(given)
        if rows is None:
            return given
        if not rows:
            raise DataError(f"the {'training' if is_train else 'validation'} data set has no rows")
        return create_rl_dataset(rows, config, tokenizer, processor, is_train)
    files, most = config.train_files, config.train_max_samples
    if is_train:
        return create_rl_dataset(files, config, tokenizer, processor, True, most)
    files, most = config.val_files or (), config.val_max_samples
    try:
        return create_rl_dataset(files, config, tokenizer, processor, False, most)
    except DataError as error:
        raise DataError(f"{error}; data.val_files=[] trains without validation") from error


def create_sft_dataset(
    data_paths: Files,
    data_config: SFTDataConfig,
    tokenizer: Tokenizer,
    max_samples: int = -1,
) -> Dataset:
    """Conversations where data.multiturn.enable says so (unset: where the file has the column)."""
    chosen = data_config.custom_cls
    if chosen.path:
        cls = load_object(chosen.path, chosen.name, "data.custom_cls")
    else:
        is_multi_turn = data_config.multiturn.enable
        if is_multi_turn is None:
            is_multi_turn = _has_column(data_paths, data_config.multiturn.messages_key)
        cls = MultiTurnSFTDataset if is_multi_turn else SFTDataset
    return cls(data_paths, tokenizer, data_config, max_samples=max_samples)


def _has_column(data_paths: Files, name: str) -> bool:
    file = read_file(expand_files(data_paths)[0], BadRows("skip"))
    return file is not None and name in file.rows[0]


def create_rl_sampler(
    data_config: DataConfig, dataset: Dataset, run_seed: int | None = None
) -> Sampler | None:
    """The user's sampler, a mixture by weights, or None for the loader's own order."""
    chosen = data_config.sampler
    if chosen is not None and chosen.class_path:
        if data_config.dataset_weights:
            raise DataError("data.sampler and data.dataset_weights both decide the order; set one")
        cls = load_object(chosen.class_path, chosen.class_name, "data.sampler")
        sampler = cls(data_source=dataset, data_config=data_config)
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise DataError(f"data.sampler: {cls.__name__} needs __iter__ and __len__")
        return sampler
    if not data_config.dataset_weights:
        return None
    if not hasattr(dataset, "groups"):
        raise DataError(
            f"data.dataset_weights needs a data set with groups(); {type(dataset).__name__} has"
            " none (hone.data.RLHFDataset has)"
        )
    return Mixture(
        dataset.groups(),
        list(data_config.dataset_weights),
        shuffle=data_config.shuffle,
        seed=_seed(data_config, run_seed),
    )


def create_train_loader(
    data_config: DataConfig, dataset: Dataset, batch_size: int, run_seed: int | None = None
) -> PromptLoader:
    """Training batches of `batch_size` prompts; the tail of an epoch that fills none is dropped."""
    return PromptLoader(
        dataset,
        batch_size,
        shuffle=data_config.shuffle,
        seed=_seed(data_config, run_seed),
        drop_last=True,
        sampler=create_rl_sampler(data_config, dataset, run_seed),
    )


def create_val_loader(
    data_config: DataConfig, dataset: Dataset, run_seed: int | None = None
) -> PromptLoader:
    """Validation batches, the last partial one included; all rows at once without a batch size."""
    return PromptLoader(
        dataset,
        data_config.val_batch_size or len(dataset),
        shuffle=data_config.validation_shuffle,
        seed=_seed(data_config, run_seed),
        drop_last=False,
    )


def _seed(data_config: DataConfig, run_seed: int | None) -> int | None:
    return data_config.seed if data_config.seed is not None else run_seed
