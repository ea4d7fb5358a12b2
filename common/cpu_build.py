"""What vLLM's CPU build needs from us: an exact replacement of its LoRA operator, and a way around a fault at its start.

The CPU build gathers one copy of the adapter's matrices per token before it multiplies. With one adapter slot, and every request on
that adapter, a plain matrix product gives the same numbers and takes a fraction of the time. This is the one place where
Turnwise touches private names of vLLM: it is left out on another version than the one it was written against, the
start-up self-test checks it like everything else, and TURNWISE_CPU_LORA=vllm turns it off.

Never use it where requests without the adapter run beside requests with it: it would give the adapter to all of them.
"""

import contextlib
import os
import sys

WRITTEN_FOR = "0.32.0"


def replace_lora_operator():
    """Replace the operator where that is safe. Returns one line that says what was done, for the log."""
    import torch
    import vllm
    from vllm.lora.punica_wrapper import punica_cpu

    if os.environ.get("TURNWISE_CPU_LORA") == "vllm":
        return "CPU LoRA: vLLM's own operator (TURNWISE_CPU_LORA=vllm)"
    if not vllm.__version__.startswith(WRITTEN_FOR):
        return f"CPU LoRA: vLLM's own, slower operator (our replacement is for vLLM {WRITTEN_FOR}, this is {vllm.__version__})"

    def product(x, stacked, y):
        """x (tokens, in) times the only slot of stacked (1, [1,] out, in), in y's dtype."""
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

    # The prefill forms say in six more arguments which tokens belong to which adapter: needless with one.
    def sgmv_shrink(x, stacked, y, a, b, c, d, e, f, scaling):
        shrink(x, stacked, y, None, scaling)

    def sgmv_expand(x, stacked, y, a, b, c, d, e, f, add_inputs=False):
        expand(x, stacked, y, None, add_inputs)

    def sgmv_expand_slice(x, stacked, y, a, b, c, d, e, f, offset, size, add_inputs=False):
        expand_slice(x, stacked, y, None, offset, size, add_inputs)

    punica_cpu.bgmv_shrink, punica_cpu.bgmv_expand, punica_cpu.bgmv_expand_slice = shrink, expand, expand_slice
    punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand = sgmv_shrink, sgmv_expand
    punica_cpu.sgmv_expand_slice = sgmv_expand_slice
    return "CPU LoRA: exact matrix product in place of vLLM's per-token gather"


@contextlib.contextmanager
def hidden_from_start_up():
    """Hide one module of llvmlite (numba, bm25s) while vLLM starts: it asks every attribute of every loaded module for its `__dict__`,
    and llvmlite's library object answers with a function of that name."""
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module
