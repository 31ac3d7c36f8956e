"""The server of `hone report --follow`, over HTTP."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path

import pytest

from hone.services.json_server import JsonServer
from hone.tracking import RunFolder
from hone.tracking.live_page import LiveReport, report_server

MakeRun = Callable[..., RunFolder]


@contextmanager
def serving(*runs: RunFolder) -> Iterator[JsonServer]:
    server = report_server([run.path for run in runs])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server: JsonServer, path: str = "/", **headers: str) -> tuple[int, str | None, str]:
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.getheader("Content-Type"), response.read().decode()
    finally:
        connection.close()


def test_the_page_follows_a_run(make_run: MakeRun) -> None:
    run = make_run("sums")
    with serving(run) as server:
        status, content_type, page = get(server)
        assert (status, content_type) == (200, "text/html; charset=utf-8")
        assert "0 to 20" not in page
        assert "1 to 20" in page
        run.metrics.append({"reward/mean": 0.5}, 21)
        assert "1 to 21" in get(server)[2]


def test_the_page_may_ask_its_own_server_and_no_other(make_run: MakeRun) -> None:
    page = unescape(LiveReport([make_run().path]).page())
    assert "connect-src 'self'" in page
    assert "default-src 'none'" in page
    assert 'id="live"' in page


def test_the_page_is_made_again_only_after_a_change(make_run: MakeRun) -> None:
    run = make_run()
    report = LiveReport([run.path])
    page = report.page()
    assert report.page() is page
    run.validation_file(20).rename(run.validation_file(30))
    assert report.page() is not page


def test_only_programs_of_this_machine_reach_the_server(make_run: MakeRun) -> None:
    with serving(make_run()) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert get(server, Host="attacker.example")[0] == 403
        assert get(server, Origin="http://attacker.example")[0] == 403
        assert get(server, "/config.yaml")[0] == 404


def test_a_folder_without_a_run_is_an_error_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name a run folder"):
        report_server([tmp_path])
