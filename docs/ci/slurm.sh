#!/usr/bin/env bash
# Slurm: an array of jobs judges shards, each with one GPU; a second job makes the verdict of them.
#
#     shards=$(sbatch --parsable --array=1-8 --gpus=1 --cpus-per-task=16 slurm.sh)
#     sbatch --wait --dependency="afterany:$shards" slurm.sh
#
# The exit code of the second is the verdict. Both run in the folder of the kernels, where the
# environment .venv-conformance has the package (see plain.sh).
set -euo pipefail
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    exec .venv-conformance/bin/moe-conformance run --impl my_kernels.moe --profile gate \
        --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --report "shard-$SLURM_ARRAY_TASK_ID.json"
fi
exec .venv-conformance/bin/moe-conformance merge shard-*.json --report verdict.json --report verdict.md
