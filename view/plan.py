"""What a run will need of a GPU's memory, before anything is loaded: the plan that --dry_run prints.

It is computed from the model's configuration and the arguments. Exact are the parameters (the model is built without storage), the
adapter, the 4-bit packing, the optimizer and the bytes a token takes in KV pages. Activations are counted tensor by tensor for a decoder
with a gated MLP. What is marked ASSUMED, and the engine's working memory, are round figures from vLLM 0.32's source. Nothing was measured
on a GPU.

Two moments are planned, each a list of rows that add up to what one rank holds then: `sampling` (engine awake, trainer idle) and `update`
(engine asleep as --sleep says, a forward and backward pass under way).
"""

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from common import models, ranks, run
from common.attention import chunk_tokens

GIB = 2**30
CARDS = {"24 GB": 23.6, "48 GB": 47.4, "80 GB": 79.1}  # GiB that torch sees of such a card
CONTEXT = 1.0 * GIB  # ASSUMED: CUDA context, libraries, communication buffers, what the allocator cannot fill
GRAPHS = 1.0 * GIB  # ASSUMED: the engine's CUDA graphs, for up to 512 requests at once
PAGE = 16  # tokens in a KV page of vLLM on CUDA
# Bytes per request and vocabulary entry: logits in bf16 and float32, sorted, their order, two softmaxes, cumulated. An upper bound, of
# vLLM's V1 model runner: V2, which it takes on CUDA, leaves top-k and top-p out of its start-up run.
SAMPLER = 30
HEAD = (
    12  # bytes per logit of a chunk: log-probability, probability and a product, float32 each (attention._TokenLogps)
)
NF4_BLOCK, NF4_NESTED = 64, 256  # weights per scale, scales per scale of scales
OWN_SEGMENT = 10 * 2**20  # bytes from which PyTorch's CUDA allocator gives a tensor a segment of its own
ADAM8_BLOCK, ADAM8_SMALLEST = 256, 4096  # bitsandbytes: numbers per scale; a smaller tensor keeps its states in float32


class Row(NamedTuple):
    name: str
    bytes: int
    note: str = ""


@dataclasses.dataclass
class Sizes:
    """What the arithmetic needs of a model.

    parameters       all of them, tied ones once
    linears          (in, out) of each linear layer but the output layer: those that get an adapter, and that --load_4bit packs
    norms            widths of what the norms of one layer normalise, summed
    unknown          parameters in layers of another kind (experts): the activations then lack what these save
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

    def adapter(self, rank):
        """Parameters of a LoRA adapter on every linear layer but the output layer."""
        return rank * sum(i + o for i, o in self.linears)


def sizes(model):
    """Sizes of a model, with or without storage."""
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


def base_bytes(sizes, item, load_4bit, nested=True):
    """The base model's weights; in 4 bits all linear layers but the output layer, their scales quantized too where `nested`."""
    packed = [i * o for i, o in sizes.linears] if load_4bit else []
    return (sizes.parameters - sum(packed)) * item + sum(nf4_bytes(count, nested) for count in packed)


def nf4_bytes(count, nested=True):
    """One matrix of `count` weights in NF4: half a byte each, a byte for the scale of 64, and the tables of both levels.

    nested: False in the engine, whose plugin unpacks the scales to float32 when it has loaded them.
    """
    scales = -(-count // NF4_BLOCK)
    tables = scales + 4 * -(-scales // NF4_NESTED) + 4 * (16 + 256 + 1) if nested else 4 * scales + 4 * 16
    return -(-count // 2) + tables


def host_bytes(sizes, item, load_4bit, parked):
    """Host memory for the `parked` bytes of the engine's weights and adapter slot, with --sleep full; a rank keeps it until it ends.

    vLLM copies each segment of its GPU memory into a pinned block, and PyTorch makes such a block as large as the next power of two.
    The engine holds query, key and value as one matrix, gate and up too. What is no segment of its own shares those of 20 MiB, whose
    blocks are of 32, or of 2: counted twice.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = [query + 2 * key, query, 2 * sizes.intermediate, sizes.intermediate]  # each times hidden
    matrices = [sizes.hidden * n // 2 if load_4bit else item * sizes.hidden * n for n in layer] * sizes.layers
    table = sizes.vocab * sizes.hidden
    tied = sizes.parameters - sum(i * o for i, o in sizes.linears) < 2 * table
    matrices += [item * table] * (1 if tied else 2)
    large = [size for size in matrices if size >= OWN_SEGMENT]
    return sum(2 ** math.ceil(math.log2(size)) for size in large) + 2 * (parked - sum(large))


def optimizer_bytes(sizes, rank, optim):
    """AdamW's two states of every adapter weight."""
    matrices = [rank * n for pair in sizes.linears for n in pair]
    if optim == "adamw":
        return 8 * sum(matrices)
    return sum(8 * n if n < ADAM8_SMALLEST else 2 * n + 8 * -(-n // ADAM8_BLOCK) for n in matrices)


def saved_bytes(sizes, item, rank):
    """What one layer keeps for its backward pass, per token.

    The adapter computes in float32. Over a bf16 base each of its matrices keeps a float32 copy of its input of its own; over a
    float32 base those that read the same tensor share it.
    """
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norms = 4 * sizes.norms  # each squares a float32 copy
    attention = item * (2 * query + 2 * key) + 4 * sizes.heads  # query, key, value, output; a normaliser a head
    mlp = item * 3 * sizes.intermediate  # gate, its activation, up
    of_layer = sizes.linears[: len(sizes.linears) // sizes.layers]
    if item == 4:
        inputs = 4 * (2 * sizes.hidden + query + sizes.intermediate)
    else:
        inputs = 4 * sum(i for i, _ in of_layer)
    return norms + attention + mlp + inputs + 4 * rank * len(of_layer)


def gradient_bytes(sizes, item):
    """What the backward pass holds for a moment, per token: gradients of the widest activation, one in float32 and over a bf16 base two
    in bf16. The second is a bound found by measuring on a CPU."""
    return (8 if item == 2 else 4) * sizes.intermediate


def chunk_bytes(sizes, tokens, cuda=True):
    """The output layer's logits, computed a chunk of tokens at a time."""
    return HEAD * min(tokens, chunk_tokens(sizes.vocab, cuda)) * sizes.vocab


def kv_bytes(sizes, item):
    """Keys and values of one token, all layers."""
    return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * item


def working_bytes(sizes, item, requests, card):
    """What vLLM's start-up run holds at its peak: a full step's widest activations, or the sampler over all requests. A round figure."""
    step = 16384 if card >= 70 * GIB else 8192  # max_num_batched_tokens by default (vLLM; 8192 on an A100)
    layer = item * step * (3 * sizes.intermediate + 2 * sizes.hidden)
    return max(layer, SAMPLER * requests * sizes.vocab)


# ---- the plan


@dataclasses.dataclass
class Plan:
    """One rank on one card. sampling, update: lists of Row that add up to what is held at that moment."""

    card: int
    sampling: list[Row]
    update: list[Row]
    kv_tokens: int
    at_once: int  # trajectories of --max_context that the pages hold
    requests: int  # trajectories the engine works on at once
    host: int  # bytes of host memory that --sleep full keeps

    def total(self, moment):
        return sum(row.bytes for row in getattr(self, moment))

    def problems(self):
        """Why the run would not start or not go on, as a list of sentences; empty where it fits."""
        found = []
        if self.at_once < 1:
            found.append(
                f"the engine will not start: beside its own weights --gpu_memory leaves pages for {max(self.kv_tokens, 0)} tokens, "
                "less than one --max_context"
            )
        for moment in ("sampling", "update"):
            if (over := self.total(moment) - self.card) > 0:
                found.append(f"{moment} needs {over / GIB:.1f} GiB more than there are")
        return found


def make(sizes, args, card, world=1, rank=None):
    """The Plan of a model of these Sizes on a card of `card` bytes, its questions shared out over `world` ranks.

    rank: of the adapter, where it is not --lora_rank.
    """
    from common.rollout import at_once, lora_slot

    item = 4 if args.dtype == "float32" else 2
    rank = rank or args.lora_rank
    slot = lora_slot(rank)
    share = -(-args.questions // world) * args.group
    requests = at_once(args, world)
    tokens = max(args.micro_tokens, args.max_context)  # a longer row is a micro-batch of its own
    adapter = sizes.adapter(rank)
    weights = base_bytes(sizes, item, args.load_4bit)
    loaded = base_bytes(sizes, item, args.load_4bit, nested=False)
    kind = "NF4; embeddings, norms and output layer in bf16" if args.load_4bit else f"{8 * item} bit"

    trainer = [
        Row("CUDA context and libraries", int(CONTEXT), "assumed"),
        Row("trainer: base weights", weights, kind),
        Row("trainer: adapter", 4 * adapter, f"{adapter:,} parameters of rank {rank}, float32"),
        Row("trainer: optimizer", optimizer_bytes(sizes, rank, args.optim), args.optim),
    ]
    layer = saved_bytes(sizes, item, rank)
    backward = gradient_bytes(sizes, item)
    if args.grad_checkpoint:
        kept, backward, note = item * sizes.hidden * sizes.layers, backward + layer, "the inputs of the layers"
    else:
        kept, note = layer * sizes.layers, f"{layer / 1024:.0f} KiB a token and layer"
    logits, backward = chunk_bytes(sizes, tokens), tokens * backward
    again = "one layer computed anew, its gradients" if args.grad_checkpoint else "gradients of the widest activation"
    updating = [
        Row("trainer: gradients", 8 * adapter, "and their flat copy, summed over ranks"),
        Row("trainer: activations", tokens * kept, f"of {tokens} tokens: {note}"),
        Row(
            "trainer: last hidden states",
            (4 * item + 4) * sizes.hidden * tokens,
            "the last norm's copy, slopes, gradients",
        ),
        Row("trainer: at the peak", max(logits, backward), "a chunk of logits" if logits > backward else again),
    ]
    if args.load_4bit:
        widest = max(i * o for i, o in sizes.linears)
        updating.append(Row("trainer: one matrix unpacked", 2 * widest, "of 4 bit"))

    stacks = item * slot * (sum(i + o for i, o in sizes.linears) + 2 * (sizes.vocab + sizes.hidden))
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
    kv = Row("engine: KV pages", pages, f"what is left of --gpu_memory {args.gpu_memory:g}")
    kv_tokens = pages // page * PAGE
    asleep = {"none": [*engine, kv], "kv": engine, "full": engine[2:]}[args.sleep]
    return Plan(
        card=card,
        sampling=[*trainer, *engine, working, kv],
        update=[*trainer, *updating, *asleep],
        kv_tokens=kv_tokens,
        at_once=kv_tokens // (-(-args.max_context // PAGE) * PAGE),
        requests=min(requests, share),
        host=host_bytes(sizes, item, args.load_4bit, loaded + stacks) if args.sleep == "full" else 0,
    )


CHANGES = (  # tried one after the other, those that cost least first; only what makes a difference is kept
    ("sleep", "full"),
    ("grad_checkpoint", True),
    ("optim", "adamw_8bit"),
    ("load_4bit", True),
)


def remedy(sizes, args, card, **more):
    """Flags with which it fits, as they are written on a command line; None where none helps. --load_4bit is another base, and
    adamw_8bit rounds the optimizer's states; the others change memory and time only."""

    def lacks(changes):
        p = make(sizes, SimpleNamespace(**(vars(args) | changes)), card, **more)
        return max(0, p.total("update") - card) + max(0, p.total("sampling") - card) + max(0, -(p.at_once - 1)) * GIB

    chosen = {}
    for name, value in CHANGES:
        if lacks(chosen) and lacks(chosen | {name: value}) < lacks(chosen):
            chosen[name] = value
    for percent in range(90, 5, -5):  # the engine's share: as large as what the trainer holds meanwhile allows
        if lacks(chosen) and not lacks(chosen | {"gpu_memory": percent / 100}):
            chosen["gpu_memory"] = percent / 100
    if lacks(chosen):
        return None
    for name in list(chosen):  # what a later one has made needless
        rest = {other: value for other, value in chosen.items() if other != name}
        chosen = chosen if lacks(rest) else rest
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in chosen.items())


# ---- what --dry_run prints


def cards():
    """{name: bytes} to plan for: this GPU, or on a machine without one the usual sizes."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if total - free > 2 * CONTEXT:
            print(
                f"warning: {(total - free) / GIB:.1f} GiB of this GPU are taken already; the plan is for an empty one"
            )
        return {"this GPU": total}
    return {name: int(size * GIB) for name, size in CARDS.items()}


def table(plans, moment):
    """The rows of one moment as lines, one column per card."""
    lines = [
        f"{'while sampling' if moment == 'sampling' else 'while updating':32}"
        + "".join(f"{name:>10}" for name in plans)
    ]
    for rows in zip(*(getattr(plan, moment) for plan in plans.values()), strict=True):
        lines.append(
            f"  {rows[0].name:30}" + "".join(f"{row.bytes / GIB:10.2f}" for row in rows) + f"   {rows[0].note}"
        )
    lines.append(f"  {'together, GiB':30}" + "".join(f"{plan.total(moment) / GIB:10.2f}" for plan in plans.values()))
    lines.append(f"  {'the card has':30}" + "".join(f"{plan.card / GIB:10.2f}" for plan in plans.values()))
    return lines


def verdict(name, plan, sizes, args, **more):
    """One line on a card: whether it fits, how many trajectories it samples at once, and what helps where it does not."""
    if not (wrong := plan.problems()):
        waits = "" if plan.at_once >= plan.requests else f" of {plan.requests} under way: the others wait for pages"
        room = f"{plan.kv_tokens:,} tokens in KV pages, {plan.at_once} full trajectories at once{waits}"
        return f"{name}: fits; {room}."
    flags = remedy(sizes, args, plan.card, **more)
    helps = f"It fits with {flags}." if flags else "No flag makes it fit: take a smaller model or a larger card."
    return f"{name}: does not fit; {'; '.join(wrong)}. {helps}"


def weight_files(path, sizes):
    """A line on the checkpoint's own files, where they lie in a folder."""
    from safetensors import safe_open

    if not Path(path).is_dir():
        return "weights: not looked at; they are fetched from the hub when the run starts"
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return f"weights: none in {path} (*.safetensors); left out: whether they belong to this configuration"
    count = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    # A tied output layer may be stored a second time.
    if count not in (sizes.parameters, sizes.parameters + sizes.vocab * sizes.hidden):
        return (
            f"warning: weights: {count:,} numbers in {len(files)} file(s), not the {sizes.parameters:,} of config.json"
        )
    return f"weights: {len(files)} file(s), as many numbers as config.json says"


def prompt_lines(task, args):
    """The run's first prompt as the model sees it, and how it and a trajectory of full length fit into --max_context."""
    question = task.take(1)[0]
    ids = task.prompt_ids(question)
    turns, observations = args.max_turns * args.max_turn_tokens, (args.max_turns - 1) * args.max_observation_tokens
    longest = len(ids) + turns + observations
    lines = [f"first prompt (question {question.id}), as the model sees it:", "", task.decode(ids), ""]
    lines.append(
        f"{len(ids)} tokens of prompt; {args.max_context - len(ids)} of --max_context {args.max_context} are left"
    )
    lines.append(
        f"a full trajectory: {len(ids)} + {args.max_turns} x {args.max_turn_tokens} generated + {args.max_turns - 1} x "
        f"{args.max_observation_tokens} observed = {longest} tokens"
    )
    if longest > args.max_context and args.context == "full":
        lines.append(
            f"warning: a trajectory of full length does not fit: it ends at {args.max_context} tokens, unanswered. --max_context "
            f"{longest} would hold it"
        )
    return lines


def fit(args, task):
    """The arguments, when the run fits. With --dry_run print the first prompt and the memory plan, and exit; no model is loaded.

    Raises SystemExit, also for what would stop the run when it loads its model.
    """
    if not getattr(args, "dry_run", False):
        if not torch.cuda.is_available():
            refuse_too_large(args)
        return args
    dry_run(args, task)
    raise SystemExit(0)


def refuse_too_large(args):
    """Raise SystemExit when a model cannot fit into the memory of a machine without a GPU."""
    path = models.resolve(args.model)
    count = sum(p.numel() for p in models.empty_model(path).parameters())
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    holders = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # trainer and engine of each rank
    need = 1.15 * count * dtype.itemsize * holders / GIB  # a seventh for activations and the engine's pages
    if need > (have := memory_gb()):
        raise SystemExit(
            f"--model {path}: its {count / 1e9:.1f} billion parameters, held by trainer and engine, need {need:.0f} GiB, and this "
            f"machine has {have:.0f} GiB and no GPU. What runs here: python train_grpo.py --model tiny --task tiny_search"
        )


def memory_gb():
    """GiB of memory this process may use: the machine's, or less in a container."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no limit reads as "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes) / 2**30


def dry_run(args, task):
    """Plan the memory, print plan and first prompt. Raises SystemExit for what would stop the run there."""
    from common.policy import refuse_unsupported

    path = models.resolve(args.model)
    model = models.empty_model(path)
    refuse_unsupported(model, args.max_context)
    if ranks.rank():
        return
    found, rank = sizes(model), adapter_rank(args)
    more = dict(world=ranks.world_size(), rank=rank)
    plans = {name: make(found, args, card, **more) for name, card in cards().items()}
    one = next(iter(plans.values()))
    print(*prompt_lines(task, args), "", sep="\n")
    print(f"questions: {len(task.train)} to train on, {len(task.held_out)} held out, {len(task.test)} for eval.py")
    print(f"run directory: {run.directory(args)}")
    if run.occupied(run.directory(args)) and not args.resume:
        print("warning: it holds a run already; nothing is overwritten: give another --out, or --resume")
    print(weight_files(path, found), "", sep="\n")
    print(
        f"memory of one rank of {ranks.world_size()}, {args.model}: {found.parameters:,} parameters, "
        f"{kv_bytes(found, 4 if args.dtype == 'float32' else 2):,} bytes of keys and values a token; GiB, computed and not measured"
    )
    for moment in ("sampling", "update"):
        print(*table(plans, moment), sep="\n")
    if one.host:
        print(
            f"--sleep full: {one.host / GIB:.1f} GiB of host memory for this rank from then on, as much for every other"
        )
    if found.unknown:
        print(
            f"warning: {found.unknown:,} parameters are in layers that this arithmetic does not know (experts?): the activations "
            "are too low"
        )
    if args.context != "full":
        print(
            f"warning: --context {args.context}: each trained turn may be a row of its own, and the rows of a trajectory are one "
            f"micro-batch, of up to {args.max_turns} x {args.max_context} tokens where all turns are trained; planned is one row"
        )
    for name, made in plans.items():
        print(verdict(name, made, found, args, **more))
    print("nothing was loaded: neither the engine nor the self-test of engine against trainer was tried (--dry_run)")


def adapter_rank(args):
    """The rank of the adapter that a run starts from; None for a fresh one."""
    import json

    if not args.adapter:
        return None
    return json.loads((Path(args.adapter) / "adapter_config.json").read_text())["r"]
