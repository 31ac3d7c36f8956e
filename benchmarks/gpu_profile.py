"""Where the milliseconds go: kernels of a decode chunk and of an update, by total time."""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import gpu_decode, gpu_train
from benchmarks.gpu_models import LARGE, SMALL, build
from hone.engine.build import build_engine
from hone.models.policy import PolicyModel
from hone.ops.rows import MicroBatchRule
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.workers.actor import PolicyObjective


def kernels(work: Callable[[], Any], top: int = 22) -> None:
    """Run once under the profiler and print the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += event.self_device_time_total
            total[event.name][1] += 1
    whole = sum(t for t, _ in total.values())
    print(f"  {whole / 1000:.2f} ms on the device")
    for name, (spent, count) in sorted(total.items(), key=lambda x: -x[1][0])[:top]:
        print(f"  {spent / 1000:9.3f} ms {count:6d} x {spent / count:9.1f} us  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--exact", action="store_true", help="with the kernels of rollout.exact")
    arguments = parser.parse_args()
    shape = LARGE if arguments.large else SMALL
    device = torch.device("cuda")
    lm = build(shape, device)
    for rows in (256, 512):
        print(f"decode, 32 steps of {rows} rows")
        asked = gpu_decode.prompts(rows, 128, shape.vocabulary)
        engine = gpu_decode.engine_for(lm, rows=rows, longest=256, exact=arguments.exact)
        gpu_decode.generate(engine, asked, [33] * rows)
        kernels(lambda: gpu_decode.generate(engine, asked, [33] * rows))  # noqa: B023
        asyncio.run(engine.close())
    print("update, 42 rows of 387 tokens")
    config = gpu_train.load_config(["actor_rollout_ref.model.path=none", "data.train_files=none"])
    actor = config.actor_rollout_ref.actor
    rule = MicroBatchRule(None, 8192)
    policy = PolicyModel(lm)
    engine = build_engine(
        policy, optim=actor.optim, grad_clip=1.0, fsdp=actor.fsdp_config, train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule, response_width=256,
    )  # fmt: skip
    policy.exact = ExactDecoder(policy) if arguments.exact else None
    batch = gpu_train._rows(42, 131, 256, shape.vocabulary)
    kernels(lambda: engine.train_minibatch(batch, PolicyObjective(actor, temperature=1.0)), top=36)


if __name__ == "__main__":
    main()
