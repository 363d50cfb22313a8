"""Independent evidence for `moe_ref`: comparisons with other code, and known defects that the suite
finds again. python -m evidence.oracles writes docs/oracles.md (`make oracles`), python -m
evidence.rediscovery writes docs/rediscovery.md (`make rediscover`), and python -m
evidence.machine_code reads what Triton and ptxas make of moe_fast's kernels for an H200. No
installed package includes this folder: it needs a checkout, whose documents it writes, and other
people's packages, which it installs in environments of its own under `.evidence`.
"""
