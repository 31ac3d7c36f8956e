"""The loop runner: rows in, trajectories out, every row through its own loop at the same time.

It owns the thread that the loops run in, and says which thread decodes for them: the caller's inside
`run_until`, or one of its own after `start`. What one loop does is trajectory.py's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hone.agents.contract import AgentLoopOutput
from hone.agents.loop_thread import LOOPS_GRACE_S, LoopThread
from hone.agents.trajectory import AgentLoopFailed, Job, TrajectoryMaker
from hone.config import PPOTrainerConfig
from hone.controller.waiting import PhaseDeadlines
from hone.protocol import DataProto
from hone.rollout.contract import Driven, RolloutEngine
from hone.tokenizer import Tokenizer

_PHASE = "agent loops"


@dataclass(frozen=True)
class FinishedGroup:
    """The trajectories of one uid."""

    uid: str
    submission: int
    """The number that `submit` returned."""
    rows: tuple[int, ...]
    """Where its rows stood among the submitted."""
    outputs: tuple[AgentLoopOutput, ...]
    """One for each of these rows."""


@dataclass(eq=False)
class _Group:
    """Rows of one uid, from their submission until they are taken or aborted."""

    uid: str
    submission: int
    rows: list[int] = field(default_factory=list)
    outputs: dict[int, AgentLoopOutput] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # the event loop's alone
    aborted: bool = False

    def finished(self) -> FinishedGroup:
        outputs = tuple(self.outputs[row] for row in self.rows)
        return FinishedGroup(self.uid, self.submission, tuple(self.rows), outputs)


class LoopRunner:
    """Runs agent loops beside one rollout engine."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        *,
        run_seed: int,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: how many token ids the model knows; without it only their sign is checked."""
        self._engine = engine
        self._trajectories = TrajectoryMaker(config, engine, tokenizer, run_seed, vocabulary)
        self._deadlines = PhaseDeadlines(
            config.trainer.phase_deadline_floor_s, config.trainer.phase_deadline_factor
        )
        # Guards all below, and tells of every change.
        self._changed = threading.Condition()
        self._groups: list[_Group] = []  # submitted and not handed out, in the order of submission
        self._ready: list[_Group] = []  # of these, those that ended, in that order
        self._submissions = 0
        self._playing = 0  # submissions whose loops have not all ended
        self._plays: set[asyncio.Task[None]] = set()
        self._loops: LoopThread[bool] | None = None  # ends when nothing plays
        self._idle = asyncio.Event()  # ends it
        self._failure: Exception | None = None
        self._driver: threading.Thread | None = None
        self._settling = False
        self._closed = False

    def submit(self, rows: DataProto) -> int:
        """Start a loop for each row; rows of one uid are one group. Returns the submission's number.

        `meta_info` says how to sample (`sampling_params`).
        """
        jobs = self._trajectories.jobs(rows)
        with self._changed:
            if self._closed:
                raise AgentLoopFailed("the loop runner is closed; build another")
            self._raise_failure()
            self._submissions += 1
            groups: dict[str, _Group] = {}
            for index, job in enumerate(jobs):
                uid = job.row["uid"]
                groups.setdefault(uid, _Group(uid, self._submissions)).rows.append(index)
            self._groups += groups.values()
            if self._loops is None or self._playing == 0:
                self._idle = asyncio.Event()
                self._loops = LoopThread(self._idle.wait(), self._notify)
                self._loops.start()
            self._playing += 1
            self._loops.call_soon(self._start, list(groups.values()), jobs)
            return self._submissions

    def finished(self, n_groups: int | None = None, wait_s: float = 0.0) -> list[FinishedGroup]:
        """Groups that have ended, in the order of their end, each handed out once.

        Waits up to `wait_s` seconds for `n_groups` (None: for all), and returns no more than these.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._all_ended() or (n_groups is not None and self._are_ready(n_groups)),
                wait_s,
            )
            self._raise_failure()
            taken = self._ready[:n_groups]
            del self._ready[:n_groups]
            gone = set(taken)
            self._groups = [group for group in self._groups if group not in gone]
            return [group.finished() for group in taken]

    def ready(self) -> int:
        """How many groups `finished` would return at once."""
        with self._changed:
            return len(self._ready)

    def pending(self) -> list[str]:
        """The uids that were submitted and not handed out, in the order of submission."""
        with self._changed:
            return [group.uid for group in self._groups]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Decode in this thread until `done()` is true or no loop runs."""
        if self._driver is not None:
            raise RuntimeError("run_until decodes in this thread, but `start` made one that does")

        def ended() -> bool:
            with self._changed:
                return self._all_ended() or (self._failure is None and done())

        def until() -> bool:
            self._settle()
            return ended()

        try:
            if isinstance(self._engine, Driven):
                self._engine.drive(until)
                if not ended():  # the engine has stopped: every request has its error
                    self._end_loops()
            else:
                with self._changed:
                    self._changed.wait_for(ended)
        except BaseException:  # a Ctrl-C, say: the loops end first, so that tools are released
            self.abort()
            self._wait_for_loops()
            self._failure = None
            raise
        with self._changed:
            all_ended = self._all_ended()
        if all_ended:
            self._wait_for_loops()  # tasks that they left behind are ended too
        with self._changed:
            self._raise_failure()

    def start(self) -> None:
        """Decode in a thread of the runner's own from now on; `submit` and `finished` return at once."""
        engine = self._engine
        if self._driver is not None or not isinstance(engine, Driven):
            return

        def until() -> bool:
            self._settle()
            return self._closed

        self._driver = threading.Thread(
            target=engine.drive, args=(until,), name="hone-decode", daemon=True
        )
        self._driver.start()

    def abort(self, uids: Collection[str] | None = None) -> None:
        """Drop these groups (None: all): their loops are cancelled, `finished` never returns them."""
        with self._changed:
            dropped = [g for g in self._groups if uids is None or g.uid in uids]
            for group in dropped:
                group.aborted = True
            self._groups = [g for g in self._groups if not g.aborted]
            self._ready = [g for g in self._ready if not g.aborted]
            if self._loops is not None:
                self._loops.call_soon(_cancel, dropped)
        self._notify()

    def close(self) -> None:
        """Drop everything, and end the threads; the engine is its owner's to close."""
        with self._changed:
            self._closed = True
        self.abort()
        self._wait_for_loops()
        if self._driver is not None:
            self._driver.join(timeout=LOOPS_GRACE_S)

    def _are_ready(self, n_groups: int) -> bool:
        return self._failure is None and len(self._ready) >= n_groups

    def _all_ended(self) -> bool:
        """Whether no loop runs any more."""
        if self._playing and self._loops is not None and self._loops.outcome.done():
            self._failure = self._failure or AgentLoopFailed(
                f"the event loop of the agent loops ended: {self._loops.outcome.exception()!r}"
            )
            self._playing = 0
        return self._playing == 0

    def _raise_failure(self) -> None:
        """One loop's failure has ended them all: what was submitted with it is dropped."""
        failure = self._failure
        if failure is not None:
            if self._playing == 0:
                self._failure, self._groups, self._ready = None, [], []
            raise failure

    # -- threads -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After answers: give the loops the turns to ask again."""
        with self._changed:
            loops, self._settling = self._loops, True
        if loops is not None:
            loops.settle()
        with self._changed:
            self._settling = False  # the engine is told of what changes from here on

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
            settling = self._settling
        if not settling and isinstance(self._engine, Driven):
            self._engine.notify()

    def _end_loops(self) -> None:
        """Decoding has stopped: loops that do not end by themselves are cancelled."""
        if self._wait_for_loops():
            return
        with self._changed:
            self._failure = self._failure or AgentLoopFailed(
                f"decoding has stopped, and {len(self._groups) - len(self._ready)} groups of agent "
                "loops did not end"
            )
        self.abort()
        self._wait_for_loops()

    def _wait_for_loops(self) -> bool:
        loops = self._loops
        return loops is None or loops.wait(LOOPS_GRACE_S)

    # -- in the event loop ---------------------------------------------------------------------

    def _start(self, groups: list[_Group], jobs: list[Job]) -> None:
        play = asyncio.get_running_loop().create_task(self._play(groups, jobs))
        self._plays.add(play)
        play.add_done_callback(self._plays.discard)

    async def _play(self, groups: list[_Group], jobs: list[Job]) -> None:
        """One submission: its loops to their end, or to the first failure of any submission."""
        try:
            with self._deadlines.measured(_PHASE) as limit_s:
                await self._end_in_time(groups, jobs, limit_s)
        except Exception as error:
            with self._changed:
                self._failure = self._failure or error
                _cancel(self._groups)
        finally:
            with self._changed:
                self._playing -= 1
                if self._playing == 0:
                    self._idle.set()
            self._notify()

    async def _end_in_time(self, groups: list[_Group], jobs: list[Job], limit_s: float) -> None:
        """The first loop to fail, or those that are late, end the submission."""
        group_of = {row: group for group in groups if not group.aborted for row in group.rows}
        tasks: dict[int, asyncio.Task[None]] = {}
        for row, group in sorted(group_of.items(), key=lambda item: item[0]):
            tasks[row] = asyncio.create_task(self._trajectory(group, row, jobs[row]))
            group.tasks.append(tasks[row])
        if not tasks:
            return
        try:
            done, _ = await asyncio.wait(
                tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            _cancel(groups)
            # Each ends within its grace time.
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for task in tasks.values():
            if task in done and not task.cancelled():
                task.result()
        late = [group_of[row].uid for row, task in tasks.items() if task not in done]
        if late:
            raise AgentLoopFailed(
                f"{len(late)} of {len(tasks)} agent loops had not ended after {limit_s:g} s, the "
                f"first on row uid={late[0]}; give what it waits for a deadline of its own "
                f"(asyncio.wait_for), or {self._deadlines.advice(_PHASE)}"
            )

    async def _trajectory(self, group: _Group, row: int, job: Job) -> None:
        output = await self._trajectories.make(job)
        with self._changed:
            group.outputs[row] = output
            complete = len(group.outputs) == len(group.rows) and not group.aborted
            if complete:
                self._ready.append(group)
        if complete:
            self._notify()


def _cancel(groups: Sequence[_Group]) -> None:
    for group in groups:
        for task in group.tasks:
            task.cancel()
