from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.loader import PromptLoader
from hone.data.prompts import collate_fn, row_uid
from hone.data.rows import DataError
from hone.data.samplers import AbstractCurriculumSampler, AbstractSampler, AllRows, MixtureSampler


class Numbers:
    """A minimal data set: row i contains i; rows may be added."""

    def __init__(self, rows: int, grows_by: int = 0) -> None:
        self.rows = list(range(rows))
        self.grows_by = grows_by

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"n": self.rows[index], "tokens": [index] * 3}

    def on_batch_end(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"n": 1000 + int(batch["n"][0])}] * self.grows_by

    def append(self, rows: list[dict[str, Any]]) -> None:
        self.rows += [row["n"] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = list(state["rows"])


class SeededSampler(AbstractSampler):
    """Keeps its generator over epochs and has no state_dict, like many samplers of users."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self)))
        self.rng.shuffle(order)
        yield from order


class HardFirst(AbstractCurriculumSampler):
    """Draws the row with the smallest weight, which draws and `update` raise; has state_dict."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.weight = [0.0] * len(data_source)
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        start, self.position = self.position % len(self), self.position % len(self)
        for _ in range(start, len(self)):
            self.position += 1
            index = min(range(len(self.weight)), key=lambda i: (self.weight[i], i))
            self.weight[index] += 1.0
            yield index

    def update(self, batch: Mapping[str, Any]) -> None:
        for index in batch["dataset_index"]:
            self.weight[index] += 0.3 * (index % 3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": list(self.weight), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weight = list(state["weight"])
        self.position = state["position"]


class Remembering(AbstractSampler):
    """Continues at the saved position of an epoch, even at its end."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.passes, self.next_position = 0, 0
        self.start: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.start is None:
            self.passes += 1
        begin, self.start = self.start or 0, None
        order = list(range(len(self)))
        random.Random(self.passes).shuffle(order)
        for position in range(begin, len(self)):
            self.next_position = position + 1
            yield order[position]

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "at": self.next_position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes, self.next_position = state["passes"], state["at"]
        self.start = state["at"] if state["passes"] else None


def make_loader(
    mode: str, rows: int, batch_size: int, drop_last: bool, seed: int = 0
) -> PromptLoader:
    dataset = Numbers(rows, grows_by=1 if mode == "growing" else 0)
    sampler: Any = None
    if mode == "mixture":
        cut = max(rows // 3, 1)
        indices_by_file = [range(cut), range(cut, rows)] if rows > 1 else [range(1), range(1)]
        sampler = MixtureSampler(indices_by_file, [0.7, 0.3], shuffle=True, seed=seed)
    elif mode == "seeded sampler":
        sampler = SeededSampler(dataset, None)
    elif mode == "remembering sampler":
        sampler = Remembering(dataset, None)
    elif mode == "curriculum":
        sampler = HardFirst(dataset, None)
    return PromptLoader(
        dataset,
        batch_size,
        shuffle=mode != "in order",
        seed=seed,
        drop_last=drop_last,
        sampler=sampler,
    )


def run(loader: PromptLoader, count: int) -> list[list[tuple[int, str, int]]]:
    batches = []
    for _ in range(count):
        batch = loader.next_batch()
        batches.append(list(zip(batch["n"], batch["uid"], batch["dataset_index"], strict=True)))
        loader.on_batch_end(batch)
    return batches


MODES = [
    "in order",
    "shuffled",
    "mixture",
    "seeded sampler",
    "remembering sampler",
    "curriculum",
    "growing",
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODES),
    st.integers(1, 23),
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 25),
    st.integers(1, 12),
)
def test_a_resumed_loader_goes_on_with_the_exact_row(
    mode: str, rows: int, batch_size: int, drop_last: bool, before: int, after: int
) -> None:
    batch_size = min(batch_size, rows)
    uninterrupted = make_loader(mode, rows, batch_size, drop_last)
    expected = run(uninterrupted, before + after)[before:]
    stopped = make_loader(mode, rows, batch_size, drop_last)
    run(stopped, before)
    state = json.loads(json.dumps(stopped.state_dict()))  # it must survive a checkpoint file
    resumed = make_loader(mode, rows, batch_size, drop_last)
    resumed.load_state_dict(state)
    assert run(resumed, after) == expected
    assert resumed.epoch == uninterrupted.epoch


@given(st.sampled_from(["in order", "shuffled", "seeded sampler"]), st.integers(1, 30))
def test_every_row_comes_exactly_once_an_epoch(mode: str, rows: int) -> None:
    loader = make_loader(mode, rows, 4, drop_last=False)
    for epoch in range(3):
        drawn = []
        for _ in range(loader.batches_per_epoch):
            drawn += list(loader.next_batch()["n"])
            assert loader.epoch == epoch
        assert sorted(drawn) == list(range(rows))


@given(st.sampled_from(MODES), st.integers(2, 20))
def test_no_two_uses_of_a_row_share_a_uid(mode: str, rows: int) -> None:
    loader = make_loader(mode, rows, 2, drop_last=True)
    uids = [uid for batch in run(loader, 30) for _, uid, _ in batch]
    assert len(set(uids)) == len(uids)


def test_uids_are_a_hash_and_the_same_in_every_run() -> None:
    assert row_uid("data", 3, 1, 0) == row_uid("data", 3, 1, 0)
    assert len(row_uid("data", 3, 1, 0)) == 16
    int(row_uid("data", 3, 1, 0), 16)
    keys = itertools.product(["data", "data3"], range(3), range(3), range(2))
    assert len({row_uid(*key) for key in keys}) == 36


def test_seeds_and_epochs_give_other_orders() -> None:
    one, same, other = (make_loader("shuffled", 50, 50, True, seed) for seed in (1, 1, 2))
    first = run(one, 2)
    assert first == run(same, 2)
    assert first[0] != run(other, 1)[0]
    assert [n for n, _, _ in first[0]] != [n for n, _, _ in first[1]]


def test_the_tail_is_dropped_or_kept_as_a_smaller_batch() -> None:
    dropped = make_loader("in order", 7, 3, drop_last=True)
    assert dropped.batches_per_epoch == 2
    assert [len(batch) for batch in run(dropped, 4)] == [3, 3, 3, 3]
    loader = make_loader("in order", 7, 3, drop_last=False)
    assert loader.batches_per_epoch == 3
    assert [len(batch) for batch in run(loader, 4)] == [3, 3, 1, 3]


def test_one_epoch_leaves_the_loaders_position_alone() -> None:
    loader = make_loader("shuffled", 7, 3, drop_last=False)
    loader.next_batch()
    state = loader.state_dict()
    batches = list(loader.first_epoch())
    assert sorted(n for batch in batches for n in batch["n"]) == list(range(7))
    assert list(batches[0]["uid"]) == list(next(loader.first_epoch())["uid"])
    assert loader.state_dict() == state


def test_a_batch_may_change_its_size_on_resume() -> None:
    loader = make_loader("shuffled", 12, 4, drop_last=True)
    run(loader, 1)
    resumed = make_loader("shuffled", 12, 2, drop_last=True)
    resumed.load_state_dict(loader.state_dict())
    assert [draw for batch in run(resumed, 2) for draw in batch] == run(loader, 1)[0]


def test_another_order_on_resume_is_refused() -> None:
    state = make_loader("shuffled", 12, 4, True, seed=1).state_dict()
    with pytest.raises(DataError, match="shuffle with seed 1, of this run shuffle with seed 2"):
        make_loader("shuffled", 12, 4, True, seed=2).load_state_dict(state)


def test_too_few_rows_for_a_batch_says_so() -> None:
    with pytest.raises(DataError, match="has 3 rows, fewer than one batch of 4"):
        make_loader("shuffled", 3, 4, drop_last=True)


class Wrapped:
    """Gives the methods of another data set by `__getattr__`."""

    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.data[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)


def test_the_state_of_a_wrapped_data_set_is_saved() -> None:
    options: dict[str, Any] = {"shuffle": False, "seed": 0, "drop_last": True}
    state = PromptLoader(Wrapped(Numbers(4)), 2, **options).state_dict()
    assert state["dataset"] == Numbers(4).state_dict()


def test_a_sampler_that_ends_early_is_named() -> None:
    class Short(SeededSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([0])

    data = Numbers(4)
    loader = PromptLoader(data, 2, shuffle=True, seed=0, drop_last=True, sampler=Short(data, None))
    with pytest.raises(DataError, match="Short ended after 1 rows, but its length is 4"):
        loader.next_batch()


def test_added_rows_are_drawn_from_the_next_epoch_on() -> None:
    loader = make_loader("growing", 4, 2, drop_last=False)
    first = {n for batch in run(loader, 2) for n, _, _ in batch}
    assert first == {0, 1, 2, 3}
    second = {n for batch in run(loader, 3) for n, _, _ in batch}
    assert loader.epoch == 1
    assert len(second) == 6
    assert any(n >= 1000 for n in second)


def test_rows_added_to_a_mixture_are_refused() -> None:
    data = Numbers(4, grows_by=1)
    mixture = MixtureSampler([[0, 1], [2, 3]], [1, 1], shuffle=False, seed=0)
    loader = PromptLoader(data, 2, shuffle=False, seed=0, drop_last=True, sampler=mixture)
    with pytest.raises(DataError, match="dataset_weights gives no weight to them"):
        loader.on_batch_end(loader.next_batch())


def test_a_curriculum_without_state_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(SeededSampler):
        def update(self, batch: Any) -> None: ...

    data = Numbers(4)
    PromptLoader(data, 2, shuffle=True, seed=0, drop_last=True, sampler=Forgetful(data, None))
    assert "has no state_dict" in caplog.text


def test_collate_gives_one_dimensional_object_arrays_with_none_for_absent() -> None:
    batch = collate_fn([{"ids": [1, 2]}, {"ids": [3, 4], "extra": np.ones(2)}])
    assert batch["ids"].shape == (2,)
    assert batch["ids"].dtype == object
    assert batch["ids"][1] == [3, 4]
    assert batch["extra"][0] is None


def test_a_row_drawn_twice_in_one_batch_is_two_groups() -> None:
    mixture = MixtureSampler([[0], [1, 2, 3]], [0.5, 0.5], shuffle=False, seed=0)
    loader = PromptLoader(Numbers(4), 4, shuffle=False, seed=0, drop_last=True, sampler=mixture)
    batch = loader.next_batch()
    assert Counter(batch["n"])[0] == 2
    assert len(set(batch["uid"])) == 4


def test_the_loader_iterates_for_ever(make_rows: Callable[..., Any]) -> None:
    loader = make_loader("shuffled", 3, 3, True)
    assert len(list(itertools.islice(loader, 10))) == 10
    assert loader.epoch == 9


def test_the_order_of_a_seed_is_fixed_for_ever() -> None:
    assert list(AllRows(shuffle=True, seed=1).epoch_order(0, 8)) == [0, 1, 2, 7, 3, 4, 6, 5]
    assert list(AllRows(shuffle=False, seed=1).epoch_order(4, 3)) == [0, 1, 2]
