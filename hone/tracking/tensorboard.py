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
        folder = os.environ.get("TENSORBOARD_DIR") or (run.folder and run.folder / "tensorboard")
        if not folder:
            raise TrackerError("tracker 'tensorboard' needs a run folder or $TENSORBOARD_DIR")
        import_optional("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after its checkpoint, and a fresh run in the folder of an earlier
        # one repeats all; `purge_step` hides the old values. $TENSORBOARD_DIR may have other runs.
        purge_step = None if run.resumed_from is None else run.resumed_from + 1
        if purge_step is None and "TENSORBOARD_DIR" not in os.environ:
            purge_step = 0
        if not run.will_train:
            purge_step = None
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._command = f"tensorboard --logdir {shlex.quote(str(folder))}"
        screen().line(f"watch the run: {self._command}")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        for index, row in enumerate(rows):
            # Text is written as a Markdown code block, so that TensorBoard does not parse it as markup.
            blocks = {
                k: indent(str(v), "    ", lambda line: True) or "    " for k, v in row.items()
            }
            text = "\n\n".join(f"**{key}**\n\n{block}" for key, block in blocks.items())
            self.writer.add_text(f"{name}/{index}", text, step)

    def finish(self) -> None:
        self.writer.close()
        screen().line(f"see the curves: {self._command}")
