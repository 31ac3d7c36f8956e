"""docs/scaling.md holds what benchmarks/scaling.py computes, and the model follows its parts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import scaling

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"


@pytest.mark.parametrize(("name", "fixed"), [("fixed_rows", True), ("rows_per_gpu", False)])
def test_the_tables_of_the_page_and_the_results_are_what_the_script_computes(
    name: str, fixed: bool
) -> None:
    steps = scaling.steps_of(fixed)
    printed = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE.read_text(), flags=re.S)
    assert printed is not None
    assert printed[1] == scaling.table(steps)
    kept = json.loads(scaling.TABLE.read_text())[name]
    assert [line["step"] for line in kept] == [round(step.total, 4) for step in steps]


def test_parts_of_the_gpus_shrink_and_those_of_the_driver_grow_with_rows() -> None:
    fixed, growing = scaling.steps_of(True), scaling.steps_of(False)
    assert [step.gpus for step in fixed] == [8, 16, 32, 64, 128, 256, 512]
    first, last = asdict(fixed[0]), asdict(fixed[-1])
    assert last["generation"] == pytest.approx(first["generation"] / 64)
    assert last["update"] == pytest.approx(first["update"] / 64)
    assert last["driver"] == first["driver"]
    assert growing[-1].driver == pytest.approx(64 * growing[0].driver)
    assert growing[-1].update == pytest.approx(growing[0].update)
