"""`python -m sglang.launch_server` for tests: a contract server over the model of the command line."""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from contextlib import nullcontext

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="*", choices=MODULES)
    return parser


def main() -> None:
    arguments, _ = parser().parse_known_args()
    if arguments.fails:
        raise SystemExit("no kernel image for this device")
    import torch

    from hone.models.load import load_causal_lm
    from hone.models.policy import PolicyModel
    from tests.rollout.contract_server import ContractServer
    from tests.rollout.factories import slow_motion

    subprocess.Popen(["sleep", "600"])  # in place of SGLang's scheduler processes
    lm = load_causal_lm(arguments.model_path, dtype=torch.float32).eval()
    halt_file = os.environ.get("FAKE_SGLANG_HALT", "")  # while it exists, no request ends
    with slow_motion() if os.path.exists(halt_file) else nullcontext():
        ContractServer(PolicyModel(lm), port=arguments.port, eos=lm.config.eos_token_id)
        while os.path.exists(halt_file):
            time.sleep(0.01)
    threading.Event().wait()


if __name__ == "__main__":
    main()
