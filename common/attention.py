"""Token log-probabilities from hidden states, in chunks, and attention over packed segments."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface

MOMENTS = ("entropy", "squares")  # extra results of token_logps: entropy in nats, sum of squared probabilities


def chunk_tokens(vocabulary: int, cuda: bool) -> int:
    """Return how many tokens' logits are in memory at once."""
    return max(16, 2 ** (27 if cuda else 24) // vocabulary)


def exact_product(weight: Tensor) -> Callable[..., Tensor]:
    """Return product(x, transposed=False): x @ weight or x @ weight.T, summed and returned in float32.

    Logits rounded to bfloat16 would be the largest difference between trainer and engine. vLLM computes them in the
    same way under head_dtype="float32".
    """
    if weight.dtype == torch.float32:
        return lambda x, transposed=False: x @ (weight.T if transposed else weight)
    if weight.is_cuda:
        return lambda x, transposed=False: torch.mm(x, weight.T if transposed else weight, out_dtype=torch.float32)
    wide = weight.float()  # torch.mm has out_dtype on CUDA only
    return lambda x, transposed=False: x.float() @ (wide.T if transposed else wide)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature, moments):
        n, needed = len(ids), ctx.needs_input_grad[0]
        logps = torch.empty(n, device=hidden.device)
        measured = {name: torch.empty_like(logps) for name in moments}
        slope = torch.empty_like(hidden) if needed else None
        chunk = chunk_tokens(len(weight), hidden.is_cuda)
        product = exact_product(weight)
        for i in range(0, n, chunk):
            part = slice(i, i + chunk)
            logits = product(hidden[part], transposed=True).div_(temperature)
            log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
            logps[part] = log_p.gather(-1, ids[part, None])[:, 0]
            if needed or moments:
                p = log_p.exp()
            if "entropy" in moments:
                measured["entropy"][part] = -(p * log_p).sum(-1)
            if "squares" in moments:
                measured["squares"][part] = p.square().sum(-1)
            if needed:
                slope[part] = (weight[ids[part]] - product(p.to(weight.dtype))) / temperature
            logits = log_p = p = None  # free the memory before the next chunk
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(*measured.values())
        return logps, *measured.values()

    @staticmethod
    def backward(ctx, grad, *_):
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None].to(slope.dtype), None, None, None, None


def token_logps(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, moments: Sequence[str] = ()
) -> tuple[Tensor, ...]:
    """Return float32 log-probabilities of ids under softmax(hidden @ weight.T / temperature), and `moments`: (N,) each.

    Works in chunks of tokens, so the (N, V) matrix never exists. The output layer is frozen: the gradient for a token's
    hidden state, weight[id] - softmax @ weight, is computed in the forward pass, and nothing is computed twice.
    """
    return _TokenLogps.apply(hidden, weight, ids, temperature, tuple(moments))


def register_segment_attention() -> None:
    """Make attn_implementation="segments" known to transformers."""
    AttentionInterface.register("segments", segment_attention)


def segment_attention(module, query, key, value, attention_mask, scaling=None, segments=None, **kwargs):
    """Compute exact causal attention within each packed segment, without an n^2 mask. Returns (1, T, heads, head_dim).

    query, key, value: (1, heads, T, head_dim); segments: [(start, end), ...] that cover T in order.
    """
    outputs, grouped = [], True
    if query.is_cuda and query.dtype == torch.float32:
        # Fused kernels with grouped heads have no float32: the remaining one would keep n^2 scores.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    for start, end in segments:
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        outputs.append(attend(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
