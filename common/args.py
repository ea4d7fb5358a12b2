"""The command line: the flags that the scripts share, their limits, and parsing with presets and --resume."""

import dataclasses
import importlib.util
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_type_hints

from common import models, run
from common.models import EMBEDDED


@dataclass
class Sampling:
    """The flags of everything that samples: training scripts and eval.py."""

    # ---- data
    model: str = "Qwen2.5-3B"
    """a folder, a hub id, a short name such as Qwen2.5-7B-Instruct, or an embedded model: tiny, tiny-math, smollm2"""
    adapter: str = ""
    """start from this LoRA adapter instead of a fresh one; it keeps its own rank and scale"""
    task: str = "hotpotqa"
    """a data set (docs/data.md), tiny_search, tiny_math, reasoning_gym:<name>, or a JSONL file of {"question", "answers"} lines"""
    task_kind: Literal["search", "math"] = "search"
    """of a JSONL file: search (with --corpus or --retriever; exact match) or math (with Python; answers compared by value)"""
    corpus: str = ""
    """JSONL file of documents {"id", "title", "text"} to search in"""
    retriever: str = ""
    """search with a server instead of a corpus: the address of a Search-R1 compatible one, such as http://127.0.0.1:8000/retrieve,
    or llm:<OpenAI-compatible address>#<model>, a language model that plays the search engine (ZeroSearch)"""
    topk: int = 3
    """documents a search returns"""
    limit: int = 0
    """train on the first so many questions only (0: all)"""
    eval_questions: int = 200
    """held-out questions"""
    # ---- protocol
    shots: int = 0
    """worked examples in the prompt, at most 2: for models that do not know the tags"""
    template: Literal["auto", "on", "off"] = "auto"
    """put the prompt through the tokenizer's chat template (auto: when it has one)"""
    protocol: Literal["tags", "chat"] = "tags"
    """how a tool is called: by tags in the text, or as the model's own chat template has it"""
    tools: Literal["on", "off"] = "on"
    """whether the model has a tool; off: it answers by itself"""
    answer: Literal["tags", "boxed"] = "tags"
    """where the model writes its answer: in <answer> tags, or in \\boxed{} as in most work on mathematics"""
    unevaluated: bool = False
    """where the gold is a number, count formulas of its value as right too, such as 17*23 for 391"""
    context: Literal["full", "strip_think", "window"] = "full"
    """what of its earlier turns the model sees again: all, all but its thinking, or the last --window turns"""
    window: int = 2
    """turns that --context window keeps"""
    # ---- rollout
    max_turns: int = 5
    """generations per trajectory; the last one runs no tool"""
    max_turn_tokens: int = 512
    """tokens per generation"""
    max_observation_tokens: int = 512
    """tokens per tool output, its tags included"""
    max_context: int = 5120
    """tokens of context and generation together; a trajectory that reaches it ends"""
    temperature: float = 1.0
    """of sampling; log-probabilities are taken at the same temperature"""
    tool_workers: int = 16
    """tool calls at once (0: one after the other, without a time limit)"""
    tool_timeout: float = 30.0
    """seconds until a tool call is given up"""
    unsafe_python: bool = False
    """run the model's Python where no sandbox works; limits on time, memory and output remain"""
    # ---- engine and run
    load_4bit: bool = False
    """NF4 base (bitsandbytes) in trainer and engine"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """of the base (auto: bfloat16 on a GPU, float32 on a CPU)"""
    gpu_memory: float = 0.5
    """share of a GPU's memory for the engine while it is awake"""
    out: str = ""
    """run directory (default: out/<script>-<model>-<task>-s<seed>)"""
    resume: bool = False
    """continue the run in that directory where it stopped; flags not given here keep their values"""
    seed: int = 1
    """of adapter, data order and sampling"""


@dataclass
class Shared(Sampling):
    """The flags of a training script that only the engine, the policy, the log and the checkpoints read."""

    # ---- run
    save_every: int = 50
    """steps between checkpoints (0: only at the end); an evaluation better than all before it is saved too"""
    keep: int = 1
    """checkpoints kept: the last so many (0: all), and always the best by held-out exact match"""
    wandb: bool = False
    """mirror metrics to Weights & Biases"""
    tensorboard: bool = False
    """mirror metrics to TensorBoard files in the run directory"""
    dry_run: bool = False
    """load the task, print the memory plan and the first prompt, and stop: no model is loaded"""
    sleep: Literal["auto", "none", "kv", "full"] = "auto"
    """while training the engine keeps its memory (none), frees its KV pages (kv), or parks its weights too (full); auto: the first
    of these that fits by the memory plan"""
    # ---- optimisation
    lr: float = 1e-5
    """learning rate of the LoRA weights (ours; the papers' 1e-6 is for full fine-tuning)"""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """optimizer"""
    grad_clip: float = 1.0
    """largest gradient norm, over all ranks (0: no limit)"""
    grad_checkpoint: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    lora_rank: int = 32
    """rank of the adapter"""
    lora_alpha: float = 64
    """scale of the adapter, divided by its rank"""


Flags = TypeVar("Flags", bound=Sampling)  # a script's Args
LIMITS = (  # (flag, check, error message)
    ("group", lambda v: v >= 2, "a group needs at least 2 trajectories to compare"),
    ("temperature", lambda v: v > 0, "sampling needs more than 0; evaluation is always greedy"),
    ("questions", lambda v: v >= 1, "at least one question per step"),
    ("steps", lambda v: v >= 1, "at least one step"),
    ("max_turns", lambda v: v >= 1, "at least one generation"),
    ("max_turn_tokens", lambda v: v >= 1, "at least one token per generation"),
    ("max_observation_tokens", lambda v: v >= 16, "at least 16, because the tags need most of them"),
    ("lora_rank", lambda v: 1 <= v <= 512, "the engine takes adapters of rank 1 to 512"),
    ("lora_alpha", lambda v: v > 0, "must be above 0, or the adapter has no effect"),
    ("top_p", lambda v: 0 < v <= 1, "a share of the probability, above 0 and at most 1"),
    ("samples", lambda v: v >= 0, "0 (greedy only) or a number of trajectories per question"),
    ("window", lambda v: v >= 1, "at least 1, the last turn"),
    ("shots", lambda v: 0 <= v <= 2, "there are 2 worked examples"),
    ("epochs", lambda v: v >= 1, "at least one"),
    ("minibatches", lambda v: v >= 1, "at least one"),
    ("topk", lambda v: v >= 1, "at least one document per search"),
    ("limit", lambda v: v >= 0, "0 (all) or a number of questions"),
    ("gpu_memory", lambda v: 0 < v < 1, "a share between 0 and 1"),
    ("tool_timeout", lambda v: v > 0, "must be above 0 seconds"),
    ("tool_workers", lambda v: v >= 0, "0 (one after the other) or a number of threads"),
    ("eval_every", lambda v: v >= 0, "0 (only before and after) or a number of steps"),
    ("save_every", lambda v: v >= 0, "0 (only at the end) or a number of steps"),
    ("keep", lambda v: v >= 0, "0 (all) or a number of checkpoints"),
    ("eval_questions", lambda v: v >= 1, "at least one, because every run is evaluated before and after"),
)
# Flags that may change on --resume: they affect where and how fast the run continues, not what is sampled or trained.
MAY_CHANGE = (
    *("out", "resume", "steps", "save_every", "keep", "eval_every", "retriever", "tool_workers", "tool_timeout"),
    *("micro_tokens", "grad_checkpoint", "sleep", "gpu_memory", "wandb", "tensorboard", "dry_run"),
)

UNSAFE = ("unsafe_python",)  # flags that no folder turns on: they must be given at each start


def parse_args(Args: type[Flags], argv: list[str] | None = None) -> Flags:
    """Parse flags. Defaults are the embedded model's preset or the resumed run. Raises SystemExit for bad values."""
    import tyro

    # Set before these libraries are imported: they would warn about NUMA nodes and optional kernels in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same setting
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # rows of many lengths fragment memory
    for library in ("bitsandbytes", "vllm"):  # vLLM reads VLLM_LOGGING_LEVEL later
        logging.getLogger(library).setLevel(logging.ERROR)
    argv = sys.argv[1:] if argv is None else argv
    model = next((f.default for f in dataclasses.fields(Args) if f.name == "model"), "")
    for i, word in enumerate(argv):
        if word == "--model" and i + 1 < len(argv):
            model = argv[i + 1]
        elif word.startswith("--model="):
            model = word.removeprefix("--model=")
    fields = {f.name for f in dataclasses.fields(Args)}
    description = (sys.modules[Args.__module__].__doc__ or "").partition("\n")[0]
    preset = EMBEDDED[model].preset if model in EMBEDDED else {}
    preset = {name: value for name, value in preset.items() if name in fields}
    options = dict(args=argv, use_underscores=True, description=description)
    args = tyro.cli(Args, default=Args(**preset), **options)
    if getattr(args, "resume", False):
        folder = run.directory(args)
        begun = begun_with(Args, folder)
        anew = dict.fromkeys(fields & set(UNSAFE), False)
        args = tyro.cli(Args, default=dataclasses.replace(begun, out=str(folder), **anew), **options)
        if unsaid := [name for name in anew if getattr(begun, name) and not getattr(args, name)]:
            raise SystemExit(
                f"--resume: {folder} was started with --{' --'.join(unsaid)}. Give it again to allow that."
            )
        changed = [
            f"--{name} {getattr(begun, name)!r} -> {value!r}"
            for name, value in vars(args).items()
            if name not in MAY_CHANGE and value != getattr(begun, name)
        ]
        if changed:
            raise SystemExit(f"--resume: {folder} was started with other flags: {', '.join(changed)}. Leave these out.")
    check(args)
    return args


def begun_with(Args: type[Flags], folder: Path) -> Flags:
    """Return the flags the run in `folder` was started with. Raises SystemExit if there is no run to resume."""
    if (folder / "common").is_dir() and not (folder / "tasks").is_dir():
        raise SystemExit(
            f"--resume: {folder} was begun by an older version, whose checkpoints this one cannot continue. Check out the commit "
            "in its environment.json, or start again with another --out."
        )
    if (begun := read(folder, Args)) is None:
        raise SystemExit(f"--resume: no run in {folder}. Start it without --resume, or correct --out.")
    if unknown := sorted(set(begun) - {f.name for f in dataclasses.fields(Args)}):
        names = f"--{' --'.join(unknown)}"[:200]
        raise SystemExit(f"--resume: {folder}: another script or version: it has {names!r}.".replace("'", ""))
    return Args(**begun)


def read(folder: Path, Args: type[Flags]) -> dict | None:
    """Return the flags in a run directory's args.json, or None without one. Raises SystemExit if it is malformed."""
    path, kinds = folder / "args.json", get_type_hints(Args)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        if wrong := [name for name in found if name in kinds and not fits(found[name], kinds[name])]:
            raise ValueError(f"no value for --{' --'.join(wrong)}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(getattr(error, "strerror", None) or error)[:200]
        raise SystemExit(f"{path} cannot be used ({reason}). Repair it, or start again with another --out.") from None
    return found


def fits(value: object, kind: type) -> bool:
    """Return whether a value of args.json can be that of a flag: someone else may have made the folder."""
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) < 2**53
    return value in options if (options := get_args(kind)) else type(value) is kind and str(value).isprintable()


def check(args: Sampling) -> None:
    """Raise SystemExit for flags that cannot work, before anything heavy is loaded. Skips flags that Args lacks."""
    given = vars(args)
    models.check(args.model)
    for name, holds, message in LIMITS:
        if name in given and not holds(given[name]):
            raise SystemExit(f"--{name} {given[name]}: {message}.")
    # A folder of that name is found too, without an origin: it is no package.
    found = {name: importlib.util.find_spec(name) for name in ("wandb", "tensorboard") if given.get(name)}
    missing = [name for name, spec in found.items() if spec is None or spec.origin is None]
    if missing:
        raise SystemExit(f"--{' --'.join(missing)}: not installed: .venv/bin/pip install {' '.join(missing)}")
    if given.get("minibatches", 1) > given.get("questions", 1):
        raise SystemExit(f"--minibatches {args.minibatches}: at most --questions ({args.questions}), one per group.")
    if given.get("load_4bit") and given.get("dtype") == "float32":
        raise SystemExit("--load_4bit computes in bfloat16: leave --dtype out.")
    if args.adapter and not args.resume and not (Path(args.adapter) / "adapter_config.json").exists():
        raise SystemExit(f"--adapter {args.adapter}: no adapter_config.json there.")
    if not args.task:
        raise SystemExit(
            "--task is missing: tiny_search, tiny_math, reasoning_gym:<name>, a data set (docs/data.md), or a JSONL "
            "file with --corpus documents.jsonl, --retriever http://host:port/retrieve or --task_kind math."
        )
