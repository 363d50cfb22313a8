"""Runs cases: `runner` makes one call, `evaluate` judges one case, `child` isolates it in a process,
`pool` manages the processes, `ledger` records outcomes.
"""
