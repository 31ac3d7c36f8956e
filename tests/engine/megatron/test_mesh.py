"""Layouts that are refused; tests/engine/megatron/test_engine.py runs the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from hone.engine.megatron.mesh import join_mesh
from tests.engine.megatron.ranks import Case, spec


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("llama", 2), "tensor_model_parallel_size=2 times pipeline_model_parallel_size=1"),
        (Case("llama", 1, 2), "pipeline_model_parallel_size=2 does not divide 1 ranks"),
        (Case("moe", expert=2), "expert_model_parallel_size=2 times expert_tensor_parallel_size=1"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(
    case: Case, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        join_mesh(spec(case, tmp_path))


TWO_LAYOUTS = """
import sys
from pathlib import Path
import tests.engine.megatron_on_cpu
from hone.engine.megatron.mesh import join_mesh, process_groups
from tests.engine.megatron.ranks import Case, spec
folder = Path(sys.argv[1])
mesh = join_mesh(spec(Case("llama"), folder))
assert (mesh.data_parallel_size, mesh.tensor_size, mesh.pipeline_size) == (1, 1, 1)
join_mesh(spec(Case("qwen2"), folder))
try:
    join_mesh(spec(Case("llama", 2), folder, world=2))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_models_of_a_process_have_one_layout(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_LAYOUTS, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    assert "tensor parallel (1, 1, 1, 1) and (2, 1, 1, 2)" in process.stdout
