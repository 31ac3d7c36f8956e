"""The loop runner: runs the agent loops of all rows concurrently and returns the trajectories.

The loops run in the event loop of a separate thread. The engine decodes in the caller's thread in
`run_until`, or in a background thread after `start`. A trajectory's seed is derived from (run seed, uid,
sample index), so that its tokens do not depend on the other rows of the batch.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hone.agents.collate import check_output
from hone.agents.contract import AgentLoopOutput, ServerManager
from hone.agents.groups import FinishedGroup, GroupRequest, RunningGroup
from hone.agents.loop_names import LoopFactory, LoopNames, loop_arguments
from hone.agents.loop_thread import LOOPS_GRACE_S
from hone.config import PPOTrainerConfig
from hone.errors import UserError
from hone.event_loop import LoopThread, PhaseDeadlines, run_with_deadline
from hone.rollout.contract import RolloutEngine, is_driven, trajectory_seed
from hone.tokenizer import Tokenizer

_PHASE = "agent loops"


class AgentLoopFailed(UserError, RuntimeError):
    """Raised after the failure of a loop; the message names the loop, the row and the error."""


class LoopRunner:
    """Runs agent loops with one rollout engine; each trajectory gets a new loop object."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        *,
        run_seed: int,
        vocab_size: int | None = None,
    ) -> None:
        """Without `vocab_size`, outputs may contain any token id that is not negative."""
        self._engine, self._rollout = engine, config.actor_rollout_ref.rollout
        self._run_seed, self._vocab_size = run_seed, vocab_size
        self._loop_names = LoopNames(self._rollout)
        self._loop_arguments = loop_arguments(config, tokenizer)
        self._factories: dict[object, tuple[str, LoopFactory]] = {}
        self._factory_of(None)  # imports the default loop before the first step
        self._deadlines = PhaseDeadlines(
            config.trainer.phase_deadline_floor_s, config.trainer.phase_deadline_factor
        )
        self._decoded_s, self._decoding_start_s = 0.0, math.inf
        # Guards the fields below; notified of every change.
        self._condition = threading.Condition()
        self._groups: list[RunningGroup] = []  # submitted and not yet returned, in submission order
        self._ready_groups: list[
            RunningGroup
        ] = []  # finished and not yet returned, in finish order
        self._active_submissions = 0  # submissions with running loops
        self._submission_tasks: set[asyncio.Task[None]] = set()
        self._loop_thread: LoopThread[bool] | None = None  # ends when no submission is running
        self._all_submissions_ended = asyncio.Event()  # ends `_loop_thread`
        self._failure: Exception | None = None
        self._decode_thread: threading.Thread | None = None
        self._is_waiting_for_requests = False
        self._is_closed = False

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Starts a loop for each row of these groups."""
        for request in requests:
            for row in request.rows:
                self._factory_of(row.get("agent_name"))  # raises on an unknown name
        with self._condition:
            if self._is_closed:
                raise AgentLoopFailed("the loop runner is closed; create a new one")
            self._raise_failure()
            groups = [RunningGroup(request) for request in requests]
            self._groups += groups
            if self._loop_thread is None or self._active_submissions == 0:
                self._all_submissions_ended = asyncio.Event()
                self._loop_thread = LoopThread(self._all_submissions_ended.wait(), self.notify)
                self._loop_thread.start()
            self._active_submissions += 1
            self._loop_thread.call_soon(self._start_submission, groups)

    def pop_finished(
        self,
        n_groups: int | None = None,
        wait_s: float = 0.0,
        numbers: Collection[int] | None = None,
    ) -> list[FinishedGroup]:
        """Removes and returns up to `n_groups` finished groups (None: all), in finish order.

        Waits up to `wait_s` seconds until `n_groups` groups have finished. With `numbers`, only these groups
        count.
        """
        with self._condition:
            enough = math.inf if n_groups is None else n_groups
            self._condition.wait_for(
                lambda: self._all_ended() or self.num_ready(numbers) >= enough, wait_s
            )
            self._raise_failure()
            groups = dict.fromkeys(_with_numbers(self._ready_groups, numbers)[:n_groups])
            self._ready_groups = [group for group in self._ready_groups if group not in groups]
            self._groups = [group for group in self._groups if group not in groups]
            return [_finished_group(group) for group in groups]

    def num_ready(self, numbers: Collection[int] | None = None) -> int:
        """Returns the number of groups (of `numbers`) that `pop_finished` would return without waiting."""
        with self._condition:
            is_failed = self._failure is not None
            return 0 if is_failed else len(_with_numbers(self._ready_groups, numbers))

    def pending_numbers(self) -> list[int]:
        """Returns the numbers of the groups that were not yet returned, in submission order."""
        with self._condition:
            return [group.request.number for group in self._groups]

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

        self._decoding_start_s = time.monotonic()
        try:
            if is_driven(self._engine):
                self._engine.drive(should_stop)
                if not is_over():  # the engine stopped and every request got an error
                    self._end_loops()
            else:
                with self._condition:
                    self._condition.wait_for(is_over)
        except BaseException:  # for example Ctrl-C: the loops must release their tools
            self.abort()
            self._wait_for_loops()
            self._failure = None
            raise
        finally:
            self._decoded_s, self._decoding_start_s = self._decoding_s(), math.inf
        with self._condition:
            all_ended = self._all_ended()
        if all_ended:
            self._wait_for_loops()  # also ends tasks that the loops left running
        with self._condition:
            self._raise_failure()

    def start(self) -> None:
        """Starts a thread that decodes, so that `submit` and `pop_finished` need no `run_until`."""
        engine = self._engine
        self._decoding_start_s = time.monotonic()
        if self._decode_thread is not None or not is_driven(engine):
            return

        def should_stop() -> bool:
            self._wait_for_requests()
            return self._is_closed

        self._decode_thread = threading.Thread(
            target=engine.drive, args=(should_stop,), name="hone-decode", daemon=True
        )
        self._decode_thread.start()

    def abort(self, numbers: Collection[int] | None = None) -> None:
        """Cancels the loops of these groups (None: all); `pop_finished` never returns them."""
        with self._condition:
            aborted_groups = _with_numbers(self._groups, numbers)
            for group in aborted_groups:
                group.is_aborted = True
            self._groups = [group for group in self._groups if not group.is_aborted]
            self._ready_groups = [group for group in self._ready_groups if not group.is_aborted]
            if self._loop_thread is not None:
                self._loop_thread.call_soon(_cancel, aborted_groups)
        self.notify()

    def close(self) -> None:
        """Aborts all groups and ends the threads; does not close the engine."""
        with self._condition:
            self._is_closed = True
        self.abort()
        self._wait_for_loops()
        if self._decode_thread is not None:
            self._decode_thread.join(timeout=LOOPS_GRACE_S)

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

    def _decoding_s(self) -> float:
        """Returns the seconds that this runner has decoded, which the deadlines count."""
        return self._decoded_s + max(0.0, time.monotonic() - self._decoding_start_s)

    # -- threads -------------------------------------------------------------------------------

    def _wait_for_requests(self) -> None:
        """Waits until the loops have submitted their next requests after the engine's answers."""
        with self._condition:
            loop_thread, self._is_waiting_for_requests = self._loop_thread, True
        if loop_thread is not None:
            loop_thread.wait_for_requests()
        with self._condition:
            self._is_waiting_for_requests = False  # from here on, changes notify the engine

    def notify(self) -> None:
        """Makes `run_until` and `pop_finished` check again whether they are done."""
        with self._condition:
            self._condition.notify_all()
            is_waiting = self._is_waiting_for_requests
        if not is_waiting and is_driven(self._engine):
            self._engine.notify()

    def _end_loops(self) -> None:
        """Waits for the loops after decoding has stopped, and cancels loops that do not end."""
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

    def _start_submission(self, groups: list[RunningGroup]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_submission(groups))
        self._submission_tasks.add(task)
        task.add_done_callback(self._submission_tasks.discard)

    async def _run_submission(self, groups: list[RunningGroup]) -> None:
        """Runs the loops of one submission; its first failure cancels all submissions."""
        try:
            await self._run_loops(groups)
        except Exception as error:
            with self._condition:
                self._failure = self._failure or error
                _cancel(self._groups)
        finally:
            with self._condition:
                self._active_submissions -= 1
                if self._active_submissions == 0:
                    self._all_submissions_ended.set()
            self.notify()

    async def _run_loops(self, groups: list[RunningGroup]) -> None:
        """Runs the loops; raises the first failure, or AgentLoopFailed when a trajectory is late."""
        self._creation_error: Exception | None = None  # of the first loop that cannot be created
        tasks: dict[asyncio.Task[None], str] = {}  # task -> uid
        for group in groups:
            if group.is_aborted:
                continue
            for index, row in enumerate(group.request.rows):
                task = asyncio.create_task(self._run_trajectory(group, index))
                group.tasks.append(task)
                tasks[task] = row["uid"]
        done: set[asyncio.Task[None]] = set()
        start_s, late = self._decoding_s(), {*tasks}
        try:
            while late and not any(task.exception() for task in done if not task.cancelled()):
                limit_s = self._deadlines.limit_s(_PHASE)
                left_s = start_s + limit_s - self._decoding_s()
                if left_s <= 0:
                    break
                done, late = await asyncio.wait(
                    late, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION
                )
        finally:
            _cancel(groups)
            # A cancelled task ends within its grace period.
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:  # `done` has no order
            if task in done and not task.cancelled():
                task.result()
        late_uids = [uid for task, uid in tasks.items() if task in late]
        if late_uids:
            raise AgentLoopFailed(
                f"{len(late_uids)} of {len(tasks)} agent loops had not ended after {limit_s:g} s of "
                f"decoding, the first on row uid={late_uids[0]}; set a deadline on its awaits "
                f"(asyncio.wait_for), or {self._deadlines.advice(_PHASE)}"
            )

    async def _run_trajectory(self, group: RunningGroup, index: int) -> None:
        request, start_s = group.request, self._decoding_s()
        group.outputs[index] = await self._make_trajectory(request, index)
        self._deadlines.record(_PHASE, self._decoding_s() - start_s)
        with self._condition:
            is_complete = len(group.outputs) == len(request.rows) and not group.is_aborted
            if is_complete:
                self._ready_groups.append(group)
        if is_complete:
            self.notify()

    async def _make_trajectory(self, request: GroupRequest, index: int) -> list[AgentLoopOutput]:
        """Runs the loop of a row and returns the outputs of its trajectory, usually one."""
        row, sampling = request.rows[index], request.samplings[index]
        name, factory = self._factory_of(row.get("agent_name"))
        max_tokens = self._rollout.response_length
        manager = ServerManager(
            self._engine,
            seed=trajectory_seed(self._run_seed, row["uid"], row["sample_index"]),
            max_tokens=max_tokens,
            max_model_len=self._rollout.max_model_len,
            priority=request.priority,
        )

        async def run_loop() -> list[AgentLoopOutput]:
            if self._creation_error is not None:  # creating a loop may block for a minute
                raise self._creation_error
            try:
                loop: Any = factory(server_manager=manager, **self._loop_arguments)
            except Exception as error:
                self._creation_error = error
                raise
            getattr(loop, "_hone", loop).request_id = row["trajectory_id"]
            result: Any = await loop.run(dict(sampling), **row)
            outputs = list(result) if isinstance(result, list | tuple) and result else [result]
            for output in outputs:
                check_output(output, name, row=row, vocab_size=self._vocab_size)
            return outputs

        try:
            # A cancelled loop has the time limit of one tool call to release its tools.
            grace_s = self._rollout.multi_turn.tool_timeout_s
            outputs = await run_with_deadline(run_loop(), None, grace_s=grace_s)
        except Exception as error:
            raise AgentLoopFailed(
                f"agent loop {name!r} failed on row uid={row['uid']} sample {row['sample_index']}: "
                f"{type(error).__name__}: {error}"
            ) from error
        is_scored = any(output.reward_score is not None for output in outputs)
        for output in outputs:
            if is_scored and output.reward_score is None:
                output.reward_score = 0.0  # a trajectory's score is the sum over its rows
            # Columns that the loop copied from its row are already in the batch.
            output.extra_fields = {
                name: value for name, value in output.extra_fields.items() if name not in row
            }
            if len(output.response_ids) > max_tokens:
                output.truncate(max_tokens)
        return outputs

    def _factory_of(self, agent_name: object) -> tuple[str, LoopFactory]:
        """Returns (name, factory) of the loop for a row's `agent_name`; raises on an unknown name."""
        if not isinstance(agent_name, str | None) or agent_name not in self._factories:
            name = self._loop_names.name_of_row(agent_name)
            self._factories[agent_name] = name, self._loop_names.factory(name)
        return self._factories[agent_name]


def _with_numbers(
    groups: Sequence[RunningGroup], numbers: Collection[int] | None
) -> list[RunningGroup]:
    return [group for group in groups if numbers is None or group.request.number in numbers]


def _finished_group(group: RunningGroup) -> FinishedGroup:
    """Returns the group's outputs, in row order."""
    pairs = [(row, output) for row in sorted(group.outputs) for output in group.outputs[row]]
    row_indices, outputs = zip(*pairs, strict=True)
    return FinishedGroup(group.request.number, row_indices, outputs)


def _cancel(groups: Sequence[RunningGroup]) -> None:
    for task in [task for group in groups for task in group.tasks]:
        task.cancel()
