"""One run: the queue, the ledger, the verdict."""
