"""Estimators and losses by name: the table, suggestions, and users' own by path or decorator."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from hone.algorithms import advantages, kl, policy_losses
from hone.algorithms.advantages.estimator import Estimator, FunctionEstimator, Trajectories
from hone.plugins import PluginError


def own(token_level_rewards, response_mask, index=None, config=None, *, values, **kw):
    return values, values


own.needs = ("values",)


@pytest.mark.parametrize("package", [advantages, policy_losses])
def test_every_name_of_the_table_can_be_loaded(package):
    for name in package.TABLE.names():
        assert callable(package.TABLE.get(name))


def test_estimators_declare_the_columns_that_they_read():
    reads = {name: advantages.get_estimator(name).requires for name in ("gae", "remax", "grpo")}
    assert reads == {"gae": ("values",), "remax": ("reward_baselines",), "grpo": ()}


def test_options_come_from_the_config_and_an_estimator_cannot_be_changed():
    estimator = advantages.get_estimator("gae", {"gamma": 0.5})
    assert (estimator.gamma, estimator.lam) == (
        0.5,
        1.0,
    )  # lam has its default
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.gamma = 1.0
    assert advantages.get_estimator("grpo") == advantages.get_estimator("grpo_vectorized")


@dataclasses.dataclass(frozen=True)
class Scaled(Estimator):
    """A user's estimator class."""

    gamma: float
    scale: float = 2.0

    @property
    def requires(self):
        return ("ref_log_prob",)

    def __call__(self, batch):
        return batch.rewards * self.scale * self.gamma, batch.column("ref_log_prob")


def test_a_users_class_is_found_by_path_with_options_and_columns():
    estimator = advantages.get_estimator(f"{__name__}:Scaled", {"gamma": 0.5}, credit_assignment=1)
    assert estimator == Scaled(0.5)
    assert estimator.requires == ("ref_log_prob",)


def test_a_users_function_gets_the_arguments_of_its_signature():
    def plain(token_level_rewards, response_mask):
        return token_level_rewards, response_mask

    def any_name(**columns):
        return columns["token_level_rewards"], sorted(columns)

    def verls(token_level_rewards, response_mask, index, config=None, **kwargs):
        return config, (index, sorted(kwargs))

    batch = Trajectories(1, 0, ["p"], {"trajectory_id": ["t"]})
    assert FunctionEstimator(plain, {})(batch) == (1, 0)
    every_name = ["config", "index", "response_mask", "token_level_rewards", "trajectory_id"]
    assert FunctionEstimator(any_name, {})(batch) == (1, every_name)
    assert FunctionEstimator(verls, {"a": 1})(batch) == ({"a": 1}, (["p"], ["trajectory_id"]))


@dataclasses.dataclass(frozen=True)
class Demanding(Estimator):
    strength: float

    def __call__(self, batch):
        return batch.rewards, batch.rewards


@dataclasses.dataclass(frozen=True)
class Idle(Estimator):
    """Has no __call__."""


THREE = 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("THREE", "3 is not an advantage estimator; name a function"),
        ("PluginError", "PluginError is not an advantage estimator"),
        ("Idle", r"Idle must define __call__"),
        ("Demanding", "option 'strength' without a default, and algorithm has no key"),
    ],
)
def test_an_object_that_is_not_an_estimator_is_refused(name, message):
    with pytest.raises(PluginError, match=message):
        advantages.get_estimator(f"{__name__}:{name}")


def test_a_function_may_name_one_column_as_a_string_and_must_return_a_pair():
    def lone(token_level_rewards, response_mask, **columns):
        return token_level_rewards

    lone.needs = "values"
    estimator = FunctionEstimator(lone, {})
    assert estimator.requires == ("values",)
    with pytest.raises(PluginError, match=r"lone returned a int; return \(advantages, returns\)"):
        estimator(Trajectories(1, 0))


def test_the_error_of_an_unknown_name_has_a_suggestion_and_the_list():
    with pytest.raises(ValueError, match=r"Did you mean 'grpo'.*Known: .*rloo"):
        advantages.get_adv_estimator_fn("gropo")
    with pytest.raises(PluginError, match=r"Did you mean 'vanilla'.*Known: .*gspo"):
        policy_losses.get_policy_loss_fn("vannila")
    with pytest.raises(ValueError, match=r"unknown policy loss 'zzzzzz'. Known"):
        policy_losses.get_policy_loss_fn("zzzzzz")


def test_a_users_function_is_found_by_path_with_its_needs():
    path = f"{__name__}:own"
    assert advantages.get_adv_estimator_fn(path) is own
    assert advantages.get_estimator(path).requires == ("values",)


def loss_of_two_names(logp, adv):
    return -(logp * adv).mean(), {}


def loss_of_defaults(old=None, new=None):
    return new, {}


def loss_of_any_position(old_log_prob, log_prob, *others):
    return log_prob, {}


def loss_with_an_unlisted_column(log_prob, response_mask, ref_log_prob):
    return log_prob, {}


def estimator_of_two_names(scores, mask):
    return scores, scores


def swapped_kl(ref, logp):
    return ref - logp


def wrong_order_kl(ref_log_prob, log_prob):
    return log_prob - ref_log_prob


def own_kl(log_prob, ref_log_prob):
    return log_prob - ref_log_prob


@pytest.mark.parametrize(
    ("function", "wrong_names"),
    [
        (loss_of_two_names, "logp, adv"),
        (loss_of_defaults, "old, new"),
        (loss_of_any_position, r"\*others"),
        (loss_with_an_unlisted_column, "ref_log_prob"),
    ],
)
def test_a_loss_with_unknown_parameters_is_refused_where_it_is_named(function, wrong_names):
    line = function.__code__.co_firstlineno
    sentence = (
        rf"test_names\.py:{line}: the policy loss {function.__name__}\(.*\) takes {wrong_names}, but its "
        r"arguments are passed by name: old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, "
        r"config, rollout_is_weights; .*`needs`"
    )
    with pytest.raises(PluginError, match=sentence):
        policy_losses.get_policy_loss_fn(f"{__name__}:{function.__name__}")


def test_a_loss_may_take_a_column_that_it_lists(monkeypatch):
    path = f"{__name__}:loss_with_an_unlisted_column"
    monkeypatch.setattr(loss_with_an_unlisted_column, "needs", ("ref_log_prob",), raising=False)
    assert policy_losses.get_policy_loss_fn(path) is loss_with_an_unlisted_column


def test_an_estimator_with_unknown_parameters_is_refused_where_it_is_named():
    line = estimator_of_two_names.__code__.co_firstlineno
    sentence = (
        rf"test_names\.py:{line}: the advantage estimator estimator_of_two_names\(scores, mask\) takes "
        r"scores, mask, but .* by name: token_level_rewards, response_mask, index, config, trajectory_id;"
    )
    with pytest.raises(PluginError, match=sentence):
        advantages.get_estimator(f"{__name__}:estimator_of_two_names")


@pytest.mark.parametrize("function", [swapped_kl, wrong_order_kl])
def test_a_kl_estimator_with_other_parameters_or_another_order_is_refused(function):
    line = function.__code__.co_firstlineno
    sentence = rf"test_names\.py:{line}: the KL estimator takes ref.*log_prob and ref_log_prob, in this order"
    with pytest.raises(PluginError, match=sentence):
        kl.get_kl_estimator(f"{__name__}:{function.__name__}", "algorithm.kl_penalty")
    assert kl.get_kl_estimator(f"{__name__}:own_kl", "algorithm.kl_penalty") is own_kl


def test_the_error_of_a_wrong_path_names_the_missing_part():
    with pytest.raises(PluginError, match=r"'no_such_module' is neither a file"):
        advantages.get_adv_estimator_fn("no_such_module:fn")
    with pytest.raises(PluginError, match="has no 'nothing'"):
        advantages.get_adv_estimator_fn(f"{__name__}:nothing")


def test_the_decorator_registers_in_the_table():
    register = advantages.register_adv_est
    assert register("test_names_own")(own) is own
    try:
        assert advantages.get_adv_estimator_fn("test_names_own") is own
        assert advantages.get_estimator("test_names_own").requires == ("values",)
        assert register("test_names_own")(own) is own  # again is fine
        with pytest.raises(ValueError, match="is already"):
            register("test_names_own")(lambda: None)
    finally:
        del advantages.TABLE.entries["test_names_own"]


def test_a_built_in_estimator_may_register_itself_again():
    rloo = advantages.get_adv_estimator_fn("rloo")
    assert advantages.register_adv_est("rloo")(rloo) is rloo
    with pytest.raises(ValueError, match="advantage estimator 'rloo' is already"):
        advantages.register_adv_est("rloo")(own)
    assert advantages.TABLE.is_built_in("rloo")


def test_verls_decorators_register_estimators_and_losses():
    @advantages.register_adv_est("test_names_adv", needs=("rm_scores",))
    def estimator():
        return 1

    @policy_losses.register_policy_loss("test_names_loss")
    def loss():
        return 2

    assert advantages.get_adv_estimator_fn("test_names_adv")() == 1
    assert advantages.get_estimator("test_names_adv").requires == ("rm_scores",)
    assert policy_losses.get_policy_loss_fn("test_names_loss")() == 2
    del (
        advantages.TABLE.entries["test_names_adv"],
        policy_losses.TABLE.entries["test_names_loss"],
    )


def test_enum_members_are_looked_up_by_value():
    from enum import Enum

    class Estimator(str, Enum):
        GRPO = "grpo"

    assert advantages.get_adv_estimator_fn(Estimator.GRPO) is advantages.get_adv_estimator_fn(
        "grpo"
    )


def test_listing_the_tables_does_not_import_torch():
    code = (
        "import sys, hone.algorithms.advantages as a, hone.algorithms.policy_losses as p\n"
        "a.TABLE.names(), p.TABLE.names()\n"
        "assert not [m for m in sys.modules if m.startswith('torch')], 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
