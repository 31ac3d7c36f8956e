"""Several raylets on this machine, in a process of their own, for tests and for `make storm-nodes`.

Each line in is a JSON list: ["add", cpus] or ["kill", node id]; out comes a JSON answer. The end of the
input ends the cluster. A node has its own raylet and object store; address and disk are the machine's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from hone.launch.ray_environment import SLOW_START_ENV

OBJECT_STORE_BYTES = 100 * 2**20


class Raylets:
    """The caller's side: `address` to join, `nodes` that live (id to raylet's pid), `kill` and `add`."""

    def __init__(self, cpus: Sequence[int], environment: Mapping[str, str] | None = None) -> None:
        # A folder of their own: other runs of this machine must not join by /tmp/ray/ray_current_cluster.
        self._folder = tempfile.mkdtemp(prefix="hr-", dir="/tmp")
        self.environment = {"RAY_AUTH_MODE": "disabled", **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **SLOW_START_ENV,
                "RAY_TMPDIR": self._folder,
                **self.environment,
            },
        )
        self.nodes: dict[str, int] = {}
        self.head, self.address = "", ""
        for number, count in enumerate(cpus):
            node = self.add(count)
            if number == 0:
                self.head, self.address = node["node_id"], node["address"]

    def add(self, cpus: int) -> dict[str, Any]:
        node = self._ask("add", cpus)
        self.nodes[node["node_id"]] = node["raylet"]
        return node

    def kill(self, node_id: str) -> None:
        """Kills the node's raylet, as a machine that fails."""
        self._ask("kill", node_id)
        del self.nodes[node_id]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Raylets:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the cluster's process died; its last words are on stderr"
        return json.loads(answer)


def main() -> None:
    from ray.cluster_utils import Cluster

    from hone.launch.ray_private import fixed_agent_ports

    said = os.dup(1)
    os.dup2(2, 1)  # whatever Ray prints is no answer
    cluster, nodes = Cluster(), dict[str, Any]()
    for line in sys.stdin:
        verb, value = json.loads(line)
        answer: Any = None
        if verb == "add":
            options = {"num_cpus": value, "object_store_memory": OBJECT_STORE_BYTES}
            with fixed_agent_ports():
                node = cluster.add_node(include_dashboard=False, no_monitor=True, **options)
            nodes[node.node_id] = node
            raylet = node.all_processes["raylet"][0].process.pid
            answer = {"node_id": node.node_id, "raylet": raylet, "address": cluster.address}
        else:
            cluster.remove_node(nodes.pop(value), allow_graceful=False)
        os.write(said, f"{json.dumps(answer)}\n".encode())
    cluster.shutdown()


if __name__ == "__main__":
    main()
