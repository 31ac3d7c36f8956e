"""The training engine: packs rows, runs forward and backward, updates, saves and lends the weights.

The result does not depend on how rows are split into micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from hone.algorithms.policy_losses.policy_loss import BatchCounts, batch_counts
from hone.engine.checkpoint import load_checkpoint, save_checkpoint
from hone.engine.contract import Lease, Mesh, ModelFacts, Objective, ObjectiveOutput, Options
from hone.engine.offload import Offload
from hone.engine.optimizer import Optimizer
from hone.models import lora
from hone.models.paths import EXPORT_FOLDER
from hone.models.policy import PolicyModel
from hone.models.writing import without_progress_bar
from hone.ops.counter_rng import fold_seed
from hone.ops.rows import MicroBatchRule, PackedRows, pack_rows, shared_prompt_lengths
from hone.protocol import PADDED_ROW, DataProto, real_row_mask, without_padding
from hone.protocol.rows import to_device
from hone.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing sharding.py takes seconds, and a single rank does not need it
    from hone.engine.sharding import ShardedModule
    from hone.models.routing import Routing

MicroBatchResult = tuple[ObjectiveOutput, float]
"""The objective's output for one micro-batch, and the micro-batch's share of the loss tokens."""
_INPUTS = ("prompts", "responses", "attention_mask", "response_mask", "routed_experts")
"""The columns from which rows are packed."""


class Engine:
    """A `TrainEngine` over one module, which maps packed rows to values per token; ranks may shard it.

    contract.py documents the methods of a `TrainEngine`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: Optimizer | None,
        train_micro_batch_rule: MicroBatchRule,
        infer_micro_batch_rule: MicroBatchRule,
        response_width: int,
        seed: int,
        sharded_module: ShardedModule | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.module = module
        # Offloaded shards are on another device than the one that computes.
        self.device: torch.device = (
            next(module.parameters()).device if sharded_module is None else sharded_module.device
        )
        self.optimizer = optimizer
        self.offload = offload
        self.mesh = mesh = Mesh() if sharded_module is None else sharded_module.groups.mesh
        self._sharded_module = sharded_module
        self._data_group = None if sharded_module is None else sharded_module.groups.data
        self._sequence_group = None if sharded_module is None else sharded_module.groups.sequence
        self._gather_count = self._load_count = 0
        self._train_micro_batch_rule = train_micro_batch_rule
        self._infer_micro_batch_rule = infer_micro_batch_rule
        self._response_width = response_width
        self._share_prompts = True  # equal prompts in a micro-batch are packed once
        self._seed = seed
        # Sequence-parallel ranks compute different tokens; tensor-parallel ranks need the same dropout.
        self._dropout_rank = mesh.data_parallel_rank * mesh.sequence_size + mesh.sequence_rank
        self._num_gradient_ranks = mesh.data_parallel_size * mesh.sequence_size
        self._has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())

    def train_minibatch(self, batch: DataProto, objective: Objective) -> dict[str, float]:
        assert self.optimizer is not None, "this engine only runs forward"
        with self.on_device(optimizer=True):
            batch, objective_columns, counts = self._begin_update(batch, objective)
            results: list[MicroBatchResult] = []
            with batch_counts(counts):
                for _, micro_batch in self._micro_batches(batch, self._train_micro_batch_rule):
                    weight = float(objective.mask(micro_batch).sum()) / max(counts.tokens, 1.0)
                    outputs = self._forward(micro_batch, objective.options)
                    inputs = select_columns(micro_batch, objective_columns)
                    objective_output = objective(outputs, move_to_device(inputs, self.device))
                    # FSDP averages gradients over the ranks; the factor turns the average into a sum.
                    (objective_output.loss * self._num_gradient_ranks).backward()
                    self.optimizer.accumulate_gradients()
                    results.append(
                        (replace(objective_output, loss=objective_output.loss.detach()), weight)
                    )
                    del outputs, objective_output  # free the graph before the next forward
            if self._routing is not None:
                self._routing.replay = None  # the rollout engine may use the same module
            return self._end_update(results)

    def infer(
        self, batch: DataProto, *, adapters: bool = True, **options: Unpack[Options]
    ) -> dict[str, Tensor]:
        if not adapters and not self.model_facts.has_adapters:
            raise ValueError(
                "infer(adapters=False) runs the base model of LoRA adapters, but this model has no adapters"
            )
        adapter_context = nullcontext() if adapters else self._lm.disable_adapter()
        results: dict[str, Tensor] = {}
        with self.on_device(), torch.no_grad(), adapter_context:
            self.module.eval()
            inputs = set(_INPUTS)
            if not adapters:  # the reference model routes tokens by its own logits
                inputs.remove("routed_experts")
            batch = select_columns(batch, inputs)
            for indices, outputs in self._infer_micro_batches(batch, options):
                for name, values in outputs.items():
                    if name not in results:
                        dtype = torch.float32 if values.is_floating_point() else values.dtype
                        results[name] = torch.zeros(len(batch), *values.shape[1:], dtype=dtype)
                    if indices:
                        results[name][indices] = values.to(results[name].dtype).cpu()
            if self._sharded_module is not None:
                self._sharded_module.reshard()
        return results

    def _begin_update(
        self, batch: DataProto, objective: Objective
    ) -> tuple[DataProto, set[str], BatchCounts]:
        """Prepares the batch, the module and the dropout seed for an update.

        Returns the batch, the names of the objective's columns, and the counts over all slots.
        """
        assert self.optimizer is not None
        self.optimizer.zero_grad()  # drops gradients of an update that failed midway
        objective_columns = {*objective.reads}
        batch = select_columns(batch, {*_INPUTS, "global_row", *objective_columns})
        slot_counts = BatchCounts.from_mask(objective.mask(batch))
        totals = {"tokens": slot_counts.tokens, "sequences": slot_counts.sequences}
        totals = self._reduce_over_slots(totals, dist.ReduceOp.SUM)
        counts = BatchCounts(**totals, width=float(self._response_width))
        if objective.needs_batch_statistics:
            prepared_columns = self._prepare_columns(batch, objective)
            batch, objective_columns = batch.select(), objective_columns | prepared_columns.keys()
            for name, values in prepared_columns.items():
                batch.batch[name] = values
        self.module.train()
        if self._has_dropout:  # a resumed run must draw the same dropout masks
            update_index = self.optimizer.updates + self.optimizer.skipped_updates
            torch.manual_seed(fold_seed(self._seed, update_index, self._dropout_rank))
        return batch, objective_columns, counts

    def _end_update(self, results: Iterable[MicroBatchResult]) -> dict[str, float]:
        """Updates the weights; returns the metrics over all micro-batches and slots."""
        assert self.optimizer is not None
        # Values are read after all micro-batches: each read synchronizes host and GPU.
        totals: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for objective_output, weight in results:
            for name, value in objective_output.maxima.items():
                maxima[name] = max(maxima.get(name, float("-inf")), float(value))
            for name, share in objective_output.sums.items():
                totals[name] = totals.get(name, 0.0) + float(share)
            for name, mean in objective_output.means.items():
                totals[name] = totals.get(name, 0.0) + float(mean) * weight
        totals = self._reduce_over_slots(totals, dist.ReduceOp.SUM)
        maxima = self._reduce_over_slots(maxima, dist.ReduceOp.MAX)
        return totals | maxima | self.optimizer.step()

    def _infer_micro_batches(
        self, batch: DataProto, options: Options
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yields the outputs of each micro-batch with its row indices."""
        for indices, micro_batch in self._micro_batches(batch, self._infer_micro_batch_rule):
            yield indices, self._forward(micro_batch, options)

    def _prepare_columns(self, batch: DataProto, objective: Objective) -> dict[str, Tensor]:
        """Computes the columns that need statistics over the whole mini-batch.

        Rows are sorted by `global_row`, so that the result does not depend on the number of ranks.
        """
        is_real = real_row_mask(batch)
        outputs = self.infer(batch, **objective.options)
        outputs = {name: values[is_real] for name, values in outputs.items()}
        minibatch = without_padding(batch)
        slot_rows = slice(0, len(minibatch))  # this slot's rows of the mini-batch
        if self._data_group is not None:
            minibatch, outputs, slot_rows = _gather_rows(minibatch, outputs, self._data_group)
        if minibatch.has_column("global_row"):
            order = minibatch.batch["global_row"].argsort()
        else:
            order = torch.arange(len(minibatch))
        outputs = {name: values[order] for name, values in outputs.items()}
        inverse_order = order.argsort()[slot_rows]
        columns = {}
        for name, values in objective.prepare(outputs, minibatch.select_idxs(order)).items():
            columns[name] = values.new_zeros(len(batch), *values.shape[1:])
            columns[name][is_real] = values[inverse_order]
        return columns

    def _forward(self, micro_batch: DataProto, options: Options) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.module(self._pack(micro_batch), **options)
        return outputs

    def _pack(self, micro_batch: DataProto) -> PackedRows:
        """Packs the rows of a micro-batch on the device; a sequence group splits the packed tokens."""
        columns = micro_batch.batch
        packed = pack_rows(
            columns["prompts"],
            columns["responses"],
            columns["attention_mask"],
            columns["response_mask"],
            share_prompts=self._share_prompts,
            with_packed_positions=self._routing is not None,
        )
        if self._sequence_group is not None:
            from hone.ops.ulysses import split_rows

            packed = split_rows(packed, self._sequence_group)
        if self._routing is not None and micro_batch.has_column("routed_experts"):
            packed = packed.with_experts(columns["routed_experts"])
        return packed if self.device.type == "cpu" else packed.to(self.device)

    @property
    def _routing(self) -> Routing | None:
        return getattr(self.module, "routing", None)

    def _micro_batches(
        self, batch: DataProto, rule: MicroBatchRule
    ) -> list[tuple[list[int], DataProto]]:
        """Returns the row indices and the rows of each micro-batch; an empty one gets a dummy row."""
        columns = batch.batch
        lengths = columns["attention_mask"].sum(1).tolist()
        shared_tokens = shared_prompt_lengths(columns["prompts"], columns["attention_mask"])
        micro_batch_indices = rule.split(lengths, shared_tokens)
        if self._data_group is not None:  # all ranks need the same number of collectives
            max_count = torch.tensor(len(micro_batch_indices))
            dist.all_reduce(max_count, dist.ReduceOp.MAX, group=self._data_group)
            micro_batch_indices = rule.split(
                lengths, shared_tokens, min_micro_batches=int(max_count)
            )
        return [
            (indices, batch.select_idxs(indices) if indices else _dummy_row(batch))
            for indices in micro_batch_indices
        ]

    @functools.cached_property
    def model_facts(self) -> ModelFacts:
        return ModelFacts.of(self._lm)

    @property
    def updates(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.updates

    @property
    def _lm(self) -> Any:
        return self.module.lm

    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Keeps offloaded tensors on the device inside the block; nested blocks do not move them."""
        if self.offload is None:
            return nullcontext()
        return self.offload.on_device(optimizer=optimizer)

    def advance_schedule(self) -> None:
        assert self.optimizer is not None, "this engine only runs forward"
        self.optimizer.advance_schedule()

    def named_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.model_facts.has_adapters:
            with self._gathered():
                yield from lora.merged_weights(self._lm)
            return
        with self.on_device():
            for name, parameter in self.module.named_parameters():
                yield name.removeprefix("lm."), lora.full_tensor(parameter)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if not self.model_facts.has_adapters:
            raise ValueError("this model has no adapters; use named_hf_weights")
        with self.on_device():
            yield from lora.adapter_weights(self._lm)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        if not isinstance(self.module, PolicyModel):
            raise TypeError(
                f"a {type(self.module).__name__} does not decode; lease the actor's engine"
            )
        with self._gathered():
            self.module.eval()
            reload_count = 0 if self.offload is None else self.offload.reload_count
            yield Lease(self.module, self._gather_count + self._load_count + reload_count)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gathers the full parameters on every rank inside the block."""
        self._gather_count += self._sharded_module is not None
        sharded = self._sharded_module
        gather_context = nullcontext() if sharded is None else sharded.gathered()
        with self.on_device(), gather_context:
            yield

    def save(self, folder: Path, contents: Collection[str]) -> None:
        with self.on_device(optimizer=True):
            save_checkpoint(folder, self.module, self.optimizer, contents)

    def load(self, folder: Path, contents: Collection[str] | None = None) -> None:
        with self.on_device(optimizer=True):
            load_checkpoint(folder, self.module, self.optimizer, contents)
        self._load_count += 1

    def export(self, folder: Path, tokenizer: Tokenizer) -> None:
        adapter_copies = {}
        with self.on_device():
            weights = self._host_copies(self.named_hf_weights())
            if self.model_facts.has_adapters:
                adapter_copies = self._host_copies(self.named_adapter_weights())
        if not self.mesh.is_writer:
            return
        base = self._lm.get_base_model() if self.model_facts.has_adapters else self._lm
        # transformers' classifiers need a padding token for batches.
        if hasattr(base, "score") and base.config.pad_token_id is None:
            base.config.pad_token_id = tokenizer.pad_token_id
        with without_progress_bar():
            base.save_pretrained(folder / EXPORT_FOLDER, state_dict=weights)
        tokenizer.save_pretrained(folder / EXPORT_FOLDER)
        if adapter_copies:
            lora.save_adapter(self._lm, adapter_copies, folder / lora.ADAPTER_FOLDER)

    def _host_copies(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns host copies on the rank that writes files, {} on others; all ranks must call this."""
        copies = {}
        for name, tensor in weights:
            if self.mesh.is_writer:
                copies[name] = tensor.cpu().contiguous().clone()
        return copies

    def _reduce_over_slots(
        self, values: dict[str, float], operation: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        """Reduces each value over the data-parallel slots."""
        if self._data_group is None or not values:
            return values
        names = sorted(values)
        reduced_values = torch.tensor([values[name] for name in names], dtype=torch.float64)
        dist.all_reduce(reduced_values, operation, group=self._data_group)
        return dict(zip(names, reduced_values.tolist(), strict=True))


def select_columns(batch: DataProto, columns: Collection[str]) -> DataProto:
    """Returns the batch with only the given columns and `padded_row`; missing columns are ignored."""
    available = batch.batch.keys()
    names = [name for name in available if name in columns or name == PADDED_ROW]
    return batch.select(batch_keys=names, non_tensor_batch_keys=[])


def _dummy_row(batch: DataProto) -> DataProto:
    """Returns a row without response tokens, so that a rank without rows can join the collectives."""
    tensors = {name: x.new_zeros(1, *x.shape[1:]) for name, x in batch.batch.items()}
    tensors["attention_mask"][:, batch.batch["prompts"].shape[1] - 1] = 1
    if "routed_experts" in tensors:
        from hone.models.routing import NOT_RECORDED

        # Zeros would replay expert 0 several times; with NOT_RECORDED the router chooses the experts.
        tensors["routed_experts"].fill_(NOT_RECORDED)
    return DataProto.from_dict(tensors, meta_info=dict(batch.meta_info))


def _gather_rows(
    batch: DataProto, outputs: Mapping[str, Tensor], group: dist.ProcessGroup
) -> tuple[DataProto, dict[str, Tensor], slice]:
    """Returns the rows and outputs of all data-parallel slots in order, and the slice of this slot's rows."""
    slot = group.rank()
    slots: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = [({}, {})] * group.size()
    dist.all_gather_object(slots, (dict(batch.batch.items()), dict(outputs)), group)
    counts = [len(columns["responses"]) for columns, _ in slots]
    start = sum(counts[:slot])
    all_columns = {name: torch.cat([c[name] for c, _ in slots]) for name in slots[0][0]}
    all_outputs = {name: torch.cat([o[name] for _, o in slots]) for name in slots[0][1]}
    slot_rows = slice(start, start + counts[slot])
    return DataProto.from_dict(all_columns, meta_info=dict(batch.meta_info)), all_outputs, slot_rows


def move_to_device(micro_batch: DataProto, device: torch.device) -> DataProto:
    """Moves a micro-batch to the device in stream order, so that the host does not wait for the GPU."""
    if device.type == "cpu":
        return micro_batch
    tensors = {name: to_device(x, device) for name, x in micro_batch.batch.items()}
    return DataProto.from_dict(tensors, meta_info=dict(micro_batch.meta_info))
