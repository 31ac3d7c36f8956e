"""Mistakes on the command line and in settings."""

from __future__ import annotations

from .cases import MODEL, MULTI_TURN, ROLLOUT, Mistake, train

ACTOR = "actor_rollout_ref.actor"

MISTAKES = [
    Mistake("a misspelt verb", ["trian"], ("no verb 'trian'", "Did you mean 'train'")),
    Mistake(
        "a setting given as an option",
        ["train", "--train_files", "rows.jsonl"],
        ("no option --train_files", "key=value", "data.train_files=VALUE"),
    ),
    Mistake(
        "a word that is no setting",
        ["train", "grpo"],
        ("'grpo'", "key=value"),
    ),
    Mistake("no model", ["train", "data.train_files=rows.jsonl"], (MODEL, "was not given")),
    Mistake("no data", ["train", f"{MODEL}=model"], ("data.train_files", "was not given")),
    Mistake(
        "a setting of TRL",
        train("num_generations=4"),
        ("no key 'num_generations'", "In hone it is n."),
    ),
    Mistake(
        "a setting of TRL given as an option",
        ["train", "--learning_rate", "1e-5"],
        ("no option --learning_rate", "In hone it is lr."),
    ),
    Mistake(
        "a setting of TRL that hone does not need",
        train("logging_steps=1"),
        ("no key 'logging_steps'", "every step is logged"),
    ),
    Mistake(
        "weights of 4 bits",
        train("actor_rollout_ref.model.load_in_4bit=true"),
        ("no key 'load_in_4bit'", "not supported yet"),
    ),
    Mistake(
        "an estimator for DPO",
        train("algorithm.adv_estimator=dpo"),
        ("'dpo'", "a loss of `hone dpo`"),
    ),
    Mistake(
        "a misspelt key",
        train("data.train_file=rows.jsonl"),
        ("no key 'train_file'", "Did you mean 'train_files'"),
    ),
    Mistake(
        "a misspelt estimator",
        train("algorithm.adv_estimator=gpro"),
        ("gpro", "Did you mean 'grpo'"),
    ),
    Mistake(
        "a misspelt loss",
        train(f"{ACTOR}.policy_loss.loss_mode=vanila"),
        ("vanila", "Did you mean 'vanilla'"),
    ),
    Mistake("a word for a number", train(f"{ROLLOUT}.n=four"), ("n=four", "an integer")),
    Mistake("a word for a learning rate", train(f"{ACTOR}.optim.lr=fast"), ("lr=fast", "a number")),
    Mistake(
        "nothing for the data",
        train("data.train_files=null"),
        ("data.train_files is null", "a list"),
    ),
    Mistake(
        "a negative temperature",
        train(f"{ROLLOUT}.temperature=-1"),
        ("temperature=-1", "use 0 or more"),
    ),
    Mistake(
        "responses of no tokens",
        train("data.max_response_length=0"),
        ("data.max_response_length=0", "use 1 or more"),
    ),
    Mistake(
        "a batch larger than the data",
        train("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16"),
        ("8 rows", "data.train_batch_size", "at most 8"),
    ),
    Mistake(
        "a misspelt tracker",
        train("trainer.logger=[tensorbord]"),
        ("tensorbord", "tensorboard"),
    ),
    Mistake(
        "two processes in one",
        train("trainer.controller=local", "trainer.n_gpus_per_node=2"),
        ("trainer.controller=local", "trainer.controller=ray"),
    ),
    Mistake(
        "GRPO with one response per prompt",
        train("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1"),
        ("compares the responses of one prompt", f"use {ROLLOUT}.n=8"),
        code=0,
    ),
    Mistake(
        "KL in the reward and in the loss",
        train("algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"),
        ("the KL to the reference counts twice", "one of them is enough"),
        code=0,
    ),
    Mistake(
        "responses longer than the model",
        train("data.max_response_length=4096"),
        ("data.max_response_length=4096", "positions", "use data.max_response_length="),
    ),
    Mistake(
        "several turns with no other side",
        train(f"{MULTI_TURN}.enable=true"),
        (f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.tool_config_path"),
        code=0,
    ),
    Mistake(
        "a config that is not there",
        ["train", "--config-name", "mine"],
        ("mine", "--config-path"),
    ),
    Mistake(
        "a YAML file that is none",
        ["train", "--config-path", ".", "--config-name", "mine"],
        ("mine.yaml",),
        files={"mine.yaml": "data: [\n"},
    ),
    Mistake(
        "a key to explain that does not exist",
        ["config", "explain", "data.train_fles"],
        ("data.train_fles", "data.train_files"),
    ),
    Mistake(
        "a config file to check that is not there",
        ["config", "check", "mine.yaml"],
        ("no config 'mine'",),
        code=1,
    ),
    Mistake(
        "several mistakes at once",
        train(f"{MODEL}=nowhere/at/all", "data.train_files=no.parquet"),
        ("2 problems", f"{MODEL}=nowhere/at/all", "no.parquet does not exist"),
    ),
]
