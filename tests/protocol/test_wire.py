"""A batch that is sent to another process arrives bit for bit, without unnecessary copies."""

from __future__ import annotations

import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hone.protocol import (
    DataProto,
    deeply_equal,
    serialize_tensordict,
    split_padded,
    without_padding,
)
from hone.protocol.wire import UnsafeObject, decode_tensor, encode_tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sent(data: DataProto) -> tuple[DataProto, list[pickle.PickleBuffer]]:
    """Pickled with its buffers out of band, as Ray does, but in memory that may be written."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers), buffers


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 4, 5]),
)
def test_any_tensor_arrives_bit_for_bit(
    dtype: torch.dtype, shape: list[int], seed: int, protocol: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape, dtype=np.int64))
    width = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * width,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    again = decode_tensor(*pickle.loads(pickle.dumps(encode_tensor(tensor), protocol=protocol)))
    assert again.dtype == dtype
    assert again.shape == tensor.shape
    assert bits(again) == bits(tensor)


def test_out_of_band_buffers_are_the_tensors_own_memory() -> None:
    data = DataProto.from_dict(
        {"a": torch.zeros(64, 8), "b": torch.zeros(64, 8, dtype=torch.bfloat16)}
    )
    again, buffers = sent(data)
    assert data.batch is not None
    assert again.batch is not None
    assert len(buffers) == 2
    for name in ("a", "b"):
        assert again.batch[name].data_ptr() == data.batch[name].data_ptr()
        again.batch[name][3, 3] = 7
        assert float(data.batch[name][3, 3]) == 7
    text = pickle.dumps(data, protocol=5, buffer_callback=lambda _: None)
    assert len(text) < 1500, "the tensors went in band"


def test_a_slice_travels_without_the_rest_of_its_storage() -> None:
    data = DataProto.from_dict({"a": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data.slice(0, 1), protocol=5)) < 6000


def test_read_only_memory_is_copied_so_that_no_other_reader_is_changed() -> None:
    data = DataProto.from_dict({"a": torch.arange(6.0)})
    buffers: list[bytes] = []
    text = pickle.dumps(
        data, protocol=5, buffer_callback=lambda buffer: buffers.append(bytes(buffer.raw()))
    )
    one = pickle.loads(text, buffers=buffers)
    two = pickle.loads(text, buffers=buffers)
    one.batch["a"].zero_()
    assert two.batch["a"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("protocol", [4, 5])
def test_everything_in_a_batch_arrives(protocol: int) -> None:
    jagged = torch.nested.nested_tensor(
        [torch.arange(3), torch.arange(1), torch.arange(4)], layout=torch.jagged
    )
    data = DataProto.from_dict(
        {
            "dense": torch.randn(3, 2),
            "strided": torch.randn(2, 3).t(),
            "jagged": jagged,
            "graph": torch.ones(3, requires_grad=True) * 2,
        },
        {"uid": ["a", "b", "c"], "info": [{"k": 1}, None, [2]]},
        {"t": 0.5, "tensor": torch.ones(2)},
    )
    assert data.batch is not None
    data.batch["inner"] = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    again = pickle.loads(pickle.dumps(data, protocol=protocol))
    for name in ("dense", "strided", "graph"):
        assert torch.equal(again.batch[name], data.batch[name])
    assert not again.batch["graph"].requires_grad
    assert [row.tolist() for row in again.batch["jagged"].unbind()] == [
        [0, 1, 2],
        [0],
        [0, 1, 2, 3],
    ]
    assert again.batch["inner"]["x"].tolist() == [0, 1, 2]
    assert list(again.non_tensor_batch["info"]) == [{"k": 1}, None, [2]]
    assert again.meta_info["t"] == 0.5
    assert torch.equal(again.meta_info["tensor"], torch.ones(2))


def test_jagged_rows_can_be_chosen_and_joined() -> None:
    jagged = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    data = DataProto.from_dict({"ids": jagged})
    turned = DataProto.concat([data[1:], data.select_idxs([0])])
    assert turned.batch is not None
    assert [row.tolist() for row in turned.batch["ids"].unbind()] == [[0], [0, 1, 2]]


def test_no_row_of_a_jagged_column_can_be_selected() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=torch.jagged)
    data = DataProto.from_dict({"ids": jagged, "x": torch.arange(2)})
    for empty in (data.slice(0, 0), data.repeat(0), data.select_idxs(torch.tensor([False, False]))):
        assert [len(part) for part in (empty, *empty.split(1))] == [0]
        assert empty.batch["ids"].values().shape == (0, 2)
        joined = DataProto.concat([empty, sent(empty)[0], data])
        assert [len(row) for row in joined.batch["ids"].unbind()] == [3, 1]
    parts = split_padded(data, 4)
    assert sum(len(without_padding(part)) for part in parts) == 2
    data.set_column("pair", torch.ones(2, 2))
    pieces = data.unfold_column_chunks(2, ["pair"])
    assert [len(row) for row in pieces.batch["ids"].unbind()] == [3, 3, 1, 1]


def test_a_batch_without_tensors_arrives() -> None:
    again, _ = sent(DataProto(meta_info={"a": 1}))
    assert again.batch is None
    assert again.meta_info == {"a": 1}


def test_the_ragged_dimension_of_a_jagged_column_arrives() -> None:
    rows = [torch.arange(2).expand(3, 2), torch.arange(4).expand(3, 4)]
    wide = torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, 1), torch.tensor([0, 2, 6]), jagged_dim=2
    )
    back = pickle.loads(pickle.dumps(DataProto.from_dict({"p": wide})))
    assert torch.equal(back.batch["p"][1], rows[1])


def _saved_by_verl(monkeypatch: pytest.MonkeyPatch, *state: Any) -> bytes:
    """A pickle as verl writes it: under its name, with its state."""
    module = types.ModuleType("verl.protocol")
    form = {"__module__": "verl.protocol", "__getstate__": lambda self: state}
    kind = module.DataProto = type("DataProto", (), form)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name in ("verl", "verl.protocol"):
            patch.setitem(sys.modules, name, module)
        return pickle.dumps(kind())


@pytest.mark.parametrize("form", ["torch", "consolidated", "numpy", "none"])
def test_a_batch_that_verl_saved_is_read(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = TensorDict({"x": torch.arange(3), "h": torch.ones(3).bfloat16()}, batch_size=[3])
    buffer = io.BytesIO()
    torch.save(tensors.consolidate() if form == "consolidated" else tensors, buffer)
    state = {"numpy": serialize_tensordict(tensors), "none": None}.get(form, buffer.getvalue())
    labels = np.array(["a", "b", "c"], dtype=object)
    path = tmp_path / "batch.pkl"
    path.write_bytes(_saved_by_verl(monkeypatch, state, {"uid": labels}, {"step": 1}))
    data = DataProto.load_from_disk(path)
    assert (data.non_tensor_batch["uid"] == labels).all()
    assert data.meta_info == {"step": 1}
    if form != "none":
        assert torch.equal(data.batch["x"], torch.arange(3))
        assert data.batch["h"].dtype == torch.bfloat16


def test_code_inside_a_batch_that_verl_saved_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    buffer = io.BytesIO()
    torch.save({"x": Evil()}, buffer)
    path = tmp_path / "batch.pkl"
    for state in (
        (buffer.getvalue(), {}, {}),
        (None, {}, {"x": Evil()}),
    ):
        path.write_bytes(_saved_by_verl(monkeypatch, *state))
        with pytest.raises((pickle.UnpicklingError, UnsafeObject)):
            DataProto.load_from_disk(path)
        assert not (tmp_path / "ran").exists()


class _Reduced:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def test_a_file_cannot_declare_bytes_as_object_pointers(tmp_path: Path) -> None:
    fields = {"f": (np.dtype(object), 0)}
    forged = _Reduced(np.dtype, ("V8", False, True), (3, "|", None, ("f",), fields, 8, 1, 0))
    flagged = _Reduced(np.dtype, ("f8", False, True), (3, "<", None, None, None, 8, 8, 63))
    function, arguments, _ = np.zeros(1).__reduce__()
    array = _Reduced(function, arguments, (1, (1,), forged, False, b"A" * 8))
    path = tmp_path / "batch.pkl"
    for value in (forged, flagged, array):
        path.write_bytes(pickle.dumps(value))
        with pytest.raises(UnsafeObject, match="malformed numpy dtype"):
            DataProto.load_from_disk(path)


def test_a_file_cannot_change_a_function(tmp_path: Path) -> None:
    rebuild = torch._utils._rebuild_tensor_v2
    path = tmp_path / "batch.pkl"
    state = (None, {"__defaults__": (1,)})
    content = pickle.dumps(rebuild, 2)[:-1] + pickle.dumps(state, 2)[2:-1]
    content += pickle.BUILD + pickle.STOP
    path.write_bytes(content)
    with pytest.raises(UnsafeObject, match="state of"):
        DataProto.load_from_disk(path)
    assert rebuild.__defaults__ != (1,)


def test_arrays_of_every_plain_dtype_are_loaded(tmp_path: Path) -> None:
    arrays = [np.array(["a", "bcd"]), np.array([b"x"]), np.array(["2026-01-02"], "M8[s]")]
    arrays += [np.array([1], "m8[ms]"), np.array([True]), np.array([1 + 2j]), np.zeros(2, ">i4")]
    arrays += [np.array([None, {}], dtype=object), np.zeros(2, "V3"), np.zeros(1, np.float16)]
    path = tmp_path / "batch.pkl"
    DataProto(meta_info={"arrays": arrays}).save_to_disk(path)
    loaded = DataProto.load_from_disk(path).meta_info["arrays"]
    assert deeply_equal(loaded, arrays)
    assert [array.dtype for array in loaded] == [array.dtype for array in arrays]
