"""Process rewards beside transformers on padded rows, in one run: seconds and the largest difference.

Groups of eight responses to a prompt, with steps of random length. Transformers gets the tokens that our
worker reads, sorted by length into batches of the same token budget.
`python -m benchmarks.process_rewards [OUT.json]`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import median_s
from hone.agents.collate import collate_outputs
from hone.agents.contract import AgentLoopOutput
from hone.models.tiny import character_tokenizer
from hone.protocol import DataProto
from hone.verl.dialect import load_config
from hone.workers.process_reward_model import ProcessRewardModelWorker

SIZES = {
    "cpu": {"hidden": 128, "layers": 4, "heads": 4, "kv": 2, "prompts": 8, "prompt": 60, "steps": 8},
    "cuda": {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "prompts": 64, "prompt": 200, "steps": 40},
}  # fmt: skip
"""The larger one has the shape of SmolLM2-135M."""
N, BUDGET = 8, 16384


def save_judge(folder: Path, size: dict[str, int]) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    tokenizer = character_tokenizer(words=("\n\n",))
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=size["hidden"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"], intermediate_size=size["hidden"] * 8 // 3, num_labels=2,
        pad_token_id=0, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def batch_of(tokenizer: Any, size: dict[str, int]) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    separator = tokenizer.encode("\n\n", add_special_tokens=False)

    def words(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(5, len(tokenizer), (length,), generator=draw).tolist()

    rows = []
    for _ in range(size["prompts"]):
        prompt = words(size["prompt"] // 2, size["prompt"])
        for _ in range(N):
            steps = int(torch.randint(2, size["steps"], (1,), generator=draw))
            response = [token for _ in range(steps) for token in (*words(10, 60), *separator)]
            rows.append(AgentLoopOutput(prompt, response, [1] * len(response)))
    return collate_outputs(rows, pad_token_id=0)


class Padded:
    """Transformers over right-padded batches of similar length."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForTokenClassification

        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=dtype)
        self.model, self.device = model.to(device).eval(), device

    @torch.no_grad()
    def __call__(self, rows: list[list[int]]) -> list[torch.Tensor]:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        while order:
            fits = [n for n, i in enumerate(order, 1) if n * len(rows[i]) <= BUDGET]
            part, order = order[: max(fits, default=1)], order[max(fits, default=1) :]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[i]) for i in part], True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([[len(rows[i])] for i in part])
            logits = self.model(
                input_ids=ids.to(self.device), attention_mask=mask.long().to(self.device)
            ).logits.float()
            tanh = torch.tanh((logits[..., 1] - logits[..., 0]) / 2).cpu()
            for place, i in enumerate(part):
                scores[i] = tanh[place, : len(rows[i])]
        return scores


def measure(folder: Path, dtype: str, size: dict[str, int]) -> dict[str, float]:
    worker = ProcessRewardModelWorker(
        load_config(
            [
                "reward_model.enable=true",
                "reward_model.type=prm",
                f"reward_model.model.path={folder}",
                f"actor_rollout_ref.model.path={folder}",
                f"reward_model.forward_max_token_len_per_gpu={BUDGET}",
                f"reward_model.model.fsdp_config.dtype={dtype}",
                "reward_model.credit_assignment=gamma-decay",
            ]
        )
    )
    worker.init_model()
    batch = batch_of(worker.tokenizer, size)
    device = worker.engine.device
    padded = Padded(folder, device, next(worker.engine.module.parameters()).dtype)
    newline = worker.tokenizer.encode("\n", add_special_tokens=False)[0]
    scored = worker.compute_rm_score(batch).batch
    columns = batch.batch
    ids = torch.where(scored["step_mask"], newline, columns["responses"])
    ids = torch.cat([columns["prompts"], ids], 1)
    exists = columns["attention_mask"].bool()
    rows = [row[there].tolist() for row, there in zip(ids, exists, strict=True)]
    expected = padded(rows)
    gap = 0.0
    for row, scores in enumerate(expected):
        ends = scored["step_mask"][row].nonzero().squeeze(1)
        own = scored["process_scores"][row][ends]
        prompt = len(scores) - int(columns["response_mask"][row].sum())
        gap = max(gap, float((own - scores[prompt + ends]).abs().max()))
    ours = median_s(lambda: worker.compute_rm_score(batch), device)
    theirs = median_s(lambda: padded(rows), device)
    tokens = float(columns["attention_mask"].sum())
    print(f"{dtype}: ours {ours:.3f} s, padded {theirs:.3f} s, {tokens:.0f} tokens, gap {gap:.2e}")
    return {
        "seconds": ours,
        "padded_seconds": theirs,
        "over_padded": theirs / ours,
        "tokens_per_s": tokens / ours,
        "largest_difference": gap,
    }


def main() -> dict[str, Any]:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        save_judge(Path(name), SIZES[kind])
        dtypes = ("fp32", "bf16") if kind == "cuda" else ("fp32",)
        return {dtype: measure(Path(name), dtype, SIZES[kind]) for dtype in dtypes}


if __name__ == "__main__":
    numbers = main()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(numbers, indent=1) + "\n")
