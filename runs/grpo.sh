#!/usr/bin/env bash
# GRPO over several turns as Search-R1 ran it (v0.2), with LoRA in place of full fine-tuning.
#
#     bash runs/grpo.sh 8x80gb --retriever http://127.0.0.1:8000/retrieve
#     bash runs/grpo.sh 1x24gb --retriever http://127.0.0.1:8000/retrieve
#
# Flags after the machine override those here; --dry_run only prints the plan.
#
# Its setup: NQ and HotpotQA merged, E5 over the 2018 Wikipedia, flat index, 8 GPUs. --retriever is a compatible server.
# The values are from the scripts of its v0.2 experiments: github.com/PeterGriffinJin/Search-R1, commit a14dc3a.
# Sources: [paper] DeepSeekMath or Search-R1. [code] Search-R1's code.
# [ours] chosen here. Not run on a GPU yet; its memory is planned (docs/gpu.md), not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="bash runs/grpo.sh 8x80gb|1x24gb [flags]"
machine=${1:?$usage}
flags=(
  --model Qwen2.5-3B            # [paper] Qwen2.5-3B or 7B, base or instruct
  --task nq_hotpotqa            # [code] NQ and HotpotQA, exact match
  --topk 3                      # [code] documents per search
  --group 5                     # [code] samples per question
  --temperature 1.0             # [code] without its top-p of 0.95: log-probabilities are over all tokens
  --max_turns 5                 # [code] 4 searches and a last generation
  --max_turn_tokens 500         # [code] per turn
  --max_observation_tokens 500  # [code] per tool output
  --steps 1005                  # [code] without its warm-up over the first 28.5 %
  --eval_every 100              # [code] tests every 100 steps
  --lr 1e-5                     # [ours] for LoRA; [code] 1e-6, of full fine-tuning
  --lora_rank 32                # [ours] Search-R1 fine-tunes every weight
  --lora_alpha 64               # [ours] twice the rank
  --grad_clip 1.0               # [code]
  --epochs 1                    # [code] one pass
  --clip_low 0.2                # [code]
  --clip_high 0.2               # [code]
  --average token               # [code] masked mean; there per micro-batch, here per optimizer step
  --kl_coef 0.001               # [code] without its entropy bonus of 0.001
  --kl k3                       # [code] its low-variance estimator
  --tis_cap 2.0                 # [ours] engine and trainer differ in bf16
  --grad_checkpoint             # [code]
)
case $machine in
  8x80gb)
    ranks=8
    flags+=(
      --questions 512       # [code] 2,560 trajectories per step
      --minibatches 10      # [code] 2,560 trajectories in mini-batches of 256
      --max_context 4096    # [code] it truncates the context there; here the trajectory ends
      --micro_tokens 16384  # [ours] as much as fits
      --optim adamw         # [ours] 32-bit states
      --gpu_memory 0.6      # [code] the engine's share
      --sleep auto          # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  1x24gb)
    ranks=1
    flags+=(
      --questions 64       # [ours] an eighth: 320 trajectories per step
      --minibatches 1      # [ours] mini-batches of about the same size
      --max_context 4096   # [code] it truncates the context there; here the trajectory ends
      --micro_tokens 4096  # [ours] one full trajectory
      --optim adamw_8bit   # [ours] a quarter of the optimizer's memory
      --load_4bit          # [ours] for more KV pages; the plan fits without it too
      --gpu_memory 0.6     # [code] the engine's share
      --sleep auto         # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
exec "${TORCHRUN:-.venv/bin/torchrun}" --nproc_per_node "$ranks" train_grpo.py "${flags[@]}" "${@:2}"
