"""Runs one command as a job, on the head node: `python -m hone.launch.job`.

Standard input has one line of JSON (job server, token file, command); closing standard input
stops the job. The job's log goes to standard output, and this process ends with the exit status
of the job.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    request = json.loads(sys.stdin.readline())
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": request["token_file"]}
    from hone.launch.jobs import run_job

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def wait_for_stop() -> None:
        while sys.stdin.readline():
            pass

    return run_job(request["jobs"], request["entrypoint"], write, wait_for_stop)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread still reads standard input
