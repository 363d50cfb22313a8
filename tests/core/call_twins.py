"""For each law on sequences of calls, a case and an operator that is right in a single call."""

from dataclasses import replace

import torch

from conformance.mutants.kinds import autocast, calls
from tests.core.law_twins import ACTIVATION, CHUNKS, DGRAD, GLU, LINEAR, SPREAD_TOPK, UNPERMUTE, Z


def itself(original, rows, sizes, order, **settings):
    out = original(rows, sizes, order, **settings)
    return out._replace(rows=rows) if torch.equal(out.rows, rows) else out


STILL = replace(CHUNKS, order=(0, 1, 2))
NARROW_GLU = replace(GLU, dtype="float16", probs="", grads="h")
FORWARD_GLU = replace(GLU, grads="")
CALL_TWINS = [  # law, case, function that makes the wrapper
    ("interleaved", LINEAR, calls.backward_of_the_last_forward),
    ("interleaved", replace(GLU, grads="h"), calls.backward_of_the_last_forward),
    ("interleaved", Z, calls.one_buffer_of_each_shape),
    ("interleaved", DGRAD, calls.one_buffer_of_each_shape),
    ("repeated", GLU, calls.wrong_at_the_third_call),
    ("other_thread", ACTIVATION, calls.set_up_by_the_first_thread),
    ("other_thread", UNPERMUTE, calls.set_up_by_the_first_thread),
    ("inference_mode", FORWARD_GLU, lambda: calls.another_path_without_gradients),
    ("inference_mode", SPREAD_TOPK, lambda: calls.another_path_without_gradients),
    ("no_grad", GLU, lambda: calls.another_path_under_no_grad),
    ("no_grad", LINEAR, lambda: calls.a_graph_of_its_own),
    ("accumulated", GLU, lambda: calls.empties_what_backward_keeps),
    ("buffer_reuse", FORWARD_GLU, calls.cached_by_address),
    ("double_backward", LINEAR, lambda: calls.drops_the_second_derivative),
    ("double_backward", GLU, lambda: calls.drops_the_second_derivative),
    ("double_backward", replace(Z, grads="logits"), lambda: calls.refuses_only_where_a_cotangent_requires_grad),
    ("double_backward", GLU, lambda: calls.refuses_only_where_a_cotangent_requires_grad),
    ("own_memory", replace(GLU, grads="h"), lambda: calls.backward_reads_the_result),
    ("own_memory", LINEAR, lambda: calls.backward_reads_the_result),
    ("autocast", NARROW_GLU, lambda: autocast.backward_in_bfloat16),
    ("autocast", NARROW_GLU, lambda: autocast.inputs_in_bfloat16),
    ("autocast", NARROW_GLU, autocast.first_of_a_shape),
    ("autocast", replace(SPREAD_TOPK, dtype="bfloat16"), lambda: autocast.widened),
    ("autocast", replace(DGRAD, dtype="float64"), lambda: autocast.inputs_in_bfloat16),
    ("handle_again", UNPERMUTE, calls.right_once_per_handle),
]
