"""What a reader needs no trust for: `moe_ref` next to other code, and known defects found again.

    python -m evidence.oracles       # make oracles: docs/oracles.md
    python -m evidence.rediscovery   # make rediscover: docs/rediscovery.md
    python -m evidence.machine_code  # what Triton and ptxas make of moe_fast's kernels for an H200

The folder is part of no package that is installed: it needs a checkout, whose documents it writes,
and other people's packages, which it installs in environments of its own under `.evidence`.
"""
