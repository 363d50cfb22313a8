"""Code in values is followed: enums, slots, caches, registries, tuned kernels, tables."""

import pytest

from conformance.engine.footprint.footprint import Footprints
from tests.engine.footprint.kit import changes, footprints_in, footprints_in_each, write

CODE = '''
import abc, collections, enum, functools, logging, pathlib, re, threading, typing
import torch, triton, triton.language as tl
from kit import deep

HERE, LOCK, LOG, PATTERN = pathlib.Path(__file__).parent, threading.Lock(), logging.getLogger("x"), re.compile("a")
TABLE = collections.defaultdict(lambda: deep.factory)


class Color(enum.Enum):
    RED = 1
    def shade(self): return deep.member()


class Pair(typing.NamedTuple):
    x: int = 1
    def both(self): return deep.named()


@functools.singledispatch
def single(x): return 0


@single.register
def _(x: int): return deep.dispatched()


@torch.compile
def compiled(x): return deep.compiled()


@functools.lru_cache
def cached(): return deep.cached()


class Base(abc.ABC):
    registry = {}
    def __init_subclass__(cls): Base.registry[cls.__name__] = cls


class Sub(Base):
    def go(self): return deep.subclass()


class Lazy:
    @functools.cached_property
    def late(self): return deep.late()
    @property
    def early(self): return deep.early()


@triton.autotune(configs=[triton.Config({"BLOCK": deep.BLOCK})], key=["n"])
@triton.jit
def tuned(p, n, BLOCK: tl.constexpr): tl.store(p, deep.kernel(n))


by_hand = triton.autotune([triton.Config({"BLOCK": deep.OTHER_BLOCK})], key=["n"])(tuned.fn)


def gate(*a):
    with LOCK: LOG.info(PATTERN)
    return Color.RED, Pair(), HERE


def jitter(*a):
    return single(3), compiled(1), cached(), Base.registry["Sub"], Lazy()


def z_loss(*a):
    tuned[(1,)](1), by_hand[(1,)](1), TABLE["x"]()
    later = lambda q: deep.in_lambda(q)
    return (deep.in_generator(y) for y in a), later
'''  # fmt: skip
REACHED = {
    "gate": ("member", "named"),
    "jitter": ("dispatched", "compiled", "cached", "subclass", "late", "early"),
    "z_loss": ("factory", "kernel", "in_lambda", "in_generator"),
}
NAMES = [name for names in REACHED.values() for name in names]
DEEP = "import triton\nBLOCK = 1\nOTHER_BLOCK = 2\n\n\n" + "".join(
    f"{'@triton.jit' if name == 'kernel' else ''}\ndef {name}(*a):\n    return 0  # {name}\n" for name in NAMES
)
FILES = {"__init__.py": "from kit.parts import gate, jitter, z_loss\n", "parts.py": CODE, "deep.py": DEEP}
EDITS = {name: (function, f"0  # {name}", "1") for function, names in REACHED.items() for name in names} | {
    "a configuration": ("z_loss", "\nBLOCK = 1", "\nBLOCK = 4"),
    "a configuration without a decorator": ("z_loss", "OTHER_BLOCK = 2", "OTHER_BLOCK = 4"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Footprints]:
    """Before, and after each edit alone."""
    folder = tmp_path_factory.mktemp("values")
    edited = {name: FILES | {"deep.py": DEEP.replace(old, new)} for name, (_, old, new) in EDITS.items()}
    texts = {"before": FILES} | edited
    folders = [write(folder / str(index), **files) for index, files in enumerate(texts.values())]
    return dict(zip(texts, footprints_in_each(folders), strict=True))


@pytest.mark.parametrize("edit", EDITS)
def test_code_in_a_value_is_followed(edit, found):
    assert list(changes(found["before"], found[edit])) == [EDITS[edit][0]]


RAISING = """
from kit import deep


class Unready:
    def __getattr__(self, name): raise RuntimeError("models should inherit from a base")


class Silent:
    def __getattribute__(self, name): raise RuntimeError("no attribute")


class Model:
    validator = Unready()
    serializer = Silent()
    def member(self): return deep.member()


UNREADY, SILENT, TABLE = Unready(), Silent(), [Unready(), Silent()]


def gate(*a): return Model().member(), UNREADY.fn, SILENT, TABLE
def jitter(*a): return deep.late()
def z_loss(*a): return a
"""


def test_objects_whose_attributes_raise_are_walked_over_and_the_code_around_them_is_followed(tmp_path):
    files = FILES | {"parts.py": RAISING}
    before = footprints_in(write(tmp_path / "before", **files))
    again = footprints_in(write(tmp_path / "again", **files))
    after = footprints_in(write(tmp_path / "after", **files | {"deep.py": DEEP.replace("0  # member", "1")}))
    assert changes(before, again) == {}
    assert list(changes(before, after)) == ["gate"]


def test_locks_loggers_and_paths_are_equal_in_every_copy(found, tmp_path):
    assert changes(found["before"], footprints_in(write(tmp_path, **FILES))) == {}
