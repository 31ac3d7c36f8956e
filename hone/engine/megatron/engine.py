"""The training engine of `strategy=megatron`: megatron-core's pipeline schedules over packed micro-batches.

The ranks of a data-parallel slot run the same micro-batches. Tensor-parallel ranks hold shards of each
matrix; pipeline stages hold some of the layers. The last stage runs the objective and broadcasts the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from hone.algorithms.policy_losses.policy_loss import batch_counts
from hone.engine.build import load_module
from hone.engine.contract import EngineSpec, Lease, Mesh, Objective, ObjectiveOutput, Options
from hone.engine.engine import Engine, MicroBatchResult, move_to_device, select_columns
from hone.engine.megatron.checkpoint import load_stage, save_stage
from hone.engine.megatron.experts import MicroBatchParams
from hone.engine.megatron.mesh import join_mesh, process_groups
from hone.engine.megatron.model import Stage, build_stage, transformer_config
from hone.engine.megatron.optimizer import ShardedOptimizer
from hone.engine.megatron.refusals import check_role_supported
from hone.engine.megatron.weights import StageTensors, parameters_by_hf_name
from hone.engine.offload import Offload, build_offload
from hone.models.policy import Model, PolicyModel, ValueModel
from hone.models.routing import EXPERT_DTYPE, NOT_RECORDED, Routing
from hone.ops.attention import SegmentLayout
from hone.ops.logprobs import LogitOptions, linear_log_probs, linear_sum_pi_squared
from hone.ops.rows import PackedRows
from hone.ops.tensor_parallel import vocab_parallel_log_probs, vocab_parallel_sum_pi_squared
from hone.protocol import DataProto

T = TypeVar("T")
Postprocess = Callable[[Tensor, PackedRows, MicroBatchParams, DataProto], Any]
"""Computes the result of a micro-batch from the last stage's hidden states [N, 1, d] of N packed tokens."""


class MegatronEngine(Engine):
    """A `TrainEngine` over one pipeline stage of a model."""

    optimizer: ShardedOptimizer | None

    def __init__(
        self,
        spec: EngineSpec,
        mesh: Mesh,
        stage: Stage,
        stage_tensors: StageTensors,
        *,
        optimizer: ShardedOptimizer | None,
        offload: Offload | None,
    ) -> None:
        super().__init__(
            stage if optimizer is None else optimizer.model,
            optimizer=optimizer,
            train_micro_batch_rule=spec.train_micro_batch_rule(mesh.data_parallel_size),
            infer_micro_batch_rule=spec.infer_micro_batch_rule(mesh.data_parallel_size),
            response_width=spec.response_width,
            seed=spec.fsdp.seed,
            offload=offload,
        )
        self.mesh = mesh
        self._data_group = stage_tensors.groups.data if mesh.data_parallel_size > 1 else None
        self._stage, self._stage_tensors, self._spec = stage, stage_tensors, spec
        self._decoding_model: PolicyModel | None = None  # a copy of the whole model, for leases
        self._decoding_version: tuple[int, int] | None = None  # number of updates, number of loads

    @property
    def _lm(self) -> Any:
        return self._stage_tensors.meta_model.lm

    @property
    def _routing(self) -> Routing | None:
        return getattr(self._stage_tensors.meta_model, "routing", None)

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        assert self.optimizer is not None, "this engine only runs forward"
        results: list[MicroBatchResult] = []
        with self.on_device(optimizer=True):
            batch, objective_columns, counts = self._begin_update(batch, objective)

            def compute_loss(
                hidden: Tensor, packed: PackedRows, params: MicroBatchParams, micro_batch: DataProto
            ) -> Tensor:
                weight = float(objective.mask(micro_batch).sum()) / max(counts.tokens, 1.0)
                outputs = self._compute_outputs(hidden, packed, params, objective.options)
                inputs = select_columns(micro_batch, objective_columns)
                objective_output = objective(outputs, move_to_device(inputs, self.device))
                results.append(
                    (replace(objective_output, loss=objective_output.loss.detach()), weight)
                )
                return objective_output.loss

            indexed_micro_batches = self._micro_batches(batch, self._train_micro_batch_rule)
            micro_batches = [micro_batch for _, micro_batch in indexed_micro_batches]
            with batch_counts(counts):
                self._run_pipeline(micro_batches, compute_loss, forward_only=False)
            results = self._broadcast_from_last_stage(
                [(_to_host(objective_output), weight) for objective_output, weight in results]
            )
            return self._end_update(results)

    def _infer_micro_batches(
        self, batch: DataProto, options: Options
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        def compute_outputs(
            hidden: Tensor, packed: PackedRows, params: MicroBatchParams, micro_batch: DataProto
        ) -> dict[str, Tensor]:
            outputs = self._compute_outputs(hidden, packed, params, options)
            return {
                name: (values.float() if values.is_floating_point() else values).cpu()
                for name, values in outputs.items()
            }

        indexed_micro_batches = self._micro_batches(batch, self._infer_micro_batch_rule)
        micro_batches = [micro_batch for _, micro_batch in indexed_micro_batches]
        results = self._run_pipeline(micro_batches, compute_outputs, forward_only=True)
        results = self._broadcast_from_last_stage(results)
        for (indices, _), outputs in zip(indexed_micro_batches, results, strict=True):
            yield indices, outputs

    def _run_pipeline(
        self, micro_batches: list[DataProto], postprocess: Postprocess, *, forward_only: bool
    ) -> list[Any]:
        """Runs the micro-batches through the pipeline; the last stage returns a result for each of them."""

        def forward_step(iterator: Iterator[DataProto], model: Any) -> tuple[Tensor, Any]:
            micro_batch = next(iterator)
            packed = self._pad_for_sequence_parallel(self._pack(micro_batch))
            params = MicroBatchParams(
                layout=packed.layout,
                positions=packed.position_ids,
                replay=None if packed.experts is None else self._local_tokens(packed.experts),
            )
            hidden = model(packed.input_ids[None], None, None, packed_seq_params=params)

            def loss_function(hidden: Tensor, non_loss_data: bool = False) -> Any:
                result = postprocess(hidden, packed, params, micro_batch)
                # With a token count of 0, megatron-core sums the losses and does not divide.
                return result if non_loss_data else (result, torch.zeros((), dtype=torch.int), None)

            return hidden, loss_function

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.module],
            num_microbatches=len(micro_batches),
            seq_length=1,  # stages exchange the real lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _pad_for_sequence_parallel(self, packed: PackedRows) -> PackedRows:
        """Appends a segment that no token attends to, so that sequence-parallel ranks get equal parts."""
        num_parts = self.mesh.tensor_size if self._stage.config.sequence_parallel else 1
        num_padding = -len(packed.input_ids) % num_parts
        if not num_padding:
            return packed
        # The padding comes last, so it is a child if there are children, because children follow all roots.
        roots, children = packed.layout.root_lengths, packed.layout.children
        if children:
            children = [*children, (0, num_padding)]
        else:
            roots = [*roots, num_padding]
        zeros = packed.input_ids.new_zeros(num_padding)
        experts = packed.experts
        if experts is not None:
            padding = experts.new_full((num_padding, *experts.shape[1:]), NOT_RECORDED)
            experts = torch.cat((experts, padding))
        return replace(
            packed,
            experts=experts,
            input_ids=torch.cat((packed.input_ids, zeros)),
            position_ids=torch.cat((packed.position_ids, zeros)),
            layout=SegmentLayout(roots, children, packed.layout.device),
        )

    def _local_tokens(self, values: Tensor) -> Tensor:
        """Returns this rank's part of values [N, …] under sequence parallelism."""
        if not self._stage.config.sequence_parallel:
            return values
        return values.chunk(self.mesh.tensor_size)[self.mesh.tensor_rank]

    def _gather_tokens(self, values: Tensor) -> Tensor:
        """Returns the values [N, …] of all tokens, joined from the ranks' parts."""
        if not self._stage.config.sequence_parallel:
            return values
        gathered: Tensor = gather_from_sequence_parallel_region(values)
        return gathered

    def _compute_outputs(
        self, hidden: Tensor, packed: PackedRows, params: MicroBatchParams, options: Options
    ) -> dict[str, Tensor]:
        """Computes the outputs of `infer` from the last stage's hidden states."""
        if self._stage.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden[:, 0].index_select(0, packed.predicting_position)
        if isinstance(self._stage_tensors.meta_model, ValueModel):
            return {"values": packed.unpack(self._stage.value_head(hidden).float().squeeze(-1))}
        outputs = self._log_probs(hidden, packed, **options)
        if params.replay is not None:
            local_agreement = torch.stack(list(params.agreement.values())).mean(0)
            agreement = self._gather_tokens(local_agreement)
            outputs["routing_agreement"] = packed.unpack(
                agreement.index_select(0, packed.predicting_position)
            )
        if options.get("with_routing"):
            experts = torch.stack([params.experts[i] for i in sorted(params.experts)], 1)
            outputs["routed_experts"] = packed.pad(
                self._gather_tokens(experts).to(EXPERT_DTYPE), NOT_RECORDED
            )
        return outputs

    def _log_probs(
        self,
        hidden: Tensor,  # [M, d]
        packed: PackedRows,
        *,
        temperature: float,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
        **_: bool,
    ) -> dict[str, Tensor]:
        weight, start = self._head_shard()
        group = self._stage_tensors.groups.tensor
        is_vocabulary_sharded = group.size() > 1
        logit_options: LogitOptions = {
            "temperature": temperature,
            "bias": None,
            "softcap": None,
            "logit_scale": 1.0,
        }
        inputs = (hidden, weight, packed.target)
        if is_vocabulary_sharded:
            log_probs, entropy = vocab_parallel_log_probs(
                *inputs, start=start, group=group, with_entropy=with_entropy, **logit_options
            )
        else:
            log_probs, entropy = linear_log_probs(
                *inputs, with_entropy=with_entropy, **logit_options
            )
        outputs = {"log_probs": packed.unpack(log_probs)}
        if with_entropy:
            outputs["entropy"] = packed.unpack(entropy)
        if with_sum_pi_squared:
            if is_vocabulary_sharded:
                sum_pi_squared = vocab_parallel_sum_pi_squared(
                    hidden, weight, group=group, **logit_options
                )
            else:
                sum_pi_squared = linear_sum_pi_squared(hidden, weight, **logit_options)
            outputs["sum_pi_squared"] = packed.unpack(sum_pi_squared)
        return outputs

    def _head_shard(self) -> tuple[Tensor, int]:
        """Returns this rank's rows of the LM head, without padding, and the token id of the first row."""
        stage = self._stage
        is_tied = stage.share_embeddings_and_output_weights
        weight = stage.shared_embedding_or_output_weight() if is_tied else stage.output_layer.weight
        start = self.mesh.tensor_rank * len(weight)
        return weight[: max(0, self.model_facts.vocab_size - start)], start

    def _broadcast_from_last_stage(self, value: T) -> T:
        """Returns the last stage's value on every stage; the values of other stages are ignored."""
        group = self._stage_tensors.groups.pipeline
        if group.size() == 1:
            return value
        values = [value]
        last_rank = dist.get_global_rank(group, group.size() - 1)
        dist.broadcast_object_list(values, src=last_rank, group=group)
        return values[0]

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            yield from self._stage_tensors.gather_model()

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Lends a copy of the whole model, which the first lease loads and later leases update."""
        if self._decoding_model is None:
            module = load_module(replace(self._spec, optim=None, gradient_checkpointing=False))
            if not isinstance(module, PolicyModel):
                raise TypeError("a critic does not decode; lease the actor's engine")
            self._decoding_model = module.eval()
        version = (self.updates, self._load_count)
        if version != self._decoding_version:
            copies = parameters_by_hf_name(self._decoding_model)
            with torch.no_grad():
                for name, tensor in self.named_hf_weights():
                    copies[name].copy_(tensor)
            self._decoding_version = version
        yield Lease(self._decoding_model, address_version=0)

    def save(self, folder: Path, contents: Collection[str]) -> None:
        with self.on_device(optimizer=True):
            save_stage(folder, self._stage_tensors, self.optimizer, contents)

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        with self.on_device(optimizer=True):
            load_stage(folder, self._stage_tensors, self.optimizer, contents)
        self._load_count += 1


def _to_host(objective_output: ObjectiveOutput) -> ObjectiveOutput:
    """Returns the output with its tensors copied to the host, without gradient."""
    metrics = (objective_output.sums, objective_output.means, objective_output.maxima)
    host_metrics = (
        {name: torch.as_tensor(value).detach().cpu() for name, value in values.items()}
        for values in metrics
    )
    return ObjectiveOutput(objective_output.loss.cpu(), *host_metrics)


def build(spec: EngineSpec) -> MegatronEngine:
    """Builds the engine; all ranks must call this together."""
    _check_supported(spec)
    mesh = join_mesh(spec)
    # Every rank reads the whole model on the host and keeps its part.
    module = load_module(replace(spec, optim=None), torch.device("cpu"))
    stage, is_tied = _build_stage(spec, module)
    stage_tensors = StageTensors(stage, module, process_groups(), is_tied=is_tied)
    optimizer = None
    if spec.optim is None:
        stage.requires_grad_(False)
    else:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        model = DistributedDataParallel(stage.config, config, stage)
        stage.config.finalize_model_grads_func = finalize_model_grads
        optimizer = ShardedOptimizer(
            model,
            spec.optim,
            grad_clip=spec.grad_clip,
            total_steps=spec.optim.total_training_steps,
        )
    offload = build_offload(stage, optimizer, spec.fsdp)
    engine = MegatronEngine(spec, mesh, stage, stage_tensors, optimizer=optimizer, offload=offload)
    if offload is not None:
        offload.start()
    return engine


def _check_supported(spec: EngineSpec) -> None:
    """Raises, before any model is loaded, for a spec that this engine does not support."""
    if spec.head not in ("policy", "value"):
        raise ValueError(
            f"strategy=megatron trains policies and critics, not {spec.head} models; use strategy=fsdp2"
        )
    if spec.device.type == "cpu":
        try:
            torch.cuda.current_device()
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                "strategy=megatron needs a GPU, but torch finds none; use strategy=fsdp2"
            ) from error
    if spec.adapters is not None:
        raise ValueError("strategy=megatron does not train LoRA adapters; use strategy=fsdp2")
    if spec.replays_routing and spec.megatron.pipeline_model_parallel_size > 1:
        raise ValueError(
            "strategy=megatron replays expert routing only without pipeline parallel; use "
            "megatron.pipeline_model_parallel_size=1 or strategy=fsdp2"
        )
    check_role_supported(spec.model_path, spec.override_config, spec.megatron)


def _build_stage(spec: EngineSpec, module: Model) -> tuple[Stage, bool]:
    """Returns this rank's stage with uninitialized weights, and whether the embeddings are tied."""
    hf_config, rotary = module.lm.config, module.decoder.rotary_emb
    is_tied = isinstance(module, PolicyModel) and bool(hf_config.tie_word_embeddings)
    config = transformer_config(
        hf_config,
        spec.dtype,
        spec.device,
        rotary_scale=rotary.attention_scaling,
        gradient_checkpointing=spec.gradient_checkpointing,
        megatron=spec.megatron,
    )
    stage = build_stage(hf_config, config, rotary.inv_freq, is_tied=is_tied)
    if not isinstance(module, PolicyModel) and stage.post_process:
        del stage.output_layer
        stage.value_head = nn.Linear(hf_config.hidden_size, 1, dtype=spec.dtype)
    return stage.to(spec.device), is_tied
