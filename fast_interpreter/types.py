"""Types are made once, and a type knows what a tensor of it needs.

Triton makes the type of every intermediate result anew, with its name as text, and a shape of
`constexpr` for every tensor. Here equal types are one object. Types of a compiled kernel are made
the same way: nothing here depends on the interpreter.
"""

from typing import Any

MOST_TYPES = 4096  # kept; then all are forgotten

RELIES_ON = tuple(
    f"triton.language.core:{name}"
    for name in (
        "_unwrap_if_constexpr",
        "_unwrap_shape",
        "constexpr.__init__",
        "dtype.__init__",
        "dtype.__eq__",
        "dtype.__hash__",
        "dtype.scalar",
        "dtype.is_floating",
        "dtype.is_standard_floating",
        "dtype.is_int_signed",
        "dtype.is_int_unsigned",
        "dtype.is_int",
        "dtype.is_block",
        "pointer_type.__init__",
        "pointer_type.__eq__",
        "pointer_type.scalar",
        "block_type.__init__",
        "block_type.__eq__",
        "block_type.is_block",
        "block_type.scalar",
        "block_type.with_element_ty",
        "tuple.__init__",
        "tensor.__init__",
    )
)
DIGEST = "c14640b465eee074"


def apply(core: Any) -> None:
    """Patch `triton.language.core`."""
    _quick_dtypes(core)
    _quick_unwrap(core)
    _one_block_type(core)
    _one_pointer_type(core)
    _quick_tensor(core)


def dims_of(kind: Any) -> tuple[int, ...] | None:
    """The type's shape; None of a scalar."""
    return kind.__dict__["_layout"][3]


def scalar_types(core: Any) -> list[Any]:
    """Every type of a number; they are never freed."""
    return [x for x in vars(core).values() if type(x) is core.dtype and x.name != "void"]


def _quick_dtypes(core: Any) -> None:
    dtype = core.dtype
    sets = {
        "is_floating": frozenset(dtype.FP_TYPES),
        "is_standard_floating": frozenset(dtype.STANDARD_FP_TYPES),
        "is_int_signed": frozenset(dtype.SINT_TYPES),
        "is_int_unsigned": frozenset(dtype.UINT_TYPES),
        "is_int": frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES),
    }
    for name, names in sets.items():
        setattr(dtype, name, _membership(names))
    for kind in (dtype, core.pointer_type, core.block_type):
        kind.__eq__ = _identity_first(kind.__eq__)
    dtype.__hash__ = lambda self: hash((self.name,))


def _membership(names: frozenset[str]) -> Any:
    return lambda self: self.name in names


def _identity_first(slow: Any) -> Any:
    return lambda self, other: True if self is other else slow(self, other)


def _quick_unwrap(core: Any) -> None:
    slow, constexpr = core._unwrap_if_constexpr, core.constexpr
    unwrapped_kinds = frozenset(
        (core.tensor, int, float, bool, str, type(None), core.dtype, core.pointer_type, core.block_type)
    )

    def unwrap(x: Any) -> Any:
        kind = type(x)
        if kind is constexpr:
            return x.value
        return x if kind in unwrapped_kinds else slow(x)

    core._unwrap_if_constexpr = unwrap


def _one_block_type(core: Any) -> None:
    types: dict[Any, Any] = {}
    block_type, constexpr, tuple_ = core.block_type, core.constexpr, core.tuple
    slow_init, slow_with = block_type.__init__, block_type.with_element_ty

    def new(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        if cls is block_type:
            sizes = shape.values if type(shape) is tuple_ else shape
            if type(sizes) is list:
                cached_type = types.get((id(element_ty), *[x.value if type(x) is constexpr else x for x in sizes]))
                if cached_type is not None:
                    return cached_type
        return object.__new__(cls)

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" in self.__dict__:
            return
        slow_init(self, element_ty, shape)
        sizes = self.shape.values
        if type(self) is block_type and all(type(size) is int for size in sizes):
            if len(types) >= MOST_TYPES:
                types.clear()
            # The type keeps its element type, so that the id stays in use.
            types[(id(element_ty), *sizes)] = self

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if scalar_ty is self.element_ty:
            return self
        return types.get((id(scalar_ty), *self.shape.values)) or slow_with(self, scalar_ty)

    block_type.__new__, block_type.__init__, block_type.with_element_ty = new, init, with_element_ty


def _one_pointer_type(core: Any) -> None:
    types: dict[Any, Any] = {}
    pointer_type = core.pointer_type
    slow_init = pointer_type.__init__

    def new(cls: Any, element_ty: Any = None, address_space: Any = "global", const: Any = False) -> Any:
        if cls is pointer_type:
            cached_type = types.get((id(element_ty), address_space, const))
            if cached_type is not None:
                return cached_type
        return object.__new__(cls)

    def init(self: Any, element_ty: Any, address_space: Any = "global", const: Any = False) -> None:
        if "name" in self.__dict__:
            return
        slow_init(self, element_ty, address_space, const)
        if type(self) is pointer_type and self.element_ty is element_ty and type(const) is bool:
            if len(types) >= MOST_TYPES:
                types.clear()
            types[id(element_ty), address_space, const] = self

    pointer_type.__new__, pointer_type.__init__ = new, init


def _quick_tensor(core: Any) -> None:
    slow_init = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        layout = type.__dict__.get("_layout")
        if layout is None:
            slow_init(self, handle, type)
            dims = tuple(type.shape.values) if type.is_block() else None
            type._layout = (self.shape, self.numel, self.dtype, dims)
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype, _ = layout

    core.tensor.__init__ = init
