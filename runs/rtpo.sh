#!/usr/bin/env bash
# RTPO on web search, with LoRA in place of full fine-tuning.
#
#     bash runs/rtpo.sh 8x80gb
#     bash runs/rtpo.sh 1x24gb
#
# Flags after the machine override those here; --dry_run only prints the plan.
#
# The paper's run: Qwen3-8B, 1,000 hard search questions, 8 A100s of 80 GB, about 5 hours (arXiv:2608.18682v1, App. E).
# Sources: [paper] RTPO, with section or appendix. [Search-R1] left open by the paper: Search-R1's value.
# [ours] chosen here. Not run on a GPU yet; its memory is planned (docs/gpu.md), not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="bash runs/rtpo.sh 8x80gb|1x24gb [flags]"
machine=${1:?$usage}
flags=(
  --model Qwen3-8B              # [paper] its main model, thinking on
  --task hotpotqa               # [ours] in place of its web search; for mathematics: --task math --trunks 4 --max_turns 3
  --protocol chat               # [paper] App. E.4, the model's own template
  --context strip_think         # [paper] App. E.4, earlier thinking is removed
  --topk 3                      # [Search-R1] left open
  --temperature 0.9             # [paper] App. E.3
  --max_turns 6                 # [paper] K = 6 for search
  --max_observation_tokens 512  # [ours] left open
  --eval_every 4                # [ours] left open
  --lr 1e-5                     # [ours] for LoRA; [paper] 1e-6, of full fine-tuning, with weight decay 0.01
  --lora_rank 32                # [ours] the paper fine-tunes every weight
  --lora_alpha 64               # [ours] twice the rank
  --grad_clip 1.0               # [Search-R1] left open
  --epochs 1                    # [ours] left open
  --minibatches 1               # [paper] training batch and rollout batch are both 64
  --clip_low 0.2                # [Search-R1] left open
  --clip_high 0.2               # [Search-R1] left open
  --average turn                # [paper] eq. (6)
  --no-adv_std                  # [paper] sec. 4
  --kl_coef 0.02                # [paper] App. E.3, its initial coefficient; eq. (6) has no such term
  --kl k3                       # [ours] left open
  --tis_cap 2.0                 # [ours] engine and trainer differ in bf16
  --grad_checkpoint             # [ours] activations of 8 billion parameters
  --trunks 2                    # [paper] for search
  --siblings 2                  # [paper] its G = 3 includes the trunk
)
case $machine in
  8x80gb)
    ranks=8
    flags+=(
      --questions 64          # [paper] App. E.3
      --group 16              # [paper] 16 rollouts per prompt
      --steps 16              # [paper] one pass over 1,000 questions
      --max_turn_tokens 4096  # [paper] App. E.3, longest single turn
      --max_context 12288     # [paper] App. E.3, prompt of 8,192 and a turn of 4,096
      --micro_tokens 12288    # [ours] one full context
      --optim adamw           # [paper] App. E.3
      --gpu_memory 0.6        # [Search-R1] left open
      --sleep auto            # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  1x24gb)
    ranks=1
    flags+=(
      --questions 16          # [ours] a quarter
      --group 8               # [ours] half
      --steps 64              # [paper] one pass over 1,000 questions
      --max_turn_tokens 1024  # [ours] a quarter
      --max_context 4096      # [ours] a third
      --micro_tokens 4096     # [ours] one full context
      --optim adamw_8bit      # [ours] a quarter of the optimizer's memory
      --load_4bit             # [ours] two copies of 15 GiB do not fit
      --gpu_memory 0.6        # [ours] the share that the trainer leaves
      --sleep auto            # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
exec "${TORCHRUN:-.venv/bin/torchrun}" --nproc_per_node "$ranks" train_rtpo.py "${flags[@]}" "${@:2}"
