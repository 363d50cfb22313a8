"""Runs cases: `runner` makes one call, `evaluate` judges one case, `child` is its process, `pool`
manages processes, `ledger` records outcomes.
"""
