"""Config of the algorithm: advantage estimator, KL, rollout correction, group filters."""

from __future__ import annotations

from typing import Literal

from hone.config.block import SchemaBlock, block
from hone.config.ranges import Count, CountOrZero, Fraction, NotNegative, Positive
from hone.suggestions import did_you_mean, nearest
from hone.types import Fields, Function, Settings


class KLControlConfig(SchemaBlock):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed keeps `kl_coef`; adaptive adjusts it to reach `target_kl`."""
    kl_coef: NotNegative = 0.001
    """The weight, or the initial weight if adaptive."""
    horizon: Count = 10000
    """adaptive: time constant of the weight, in sequences."""
    target_kl: Positive = 0.1
    """adaptive: the target KL."""


class PFPPOConfig(SchemaBlock):
    """PF-PPO: resampling of the batch by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Function from scores to sampling weights."""
    weight_pow: float = 2.0
    """pow: the exponent."""


class RolloutCorrectionConfig(SchemaBlock):
    """Correction for rollout log-probs that differ from the trainer's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights per token or per sequence; null disables them."""
    rollout_is_threshold: float | str = 2.0
    """Weights are truncated at this value; `lo_hi` zeroes weights outside the band (IcePop)."""
    rollout_rs: str | tuple[str, ...] | None = None
    """Rejection options, comma separated: token_k1…k3, seq_sum_k1…, seq_mean_k1…, seq_max_k2|k3."""
    rollout_rs_threshold: float | str | tuple[str, ...] | None = None
    """Bounds of the rejection options: one for all options, or one per option, comma separated or as a list.
    An option with k1 also takes `lo_hi`."""
    rollout_token_veto_threshold: Positive | None = None
    """Reject a whole response if the ratio train/rollout of one of its tokens is below this number."""
    bypass_mode: bool = False
    """Use rollout log-probs as the old log-probs instead of recomputing them."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass: the loss that `bypass_mode` uses."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their batch mean."""

    @property
    def applies_before_update(self) -> bool:
        """Whether importance weights or a reduced loss mask are written before the update."""
        options = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold)
        return not self.bypass_mode and any(option is not None for option in options)


class FilterGroupsConfig(SchemaBlock):
    """DAPO's dynamic sampling: drop groups without signal and generate more."""

    enable: bool = False
    """Filter groups."""
    metric: str | None = "reward"
    """Metric that must vary within a group: acc, score, reward, seq_reward, seq_final_reward, or the name of
    an extra value that the reward function returns."""
    max_num_gen_batches: CountOrZero = 20
    """Maximum generation batches per step, after which the run stops; 0 is no limit (verl's default)."""
    max_empty_gen_batches: Count = 10
    """Maximum consecutive generation batches that keep no group, after which the run stops."""
    max_inflight_gen_batches: Count = 2
    """Generation batches whose groups may run at once; 1 starts a group only in place of a rejected one."""
    order: Literal["submission", "finish"] = "submission"
    """Which groups fill the batch: the first submitted, or the first finished (depends on timing)."""


class AlgorithmConfig(SchemaBlock):
    """Advantages, KL in the reward, correction, filters."""

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    adv_estimator: str = "gae"
    """Name of the estimator, or `pkg.mod:function` for a custom one."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation; false is Dr.GRPO."""
    process_baseline: Literal["return", "step", "token"] = "return"
    """Baseline of process rewards in rloo and rloo_token: the mean return of the group's other responses,
    or their mean reward per step or per token."""
    adv_norm: bool = False
    """Whiten advantages over all policy tokens of the batch, for any estimator."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference policy from each token's reward."""
    kl_penalty: str = "kl"
    """KL estimator in the reward: kl|k1, abs, mse|k2, low_var_kl|k3."""
    kl_ctrl: KLControlConfig = block(KLControlConfig)
    use_pf_ppo: bool = False
    """Resample the batch by reward."""
    pf_ppo: PFPPOConfig = block(PFPPOConfig)
    rollout_correction: RolloutCorrectionConfig = block(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = block(FilterGroupsConfig)
    reward_gt_coef: float = 5.0
    """PRIME: weight of the outcome reward."""
    reward_dpo_coef: float = 5.0
    """PRIME: weight of the implicit process rewards."""
    gdpo_reward_keys: tuple[str, ...] | None = None
    """GDPO: reward components, normalised separately."""
    gdpo_reward_weights: tuple[float, ...] | None = None
    """GDPO: weight of each component; null gives each the weight 1."""


class CurriculumFilterConfig(SchemaBlock):
    """PURE's filter of groups that are too easy or too hard."""

    enable: bool = False
    """Filter groups by their mean rule score."""
    fn_name: Literal["remove_extreme", "interquartile"] = "remove_extreme"
    """remove_extreme keeps groups with 0 < mean < 1; interquartile: a mean between two percentiles."""
    fn_params: Settings = block(dict, lower_percentile_bound=25, upper_percentile_bound=75)
    """interquartile: the lower and the upper percentile."""


_IS_THRESHOLD, _RS_THRESHOLD = "rollout_is_threshold", "rollout_rs_threshold"
_LOWER_THRESHOLD = "threshold_lower"
_SEQUENCE_IS: Fields = {"rollout_is": "sequence", _IS_THRESHOLD: 2.0}
_TOKEN_IS: Fields = {"rollout_is": "token", _IS_THRESHOLD: 2.0}
_SETTINGS_BY_SUBSTRING: dict[str, Fields] = {
    "": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    "bypass_ppo_clip": {"bypass_mode": True, "loss_type": "ppo_clip"},
    "bypass_pg": {"bypass_mode": True, "loss_type": "reinforce"},
    **dict.fromkeys(("token_is", "token_tis"), _TOKEN_IS),
    "token_icepop": _TOKEN_IS | {_IS_THRESHOLD: "0.5_5.0"},
    **dict.fromkeys(("pg_is", "seq_is", "seq_tis"), _SEQUENCE_IS),
    "seq_is_rs": {"rollout_rs": "seq_sum_k1", _RS_THRESHOLD: "0.5_2.0"},
    "geo_rs": {"rollout_rs": "seq_mean_k1", _RS_THRESHOLD: "0.999_1.001"},
    "k3_rs": {"rollout_rs": "seq_mean_k3", _RS_THRESHOLD: 0.01},
}
"""Settings by substring of a preset's name ("" is in every name); later entries override earlier ones."""
_PRESET_NAMES = """
    disabled decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs
    decoupled_geo_rs decoupled_geo_rs_seq_tis decoupled_geo_rs_token_tis
    decoupled_k3_rs decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis
    bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs bypass_pg_is bypass_pg_token_icepop
    bypass_pg_geo_rs bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis
"""


def _preset_settings(name: str) -> Fields:
    settings: Fields = {}
    for substring, substring_settings in _SETTINGS_BY_SUBSTRING.items():
        if substring in name:
            settings |= substring_settings
    return settings


PRESETS: dict[str, Fields] = {name: _preset_settings(name) for name in _PRESET_NAMES.split()}
"""verl's named corrections, as in `RolloutCorrectionConfig.decoupled_geo_rs(rs_threshold="0.99_1.01")`.
`decoupled` recomputes the old log-probs, and `bypass` uses the log-probs of the rollout."""


def _preset_method(name: str) -> Function:
    """Returns the function of a preset's class method, which takes verl's arguments."""
    settings = PRESETS[name]
    has_both_thresholds = _IS_THRESHOLD in settings and _RS_THRESHOLD in settings
    threshold_keys = {
        "is_threshold" if has_both_thresholds else "threshold": _IS_THRESHOLD,
        "rs_threshold": _RS_THRESHOLD,
    }  # in verl's order
    arguments = {argument: key for argument, key in threshold_keys.items() if key in settings}
    arguments |= {_LOWER_THRESHOLD: _LOWER_THRESHOLD} if name.endswith("icepop") else {}

    def create(cls: type, *values: float | str, **keywords: float | str) -> RolloutCorrectionConfig:
        changes = dict(zip(arguments, values, strict=False)) | keywords
        if len(values) > len(arguments) or not changes.keys() <= arguments.keys():
            suggestions = [nearest(key, arguments) for key in keywords.keys() - arguments]
            argument_names = ", ".join(arguments) or "no arguments"
            raise TypeError(f"{name} takes {argument_names}.{did_you_mean(*suggestions)}")
        if _LOWER_THRESHOLD in arguments:
            low, high = str(settings[_IS_THRESHOLD]).split("_")
            changes = {
                "threshold": f"{changes.get(_LOWER_THRESHOLD, low)}_{changes.get('threshold', high)}"
            }
        options = settings | {arguments[key]: value for key, value in changes.items()}
        correction: RolloutCorrectionConfig = cls(**options)
        return correction

    create.__doc__ = f"The preset {name}; arguments: {', '.join(arguments) or 'none'}."
    return create


for _name in PRESETS:
    setattr(RolloutCorrectionConfig, _name, classmethod(_preset_method(_name)))
