"""Preference losses by name: of pairs (a chosen and a rejected response), or of single labelled responses.

A loss is a pure function of log-probabilities of whole responses, [N] each. Its parameters declare what it
reads: the reference is computed only for a loss with a parameter `ref_…`, and the KL only for one with `kl`.
It returns the loss of each pair or response [N], and metrics [N]; `rewards/…` are the implicit rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from hone.plugins import Table, check_parameters

LossAndMetrics: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
PreferenceLoss: TypeAlias = Callable[..., LossAndMetrics]

_NAMES_BY_FILE = {
    "referenced": "sigmoid sigmoid_norm ipo hinge robust apo_zero apo_down",
    "reference_free": "simpo orpo cpo",
    "unpaired": "kto apo_zero_unpaired",
}
TABLE: Table[PreferenceLoss] = Table(
    "preference loss",
    {
        name: f"{__name__}.{file}:{name}"
        for file, names in _NAMES_BY_FILE.items()
        for name in names.split()
    },
)
PAIR_ARGUMENTS = (
    *("chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp"),
    *("chosen_length", "rejected_length", "margin", "config"),
)
UNPAIRED_ARGUMENTS = ("logp", "ref_logp", "length", "label", "kl", "config")


class LossFunction:
    """A preference loss with the arguments that it reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = TABLE.get(name)
        parameters = inspect.signature(self._function).parameters
        self.is_paired = "label" not in parameters
        arguments = PAIR_ARGUMENTS if self.is_paired else UNPAIRED_ARGUMENTS
        check_parameters("preference loss", self._function, arguments)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.arguments = tuple(name for name in arguments if takes_all or name in parameters)
        self.needs_reference = any(name.startswith("ref_") for name in self.arguments)
        self.needs_kl = "kl" in self.arguments

    def __call__(self, **values: Any) -> LossAndMetrics:
        """Calls the loss with those of the values that it reads."""
        return self._function(**{name: values[name] for name in self.arguments})
