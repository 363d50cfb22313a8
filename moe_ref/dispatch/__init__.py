"""The dispatchers: each brings tokens to the ranks that hold their experts (dispatch) and adds what comes back (combine).

All of them are played for all ranks at once: arguments and results are lists with an entry for each rank. What they have in common is
`moe_ref.dispatch.plan`; what they differ in is the layout they ask of it, and the tree in which combine adds:

    dispatcher             a rank's buffer holds                           y[t] is added up like this
    allgather              copies, by (expert, source, token)              Σ experts of a rank → round → Σ ranks in the probs' dtype → round
    alltoall               copies, by (expert, tensor rank, source, token) Σ tensor ranks in the probs' dtype → round → Σ experts → round
    deepep                 each token once, by (source, token)             bias + Σ ranks → round; the rows come in summed by the caller
    deepep, low latency    copies, in a slab an expert                     Σ slots of prob · row → round
    hybridep               copies, by (expert, source, token), padded      Σ experts of a rank → round → Σ ranks → round

Every Σ ascends and is taken in float32 (float64 for float64) unless something else is said; every "round" is to the dtype of the rows.
Dispatch is linear, and its gradient is its own transpose: the same tree without probs, as stated at each function. The gradient of combine
is the dispatch of the gradient: copies, rounded where the sum was to a narrower dtype (that of the probs, between ranks), and nowhere else.

Read `exchange` (mover and handle) and `trees`, then `indices` (what slots may hold), `allgather`, `alltoall`, `deepep`, `low_latency`, `hybridep`.
"""
