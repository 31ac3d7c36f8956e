"""The TensorBoard tracker; writes to $TENSORBOARD_DIR or to `tensorboard/` in the run folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from textwrap import indent

from hone.tracking.console import screen
from hone.tracking.contract import Number, RunInfo, Tracker, TrackerError, import_optional
from hone.types import Row


class TensorboardTracker(Tracker):
    package = "tensorboard"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        shared_folder = os.environ.get("TENSORBOARD_DIR")
        folder = shared_folder or (run.folder and run.folder / "tensorboard")
        if not folder:
            raise TrackerError("tracker 'tensorboard' needs a run folder or $TENSORBOARD_DIR")
        import_optional("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after its checkpoint, and a fresh run in the folder of an earlier
        # run repeats all steps; `purge_step` hides their old values. A fresh run hides nothing in
        # $TENSORBOARD_DIR, because other runs may write there.
        purge_step = None
        if run.will_train and run.resumed_from is not None:
            purge_step = run.resumed_from + 1
        elif run.will_train and not shared_folder:
            purge_step = 0
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._command = f"tensorboard --logdir {shlex.quote(str(folder))}"
        screen().line(f"watch the run: {self._command}")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        for index, row in enumerate(rows):
            parts = [f"**{key}**\n\n{_code_block(str(value))}" for key, value in row.items()]
            self.writer.add_text(f"{name}/{index}", "\n\n".join(parts), step)

    def finish(self) -> None:
        self.writer.close()
        screen().line(f"see the curves: {self._command}")


def _code_block(text: str) -> str:
    """Returns the text as a Markdown code block, so that TensorBoard does not parse it as markup."""
    return indent(text, "    ", lambda line: True) or "    "
