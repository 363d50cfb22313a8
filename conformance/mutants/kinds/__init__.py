"""Generic kinds of defects, which any function may have, and the table of functions that have them.

Each line of the table is a kind and, as in `conformance.mutants.substitution`, the header of a
defect. A kind may have arguments:

    32-bit addresses          | P01 permute: 32-bit row · stride in permute [TE #2196]
    read as contiguous: probs | AE121 glu, activation: probs are taken for contiguous [values]
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds import addresses, autocast, calls, conditions, gradients, layouts
from conformance.mutants.substitution import header


def _always(wrapper: Wrapper) -> Callable[[], Wrapper]:
    """The kind without a state and without arguments."""
    return lambda: wrapper


KINDS: dict[str, Callable[..., Wrapper]] = {
    "32-bit addresses": addresses.in_32_bits,
    # layouts
    "read as contiguous": lambda name: conditions.reads_flat(name),
    "input read as contiguous": lambda position: conditions.reads_flat(position=int(position)),
    "cotangent read as contiguous": _always(conditions.cotangent_read_flat),
    "rows of a slice read as adjacent": _always(layouts.reading(layouts.adjacent)),
    "overlapping rows read as adjacent": _always(layouts.reading(layouts.separate)),
    "rows past 256 numbered in 8 bits": _always(layouts.numbers_rows_in_bytes),
    "pending minus ignored": _always(layouts.reading(gradients.without_pending_minus)),
    "pending minus of a cotangent ignored": _always(gradients.reads_no_pending_minus_of_a_cotangent),
    # state between calls
    "backward of the last forward": calls.backward_of_the_last_forward,
    "second backward reads overwritten memory": _always(calls.empties_what_backward_keeps),
    "one output buffer per shape": calls.one_buffer_of_each_shape,
    "each third call wrong": calls.wrong_at_the_third_call,
    "tables of the first thread": calls.set_up_by_the_first_thread,
    "factor cached by address": calls.cached_by_address,
    "handle for one call": calls.right_once_per_handle,
    # modes and state of the process
    "default process group": _always(calls.in_the_default_group),
    "options ignored in inference mode": _always(calls.another_path_without_gradients),
    "options ignored under no_grad": _always(calls.another_path_under_no_grad),
    "graph under no_grad": _always(calls.a_graph_of_its_own),
    "global generator advanced": _always(calls.draws_from_the_generator),
    "default dtype changed": _always(calls.leaves_another_dtype),
    # memory of results and cotangents
    "backward reads the result": _always(calls.backward_reads_the_result),
    "cotangent scaled in place": _always(calls.changes_the_cotangent),
    "first input negated in place": _always(calls.negates_the_input),
    "equal rows expanded": _always(calls.expands_equal_rows),
    "equal results in one tensor": calls.results_of_one_buffer,
    # second derivatives
    "no second derivative": _always(calls.drops_the_second_derivative),
    "no second derivative of a constant cotangent": _always(calls.refuses_only_where_a_cotangent_requires_grad),
    # autocast
    "backward in bfloat16 under autocast": _always(autocast.backward_in_bfloat16),
    "inputs in bfloat16 under autocast": _always(autocast.inputs_in_bfloat16),
    "float32 results under autocast": _always(autocast.widened),
    "cast kept by shape under autocast": autocast.first_of_a_shape,
    # dtypes
    "float64 rows added in float32": _always(gradients.adds_float64_in_float32),
    # settings
    "0 taken for none": conditions.falsy,
}


def of_kinds(table: Path) -> Iterator[Defect]:
    """The defects of a table.

    Raises:
        ValueError: there is no such kind, or a line holds no defect.
    """
    for line in table.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, _, description = line.partition(" | ")
            name, _, arguments = kind.strip().partition(": ")
            if name not in KINDS:
                raise ValueError(f"{table.name}: there is no kind {name!r}; there are {', '.join(KINDS)}")
            defect, functions, title, origin = header(description)
            wrapper = KINDS[name](*arguments.split())
            yield Defect(defect, title, origin, dict.fromkeys(functions, wrapper))
