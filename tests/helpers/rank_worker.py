"""The gradient of an optimizer step over each rank's share of groups, for test_ranks.py."""

import random_groups
import torch
import torch.distributed as dist

import train_grpo
from common import ranks
from common.batch import pack
from common.policy import Policy


def main(model, target):
    """Save {(count, average): gradient, "skipped", "unchanged", "alike"} of this rank to `target`.<rank>."""
    if ranks.world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    args = train_grpo.Args(model=model, lora_rank=8, lora_alpha=16, lr=1e-3, kl_coef=0.1, max_context=1024)
    torch.manual_seed(0)
    policy = Policy(args)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters:
            p += torch.randn(p.shape, generator=generator) * 0.05
    results = {}
    for count in (3, 1):  # 2 + 1 groups on two ranks; 1 + 0
        for average in ("token", "turn", "trajectory", "constant"):
            args.average = average
            groups, advantages = random_groups.groups(count=count)
            mine = slice(ranks.rank(), None, ranks.world_size())
            batch = pack(groups[mine], advantages[mine])
            train_grpo.prepare(batch, policy, args)
            batch.weight = train_grpo.token_weights(batch, ranks.total, args)
            policy.optimizer.zero_grad()
            for micro in batch.micro(100):
                loss, _ = train_grpo.policy_loss(policy.logps(micro), micro, args)
                loss.backward()
            results[count, average] = policy.gradient()
    if ranks.rank() == ranks.world_size() - 1:  # a fault on one rank must skip the step on all
        policy.parameters[0].grad = torch.full_like(policy.parameters[0], float("nan"))
    before = [p.detach().clone() for p in policy.parameters]
    results["skipped"] = policy.step()["skipped"]
    results["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, policy.parameters))
    results["alike"] = [ranks.alike(3), ranks.alike(ranks.rank() + 3)]
    torch.save(results, f"{target}.{ranks.rank()}")
