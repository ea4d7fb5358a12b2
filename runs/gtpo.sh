#!/usr/bin/env bash
# GTPO on mathematics with Python, with LoRA in place of full fine-tuning.
#
#     bash runs/gtpo.sh 8x80gb
#     bash runs/gtpo.sh 1x24gb
#
# Flags after the machine override those here; --dry_run only prints the plan.
#
# Of the GTPO paper (arXiv:2511.14846) we know the method's constants, from secondary summaries (docs/gtpo.md), but not the
# batch size, lengths and learning rate.
# Sources: [paper] GTPO. [Search-R1] left open by our sources: Search-R1's value.
# [ours] chosen here. Not run on a GPU yet; its memory is planned (docs/gpu.md), not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="bash runs/gtpo.sh 8x80gb|1x24gb [flags]"
machine=${1:?$usage}
flags=(
  --model Qwen2.5-7B            # [paper] the larger of its two; base or instruct is left open
  --task math                   # [ours] the paper's training data is not known; [paper] reports AIME, MATH 500, SVAMP
  --answer boxed                # [ours] as in most work on mathematics
  --group 8                     # [ours] left open
  --temperature 1.0             # [Search-R1] left open
  --max_turns 4                 # [ours] left open
  --max_observation_tokens 512  # [ours] left open
  --steps 500                   # [ours] left open
  --eval_every 50               # [ours] left open
  --lr 1e-5                     # [ours] for LoRA; [Search-R1] 1e-6, of full fine-tuning, and the paper's is not known
  --lora_rank 32                # [ours] left open
  --lora_alpha 64               # [ours] twice the rank
  --grad_clip 1.0               # [Search-R1] left open
  --epochs 1                    # [Search-R1] left open
  --clip_low 0.2                # [Search-R1] left open
  --clip_high 0.2               # [Search-R1] left open
  --average token               # [ours] left open
  --kl_coef 0.001               # [Search-R1] left open
  --kl k3                       # [Search-R1] left open
  --tis_cap 2.0                 # [ours] engine and trainer differ in bf16
  --grad_checkpoint             # [ours] activations of 7 billion parameters
  --gamma 0.9                   # [paper] best in its ablation
  --format_penalty 0.1          # [paper] sec. 3.3 (by a secondary summary)
  --shaping 0.5                 # [paper] sec. 3.4 (by a third party's implementation that cites it)
  --norm_set turn_index         # [ours] left open; docs/gtpo.md
)
case $machine in
  8x80gb)
    ranks=8
    flags+=(
      --questions 64          # [ours] 512 trajectories per step
      --minibatches 2         # [Search-R1] mini-batches of 256 trajectories
      --max_turn_tokens 1536  # [ours] left open
      --max_context 8192      # [ours] four turns of that length
      --micro_tokens 16384    # [ours] as much as fits
      --optim adamw           # [Search-R1] left open
      --gpu_memory 0.6        # [Search-R1] the engine's share
      --sleep auto            # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  1x24gb)
    ranks=1
    flags+=(
      --questions 32         # [ours] 256 trajectories per step
      --minibatches 1        # [Search-R1] mini-batches of 256 trajectories
      --max_turn_tokens 768  # [ours] half
      --max_context 4096     # [ours] half
      --micro_tokens 4096    # [ours] one full trajectory
      --optim adamw_8bit     # [ours] a quarter of the optimizer's memory
      --load_4bit            # [ours] two copies of 14 GiB do not fit
      --gpu_memory 0.6       # [ours] the share that the trainer leaves
      --sleep auto           # [ours] the first of none, kv, full that fits by the memory plan
    )
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
exec "${TORCHRUN:-.venv/bin/torchrun}" --nproc_per_node "$ranks" train_gtpo.py "${flags[@]}" "${@:2}"
