"""Mistakes in the kernels of permutation."""

from tests.mutants.kernels import series

DEFECTS = series(
    "P",
    (
        (
            "the end of a list is not looked at: a slot never written is taken for a row",
            "permute unpermute",
            "permutation/_permute.py",
            "live = j < lists.num_slots  # the list's end was never written",
            "live = j <= lists.num_slots  # the list's end was never written",
        ),
        (
            "rows past the buffer are not dropped",
            "permute unpermute",
            "permutation/_permute.py",
            "live & (row < lists.num_rows)",
            "live & (row <= lists.num_rows)",
        ),
    ),
)
