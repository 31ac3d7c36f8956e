"""Submits, lists, follows and stops the jobs of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

try:
    from ray.exceptions import RayError
    from ray.job_submission import JobDetails, JobSubmissionClient
except ImportError as error:
    raise ImportError(
        "hone launch and hone jobs need Ray, which is not installed: pip install 'hone-rl[ray]'"
    ) from error

logger = logging.getLogger(__name__)
# At INFO the client logs every closed connection.
logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)

Answer = TypeVar("Answer")
CLIENT_ERRORS = (OSError, RuntimeError, RayError)
"""The exceptions of the client if the job server does not answer or refuses a request."""

POLL_INTERVAL_S = 0.5
RETRY_EVERY_S = 5.0
RETRY_S = 120.0
"""Requests to a job server that does not answer are repeated for this long."""
STOP_RETRY_S = 20.0
"""The same after a request to stop: the cluster may have ended."""
AGENT_DEADLINE_S = 180.0
STOPPED = 130


class Jobs:
    """A client of the job server of one cluster; RAY_AUTH_TOKEN_PATH names the token file."""

    def __init__(self, address: str) -> None:
        self._client = JobSubmissionClient(address)
        self.retry_s = RETRY_S

    def submit(self, entrypoint: str) -> str:
        """Starts a shell command on the head node exactly once; returns the job's name."""
        job, end_time = f"hone-{secrets.token_hex(8)}", time.monotonic() + AGENT_DEADLINE_S
        while True:
            try:
                return self._client.submit_job(entrypoint=entrypoint, submission_id=job)
            except CLIENT_ERRORS as error:
                if f"{job} already exists" in str(error):
                    return job  # the answer to an earlier request was lost
                # A new cluster has no job agent in its first seconds, and a busy one answers late.
                if "status code 4" in str(error) or time.monotonic() > end_time:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def details(self) -> list[JobDetails]:
        """Returns all jobs, oldest first."""
        return sorted(self._retry(self._client.list_jobs), key=lambda job: job.start_time or 0)

    def follow(self, job: str, write: Callable[[str], None]) -> int:
        """Writes the job's log until it ends; returns its exit status."""
        written, failed = 0, False
        while True:
            written, error = asyncio.run(self._tail(job, write, written))
            info = self._info(job)
            if info.status.is_terminal():
                break
            if error and not failed:
                logger.warning("the log stream of %s failed (%s); opening it again", job, error)
            failed = error is not None
            time.sleep(RETRY_EVERY_S if failed else POLL_INTERVAL_S)
        # Ray may close a log stream without an error before the end of the log.
        try:
            if rest := self._retry(lambda: self._client.get_job_logs(job))[written:]:
                write(rest)
        except Exception as error:
            logger.warning("the end of the log of %s cannot be read (%s)", job, error)
        code = info.driver_exit_code
        if info.status.value == "SUCCEEDED":
            return 0
        if info.message and info.status.value == "FAILED" and code is None:
            write(info.message + "\n")
        # The code of a driver is negative after a signal and may be missing after a stop.
        return code if code and code > 0 else STOPPED if info.status.value == "STOPPED" else 1

    async def _tail(
        self, job: str, write: Callable[[str], None], written: int
    ) -> tuple[int, Exception | None]:
        """Writes the log from character `written` on; returns the new count and the error."""
        position = 0
        stream = self._client.tail_job_logs(job)
        while True:
            try:
                lines = await anext(stream)
            except StopAsyncIteration:
                return max(written, position), None
            except Exception as error:  # Ray and aiohttp raise many kinds
                return max(written, position), error
            if new := lines[max(written - position, 0) :]:
                write(new)
            position += len(lines)

    def wait(self, job: str) -> None:
        """Waits until the job has ended."""
        while not self._info(job).status.is_terminal():
            time.sleep(POLL_INTERVAL_S)

    def _info(self, job: str) -> JobDetails:
        return self._retry(lambda: self._client.get_job_info(job))

    def stop(self, job: str) -> bool:
        """Sends SIGTERM to a job, which may save a checkpoint; returns whether it ran."""
        return bool(self._retry(lambda: self._client.stop_job(job)))

    def _retry(self, request: Callable[[], Answer]) -> Answer:
        """Repeats a request until it succeeds; raises its error after `retry_s`."""
        start = time.monotonic()
        while True:
            try:
                return request()
            except Exception:  # Ray and requests raise many kinds
                if time.monotonic() - start > self.retry_s:
                    raise
            time.sleep(POLL_INTERVAL_S)


def run_job(
    address: str, entrypoint: str, write: Callable[[str], None], wait_for_stop: Callable[[], object]
) -> int:
    """Runs a command as a job until it ends or `wait_for_stop` returns; returns its exit status."""
    jobs = Jobs(address)
    job = jobs.submit(entrypoint)
    write(f"job {job} runs\n")

    def stop() -> None:
        wait_for_stop()
        jobs.retry_s = STOP_RETRY_S
        try:
            jobs.stop(job)  # without effect on a job that has ended
        except Exception as error:
            logger.error("%s cannot be stopped (%s)", job, error)

    threading.Thread(target=stop, name="stop-job", daemon=True).start()
    try:
        return jobs.follow(job, write)
    except Exception as error:
        logger.error("%s cannot be followed (%s); it is stopped", job, error)
        jobs.retry_s = STOP_RETRY_S
        with contextlib.suppress(Exception):  # the server may still be unreachable
            jobs.stop(job)
            jobs.wait(job)  # the nodes stop after this process; the job may save before
        return 1
