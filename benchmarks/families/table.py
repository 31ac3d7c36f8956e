"""`python -m benchmarks.families.table`: docs/models.md from the sweep's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.models.families import CPU_ONLY_FAMILIES

ROOT = Path(__file__).parents[2]
CPU = ROOT / "benchmarks" / "results" / "families_cpu.json"
GPU = ROOT / "benchmarks" / "results" / "families_h200.json"
PAGE = ROOT / "docs" / "models.md"

_HEAD = """# Models

`actor_rollout_ref.model.path` takes a Hugging Face folder or hub name of any family in the first table.
Each family's rollout and trainer log-probs were compared with plain `transformers` (eager attention, one
text at a time) on tiny random models with the layer kinds of the large ones. Any other family is refused
by name when the model is loaded, before its weights are read.

```
make families                              # the CPU sweep; writes its results and this page
python -m benchmarks.families llama gemma2 # some families only
```

A family that is not listed: add its `model_type` to `FAMILIES` in `hone/models/families.py` and run the
sweep for it; it is supported if the sweep says `equal`. A repository's own modelling code
(`trust_remote_code`) is never run for models: it has not been compared with anything.
Rotary positions that depend on the length of a text (`dynamic`, `longrope`) are refused in every family.
"""
_CPU_HEAD = """
## Supported

CPU: float32, the greatest |Δ log-prob| over all tokens; the bound is {bound}. GPU: bfloat16, the mean
|Δ log-prob|; the bound is twice the difference of eager and sdpa attention in plain `transformers`, or
being as near to float32 as plain eager is.

| family | CPU rollout | CPU trainer | GPU rollout | GPU trainer | eager to sdpa |
|---|---|---|---|---|---|
"""
_REFUSED_HEAD = """
## Refused

| reason | families |
|---|---|
"""


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"families": {}}


def write() -> None:
    """Write the document from the results that are there."""
    PAGE.write_text(page(read(CPU), read(GPU)))


def page(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The document for these results."""
    rows: list[str] = []
    refusals: dict[str, list[str]] = {}
    for family, result in sorted(cpu["families"].items()):
        on_gpu = (
            {"outcome": "refused"}
            if family in CPU_ONLY_FAMILIES
            else gpu["families"].get(family, {})
        )
        if result["outcome"] == "refused":
            refusals.setdefault(_reason(result["sentence"]), []).append(family)
            continue
        cells = [_number(result, "rollout_max"), _number(result, "trainer_max"), *_on_gpu(on_gpu)]
        rows.append(f"| {family} | {' | '.join(cells)} |")
    return "".join(
        [
            _HEAD,
            _CPU_HEAD.format(bound="1e-5"),
            "\n".join(rows) + "\n",
            _REFUSED_HEAD,
            "".join(f"| {why} | {', '.join(names)} |\n" for why, names in sorted(refusals.items())),
            _made("CPU", cpu),
            _made("GPU", gpu),
        ]
    )


def _on_gpu(result: dict[str, Any]) -> list[str]:
    if result.get("outcome") == "refused":
        return ["refused", "refused", ""]
    if result.get("outcome") not in ("equal", "unequal"):
        return ["not measured", "not measured", ""]
    return [_number(result, key) for key in ("rollout_mean", "trainer_mean", "eager_to_sdpa")]


def _number(result: dict[str, Any], key: str) -> str:
    return f"{result[key]:.1e}" if key in result else result["outcome"]


def _reason(sentence: str) -> str:
    """What stands between the sentence's colon and its advice."""
    return sentence.split(": ", 1)[-1].split(". ", 1)[0]


def _made(device: str, results: dict[str, Any]) -> str:
    if "date" not in results:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"\n{device}: {results['date']}, {results['device']}, {versions}.\n"


if __name__ == "__main__":
    write()
