"""The suite on quantisers: honest ones pass whatever they do differently, and each classic mistake is found where it was made."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.core.tensors import DTYPES
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.draw import covering_cases, drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.quantization.cases import VALUES, QuantizeCase, noise_of, recipe_of, x_of
from conformance.families.quantization.space import random_cases
from conformance.interface import Implementation
from conformance.judge.statistics import LEAST_REPEATS, Stochastic, improbable
from moe_ref.config import QuantizerState, Recipe
from moe_ref.quantization.formats import E4M3, E8M0, decode, encode
from moe_ref.quantization.recipes import Scaled, spread
from tests.honest import quantizers

poison.install()
EVERY, DRAWS = 7, 8  # one of so many cases of the covering array; drawn cases of a seed
HONEST = {"the_reference": moe_ref, "divides": quantizers.Divides, "multiplies": quantizers.Multiplies}

CURRENT = QuantizeCase(function="quantize", tokens=9, experts=3, counts=(4, 0, 5), hidden=21, seed=1)
BLOCK = replace(CURRENT, scaling="block", hidden=150)
MXFP8 = replace(CURRENT, scaling="mxfp8", tokens=3, counts=(1, 0, 2), hidden=3)
NVFP4 = replace(MXFP8, scaling="nvfp4", role="grad_output")
DELAYED = replace(CURRENT, scaling="delayed", steps="quantize+update+quantize")


def outcome_of(case: QuantizeCase, namespace: Any) -> Outcome:
    return evaluate(case, Implementation(namespace, "here"))


# ---- honest quantisers


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_quantiser_is_accepted(name, seed):
    cases = [
        *covering_cases("quantize", Space()).cases[seed % EVERY :: EVERY],
        *drawn(strategy("quantize", Space()), seed, DRAWS),
    ]
    outcomes = {case.text: outcome_of(case, HONEST[name]) for case in cases}
    accepted = ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
    assert {text: x.finding or x.reason for text, x in outcomes.items() if x.status not in accepted} == {}
    assert sum(x.status == "PASS" for x in outcomes.values()) > len(cases) / 2


@pytest.mark.parametrize("name", HONEST)
def test_what_was_worked_out_by_hand_and_what_is_illegal_is_so_for_everybody(name):
    outcomes = {case.text: outcome_of(case, HONEST[name]) for case in fixed_cases("quantize", Space())}
    assert {text: x.finding for text, x in outcomes.items() if x.status != "PASS"} == {}


def undeclared(namespace: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**vars(namespace) | {"declares": lambda function: {}})


@pytest.mark.parametrize("case", [CURRENT, replace(BLOCK, variant=1), DELAYED], ids=lambda case: case.scaling)
def test_reciprocals_that_are_not_declared_are_found(case):
    found = [
        outcome_of(replace(case, seed=seed, values="wide"), undeclared(quantizers.Multiplies)) for seed in range(8)
    ]
    assert "FAIL" in {x.status for x in found}
    assert {outcome_of(replace(case, seed=seed, values="wide"), quantizers.Multiplies).status for seed in range(8)} == {
        "PASS"
    }


# ---- quantisers that are wrong in one place

Change = Callable[
    [Scaled, Tensor, Any], Scaled
]  # a group, what was quantised in the form's own orientation, and the scheme


def changed(change: Change, **declared: Any) -> SimpleNamespace:
    """The reference with every group changed."""

    def form(whole):
        sizes = [(group.codes.T if whole.columnwise else group.codes).shape[0] for group in whole.groups]
        rows = whole.source_MN.detach()[: sum(sizes)].float().split(sizes)
        own = [part.T if whole.columnwise else part for part in rows]
        return replace(
            whole,
            groups=tuple(change(group, part, whole.scheme) for group, part in zip(whole.groups, own, strict=True)),
        )

    def quantize(x, recipe, **settings):
        out = moe_ref.quantize(x, recipe, **settings)
        q = out.quantized
        return out._replace(
            quantized=replace(q, rowwise=q.rowwise and form(q.rowwise), columnwise=q.columnwise and form(q.columnwise))
        )

    return reference(quantize=quantize, declares=lambda function: declared)


def reference(**others: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(moe_ref, name) for name in moe_ref.__all__} | others)


def multiplied(group: Scaled, own: Tensor, scheme: Any) -> Tensor:
    """x over its scale, where that is a power of two."""
    scale = decode(group.scale, E8M0) if scheme.recipe.scaling == "mxfp8" else group.scale
    return own / spread(scale, (1, scheme.block[1]) if scheme.recipe.scaling == "mxfp8" else scheme.block, own)


def exponent_rounded_down(group, own, scheme):
    lower = torch.where(
        torch.frexp(group.amax / scheme.format.max)[0] == 0.5, group.scale, group.scale.clamp(min=1) - 1
    )
    scaled = own * spread(decode(254 - lower, E8M0), (1, scheme.block[1]), own)
    return group._replace(scale=lower, codes=encode(scaled, scheme.format))


def exponent_rounded_up_from_nothing(group, own, scheme):
    """2^⌊log₂⌋ + 1, which is one too many where amax is FMAX times a power of two."""
    exact = (torch.frexp(group.amax / scheme.format.max)[0] == 0.5) & (group.amax > 0)
    higher = group.scale + exact.to(torch.uint8)
    scaled = own * spread(decode(254 - higher, E8M0), (1, scheme.block[1]), own)
    return group._replace(scale=higher, codes=encode(scaled, scheme.format))


def truncated(group, own, scheme):
    over = decode(group.codes, scheme.format, dtype=torch.float64).abs() > multiplied(group, own, scheme).double().abs()
    return group._replace(codes=group.codes - (over & (group.codes & 0x7F > 0)).to(torch.uint8))


def half_goes_up(group, own, scheme):
    v, table = (
        multiplied(group, own, scheme).double().abs(),
        decode(torch.arange(128, dtype=torch.uint8), scheme.format, dtype=torch.float64),
    )
    body = (group.codes & 0x7F).long()
    tie = (body < scheme.format.max_code) & (v == (table[body] + table[(body + 1).clamp(max=127)]) / 2)
    return group._replace(codes=group.codes + tie.to(torch.uint8))


def nan_beyond_the_largest(group, own, scheme):
    return group._replace(
        codes=torch.where(multiplied(group, own, scheme).abs() > scheme.format.max, 0x7F, group.codes)
    )


def minus_zero_is_zero(group, own, scheme):
    return group._replace(codes=torch.where(group.codes == scheme.format.sign_bit, 0, group.codes))


def subnormals_flushed(group, own, scheme):
    return group._replace(codes=torch.where((group.codes & 0x7F) < 8, group.codes & 0x80, group.codes))


def the_next_blocks_scale(group, own, scheme):
    return group._replace(scale=group.scale.roll(1, 1))


def scale_in_half(group, own, scheme):
    return group._replace(scale=group.scale.bfloat16().float())


def codes_for_other_scales(group, own, scheme):
    """Scales within what a reciprocal may be off, and codes one off where no midpoint is near."""
    return group._replace(codes=torch.where((group.codes & 7) == 3, group.codes + 1, group.codes))


def amax_not_a_number(group, own, scheme):
    return group._replace(amax=torch.where(own.isnan().any(), torch.nan, group.amax))


CHANGED = [
    (exponent_rounded_down, MXFP8, "scales"),
    (exponent_rounded_up_from_nothing, replace(MXFP8, values="midpoints"), "scales"),
    (truncated, BLOCK, "codes"),
    (truncated, MXFP8, "codes"),
    (half_goes_up, replace(BLOCK, values="midpoints"), "codes"),
    (nan_beyond_the_largest, replace(DELAYED, values="rows"), "codes"),
    (minus_zero_is_zero, replace(MXFP8, values="zeros"), "codes"),
    (subnormals_flushed, replace(MXFP8, values="midpoints"), "codes"),
    (the_next_blocks_scale, BLOCK, "scales"),
    (scale_in_half, CURRENT, "scales"),
    (amax_not_a_number, replace(CURRENT, values="special"), "amax"),
]


@pytest.mark.parametrize(
    ("change", "case", "output"), CHANGED, ids=lambda x: getattr(x, "__name__", getattr(x, "scaling", x))
)
def test_a_group_that_is_wrong_in_one_way_is_found_there(change, case, output):
    found = {
        (x.finding or {}).get("output")
        for x in (outcome_of(replace(case, seed=seed), changed(change)) for seed in range(6))
    }
    assert any(name and name.split(".")[-1] == output for name in found)
    assert {
        outcome_of(replace(case, seed=seed), changed(lambda group, own, scheme: group)).status for seed in range(6)
    } == {"PASS"}


@pytest.mark.parametrize("change", [scale_in_half, codes_for_other_scales])
def test_a_declared_reciprocal_excuses_no_more_than_its_roundings(change):
    assert outcome_of(CURRENT, changed(change, scale_arithmetic="reciprocal")).status == "FAIL"


def reads_padding(x, recipe, *, splits, **settings):
    more = torch.cat([splits[:-1], (len(x) - splits[:-1].sum())[None]])
    return moe_ref.quantize(x, recipe, splits=more, **settings)


def forgets_the_noise(x, recipe, *, noise, **settings):
    return moe_ref.quantize(x, recipe, noise=torch.full_like(noise, 0.5), **settings)


def swaps_the_noise(x, recipe, *, noise, **settings):
    return moe_ref.quantize(x, recipe, noise=noise.flip(0), **settings)


def forgets_earlier_amax(x, recipe, *, state, **settings):
    return moe_ref.quantize(
        x,
        recipe,
        state=QuantizerState(torch.zeros_like(state.amax_history[:, :1]).expand_as(state.amax_history), state.scale),
        **settings,
    )


def turns_the_codes(x, recipe, **settings):
    """The columnwise form made from the rowwise one."""
    first = moe_ref.dequantize(moe_ref.quantize(x, recipe, **settings | {"columnwise": False}).quantized)
    second = moe_ref.quantize(first, recipe, **settings).quantized
    whole = moe_ref.quantize(x, recipe, **settings)
    return whole._replace(quantized=replace(whole.quantized, columnwise=second.columnwise))


def stops_gradients(x, recipe, **settings):
    most = x.detach().abs().amax()
    return moe_ref.quantize(torch.where(x.abs() < most, x, x.detach()), recipe, **settings)


def clamps_its_input(x, recipe, **settings):
    out = moe_ref.quantize(x, recipe, **settings)
    x.detach().clamp_(-1, 1)
    return out


def unswizzled(q, *, columnwise=False, layout="compact"):
    if layout == "compact":
        return moe_ref.scales(q, columnwise=columnwise)
    return tuple(part.flatten().roll(1) for part in moe_ref.scales(q, columnwise=columnwise, layout="gemm"))


WHOLE = [
    ({"quantize": reads_padding}, replace(CURRENT, tail=2, seed=0), "amax"),
    ({"quantize": forgets_the_noise}, NVFP4, "codes"),
    ({"quantize": swaps_the_noise}, NVFP4, "codes"),
    ({"quantize": forgets_earlier_amax}, replace(DELAYED, steps="quantize+quantize+quantize"), "state.amax_history"),
    (
        {"quantize": turns_the_codes},
        replace(BLOCK, direction="both", values="wide", tokens=140, experts=0, counts=()),
        "amax.columnwise",
    ),
    ({"quantize": stops_gradients}, replace(CURRENT, grads="x"), "d_x"),
    ({"quantize": clamps_its_input}, CURRENT, "x"),
    ({"scales": unswizzled}, replace(MXFP8, gemm=True), "scales.gemm"),
    ({"update_scales": lambda state, recipe, **settings: state}, DELAYED, "1.scales"),
    ({"dequantize": lambda q, **how: moe_ref.dequantize(q, **how) * 2}, CURRENT, "values"),
]


@pytest.mark.parametrize(("functions", "case", "output"), WHOLE, ids=lambda x: x if isinstance(x, str) else "")
def test_a_function_that_is_wrong_in_one_way_is_found_there(functions, case, output):
    assert outcome_of(case, moe_ref).status == "PASS"
    assert (outcome_of(case, reference(**functions)).finding or {}).get("output") == output


def test_what_pads_the_scales_of_a_matrix_product_may_be_anything():
    def padded_with(number: int):
        def scales(q, *, columnwise=False, layout="compact"):
            out = moe_ref.scales(q, columnwise=columnwise, layout=layout)
            return out if layout == "compact" else tuple(torch.where(part == 0, number, part) for part in out)

        return scales

    case = replace(BLOCK, gemm=True)
    assert outcome_of(case, reference(scales=padded_with(77))).status == "PASS"
    without = reference(scales=lambda q, *, columnwise=False: moe_ref.scales(q, columnwise=columnwise))
    assert outcome_of(case, without).finding["output"] == "scales.gemm"
    assert (
        outcome_of(case, SimpleNamespace(**vars(without), declares=lambda function: {"omits": ("scales.gemm",)})).status
        == "PASS"
    )


# ---- what is asked


def test_support_is_asked_with_the_first_tensor_and_its_settings():
    asked: list[dict[str, Any]] = []
    outcome = outcome_of(DELAYED, reference(supports=lambda function, **arguments: asked.append(arguments) or "no"))
    assert outcome.status == "DECLARED_UNSUPPORTED"
    assert set(asked[0]) == {"x", "recipe", "splits"}
    assert asked[0]["x"].is_meta


class Recorded(Implementation):
    """The reference, and the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__(moe_ref)
        self.called: set[str] = set()

    def call(self, function: str, *arguments: Any, **settings: Any) -> Any:
        self.called.add(function)
        return super().call(function, *arguments, **settings)


@pytest.mark.parametrize("case", [replace(BLOCK, direction="both", gemm=True), DELAYED], ids=["block", "delayed"])
def test_what_may_wait_for_the_device_is_read_when_the_calls_are_over(case):
    problem, during, after = CONTRACTS["quantize"].legal(case), Recorded(), Recorded()
    outputs = problem.script(during, problem.required | problem.settings)
    problem.read(after, outputs)
    assert during.called <= {"new_quantizer_state", "quantize", "dequantize", "update_scales"}
    assert after.called == {"amax", "scales", "codes"}


@pytest.mark.parametrize("name", CONTRACTS["quantize"].companions)
def test_without_the_functions_that_read_it_nothing_is_judged(name):
    parts = vars(reference())
    del parts[name]
    assert outcome_of(CURRENT, SimpleNamespace(**parts)).status == "NOT_OFFERED"


# ---- values


@pytest.mark.parametrize("scaling", ["block", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", VALUES)
def test_values_are_what_their_name_says(values, dtype, scaling):
    unit, top = (16, 6.0) if scaling == "nvfp4" else (1, 448.0)
    size = {"tokens": 64 // unit, "hidden": 160 // unit}
    x = x_of(QuantizeCase(function="quantize", scaling=scaling, variant=1, **size, dtype=dtype, values=values, seed=3))
    kind, wide = torch.finfo(DTYPES[dtype]), x.double().abs()
    mantissa = torch.frexp(wide)[0]
    says = {
        "dyadic": wide.max() <= 2,
        "rows": wide.amax(1).max() > 2**11 and wide.amax(1).min() < 2**-10,
        "wide": wide.max() > 2**11 and 0 < wide[wide > 0].min() < 2**-11,
        "bounds": all(
            bool((mantissa == top / 2.0 ** math.frexp(top)[1] + step * kind.eps / 2).any()) for step in (-1, 0, 1)
        ),
        "midpoints": bool((wide == wide.max()).any()) and torch.frexp(wide.max() / top)[0] == 0.5,
        "tiny": bool((wide[wide > 0] < kind.smallest_normal * 4).all())
        and bool(((wide > 0) & (wide < kind.smallest_normal)).any()),
        "huge": x.isfinite().all() and wide.max() > kind.max * 0.9,
        "zeros": bool((wide == 0).any()) and bool(((x == 0) & x.signbit()).any()) and bool((wide > 0).any()),
        "special": bool(x.isnan().any())
        and bool((x == torch.inf).any())
        and bool((x == -torch.inf).any())
        and 0 < int(x.isfinite().all(1).sum()) < len(x),
    }
    assert says[values]


def test_midpoints_are_halfway_between_two_codes_of_the_scale_that_is_taken():
    for scaling in ("current", "block", "mxfp8"):
        case = QuantizeCase(
            function="quantize",
            scaling=scaling,
            tokens=2,
            hidden=2 if scaling == "mxfp8" else 32,
            values="midpoints",
            seed=2,
        )
        x = x_of(case)
        q = moe_ref.quantize(x, recipe_of(case)).quantized
        v = multiplied(q.rowwise.groups[0], x, q.rowwise.scheme).double().abs()
        table = decode(torch.arange(127, dtype=torch.uint8), E4M3, dtype=torch.float64)
        middle = (table[1:] + table[:-1]) / 2
        assert bool((torch.isin(v, middle) | (v == 448)).all()) and len(v.unique()) > 5


def test_rows_behind_the_last_group_hold_infinities_and_nan():
    x = x_of(replace(CURRENT, tail=3))
    assert x[9:].isinf().all(1).sum() == 2 and x[9:].isnan().all(1).sum() == 1
    assert x[:9].isfinite().all()


def test_noise_lies_inside_the_unit_interval_on_odd_multiples():
    noise = noise_of(NVFP4).double()
    assert 0 < noise.min() < 0.01 and 0.99 < noise.max() < 1
    assert bool((noise * 2**24 % 2 == 1).all())


# ---- noise


def rounded_at_random(noise_for: Callable[[int], Tensor], repeats: int = LEAST_REPEATS) -> Tensor:
    """[repeats, N] what one row becomes, in units of its scale."""
    recipe, x = Recipe("nvfp4"), row_of_sixths()
    draws = [moe_ref.quantize(x, recipe, role="grad_output", noise=noise_for(i)).quantized for i in range(repeats)]
    return torch.stack([moe_ref.dequantize(q)[0] for q in draws]).double()


def row_of_sixths() -> Tensor:
    """[16,640] with amax 6 in every block, so that the scale is 1; the other rows are zero."""
    x = torch.zeros(16, 640)
    x[0] = torch.arange(640) % 16 * 0.37
    x[0, ::16] = 6
    return x


def expected_of_sixths() -> Stochastic:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    value = row_of_sixths()[0].double()
    low = torch.searchsorted(grid, value, right=True) - 1
    exact = grid[low] == value
    return Stochastic(value, grid[low], torch.where(exact, grid[low], grid[(low + 1).clamp(max=7)]))


def test_stochastic_rounding_is_right_on_average_and_rounding_to_nearest_is_not():
    source = torch.Generator().manual_seed(0)
    assert (
        improbable(expected_of_sixths(), rounded_at_random(lambda i: torch.rand(2, 16, 640, generator=source))) is None
    )
    assert improbable(expected_of_sixths(), rounded_at_random(lambda i: torch.full((2, 16, 640), 0.5)))
    shared = [torch.rand(1, generator=source) for _ in range(LEAST_REPEATS)]
    assert improbable(expected_of_sixths(), rounded_at_random(lambda i: shared[i].expand(2, 16, 640)))


# ---- noise that nobody gives

OWN = random_cases(scope_of("quantize", Space()))
NO_NOISE = Space(without={"quantize": frozenset({"noise"})})


def drawing(noise_for: Callable[[tuple[int, ...]], Tensor | None]) -> SimpleNamespace:
    """A quantiser without an argument for noise; of the shape of its own."""

    def quantize(x, recipe, *, role="input", splits=None, rowwise=True, columnwise=False, state=None):
        random = bool(recipe.stochastic_rounding) and role == "grad_output"
        noise = noise_for((2, *x.shape)) if random else None
        return moe_ref.quantize(
            x, recipe, role=role, splits=splits, rowwise=rowwise, columnwise=columnwise, state=state, noise=noise
        )

    return reference(quantize=quantize)


def always_alike(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def test_a_quantiser_without_an_argument_for_noise_is_asked_for_its_own():
    assert random_cases(scope_of("quantize", NO_NOISE)) == OWN
    assert [case.direction for case in OWN] == ["rowwise", "columnwise"]
    assert [(case.repeats * case.steps.count("quantize")) for case in OWN] == [LEAST_REPEATS] * 2
    assert not any(case.repeats for case in covering_cases("quantize", NO_NOISE).cases)
    for case in OWN:
        assert outcome_of(case, drawing(torch.rand)).status == "PASS"


@pytest.mark.parametrize("name", HONEST)
def test_honest_noise_is_accepted(name):
    for case in OWN:
        for seed in range(3):
            assert outcome_of(replace(case, seed=seed), HONEST[name]).status == "PASS"


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.direction)
@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (lambda shape: torch.full(shape, 0.5), "the same random numbers"),  # to nearest
        (lambda shape: torch.full(shape, 1 - 2.0**-24), "the same random numbers"),  # truncation
        (lambda shape: torch.rand(shape).square(), "too high"),
        (lambda shape: torch.rand(shape) * 0.9, "too high"),
        (lambda shape: torch.rand(shape) * 0.9 + 0.1, "too low"),
        (
            lambda shape: torch.rand(shape[0], 1, shape[2]).expand(shape),
            "variance over repeats|mean of all",
        ),  # one number for a whole column
        (
            lambda shape: torch.rand(shape[0], shape[1], 1).expand(shape),
            "variance over repeats|mean of all",
        ),  # one number for a whole row
        (always_alike, "the same random numbers as in another call"),
    ],
    ids=["nearest", "truncated", "squares", "below 0.9", "above 0.1", "columns", "rows", "repeated"],
)
def test_noise_that_is_not_random_enough_is_found(case, noise, says):
    finding = outcome_of(case, drawing(noise)).finding
    assert (finding["output"], finding["check"]) == ("codes" + SUFFIX[case.direction], "random")
    assert re.search(says, finding["message"])


SUFFIX = {"rowwise": "", "columnwise": ".columnwise"}


def test_codes_that_are_no_neighbours_and_signs_are_found():
    def far(group, own, scheme):
        return group._replace(codes=torch.where(group.codes == 3, 5, group.codes))

    def positive_zero(group, own, scheme):
        return group._replace(codes=torch.where(group.codes == scheme.format.sign_bit, 0, group.codes))

    for change in (far, positive_zero):
        finding = outcome_of(OWN[0], changed(change)).finding
        assert (finding["output"], finding["check"]) == ("codes", "random")
        assert "there is nothing else" in finding["message"]


def test_repeats_are_for_gradients_that_are_rounded_stochastically():
    for wrong in ({"role": "input"}, {"variant": 1}, {"experts": 1}, {"grads": "x"}):
        with pytest.raises(ValueError, match=r"repeats is 128"):
            replace(OWN[0], **wrong)
    with pytest.raises(ValueError, match="only delayed scaling"):
        replace(OWN[0], repeats=0)
