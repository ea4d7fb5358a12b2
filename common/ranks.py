"""The ranks of a run: the number of this one, and sums and lists over all of them."""

import os
from typing import TypeVar

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def total(value: float) -> float:
    """Return the sum of a number (or a tensor of one) over all ranks."""
    import torch
    import torch.distributed as dist

    if world_size() == 1:
        return float(value)
    box = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def alike(value: float) -> bool:
    """Return whether a number is the same on all ranks; True before there is a process group."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    box = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box) == dist.get_world_size() * value


def from_rank_0(value: T) -> T:
    """Return rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def from_local_rank_0(value: T) -> T:
    """Return the value of this node's first rank, on every rank of the node (GROUP_RANK is torchrun's node number)."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    values = [None] * world_size()
    node = os.environ.get("GROUP_RANK", "0")
    dist.all_gather_object(values, (node, local_rank(), value))
    return next(v for n, r, v in values if (n, r) == (node, 0))


def gather(items: list[T]) -> list[T]:
    """Return the items of all ranks in order of rank on rank 0, an empty list elsewhere."""
    if world_size() == 1:
        return items
    import torch.distributed as dist

    parts = [None] * world_size() if rank() == 0 else None
    dist.gather_object(items, parts)
    return [item for part in parts or [] for item in part]
