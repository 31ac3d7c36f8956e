"""hone's extensions of vLLM's workers: log-probs before truncation, and tensors from buckets."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import hone.rollout
from hone.rollout.server_weights import fill_buckets


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with fakes of the parts of vLLM that it imports."""
    registry: dict[str, type] = {}
    factory = SimpleNamespace(_registry=registry, register_engine=registry.__setitem__)
    base = type("Base", (), {})
    names = ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
    for name, contents in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": dict.fromkeys(names, base),
    }.items():
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
    path = Path(hone.rollout.__path__[0]) / "vllm_worker.py"
    spec = importlib.util.spec_from_file_location("hone_vllm_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hone_vllm_worker", module)
    spec.loader.exec_module(module)
    assert registry == {module.BACKEND: module.BucketEngine}
    return module


class Sampler(torch.nn.Module):
    logprobs_mode = "raw_logprobs"

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        return self.compute_logprobs(logits)


@pytest.mark.parametrize("by_name", [False, True])
def test_log_probs_are_after_temperature_and_greedy_ones_at_one(worker: Any, by_name: bool) -> None:
    extension = worker.HoneWorker()
    extension.model_runner = SimpleNamespace(sampler=Sampler())
    extension.report_log_probs_before_truncation()
    logits = torch.randn(3, 7)
    metadata = SimpleNamespace(temperature=torch.tensor([0.5, 1.0, 0.0]))
    keywords = {"sampling_metadata": metadata} if by_name else {}
    sampled = extension.model_runner.sampler(logits, *([] if by_name else [metadata]), **keywords)
    divisor = torch.tensor([[0.5], [1.0], [1.0]])
    assert torch.equal(sampled, (logits / divisor).log_softmax(-1))
    greedy = SimpleNamespace(temperature=None)  # all requests are greedy
    assert torch.equal(extension.model_runner.sampler(logits, greedy), logits.log_softmax(-1))


def test_another_sampler_of_vllm_is_refused(worker: Any) -> None:
    extension = worker.HoneWorker()
    extension.model_runner = SimpleNamespace(sampler=torch.nn.Identity())
    with pytest.raises(RuntimeError, match="sampler Identity"):
        extension.report_log_probs_before_truncation()


def test_a_bucket_gives_its_tensors_also_after_it_is_filled_again(worker: Any) -> None:
    first = [("a", torch.randn(3, 5)), ("b", torch.arange(7, dtype=torch.bfloat16))]
    second = ("c", torch.ones(100))
    buckets = fill_buckets([*first, second], torch.device("cpu"), 100)
    engine = worker.BucketEngine()
    loaded: dict[str, torch.Tensor] = {}
    engine.model = SimpleNamespace(load_weights=loaded.update)
    engine.receive_weights(worker.BucketInfo(**next(buckets)))
    with_loader: dict[str, torch.Tensor] = {}  # as vLLM 0.22 calls `receive_weights`
    bucket = next(buckets)
    engine.receive_weights(worker.BucketInfo(**bucket), load_weights=with_loader.update)
    for name, tensor in first:
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert torch.equal(with_loader["c"], torch.ones(100))
    path = bucket["path"]
    buckets.close()
    assert not os.path.exists(path)


def test_a_draw_is_natives_for_its_seed_and_position(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest token whose cumulative mass exceeds the number of (seed, position)."""
    from hone.ops import counter_rng

    ops = ModuleType("vllm.v1.sample.ops.topk_topp_sampler")
    vars(ops)["apply_top_k_top_p"] = lambda logits, k, p: logits
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    monkeypatch.setitem(sys.modules, "hone_counter_rng", counter_rng)
    extension = worker.HoneWorker()
    positions = torch.arange(3, 203, dtype=torch.int32)
    seeds = torch.tensor([7, 2**63 - 1, -1, -(2**63)] * 50)
    requests = {
        str(i): SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"hone_seed": seed}))
        for i, seed in enumerate(seeds.tolist())
    }
    extension.model_runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=torch.nn.Module()),
        requests=requests,
        input_batch=SimpleNamespace(
            num_tokens_no_spec=torch.cat([positions, positions]).numpy(), req_ids=list(requests)
        ),
    )
    extension.sample_by_seed_and_position()
    logits = torch.randn(200, 11)
    logits[:, [0, 10]] = -torch.inf
    sampler = extension.model_runner.sampler.topk_topp_sampler
    tokens, log_probs = sampler.forward(logits.clone(), {}, None, None)
    numbers = counter_rng.uniform(seeds, positions.long())
    expected = (logits.softmax(-1).double().cumsum(-1) <= numbers[:, None]).sum(-1)
    assert log_probs is None
    assert torch.equal(tokens, expected)
    assert 1 <= int(tokens.min()) <= int(tokens.max()) <= 9
