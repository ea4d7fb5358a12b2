"""What main does about memory before it loads a model: `fit` refuses a run that cannot fit, and --dry_run prints the plan."""

import contextlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from common import models, ranks, run
from common.args import Shared
from view import show
from view.estimate import CARDS, CONTEXT, GIB, Plan, Sizes, kv_bytes, make, remedy, sizes

OLDEST = (7, 5)  # compute capability: CUDA 13 has no code for older cards
BFLOAT16 = (8, 0)  # and bfloat16 needs this one
EVALUATION = dict(questions=64, group=8, micro_tokens=4096, grad_checkpoint=True, optim="", lora_rank=8, sleep="none")


class Card(NamedTuple):
    """A GPU: its bytes in all, those that this process can use, and its compute capability."""

    name: str
    total: int
    usable: int
    capability: tuple[int, int] = BFLOAT16


def this_gpu() -> Card:
    """Return the GPU of this rank."""
    device = min(ranks.local_rank(), torch.cuda.device_count() - 1)
    free, total = torch.cuda.mem_get_info(device)
    usable = min(total, free + int(CONTEXT))  # the CUDA context of this process is in the plan
    return Card(torch.cuda.get_device_name(device), total, usable, torch.cuda.get_device_capability(device))


def cards() -> list[Card]:
    """Return the cards to plan for: this GPU, or the usual sizes on a machine without one."""
    if torch.cuda.is_available():
        return [this_gpu()]
    return [Card(name, int(size * GIB), int(size * GIB)) for name, size in CARDS.items()]


def table(plans: dict[Card, Plan], moment: str) -> list[str]:
    """Return the lines of one moment's table, with one column per card."""
    lines = [
        f"{'while sampling' if moment == 'sampling' else 'while updating':32}"
        + "".join(f"{card.name[-10:]:>11}" for card in plans)
    ]
    for rows in zip(*(getattr(plan, moment) for plan in plans.values()), strict=True):
        lines.append(
            f"  {rows[0].name:30}" + "".join(f"{row.bytes / GIB:11.2f}" for row in rows) + f"   {rows[0].note}"
        )
    lines.append(f"  {'together, GiB':30}" + "".join(f"{plan.total(moment) / GIB:11.2f}" for plan in plans.values()))
    lines.append(f"  {'the card has free':30}" + "".join(f"{plan.card / GIB:11.2f}" for plan in plans.values()))
    return lines


def verdict(card: Card, plan: Plan, sizes: Sizes, args, **options) -> str:
    """Return a line that reports whether the run fits on a card, how many trajectories at once, or which flags help."""
    if not (problems := plan.problems()):
        waiting = "" if plan.at_once >= plan.requests else f" of {plan.requests} requests; the others wait for pages"
        room = f"{plan.kv_tokens:,} tokens in KV pages, {plan.at_once} full trajectories at once{waiting}"
        return f"{card.name}: fits with --sleep {plan.sleep}; {room}."
    flags = remedy(sizes, args, card.total, **options)
    advice = f"It fits with {flags}." if flags else "No flag makes it fit: use a smaller model or a larger card."
    used = (card.total - card.usable) / GIB
    others = f" Other processes use {used:.1f} GiB of the card (nvidia-smi)." if used >= 0.1 else ""
    return f"{card.name}: does not fit; {'; '.join(problems)}.{others} {advice}"


def weight_files(path: str, sizes: Sizes) -> str:
    """Return a line that reports whether the weight files in a model's folder match its configuration."""
    from safetensors import safe_open

    if not Path(path).is_dir():
        return "weights: not checked; they are fetched from the hub when the run starts"
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return f"weights: none in {path} (*.safetensors); not checked against config.json"
    count = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    # A tied output layer may be stored a second time.
    if count not in (sizes.parameters, sizes.parameters + sizes.vocab * sizes.hidden):
        return (
            f"warning: weights: {count:,} parameters in {len(files)} file(s), but {sizes.parameters:,} by config.json"
        )
    return f"weights: {len(files)} file(s) with as many parameters as config.json implies"


def prompt_lines(task, args) -> list[str]:
    """Return lines with the first prompt as the model sees it, and with the length of a full trajectory."""
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
            f"warning: a full trajectory does not fit: it ends at {args.max_context} tokens without an answer. It "
            f"needs --max_context {longest}"
        )
    return lines


def fit(args, task):
    """Return the arguments with --sleep auto resolved. With --dry_run print the first prompt and the memory plan instead.

    Raises SystemExit after a dry run, and for a run that this machine's memory cannot hold. Loads no model.
    """
    run.RESOLVED.clear()  # of an earlier run in this process
    if getattr(args, "dry_run", False):
        with show.until_closed():
            dry_run(args, task)
        raise SystemExit(0)
    if torch.cuda.is_available():
        return fit_gpu(args, this_gpu())
    refuse_too_large(args)
    sleep = getattr(args, "sleep", "none")
    if sleep not in ("auto", "none") and ranks.rank() == 0:
        run.notice(f"--sleep {sleep} has no effect on a CPU: the engine keeps its memory during training")
    return run.resolve(args, sleep="none") if sleep == "auto" else args


def fit_gpu(args, card: Card):
    """Return the arguments with --sleep auto resolved for a card. Raises SystemExit for a run that does not fit on it."""
    refuse_old(card, args.dtype)
    train = isinstance(args, Shared)
    flags = args if train else SimpleNamespace(**(EVALUATION | vars(args)))
    found = sizes(models.empty_model(models.resolve(args.model)))
    options = dict(world=ranks.world_size(), rank=adapter_rank(args), usable=card.usable, train=train)
    plan = make(found, flags, card.total, **options)
    if plan.problems() and os.environ.get("TURNWISE_PLAN") != "off":
        look = "--dry_run prints the plan, an estimate; " if train else "This is an estimate: "
        raise SystemExit(
            f"{args.model} on {verdict(card, plan, found, flags, **options)} {look}TURNWISE_PLAN=off starts the run anyway."
        )
    if ranks.rank() == 0:
        need = max(plan.total("sampling"), plan.total("update")) / GIB
        run.notice(f"memory plan: {need:.1f} of {card.usable / GIB:.1f} GiB, --sleep {plan.sleep} ({card.name})")
    return run.resolve(args, sleep=plan.sleep) if getattr(args, "sleep", "") == "auto" else args


def refuse_old(card: Card, dtype: str) -> None:
    """Raise SystemExit for a card that is too old for CUDA 13, or for bfloat16."""
    version = ".".join(map(str, card.capability))
    if card.capability < OLDEST:
        raise SystemExit(
            f"{card.name} has compute capability {version}: the CUDA 13 builds of torch and vLLM need 7.5 (Turing) or newer."
        )
    if card.capability < BFLOAT16 and dtype != "float32":
        raise SystemExit(
            f"{card.name} has compute capability {version} and no bfloat16, which needs 8.0 (Ampere) or newer: give "
            "--dtype float32, with twice the memory."
        )


def refuse_too_large(args) -> None:
    """Raise SystemExit if the model cannot fit into the memory of a machine without a GPU."""
    path = models.resolve(args.model)
    count = sum(p.numel() for p in models.empty_model(path).parameters())
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    copies = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # trainer and engine of each rank
    need = 1.15 * count * dtype.itemsize * copies / GIB  # 15 % more for activations and the engine's KV pages
    if need > (have := memory_gb()):
        raise SystemExit(
            f"--model {path}: its {count / 1e9:.1f} billion parameters, in trainer and engine, need {need:.0f} GiB; "
            f"this machine has {have:.0f} GiB and no GPU. Try python train_grpo.py --model tiny --task tiny_search"
        )


def memory_gb() -> float:
    """Return the GiB of memory that this process may use: the machine's, or a container's limit."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # the file holds "max" if there is no limit
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes) / 2**30


def dry_run(args, task) -> None:
    """Print the first prompt and the memory plan. Raises SystemExit for a model that the run would refuse."""
    from common.policy import refuse_unsupported

    path = models.resolve(args.model)
    model = models.empty_model(path)
    refuse_unsupported(model, args.max_context)
    if ranks.rank():
        return
    found, rank = sizes(model), adapter_rank(args)
    options = dict(world=ranks.world_size(), rank=rank)
    plans = {card: make(found, args, card.total, usable=card.usable, **options) for card in cards()}
    host = max(plan.host for plan in plans.values())
    print(*prompt_lines(task, args), "", sep="\n")
    print(f"questions: {len(task.train)} to train on, {len(task.held_out)} held out, {len(task.test)} for eval.py")
    print(f"run directory: {run.directory(args)}")
    if run.occupied(run.directory(args)) and not args.resume:
        print("warning: it already holds a run, which is never overwritten: give another --out, or --resume")
    print(weight_files(path, found), "", sep="\n")
    print(
        f"memory of one rank of {ranks.world_size()}, {args.model}: {found.parameters:,} parameters, "
        f"{kv_bytes(found, 4 if args.dtype == 'float32' else 2):,} bytes of keys and values per token; GiB, estimated"
    )
    for moment in ("sampling", "update"):
        print(*table(plans, moment), sep="\n")
    if host:
        print(f"--sleep full: {host / GIB:.1f} GiB of host memory for each rank, from the first sleep to the end")
    if found.unknown:
        print(
            f"warning: {found.unknown:,} parameters are in layers of an unknown kind (experts?): the plan "
            "underestimates the activations"
        )
    if args.context != "full":
        print(
            f"warning: --context {args.context}: each trained turn may be a separate row, and the rows of a trajectory "
            f"are one micro-batch of up to {args.max_turns} x {args.max_context} tokens; the plan is for one row"
        )
    for card, made in plans.items():
        print(verdict(card, made, found, args, usable=card.usable, **options))
    print("nothing was loaded (--dry_run): the engine and its self-test against the trainer were not tried")


def adapter_rank(args) -> int | None:
    """Return the highest rank of the adapter that a run starts from, or None for a new adapter.

    None too for one that common.adapters will refuse: a plan need not say so.
    """
    if not args.adapter:
        return None
    try:
        given = json.loads((Path(args.adapter) / "adapter_config.json").read_text())
        return int(max([given["r"], *(given.get("rank_pattern") or {}).values()]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
