"""The plan: what is read starts its writer or is refused before a model loads, whatever reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.columns import COLUMNS
from hone.config import ConfigError, PPOTrainerConfig
from hone.plugins import PluginError
from hone.trainer.command_line import check_plan
from hone.trainer.ppo.plan import Plan
from hone.verl.dialect import compose, load_config

from ..runs import Task, opened

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"


def reads_nothing(token_level_rewards, response_mask, **columns):  # type: ignore[no-untyped-def]
    """A user's estimator; the tests say what it needs."""
    written = {"token_level_rewards", "response_mask", *columns}
    assert written >= reads_nothing.needs  # type: ignore[attr-defined]
    return token_level_rewards, token_level_rewards


OWN = f"algorithm.adv_estimator={__name__}:reads_nothing"


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def declare(*columns: str) -> list[str]:
        monkeypatch.setattr(reads_nothing, "needs", set(columns), raising=False)
        return [OWN]

    return declare


def planned(*overrides: str) -> Plan:
    """With one update per batch, where the overrides do not say otherwise."""
    return Plan.of(load_config(["data.train_batch_size=256", *overrides]))


STARTED = {
    "ref_log_prob": {"needs_reference"},
    "entropys": {"entropys"},
    "values": {"needs_critic"},
    "old_log_probs": {"old_log_probs", "entropys"},
    "sum_pi_squared": {"sum_pi_squared", "entropys"},
    "reward_baselines": {"needs_greedy_baselines"},
}


@pytest.mark.parametrize("column", [None, *STARTED])
def test_what_an_estimator_of_ones_own_reads_starts_its_writer_and_no_other(
    needs: Callable[..., list[str]], column: str | None
) -> None:
    plan = planned(*needs(*([column] if column else ())))
    switches = ("needs_reference", "needs_critic", "needs_greedy_baselines")
    started = {name for name in switches if getattr(plan, name)}
    expected = STARTED[column] if column else set()
    assert started | set(plan.log_prob_columns) == expected


def test_every_column_an_estimator_reads_is_in_the_batch_or_refused_before_models_load(
    needs: Callable[..., list[str]], task: Task, tmp_path: Path
) -> None:
    """Every declared column, one estimator that reads all that are not refused, one real step."""
    refused = {}
    for column in COLUMNS:
        try:
            planned(*needs(column))
        except ConfigError as error:
            refused[column] = str(error)
    accepted = [column for column in COLUMNS if column not in refused]
    assert all(column in sentence for column, sentence in refused.items())
    assert {"advantages", "returns", "step_mask", "rm_scores", "loss_mask"} <= refused.keys()
    unknowable = {
        name for name in accepted if COLUMNS[name].when.startswith(("the data", "an agent"))
    }
    read = [name for name in accepted if name not in unknowable]
    assert {"ref_log_prob", "values", "entropys", "rollout_log_probs", "uid"} <= set(read)
    more = [f"{ROLLOUT}.n=1", *needs(*read)]
    with opened(task.overrides(tmp_path, *more)) as trainer:
        batch, _ = trainer.step()
    assert set(read) <= set(batch.column_names())


def test_a_warm_up_follows_from_the_columns_not_from_a_name(
    needs: Callable[..., list[str]],
) -> None:
    assert planned("trainer.critic_warmup=5", *needs("values")).needs_critic
    with pytest.raises(ConfigError, match="critic_warmup=5 without a critic"):
        planned("trainer.critic_warmup=5", *needs())


def own_loss(log_prob, response_mask, **columns):  # type: ignore[no-untyped-def]
    return log_prob.sum(), {}


def test_a_loss_declares_what_it_reads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loss, "needs", {"ref_log_prob", "advantages"}, raising=False)
    loss = f"{ACTOR}.policy_loss.loss_mode={__name__}:own_loss"
    assert planned(loss, "algorithm.adv_estimator=grpo").needs_reference
    monkeypatch.setattr(own_loss, "needs", {"rm_scores"})
    with pytest.raises(ConfigError, match=r"loss_mode=.*reads rm_scores, which this run does not"):
        planned(loss, "algorithm.adv_estimator=grpo")


def takes_other_names(logp, adv):  # type: ignore[no-untyped-def]
    return -(logp * adv).mean(), {}


def test_functions_with_unknown_parameters_are_refused_before_a_model_loads() -> None:
    own = f"{__name__}:takes_other_names"
    keys = (f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator", "algorithm.kl_penalty")
    for key in keys:
        with pytest.raises(
            ConfigError, match=rf"{key}={own}: .*test_plan\.py:\d+: the .*logp, adv"
        ):
            planned(f"{key}={own}")


def shorter(token_level_rewards, response_mask, **columns):  # type: ignore[no-untyped-def]
    return token_level_rewards[:, :1], token_level_rewards


def test_advantages_of_another_shape_are_refused(task: Task, tmp_path: Path) -> None:
    named = f"algorithm.adv_estimator={__name__}:shorter"
    with (
        opened(task.overrides(tmp_path, named)) as trainer,
        pytest.raises(
            PluginError, match=r"advantages of shape \(8, 1\) for a response mask of \(8, 6\)"
        ),
    ):
        trainer.step()


def test_what_an_external_library_registers_is_known_to_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registers_for_the_plan.py").write_text(
        "from hone.algorithms.advantages import register_adv_est\n"
        "@register_adv_est('of_the_library', needs=('values',))\n"
        "def estimate(token_level_rewards, response_mask, **columns):\n"
        "    return token_level_rewards, token_level_rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = "algorithm.adv_estimator=of_the_library"
    library = "actor_rollout_ref.model.external_lib=registers_for_the_plan"
    with pytest.raises(ConfigError, match="unknown advantage estimator 'of_the_library'"):
        compose([named], extra_checks=check_plan)
    compose([named, library], extra_checks=check_plan)
    assert planned(named, library).needs_critic


def test_a_typo_in_what_is_read_is_told(needs: Callable[..., list[str]]) -> None:
    with pytest.raises(
        ConfigError, match=r"reads 'vlaues', which no phase writes\. Did you mean 'values'"
    ):
        planned(*needs("vlaues"))
    assert planned(*needs("difficulty"))  # a column of the data


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["actor_rollout_ref.actor.use_kl_loss=true"], True),
    ],
)
def test_the_reference_is_used_when_a_kl_is_asked_for(overrides: list[str], expected: bool) -> None:
    assert planned(*overrides).needs_reference is expected


STRICT = [
    "reward_model.enable=true",
    "reward_model.type=prm",
    "reward_model.model.path=judge",
    "reward_model.credit_assignment=strict min-form",
]


def test_rloo_with_the_strict_minimum_compares_returns_of_tokens() -> None:
    rloo = planned(*STRICT, "algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=2")
    token = planned(*STRICT, "algorithm.adv_estimator=rloo_token", f"{ROLLOUT}.n=2")
    assert rloo.columns == token.columns
    assert {"reward/process", "step_mask"} <= rloo.columns


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "algorithm.adv_estimator=grop",
            "unknown advantage estimator 'grop'. Did you mean 'grpo'?",
        ),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "unknown policy loss 'vanila'. Did you mean"),
        ("reward_manager.name=niave", "unknown reward manager. Did you mean 'naive'?"),
        (f"{ROLLOUT}.name=natve", "unknown rollout engine. Did you mean 'native'?"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agnt", "unknown agent loop. Did you mean"),
    ],
)
def test_an_unknown_name_is_told_with_its_key(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override], extra_checks=check_plan)
    assert f"{override}: {sentence}" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "estimator", "noted"),
    [
        ("algorithm.gamma=0.9", "grpo", True),
        ("algorithm.lam=0.9", "grpo", True),
        ("algorithm.gamma=0.9", "gae", False),
        ("algorithm.norm_adv_by_std_in_grpo=false", "rloo", True),
        ("algorithm.norm_adv_by_std_in_grpo=false", "grpo", False),
    ],
)
def test_an_option_that_the_estimator_does_not_declare_is_noted(
    override: str, estimator: str, noted: bool
) -> None:
    overrides = [f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=2"]
    notes = compose([override, *overrides], extra_checks=check_plan).notes
    assert any(override.partition("=")[0] in note for note in notes) is noted


CASES: dict[str, tuple[list[str], str, list[str]]] = {
    "the strict minimum is a return of tokens": (
        [
            "reward_model.enable=true",
            "reward_model.type=prm",
            "reward_model.model.path=judge",
            "reward_model.credit_assignment=strict min-form",
        ],
        "reward_model.credit_assignment=strict min-form is a token-level return, which "
        "algorithm.adv_estimator=gae does not compute; use algorithm.adv_estimator=rloo_token, or a "
        "temperature such as 0.1",
        ["algorithm.adv_estimator=rloo_token", f"{ROLLOUT}.n=2"],
    ),
    "maxrl needs a group": (
        ["algorithm.adv_estimator=maxrl"],
        "algorithm.adv_estimator=maxrl compares the responses of one prompt, and "
        "actor_rollout_ref.rollout.n=1; use actor_rollout_ref.rollout.n=2 or more",
        [f"{ROLLOUT}.n=2"],
    ),
    "grpo_passk needs a group": (
        ["algorithm.adv_estimator=grpo_passk"],
        "algorithm.adv_estimator=grpo_passk compares the responses of one prompt, and "
        "actor_rollout_ref.rollout.n=1; use actor_rollout_ref.rollout.n=2 or more",
        [f"{ROLLOUT}.n=2"],
    ),
    "gae reads values": (
        ["critic.enable=false"],
        "algorithm.adv_estimator=gae reads values, which this run does not write; use "
        "critic.enable=null or true",
        ["critic.enable=null"],
    ),
    "warm-up needs a critic": (
        ["trainer.critic_warmup=5", "algorithm.adv_estimator=grpo"],
        "trainer.critic_warmup=5 without a critic would train nothing; use 0, or critic.enable=true",
        ["critic.enable=true"],
    ),
    "gdpo needs its parts": (
        ["algorithm.adv_estimator=gdpo"],
        "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the parts to normalise; "
        "set it, for example algorithm.gdpo_reward_keys=[acc,format]",
        ["algorithm.gdpo_reward_keys=[acc]"],
    ),
    "gdpo weights go with its parts": (
        [
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[acc]",
            "algorithm.gdpo_reward_weights=[1,2]",
        ],
        "algorithm.gdpo_reward_weights has 2 numbers for 1 algorithm.gdpo_reward_keys; "
        "give one each, or null",
        ["algorithm.gdpo_reward_weights=[1]"],
    ),
    "the KL estimator exists": (
        ["algorithm.kl_penalty=k9"],
        "algorithm.kl_penalty=k9: unknown KL estimator 'k9'. Known: abs, k1, k2, k3, "
        'kl, low_var_kl, mse; or your own as "pkg.mod:object" or "file.py:object"; each also with a '
        "trailing +",
        ["algorithm.kl_penalty=k3+"],
    ),
    "correction reads rollout log-probs": (
        ["algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"],
        "algorithm.rollout_correction reads rollout_log_probs, which this run does not write; use "
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        [f"{ROLLOUT}.calculate_log_probs=true"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tree_that_cannot_run_is_refused_with_values_that_work(name: str) -> None:
    overrides, sentence, repair = CASES[name]
    for refuse in (planned, lambda *o: compose(o, extra_checks=check_plan)):
        with pytest.raises(ConfigError) as caught:
            refuse(*overrides)
        assert caught.value.problems == [sentence]
    planned(*overrides, *repair)


def test_problems_of_the_tree_and_of_its_plan_are_told_at_once() -> None:
    overrides = [
        "algorithm.adv_estimator=maxrl",
        "data.train_batch_size=100",
        "trainer.n_gpus_per_node=8",
    ]
    with pytest.raises(ConfigError) as caught:
        compose(overrides, extra_checks=check_plan)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["algorithm.adv_estimator=grpo", "critic.optim.lr=1"], "critic.optim.lr", "no critic"),
        (["actor_rollout_ref.ref.log_prob_micro_batch_size=1"], "actor_rollout_ref.ref", "no KL"),
    ],
)
def test_a_key_that_the_plan_makes_idle_is_noted(overrides: list[str], key: str, why: str) -> None:
    (note,) = compose(overrides, extra_checks=check_plan).notes
    assert note.startswith(key)
    assert why in note


def test_config_knows_no_estimator_by_name() -> None:
    from hone.algorithms.advantages import TABLE

    folder = Path(sys.modules[PPOTrainerConfig.__module__].__file__ or "").parent
    rules = (folder / "rules.txt").read_text()
    text = (folder / "checks.py").read_text() + rules
    assert [name for name in TABLE.names() if f'"{name}"' in text or f"={name}" in text] == []
