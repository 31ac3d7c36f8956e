"""A job is followed through failures of its job server; the server here is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from hone.launch import jobs


class Client:
    """A job server: each tail breaks off after one more line, and every second request fails."""

    lines = ("one\n", "two\n", "three\n")

    def __init__(self, address: str) -> None:
        self.tails = self.requests = 0
        self.state = "RUNNING"
        self.calls: list[str] = []

    def submit_job(self, entrypoint: str, submission_id: str) -> str:
        self._fail_every_second_time()
        return "job"

    def get_job_logs(self, job: str) -> str:
        self._fail_every_second_time()
        return "".join(self.lines)

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        self.tails += 1
        for line in self.lines[: self.tails]:
            yield line
        if self.tails <= len(self.lines):
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        self.state = "SUCCEEDED"

    def get_job_info(self, job: str) -> Any:
        self._fail_every_second_time()
        ended = self.state != "RUNNING"
        status = SimpleNamespace(value=self.state, is_terminal=lambda: ended)
        return SimpleNamespace(status=status, driver_exit_code=None, message="")

    def stop_job(self, job: str) -> bool:
        self._fail_every_second_time()
        self.calls.append("stop")
        self.state = "STOPPED"
        return True

    def _fail_every_second_time(self) -> None:
        self.requests += 1
        if self.requests % 2:
            raise RuntimeError("Request failed with status code 500: busy.")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_INTERVAL_S", "STREAM_RETRY_INTERVAL_S"):
        monkeypatch.setattr(jobs, name, 0.001)


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.usefixtures("_quick")
def test_a_log_that_breaks_off_is_followed_on_without_a_line_lost_or_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "JobSubmissionClient", Client)
    written: list[str] = []
    assert jobs.run_job("http://x", "true", written.append, wait_for_ever) == 0
    assert written == ["job job runs\n", *Client.lines]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("broken", [False, True])
def test_what_a_log_that_is_closed_too_soon_has_missed_is_written_at_the_end(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing(Client):
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield self.lines[0]
            self.state = "FAILED"
            if broken:
                raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

        def get_job_info(self, job: str) -> Any:
            info = super().get_job_info(job)
            info.driver_exit_code = 7
            return info

    monkeypatch.setattr(jobs, "JobSubmissionClient", Closing)
    written: list[str] = []
    assert jobs.run_job("http://x", "true", written.append, wait_for_ever) == 7
    assert "".join(written) == "".join(["job job runs\n", *Client.lines])


@pytest.mark.usefixtures("_quick")
def test_a_job_whose_submission_is_answered_too_late_is_started_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Client):
        def submit_job(self, entrypoint: str, submission_id: str) -> str:
            self.calls.append(submission_id)
            if len(self.calls) == 1:
                raise RuntimeError("Request failed with status code 500: TimeoutError.")
            raise RuntimeError(
                f"status code 500: Job with submission_id {submission_id} already exists."
            )

    monkeypatch.setattr(jobs, "JobSubmissionClient", Slow)
    server = jobs.JobClient("http://x")
    client: Any = server._client
    assert [server.submit("true")] * 2 == client.calls


def test_a_job_that_the_server_refuses_is_not_submitted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(Client):
        def submit_job(self, entrypoint: str, submission_id: str) -> str:
            self.calls.append(submission_id)
            raise RuntimeError("Request failed with status code 400: no.")

    monkeypatch.setattr(jobs, "JobSubmissionClient", Refusing)
    server = jobs.JobClient("http://x")
    client: Any = server._client
    with pytest.raises(RuntimeError, match="status code 400"):
        server.submit("true")
    assert len(client.calls) == 1


@pytest.mark.usefixtures("_quick")
def test_a_request_to_stop_is_sent_again_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Client):
        lines = ("saved\n",)

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            if self.state == "RUNNING":
                raise ConnectionError("refused")
            yield "saved\n"

    monkeypatch.setattr(jobs, "JobSubmissionClient", Waiting)
    written: list[str] = []
    assert (
        jobs.run_job("http://x", "true", written.append, lambda: None) == jobs.STOPPED_EXIT_STATUS
    )
    assert written[-1] == "saved\n"


def test_a_job_that_cannot_be_followed_is_stopped_and_ends_before_the_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Client):
        def get_job_info(self, job: str) -> Any:
            self.calls.append("info")
            if self.state == "RUNNING":
                raise TimeoutError("no answer")
            return super().get_job_info(job)

        def _fail_every_second_time(self) -> None:
            pass

    clients: list[Silent] = []

    def client(address: str) -> Silent:
        clients.append(Silent(address))
        return clients[-1]

    monkeypatch.setattr(jobs, "JobSubmissionClient", client)
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(jobs, "time", clock)
    assert jobs.run_job("http://x", "true", lambda text: None, wait_for_ever) == 1
    assert "no answer" in caplog.text
    calls = clients[0].calls
    assert calls.count("stop") == 1
    assert calls.index("stop") > jobs.RETRY_DEADLINE_S / jobs.POLL_INTERVAL_S
    assert calls[-1] == "info"  # the end of the job was waited for


@pytest.mark.usefixtures("_quick")
def test_a_stopped_job_whose_cluster_has_ended_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(Client):
        def submit_job(self, entrypoint: str, submission_id: str) -> str:
            return "job"

        def _fail_every_second_time(self) -> None:
            raise ConnectionError("refused")

    monkeypatch.setattr(jobs, "JobSubmissionClient", Gone)
    monkeypatch.setattr(jobs, "RETRY_DEADLINE_S", 600.0)
    monkeypatch.setattr(jobs, "SHORT_RETRY_DEADLINE_S", 0.02)
    assert jobs.run_job("http://x", "true", lambda text: None, lambda: None) == 1
