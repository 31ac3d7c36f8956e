"""Names: one table, did-you-mean, users' own by path or decorator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hone.algorithms import advantages, policy_losses
from hone.algorithms.lookup import Entry, Table, UnknownName


def own(token_level_rewards, response_mask, index=None, config=None, *, values, **kw):
    return values, values


own.needs = ("values",)


@pytest.mark.parametrize("room", [advantages, policy_losses])
def test_every_name_of_the_table_can_be_loaded(room):
    for name in room.TABLE.names():
        assert callable(room.TABLE.get(name))


def test_the_table_knows_what_each_estimator_reads():
    assert advantages.needs("gae") == ("values",)
    assert advantages.needs("remax") == ("reward_baselines",)
    assert advantages.needs("grpo") == ()
    assert advantages.optional("grpo") == ("trajectory_id",)


def test_an_unknown_name_gets_a_proposal_and_the_list():
    with pytest.raises(ValueError, match=r"Did you mean 'grpo'.*Known: .*rloo"):
        advantages.get_adv_estimator_fn("gropo")
    with pytest.raises(UnknownName, match=r"Did you mean 'vanilla'.*Known: .*gspo"):
        policy_losses.get_policy_loss_fn("vannila")
    with pytest.raises(ValueError, match=r"unknown policy loss 'zzzzzz'. Known"):
        policy_losses.get_policy_loss_fn("zzzzzz")


def test_a_users_own_is_found_by_path_with_its_needs():
    path = f"{__name__}:own"
    assert advantages.get_adv_estimator_fn(path) is own
    assert advantages.needs(path) == ("values",)


def test_a_wrong_path_says_which_part_is_missing():
    with pytest.raises(UnknownName, match=r"cannot import 'no_such_module'"):
        advantages.get_adv_estimator_fn("no_such_module:fn")
    with pytest.raises(UnknownName, match="has no 'nothing'"):
        advantages.get_adv_estimator_fn(f"{__name__}:nothing")


def test_the_decorator_ends_in_the_same_table():
    table = Table("thing", {"old": Entry(f"{__name__}:own")})
    assert table.register("mine")(own) is own
    assert table.get("mine") is own
    assert table.entry("mine").needs == ("values",)
    assert table.register("mine")(own) is own  # again is fine
    assert table.register("old")(own) is own  # and so is what the table already points to
    with pytest.raises(ValueError, match="already registered"):
        table.register("mine")(lambda: None)


def test_the_rooms_offer_the_decorators_of_the_family():
    @advantages.register_adv_est("test_lookup_adv", needs=("rm_scores",))
    def estimator():
        return 1

    @policy_losses.register_policy_loss("test_lookup_loss")
    def loss():
        return 2

    assert advantages.get_adv_estimator_fn("test_lookup_adv")() == 1
    assert advantages.needs("test_lookup_adv") == ("rm_scores",)
    assert policy_losses.get_policy_loss_fn("test_lookup_loss")() == 2
    del (
        advantages.TABLE._entries["test_lookup_adv"],
        policy_losses.TABLE._entries["test_lookup_loss"],
    )


def test_enum_members_are_taken_by_value():
    from enum import Enum

    class Estimator(str, Enum):
        GRPO = "grpo"

    assert advantages.get_adv_estimator_fn(Estimator.GRPO) is advantages.get_adv_estimator_fn(
        "grpo"
    )


def test_looking_at_the_tables_imports_no_algorithm():
    code = (
        "import sys, hone.algorithms.advantages as a, hone.algorithms.policy_losses as p\n"
        "a.needs('gae'), a.TABLE.names(), p.TABLE.names()\n"
        "assert not [m for m in sys.modules if m.startswith('torch')], 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
