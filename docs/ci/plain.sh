#!/usr/bin/env bash
# Any CI: judges the kernels of this repository; the exit code is the verdict. SHARD is i/n where the CI runs several jobs.
set -euo pipefail
python3 -m venv .venv-conformance
.venv-conformance/bin/pip install -q 'moe-conformance[fast]' -r requirements.txt
exec .venv-conformance/bin/moe-conformance run --impl my_kernels.moe --profile gate --shard "${SHARD:-1/1}" \
    --corpus tests/corpus --report verdict.json --report verdict.xml
