"""Blocks shared by every model that is trained or run forward: optimizer, sharding, checkpoint."""

from __future__ import annotations

from typing import Literal

from hone.config.block import (
    Count,
    NotNegative,
    Positive,
    SchemaBlock,
    Share,
    at_most,
    block,
    follows,
)
from hone.types import Settings

LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
]


class OptimConfig(SchemaBlock):
    """Optimizer and learning-rate schedule."""

    optimizer: str = "AdamW"
    """Class name of the optimizer, looked up in `optimizer_impl`; or `pkg.mod:Class` of your own."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the optimizer class; any importable module works."""
    lr: NotNegative = 1e-6
    """Peak learning rate."""
    lr_warmup_steps_ratio: Share = 0.0
    """Share of all updates spent warming up; used when `lr_warmup_steps` is not positive."""
    lr_warmup_steps: int = -1
    """Warm-up length in updates; wins over the ratio when positive."""
    total_training_steps: int = -1
    """Length of the schedule in steps; -1 takes the run's own length."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW's two moment decay rates."""
    clip_grad: Positive = 1.0
    """Largest gradient norm; the role's `grad_clip` wins where it has one."""
    min_lr_ratio: Share = 0.0
    """Floor of the cosine, linear and WSD schedules, as a share of `lr`."""
    num_cycles: float = 0.5
    """Cosine waves over the run; 0.5 falls once from the peak to the floor."""
    lr_scheduler_type: str = "constant"
    """Shape of the schedule after warm-up: constant, cosine, linear, wsd, or your own `pkg.mod:function`."""
    lr_decay_steps_ratio: Share = 0.1
    """Share of all updates in the final decay of the `wsd` schedule."""
    override_optimizer_config: Settings | None = None
    """More keyword arguments for the optimizer class."""


class PlacementConfig(SchemaBlock):
    """How a model is held on a rank: dtype, offload, seed."""

    param_offload: bool = False
    """Keep parameters in host memory between phases (on a CPU they are there already)."""
    seed: int = 42
    """Seed of dropout; under `full_determinism` of every generator."""
    full_determinism: bool = False
    """Ask torch for deterministic kernels, and seed every generator."""
    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is fp32 on CPU and bf16 on GPU."""


class FSDPConfig(PlacementConfig):
    """How a model is sharded over the ranks."""

    optimizer_offload: bool = False
    """Keep optimizer state and float32 masters in host memory between updates."""
    offload_policy: bool = False
    """FSDP2's own CPU offload, during the phase as well."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, one more gather)."""
    fsdp_size: int = -1
    """Ranks that share one copy of the model; -1 shards over all of them, less gives HSDP."""
    use_torch_compile: bool = False
    """Compile each decoder block with torch.compile."""


class SFTEngineConfig(FSDPConfig):
    """How the model of supervised fine-tuning is held and trained."""

    strategy: str = "fsdp2"
    """Training engine: fsdp2, or your own as pkg.mod:Class."""


class CheckpointConfig(SchemaBlock):
    """What a checkpoint holds and what is read back."""

    save_contents: tuple[str, ...] = ("model", "optimizer", "extra", "hf_model")
    """Parts to write: model, optimizer, extra (scheduler, random state), hf_model (safetensors)."""
    load_contents: tuple[str, ...] | None = None
    """Parts to read on resume; null reads all that was saved."""


class MicroBatches(SchemaBlock):
    """A pass that takes a batch piece by piece."""

    def sequences_per_micro_batch(self, ranks: int, kind: str = "") -> int | None:
        """Sequences in one forward on one rank; None where the token budget decides. `kind` begins the
        keys of the pass: ppo_, forward_, log_prob_."""
        by_tokens = self.get(f"{kind}use_dynamic_bsz", self.get("use_dynamic_bsz"))
        size, total = self[f"{kind}micro_batch_size_per_gpu"], self[f"{kind}micro_batch_size"]
        if size is None and total is not None:
            size = max(1, total // ranks)
        return None if by_tokens else size


class UpdateConfig(MicroBatches):
    """What the updates of the policy and of the critic share."""

    strategy: str = "fsdp2"
    """Training engine: fsdp and fsdp2 (both FSDP2 beyond one rank), or your own as pkg.mod:Class."""
    rollout_n: int = follows("actor_rollout_ref.rollout.n")
    """Responses per prompt; follows the rollout."""
    ppo_mini_batch_size: Count = at_most(256, "data.train_batch_size")
    """Prompts in one update (optimizer step); each brings its `rollout.n` responses."""
    ppo_micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; give `ppo_micro_batch_size_per_gpu`."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null forms micro-batches by token budget."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by token budget even when a micro-batch size is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Token budget of one forward and backward on one rank."""
    ppo_epochs: Count = 1
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the rows of a batch before cutting it into mini-batches."""
    data_loader_seed: int = 42
    """Seed of that shuffle."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`; null is the longest response allowed."""
    optim: OptimConfig = block(OptimConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)

    def sequences_per_update(self, responses_per_prompt: int | None = None) -> int:
        """Sequences in one update over all ranks."""
        n = self.rollout_n if responses_per_prompt is None else responses_per_prompt
        return self.ppo_mini_batch_size * n


class LogProbConfig(MicroBatches):
    """Micro-batches of a pass that only computes log-probs."""

    log_prob_micro_batch_size: Count | None = None
    """Log-probs: sequences in one forward over all ranks; give `log_prob_micro_batch_size_per_gpu`."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Log-probs: sequences in one forward on one rank; null forms micro-batches by token budget."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    """Log-probs: form micro-batches by token budget; follows the actor."""
    log_prob_max_token_len_per_gpu: Count = follows(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    """Log-probs: token budget of one forward on one rank; follows the actor."""
