"""Creates the dataset, sampler and loader of a run from its config."""

from __future__ import annotations

import os
from collections.abc import Callable

from hone.config.data import DataConfig, RowsConfig
from hone.config.sft import SFTDataConfig
from hone.data.dataset import RLHFDataset
from hone.data.dynamic import DynamicGenDataset, load_object
from hone.data.encoded import EncodedDataset
from hone.data.loader import Dataset, PromptLoader
from hone.data.reading import read_file, rows_of
from hone.data.rows import BadRowPolicy, DataError, Files, expand_files
from hone.data.samplers import MixtureSampler, Sampler
from hone.data.sft import MultiTurnSFTDataset, SFTDataset
from hone.tokenizer import Processor, Tokenizer


def dataset_class(config: DataConfig, is_train: bool = True) -> Callable[..., Dataset]:
    """Returns data.custom_cls if it is set, and otherwise RLHFDataset.

    In training, DynamicGenDataset replaces RLHFDataset if data.datagen is set.
    """
    custom = config.custom_cls
    if not custom.path:
        return DynamicGenDataset if config.datagen.path and is_train else RLHFDataset
    cls = load_object(custom.path, custom.name, "data.custom_cls")
    if not (isinstance(cls, type) and hasattr(cls, "__getitem__") and hasattr(cls, "__len__")):
        raise DataError(
            f"data.custom_cls: {custom.name or custom.path} must be a class"
            " with __len__ and __getitem__, such as a subclass of hone.data.RLHFDataset"
        )
    return cls


def create_rl_dataset(
    data_paths: Files,
    data_config: DataConfig,
    tokenizer: Tokenizer | None,
    processor: Processor | None = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """Creates the dataset of a run; the name and arguments are verl's."""
    return dataset_class(data_config, is_train)(
        data_files=data_paths,
        tokenizer=tokenizer,
        config=data_config,
        processor=processor,
        max_samples=max_samples,
    )


def create_run_dataset(
    data: Dataset | None,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    processor: Processor | None = None,
    *,
    is_train: bool,
) -> Dataset:
    """Returns the given dataset, or creates a dataset of the given rows or of the configured files."""
    max_samples = config.train_max_samples if is_train else config.val_max_samples
    if data is not None:
        rows = rows_of(data)
        if rows is None:
            return data
        if not rows:
            raise DataError(f"the {'training' if is_train else 'validation'} data set has no rows")
        return create_rl_dataset(rows, config, tokenizer, processor, is_train, max_samples)
    if is_train:
        return create_rl_dataset(
            config.train_files, config, tokenizer, processor, True, max_samples
        )
    files = config.val_files or ()
    try:
        return create_rl_dataset(files, config, tokenizer, processor, False, max_samples)
    except DataError as error:
        paths = (os.path.expandvars(os.path.expanduser(file)) for file in files)
        if not any(path.partition("*")[0] in str(error) for path in paths):
            raise  # the error has another cause, such as a missing list of tools
        raise DataError(f"{error}; data.val_files=[] trains without validation") from error


def encoded_dataset_class(
    data_config: RowsConfig, default: Callable[..., EncodedDataset]
) -> Callable[..., EncodedDataset]:
    """Returns the user's dataset class (data.custom_cls), or the default."""
    custom = data_config.custom_cls
    return load_object(custom.path, custom.name, "data.custom_cls") if custom.path else default


def create_sft_dataset(
    data_paths: Files, data_config: SFTDataConfig, tokenizer: Tokenizer, max_samples: int = -1
) -> Dataset:
    """Creates the SFT dataset; by default, a file with a messages column is multi-turn."""
    is_multi_turn = data_config.multiturn.enable
    if is_multi_turn is None and not data_config.custom_cls.path:
        rows = read_file(expand_files(data_paths)[0], BadRowPolicy("skip"))
        is_multi_turn = rows is not None and data_config.multiturn.messages_key in rows[0]
    cls = encoded_dataset_class(data_config, MultiTurnSFTDataset if is_multi_turn else SFTDataset)
    return cls(data_paths, tokenizer, data_config, max_samples=max_samples)


def create_rl_sampler(
    data_config: DataConfig, dataset: Dataset, run_seed: int | None = None
) -> Sampler | None:
    """Creates the user's sampler or a weighted mixture; returns None for the default order."""
    custom, weights = data_config.sampler, data_config.dataset_weights
    if custom is not None and custom.class_path:
        if weights:
            raise DataError("data.sampler and data.dataset_weights both decide the order; set one")
        cls = load_object(custom.class_path, custom.class_name, "data.sampler")
        sampler = cls(data_source=dataset, data_config=data_config)
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise DataError(f"data.sampler: {cls.__name__} needs __iter__ and __len__")
        return sampler
    if not weights:
        return None
    if not hasattr(dataset, "indices_by_file"):
        raise DataError(
            "data.dataset_weights needs a data set with the method indices_by_file();"
            f" {type(dataset).__name__} has none (hone.data.RLHFDataset has one)"
        )
    seed = _order_seed(data_config, run_seed)
    return MixtureSampler(
        dataset.indices_by_file(), list(weights), shuffle=data_config.shuffle, seed=seed
    )


def create_train_loader(
    data_config: DataConfig, dataset: Dataset, batch_size: int, run_seed: int | None = None
) -> PromptLoader:
    """Creates the training loader, which drops the incomplete last batch of an epoch."""
    return PromptLoader(
        dataset,
        batch_size,
        shuffle=data_config.shuffle,
        seed=_order_seed(data_config, run_seed),
        drop_last=True,
        sampler=create_rl_sampler(data_config, dataset, run_seed),
    )


def create_val_loader(
    data_config: DataConfig, dataset: Dataset, run_seed: int | None = None
) -> PromptLoader:
    """Creates the validation loader, which keeps the last partial batch."""
    return PromptLoader(
        dataset,
        data_config.val_batch_size or len(dataset),
        shuffle=data_config.validation_shuffle,
        seed=_order_seed(data_config, run_seed),
        drop_last=False,
    )


def _order_seed(data_config: DataConfig, run_seed: int | None) -> int | None:
    return data_config.seed if data_config.seed is not None else run_seed
