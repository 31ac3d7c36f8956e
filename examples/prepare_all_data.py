"""Prepare every data set whose files lie in a folder, check each file written, print one table.

Usage: python prepare_all_data.py --local_dir DIR [--source_dir DIR]
Exit 1 when a preparer or a check fails; a set whose files are not there is named and passed over.
"""

import argparse
import sys
from pathlib import Path

from hone.data.check import check_file
from hone.data.prepare import DATASETS, prepare
from hone.data.rows import DataError
from hone.rewards.scores.table import find_entry


def ways(name: str, source: str | None) -> list[tuple[str, str | None]]:
    """(folder, source folder) of each way to prepare a set: generated, from upstream's files."""
    generated = [(name, None)] if DATASETS[name].generator else []
    if not DATASETS[name].source_builder:
        return generated
    return [*generated, (f"{name}_upstream" if generated else name, source)]


def verdict(file: str) -> tuple[int, str]:
    """What `hone data check` says of a file: its complaints, or its last line."""
    status, report = check_file(file, is_known_source=lambda source: find_entry(source) is not None)
    said = [line for line in report.splitlines() if line.startswith(("error:", "warning:"))]
    return status, "; ".join(said) or report.splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare and check every data set at hand.")
    parser.add_argument("--local_dir", required=True, help="folder to write to, one folder a set")
    parser.add_argument("--source_dir", help="folder of upstream's files, one folder a set")
    options = parser.parse_args()
    failed = 0
    for name in DATASETS:
        for label, source in ways(name, options.source_dir):
            folder = Path(options.local_dir, label)
            try:
                files = prepare(name, local_dir=folder, source_dir=source).rows
            except DataError as error:
                absent = " has none of " in str(error)
                failed += not absent
                print(f"| {label} | {'no files there' if absent else f'error: {error}'} | |")
                continue
            for file, rows in files.items():
                status, words = verdict(file)
                failed += status
                split = Path(file).relative_to(folder).with_suffix("")
                print(f"| {label} | {split}: {rows:,} | {words} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
