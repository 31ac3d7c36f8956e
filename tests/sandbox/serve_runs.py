"""The process of the fixture `nobody`: answers JSON requests, one per line."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from hone.sandbox import Job, SandboxError, client, layers, run_many, run_python


def answer(request: dict) -> object:
    if request.get("ask") == "layers":
        return {name: state.active for name, state in layers().items()}
    if request.get("ask") == "facts":
        process = client._warden._process
        return {"pid": os.getpid(), "warden": process.pid if process else None}
    if request.get("ask") == "many":
        jobs = [Job(**job) for job in request["jobs"]]
        results = run_many(jobs, max_concurrent=request["max_concurrent"])
        return [result.status.value for result in results]
    return dataclasses.asdict(run_python(**request))


for line in sys.stdin:
    try:
        reply = {"result": answer(json.loads(line))}
    except (SandboxError, ValueError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
