"""Each check of several keys reports its problem and names values, and these values work."""

from __future__ import annotations

import pytest

from hone.config import ConfigError, PPOTrainerConfig
from hone.config.checks import divisors_advice, multiples_advice
from hone.config.keys import get, leaves
from hone.config.ranges import Range
from hone.verl.dialect import compose, load_config

RANGES = {key: leaf.bounds for key, leaf in leaves(PPOTrainerConfig).items() if leaf.bounds}
ACTOR = "actor_rollout_ref.actor"
SERVER = "http://127.0.0.1:8000"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"

CASES: dict[str, tuple[list[str], str, list[str]]] = {
    "ranks divide the batch": (
        ["trainer.n_gpus_per_node=8", "data.train_batch_size=100"],
        "data.train_batch_size=100 is not divisible by 8 data-parallel ranks; use 96 or 104",
        ["data.train_batch_size=96"],
    ),
    "responses count towards the ranks": (
        ["trainer.n_gpus_per_node=8", "data.train_batch_size=3", f"{ROLLOUT}.n=4"],
        "data.train_batch_size=3 times rollout.n=4 is not divisible by 8 data-parallel ranks; use 2 or 4",
        ["data.train_batch_size=4"],
    ),
    "filtering needs groups": (
        ["algorithm.filter_groups.enable=true"],
        "algorithm.filter_groups.enable=true needs groups, and actor_rollout_ref.rollout.n=1; "
        "use actor_rollout_ref.rollout.n=2 or more",
        [f"{ROLLOUT}.n=2"],
    ),
    "filtering needs a metric": (
        [
            "algorithm.filter_groups.enable=true",
            f"{ROLLOUT}.n=2",
            "algorithm.filter_groups.metric=null",
        ],
        "algorithm.filter_groups.metric=null; use reward, acc, or the name of a reward extra",
        ["algorithm.filter_groups.metric=acc"],
    ),
    "a micro-batch is given once": (
        [f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
        f"{ACTOR}.ppo_micro_batch_size=8 and {ACTOR}.ppo_micro_batch_size_per_gpu=4 say the same "
        f"thing twice; keep {ACTOR}.ppo_micro_batch_size_per_gpu",
        [f"{ACTOR}.ppo_micro_batch_size=null"],
    ),
    "the model length leaves room for a response": (
        [f"{ROLLOUT}.max_model_len=512"],
        f"{ROLLOUT}.max_model_len=512 leaves no room for a response to a prompt of 512 tokens; "
        "raise it, or lower data.max_prompt_length",
        [f"{ROLLOUT}.max_model_len=513"],
    ),
    "sampling needs a temperature": (
        [f"{ROLLOUT}.temperature=0"],
        f"{ROLLOUT}.temperature=0 with do_sample=true samples nothing; use temperature=1.0, or "
        "do_sample=false to decode greedily",
        [f"{ROLLOUT}.do_sample=false"],
    ),
    "greedy groups are all equal": (
        [f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.n=4"],
        f"{ROLLOUT}.do_sample=false gives 4 equal responses per prompt; use do_sample=true, or n=1",
        [f"{ROLLOUT}.n=1"],
    ),
    "dro needs its beta": (
        [f"{ACTOR}.policy_loss.loss_mode=dro"],
        f"{ACTOR}.policy_loss.dro_beta=null with loss_mode=dro; use a number above 0",
        [f"{ACTOR}.policy_loss.dro_beta=0.1"],
    ),
    "the rejection option exists": (
        [
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_sum_k9'",
            "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        ],
        "algorithm.rollout_correction.rollout_rs=seq_sum_k9 is unknown. Did you mean 'seq_sum_k3'? Use "
        "token_k1, token_k2, token_k3, seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, seq_mean_k2, "
        "seq_mean_k3, seq_max_k2, seq_max_k3",
        ["algorithm.rollout_correction.rollout_rs=token_k1"],
    ),
    "rejection needs a threshold": (
        ["algorithm.rollout_correction.rollout_rs=token_k1"],
        "algorithm.rollout_correction.rollout_rs=token_k1 needs "
        "algorithm.rollout_correction.rollout_rs_threshold, for example 2.0",
        ["algorithm.rollout_correction.rollout_rs_threshold=2.0"],
    ),
    "each rejection option has a bound": (
        [
            f"{CORRECTION}.rollout_rs=[token_k1,token_k2]",
            f"{CORRECTION}.rollout_rs_threshold=[1,2,3]",
        ],
        f"{CORRECTION}.rollout_rs_threshold=[1,2,3] has 3 bounds for 2 options (token_k1, token_k2); "
        "give one for all options, or one for each",
        [f"{CORRECTION}.rollout_rs_threshold=[1,2]"],
    ),
    "a bound of k2 is one number": (
        [f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=0.5_2"],
        f"{CORRECTION}.rollout_rs_threshold=0.5_2: k2 takes one upper bound, such as 0.01",
        [f"{CORRECTION}.rollout_rs_threshold=0.01"],
    ),
    "a bound of weights is positive": (
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=-1"],
        f"{CORRECTION}.rollout_is_threshold=-1 is not a bound; write one number above 0 (2.0) or lo_hi "
        "(0.5_2.0)",
        [f"{CORRECTION}.rollout_is_threshold=0.5_2"],
    ),
    "a loss has no mean over the batch": (
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        f"{CORRECTION}.rollout_is_batch_normalize=true needs a mean over the whole batch, which a loss "
        "in bypass_mode does not have; set it or bypass_mode to false",
        [f"{CORRECTION}.rollout_is_batch_normalize=false"],
    ),
    "bypass loss without bypass mode": (
        [f"{ACTOR}.policy_loss.loss_mode=bypass_mode"],
        f"{ACTOR}.policy_loss.loss_mode=bypass_mode needs {CORRECTION}.bypass_mode=true, which chooses "
        "that loss by itself and takes the rollout's log-probs as the old ones",
        [f"{CORRECTION}.bypass_mode=true"],
    ),
    "a reward model has a path": (
        ["reward_model.enable=true"],
        "reward_model.enable=true needs reward_model.model.path, or reward_model.server.url",
        ["reward_model.model.path=my/reward"],
    ),
    "a served reward model scores whole responses": (
        ["reward_model.enable=true", "reward_model.type=prm", f"reward_model.server.url={SERVER}"],
        f"reward_model.server.url={SERVER} scores whole responses, and reward_model.type=prm; use "
        "type=orm, or url=null",
        ["reward_model.type=orm", "reward_model.model.path=my/reward"],
    ),
    "a reward model's pool has nodes": (
        [
            "reward_model.enable=true",
            "reward_model.model.path=m",
            "reward_model.enable_resource_pool=true",
        ],
        "reward_model.enable_resource_pool=true needs reward_model.nnodes, for example 1",
        ["reward_model.nnodes=1"],
    ),
    "a reward model's pool is on Ray": (
        [
            "reward_model.enable=true",
            "reward_model.model.path=m",
            "trainer.controller=local",
            "reward_model.enable_resource_pool=true",
            "reward_model.nnodes=1",
        ],
        "trainer.controller=local is one process, and the reward model has a pool of its own; use "
        "trainer.controller=ray, or reward_model.enable_resource_pool=false",
        ["trainer.controller=ray"],
    ),
    "votes of a judge differ": (
        [
            "reward_model.enable=true",
            "reward_model.model.path=m",
            "reward_model.type=judge",
            "reward_model.judge.votes=3",
        ],
        "reward_model.judge.votes=3 with temperature=0 asks for the same grade again; use "
        "reward_model.judge.temperature=0.7, or votes=1",
        ["reward_model.judge.temperature=0.7"],
    ),
    "a served classifier needs a template": (
        ["reward_model.enable=true", f"reward_model.server.url={SERVER}"],
        "reward_model.server.kind=classify needs reward_model.model.path, whose tokenizer and chat "
        "template render the conversation; name its folder, or use kind=score or texts",
        ["reward_model.server.kind=score"],
    ),
    "an imported manager has a file": (
        ["reward_manager.source=importlib"],
        "reward_manager.source=importlib needs reward_manager.module.path, the file of your class",
        ["reward_manager.module.path=my.py"],
    ),
    "some reward exists": (
        ["reward_model.reward_manager=blank"],
        "reward_manager.name=blank gives no score and reward_model.enable=false, so there is no reward "
        "at all; use naive, or reward_model.enable=true",
        ["reward_model.reward_manager=naive"],
    ),
    "credit assignment has a name": (
        ["reward_model.credit_assignment=median"],
        "reward_model.credit_assignment=median is unknown. Use gamma-decay, strict min-form, or a "
        "temperature above 0",
        ["reward_model.credit_assignment='strict min-form'"],
    ),
    "credit temperature is positive": (
        ["reward_model.credit_assignment=0"],
        "reward_model.credit_assignment=0; a temperature must be above 0, such as 0.1",
        ["reward_model.credit_assignment=1"],
    ),
    "the overlong buffer lies in the response": (
        ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=600"],
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=600 lies outside the response (1 to 512 "
        "tokens); use for example 102",
        ["reward_model.overlong_buffer.len=102"],
    ),
    "weights go with files": (
        ["data.train_files=[a,b]", "data.dataset_weights=[1]"],
        "data.dataset_weights has 1 numbers for 2 data.train_files; give one each",
        ["data.dataset_weights=[0.5,0.5]"],
    ),
    "weights are shares": (
        ["data.dataset_weights=[0]"],
        "data.dataset_weights must be 0 or more, and not all 0; use for example [0.7,0.3]",
        ["data.dataset_weights=[1]"],
    ),
    "a sampler has file and class": (
        ["data.sampler.class_path=my.py"],
        "data.sampler needs both class_path and class_name, or neither",
        ["data.sampler.class_name=Mine"],
    ),
    "a dataset class has a name": (
        ["data.custom_cls.path=my.py"],
        "data.custom_cls.path needs data.custom_cls.name, the class in that file",
        ["data.custom_cls.name=Mine"],
    ),
    "a generator of rows has a name": (
        ["data.datagen.path=my.py"],
        "data.datagen.path needs data.datagen.name, the class in that file",
        ["data.datagen.name=Mine"],
    ),
    "one process is one rank": (
        ["trainer.controller=local", "trainer.n_gpus_per_node=2"],
        "trainer.controller=local is one process, and nnodes=1 times n_gpus_per_node=2 is 2; use "
        "trainer.controller=ray, or 1 and 1",
        ["trainer.controller=ray"],
    ),
    "a resume path is given": (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder",
        ["trainer.resume_from_path=x/global_step_3"],
    ),
    "the tracker exists": (
        ["trainer.logger=[console,wandbb]"],
        "trainer.logger=wandbb is unknown. Did you mean 'wandb'? Use console, jsonl, file, "
        "tensorboard, wandb, mlflow, swanlab, or your own as pkg.mod:object",
        ["trainer.logger=[console,wandb]"],
    ),
    "the checkpoint part exists": (
        [f"{ACTOR}.checkpoint.save_contents=[weights]"],
        f"{ACTOR}.checkpoint.save_contents=weights is unknown. Use model, optimizer, extra, hf_model",
        [f"{ACTOR}.checkpoint.save_contents=[model]"],
    ),
    "the shard group divides the ranks": (
        [f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=8"],
        f"{ACTOR}.fsdp_config.fsdp_size=3 does not divide 8 ranks; use -1, or 2 or 4",
        [f"{ACTOR}.fsdp_config.fsdp_size=4"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tree_that_cannot_run_is_refused_with_values_that_work(name: str) -> None:
    overrides, sentence, repair = CASES[name]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert caught.value.problems == [sentence]
    load_config([*overrides, *repair])


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef", "use_kl_in_reward=false"),
        ([f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef", "use_kl_loss=false"),
        (["reward_model.model.path=m"], "reward_model.model.path", "reward_model.enable=false"),
        (
            [f"{ACTOR}.fsdp_config.offload_policy=true"],
            f"{ACTOR}.fsdp_config.offload_policy",
            "there is one rank; param_offload and optimizer_offload work there",
        ),
        ([f"{CORRECTION}.loss_type=reinforce"], f"{CORRECTION}.loss_type", "without bypass"),
        (
            [f"{ROLLOUT}.multi_turn.max_assistant_turns=2"],
            f"{ROLLOUT}.multi_turn",
            "single_turn_agent",
        ),
        (
            [f"{ROLLOUT}.multi_turn.enable=true"],
            f"{ROLLOUT}.multi_turn.enable",
            "single_turn_agent",
        ),
        (["actor_rollout_ref.model.lora_alpha=8"], "actor_rollout_ref.model", "lora_rank=0"),
        ([f"{ACTOR}.policy_loss.kl_cov_ratio=0.1"], f"{ACTOR}.policy_loss", "without kl_cov"),
        (["algorithm.filter_groups.metric=acc"], "algorithm.filter_groups.metric", "enable=false"),
        (["reward_model.micro_batch_size=4"], "reward_model.micro_batch_size", "enable=false"),
        (["retriever.topk=5", "do_search=false"], "retriever.topk", "rows do not search"),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path", "resume_mode=auto"),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.policy_loss.loss_mode=gspo"],
            f"{ACTOR}.policy_loss.loss_mode",
            "loss_type chooses the loss",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            f"{CORRECTION}.rollout_is",
            "loss_type=ppo_clip: its ratio is the weight",
        ),
        (
            [f"{CORRECTION}.rollout_is_threshold=3"],
            f"{CORRECTION}.rollout_is_threshold",
            "rollout_is=null",
        ),
        (
            [f"{CORRECTION}.rollout_is_batch_normalize=true"],
            f"{CORRECTION}.rollout_is_batch_normalize",
            "rollout_is=null",
        ),
        (
            [f"{CORRECTION}.rollout_rs_threshold=3"],
            f"{CORRECTION}.rollout_rs_threshold",
            "rollout_rs=null",
        ),
    ],
)
def test_a_key_without_effect_because_of_another_is_noted(
    overrides: list[str], key: str, why: str
) -> None:
    (note,) = compose(overrides).notes
    assert note.startswith(key)
    assert "no effect " in note
    assert why in note


@pytest.mark.parametrize(("tool", "notes"), [("nsys", 0), ("torch", 1)])
def test_a_key_of_an_option_has_an_effect_with_that_option(tool: str, notes: int) -> None:
    overrides = [f"global_profiler.tool={tool}", "global_profiler.steps=[1]"]
    composed = compose([*overrides, "global_profiler.nsys_options.trace=cuda"])
    assert [note.endswith("no effect without nsys") for note in composed.notes] == [True] * notes


IDLE = [
    ([f"{ACTOR}.loss_scale_factor=9"], "seq-mean-token-sum-norm"),
    (
        [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.loss_agg_mode=token-sum"],
        "is aggregated by",
    ),
    ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.clip_ratio=0.1"], "does not clip"),
    ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=9"], "has no dual clip"),
    (
        [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.3"],
        "clip_ratio_low and clip_ratio_high replace it",
    ),
    (["custom_reward_function.name=mine"], "custom_reward_function.path=null"),
    (["reward_manager.module.path=mine.py"], "reward_manager.source=register"),
    (
        [f"reward_model.reward_kwargs.overlong_buffer_cfg.{x}" for x in ("enable=true", "len=9")],
        "the manager dapo",
    ),
    (["data.val_files=null", "trainer.test_freq=5"], "there are no data.val_files"),
    ([f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.top_p=0.9"], "greedy"),
    ([f"{ROLLOUT}.val_kwargs.top_p=0.9"], "greedy"),
    (
        [f"actor_rollout_ref.model.{x}" for x in ("lora_adapter_path=a", "lora_rank=8")],
        "has settings of its own",
    ),
    (["reward_model.server.url=http://127.0.0.1:1"], "reward_model.enable=false"),
    ([f"{ACTOR}.optim.min_lr_ratio=0.1"], "no floor"),
    (
        [f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_decay_steps_ratio=0.3"],
        "only the wsd schedule",
    ),
]


@pytest.mark.parametrize(("overrides", "note"), IDLE)
def test_a_key_without_effect_beside_the_other_keys_is_noted(
    overrides: list[str], note: str
) -> None:
    assert len([text for text in compose(overrides).notes if note in text]) == 1


@pytest.mark.parametrize("tree", ["sft_trainer", "prm_trainer", "rm_trainer"])
def test_supervised_runs_note_keys_without_effect_too(tree: str) -> None:
    overrides = [
        "data.micro_batch_size_per_gpu=4",
        "model.lora_dropout=0.1",
        "trainer.resume_from_path=/x",
        "optim.num_cycles=2",
        "optim.lr_scheduler_type=linear",
    ]
    assert len(compose(overrides, config_name=tree).notes) == 4
    twice = [*overrides, "data.micro_batch_size=4"]
    with pytest.raises(ConfigError, match="say the same thing twice"):
        compose(twice, config_name=tree)


def test_keys_that_take_effect_are_not_noted() -> None:
    assert compose(["critic.optim.lr=1", "trainer.seed=3"]).notes == ()


SETTLED: list[tuple[list[str], str, object, str]] = [
    (
        ["data.max_response_length=20000", f"{ACTOR}.ppo_max_token_len_per_gpu=4096"],
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        20512,
        "must hold its part of the longest row, so it is 20512",
    ),
    (
        [
            "data.max_response_length=20000",
            "trainer.n_gpus_per_node=2",
            "reward_model.enable=true",
            "reward_model.type=prm",
            "reward_model.model.path=prm",
            "reward_model.ulysses_sequence_parallel_size=2",
            "reward_model.forward_max_token_len_per_gpu=4096",
        ],
        "reward_model.forward_max_token_len_per_gpu",
        10257,  # half of a row that ends with a padding token
        "must hold its part of the longest row, so it is 10257",
    ),
    (
        [
            "data.max_response_length=20000",
            "reward_model.enable=true",
            "reward_model.type=orm",
            "reward_model.model.path=rm",
            "reward_model.max_length=6000",
            "reward_model.forward_max_token_len_per_gpu=4096",
        ],
        "reward_model.forward_max_token_len_per_gpu",
        6000,
        "must hold its part of the longest row, so it is 6000",
    ),
    ([f"{ACTOR}.rollout_n=5", f"{ROLLOUT}.n=4"], f"{ACTOR}.rollout_n", 4, "n=4 responses"),
    (
        ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=64"],
        "critic.ppo_mini_batch_size",
        16,
        f"{ACTOR}.ppo_mini_batch_size=64: a step has data.train_batch_size=16 prompts",
    ),
    (
        ["trainer.nnodes=", "trainer.n_gpus_per_node=", f"{ROLLOUT}.tensor_model_parallel_size="],
        f"{ROLLOUT}.n_gpus_per_node",
        1,
        "as after an unset shell variable",
    ),
    ([f"{ROLLOUT}.val_kwargs.n=4"], f"{ROLLOUT}.val_kwargs.n", 4, "are all the same"),
    (
        ["reward_model.overlong_buffer.enable=true"],
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        False,
        "penalises nothing",
    ),
    (
        [f"{ROLLOUT}.dtype=bfloat16", "trainer.device=cpu"],
        "trainer.device",
        "cpu",
        "in their dtype",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "value", "note"), SETTLED)
def test_a_value_that_trains_the_same_is_adjusted_with_a_note(
    overrides: list[str], key: str, value: object, note: str
) -> None:
    composed = compose(overrides)
    assert get(composed.config, key) == value
    assert len([text for text in composed.notes if note in text]) == 1


def test_verls_names_of_the_plain_manager_and_keys_of_its_reward_server_compose() -> None:
    composed = compose(["reward.reward_manager.name=gdpo", "reward_model.inference.name=vllm"])
    assert composed.config.reward_manager.name == "naive"
    assert composed.notes == ()


@pytest.mark.parametrize("role", [ACTOR, "actor_rollout_ref.ref", "critic"])
def test_the_shards_of_a_custom_engine_are_its_own(role: str) -> None:
    block = "critic.model" if role == "critic" else role
    load_config(
        [
            f"{role}.strategy=my.module:Engine",
            f"{block}.fsdp_config.fsdp_size=3",
            "actor_rollout_ref.ref.fsdp_config.fsdp_size=-1",
            "trainer.n_gpus_per_node=4",
        ]
        if role == ACTOR
        else [
            f"{role}.strategy=my.module:Engine",
            f"{block}.fsdp_config.fsdp_size=3",
            "trainer.n_gpus_per_node=4",
        ]
    )


def test_a_default_budget_grows_with_the_rows_and_needs_no_note() -> None:
    composed = compose(["data.max_response_length=40000"])
    assert composed.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 40512
    assert composed.notes == ()


@pytest.fixture
def has_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: object())


BUDGETS = [
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
]
LONG = ["data.max_response_length=79488", "trainer.n_gpus_per_node=2", "data.train_batch_size=8"]
SPLIT = [f"{ACTOR}.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2"]
LONG_REF = [40000, 40000, 80000, 40000, 40000]
MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron"]


@pytest.mark.parametrize(
    ("overrides", "budgets"),
    [
        ([], [80000] * 5),
        (SPLIT, [40000] * 5),
        ([*SPLIT, "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"], LONG_REF),
        ([*SPLIT, *MEGATRON], [80000] * 5),
        ([*SPLIT, "actor_rollout_ref.ref.strategy=megatron"], LONG_REF),
    ],
)
def test_every_budget_holds_the_longest_row_of_its_own_layout(
    overrides: list[str], budgets: list[int], has_megatron: None
) -> None:
    config = load_config([*LONG, *overrides])
    assert [get(config, key) for key in BUDGETS] == budgets


def test_the_reference_has_the_layout_of_the_actor() -> None:
    sizes = [f"{ACTOR}.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"]
    assert load_config(sizes).actor_rollout_ref.ref.fsdp_config.tensor_parallel_size == 2
    own = "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size=1"
    assert load_config([*sizes, own]).actor_rollout_ref.ref.fsdp_config.tensor_parallel_size == 1


def test_without_megatron_the_budgets_are_those_of_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.config.checks.find_spec", lambda name: None)
    config = load_config([*LONG, *SPLIT, *MEGATRON])
    assert [get(config, key) for key in BUDGETS] == [40000] * 5


def test_megatron_replays_expert_routing_unless_a_pipeline_splits_the_layers(
    has_megatron: None,
) -> None:
    replay = [*MEGATRON, f"{ACTOR}.router_replay.mode=R2", "trainer.n_gpus_per_node=2"]
    replay += ["data.train_batch_size=8"]
    sizes = f"{ACTOR}.megatron.expert_model_parallel_size=2"
    assert load_config([*replay, sizes]).actor_rollout_ref.actor.strategy == "megatron"
    composed = compose([*replay, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"])
    assert composed.config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert any("replays expert routing without pipeline parallel" in n for n in composed.notes)


def test_one_rank_has_one_stage_and_replays_under_megatron(has_megatron: None) -> None:
    sizes = [f"{ACTOR}.megatron.pipeline_model_parallel_size=2", f"{ACTOR}.router_replay.mode=R2"]
    config = load_config([*MEGATRON, *sizes])
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    assert config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size == 1


def test_an_actor_of_fsdp2_replays_beside_a_pipeline_of_the_critic(has_megatron: None) -> None:
    settings = ["critic.strategy=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2"]
    settings += [f"{ACTOR}.router_replay.mode=R2", "trainer.n_gpus_per_node=2"]
    config = load_config([*settings, "data.train_batch_size=8"])
    assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == (
        "fsdp2",
        "megatron",
    )


@pytest.mark.parametrize(
    "size",
    [
        "ulysses_sequence_parallel_size=2",
        "fsdp_config.ulysses_sequence_parallel_size=2",
        "fsdp_config.tensor_parallel_size=2",
        "use_torch_compile=true",
        "fsdp_config.use_torch_compile=true",
    ],
)
def test_sizes_that_megatron_does_not_read_do_not_stop_its_replay(
    size: str, has_megatron: None
) -> None:
    settings = [f"{ACTOR}.{size}", f"{ACTOR}.router_replay.mode=R2", "trainer.n_gpus_per_node=2"]
    settings += ["data.train_batch_size=8"]
    with pytest.raises(ConfigError, match=r"router_replay\.mode=R2"):
        load_config(settings)
    assert load_config([*settings, *MEGATRON]).actor_rollout_ref.actor.strategy == "megatron"


def test_the_reference_computes_router_logits_as_the_actor_does() -> None:
    key = "megatron.override_transformer_config"
    actor, ref = f"+{ACTOR}.{key}.moe_router_dtype=fp32", f"+actor_rollout_ref.ref.{key}"
    for more, expected in (
        ([], {"moe_router_dtype": "fp32"}),
        ([f"{ref}.moe_router_dtype=fp64"], {"moe_router_dtype": "fp64"}),
        (
            [f"{ref}.recompute_num_layers=1"],
            {"recompute_num_layers": 1, "moe_router_dtype": "fp32"},
        ),
    ):
        config = load_config([actor, *more])
        assert get(config, f"actor_rollout_ref.ref.{key}") == expected


def test_experts_split_over_more_ranks_than_the_run_has_are_refused(has_megatron: None) -> None:
    ranks = [*MEGATRON, "trainer.n_gpus_per_node=2", "data.train_batch_size=8"]
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size=3 times .* divide 2 ranks"):
        load_config([*ranks, f"{ACTOR}.megatron.expert_model_parallel_size=3"])


@pytest.mark.parametrize(
    ("role", "block"), [(ACTOR, ACTOR), ("actor_rollout_ref.ref",) * 2, ("critic", "critic.model")]
)
@pytest.mark.parametrize(
    "setting",
    [
        "ulysses_sequence_parallel_size=2",
        "fsdp_size=3",
        "offload_policy=true",
        "reshard_after_forward=false",
        "use_torch_compile=true",
    ],
)
def test_megatron_notes_what_it_does_not_read_of_the_sharding(
    role: str, block: str, setting: str, has_megatron: None
) -> None:
    ranks = ["trainer.n_gpus_per_node=2", "data.train_batch_size=8"]
    written = f"{block}.fsdp_config.{setting}"
    notes = compose([*ranks, f"{role}.strategy=megatron", written]).notes
    assert any(written in note and "no effect while strategy=megatron" in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        ([], False),
        (["temperature=1.0", "n=30"], True),
        (["temperature=1.0", "do_sample=false"], False),
        (["do_sample=true"], False),
        (["top_p=0.7"], False),
    ],
)
def test_validation_samples_where_it_has_a_temperature(overrides: list[str], samples: bool) -> None:
    config = load_config([f"{ROLLOUT}.val_kwargs.{text}" for text in overrides])
    assert config.actor_rollout_ref.rollout.val_kwargs.uses_sampling is samples


@pytest.mark.parametrize(
    ("override", "near"),
    [
        (f"{ACTOR}.optim.lr_scheduler_type=cosin", "cosine"),
        (f"{ACTOR}.strategy=fsdp_2", "fsdp2"),
    ],
)
def test_an_unknown_schedule_or_engine_is_named_with_its_key(override: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    (problem, *_) = caught.value.problems
    assert problem.startswith(f"{override} is unknown. Did you mean '{near}'?")


def test_the_last_mini_batch_of_a_step_may_be_smaller_and_uneven_over_the_ranks() -> None:
    mini = f"{ACTOR}.ppo_mini_batch_size"
    load_config(["data.train_batch_size=1024", f"{mini}=80"])
    load_config(["trainer.n_gpus_per_node=96", "data.train_batch_size=96", f"{mini}=32"])


def test_greedy_groups_are_accepted_if_the_run_only_validates() -> None:
    load_config([f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.n=4", "trainer.val_only=true"])


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(100, 8, "use 96 or 104"), (3, 8, "use 8"), (16, 8, "use 16 or 24")]
)
def test_multiples_surround_the_value(value: int, unit: int, text: str) -> None:
    assert multiples_advice(value, unit) == text


@pytest.mark.parametrize(
    ("value", "near", "text"),
    [(1000, 256, "use 250 or 500"), (7, 3, "use 1 or 7"), (8, 8, "use 8")],
)
def test_divisors_surround_the_value(value: int, near: int, text: str) -> None:
    assert divisors_advice(value, near) == text


@pytest.mark.parametrize("key", sorted(RANGES))
def test_every_ranged_key_refuses_a_number_outside(key: str) -> None:
    bounds = RANGES[key]
    bad = int(max(bounds.least, bounds.above)) - 3
    with pytest.raises(ConfigError) as caught:
        load_config([f"{key}={bad}"])
    assert caught.value.problems == [f"{key}={bad} is out of range; use {bounds} (command line)"]
    assert bounds.holds(get(load_config(), key) or 1)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Range(least=1), [1, 2], [0, -1], "1 or more"),
        (Range(above=0, most=1), [0.1, 1], [0, 1.1], "above 0 and at most 1"),
        (Range(least=0, minus_one=True), [-1, 0], [-2], "0 or more, or -1"),
        (Range(least=0), [0], [float("nan"), float("inf")], "0 or more"),
    ],
)
def test_ranges_contain_numbers_and_describe_themselves(
    bounds: Range, inside: list[float], outside: list[float], words: str
) -> None:
    assert all(bounds.holds(v) for v in inside)
    assert not any(bounds.holds(v) for v in outside)
    assert str(bounds) == words


def test_a_tracker_of_the_users_own_is_named_by_its_path() -> None:
    config = load_config(["trainer.logger=[console,ext.py:Track]"])
    assert config.trainer.logger == ("console", "ext.py:Track")
