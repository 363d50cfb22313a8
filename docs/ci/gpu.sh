#!/usr/bin/env bash
# A GPU runner: judges kernels, and keeps Triton's compiled kernels for the next run.
#
#   IMPL=my_kernels.moe CACHE=/var/cache/moe-conformance gpu.sh [options of moe-conformance run]
#
# CACHE is a folder that outlives the job. A run with its kernels in the cache takes half the time.
# Triton finds a kernel by its source, options and compiler, so that a changed kernel is compiled
# again; GPU and versions have a folder each, which can be removed alone. The exit code is the
# verdict's. SIGTERM, such as a cancelled job, ends the run in seconds: its reports are written.
set -euo pipefail
: "${IMPL:?the namespace to judge, package.module or package.module:attribute}"
: "${CACHE:?a folder that outlives the job}"
UNUSED_DAYS=30  # kernels that no run has read for so long are removed

gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader)
gpu=${gpu%%$'\n'*}  # the first one
versions=$(python3 -c 'from importlib.metadata import version as v; print("triton", v("triton"), "torch", v("torch"))')
export TRITON_CACHE_DIR="$CACHE/$(tr -cs 'A-Za-z0-9.+\n' '-' <<< "$gpu $versions")"
mkdir -p "$TRITON_CACHE_DIR"
find "$CACHE" -type f -name '*.cubin' -atime "+$UNUSED_DAYS" -printf '%h\0' > "$CACHE/unused"
xargs -0 -r rm -rf < "$CACHE/unused"
touch "$CACHE/gpu.lock"
exec 9< "$CACHE/gpu.lock"
flock 9  # one run at a time: a second one waits

rm -f verdict.json verdict.xml verdict.md  # of an earlier run
exec moe-conformance run --impl "$IMPL" --corpus tests/corpus \
    --report verdict.json --report verdict.xml --report verdict.md "$@"
