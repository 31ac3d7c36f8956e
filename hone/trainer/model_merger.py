"""`python -m hone.model_merger merge --local_dir RUN --target_dir OUT`: verl's name of `hone export`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hone.trainer.command_line import finish


def main(arguments: Sequence[str] | None = None) -> None:
    from hone.config.errors import ConfigError
    from hone.tracking.console import screen
    from hone.trainer.export import export, local_target

    options = _parser().parse_args(arguments)
    if options.operation == "test":
        raise ConfigError(
            "model_merger test is not built: merge, then compare the two folders with from_pretrained"
        )
    if options.hf_upload_path:
        raise ConfigError(
            f"--hf_upload_path {options.hf_upload_path}: model_merger only writes the folder; "
            f"`hone export {options.local_dir} {options.target_dir} --push {options.hf_upload_path}` "
            "uploads it too"
        )
    with local_target(options.target_dir) as target:
        export(options.local_dir, target, trust_remote_code=options.trust_remote_code)
    screen().line(f"wrote {options.target_dir}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hone.model_merger", description=__doc__)
    parser.add_argument("operation", nargs="?", default="merge", choices=("merge", "test"))
    parser.add_argument("--local_dir", required=True, help="run, global_step_N or actor folder")
    parser.add_argument("--target_dir", default="tmp", help="new folder to write to")
    parser.add_argument("--backend", help="not needed: a checkpoint says how it was written")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--hf_upload_path", help=argparse.SUPPRESS)
    for name in ("--hf_model_path", "--test_hf_dir", "--model_path"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("tie-word-embedding", "is-value-model", "use_cpu_initialization", "private"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(finish(lambda: main()))
