"""Runs cases: `runner` makes one call, `evaluate` judges one case, `child` does so in a process
that may die, `pool` keeps such processes, `ledger` counts.
"""
