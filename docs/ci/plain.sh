#!/usr/bin/env bash
# Any CI: judges the kernels of this repository; the exit code is the verdict.
#
# PACKAGE is what pip installs, for no registry has the package: 'moe-conformance[fast] @ git+URL', or
# a wheel, './moe_conformance-0.1.0-py3-none-any.whl[fast]'. SHARD is i/n where the CI runs several jobs.
set -euo pipefail
: "${PACKAGE:?a git URL or a wheel of moe-conformance, see above}"
python3 -m venv .venv-conformance
.venv-conformance/bin/pip install -q "$PACKAGE" -r requirements.txt
exec .venv-conformance/bin/moe-conformance run --impl my_kernels.moe --profile gate --shard "${SHARD:-1/1}" \
    --corpus tests/corpus --report verdict.json --report verdict.xml
