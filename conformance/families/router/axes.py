"""Layouts in the covering arrays of functions without a signature. It goes away with the last of them."""

from conformance.core.space import LAYOUTS


def layouts(
    *matrices: str, vectors: tuple[str, ...] = (), expanded: tuple[str, ...] = ()
) -> tuple[tuple[str, str], ...]:
    """A layout and its tensor: every layout for matrices, one for vectors and for tensors that may be expanded."""
    return (
        ("contiguous", ""),
        *((layout, of) for of in matrices for layout in LAYOUTS[1:]),
        *(("strided", of) for of in vectors),
        *(("expanded", of) for of in expanded),
    )
