"""A training engine outside the package: plain SGD, one row at a time, on one rank."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from hone.algorithms.policy_losses.policy_loss import BatchCounts, batch_counts
from hone.engine.contract import EngineSpec, Lease, Mesh, ModelFacts
from hone.models.load import load_causal_lm
from hone.models.policy import PolicyModel
from hone.ops.rows import pack_rows


class PlainEngine:
    mesh = Mesh()

    def __init__(self, spec: EngineSpec) -> None:
        lm = load_causal_lm(spec.model_path, dtype=spec.dtype, device=spec.device)
        self.module = PolicyModel(lm.to(spec.device))
        self.device, self.updates, self._width = spec.device, 0, float(spec.response_width)
        self._lr = spec.optim.lr if spec.optim else 0.0
        size = sum(p.numel() for p in lm.parameters())
        vocabulary = lm.config.vocab_size
        self.model_facts = ModelFacts(vocabulary, None, (), spec.dtype, size, size * 4, 1, 1, 1)

    def _forward(self, row, options):
        names = ("prompts", "responses", "attention_mask", "response_mask")
        packed = pack_rows(*(row.batch[name] for name in names), share_prompts=False)
        return self.module(packed, **options)

    def train_minibatch(self, batch, objective):
        metrics = {}
        with batch_counts(self.counts(objective.mask(batch))):
            for i in range(len(batch)):
                row = batch.select_idxs([i])
                output = objective(self._forward(row, objective.options), row)
                output.loss.backward()
                for name, share in output.sums.items():
                    metrics[name] = metrics.get(name, 0.0) + float(share)
        metrics = self.reduce(metrics)
        trained = [p for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trained]))
        with torch.no_grad():
            for parameter in trained:
                parameter -= self._lr * parameter.grad
                parameter.grad = None
        self.updates += 1
        return {**metrics, "grad_norm": norm, "lr": self._lr, "skipped_updates": 0.0}

    def counts(self, mask):
        """Returns the counts of the mini-batch over all ranks."""
        counts = BatchCounts.from_mask(mask)
        return BatchCounts(counts.tokens, counts.sequences, self._width)

    def reduce(self, metrics):
        """Sums gradients and metrics over all ranks."""
        return metrics

    @torch.no_grad()
    def infer(self, batch, *, adapters=True, **options):
        rows = [self._forward(batch.select_idxs([i]), options) for i in range(len(batch))]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    @contextmanager
    def lease(self):
        self.module.eval()
        yield Lease(self.module, address_version=0)

    def on_device(self, *, optimizer=False):
        return nullcontext()

    def advance_schedule(self):
        pass

    def named_hf_weights(self):
        return iter(self.module.lm.named_parameters())

    def named_adapter_weights(self):
        return iter(())

    def save(self, folder, contents):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((self.updates, self.module.state_dict()), folder / "plain.pt")

    def load(self, folder, contents=None):
        self.updates, state = torch.load(folder / "plain.pt")
        self.module.load_state_dict(state)

    def export(self, folder, tokenizer):
        self.module.lm.save_pretrained(folder / "huggingface")


class HalfAnEngine:
    """An engine without most members of the contract."""

    mesh = Mesh()

    def __init__(self, spec: EngineSpec) -> None:
        pass
