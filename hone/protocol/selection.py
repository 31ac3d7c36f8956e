"""Choosing columns of a DataProto by name: take some, take some out, call them otherwise.

Functions behind the methods `select`, `pop` and `rename`. Leaves out rows: those are rows.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from tensordict import TensorDict

from hone.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

Names = Sequence[str] | None

T = TypeVar("T")


def select_columns(
    data: DataProto,
    batch_keys: Names = None,
    non_tensor_batch_keys: Names = None,
    meta_info_keys: Names = None,
    deepcopy: bool = False,
) -> DataProto:
    """A batch with only these columns and facts; None takes all of a kind."""
    batch = data.batch
    if batch is not None:
        names = list(batch.keys()) if batch_keys is None else list(batch_keys)
        check_known(names, batch.keys(), "tensor columns")
        batch = TensorDict({name: batch[name] for name in names}, batch_size=batch.batch_size)
    elif batch_keys:
        check_known(batch_keys, (), "tensor columns")
    chosen = pick(data.non_tensor_batch, non_tensor_batch_keys, "object columns")
    info = pick(data.meta_info, meta_info_keys, "meta_info")
    if deepcopy:
        batch = batch.clone() if batch is not None else None
        chosen, info = copy.deepcopy(chosen), copy.deepcopy(info)
    return type(data)(batch, chosen, info)


def pop_columns(
    data: DataProto,
    batch_keys: Names = None,
    non_tensor_batch_keys: Names = None,
    meta_info_keys: Names = None,
) -> DataProto:
    """Remove these columns and facts (None: none) and return them as a new batch."""
    names = batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or []
    popped = select_columns(data, *names)
    for source, keys in zip(
        (data.batch, data.non_tensor_batch, data.meta_info), names, strict=True
    ):
        for key in keys:
            del source[key]
    if popped.batch is not None and not len(popped.batch.keys()) and popped.non_tensor_batch:
        popped.batch = None
    return popped


def rename_columns(
    data: DataProto, old_keys: str | Names = None, new_keys: str | Names = None
) -> DataProto:
    """Rename tensor columns, in place."""
    before = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
    after = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
    if len(before) != len(after):
        raise ProtocolError(
            f"cannot rename {before} to {after}: {len(before)} names for {len(after)}"
        )
    check_known(before, data.batch.keys() if data.batch is not None else (), "tensor columns")
    for was, becomes in zip(before, after, strict=True):
        if was != becomes:
            data.batch.rename_key_(was, becomes)
    return data


def check_known(wanted: Sequence[str], present: Collection[str], kind: str) -> None:
    """KeyError that names what is missing and what there is."""
    missing = [key for key in wanted if key not in present]
    if missing:
        raise KeyError(f"batch has no {missing} among its {kind}; it has {sorted(present)}")


def pick(source: dict[str, T], keys: Sequence[str] | None, kind: str) -> dict[str, T]:
    """These entries of a dict; None takes all."""
    if keys is None:
        return dict(source)
    check_known(keys, source, kind)
    return {key: source[key] for key in keys}
