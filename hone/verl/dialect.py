"""The dialect that hone's programs give to `compose`: commands of verl and of the trees made from it."""

from __future__ import annotations

from collections.abc import Sequence

from hone.config.dialect import Dialect, Reading
from hone.config.sources import Setting
from hone.verl.trees import read_tree


class VerlDialect(Dialect):
    """The commands of verl, TinyZero, Search-R1 and PURE."""

    def read(
        self, settings: Sequence[Setting], tree: str, *, has_starting_values: bool = False
    ) -> Reading:
        return read_tree(settings, tree, has_starting_values=has_starting_values)


VERL = VerlDialect()
