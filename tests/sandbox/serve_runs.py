"""Reads one question a line, runs it in the sandbox, answers with one line: the other end of `nobody`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from hone.sandbox import Job, SandboxError, client, layers, run_many, run_python


def answer(question: dict) -> object:
    if question.get("ask") == "layers":
        return {name: state.active for name, state in layers().items()}
    if question.get("ask") == "facts":
        process = client._warden._process
        return {"pid": os.getpid(), "warden": process.pid if process else None}
    if question.get("ask") == "many":
        jobs = [Job(**job) for job in question["jobs"]]
        results = run_many(jobs, max_concurrent=question["max_concurrent"])
        return [result.status.value for result in results]
    return dataclasses.asdict(run_python(**question))


for line in sys.stdin:
    try:
        reply = {"result": answer(json.loads(line))}
    except (SandboxError, ValueError) as error:
        reply = {"raised": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
