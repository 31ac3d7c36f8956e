"""Jobs of a Ray cluster: submit one and follow it, list them, print their log, stop one."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

try:
    from ray.job_submission import JobDetails, JobSubmissionClient
except ImportError as error:
    raise ImportError(
        "hone launch and hone jobs need Ray, which is not installed: pip install 'hone-rl[ray]'"
    ) from error

logging.getLogger("ray").setLevel(logging.WARNING)  # else it reports every closed connection

LOOK_EVERY_S = 0.5
AGENT_DEADLINE_S = 180.0
STOPPED = 130


class Jobs:
    """The job server of one cluster; the token is taken from RAY_AUTH_TOKEN_PATH."""

    def __init__(self, address: str) -> None:
        self._client = JobSubmissionClient(address)

    def submit(self, entrypoint: str) -> str:
        """Starts a shell command on the head node; returns the job's name."""
        end_time = time.monotonic() + AGENT_DEADLINE_S
        while True:
            try:
                return self._client.submit_job(entrypoint=entrypoint)
            except RuntimeError as error:
                # A new cluster has no agent for jobs in its first seconds.
                if "No available agent" not in str(error) or time.monotonic() > end_time:
                    raise
            time.sleep(1)

    def details(self) -> list[JobDetails]:
        """Returns all jobs, oldest first."""
        return sorted(self._client.list_jobs(), key=lambda job: job.start_time or 0)

    def follow(self, job: str, write: Callable[[str], None]) -> int:
        """Writes the job's log until it ends; returns its exit status."""
        asyncio.run(self._tail(job, write))
        while not self._client.get_job_status(job).is_terminal():
            time.sleep(LOOK_EVERY_S)
        info = self._client.get_job_info(job)
        code = info.driver_exit_code
        if info.status.value == "SUCCEEDED":
            return 0
        if info.message and info.status.value == "FAILED" and code is None:
            write(info.message + "\n")
        # A driver that a signal ended has a negative code, a stopped one may have none.
        return code if code and code > 0 else STOPPED if info.status.value == "STOPPED" else 1

    async def _tail(self, job: str, write: Callable[[str], None]) -> None:
        async for lines in self._client.tail_job_logs(job):
            write(lines)

    def log(self, job: str) -> str:
        """Returns what the job has written."""
        return str(self._client.get_job_logs(job))

    def stop(self, job: str) -> bool:
        """Sends SIGTERM to a job; returns whether it was running. It may save a checkpoint first."""
        return bool(self._client.stop_job(job))


def run_job(
    address: str, entrypoint: str, write: Callable[[str], None], wait_for_stop: Callable[[], object]
) -> int:
    """Submits a command and follows it; the return of `wait_for_stop` stops it. Returns its exit status."""
    jobs = Jobs(address)
    job = jobs.submit(entrypoint)
    write(f"job {job} runs\n")

    def stop() -> None:
        wait_for_stop()
        jobs.stop(job)  # without effect on a job that has ended

    threading.Thread(target=stop, name="stop-job", daemon=True).start()
    return jobs.follow(job, write)
