"""`hone.train`, `hone.sft`, `hone.dpo` and `hone.evaluate` run the command-line programs on Python objects.

Rows that are Python objects are written to the run folder, so that the run can be repeated from its config.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TypeAlias, Union

from hone.api.llm import LLM
from hone.api.reward import Reward, as_score_function, reads_prompt, reward_parts
from hone.api.rows import (
    ANSWER_COLUMNS,
    MESSAGES_COLUMN,
    PROMPT_COLUMNS,
    Data,
    as_rows,
    extra_info_of,
    file_names,
    find_column,
    to_prompt_row,
    to_sft_rows,
    write_rows,
)
from hone.api.settings import CallSettings, PathOrName, Value, Values, given, matching_keys
from hone.config import ComposedConfig, ConfigError, config_to_dict
from hone.config.preference import PreferenceDataConfig
from hone.config.sft import SFTDataConfig
from hone.config.sources import Setting
from hone.data.files import is_non_local
from hone.data.reading import read_rows
from hone.data.rows import BadRowPolicy, DataError
from hone.tracking import RunFolder, read_metrics
from hone.tracking.curve import draw_curve
from hone.tracking.metrics_file import find_metrics_file
from hone.tracking.report import MetricResult, format_number, headline, write_report
from hone.tracking.report_data import RunData, load_metrics
from hone.trainer import main_dpo, main_eval, main_ppo, main_sft
from hone.trainer.command_line import check_output_folder, check_plan
from hone.trainer.config_notes import STARTING_VALUES_ORIGIN, print_config_notes
from hone.trainer.evaluation import Evaluation
from hone.trainer.export import export
from hone.trainer.interrupt import Interrupted
from hone.trainer.ranks import launch, must_launch
from hone.trainer.starting_values import starting_values
from hone.types import Function, JsonObject, Row

Model: TypeAlias = Union[PathOrName, "Trained", LLM]
"""A folder, a hub name, a checkpoint, an `LLM`, or the result of `train`, `sft` or `dpo`."""


def evaluate(
    model: Model,
    data: Data | None = None,
    reward: Reward | None = None,
    n: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    **settings: Value,
) -> Evaluation:
    """Generates `n` responses to each row and scores them, as `hone eval` does.

    With `n=1`, the default temperature is 0 (greedy). `settings` are keys of the `generation` config
    (`top_p`, …) and of the `evaluation` config (`pass_at`, …).
    """
    if isinstance(model, Trained):
        data = model.data if data is None else data
        reward = reward or model.reward
        model = model.policy
    if data is None:
        raise DataError(
            "no rows to evaluate on: pass data (only a run with validation data has a default)"
        )
    llm_names = [name for name in settings if matching_keys("generation", name)]
    llm_settings = {name: settings.pop(name) for name in llm_names}
    if isinstance(model, LLM) and llm_settings:
        raise ConfigError(
            f"the model is already loaded: pass {', '.join(llm_names)} to hone.LLM(…)"
        )
    if n == 1 and temperature is None:
        temperature = 0.0
    inputs = _RunInputs(reward)
    with tempfile.TemporaryDirectory(prefix="hone-evaluate-") as temporary:
        folder = Path(temporary)
        files = inputs.prepare(data, folder, "rows")
        call_settings = CallSettings(
            "evaluation", "hone.evaluate", {**settings, "data.path": files}
        )
        call_settings.compose()  # raises for wrong settings before responses are generated
        rows = as_rows(files)
        llm_context: AbstractContextManager[LLM]
        if isinstance(model, LLM):
            llm_context = nullcontext(model)  # the caller's LLM stays open
        else:
            llm_context = LLM(_model_path(model), None, **llm_settings)
        with llm_context as llm:
            prompt_columns = (llm.config.data.prompt_key, *PROMPT_COLUMNS)
            prompts = [row[find_column(row, i, prompt_columns)] for i, row in enumerate(rows)]
            responses = llm.generate(prompts, n=n, temperature=temperature, max_tokens=max_tokens)
        for row, response in zip(rows, responses, strict=True):
            row["responses"] = [output.text for output in response.outputs]
        call_settings.set({"data.path": [write_rows(rows, folder, "responses")]})
        return main_eval.run(call_settings.compose().config, "scores", inputs.score_function)


@dataclass(frozen=True)
class Picture:
    """A PNG file, which a notebook shows."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Trained:
    """A finished run: its folder, its metrics and its policy.

    `evaluate` calls `hone.evaluate`, by default with the run's validation data and reward.
    """

    def __init__(
        self, folder: Path, composed: ComposedConfig, data: Data | None, reward: Reward | None
    ) -> None:
        self.folder, self.config = folder, composed.config
        self.data, self.reward = data, reward

    @property
    def metrics(self) -> list[Row]:
        """The metrics of each step, in order, read from `metrics.jsonl`."""
        return read_metrics(self.folder)

    @cached_property
    def policy(self) -> LLM:
        """The policy of the last checkpoint, loaded on first use."""
        data = self.config.data
        settings: Values = {
            "prompt_format": data.prompt_format,
            "apply_chat_template_kwargs": data.apply_chat_template_kwargs,
            "device": self.config.trainer.device,
        }
        if hasattr(data, "max_response_length"):
            settings["prompt_length"] = data.max_prompt_length
            settings["response_length"] = data.max_response_length
        return LLM(self.folder, None, **settings)

    evaluate = evaluate

    def save(self, folder: PathOrName) -> Path:
        """Writes the policy to a new folder that `from_pretrained` opens, with a model card."""
        if is_non_local(folder):
            raise ValueError(
                f"save({str(folder)!r}): name a local folder; `hone export` writes to remote stores"
            )
        return export(self.folder, Path(folder))

    def plot(self, *keys: str) -> Picture:
        """Draws metrics over the steps to `curve.png` in the folder; by default, the one of the summary."""
        if not keys:
            result = self._result()
            if result is None:
                raise ValueError(
                    f"{self.folder} has no score or loss to draw; pass names of metrics"
                )
            keys = (result.key,)
        return Picture(draw_curve(self.folder, keys, self.folder / "curve.png", self.folder.name))

    def report(self) -> Path:
        """Writes the page of the run to `report.html` in the folder, as `hone report` does."""
        return write_report([self.folder], self.folder / "report.html")

    def _result(self) -> MetricResult | None:
        return headline(RunData(self.folder.name, load_metrics(find_metrics_file(self.folder))))

    def __repr__(self) -> str:
        result = self._result()
        if result is None:
            return f"Trained({str(self.folder)!r})"
        change = f"{format_number(result.first)} → {format_number(result.last)}"
        return f"Trained({str(self.folder)!r}, {result.key} {change})"


def train(
    model: Model,
    data: Data,
    reward: Reward | None = None,
    *,
    val: Data | None = None,
    lr: float | None = None,
    steps: int | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    estimator: str | None = None,
    out: PathOrName | None = None,
    config: PathOrName | None = None,
    **settings: Value,
) -> Trained:
    """Trains a policy by reinforcement learning, as `hone train` does.

    `data` is rows or files. `reward` is a function, the name of a rule (`gsm8k`, `math`), or several of
    them with weights; by default the data source selects the rule. `n` is the responses per prompt,
    `batch_size` the prompts per step, `max_tokens` the length of a response. `settings` are other keys of the
    `ppo_trainer` config, by their last part or dotted; `config` is a YAML file with such keys. The run is
    written to `out`, by default a new folder in `runs/`; an existing run in `out` is resumed.
    """
    settings |= given(lr=lr, steps=steps, n=n, batch_size=batch_size, max_tokens=max_tokens)
    settings |= given(estimator=estimator, out=out)
    call_settings = CallSettings("ppo_trainer", "hone.train", settings, config)
    inputs, val = _RunInputs(reward), _reusable(val)
    with _run_folder("train", call_settings) as folder:
        call_settings.set({"actor_rollout_ref.model.path": _model_path(model)})
        call_settings.set({"data.train_files": inputs.prepare(data, folder, "train")})
        if val is not None:
            call_settings.set({"data.val_files": inputs.prepare(val, folder, "validation")})
        composed = call_settings.compose(starting_values, check_plan)
        print_config_notes(composed)
        main_ppo.run(composed.config, composed.origins, compute_score=inputs.score_function)
    return Trained(folder, composed, val, reward)


def sft(
    model: Model,
    data: Data,
    *,
    val: Data | None = None,
    lr: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    out: PathOrName | None = None,
    config: PathOrName | None = None,
    **settings: Value,
) -> Trained:
    """Trains a model on answers or conversations, as `hone sft` does.

    A row has `messages`, or `prompt` and `response` (or `answer`). `settings` are other keys of the
    `sft_trainer` config; `config` and `out` are as in `hone.train`.
    """
    settings |= given(lr=lr, steps=steps, epochs=epochs, batch_size=batch_size, out=out)
    call_settings = CallSettings("sft_trainer", "hone.sft", settings, config)
    val = _reusable(val)
    with _run_folder("sft", call_settings) as folder:
        call_settings.set({"model.path": _model_path(model)})
        column_prefixes = ("data.prompt", "data.response", "data.custom")
        sets_columns = any(key.startswith(column_prefixes) for key in call_settings.values())
        for split, split_data in (("train", data), ("val", val)):
            if split_data is not None:
                _set_sft_files(call_settings, split_data, folder, split, sets_columns)
        composed = call_settings.compose(_batch_size_settings(SFTDataConfig.train_batch_size))
        _run_ranks(main_sft, composed, folder)
    return Trained(folder, composed, val, None)


def dpo(
    model: Model,
    data: Data,
    *,
    val: Data | None = None,
    lr: float | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    out: PathOrName | None = None,
    config: PathOrName | None = None,
    **settings: Value,
) -> Trained:
    """Trains a model on preferences, as `hone dpo` does.

    A row has `prompt`, `chosen` and `rejected`, or two whole dialogues; with `loss_type="kto"`, it has
    `prompt`, `completion` and `label`. `settings` are keys of the `dpo_trainer` config; `config` and `out`
    are as in `hone.train`.
    """
    settings |= given(lr=lr, steps=steps, epochs=epochs, batch_size=batch_size, out=out)
    call_settings = CallSettings("dpo_trainer", "hone.dpo", settings, config)
    with _run_folder("dpo", call_settings) as folder:
        call_settings.set({"model.path": _model_path(model)})
        for split, split_data in (("train", data), ("val", val)):
            if split_data is not None:
                files = file_names(split_data)
                files = files or [write_rows(as_rows(split_data), folder, split)]
                call_settings.set({f"data.{split}_files": files})
        default_batch_size = PreferenceDataConfig.train_batch_size
        composed = call_settings.compose(_batch_size_settings(default_batch_size))
        _run_ranks(main_dpo, composed, folder)
    return Trained(folder, composed, None, None)


def _run_ranks(program: ModuleType, composed: ComposedConfig, folder: Path) -> None:
    """Runs a supervised program in this process, or on the ranks that the config asks for."""
    print_config_notes(composed)
    if must_launch(composed.config.world_size, composed.config.trainer.nnodes, program.MODULE):
        RunFolder(folder).write_config(config_to_dict(composed.config), composed.origins)
        rank_arguments = ["--config-path", str(folder), "--config-name", "config"]
        launch(composed.config.world_size, program.MODULE, rank_arguments)
    else:
        program.run(composed.config, composed.origins)


class _RunInputs:
    """The data files of a run, and its score function, which depends on the columns of the data.

    `score_function` is None if the data sources of the rows select the rules.
    """

    def __init__(self, reward: Reward | None) -> None:
        self._parts = [] if reward is None else reward_parts(reward)
        self.score_function: Function | None = None

    def prepare(self, data: Data, folder: Path, name: str) -> list[str]:
        """Builds the score function, writes the data to a file if necessary, and returns the file names.

        Files in the dataset schema are returned unchanged; other rows are converted and written to a file
        whose name begins with `name`.
        """
        parts = self._parts
        needs_prompt = reads_prompt(parts)
        default_source = parts[0].name if len(parts) == 1 else "python"
        files = file_names(data)
        if files is not None and not needs_prompt:
            store = read_rows(files, BadRowPolicy("skip"), "data")
            if "reward_model" in next(store.scan()):
                rows_of_files = enumerate(store.scan(["extra_info"]))
                extra_infos = (extra_info_of(row, number) for number, row in rows_of_files)
                self._build_function(set().union(*extra_infos))
                return files
        user_rows = as_rows(data)
        if not parts and any("data_source" not in row for row in user_rows):
            raise DataError("no reward: pass a function or a name, or rows with a data_source")
        rows = [
            to_prompt_row(row, number, default_source, with_prompt=needs_prompt)
            for number, row in enumerate(user_rows)
        ]
        is_single_rule = len(parts) == 1 and isinstance(parts[0].scorer, str)
        if not is_single_rule or any(row["data_source"] != default_source for row in rows):
            columns = set().union(*(row["extra_info"] for row in rows))
            answer_columns = [
                name for name in ANSWER_COLUMNS if all(name in row for row in user_rows)
            ]
            # The first column is the ground truth; a function gets the others under their own names.
            self._build_function(columns, answer_columns[1:])
        return [write_rows(rows, folder, name)]

    def _build_function(
        self, columns: Collection[str], answer_columns: Collection[str] = ()
    ) -> None:
        if self._parts and self.score_function is None:
            self.score_function = as_score_function(self._parts, columns, answer_columns)


def _reusable(data: Data | None) -> Data | None:
    """Returns the rows of an iterator as a list, which `Trained.evaluate` can read again."""
    return list(data) if isinstance(data, Iterator) else data


def _model_path(model: Model) -> str:
    """Returns the folder or the hub name of a model."""
    if isinstance(model, (Trained, LLM)):
        return str(model.folder if isinstance(model, Trained) else model.path)
    if not isinstance(model, (str, os.PathLike)):
        type_name = type(model).__name__
        raise ConfigError(
            f"the model is a {type_name}; save it and pass its folder, or pass a hub name"
        )
    return os.fspath(model)


@contextmanager
def _run_folder(name: str, call_settings: CallSettings) -> Iterator[Path]:
    """Yields the folder of a run, by default `runs/NAME-1`, `runs/NAME-2`, ….

    After an error, a new folder is removed unless the run has started.
    """
    key = "trainer.default_local_dir"
    path = call_settings.values().get(key)
    check_output_folder(str(path or "runs"), "out")
    folder = Path(str(path)).expanduser() if path else _new_folder(name)
    is_new = not path or not folder.exists()
    call_settings.set({key: folder})
    try:
        yield folder
    except BaseException as error:
        if is_new and not RunFolder(folder).config_file.exists():
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt(
                f"stopped after step {error.step}; out={str(folder)!r} resumes from there"
            ) from None
        raise


def _new_folder(name: str) -> Path:
    """Creates the first of `runs/NAME-1`, `runs/NAME-2`, … that does not exist."""
    Path("runs").mkdir(exist_ok=True)
    number = 1
    while True:
        folder = Path("runs", f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # an earlier run or another process has created the folder
            number += 1
        else:
            return folder


def _set_sft_files(
    call_settings: CallSettings, data: Data, folder: Path, split: str, sets_columns: bool
) -> None:
    """Sets the data files of a split (`train` or `val`).

    Columns are renamed to `prompt` and `response`, unless the user's settings name them (`sets_columns`).
    """
    files, rows = file_names(data), as_rows(data)
    if files is None or not (sets_columns or MESSAGES_COLUMN in rows[0]):
        rows = to_sft_rows(rows)
        files = [write_rows(rows, folder, split)]
        if MESSAGES_COLUMN not in rows[0]:
            call_settings.set({"data.prompt_key": "prompt", "data.response_key": "response"})
    call_settings.set({f"data.{split}_files": files})


def _batch_size_settings(default_batch_size: int) -> Callable[[JsonObject], list[Setting]]:
    """Returns a function that sets a batch of all rows if they are fewer than the default batch size."""

    def settings(values: JsonObject) -> list[Setting]:
        key = "data.train_batch_size"
        num_rows = len(as_rows(values["data.train_files"]))  # type: ignore[arg-type]
        if key in values or num_rows >= default_batch_size:
            return []
        return [Setting(key, num_rows, STARTING_VALUES_ORIGIN)]

    return settings
