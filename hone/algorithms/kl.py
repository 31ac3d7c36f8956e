"""KL estimators, the KL penalty in the reward, and the controllers of its coefficient.

KL is the divergence of the policy from the reference policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor

from hone.config.algorithm import KLControlConfig
from hone.ops.rows import masked_mean, zero_outside_mask
from hone.plugins import PluginError, Table, definition_location

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""Takes log π and log π_ref and returns an estimate per token."""

_FUNCTIONS = {"k1": "k1", "kl": "k1", "abs": "absolute", "k2": "k2", "mse": "k2"}
_FUNCTIONS |= {"k3": "k3", "low_var_kl": "k3"}
TABLE: Table[KLEstimator] = Table(
    "KL estimator", {name: f"{__name__}:{function}" for name, function in _FUNCTIONS.items()}
)
_EXPONENT_BOUND = 20.0
_K3_BOUND = 10.0


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Returns the per-token KL estimate; a trailing `+` ("k3+") keeps the value and takes the gradient of k2,
    which is the unbiased gradient of the divergence."""
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    if not kl_penalty.endswith("+"):
        return value
    gradient = k2(logprob, ref_logprob)
    return value.detach() + gradient - gradient.detach()


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Returns the per-token KL estimate with the gradient of its own formula."""
    try:
        estimator = get_kl_estimator(kl_penalty, "kl_penalty")
    except PluginError as error:
        raise NotImplementedError(str(error)) from error
    return estimator(logprob, ref_logprob)


def get_kl_estimator(name: str, key: str) -> KLEstimator:
    """Returns the estimator of a name or of "pkg.mod:object"; error messages contain the config key `key`."""
    try:
        estimator = TABLE.get(name.removesuffix("+"))
    except PluginError as error:
        message = f"{key}={name}: {error}; each also with a trailing +"
        if name == "full":
            message = (
                f"{key}=full needs the full distribution of each token, which is not stored; "
                "use k3 (low variance) or k1"
            )
        raise PluginError(message) from error
    parameters = list(inspect.signature(estimator).parameters)
    if [parameter.replace("_", "") for parameter in parameters[:2]] != ["logprob", "reflogprob"]:
        location = definition_location(estimator)
        raise PluginError(
            f"{key}={name}: {f'{location}: ' if location else ''}the KL estimator takes "
            f"{', '.join(parameters) or 'nothing'}; its parameters are log_prob and ref_log_prob, "
            "in this order"
        )
    return estimator


def k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """log π − log π_ref: unbiased, may be negative."""
    return logprob - ref_logprob


def absolute(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """|log π − log π_ref|."""
    return (logprob - ref_logprob).abs()


def k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """(log π − log π_ref)²/2."""
    return 0.5 * (logprob - ref_logprob).square()


def k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """e^x − x − 1 for x = log π_ref − log π: unbiased, never negative, bounded at 10."""
    x = (ref_logprob - logprob).clamp(-_EXPONENT_BOUND, _EXPONENT_BOUND)
    return (x.exp() - x - 1).clamp(-_K3_BOUND, _K3_BOUND)


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator_name: str,
) -> tuple[Tensor, Tensor]:
    """Returns rewards = scores − kl_coef·KL, 0 outside the mask, and the mean over rows of their mean KL."""
    kl = zero_outside_mask(kl_penalty(old_log_probs, ref_log_prob, estimator_name), response_mask)
    rewards = zero_outside_mask(token_level_scores, response_mask) - kl_coef * kl
    current_kl = masked_mean(masked_mean(kl, response_mask, -1), response_mask.bool().any(-1))
    return rewards, current_kl


class FixedKLController:
    """A KL coefficient that never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that is adapted to bring the KL to the target (Ziegler et al., 1909.08593)."""

    _ERROR_BOUND = 0.2

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if horizon <= 0:
            raise ValueError(
                f"kl_ctrl.horizon={horizon} must be above 0: it is a number of samples"
            )
        if target_kl <= 0:
            raise ValueError(
                f"kl_ctrl.target_kl={target_kl} must be above 0: the controller divides by it"
            )
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        error = float(current_kl) / self.target - 1
        error = max(-self._ERROR_BOUND, min(self._ERROR_BOUND, error))
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: KLControlConfig) -> FixedKLController:
    """Creates the controller from `algorithm.kl_ctrl`: type, kl_coef, target_kl, horizon."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise NotImplementedError(
        f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is unknown; use 'fixed' or 'adaptive'"
    )
