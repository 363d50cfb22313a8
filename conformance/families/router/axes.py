"""Layouts in the covering arrays of functions without a signature (temporary)."""

from conformance.core.space import LAYOUTS


def layouts(
    *matrices: str, vectors: tuple[str, ...] = (), expanded: tuple[str, ...] = ()
) -> tuple[tuple[str, str], ...]:
    """(layout, tensor) pairs: all layouts of matrices, one of vectors and expandable tensors."""
    return (
        ("contiguous", ""),
        *((layout, of) for of in matrices for layout in LAYOUTS[1:]),
        *(("strided", of) for of in vectors),
        *(("expanded", of) for of in expanded),
    )
