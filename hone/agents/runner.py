"""The loop runner: runs the agent loops of all rows concurrently and returns the trajectories.

The loops run in the event loop of a separate thread. The engine decodes in the caller's thread in
`run_until`, or in a background thread after `start`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hone.agents.contract import AgentLoopOutput
from hone.agents.loop_thread import LOOPS_GRACE_S
from hone.agents.trajectory import AgentLoopFailed, Job, TrajectoryMaker
from hone.config import PPOTrainerConfig
from hone.controller.worker_group import PhaseDeadlines
from hone.event_loop import LoopThread
from hone.protocol import DataProto
from hone.rollout.contract import DrivenEngine, RolloutEngine
from hone.tokenizer import Tokenizer

_PHASE = "agent loops"


@dataclass(frozen=True)
class FinishedGroup:
    """The trajectories of one uid."""

    uid: str
    submission: int
    """The number that `submit` returned."""
    rows: tuple[int, ...]
    """Per output, the index of its row in the submitted batch."""
    outputs: tuple[AgentLoopOutput, ...]
    """At least one output per row, in row order."""


@dataclass(eq=False)
class _Group:
    """The rows of one uid, from submission until they are returned or aborted."""

    uid: str
    submission: int
    rows: list[int] = field(default_factory=list)
    outputs: dict[int, tuple[AgentLoopOutput, ...]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # used in the event loop only
    aborted: bool = False

    def to_finished_group(self) -> FinishedGroup:
        pairs = [(row, output) for row in self.rows for output in self.outputs[row]]
        rows, outputs = zip(*pairs, strict=True)
        return FinishedGroup(self.uid, self.submission, rows, outputs)


class LoopRunner:
    """Runs agent loops with one rollout engine."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        *,
        run_seed: int,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary` is the number of token ids; without it, only negative ids are errors."""
        self._engine = engine
        self._trajectory_maker = TrajectoryMaker(config, engine, tokenizer, run_seed, vocabulary)
        self._deadlines = PhaseDeadlines(
            config.trainer.phase_deadline_floor_s, config.trainer.phase_deadline_factor
        )
        # Guards the fields below; notified of every change.
        self._condition = threading.Condition()
        self._groups: list[_Group] = []  # submitted and not yet returned, in submission order
        self._ready_groups: list[_Group] = []  # finished and not yet returned, in finish order
        self._num_submissions = 0
        self._active_submissions = 0  # submissions with running loops
        self._submission_tasks: set[asyncio.Task[None]] = set()
        self._loop_thread: LoopThread[bool] | None = None  # ends when no submission is running
        self._all_submissions_ended = asyncio.Event()  # ends `_loop_thread`
        self._failure: Exception | None = None
        self._decode_thread: threading.Thread | None = None
        self._is_waiting_for_requests = False
        self._closed = False

    def submit(self, rows: DataProto) -> int:
        """Starts a loop for each row, groups the rows by uid, and returns the submission's number.

        `meta_info["sampling_params"]` holds the sampling parameters.
        """
        jobs = self._trajectory_maker.jobs(rows)
        with self._condition:
            if self._closed:
                raise AgentLoopFailed("the loop runner is closed; create a new one")
            self._raise_failure()
            self._num_submissions += 1
            groups: dict[str, _Group] = {}
            for index, job in enumerate(jobs):
                uid = job.row["uid"]
                groups.setdefault(uid, _Group(uid, self._num_submissions)).rows.append(index)
            self._groups += groups.values()
            if self._loop_thread is None or self._active_submissions == 0:
                self._all_submissions_ended = asyncio.Event()
                self._loop_thread = LoopThread(self._all_submissions_ended.wait(), self._notify)
                self._loop_thread.start()
            self._active_submissions += 1
            self._loop_thread.call_soon(self._start_submission, list(groups.values()), jobs)
            return self._num_submissions

    def finished(self, n_groups: int | None = None, wait_s: float = 0.0) -> list[FinishedGroup]:
        """Returns finished groups in finish order, each of them once.

        Waits up to `wait_s` seconds for `n_groups` groups (None: all); returns at most that many.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._all_ended() or (n_groups is not None and self._has_ready(n_groups)),
                wait_s,
            )
            self._raise_failure()
            groups = self._ready_groups[:n_groups]
            del self._ready_groups[:n_groups]
            returned_groups = set(groups)
            self._groups = [group for group in self._groups if group not in returned_groups]
            return [group.to_finished_group() for group in groups]

    def ready(self) -> int:
        """Returns the number of groups that `finished` would return without waiting."""
        with self._condition:
            return len(self._ready_groups)

    def pending(self) -> list[str]:
        """Returns the uids that were submitted and not yet returned, in submission order."""
        with self._condition:
            return [group.uid for group in self._groups]

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Decodes in this thread until `is_done()` is true or no loop is running."""
        if self._decode_thread is not None:
            raise RuntimeError("run_until cannot decode: the thread of `start` already decodes")

        def is_over() -> bool:
            with self._condition:
                return self._all_ended() or (self._failure is None and is_done())

        def should_stop() -> bool:
            self._wait_for_requests()
            return is_over()

        try:
            if isinstance(self._engine, DrivenEngine):
                self._engine.drive(should_stop)
                if not is_over():  # the engine stopped and every request got an error
                    self._end_loops()
            else:
                with self._condition:
                    self._condition.wait_for(is_over)
        except BaseException:  # e.g. Ctrl-C: end the loops first, so that tools are released
            self.abort()
            self._wait_for_loops()
            self._failure = None
            raise
        with self._condition:
            all_ended = self._all_ended()
        if all_ended:
            self._wait_for_loops()  # also ends tasks that the loops left running
        with self._condition:
            self._raise_failure()

    def start(self) -> None:
        """Starts a thread that decodes, so that `submit` and `finished` need no `run_until`."""
        engine = self._engine
        if self._decode_thread is not None or not isinstance(engine, DrivenEngine):
            return

        def should_stop() -> bool:
            self._wait_for_requests()
            return self._closed

        self._decode_thread = threading.Thread(
            target=engine.drive, args=(should_stop,), name="hone-decode", daemon=True
        )
        self._decode_thread.start()

    def abort(self, uids: Collection[str] | None = None) -> None:
        """Cancels the loops of these groups (None: all); `finished` never returns them."""
        with self._condition:
            aborted_groups = [g for g in self._groups if uids is None or g.uid in uids]
            for group in aborted_groups:
                group.aborted = True
            self._groups = [g for g in self._groups if not g.aborted]
            self._ready_groups = [g for g in self._ready_groups if not g.aborted]
            if self._loop_thread is not None:
                self._loop_thread.call_soon(_cancel, aborted_groups)
        self._notify()

    def close(self) -> None:
        """Aborts all groups and ends the threads; does not close the engine."""
        with self._condition:
            self._closed = True
        self.abort()
        self._wait_for_loops()
        if self._decode_thread is not None:
            self._decode_thread.join(timeout=LOOPS_GRACE_S)

    def _has_ready(self, n_groups: int) -> bool:
        return self._failure is None and len(self._ready_groups) >= n_groups

    def _all_ended(self) -> bool:
        """Returns whether all loops have ended; sets a failure if their event loop ended first."""
        thread = self._loop_thread
        if self._active_submissions and thread is not None and thread.outcome.done():
            error = thread.outcome.exception()
            self._failure = self._failure or AgentLoopFailed(
                f"the event loop of the agent loops ended: {error!r}"
            )
            self._active_submissions = 0
        return self._active_submissions == 0

    def _raise_failure(self) -> None:
        """Raises the first failure, if any; drops all groups if all loops have ended."""
        failure = self._failure
        if failure is not None:
            if self._active_submissions == 0:
                self._failure, self._groups, self._ready_groups = None, [], []
            raise failure

    # -- threads -------------------------------------------------------------------------------

    def _wait_for_requests(self) -> None:
        """Waits until the loops have submitted their next requests after the engine's answers."""
        with self._condition:
            loop_thread, self._is_waiting_for_requests = self._loop_thread, True
        if loop_thread is not None:
            loop_thread.wait_for_requests()
        with self._condition:
            self._is_waiting_for_requests = False  # from here on, changes notify the engine

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
            is_waiting = self._is_waiting_for_requests
        if not is_waiting and isinstance(self._engine, DrivenEngine):
            self._engine.notify()

    def _end_loops(self) -> None:
        """Waits for the loops after decoding has stopped, then cancels loops that did not end."""
        if self._wait_for_loops():
            return
        with self._condition:
            num_running = len(self._groups) - len(self._ready_groups)
            self._failure = self._failure or AgentLoopFailed(
                f"decoding has stopped, and {num_running} groups of agent loops did not end"
            )
        self.abort()
        self._wait_for_loops()

    def _wait_for_loops(self) -> bool:
        """Returns whether the loops ended within LOOPS_GRACE_S."""
        loop_thread = self._loop_thread
        return loop_thread is None or loop_thread.wait(LOOPS_GRACE_S)

    # -- in the event loop ---------------------------------------------------------------------

    def _start_submission(self, groups: list[_Group], jobs: list[Job]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_submission(groups, jobs))
        self._submission_tasks.add(task)
        task.add_done_callback(self._submission_tasks.discard)

    async def _run_submission(self, groups: list[_Group], jobs: list[Job]) -> None:
        """Runs the loops of one submission; its first failure cancels all submissions."""
        try:
            with self._deadlines.timed(_PHASE) as limit_s:
                await self._run_loops(groups, jobs, limit_s)
        except Exception as error:
            with self._condition:
                self._failure = self._failure or error
                _cancel(self._groups)
        finally:
            with self._condition:
                self._active_submissions -= 1
                if self._active_submissions == 0:
                    self._all_submissions_ended.set()
            self._notify()

    async def _run_loops(self, groups: list[_Group], jobs: list[Job], limit_s: float) -> None:
        """Runs the loops; raises the first failure, or AgentLoopFailed after `limit_s`."""
        group_by_row = {row: group for group in groups if not group.aborted for row in group.rows}
        tasks: dict[int, asyncio.Task[None]] = {}
        for row in sorted(group_by_row):
            trajectory = self._run_trajectory(group_by_row[row], row, jobs[row])
            tasks[row] = asyncio.create_task(trajectory)
            group_by_row[row].tasks.append(tasks[row])
        if not tasks:
            return
        try:
            done, _ = await asyncio.wait(
                tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            _cancel(groups)
            # A cancelled task ends within its grace period.
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for task in tasks.values():
            if task in done and not task.cancelled():
                task.result()
        late_uids = [group_by_row[row].uid for row, task in tasks.items() if task not in done]
        if late_uids:
            raise AgentLoopFailed(
                f"{len(late_uids)} of {len(tasks)} agent loops had not ended after {limit_s:g} s, "
                f"the first on row uid={late_uids[0]}; set a deadline on its awaits "
                f"(asyncio.wait_for), or {self._deadlines.advice(_PHASE)}"
            )

    async def _run_trajectory(self, group: _Group, row: int, job: Job) -> None:
        outputs = await self._trajectory_maker.make(job)
        with self._condition:
            group.outputs[row] = outputs
            is_complete = len(group.outputs) == len(group.rows) and not group.aborted
            if is_complete:
                self._ready_groups.append(group)
        if is_complete:
            self._notify()


def _cancel(groups: Sequence[_Group]) -> None:
    for group in groups:
        for task in group.tasks:
            task.cancel()
