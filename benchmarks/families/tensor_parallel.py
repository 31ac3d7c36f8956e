"""Tensor parallel layers of every decoder family against the whole model: log-probs and gradients.

`python -m benchmarks.families.tensor_parallel [FAMILY …]` prints one line per family and shape.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.families.tiny import randomise, tiny_config
from hone.controller.worker import free_port
from hone.engine.tensor_parallel import TensorParallel, tensor_parallel_plan
from hone.models.families import FAMILIES
from hone.models.lora import AdapterSettings, full_tensor, init_lora
from hone.models.policy import PolicyModel, register_attention
from hone.ops.rows import pack_rows

ADAPTERS = AdapterSettings(4, 8.0, 0.0, "all-linear", None, None)
BOUND = 1e-5


def tiny_policy(family: str, *, flipped: bool, adapters: bool) -> PolicyModel:
    """A tiny model whose heads divide into two."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, flipped=flipped)
    text = config.get_text_config()
    if getattr(text, "num_key_value_heads", None) == 1:
        text.num_key_value_heads = 2
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention()).float()
    policy = PolicyModel(lm)
    if adapters:
        policy.lm = init_lora(lm, ADAPTERS, seed=0)
    randomise(policy.lm)
    lm.tie_weights()
    return policy.eval()


def outputs(policy: PolicyModel) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(3, 90, (4, n), generator=random) for n in (5, 7))
    mask = torch.ones(4, 12, dtype=torch.int64)
    packed = pack_rows(prompts, responses, mask, mask[:, 5:], share_prompts=False)
    return policy(packed, temperature=0.8, with_entropy=True, with_sum_pi_squared=True)


def backward(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """The outputs; gradients of a loss that weighs every token differently stay in the parameters."""
    found = outputs(policy)
    weights = torch.linspace(0.5, 1.5, 28).view(4, 7)
    ((found["log_probs"] + 0.3 * found["entropy"]) * weights).sum().backward()
    return {name: values.detach() for name, values in found.items()}


def difference(
    family: str, mesh: DeviceMesh, *, flipped: bool = False, adapters: bool = False
) -> dict[str, float]:
    """The largest differences from the whole model: outputs, gradients by norm, outputs when gathered."""
    whole = tiny_policy(family, flipped=flipped, adapters=adapters)
    split = copy.deepcopy(whole)
    parallel = TensorParallel(split, mesh)
    expected, found = backward(whole), backward(split)
    exact = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    scale = max(float(g.norm()) for g in exact.values())
    own = {name: p.grad for name, p in split.named_parameters() if p.grad is not None}
    assert own.keys() == exact.keys(), family
    gradient = max(float((full_tensor(own[n]) - g).norm()) / scale for n, g in exact.items())
    with parallel.gathered(), torch.no_grad():
        gathered = outputs(split)
    return {
        "outputs": max(float((found[n] - x).abs().max()) for n, x in expected.items()),
        "gradient": gradient,
        "gathered": max(float((gathered[n] - x).abs().max()) for n, x in expected.items()),
    }


def _main(rank: int, port: int, families: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for family in families:
        for flipped in (False, True):
            found = difference(family, mesh, flipped=flipped)
            if rank == 0:
                shape = "flipped" if flipped else "default"
                numbers = " ".join(f"{name} {value:.1e}" for name, value in found.items())
                verdict = "equal" if max(found.values()) < BOUND else "DIFFERS"
                sys.stdout.write(f"{family:20} {shape} {numbers} {verdict}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    planned = [name for name in sorted(FAMILIES) if tensor_parallel_plan(tiny_config(name))]
    mp.spawn(_main, (free_port(), sys.argv[1:] or planned), nprocs=2)
