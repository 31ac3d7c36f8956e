"""The ledger over thousands of schedules: no deadlock, and every prompt is used once or counted."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.trainer.ppo.ledger import Ledger, PromptRef, ledger_state


@dataclass
class World:
    """Draws prompts, ends groups in a random order, crashes and resumes; `batches` has the uids taken."""

    random: random.Random
    options: dict[str, Any]
    rejection_rate: float
    drawn: int = 0
    batches: list[list[str]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(**self.options)
        self.saved = self.state()

    def is_informative(self, uid: str, step: int) -> bool:
        """Whether the group passes the filters; at staleness 0, that depends on the step's weights."""
        weights = 0 if self.options["staleness"] else step
        return random.Random(f"{self.options} {weights} {uid}").random() >= self.rejection_rate

    def expected_batches(self) -> list[list[str]]:
        """The first informative groups of each step, as if groups ran one after another."""
        batches: list[list[str]] = []
        prompts = (str(number) for number in itertools.count())
        for step in range(len(self.batches)):
            informative = (uid for uid in prompts if self.is_informative(uid, step))
            batches.append(list(itertools.islice(informative, self.options["batch_size"])))
        return batches

    def state(self) -> str:
        return json.dumps([self.ledger.state_dict(), self.drawn, self.batches, self.ages])

    def crash(self) -> None:
        self.ledger = Ledger(**self.options)
        state, self.drawn, self.batches, self.ages = json.loads(self.saved)
        self.ledger.load_state_dict(state)

    def admit(self) -> None:
        """Starts some of the groups that may start; at least one if none runs."""
        room = self.ledger.admissible()
        while len(self.ledger.pending) < room:
            size = self.random.randint(1, 5)
            self.ledger.draw(PromptRef(i, str(i)) for i in range(self.drawn, self.drawn + size))
            self.drawn += size
        least = 0 if self.ledger.running or self.ledger.next_batch() else 1
        assert room >= least, "no group runs, no batch is complete, and none may start"
        self.uids |= {
            number: prompt.uid
            for number, prompt in self.ledger.start(self.random.randint(least, room)).items()
        }

    def end_some(self) -> None:
        """Ends some of the running groups, in any order."""
        running = list(self.ledger.running)
        for number in self.random.sample(running, self.random.randint(0, len(running))):
            is_informative = self.is_informative(self.uids[number], self.ledger.steps_done)
            (self.ledger.accept if is_informative else self.ledger.reject)(number)

    def step(self) -> None:
        """One step; its updates may be skipped, and more groups may start before it is done."""
        while (batch := self.ledger.next_batch()) is None:
            self.admit()
            self.end_some()
        self.ages += self.ledger.ages(batch)
        self.ledger.consume(batch)
        self.batches.append([self.uids[number] for number in batch])
        if self.random.random() < 0.5:
            self.admit_more()
        self.ledger.step_done()
        self.check()

    def admit_more(self) -> None:
        room = min(self.ledger.admissible(), len(self.ledger.pending))
        for number, prompt in self.ledger.start(self.random.randint(0, room)).items():
            self.uids[number] = prompt.uid

    def check(self) -> None:
        """Every prompt that was drawn is in one place."""
        state = self.ledger.state_dict()
        kept, counts = [uid for _, uid in state["prompts"]], state["counts"]
        taken = [uid for batch in self.batches for uid in batch]
        assert len({*taken, *kept}) == len(taken) + len(kept)
        lost = self.drawn - len(taken) - len(kept)
        assert lost == counts.get("rejected", 0) + counts.get("dropped", 0)
        assert counts.get("consumed", 0) == len(taken)

    uids: dict[int, str] = field(default_factory=dict)


@settings(max_examples=10_000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    staleness=st.integers(0, 3),
    spare=st.integers(0, 4),
    order=st.sampled_from(["submission", "finish"]),
    rejection_rate=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_no_schedule_waits_for_ever_or_loses_a_prompt(
    seed: int, batch_size: int, staleness: int, spare: int, order: str, rejection_rate: float
) -> None:
    options = {"batch_size": batch_size, "staleness": staleness, "spare": spare, "order": order}
    world = World(random.Random(seed), options, rejection_rate)
    while len(world.batches) < 4:
        if world.random.random() < 0.1:
            world.crash()
        world.step()
        if world.random.random() < 0.5:
            world.saved = world.state()
    assert all(len(batch) == batch_size for batch in world.batches)
    assert world.ledger.steps_done == len(world.batches)
    assert world.ledger.state_dict()["counts"].get("dropped", 0) == 0 or order == "finish"
    if order == "submission":
        assert world.batches == world.expected_batches()
        assert max(world.ages) <= staleness


def test_at_staleness_0_a_batch_starts_and_the_next_one_waits_for_the_step() -> None:
    ledger = Ledger(2)
    ledger.draw(PromptRef(i, str(i)) for i in range(9))
    assert ledger.admissible() == 2
    assert list(ledger.start(2)) == [0, 1]
    with pytest.raises(ValueError, match="1 groups cannot start: 0 may, and 7 prompts are pending"):
        ledger.start(1)
    ledger.accept(1)
    ledger.reject(0)
    assert ledger.admissible() == 1
    assert ledger.start(1) == {2: PromptRef(2, "2")}
    ledger.accept(2)
    assert ledger.next_batch() == [1, 2]
    assert ledger.consume([1, 2]) == []
    assert ledger.admissible() == 0
    ledger.step_done()
    assert ledger.admissible() == 2


def test_without_refills_a_batch_with_few_groups_takes_the_place_of_a_whole_one() -> None:
    ledger = Ledger(4, refills=False)
    ledger.draw(PromptRef(i, str(i)) for i in range(8))
    for number in ledger.start(4):
        assert ledger.next_batch() is None
        (ledger.accept if number == 1 else ledger.reject)(number)
    assert ledger.next_batch() == [1]
    assert ledger.consume([1]) == []
    ledger.step_done()
    assert ledger.admissible() == 4
    assert [prompt.uid for prompt in ledger.pending] == ["4", "5", "6", "7"]


def test_spare_groups_that_a_batch_did_not_need_start_again_first() -> None:
    ledger = Ledger(1, spare=2)
    ledger.draw(PromptRef(i, str(i)) for i in range(5))
    assert list(ledger.start(3)) == [0, 1, 2]
    ledger.accept(0)
    ledger.accept(2)
    assert ledger.next_batch() == [0]
    assert ledger.consume([0]) == [1, 2]
    assert [prompt.uid for prompt in ledger.pending] == ["1", "2", "3", "4"]


def test_a_checkpoint_from_before_the_ledger_starts_what_it_had_not_taken() -> None:
    group = {"index": 7, "uid": "seven", "samples": 2, "sampling": {"temperature": 1.0}}
    ledger = Ledger(2)
    ledger.load_state_dict(ledger_state({"step": 5, "not_taken": [group]}))
    assert (ledger.steps_done, ledger.admissible()) == (5, 2)
    assert ledger.start(1) == {0: PromptRef(7, "seven")}
    ledger.load_state_dict(ledger_state({"step": 3}))
    assert ledger.pending == ()


def test_the_numbers_of_validation_take_no_place() -> None:
    ledger = Ledger(1)
    assert ledger.reserve_numbers(3) == range(3)
    ledger.draw([PromptRef(0, "0")])
    assert ledger.admissible() == 1
    assert list(ledger.start(1)) == [3]
