"""Config blocks shared by all models: optimizer, sharding, checkpoint, micro-batches."""

from __future__ import annotations

from typing import Literal, TypeVar

from hone.config.block import SchemaBlock, at_most, block, follows
from hone.config.ranges import Count, Fraction, NotNegative, Positive
from hone.types import Settings

LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
]
ACTOR_KEY, MODEL_KEY = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ULYSSES_SIZE_KEY = "fsdp_config.ulysses_sequence_parallel_size"
_PARALLEL_DIMENSIONS = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
MEGATRON_PARALLEL_KEYS = (
    "sequence_parallel",
    *(f"{name}_parallel_size" for name in _PARALLEL_DIMENSIONS),
)
"""The keys of the parallel layout of a model under Megatron."""

B = TypeVar("B")


def block_following_actor(cls: type[B], name: str, *keys: str) -> B:
    """Declares a block whose `keys` follow the actor's block of that name."""
    return block(cls, **{key: follows(f"{ACTOR_KEY}.{name}.{key}") for key in keys})


class OptimConfig(SchemaBlock):
    """Optimizer and learning-rate schedule."""

    optimizer: str = "AdamW"
    """Class name of the optimizer in `optimizer_impl`, or `pkg.mod:Class` for a custom one."""
    optimizer_impl: str = "torch.optim"
    """Module that holds the optimizer class; any importable module works."""
    lr: NotNegative = 1e-6
    """Peak learning rate."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up length as a share of all updates; used if `lr_warmup_steps` is not positive."""
    lr_warmup_steps: int = -1
    """Warm-up length in updates; overrides the ratio if positive."""
    total_training_steps: int = -1
    """Length of the schedule in steps; -1 uses the length of the run."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    clip_grad: Positive = 1.0
    """Maximum gradient norm; the role's `grad_clip`, if any, overrides it."""
    min_lr_ratio: Fraction = 0.0
    """Floor of the cosine, linear and WSD schedules, as a share of `lr`."""
    num_cycles: float = 0.5
    """Number of cosine cycles over the run; 0.5 decays once from the peak to the floor."""
    lr_scheduler_type: str = "constant"
    """Schedule after warm-up: constant, cosine, linear, wsd, or `pkg.mod:function` for a custom one."""
    lr_decay_steps_ratio: Fraction = 0.1
    """Share of all updates in the final decay of the `wsd` schedule."""
    override_optimizer_config: Settings | None = None
    """Additional keyword arguments for the optimizer class."""


class FSDPConfig(SchemaBlock):
    """Dtype, offload, seed and sharding of a model."""

    param_offload: bool = False
    """Keep parameters in host memory between phases (no effect on CPU)."""
    seed: int = 42
    """Seed of dropout; with `full_determinism`, seed of every generator."""
    full_determinism: bool = False
    """Use deterministic torch kernels, and seed every generator."""
    dtype: Literal["auto", "fp32", "float32", "bf16", "bfloat16"] = "auto"
    """Compute dtype; auto is fp32 on CPU and bf16 on GPU."""
    optimizer_offload: bool = False
    """Keep optimizer state and float32 master weights in host memory between updates."""
    offload_policy: bool = False
    """Use FSDP2's CPU offload, which keeps the shards in host memory also during forward and backward."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, one more gather)."""
    fsdp_size: int = -1
    """Ranks over which one model copy is sharded; -1 is all ranks, fewer is HSDP."""
    use_torch_compile: bool = False
    """Compile each decoder block with torch.compile."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks that split each sequence (Ulysses); the role's key of the same name wins if above 1."""
    tensor_parallel_size: Count = 1
    """Ranks that split the matrices of each layer; FSDP2 shards over the other ranks."""


class MegatronConfig(SchemaBlock):
    """Layout of a model under `strategy=megatron`; dtype, offload and seed are those of `fsdp_config`."""

    tensor_model_parallel_size: Count = 1
    """Ranks that split the matrices of each layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages of the pipeline; all stages have the same number of layers."""
    expert_model_parallel_size: Count = 1
    """Ranks over which the experts of a layer are distributed; no effect on a model without experts."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that split the matrices of each expert; null is tensor_model_parallel_size."""
    sequence_parallel: bool = True
    """Split norms and residuals over the tensor-parallel ranks; no effect without tensor parallel."""
    override_transformer_config: Settings = block(dict)
    """Fields of megatron-core's TransformerConfig, such as recompute_granularity."""

    @property
    def ranks_per_slot(self) -> int:
        """The number of ranks that get the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def effective_expert_tensor_parallel_size(self) -> int:
        """The number of ranks that split the matrices of each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def divisibility_problem(self, ranks: int) -> str:
        """Returns a message if the product of the sizes does not divide the ranks, else an empty string."""
        stages = self.pipeline_model_parallel_size
        tensor, experts = self.tensor_model_parallel_size, self.expert_model_parallel_size
        sizes = f"tensor_model_parallel_size={tensor}"
        if ranks % (tensor * stages) == 0:
            if ranks % (experts * self.effective_expert_tensor_parallel_size * stages) == 0:
                return ""
            sizes = f"expert_model_parallel_size={experts} times "
            sizes += f"expert_tensor_parallel_size={self.effective_expert_tensor_parallel_size}"
        sizes += f" times pipeline_model_parallel_size={stages}"
        return f"{sizes} does not divide {ranks} ranks; use sizes whose product divides {ranks}"


class SFTEngineConfig(FSDPConfig):
    """Training engine of supervised fine-tuning."""

    strategy: str = "fsdp2"
    """Training engine: fsdp2, or pkg.mod:Class for a custom one."""


class CheckpointConfig(SchemaBlock):
    """Contents of a checkpoint to save and to load."""

    save_contents: tuple[str, ...] = ("model", "optimizer", "extra", "hf_model")
    """Parts to write: model, optimizer, extra (scheduler, random state), hf_model (safetensors)."""
    load_contents: tuple[str, ...] | None = None
    """Parts to load on resume; null loads all saved parts."""


class ProfilerConfig(SchemaBlock):
    """The ranks of a role that are recorded in the steps of `global_profiler.steps`."""

    enable: bool | None = None
    """Record the role or not; null records it only if no role has `enable` true."""
    all_ranks: bool = False
    """Record every rank."""
    ranks: tuple[int, ...] = ()
    """Ranks to record. If empty: rank 0 if `enable` is true, and all ranks if `enable` is null."""


def sequence_parallel(role: SchemaBlock, sharding: FSDPConfig) -> int:
    """Returns the role's ulysses_sequence_parallel_size if it is above 1, else that of `sharding`."""
    size: int = role["ulysses_sequence_parallel_size"]
    return size if size > 1 else sharding.ulysses_sequence_parallel_size


class MicroBatches(SchemaBlock):
    """Settings of a pass that splits a batch into micro-batches."""

    def sequences_per_micro_batch(self, ranks: int, prefix: str = "") -> int | None:
        """Returns the sequences in one forward on one rank; None if the token budget applies.

        `prefix` is the start of the keys' names: ppo_, forward_ or log_prob_.
        """
        uses_token_budget = self.get(f"{prefix}use_dynamic_bsz", self.get("use_dynamic_bsz"))
        size, total = self[f"{prefix}micro_batch_size_per_gpu"], self[f"{prefix}micro_batch_size"]
        if size is None and total is not None:
            size = max(1, total // ranks)
        return None if uses_token_budget else size


class UpdateConfig(MicroBatches):
    """Settings shared by the updates of policy and critic."""

    strategy: str = "fsdp2"
    """Training engine: fsdp or fsdp2 (both use FSDP2 on several ranks), megatron, or pkg.mod:Class."""
    rollout_n: int = follows("actor_rollout_ref.rollout.n")
    """Responses per prompt; default: the rollout's `n`."""
    ppo_mini_batch_size: Count = at_most(256, "data.train_batch_size")
    """Prompts in one update (optimizer step), each with `rollout.n` responses."""
    ppo_micro_batch_size: Count | None = None
    """Sequences in one forward over all ranks; prefer `ppo_micro_batch_size_per_gpu`."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward on one rank; null forms micro-batches by token budget."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by token budget even when a micro-batch size is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Token budget of one forward and backward on one rank."""
    ppo_epochs: Count = 1
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the rows of a batch before splitting it into mini-batches."""
    data_loader_seed: int = 42
    """Seed of `shuffle`."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses are aggregated."""
    loss_scale_factor: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`; null is the maximum response length."""
    optim: OptimConfig = block(OptimConfig)
    grad_clip: Positive = follows(".optim.clip_grad")
    """Maximum gradient norm; default: `clip_grad` of the optimizer."""
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    profiler: ProfilerConfig = block(ProfilerConfig)

    @property
    def sequences_per_update(self) -> int:
        """The sequences in one update over all ranks."""
        return self.ppo_mini_batch_size * self.rollout_n


class LogProbConfig(MicroBatches):
    """Micro-batches of a log-prob pass."""

    log_prob_micro_batch_size: Count | None = None
    """Log-probs: sequences in one forward over all ranks; prefer `log_prob_micro_batch_size_per_gpu`."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Log-probs: sequences in one forward on one rank; null forms micro-batches by token budget."""
    log_prob_use_dynamic_bsz: bool = follows(f"{ACTOR_KEY}.use_dynamic_bsz")
    """Log-probs: form micro-batches by token budget; default: as for the actor."""
    log_prob_max_token_len_per_gpu: Count = follows(f"{ACTOR_KEY}.ppo_max_token_len_per_gpu")
    """Log-probs: token budget of one forward on one rank; default: the actor's."""
