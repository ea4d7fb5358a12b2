"""Two fixes for vLLM's CPU build: an exact replacement of its LoRA operator, and a workaround for a fault at start-up.

The CPU build gathers one copy of the adapter's matrices per token before it multiplies. With one adapter slot, used by
every request, a plain matrix product gives the same numbers in a fraction of the time. Only this file touches private
names of vLLM: versions other than WRITTEN_FOR keep their operator, the start-up self-test covers the replacement, and
TURNWISE_CPU_LORA=vllm turns it off. Never use it where some requests have no adapter: all of them would get it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

WRITTEN_FOR = "0.32.0"


def replace_lora_operator() -> str | None:
    """Replace the operator where that is safe. Returns the reason for not doing it, in one line, or None."""
    import torch
    import vllm
    from vllm.lora.punica_wrapper import punica_cpu

    if os.environ.get("TURNWISE_CPU_LORA") == "vllm":
        return "CPU LoRA: vLLM's own operator (TURNWISE_CPU_LORA=vllm)"
    if not vllm.__version__.startswith(WRITTEN_FOR):
        return f"CPU LoRA: vLLM's own, slower operator (the replacement is for {WRITTEN_FOR}, not {vllm.__version__})"

    def product(x, stacked, y):
        """Multiply x (tokens, in) by the only slot of stacked (1, [1,] out, in), in y's dtype."""
        if stacked.shape[0] != 1:
            raise RuntimeError("the CPU LoRA replacement needs max_loras=1")
        return torch.nn.functional.linear(x.to(y.dtype), stacked.reshape(stacked.shape[-2:]).to(y.dtype))

    def add(y, out, offset, size, add_inputs):
        if add_inputs:
            y[:, offset : offset + size] += out[:, :size]
        else:
            y[:, offset : offset + size] = out[:, :size]

    def shrink(x, stacked, y, indices, scaling=1.0):
        out = product(x, stacked, y)
        y[:, : out.shape[1]] = out.mul_(scaling)

    def expand(x, stacked, y, indices, add_inputs=True):
        out = product(x, stacked, y)
        add(y, out, 0, min(out.shape[1], y.shape[1]), add_inputs)  # model and adapter may pad the output differently

    def expand_slice(x, stacked, y, indices, offset, size, add_inputs=True):
        add(y, product(x, stacked, y), offset, size, add_inputs)

    # The prefill variants have six more arguments that map tokens to adapters: not needed with one adapter.
    def sgmv_shrink(x, stacked, y, a, b, c, d, e, f, scaling):
        shrink(x, stacked, y, None, scaling)

    def sgmv_expand(x, stacked, y, a, b, c, d, e, f, add_inputs=False):
        expand(x, stacked, y, None, add_inputs)

    def sgmv_expand_slice(x, stacked, y, a, b, c, d, e, f, offset, size, add_inputs=False):
        expand_slice(x, stacked, y, None, offset, size, add_inputs)

    punica_cpu.bgmv_shrink, punica_cpu.bgmv_expand, punica_cpu.bgmv_expand_slice = shrink, expand, expand_slice
    punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand = sgmv_shrink, sgmv_expand
    punica_cpu.sgmv_expand_slice = sgmv_expand_slice
    return None


@contextlib.contextmanager
def hidden_from_start_up() -> Iterator[None]:
    """Hide a module of llvmlite (numba, bm25s) while vLLM starts and reads `__dict__` of all attributes of all modules:
    llvmlite's library object returns a function for it."""
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module
