"""`moe_ref` compared with code that was written by others, value by value.

One file per peer. Each has `PEER` (what is compared, in words), `PACKAGES` (what to install),
`SOURCE` (a repository to read, or None) and `comparisons(source)`.
"""
