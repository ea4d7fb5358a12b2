#!/usr/bin/env bash
# GRPO on the embedded task, three seeds: the first table of the README. About 7 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/.."
make setup
for seed in 1 2 3; do
  .venv/bin/python train_grpo.py --model tiny --task tiny_search --seed $seed --out "${OUT:-out}/tiny-s$seed"
done
.venv/bin/python - "${OUT:-out}" <<'PYTHON'
import json, sys
for seed in (1, 2, 3):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/tiny-s{seed}/metrics.jsonl")]
    em = [line["eval/em"] for line in lines if line["eval/em"] is not None]
    mean, most = (max(line[f"policy/sampler_{key}"] for line in lines[1:]) for key in ("absdiff", "maxdiff"))
    seconds = sum(line["time/step"] for line in lines)
    print(f"seed {seed}: exact match {em[0]:.3f} -> {em[-1]:.3f}, {seconds:.0f} s, engine against trainer: mean {mean:.1e}, largest {most:.1e}")
PYTHON
