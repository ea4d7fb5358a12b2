#!/usr/bin/env bash
# TSPO on Search-R1's task, with LoRA in place of full fine-tuning.
#
#     bash runs/tspo.sh 8x80gb --retriever http://127.0.0.1:8000/retrieve
#     bash runs/tspo.sh 1x24gb --retriever http://127.0.0.1:8000/retrieve
#
# Flags after the machine override those here; --dry_run only prints the plan.
#
# The training settings of the TSPO paper (arXiv:2601.22776v2) were not available: these are Search-R1's for GRPO, whose
# benchmark it uses.
# Sources: [paper] TSPO. [Search-R1] left open by our sources: Search-R1's value.
# [ours] chosen here. Not run on a GPU yet; its memory is planned (docs/gpu.md), not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="bash runs/tspo.sh 8x80gb|1x24gb [flags]"
machine=${1:?$usage}
flags=(
  --model Qwen2.5-3B            # [paper] Qwen2.5-3B and 7B
  --task nq_hotpotqa            # [Search-R1] NQ and HotpotQA, exact match
  --topk 3                      # [Search-R1] documents per search
  --group 5                     # [Search-R1] samples per question
  --temperature 1.0             # [Search-R1] without its top-p of 0.95: log-probabilities are over all tokens
  --max_turns 5                 # [Search-R1] 4 searches and a last generation
  --max_turn_tokens 500         # [Search-R1] per turn
  --max_observation_tokens 500  # [Search-R1] per tool output
  --steps 1005                  # [Search-R1] without its warm-up over the first 28.5 %
  --eval_every 100              # [Search-R1] tests every 100 steps
  --lr 1e-5                     # [ours] for LoRA; [Search-R1] 1e-6, of full fine-tuning
  --lora_rank 32                # [ours] Search-R1 fine-tunes every weight
  --lora_alpha 64               # [ours] twice the rank
  --grad_clip 1.0               # [Search-R1]
  --epochs 1                    # [Search-R1] one pass
  --clip_low 0.2                # [Search-R1]
  --clip_high 0.2               # [Search-R1]
  --average token               # [Search-R1] masked mean; there per micro-batch, here per optimizer step
  --kl_coef 0.001               # [Search-R1] without its entropy bonus of 0.001
  --kl k3                       # [Search-R1] its low-variance estimator
  --tis_cap 2.0                 # [ours] engine and trainer differ in bf16
  --grad_checkpoint             # [Search-R1]
  --folr_scope at               # [ours] every source says "the turn"; docs/tspo.md
  --folr_alpha 0.5              # [ours] cancels out where advantages are divided by their deviation
  --match substring             # [Search-R1] as its retrieval score looks for golds
  --turn_level all_wrong        # [paper] best in its ablation (by a secondary summary)
  --norm_set turn_index         # [ours] the sources leave it open; docs/tspo.md
)
case $machine in
  8x80gb)
    ranks=8
    flags+=(
      --questions 512       # [Search-R1] 2,560 trajectories per step
      --minibatches 10      # [Search-R1] 2,560 trajectories in mini-batches of 256
      --max_context 4096    # [Search-R1] it truncates the context there; here the trajectory ends
      --micro_tokens 16384  # [ours] as much as fits
      --optim adamw         # [ours] 32-bit states
      --gpu_memory 0.6      # [Search-R1] the engine's share
      --sleep auto          # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  1x24gb)
    ranks=1
    flags+=(
      --questions 64       # [ours] an eighth: 320 trajectories per step
      --minibatches 1      # [ours] mini-batches of about the same size
      --max_context 4096   # [Search-R1] it truncates the context there; here the trajectory ends
      --micro_tokens 4096  # [ours] one full trajectory
      --optim adamw_8bit   # [ours] a quarter of the optimizer's memory
      --load_4bit          # [ours] for more KV pages; the plan fits without it too
      --gpu_memory 0.6     # [Search-R1] the engine's share
      --sleep auto         # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
exec "${TORCHRUN:-.venv/bin/torchrun}" --nproc_per_node "$ranks" train_tspo.py "${flags[@]}" "${@:2}"
