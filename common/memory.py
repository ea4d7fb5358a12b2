"""Memory of this rank's GPU, as logged. Without a GPU: of the process."""

import math
import resource

import torch

LEAST_FREE = [math.inf]  # bytes of the GPU that no process used, at the worst moment since the last line of the log
ENGINE_BYTES = 0  # what vLLM's start allocated; PyTorch counts it as allocated even while the engine sleeps
GIB = 2**30


def allocated() -> int:
    """Return the bytes that PyTorch's allocator holds for tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak_gb() -> float:
    """Return the largest allocation since the last call, in GiB, without what the engine allocated at its start.

    Without a GPU: the largest resident size of the process so far.
    """
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peak = torch.cuda.max_memory_allocated() - ENGINE_BYTES
    torch.cuda.reset_peak_memory_stats()
    return peak / GIB


def note_free() -> None:
    """Remember how much of the GPU is free now, if that is the least so far."""
    if torch.cuda.is_available():
        LEAST_FREE[0] = min(LEAST_FREE[0], torch.cuda.mem_get_info()[0])


def least_free_gb() -> float | None:
    """Return the least free memory of the GPU since the last call, in GiB; None without a GPU."""
    note_free()
    least, LEAST_FREE[0] = LEAST_FREE[0], math.inf
    return least / GIB if math.isfinite(least) else None
