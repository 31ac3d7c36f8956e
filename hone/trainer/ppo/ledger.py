"""The ledger of groups: which prompts wait, which groups run, which are finished, and how many may start.

A group is all responses to one prompt; a step takes one batch of groups. The ledger is the only owner of a
group's life and the only throttle of generation. It knows no workers and no tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from hone.types import Fields, Settings

STATE_VERSION = 1


class PromptRef(NamedTuple):
    """One draw of a data row."""

    row: int
    """The row's index in the data set."""
    uid: str


@dataclass(frozen=True)
class _Group:
    prompt: PromptRef
    start_step: int
    """The number of steps done when the group started."""


class Ledger:
    """Counts groups in steps: step k is done when batch k was taken and its updates ran or were skipped.

    A group may start while consumed + finished + running + 1 <= (steps done + 1 + staleness) x batch size. A
    taken batch consumes `batch_size` places, even if it has fewer groups. Until the batch of a step is taken,
    `spare` more groups may start; those that the batch did not need start again in the next step.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        staleness: int = 0,
        spare: int = 0,
        order: Literal["submission", "finish"] = "submission",
        refills: bool = True,
    ) -> None:
        """Without `refills`, rejected groups are not replaced, and a batch may have fewer groups."""
        self._batch_size, self._staleness, self._spare = batch_size, staleness, spare
        self._order, self._refills = order, refills
        self.steps_done = 0
        self.counts: Counter[str] = Counter()
        """The prompts that were consumed, rejected or dropped until the last batch."""
        self._num_consumed = 0  # in places of batches
        self._next_number = 0
        self._pending: deque[PromptRef] = deque()  # drawn and not started
        self._running: dict[int, _Group] = {}
        self._finished: dict[int, _Group] = {}  # accepted and not consumed, in finishing order
        self._rejected: dict[int, _Group] = {}  # since the last batch

    @property
    def pending(self) -> Sequence[PromptRef]:
        """The prompts that were drawn and have not started, in the order in which they start."""
        return tuple(self._pending)

    @property
    def running(self) -> Sequence[int]:
        """The numbers of the groups that have started and not finished, in submission order."""
        return tuple(self._running)

    @property
    def finished(self) -> Sequence[int]:
        """The numbers of the accepted groups that no batch has consumed, in finishing order."""
        return tuple(self._finished)

    def admissible(self) -> int:
        """Returns how many groups may start now."""
        bound = (self.steps_done + 1 + self._staleness) * self._batch_size
        if (
            self._num_consumed == self.steps_done * self._batch_size
        ):  # the step's batch is not taken
            bound += self._spare
        return max(0, bound - self._num_consumed - len(self._finished) - len(self._running))

    def draw(self, prompts: Iterable[PromptRef]) -> None:
        """Adds prompts of the data set behind those that are pending."""
        self._pending.extend(prompts)

    def start(self, num_groups: int) -> dict[int, PromptRef]:
        """Starts the first pending prompts as groups; returns each group's number and prompt."""
        if num_groups > min(self.admissible(), len(self._pending)):
            raise ValueError(
                f"{num_groups} groups cannot start: {self.admissible()} may, and "
                f"{len(self._pending)} prompts are pending; draw prompts, or consume a batch first"
            )
        prompts = {}
        for _ in range(num_groups):
            number, prompt = self._next_number, self._pending.popleft()
            self._next_number += 1
            self._running[number] = _Group(prompt, self.steps_done)
            prompts[number] = prompt
        return prompts

    def accept(self, number: int) -> None:
        """Records that a group has finished and may enter a batch."""
        self._finished[number] = self._running.pop(number)

    def reject(self, number: int) -> None:
        """Gives back the place of a group that may not enter a batch."""
        groups = self._running if number in self._running else self._finished
        self._rejected[number] = groups.pop(number)

    def next_batch(self) -> list[int] | None:
        """Returns the numbers of the next batch, or None while it is not complete.

        In submission order, no group of the batch may be overtaken by one that still runs.
        """
        if not self._refills:
            return None if self._running else sorted(self._finished)[: self._batch_size] or None
        numbers: Iterable[int] = self._finished
        if self._order == "submission":
            first_running = min(self._running, default=self._next_number)
            numbers = (number for number in sorted(self._finished) if number < first_running)
        batch = sorted(islice(numbers, self._batch_size))
        return batch if len(batch) == self._batch_size else None

    def consume(self, batch: Iterable[int]) -> list[int]:
        """Takes a batch; returns the numbers of the groups that may not run on, with the highest numbers.

        The batches of the next `staleness` steps may hold the groups that remain. In submission order, the
        prompts of the others are pending again, also if they were rejected to be replaced, so that the next
        step does not depend on timing. In finishing order they are dropped, because the slowest would start
        again in every step.
        """
        consumed = {number: self._finished.pop(number) for number in batch}
        self.counts["consumed"] += len(consumed)
        self._num_consumed += self._batch_size
        num_kept = self._staleness * self._batch_size
        ahead = sorted([*self._finished, *self._running])
        surplus = ahead[num_kept:]
        last_kept = max([*consumed, *ahead[:num_kept]], default=-1)
        groups = {number: self._remove(number) for number in surplus}
        if self._order == "submission":
            if self._refills and len(ahead) >= num_kept:
                late = [number for number in self._rejected if number > last_kept]
                groups |= {number: self._rejected.pop(number) for number in late}
            self._pending.extendleft(
                groups[number].prompt for number in sorted(groups, reverse=True)
            )
        else:
            self.counts["dropped"] += len(groups)
        self.counts["rejected"] += len(self._rejected)
        self._rejected = {}
        return surplus

    def step_done(self) -> None:
        """Records the end of a step, also of one whose updates were skipped."""
        self.steps_done += 1

    def ages(self, numbers: Iterable[int]) -> list[int]:
        """Returns for each group how many steps were done since it started."""
        groups = self._running | self._finished
        return [self.steps_done - groups[number].start_step for number in numbers]

    def reserve_numbers(self, count: int) -> range:
        """Returns numbers for groups of validation, which need no place and enter no batch."""
        self._next_number += count
        return range(self._next_number - count, self._next_number)

    def state_dict(self) -> Fields:
        """Returns the state in plain values; groups that were not consumed are prompts that start again."""
        groups = {**self._running, **self._finished}
        prompts = [groups[number].prompt for number in sorted(groups)]
        return {
            "version": STATE_VERSION,
            "steps_done": self.steps_done,
            "next_number": self._next_number,
            "counts": dict(self.counts + Counter(rejected=len(self._rejected))),
            "prompts": [list(prompt) for prompt in (*prompts, *self._pending)],
        }

    def load_state_dict(self, state: Settings) -> None:
        """Restores a state, also of a run with another batch size or another bound."""
        self.steps_done, self._next_number = state["steps_done"], state["next_number"]
        self._num_consumed = self.steps_done * self._batch_size
        self.counts = Counter(state["counts"])
        self._pending = deque(PromptRef(int(row), uid) for row, uid in state["prompts"])
        self._running, self._finished, self._rejected = {}, {}, {}

    def _remove(self, number: int) -> _Group:
        groups = self._running if number in self._running else self._finished
        return groups.pop(number)


def ledger_state(trainer_state: Settings) -> Fields:
    """Returns the state of the ledger for a checkpoint from before there was one."""
    groups = trainer_state.get("not_taken", ())
    return {
        "version": STATE_VERSION,
        "steps_done": trainer_state["step"],
        "next_number": 0,
        "counts": {},
        "prompts": [[group["index"], group["uid"]] for group in groups],
    }
