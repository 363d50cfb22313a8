"""The dispatchers: each brings tokens to the ranks that hold their experts (dispatch) and adds the
rows on the way back (combine).

All are played for all ranks at once: arguments and results are lists with an entry per rank. Each
file begins with its dispatcher's layout (see `plan`), mover (`exchange`) and reduction tree
(`trees`):

    dispatcher           a rank's buffer              sum of y[t]
    allgather            copies, by expert            Σ experts of a rank → round → Σ ranks* → round
    alltoall             copies, by expert            Σ tensor ranks* → round → Σ experts → round
    deepep               each token once, by source   bias + Σ ranks → round
    deepep, low latency  copies, a slab per expert    Σ slots of prob · row → round
    hybridep             copies, by expert, padded    Σ experts of a rank → round → Σ ranks → round

Every Σ ascends, in float32 (float64 for float64) or, where marked *, in the probs' dtype; every
"round" is to the rows' dtype. Dispatch is linear, and its gradient is its transpose: the same tree
without probs. The gradient of combine is the dispatch of the gradient: copies, rounded only where
the sum was, to the dtype between ranks.

Read `plan`, `exchange` and `trees`, `indices` (the values of slots), then the dispatchers.
"""
