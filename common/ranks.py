"""The processes of a run: which one this is, and sums and lists over all of them."""

import os


def rank():
    return int(os.environ.get("RANK", 0))


def local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


def total(value):
    """The sum of a number over all ranks."""
    import torch
    import torch.distributed as dist

    if world_size() == 1:
        return float(value)
    box = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def from_rank_0(value):
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def from_local_rank_0(value):
    """The value of this node's first rank, on every rank of the node (torchrun numbers nodes in GROUP_RANK)."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    values = [None] * world_size()
    node = os.environ.get("GROUP_RANK", "0")
    dist.all_gather_object(values, (node, local_rank(), value))
    return next(v for n, r, v in values if (n, r) == (node, 0))


def gather(items):
    """On rank 0 the items of all ranks in order of rank, elsewhere an empty list."""
    if world_size() == 1:
        return items
    import torch.distributed as dist

    parts = [None] * world_size() if rank() == 0 else None
    dist.gather_object(items, parts)
    return [item for part in parts or [] for item in part]
