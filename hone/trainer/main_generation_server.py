"""`python -m hone.trainer.main_generation_server key=value …`: generation with the keys of a training run.

verl's program of this name serves the policy and asks it; here `hone.trainer.main_generation` does the work.
`data.train_files` are the prompts, `actor_rollout_ref.rollout.n` the responses of each, and
`+data.output_path=FILE` names the file to write.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from hone.config import PPOTrainerConfig
from hone.trainer import main_generation
from hone.trainer.command_line import announce, composed_of, run_module

_MODULE = "hone.trainer.main_generation_server"
_OUTPUT = re.compile(r"\+{0,2}(data\.output_path=.*)", re.DOTALL)
_ROLLOUT = ("temperature", "top_k", "top_p", "prompt_length", "response_length", "max_model_len")
_ENGINE = ("gpu_memory_utilization", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
_MODEL = ("path", "tokenizer_path", "trust_remote_code", "custom_chat_template")


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    outputs = [found[1] for word in given if (found := _OUTPUT.fullmatch(word))]
    kept = [word for word in given if not _OUTPUT.fullmatch(word)]
    composed = composed_of(kept, tree="ppo_trainer", program=_MODULE)
    announce(composed)
    main_generation.main([*generation_words(composed.config), *outputs])


def generation_words(config: PPOTrainerConfig) -> list[str]:
    """What `hone generate` is told: the policy, its prompts and how to sample."""
    policy, data = config.actor_rollout_ref, config.data
    values = {
        **{f"model.{name}": getattr(policy.model, name) for name in _MODEL},
        **{f"rollout.{name}": getattr(policy.rollout, name) for name in (*_ROLLOUT, *_ENGINE)},
        "data.path": data.train_files,
        "data.prompt_key": data.prompt_key,
        "data.n_samples": policy.rollout.n,
        "trainer.nnodes": config.trainer.nnodes,
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node,
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


if __name__ == "__main__":
    sys.exit(run_module(main, "ppo_trainer", _MODULE))
