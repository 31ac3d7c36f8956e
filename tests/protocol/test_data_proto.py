"""DataProto against a slow, obvious model: a list with one dict per row."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hone.protocol import AUTO_PADDING_KEY, DataProto, DataProtoItem, deeply_equal, object_array

quick = settings(max_examples=40, deadline=None)


def rows(count: int, width: int = 2) -> DataProto:
    return DataProto.from_dict(
        {
            "x": torch.arange(float(count * width)).reshape(count, width),
            "n": torch.arange(count, dtype=torch.int64),
        },
        {"uid": [f"u{i}" for i in range(count)]},
        {"step": 3},
    )


def as_list(data: DataProto) -> list[dict[str, Any]]:
    return [
        {name: np.asarray(data.column(name)[row]).tolist() for name in data.column_names()}
        for row in range(len(data))
    ]


class TestMaking:
    def test_the_error_of_columns_of_different_length_names_them(self) -> None:
        with pytest.raises(ValueError, match=r"'b' has batch size \(2,\); column 'a' has \(3,\)"):
            DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})

    def test_a_numpy_array_may_be_a_tensor_column(self) -> None:
        data = DataProto.from_dict({"a": np.zeros((3, 2), np.float32)})  # type: ignore[dict-item]
        assert data.batch["a"].shape == (3, 2)

    def test_object_columns_of_another_length_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'uid' has 2 rows; the batch has 3"):
            DataProto.from_dict({"a": torch.zeros(3)}, {"uid": ["x", "y"]})

    def test_lists_of_one_length_become_a_column_of_two_dimensions(self) -> None:
        data = DataProto.from_dict(
            non_tensors={"pair": [["a", "b"], ["c", "d"]], "odd": [["a"], ["b", "c"]]}
        )
        pair, odd = data.non_tensor_batch["pair"], data.non_tensor_batch["odd"]
        assert (pair.dtype, pair.shape) == (object, (2, 2))
        assert pair[:, 0].tolist() == ["a", "c"]
        assert odd.tolist() == [["a"], ["b", "c"]]
        assert odd.shape == (2,)
        assert len(data) == 2
        assert data.batch is None
        deep = DataProto.from_dict(non_tensors={"x": [[[1, 2]], [[3, 4]]]}).column("x")
        assert deep.shape == (2, 1, 2)
        rows = DataProto.from_dict(non_tensors={"x": object_array([["a"], ["b"]])}).column("x")
        assert rows.tolist() == [["a"], ["b"]]
        assert rows.shape == (2,)
        messages = [[{"role": "user"}], [{"role": "user"}]]
        assert DataProto.from_dict(non_tensors={"m": messages}).column("m").shape == (2, 1)
        tensors = DataProto.from_dict(non_tensors={"t": [[torch.ones(3)], [torch.zeros(3)]]})
        assert tensors.column("t").shape == (2, 1)
        assert torch.equal(tensors.column("t")[0, 0], torch.ones(3))

    def test_a_2d_object_column_is_split_into_rows_and_joined_again(self) -> None:
        data = DataProto.from_dict(
            {"x": torch.arange(8).reshape(2, 4)}, {"pair": [["a", "b"], ["c", "d"]]}
        )
        cut = data.unfold_column_chunks(2, split_keys=["x", "pair"])
        assert cut.non_tensor_batch["pair"].tolist() == [["a"], ["b"], ["c"], ["d"]]
        back = DataProto.from_tensordict(data.to_tensordict())
        assert back.non_tensor_batch["pair"].shape == (2, 2)

    def test_batches_with_lists_of_one_and_of_several_lengths_are_joined(self) -> None:
        even = DataProto.from_dict(non_tensors={"x": [[1, 2], [3, 4]]})
        odd = DataProto.from_dict(non_tensors={"x": [[5], [6, 7]]})
        joined = DataProto.concat([even, odd]).column("x")
        assert joined.tolist() == [[1, 2], [3, 4], [5], [6, 7]]

    def test_none_is_read_as_no_columns_and_no_metadata(self) -> None:
        data = DataProto(non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
        assert (data.non_tensor_batch, data.meta_info, len(data)) == ({}, {}, 0)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)}),
            lambda: rows(2).union(DataProto.from_dict({"x": torch.ones(2, 2)})),
            lambda: rows(5).chunk(2),
            lambda: rows(2).rename(["x", "n"], ["y"]),
            lambda: rows(6).make_iterator(4, 1),
            lambda: DataProto.concat([rows(1), DataProto.from_dict({"x": torch.ones(1, 2)})]),
            lambda: DataProto(non_tensor_batch={"u": [1, 2]}),  # type: ignore[dict-item]
        ],
    )
    def test_what_verl_asserts_is_an_assertion_error_too(self, wrong: Any) -> None:
        with pytest.raises(AssertionError) as caught:
            wrong()
        assert isinstance(caught.value, ValueError)

    def test_object_columns_need_one_batch_dimension(self) -> None:
        with pytest.raises(ValueError, match="one batch dimension"):
            DataProto.from_dict({"a": torch.zeros(2, 2)}, {"u": [1, 2]}, num_batch_dims=2)

    def test_two_batch_dimensions(self) -> None:
        data = DataProto.from_dict(
            {"a": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3)}, num_batch_dims=2
        )
        assert data.batch is not None
        assert tuple(data.batch.batch_size) == (2, 3)
        with pytest.raises(ValueError, match="'b' has 1 dimensions; num_batch_dims is 2"):
            DataProto.from_dict({"a": torch.zeros(2, 3), "b": torch.zeros(2)}, num_batch_dims=2)
        with pytest.raises(ValueError, match="at least 1"):
            DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=0)

    def test_a_single_dict_is_sorted_by_type(self) -> None:
        data = DataProto.from_single_dict(
            {"a": torch.zeros(2), "u": np.array(["p", "q"], dtype=object)}, meta_info={"k": 1}
        )
        assert data.column_names() == ["a", "u"]
        assert data.meta_info == {"k": 1}
        with pytest.raises(ValueError, match="'bad' is a list"):
            DataProto.from_single_dict({"bad": [1, 2]})

    def test_an_empty_one_has_no_rows(self) -> None:
        assert len(DataProto()) == 0
        assert DataProto(meta_info={"a": 1}).select().meta_info == {"a": 1}

    def test_a_list_is_no_object_column(self) -> None:
        with pytest.raises(ValueError, match="'u' is a list; wrap it"):
            DataProto(non_tensor_batch={"u": [1]})  # type: ignore[dict-item]

    def test_a_tensordict_without_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no batch dimension"):
            DataProto(batch=TensorDict({"a": torch.zeros(2)}, batch_size=[]))

    def test_a_later_edit_is_caught_by_check_consistency(self) -> None:
        data = rows(3)
        data.non_tensor_batch["uid"] = np.array([1, 2], dtype=object)
        with pytest.raises(ValueError, match="2 rows"):
            data.check_consistency()

    def test_tensordict_round_trip(self) -> None:
        data = rows(3)
        again = DataProto.from_tensordict(data.to_tensordict())
        assert as_list(again) == as_list(data)
        assert again.meta_info == data.meta_info

    def test_tensordict_stacks_become_columns_and_plain_data_metadata(self) -> None:
        source = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
        source.set("u", NonTensorStack(NonTensorData("p"), NonTensorData("q")))
        source.set("t", NonTensorData(0.7, batch_size=[2]))
        data = DataProto.from_tensordict(source, meta_info={"k": 1})
        assert list(data.non_tensor_batch["u"]) == ["p", "q"]
        assert data.meta_info == {"t": 0.7, "k": 1}
        assert DataProto.from_tensordict(None).batch is None

    def test_a_name_of_a_column_and_of_metadata_cannot_become_a_tensordict(self) -> None:
        data = rows(2)
        data.meta_info["uid"] = 1
        with pytest.raises(ValueError, match=r"\['uid'\] are used by more than one"):
            data.to_tensordict()
        tensors = DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1})
        with pytest.raises(ValueError, match=r"\['x'\] are used by more than one"):
            tensors.to_tensordict()


class TestLooking:
    def test_an_int_gives_one_item(self) -> None:
        item = rows(3)[1]
        assert isinstance(item, DataProtoItem)
        assert item.batch is not None
        assert item.batch["x"].tolist() == [2, 3]
        assert item.non_tensor_batch == {"uid": "u1"}
        assert item.meta_info == {"step": 3}
        assert rows(3)[-1].non_tensor_batch["uid"] == "u2"
        assert rows(3)[np.int64(2)].non_tensor_batch["uid"] == "u2"
        assert rows(3)[torch.tensor(2)].non_tensor_batch["uid"] == "u2"

    def test_a_row_out_of_range_is_an_error(self) -> None:
        with pytest.raises(IndexError, match="row 3 is out of range: the batch has 3"):
            rows(3)[3]

    def test_a_name_or_a_boolean_is_not_a_row(self) -> None:
        with pytest.raises(TypeError, match="not by str 'x'"):
            rows(3)["x"]
        for index in (True, torch.tensor(True), np.array(True)):
            with pytest.raises(TypeError, match="indexed by row"):
                rows(3)[index]
        with pytest.raises(TypeError, match="integer"):
            rows(3)[torch.tensor(1.7)]

    @pytest.mark.parametrize(
        "index",
        [
            [2, 0],
            (2, 0),
            np.array([2, 0]),
            torch.tensor([2, 0]),
            torch.tensor([2, 0], dtype=torch.int32),
        ],
    )
    def test_index_lists_of_any_kind_choose_rows(self, index: Any) -> None:
        assert [row["n"] for row in as_list(rows(3)[index])] == [2, 0]

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_masks_of_any_kind_choose_rows(self, kind: Any) -> None:
        assert [row["n"] for row in as_list(rows(3)[kind([True, False, True])])] == [0, 2]
        assert len(rows(3)[kind([False, False, False])]) == 0

    def test_wrong_indices_are_explained(self) -> None:
        data = rows(3)
        with pytest.raises(ValueError, match="the mask has 2 rows, but the batch has 3"):
            data.select_idxs([True, False])
        with pytest.raises(ValueError, match="integers or a bool mask"):
            data.select_idxs([0.5])
        with pytest.raises(IndexError, match=r"rows 0\.\.7 are out of range: the batch has 3"):
            data.select_idxs([0, 7])
        with pytest.raises(ValueError, match="indices must be 1-d"):
            data.select_idxs([[0], [1]])
        assert len(data.select_idxs([])) == 0

    @quick
    @given(
        st.integers(0, 6),
        st.one_of(st.none(), st.integers(-7, 7)),
        st.one_of(st.none(), st.integers(-7, 7)),
        st.sampled_from([None, 1, 2, 3, -1, -2]),
    )
    def test_slices_are_those_of_a_list(
        self, count: int, start: int | None, stop: int | None, step: int | None
    ) -> None:
        data = rows(count)
        assert as_list(data[start:stop:step]) == as_list(data)[start:stop:step]
        assert data[start:stop:step].meta_info == {"step": 3}

    def test_a_slice_is_a_view(self) -> None:
        data = rows(4)
        assert data.batch is not None
        data[1:3].batch["x"][:] = -1
        assert data.batch["x"][1:3].tolist() == [[-1, -1], [-1, -1]]

    def test_a_batch_shows_its_columns_and_is_equal_to_itself_only(self) -> None:
        data = rows(2)
        assert repr(data) == "DataProto(2 rows: ['n', 'x', 'uid']; ['step'])"
        assert data != rows(2)
        assert data in [data]

    def test_reports_name_every_column(self, caplog: pytest.LogCaptureFixture) -> None:
        data = rows(3)
        info = data.get_data_info()
        for word in ("3 rows", "x: (3, 2) torch.float32", "n: (3,)", "uid", "step"):
            assert word in info
        with caplog.at_level(logging.INFO):
            text = data.print_size("batch")
        assert text.startswith("batch tensors 0.000 MiB")
        assert text in caplog.text


class TestColumns:
    def test_select_keeps_what_is_named_and_all_of_what_is_not_mentioned(self) -> None:
        data = rows(3)
        chosen = data.select(batch_keys=["n"], meta_info_keys=[])
        assert chosen.column_names() == ["n", "uid"]
        assert chosen.meta_info == {}
        assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 3

    def test_select_of_a_missing_column_is_an_error(self) -> None:
        for wrong in (
            {"batch_keys": ["z"]},
            {"non_tensor_batch_keys": ["z"]},
            {"meta_info_keys": ["z"]},
        ):
            with pytest.raises(KeyError, match=r"no \['z'\]"):
                rows(2).select(**wrong)  # type: ignore[arg-type]
        with pytest.raises(KeyError, match="tensor columns"):
            DataProto().select(batch_keys=["a"])

    def test_a_deep_copy_shares_nothing(self) -> None:
        data = rows(2)
        copied = data.select(deepcopy=True)
        assert copied.batch is not None
        assert data.batch is not None
        copied.batch["x"].zero_()
        copied.non_tensor_batch["uid"][0] = "other"
        assert data.batch["x"][1].tolist() == [2, 3]
        assert data.non_tensor_batch["uid"][0] == "u0"

    def test_columns_added_to_a_selection_do_not_appear_in_the_original(self) -> None:
        data = rows(2)
        data.select().set_column("new", torch.zeros(2))
        assert not data.has_column("new")

    def test_pop_moves_columns_out(self) -> None:
        data = rows(3)
        popped = data.pop(["x"], ["uid"], ["step"])
        assert popped.column_names() == ["x", "uid"]
        assert popped.meta_info == {"step": 3}
        assert data.column_names() == ["n"]
        assert data.meta_info == {}
        with pytest.raises(KeyError):
            data.pop(["x"])
        assert data.column_names() == ["n"]

    def test_pop_of_nothing_takes_nothing(self) -> None:
        data = rows(2)
        assert data.pop().column_names() == []
        assert data.column_names() == ["n", "x", "uid"]

    def test_rename(self) -> None:
        data = rows(2)
        assert data.rename("x", "y") is data
        data.rename(["y", "n"], ["z", "m"])
        assert data.column_names() == ["m", "z", "uid"]
        with pytest.raises(ValueError, match="the lists differ in length"):
            data.rename(["m", "z"], ["a"])
        with pytest.raises(KeyError, match="gone"):
            data.rename("gone", "a")
        with pytest.raises(ValueError, match="a name occurs twice"):
            data.rename(["m", "z"], ["a", "a"])

    def test_rename_swaps_two_columns(self) -> None:
        data = rows(2)
        n, x = data.column("n"), data.column("x")
        data.rename(["n", "x"], ["x", "n"])
        assert torch.equal(data.column("x"), n)
        assert torch.equal(data.column("n"), x)

    def test_a_column_of_the_other_kind_is_replaced(self) -> None:
        data = rows(2)
        names = data.column_names()
        data.set_column("x", np.array(["p", "q"]))
        data.set_column("uid", torch.arange(2))
        assert sorted(data.column_names()) == sorted(names)
        assert (data.column("x").tolist(), data.column("uid").tolist()) == (["p", "q"], [0, 1])

    def test_columns_can_be_set_read_and_dropped(self) -> None:
        data = DataProto()
        data.set_column("a", torch.zeros(2))
        data.set_column("u", np.array(["p", "q"], dtype=object))
        assert data.column("u")[1] == "q"
        with pytest.raises(ValueError, match="'b' has 3 rows; the batch has 2"):
            data.set_column("b", torch.zeros(3))
        with pytest.raises(ValueError, match="'b' has 3 rows"):
            data.set_column("b", np.zeros(3))
        data.drop_column("a")
        assert data.column_names() == ["u"]
        assert len(data) == 2
        with pytest.raises(KeyError, match="'a' to drop"):
            data.drop_column("a")
        with pytest.raises(KeyError, match="no column 'a'"):
            data.column("a")


class TestUnion:
    def test_a_union_has_the_columns_and_metadata_of_both(self) -> None:
        data = rows(2)
        other = DataProto.from_dict({"y": torch.ones(2)}, {"v": [1, 2]}, {"k": 1})
        assert data.union(other) is data
        assert data.column_names() == ["n", "x", "y", "uid", "v"]
        assert data.meta_info == {"step": 3, "k": 1}

    def test_equal_columns_may_be_in_both(self) -> None:
        nan = DataProto.from_dict(
            {"a": torch.tensor([1.0, math.nan])},
            {"u": [{"k": [math.nan, 1]}, None], "f": [float("nan"), "s"]},
        )
        united = nan.select(deepcopy=True).union(nan)
        assert united.column_names() == ["a", "f", "u"]
        assert deeply_equal(as_list(united), as_list(nan))

    @pytest.mark.parametrize("where", ["x", "uid", "step"])
    def test_a_difference_is_named_and_nothing_is_changed(self, where: str) -> None:
        data, other = rows(2), rows(2).select(deepcopy=True)
        other.set_column("extra", torch.zeros(2))
        if where == "x":
            assert other.batch is not None
            other.batch["x"] += 1
        elif where == "uid":
            other.non_tensor_batch["uid"][1] = "else"
        else:
            other.meta_info["step"] = 4
        with pytest.raises(ValueError, match=f"'{where}' differs"):
            data.union(other)
        assert data.column_names() == ["n", "x", "uid"]

    def test_batches_of_different_length_are_not_united(self) -> None:
        with pytest.raises(ValueError, match="2 rows with a batch of 3"):
            rows(2).union(DataProto.from_dict({"q": torch.zeros(3)}))
        with pytest.raises(ValueError, match="2 rows with a batch of 3"):
            rows(2).union(DataProto.from_dict(non_tensors={"q": [1, 2, 3]}))

    def test_metadata_alone_unites_with_any_batch(self) -> None:
        assert rows(2).union(DataProto(meta_info={"k": 2})).meta_info == {"step": 3, "k": 2}
        assert DataProto(meta_info={"k": 2}).union(rows(2)).column_names() == ["n", "x", "uid"]


class TestCuttingAndJoining:
    @quick
    @given(st.integers(1, 5), st.integers(1, 4))
    def test_chunk_then_concat_is_the_batch(self, chunks: int, length: int) -> None:
        data = rows(chunks * length)
        pieces = data.chunk(chunks)
        assert [len(piece) for piece in pieces] == [length] * chunks
        assert as_list(DataProto.concat(pieces)) == as_list(data)

    def test_unequal_chunks_need_padding_enabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = rows(5)
        with pytest.raises(ValueError, match="5 rows does not divide into 4"):
            data.chunk(4)
        monkeypatch.setenv("HONE_AUTO_PADDING", "1")
        assert [len(piece) for piece in data.chunk(4)] == [2, 2, 1, 0]
        monkeypatch.delenv("HONE_AUTO_PADDING")
        allowed = DataProto.from_dict({"a": torch.arange(10)}, auto_padding=True)
        assert allowed.meta_info[AUTO_PADDING_KEY] is True
        expected = [len(piece) for piece in torch.arange(10).chunk(4)]
        assert [len(piece) for piece in allowed.chunk(4)] == expected
        with pytest.raises(ValueError, match="0 chunks"):
            data.chunk(0)

    @quick
    @given(st.integers(0, 7), st.integers(1, 8))
    def test_split_gives_pieces_of_a_size_and_a_tail(self, count: int, size: int) -> None:
        data = rows(count)
        pieces = data.split(size)
        whole = as_list(data)
        expected = [whole[i : i + size] for i in range(0, count, size)]
        assert [as_list(piece) for piece in pieces] == expected

    def test_concat_merges_metrics_and_checks_other_metadata(self) -> None:
        first = DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"metrics": {"l": 1}, "t": 1})
        second = DataProto.from_dict(
            {"a": torch.ones(1)}, meta_info={"metrics": [{"l": 2}, {"l": 3, "m": 4}], "u": 2}
        )
        joined = DataProto.concat([first, second])
        assert joined.meta_info == {"metrics": {"l": [1, 2, 3], "m": [4]}, "t": 1, "u": 2}
        second.meta_info["t"] = 9
        with pytest.raises(ValueError, match=r"meta_info\['t'\] is 1 .* and 9"):
            DataProto.concat([first, second])

    def test_concat_takes_metrics_that_are_none_and_lists_of_two_shapes(self) -> None:
        batches = [
            DataProto(None, {"u": np.array([[1, 2], [3, 4]])}, {"metrics": None}),
            DataProto(None, {"u": object_array([[5]])}, {"metrics": {"a": 1}}),
        ]
        joined = DataProto.concat(batches)
        assert joined.column("u").tolist() == [[1, 2], [3, 4], [5]]
        assert joined.meta_info == {"metrics": {"a": [1]}}

    def test_concat_names_the_column_that_does_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"'x' of shapes \[\(2, 2\), \(2, 3\)\]"):
            DataProto.concat([rows(2), rows(2, width=3)])
        with pytest.raises(ValueError, match=r"tensor columns \['x'\] are not in both"):
            DataProto.concat([rows(2), rows(2).select(batch_keys=["n"])])
        data = rows(2)
        with pytest.raises(ValueError, match="only some have tensors"):
            DataProto.concat([data, DataProto(None, data.non_tensor_batch)])
        with pytest.raises(ValueError, match="empty"):
            DataProto.concat([])

    def test_concat_of_object_columns_alone(self) -> None:
        one = DataProto.from_dict(non_tensors={"u": [[1], [2]]})
        assert list(DataProto.concat([one, one]).non_tensor_batch["u"]) == [[1], [2], [1], [2]]

    @quick
    @given(st.permutations(range(5)))
    def test_reorder(self, order: list[int]) -> None:
        data = rows(5)
        expected = [as_list(data)[i] for i in order]
        data.reorder(torch.tensor(order))
        assert as_list(data) == expected

    def test_reorder_needs_every_row(self) -> None:
        with pytest.raises(ValueError, match="2 indices cannot reorder 3 rows"):
            rows(3).reorder([0, 1])

    @quick
    @given(st.integers(0, 4), st.integers(0, 3), st.booleans())
    def test_repeat(self, count: int, times: int, interleave: bool) -> None:
        data = rows(count)
        once = as_list(data)
        expected = [row for row in once for _ in range(times)] if interleave else once * times
        assert as_list(data.repeat(times, interleave)) == expected

    def test_repeat_refuses_less_than_nothing(self) -> None:
        with pytest.raises(ValueError, match="-1 times"):
            rows(2).repeat(-1)

    @quick
    @given(st.lists(st.integers(0, 3), max_size=5))
    def test_sample_level_repeat(self, times: list[int]) -> None:
        data = rows(len(times))
        expected = [row for row, k in zip(as_list(data), times, strict=True) for _ in range(k)]
        assert as_list(data.sample_level_repeat(times)) == expected

    def test_sample_level_repeat_needs_a_count_per_row(self) -> None:
        with pytest.raises(ValueError, match="the batch has 3 rows"):
            rows(3).sample_level_repeat([1, 2])


class TestIterator:
    def test_every_row_is_in_each_epoch_once_with_the_metadata(self) -> None:
        pieces = list(rows(6).make_iterator(2, epochs=2))
        assert [piece.batch["n"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]] * 2
        assert all(piece.meta_info == {"step": 3} for piece in pieces)

    def test_a_seed_fixes_the_shuffle(self) -> None:
        def order(seed: int) -> list[int]:
            pieces = rows(8).make_iterator(2, 2, seed, {"shuffle": True})
            return [n for piece in pieces for n in piece.batch["n"].tolist()]

        assert order(1) == order(1)
        assert order(1) != order(2)
        assert sorted(order(1)[:8]) == list(range(8))
        assert order(1)[:8] != order(1)[8:]

    def test_an_odd_size_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="mini_batch_size=4 does not divide a batch of 6"):
            rows(6).make_iterator(4, 1)


class TestShapes:
    def test_column_chunks_become_rows(self) -> None:
        data = DataProto.from_dict(
            {"wide": torch.arange(8).reshape(2, 4), "n": torch.tensor([7, 8])}, {"u": ["a", "b"]}
        )
        unfolded = data.unfold_column_chunks(2, split_keys=["wide"])
        assert unfolded.batch is not None
        assert unfolded.batch["wide"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert unfolded.batch["n"].tolist() == [7, 7, 8, 8]
        assert list(unfolded.non_tensor_batch["u"]) == ["a", "a", "b", "b"]

    def test_impossible_column_chunks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'x' of shape"):
            rows(2, width=3).unfold_column_chunks(2, ["x"])
        with pytest.raises(KeyError, match="no columns"):
            rows(2).unfold_column_chunks(2, ["gone"])

    @quick
    @given(st.integers(1, 3), st.integers(1, 3))
    def test_fold_and_unfold_are_inverse(self, outer: int, inner: int) -> None:
        data = rows(outer * inner)
        folded = data.fold_batch_dim(outer)
        assert folded.batch is not None
        assert tuple(folded.batch.batch_size) == (outer, inner)
        assert folded.batch["x"].shape == (outer, inner, 2)
        assert folded.non_tensor_batch["uid"].shape == (outer, inner)
        assert as_list(folded.unfold_batch_dim()) == as_list(data)

    def test_impossible_folds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="5 rows does not fold into 2"):
            rows(5).fold_batch_dim(2)
        with pytest.raises(ValueError, match="fewer than 2 dimensions"):
            rows(4).unfold_batch_dim()


class TestDisk:
    def test_a_file_gives_the_batch_back(self, tmp_path: Path) -> None:
        data = rows(3)
        data.save_to_disk(tmp_path / "batch.pkl")
        again = DataProto.load_from_disk(tmp_path / "batch.pkl")
        assert as_list(again) == as_list(data)
        assert again.meta_info == data.meta_info
        assert [file.name for file in tmp_path.iterdir()] == ["batch.pkl"]

    def test_a_file_with_something_else_is_refused(self, tmp_path: Path) -> None:
        import pickle

        (tmp_path / "x").write_bytes(pickle.dumps([1]))
        with pytest.raises(ValueError, match="contains a list, not a DataProto"):
            DataProto.load_from_disk(tmp_path / "x")

    def test_a_file_that_names_code_is_refused_and_runs_nothing(self, tmp_path: Path) -> None:
        import os
        import pickle

        class Command:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {tmp_path / 'ran'}",)

        data = rows(2)
        data.meta_info["x"] = Command()
        (tmp_path / "batch").write_bytes(pickle.dumps(data))
        with pytest.raises(ValueError, match=r"contains a posix\.system"):
            DataProto.load_from_disk(tmp_path / "batch")
        with pytest.raises(ValueError, match=r"contains a posix\.system"):
            data.save_to_disk(tmp_path / "again")  # refused when it is written, not when it is read
        assert [file.name for file in tmp_path.iterdir()] == ["batch"]

    def test_plain_values_arrays_and_tensors_come_back(self, tmp_path: Path) -> None:
        data = rows(2)
        data.meta_info |= {
            "tensor": torch.arange(3),
            "array": np.arange(3.0),
            "scalar": np.float32(2.5),
            "set": {1, 2},
            "complex": 1 + 2j,
            "nested": {"a": [None, True, b"x", ("t",)]},
        }
        data.save_to_disk(tmp_path / "batch")
        again = DataProto.load_from_disk(tmp_path / "batch").meta_info
        assert torch.equal(again.pop("tensor"), torch.arange(3))
        assert (again.pop("array") == np.arange(3.0)).all()
        del data.meta_info["tensor"], data.meta_info["array"]
        assert again == data.meta_info

    def test_to_moves_in_place(self) -> None:
        data = rows(2)
        assert data.to("meta") is data
        assert data.batch is not None
        assert data.batch["x"].device.type == "meta"
