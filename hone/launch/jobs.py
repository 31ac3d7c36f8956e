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

from hone.launch import STOPPED_EXIT_STATUS

logger = logging.getLogger(__name__)
# At INFO the client logs every closed connection.
logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)

Answer = TypeVar("Answer")
CLIENT_ERRORS = (OSError, RuntimeError, RayError)
"""The exceptions that the client raises if the job server does not answer or rejects a request."""

POLL_INTERVAL_S = 0.5
STREAM_RETRY_INTERVAL_S = 5.0
RETRY_DEADLINE_S = 120.0
"""Requests to a job server that does not answer are repeated for this long."""
SHORT_RETRY_DEADLINE_S = 20.0
"""The deadline when the cluster may have ended: for `hone jobs`, and after a request to stop."""
AGENT_DEADLINE_S = 180.0
"""A new cluster's job agent accepts a job within this time."""


class JobClient:
    """A client of the job server of one cluster; RAY_AUTH_TOKEN_PATH names the token file."""

    def __init__(self, address: str) -> None:
        self._client = JobSubmissionClient(address)
        self.retry_deadline_s = RETRY_DEADLINE_S

    def submit(self, entrypoint: str) -> str:
        """Starts a shell command on the head node exactly once; returns the job's name."""
        job, end_time = f"hone-{secrets.token_hex(8)}", time.monotonic() + AGENT_DEADLINE_S
        while True:
            try:
                return self._client.submit_job(entrypoint=entrypoint, submission_id=job)
            except CLIENT_ERRORS as error:
                if f"{job} already exists" in str(error):
                    return job  # the answer to an earlier request was lost
                # A new cluster has no job agent in its first seconds, and a busy agent answers late. An HTTP
                # status 4xx is final.
                if "status code 4" in str(error) or time.monotonic() > end_time:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def list_jobs(self) -> list[JobDetails]:
        """Returns all jobs, oldest first."""
        return sorted(self._retry(self._client.list_jobs), key=lambda job: job.start_time or 0)

    def follow(self, job: str, write: Callable[[str], None]) -> int:
        """Writes the job's log until the job ends; returns the exit status of the job."""
        written_characters, stream_failed = 0, False
        while True:
            written_characters, error = asyncio.run(self._tail(job, write, written_characters))
            info = self._info(job)
            if info.status.is_terminal():
                break
            if error and not stream_failed:
                logger.warning("the log stream of %s failed (%s); opening it again", job, error)
            stream_failed = error is not None
            time.sleep(STREAM_RETRY_INTERVAL_S if stream_failed else POLL_INTERVAL_S)
        # Ray may close a log stream without an error before the end of the log.
        try:
            log = self._retry(lambda: self._client.get_job_logs(job))
            if unwritten := log[written_characters:]:
                write(unwritten)
        except Exception as error:
            logger.warning("the end of the log of %s cannot be read (%s)", job, error)
        exit_code = info.driver_exit_code
        if info.status.value == "SUCCEEDED":
            return 0
        if info.message and info.status.value == "FAILED" and exit_code is None:
            write(info.message + "\n")
        # The exit code of a driver is negative after a signal and may be missing after a stop.
        if exit_code and exit_code > 0:
            return exit_code
        return STOPPED_EXIT_STATUS if info.status.value == "STOPPED" else 1

    async def _tail(
        self, job: str, write: Callable[[str], None], written_characters: int
    ) -> tuple[int, Exception | None]:
        """Writes the log after the first `written_characters`.

        Returns the number of characters written so far, and the error that ended the stream, if any.
        """
        position = 0
        stream = self._client.tail_job_logs(job)
        while True:
            try:
                text = await anext(stream)
            except StopAsyncIteration:
                return max(written_characters, position), None
            except Exception as error:  # Ray and aiohttp raise many kinds of exceptions
                return max(written_characters, position), error
            if new_text := text[max(written_characters - position, 0) :]:
                write(new_text)
            position += len(text)

    def wait(self, job: str) -> None:
        """Waits until the job has ended."""
        while not self._info(job).status.is_terminal():
            time.sleep(POLL_INTERVAL_S)

    def _info(self, job: str) -> JobDetails:
        return self._retry(lambda: self._client.get_job_info(job))

    def stop(self, job: str) -> bool:
        """Sends SIGTERM to a job, which may then save a checkpoint; returns False if the job had ended."""
        return bool(self._retry(lambda: self._client.stop_job(job)))

    def _retry(self, request: Callable[[], Answer]) -> Answer:
        """Repeats a request until it succeeds; raises the last error after `retry_deadline_s`."""
        start = time.monotonic()
        while True:
            try:
                return request()
            except Exception:  # Ray and requests raise many kinds of exceptions
                if time.monotonic() - start > self.retry_deadline_s:
                    raise
            time.sleep(POLL_INTERVAL_S)


def run_job(
    address: str, entrypoint: str, write: Callable[[str], None], wait_for_stop: Callable[[], object]
) -> int:
    """Runs a command as a job until the job ends or `wait_for_stop` returns; returns the exit status."""
    client = JobClient(address)
    job = client.submit(entrypoint)
    write(f"job {job} runs\n")

    def stop() -> None:
        wait_for_stop()
        client.retry_deadline_s = SHORT_RETRY_DEADLINE_S
        try:
            client.stop(job)  # without effect on a job that has ended
        except Exception as error:
            logger.error("%s cannot be stopped (%s)", job, error)

    threading.Thread(target=stop, name="stop-job", daemon=True).start()
    try:
        return client.follow(job, write)
    except Exception as error:
        logger.error("%s cannot be followed (%s); it is stopped", job, error)
        client.retry_deadline_s = SHORT_RETRY_DEADLINE_S
        with contextlib.suppress(Exception):  # the server may still be unreachable
            client.stop(job)
            client.wait(job)  # the job may save; the nodes stop when this process ends
        return 1
