"""The trees that commands of verl were written for: their marks in a command, and their defaults and meaning.

verl 0.3 and older, TinyZero, Search-R1 and PURE put the KL into the reward unless `use_kl_loss` is set;
`algorithm.use_kl_in_reward` does not exist there. Defaults that only decide how fast a run is, or where it
writes, are hone's in every tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hone.config.convert import show_value
from hone.config.dialect import DEFAULT_OF, Reading
from hone.config.errors import ConfigError
from hone.config.sources import COMMAND_LINE, Setting
from hone.suggestions import suggestion
from hone.types import JsonObject, JsonValue
from hone.verl.rules import matches_pattern, new_name

TREE_KEY = "hone.tree"
"""The key by which a user names the tree of a command."""
TODAY = "verl"
"""The tree of a command without a mark."""
_OLDEST, _BEFORE_TODAY = "verl-0.3", "verl-0.9.0"
_VERSION = re.compile(r"verl-(\d+)\.(\d+)(?:\.(\d+))?")
_TODAYS_VERSION = (0, 9, 1)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_GSPO_AGG_MODE = f"{_ACTOR}.policy_loss.agg_mode"
_TRUE = (True, "true", "True")


@dataclass(frozen=True)
class CommandTree:
    """A tree with its defaults that differ from hone's, under the tree's own names of the keys."""

    title: str
    defaults: JsonObject = field(default_factory=dict)
    penalizes_reward: bool = True
    """Whether the KL is in the reward unless `use_kl_loss` is set."""
    aggregates_gspo_by_sequence: bool = False


_OLD_DEFAULTS: JsonObject = {f"{_ACTOR}.entropy_coeff": 0.001}
COMMAND_TREES: dict[str, CommandTree] = {
    "tinyzero": CommandTree("TinyZero", _OLD_DEFAULTS | {"data.prompt_format": "raw"}),
    "search_r1": CommandTree(
        "Search-R1",
        _OLD_DEFAULTS
        | {
            f"{_ROLLOUT}.top_p": 0.95,
            "data.max_start_length": 256,
            "data.max_prompt_length": 512,
            "data.max_response_length": 512,
            "data.max_obs_length": 512,
            "do_search": True,
            "max_turns": 10,
        },
    ),
    "pure": CommandTree(
        "PURE",
        {
            "data.train_files": ["train.parquet"],
            "data.val_files": ["aime2024.parquet", "math500.parquet"],
            "data.prompt_key": "question",
            "data.prompt_format": "raw",
            "data.max_prompt_length": 1024,
            "data.max_response_length": 7168,
            "data.train_batch_size": 64,
            "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
            f"{_ROLLOUT}.n": 8,
            "critic.optim.lr": 5e-6,
            "critic.ppo_mini_batch_size": 128,
            "reward_model.enable": True,
            "reward_model.type": "prm",
            "reward_model.model.path": "jinachris/PURE-PRM-7B",
            "reward_model.reward_manager": "prime",
            "algorithm.adv_estimator": "rloo",
            "algorithm.adv_norm": True,
            "algorithm.kl_penalty": "low_var_kl",
            "trainer.total_epochs": 20,
            "trainer.save_freq": 50,
            "trainer.test_freq": 10,
        },
    ),
    _OLDEST: CommandTree("verl 0.3 or older", _OLD_DEFAULTS),
    _BEFORE_TODAY: CommandTree(
        "verl 0.4 to 0.9.0", penalizes_reward=False, aggregates_gspo_by_sequence=True
    ),
    TODAY: CommandTree("verl 0.9.1", penalizes_reward=False),
}
_VALUES_OF_STARTING_PROGRAMS = (
    "data.max_start_length",
    "data.max_prompt_length",
    "data.max_response_length",
)
"""Lengths, which a program with starting values chooses itself."""


Mark: TypeAlias = tuple[str, tuple[str, ...]]
"""What names the tree of a command, in words, and the trees that it may be of, the most likely first."""


@dataclass(frozen=True)
class KeyMark:
    """What a setting says about the tree of its command."""

    patterns: tuple[str, ...]
    trees: tuple[str, ...]
    """The trees that have such a key; the first is the most likely."""
    added: bool = False
    """Whether only `+key` is a mark, because the key does not exist in these trees."""
    values: tuple[JsonValue, ...] = ()
    """The values that are a mark; empty: all values."""

    def matches(self, setting: Setting) -> bool:
        return (
            (setting.added or not self.added)
            and (not self.values or setting.value in self.values)
            and any(matches_pattern(pattern, setting.key) for pattern in self.patterns)
        )


_NEWER = (_BEFORE_TODAY, TODAY)
KEY_MARKS = (
    KeyMark(
        (
            *("data.train_data_num", "data.val_data_num", "data.max_start_length"),
            *("data.max_obs_length", "data.shuffle_train_dataloader", f"{_ACTOR}.state_masking"),
            *(f"{_ROLLOUT}.n_agent", "algorithm.no_think_rl", "algorithm.state_masking.**"),
            *("do_search", "max_turns"),
        ),
        ("search_r1",),
    ),
    KeyMark(("reward_model.training", "reward_model.optim.**"), ("pure",)),
    KeyMark(("**.fsdp_config.grad_offload",), (_OLDEST, "tinyzero", "search_r1")),
    KeyMark(("trainer.val_before_train",), (_OLDEST, "tinyzero", "search_r1", "pure"), added=True),
    KeyMark(
        ("trainer.val_generations_to_log_to_wandb", "trainer.remove_previous_ckpt_in_save"),
        (_OLDEST, "pure"),
    ),
)
"""Keys that only these trees have."""
ADOPTED_KEY_MARKS = (
    KeyMark(
        tuple(
            f"reward_model.{part}_score"
            for part in ("structure_format", "final_format", "retrieval")
        ),
        ("search_r1", *_NEWER),
    ),
    KeyMark(
        (
            *("algorithm.adv_norm", "reward_model.credit_assignment"),
            *("reward_model.verifiable_reward_coef", "reward_model.modeling_reward_coef"),
            *("reward_model.repeatness_punishment", "reward_model.high_repeat_threshold"),
            "curriculum_learning.**",
        ),
        ("pure", *_NEWER),
    ),
    KeyMark(("trainer.project_name",), ("tinyzero", *_NEWER), values=("TinyZero",)),
)
"""Keys of one of the trees that hone has too: a mark in commands of verl's programs only."""
_KEYS_OF_A_WHOLE_FILE = (
    "actor_rollout_ref.hybrid_engine",
    "algorithm.adv_estimator",
    "algorithm.kl_ctrl.type",
)
"""A file with these keys and without `algorithm.use_kl_in_reward` is a whole tree of verl 0.3 or older."""


def read_tree(
    settings: Sequence[Setting], schema: str, *, has_starting_values: bool = False
) -> Reading:
    """Returns the settings of a command without `hone.tree`, with the defaults and the name of its tree."""
    requests = [setting for setting in settings if setting.key == TREE_KEY]
    settings = [setting for setting in settings if setting.key != TREE_KEY]
    marks = list(_found_marks(settings, with_adopted=not has_starting_values))
    try:
        if requests:
            marks.insert(0, _requested_tree(requests[-1]))
        if schema != "ppo_trainer":
            return Reading(settings)
        name, reason = _common_tree(marks)
    except ConfigError as error:
        return Reading(settings, problems=error.problems)
    tree = COMMAND_TREES[name]
    values = {new_name(setting.key, schema): setting.value for setting in settings}
    defaults = _defaults_of_command(tree, values)
    if has_starting_values:
        defaults = {k: v for k, v in defaults.items() if k not in _VALUES_OF_STARTING_PROGRAMS}
    unset = {key: value for key, value in defaults.items() if new_name(key, schema) not in values}
    line = _line(tree, reason, unset, values)
    update_size = list(_prompts_per_update(settings, values)) if name == "search_r1" else []
    for setting in update_size:
        line += f"; {setting.key}={setting.value}: {setting.origin}"
    origin = f"{DEFAULT_OF}{tree.title}"
    default_settings = [Setting(key, value, origin) for key, value in defaults.items()]
    return Reading([*settings, *update_size], default_settings, line)


def _requested_tree(request: Setting) -> Mark:
    """Returns the mark of `hone.tree`; a version of verl is the tree that has its rules."""
    name, text = str(request.value), f"{TREE_KEY}={show_value(request.value)}"
    if version := _VERSION.fullmatch(name):
        numbers = tuple(int(number) for number in version.groups(default="0"))
        is_newest = numbers >= _TODAYS_VERSION
        name = _OLDEST if numbers[:2] <= (0, 3) else TODAY if is_newest else _BEFORE_TODAY
    if name not in COMMAND_TREES:
        raise ConfigError(
            f"{text} is no tree.{suggestion(name, COMMAND_TREES)} Use tinyzero, search_r1, pure, verl, or a "
            f"version such as verl-0.3 ({request.origin})"
        )
    return f"{text} ({request.origin})", (name,)


def _defaults_of_command(tree: CommandTree, values: JsonObject) -> JsonObject:
    """Returns the defaults of a tree, and those that depend on the values of a command."""
    defaults = dict(tree.defaults)
    if tree.penalizes_reward and values.get(f"{_ACTOR}.use_kl_loss") not in _TRUE:
        defaults["algorithm.use_kl_in_reward"] = True
    if tree.aggregates_gspo_by_sequence and values.get(_LOSS_MODE) == "gspo":
        defaults[_GSPO_AGG_MODE] = "seq-mean-token-mean"
    return defaults


def _found_marks(settings: Sequence[Setting], *, with_adopted: bool) -> Iterator[Mark]:
    """Yields the marks of a command, without `hone.tree`."""
    # The saved config of a run has every key of hone.
    newer_files = {s.origin for s in settings if s.key == "algorithm.use_kl_in_reward"}
    newer_files -= {COMMAND_LINE}
    for setting in settings:
        is_adopted_mark = with_adopted and setting.origin not in newer_files
        for mark in (*KEY_MARKS, *(ADOPTED_KEY_MARKS if is_adopted_mark else ())):
            if mark.matches(setting):
                plus = "+" if mark.added else ""
                value = f"={setting.value}" if mark.values else ""
                yield f"{plus}{setting.key}{value} ({setting.origin})", mark.trees
    for file in dict.fromkeys(setting.origin for setting in settings):
        keys = {setting.key for setting in settings if setting.origin == file}
        is_whole = keys.issuperset(_KEYS_OF_A_WHOLE_FILE) and file != COMMAND_LINE
        if is_whole and file not in newer_files:
            yield f"the file {file}", (_OLDEST, "tinyzero", "search_r1", "pure")


def _common_tree(marks: Sequence[Mark]) -> tuple[str, str]:
    """Returns the tree that all marks may be of, and the mark that decides, in words."""
    trees = list(COMMAND_TREES)
    for position, (text, candidates) in enumerate(marks):
        if not set(trees) & set(candidates):
            earlier = marks[:position]
            contradicting = (mark for mark in earlier if not set(mark[1]) & set(candidates))
            other_text, other_candidates = next(contradicting, earlier[-1])
            titles = [COMMAND_TREES[names[0]].title for names in (other_candidates, candidates)]
            raise ConfigError(
                f"{other_text} is of {titles[0]}, and {text} is of {titles[1]}; leave one of them out"
            )
        trees = [tree for tree in trees if tree in candidates]
    likely = [candidates[0] for _, candidates in marks if candidates[0] in trees]
    children = [tree for tree in likely if tree != _OLDEST]
    name = next(iter(children or likely), TODAY if TODAY in trees else trees[0])
    deciding = [text for text, candidates in marks if candidates[0] == name]
    return name, next(iter(deciding or [text for text, _ in marks]), "")


def _prompts_per_update(settings: Sequence[Setting], values: JsonObject) -> Iterator[Setting]:
    """Yields the mini-batch size of Search-R1 in prompts: there, with `n_agent`, it counts responses."""
    n = next((s.value for s in reversed(settings) if s.key == f"{_ROLLOUT}.n_agent"), 1)
    key = f"{_ACTOR}.ppo_mini_batch_size"
    responses = values.get(key, 256)
    if isinstance(n, int) and isinstance(responses, int) and n > 1:
        origin = f"Search-R1 counts {responses} responses, {n} per prompt"
        yield Setting(key, -(-responses // n), origin)


def _line(tree: CommandTree, reason: str, defaults: JsonObject, values: JsonObject) -> str:
    """Returns the line that names the tree of a command and what follows from it."""
    line = f"the tree of this command: {tree.title}, "
    if reason:
        line += f"named by {reason}"
    else:
        line += f"as nothing names another ({TREE_KEY}=tinyzero, search_r1, pure or verl-0.3 does)"
    if defaults:
        texts = [f"{key}={show_value(value)}" for key, value in defaults.items()]
        texts.sort(key=lambda text: not text.startswith(("algorithm.", _ACTOR)))
        more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
        line += f"; its defaults hold: {' '.join(texts[:4])}{more}"
    if values.get(_LOSS_MODE) == "gspo":
        values = {f"{_ACTOR}.loss_agg_mode": "token-mean", **defaults, **values}
        mode = values.get(_GSPO_AGG_MODE) or values[f"{_ACTOR}.loss_agg_mode"]
        line += f"; gspo is aggregated by {mode}"
        if mode != "seq-mean-token-mean":
            line += f" (by seq-mean-token-mean in verl 0.9.0 and the paper: {TREE_KEY}=verl-0.9.0)"
    return line
