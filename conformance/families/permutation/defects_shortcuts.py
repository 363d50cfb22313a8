"""Fast paths, caches and shortcuts gone wrong in permutation, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    13,
    (
        (
            "overflow of a capacity passes over the last expert of more than eight",
            "permute",
            "permutation/permute.py",
            "asked = {(t, e) for t in range(num_tokens) for e in range(num_experts) if routed[t][e]}",
            "asked = {(t, e) for t in range(num_tokens) for e in range(num_experts - (capacity"
            " is not None and num_experts > 8)) if routed[t][e]}",
        ),
        (
            "float16 rows with float64 probs are summed in float32",
            "unpermute",
            "permutation/permute.py",
            "rows_PH.dtype if probs is None else torch.promote",
            "rows_PH.dtype if probs is None or rows_PH.dtype == torch.float16 else torch.promote",
        ),
        (
            "an order that begins 0, 1 and ends S-2, S-1 is taken for the identity",
            "sort_chunks",
            "permutation/permute.py",
            "for i in sequence), rest])",
            "for i in (sorted(sequence) if sequence[:2] == [0, 1] and sequence[-2:] =="
            " [len(sizes) - 2, len(sizes) - 1] else sequence)), rest])",
        ),
    ),
    "RD",
    SHORTCUT,
)
