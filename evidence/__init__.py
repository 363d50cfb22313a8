"""Independent evidence for `moe_ref`: comparisons with other code, and known defects that the suite
finds again. python -m evidence.oracles (`make oracles`) and python -m evidence.rediscovery
(`make rediscover`) write their sections of docs/second-opinions.md, and python -m
evidence.machine_code reads what Triton and ptxas make of moe_fast's kernels for an H200; python -m
pytest evidence/megatron_claims states what megatron-core does where its router surprises. No
installed package includes this folder: it needs a checkout, whose documents it writes, and other
people's packages, which it installs in environments of its own under `.evidence`.
"""
