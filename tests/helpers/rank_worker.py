"""Used by test_ranks.py, alone or under torchrun: the gradient of an optimizer step over each rank's share of groups."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import random_groups  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import train_grpo  # noqa: E402
from common import ranks  # noqa: E402
from common.batch import pack  # noqa: E402
from common.policy import Policy  # noqa: E402


def main(model, target):
    if ranks.world_size() > 1:
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
    torch.save(results, f"{target}.{ranks.rank()}")
    if ranks.world_size() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
