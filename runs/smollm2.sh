#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a real pretrained model, on the multi-hop search task: 20 steps on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
make setup
.venv/bin/python train_grpo.py --model smollm2 --task tiny_search --out "${OUT:-out}/smollm2"
