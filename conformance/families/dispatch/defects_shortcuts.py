"""Fast paths, caches and shortcuts gone wrong in dispatchers, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    16,
    (
        (
            "a repeated expert is looked for in the next four slots",
            "deepep_dispatch deepep_combine deepep_cached_dispatch",
            "dispatch/indices.py",
            ".triu(1)",
            ".triu(1).tril(4)",
        ),
    ),
    "RD",
    SHORTCUT,
)
