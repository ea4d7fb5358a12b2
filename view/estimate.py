"""The memory plan: an estimate of what a run will need on its GPU, before anything is loaded.

It is computed from the model's configuration and the arguments. The figures for parameters (the model is built without
storage), adapter, 4-bit packing, optimizer and KV bytes per token are exact. Activations are counted tensor by tensor
for a decoder with a gated MLP. Figures marked ASSUMED and the engine's working memory are round, from vLLM 0.32's
source. Nothing was measured on a GPU.

The plan covers two moments, each a list of rows that add up to one rank's memory: `sampling` (engine awake, trainer
idle) and `update` (engine asleep according to --sleep, during a forward and backward pass).
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import NamedTuple

import torch

from common.attention import chunk_tokens

GIB = 2**30
CARDS = {"24 GB": 23.6, "48 GB": 47.4, "80 GB": 79.1}  # GiB that torch reports for such a card
CONTEXT = 1.0 * GIB  # ASSUMED: CUDA context, libraries, communication buffers, fragmentation
GRAPHS = 1.0 * GIB  # ASSUMED: the engine's CUDA graphs, for up to 512 concurrent requests
PAGE = 16  # tokens in a KV page of vLLM on CUDA
# Bytes per request and vocabulary entry: logits, sorted, their order, two softmaxes, a cumulative
# sum. An upper bound, from vLLM's V1 model runner: V2, the default on CUDA, starts up without top-k and top-p.
SAMPLER = 30
HEAD = 12  # bytes per logit of a chunk: log-probability, probability and a product in float32 (attention._TokenLogps)
NF4_BLOCK, NF4_NESTED = 64, 256  # weights per scale, scales per scale of scales
OWN_SEGMENT = 10 * 2**20  # bytes: PyTorch's CUDA allocator gives a tensor of this size or more a separate segment
ADAM8_BLOCK, ADAM8_SMALLEST = 256, 4096  # bitsandbytes: elements per scale; smaller tensors keep float32 states


class Row(NamedTuple):
    """One line of a plan."""

    name: str
    bytes: int
    note: str = ""


@dataclasses.dataclass
class Sizes:
    """The dimensions of a model that the plan uses.

    parameters       all of them, tied ones counted once
    linears          (in, out) of each linear layer but the output layer: those with an adapter, packed by --load_4bit
    norms            widths of the inputs of one layer's norms, summed
    unknown          parameters in other kinds of layers (experts), whose activations are not counted
    """

    parameters: int
    linears: list[tuple[int, int]]
    norms: int
    unknown: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def adapter(self, rank: int) -> int:
        """Return the number of parameters of a LoRA adapter on every linear layer except the output layer."""
        return rank * sum(i + o for i, o in self.linears)


def sizes(model: torch.nn.Module) -> Sizes:
    """Return the Sizes of a transformers model, which may have no storage."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head = model.get_output_embeddings()
    linears, norms, known = [], 0, set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.nn.Linear) and module is not head:
            linears.append((module.in_features, module.out_features))
        elif kind.endswith("Norm") and ".layers." in name:
            per_head = {"q_norm": heads, "k_norm": kv_heads}.get(name.rpartition(".")[2], 1)
            width = module.weight.numel()
            norms += width * (per_head if width == head_dim else 1)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or kind.endswith("Norm"):
            known |= {id(p) for p in module.parameters(recurse=False)}
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=linears,
        norms=norms // config.num_hidden_layers,
        unknown=sum(p.numel() for p in model.parameters() if id(p) not in known),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
    )


# ---- the parts, in bytes


def base_bytes(sizes: Sizes, item: int, load_4bit: bool, nested: bool = True) -> int:
    """Return the bytes of the base's weights. load_4bit packs all linear layers but the output layer."""
    packed = [i * o for i, o in sizes.linears] if load_4bit else []
    return (sizes.parameters - sum(packed)) * item + sum(nf4_bytes(count, nested) for count in packed)


def nf4_bytes(count: int, nested: bool = True) -> int:
    """Return the bytes of a matrix of `count` weights in NF4: half a byte each, a byte per 64 as scale, and tables.

    nested: whether scales are quantized too; False for the engine, whose plugin unpacks them to float32 after loading.
    """
    scales = -(-count // NF4_BLOCK)
    tables = scales + 4 * -(-scales // NF4_NESTED) + 4 * (16 + 256 + 1) if nested else 4 * scales + 4 * 16
    return -(-count // 2) + tables


def host_bytes(sizes: Sizes, item: int, load_4bit: bool, parked: int) -> int:
    """Return the host memory for the `parked` bytes of the engine's weights and adapter slot with --sleep full.

    A rank never frees it. vLLM copies each segment of its GPU memory into a pinned block, and PyTorch rounds the size
    of a block up to a power of two. The engine stores query, key and value as one matrix, and gate and up as one.
    Tensors without a separate segment share segments of 20 MiB (blocks of 32 MiB) or 2 MiB: they are counted twice.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = [query + 2 * key, query, 2 * sizes.intermediate, sizes.intermediate]  # each times hidden
    matrices = [sizes.hidden * n // 2 if load_4bit else item * sizes.hidden * n for n in layer] * sizes.layers
    table = sizes.vocab * sizes.hidden
    tied = sizes.parameters - sum(i * o for i, o in sizes.linears) < 2 * table
    matrices += [item * table] * (1 if tied else 2)
    large = [size for size in matrices if size >= OWN_SEGMENT]
    return sum(2 ** math.ceil(math.log2(size)) for size in large) + 2 * (parked - sum(large))


def optimizer_bytes(sizes: Sizes, rank: int, optim: str) -> int:
    """Return the bytes of AdamW's two states for every adapter weight."""
    matrices = [rank * n for pair in sizes.linears for n in pair]
    if optim == "adamw":
        return 8 * sum(matrices)
    return sum(8 * n if n < ADAM8_SMALLEST else 2 * n + 8 * -(-n // ADAM8_BLOCK) for n in matrices)


def saved_bytes(sizes: Sizes, item: int, rank: int) -> int:
    """Return the bytes per token that one layer saves for its backward pass.

    The adapter computes in the type of the base, and matrices that read the same tensor share it as their input.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norms = 4 * sizes.norms  # each norm squares a float32 copy
    attention = item * (2 * query + 2 * key) + 4 * sizes.heads  # query, key, value, output; a normaliser per head
    mlp = item * 3 * sizes.intermediate  # gate, its activation, up
    inputs = item * (2 * sizes.hidden + query + sizes.intermediate)
    return norms + attention + mlp + inputs + item * rank * (len(sizes.linears) // sizes.layers)


def gradient_bytes(sizes: Sizes) -> int:
    """Return the bytes per token that the backward pass holds temporarily: gradients of the widest activation.

    One in float32, or two in bf16, a bound found by measuring on a CPU.
    """
    return 4 * sizes.intermediate


def chunk_bytes(sizes: Sizes, tokens: int, cuda: bool = True) -> int:
    """Return the bytes of the output layer's logits, which are computed one chunk of tokens at a time."""
    return HEAD * min(tokens, chunk_tokens(sizes.vocab, cuda)) * sizes.vocab


def kv_bytes(sizes: Sizes, item: int) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * item


def working_bytes(sizes: Sizes, item: int, requests: int, card: int) -> int:
    """Estimate the peak of vLLM's start-up run: a full step's widest activations, or the sampler over all requests."""
    step = 16384 if card >= 70 * GIB else 8192  # max_num_batched_tokens by default (vLLM; 8192 on an A100)
    layer = item * step * (3 * sizes.intermediate + 2 * sizes.hidden)
    return max(layer, SAMPLER * requests * sizes.vocab)


# ---- the plan


@dataclasses.dataclass
class Plan:
    """The memory of one rank on one card. sampling, update: the Rows of each moment."""

    card: int  # bytes of the card that this rank can use
    sleep: str  # none, kv or full
    sampling: list[Row]
    update: list[Row]
    kv_tokens: int
    at_once: int  # trajectories of --max_context that fit into the KV pages
    requests: int  # concurrent requests of the engine
    host: int  # bytes of host memory that --sleep full keeps

    def total(self, moment: str) -> int:
        """Return the bytes of one moment, "sampling" or "update"."""
        return sum(row.bytes for row in getattr(self, moment))

    def problems(self) -> list[str]:
        """Return the reasons why the run would run out of memory; an empty list if it fits."""
        found = []
        if self.at_once < 1:
            found.append(
                f"the engine will not start: beside its weights --gpu_memory leaves room for {max(self.kv_tokens, 0)} "
                "tokens of KV pages, less than one --max_context"
            )
        for moment in ("sampling", "update"):
            if (over := self.total(moment) - self.card) > 0:
                found.append(f"{moment} needs {over / GIB:.1f} GiB more than the card has free")
        return found


SLEEP = ("none", "kv", "full")  # in the order in which --sleep auto tries them
SLACK = 0.05  # share of the card


def make(
    sizes: Sizes,
    args,
    card: int,
    world: int = 1,
    rank: int | None = None,
    usable: int | None = None,
    train: bool = True,
) -> Plan:
    """Return the Plan of a model on a card of `card` bytes, with the questions divided among `world` ranks.

    --sleep auto is the first mode that fits with some SLACK, because this is an estimate, or "full".

    rank     the adapter's rank, if it differs from --lora_rank
    usable   bytes that other processes leave on the card (default: all)
    train    False: for eval.py, which has no optimizer and no update
    """
    modes = SLEEP if args.sleep == "auto" else (args.sleep,)
    plans = (_make(sizes, args, mode, card, world, rank, usable, train) for mode in modes)
    for plan in plans:
        if not plan.problems() and plan.total("update") <= (1 - SLACK) * plan.card:
            break
    return plan


def _make(sizes, args, sleep, card, world, rank, usable, train):
    from common.rollout import at_once, lora_slot

    item = 4 if args.dtype == "float32" else 2
    rank = rank or args.lora_rank
    slot = lora_slot(rank)
    share = -(-args.questions // world) * args.group
    requests = at_once(args.questions, args.group, world)
    tokens = max(args.micro_tokens, args.max_context)  # a longer row is a separate micro-batch
    adapter = sizes.adapter(rank)
    weights = base_bytes(sizes, item, args.load_4bit)
    loaded = base_bytes(sizes, item, args.load_4bit, nested=False)
    kind = "NF4; embeddings, norms and output layer in bf16" if args.load_4bit else f"{8 * item} bit"

    trainer = [
        Row("CUDA context and libraries", int(CONTEXT), "assumed"),
        Row("trainer: base weights", weights, kind),
        Row("trainer: adapter", 4 * adapter, f"{adapter:,} parameters of rank {rank}, float32"),
        *([Row("trainer: optimizer", optimizer_bytes(sizes, rank, args.optim), args.optim)] if train else []),
    ]
    layer = saved_bytes(sizes, item, rank)
    backward = gradient_bytes(sizes)
    if args.grad_checkpoint:
        saved, backward, note = item * sizes.hidden * sizes.layers, backward + layer, "the inputs of the layers"
    else:
        saved, note = layer * sizes.layers, f"{layer / 1024:.0f} KiB per token and layer"
    logits, backward = chunk_bytes(sizes, tokens), tokens * backward
    peak = "one recomputed layer, its gradients" if args.grad_checkpoint else "gradients of the widest activation"
    updating = [
        Row("trainer: gradients", 8 * adapter, "and their flat copy for the sum over ranks"),
        *([Row("trainer: adapter in bf16", 2 * adapter, "for the forward pass")] if item == 2 else []),
        Row("trainer: activations", tokens * saved, f"of {tokens} tokens: {note}"),
        Row(
            "trainer: last hidden states",
            (4 * item + 4) * sizes.hidden * tokens,
            "the last norm's copy, slopes, gradients",
        ),
        Row("trainer: at the peak", max(logits, backward), "a chunk of logits" if logits > backward else peak),
    ]
    if args.load_4bit:
        widest = max(i * o for i, o in sizes.linears)
        updating.append(Row("trainer: one matrix unpacked", 2 * widest, "from 4 bits"))

    stacks = item * slot * sum(i + o for i, o in sizes.linears)
    engine = [
        Row("engine: base weights", loaded, "NF4 with its scales in float32" if args.load_4bit else kind),
        Row("engine: adapter slot", stacks, f"of rank {slot}"),
        Row("engine: CUDA graphs", int(GRAPHS), "assumed"),
    ]
    working = Row(
        "engine: working memory", working_bytes(sizes, item, requests, card), "of its largest step, estimated"
    )
    budget = math.ceil(args.gpu_memory * card)  # as vLLM rounds
    pages = budget - sum(row.bytes for row in (*engine, working))
    page = PAGE * kv_bytes(sizes, item)
    kv = Row("engine: KV pages", pages, f"the rest of --gpu_memory {args.gpu_memory:g}")
    kv_tokens = pages // page * PAGE
    freed = {"none": (), "kv": (kv,), "full": (*engine[:2], kv)}[sleep]
    asleep = [row._replace(bytes=0, note=f"freed by --sleep {sleep}") if row in freed else row for row in (*engine, kv)]
    return Plan(
        card=card if usable is None else min(card, usable),
        sleep=sleep,
        sampling=[*trainer, *engine, working, kv],
        update=[*trainer, *updating, *asleep] if train else [],
        kv_tokens=kv_tokens,
        at_once=kv_tokens // (-(-args.max_context // PAGE) * PAGE),
        requests=min(requests, share),
        host=host_bytes(sizes, item, args.load_4bit, loaded + stacks) if sleep == "full" else 0,
    )


CHANGES = (  # in the order in which they are tried, the cheapest first; one that saves no memory is dropped
    ("sleep", "full"),
    ("grad_checkpoint", True),
    ("optim", "adamw_8bit"),
    ("load_4bit", True),
)


def remedy(sizes: Sizes, args, card: int, **options) -> str | None:
    """Return the flags with which the run fits, as on a command line, or None if none help. options: those of make().

    --load_4bit changes the base, and adamw_8bit rounds the optimizer's states; the others change memory and time only.
    """

    def lacks(changes):
        p = make(sizes, SimpleNamespace(**(vars(args) | changes)), card, **options)
        over = sum(max(0, p.total(moment) - p.card) for moment in ("update", "sampling"))
        return over + max(0, -(p.at_once - 1)) * GIB

    chosen = {}
    for name, value in CHANGES:
        if lacks(chosen) and lacks(chosen | {name: value}) < lacks(chosen):
            chosen[name] = value
        for percent in range(90, 5, -5):  # the largest share for the engine that fits beside the trainer
            if lacks(chosen) and not lacks(chosen | {"gpu_memory": percent / 100}):
                chosen["gpu_memory"] = percent / 100
    if lacks(chosen):
        return None
    for name in list(chosen):  # a later flag may have made this one unnecessary
        rest = {other: value for other, value in chosen.items() if other != name}
        chosen = chosen if lacks(rest) else rest
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen.items())
