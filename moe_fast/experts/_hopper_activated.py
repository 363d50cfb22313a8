"""Codes and scales of blocks of 128 of a gated activation, on NVIDIA's Hopper, in Gluon.

As `quantization._hopper`, but a tile is computed in registers from its gates u and its values v,

    a = u σ(αu) · (v + offset) · p

so that no activation is stored before it is encoded. One inline text of instructions computes eight
numbers at a time, and keeps them packed in 16 bits before and after. So a thread's 64 numbers,
their codes and their addresses fit in 128 registers, and two programs share a multiprocessor. The
bits are those of `_activations`, and then of `_quantize`.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_fast.launch._hopper import barrier, load_tile
from moe_fast.launch._rounding import number
from moe_fast.quantization._hopper import ROW, SIZE, TILE, place_of_tile, quantize_tile


@gluon.jit
def load_gates_and_values(h_desc, ready, buffer, first, column, wanted):
    """Begin to load 128 columns of 128 rows of both halves, if `wanted`."""
    mbarrier.expect(ready, 2 * SIZE * SIZE * 2, pred=wanted)
    for half in gl.static_range(2):
        load_tile(h_desc, [half, first, column], ready, buffer.index(half), pred=wanted)


@constexpr_function
def assembly_of_eight(half: bool, scaled: bool, clamped: bool, round_first: bool) -> str:
    """The instructions for u σ(αu) · (v + offset) · p of eight numbers, with e = exp(-|x|):

        σ(x) = (e if x < 0, or 1) / (1+e)

    They are the instructions of `_activations`, or fewer that differ in no bit. As 1+e lies between
    1 and 2, its reciprocal is that of the quotient, without a case for large divisors. e is
    computed as if it were no subnormal number, and once more if one of the eight is.
    """
    kind = "f16" if half else "bf16"
    eight, four = range(8), range(4)
    prob, offset, clamp, alpha = ([f"${at + i}" for i in eight] for at in (12, 20, 28, 36))
    lines = [f".reg .f32 {name}<8>;" for name in ("u", "v", "x", "e", "r")] + [".reg .pred negative, low;"]

    def unpack(pair: str, low: str, high: str) -> str:
        if half:
            return f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {pair}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h; }}"
        words = f"shl.b32 t, {pair}, 16; mov.b32 {low}, t; and.b32 t, {pair}, 0xffff0000; mov.b32 {high}, t;"
        return f"{{ .reg .b32 t; {words} }}"

    lines += [unpack(f"${4 + i}", f"u{2 * i}", f"u{2 * i + 1}") for i in four]
    lines += [f"min.NaN.f32 u{i}, u{i}, {clamp[i]};" for i in eight if clamped]
    lines += [f"mul.f32 x{i}, u{i}, {alpha[i]};" if scaled else f"mov.f32 x{i}, u{i};" for i in eight]
    lines += [f"abs.f32 r{i}, x{i}; mul.f32 r{i}, r{i}, 0fBFB8AA3B;" for i in eight]  # -1 / ln 2
    lines.append("setp.lt.f32 low, r0, 0fC2FC0000;")  # -126
    lines += [f"setp.lt.or.f32 low, r{i}, 0fC2FC0000, low;" for i in range(1, 8)]
    lines += [f"ex2.approx.ftz.f32 e{i}, r{i};" for i in eight]
    lines += ["@!low bra known;", *(f"ex2.approx.f32 e{i}, r{i};" for i in eight), "known:"]
    lines += [f"add.f32 r{i}, e{i}, 0f3F800000; rcp.approx.ftz.f32 r{i}, r{i};" for i in eight]
    lines += [f"setp.lt.f32 negative, x{i}, 0f00000000; @negative mul.f32 r{i}, r{i}, e{i};" for i in eight]
    lines += [unpack(f"${8 + i}", f"v{2 * i}", f"v{2 * i + 1}") for i in four]
    if clamped:
        lines += [f"min.NaN.f32 v{i}, v{i}, {clamp[i]}; neg.f32 e{i}, {clamp[i]};" for i in eight]
        lines += [f"max.NaN.f32 v{i}, v{i}, e{i};" for i in eight]
    lines += [f"mul.f32 u{i}, u{i}, r{i}; add.f32 v{i}, v{i}, {offset[i]}; mul.f32 u{i}, u{i}, v{i};" for i in eight]
    for i in four:
        low, high = f"u{2 * i}", f"u{2 * i + 1}"
        if round_first:
            lines += [f"cvt.rn.{kind}x2.f32 ${i}, {high}, {low};", unpack(f"${i}", low, high)]
        lines.append(f"mul.f32 {low}, {low}, {prob[2 * i]}; mul.f32 {high}, {high}, {prob[2 * i + 1]};")
        lines.append(f"cvt.rn.{kind}x2.f32 ${i}, {high}, {low};")
    return "{ " + "\n".join(lines) + " }"


@gluon.jit
def clear_below(buffer, group_rows):
    """Set the gates and values of the rows from `group_rows` on to 0, and so their activation."""
    for half in gl.static_range(2):
        tile = buffer.index(half).reshape([SIZE, SIZE])
        in_group = gl.arange(0, SIZE, ROW) < group_rows
        tile.store(gl.where(in_group[:, None], tile.load(TILE), 0.0))


@gluon.jit
def activate(u, v, prob, numbers, SCALED: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr):
    """f(u) · (v + offset) · p in their dtype, as in `_activations`."""
    return gl.inline_asm_elementwise(
        assembly_of_eight(u.dtype == gl.float16, SCALED, CLAMPED, ROUND_FIRST),
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r" + ",f" * 32,
        [u, v, prob[:, None], numbers[0], numbers[1], numbers[2]], dtype=u.dtype, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("stride_probs", "offset", "clamp", "alpha", "stride_splits"),
        *("num_rows", "num_groups", "column_programs", "steps"),
        *("epsilon", "infinity"),
    ]
)
def quantize_activated_kernel(
    h_desc, probs_ptr, stride_probs, offset, clamp, alpha, splits_ptr, stride_splits,
    # results, as for `quantize_blocks_kernel`
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: gl.int64, infinity: gl.int64,
    SCALED: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr, FORMAT: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, WHOLE: gl.constexpr, BLOCK_G: gl.constexpr,
):  # fmt: skip
    """Blocks of 1 × 128, 128 × 1, or both from one load. A program quantises `steps` tiles side by
    side. The gates and values of the next tile are loaded while those of this tile are in
    registers.
    """
    buffer = gl.allocate_shared_memory(h_desc.dtype, [2, 1, SIZE, SIZE], h_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(ready, count=1)
    fence_async_shared()
    tile, tiles = gl.program_id(0) // column_programs, gl.num_programs(0) // column_programs
    first, read, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G)
    begin = gl.program_id(0) % column_programs * (steps * SIZE)
    end = written if WHOLE else read
    count = gl.where(first < end, gl.minimum(gl.cdiv(num_columns - begin, SIZE), steps), 0)
    rows = gl.maximum(gl.minimum(written - first, SIZE), 0).to(gl.int32)
    group_rows = gl.maximum(gl.minimum(read - first, SIZE), 0).to(gl.int32)
    load_gates_and_values(h_desc, ready, buffer, first.to(gl.int32), begin, count > 0)
    limits = (number(epsilon, gl.float32), number(infinity, gl.float32))
    numbers = (number(offset, gl.float32), number(clamp, gl.float32), number(alpha, gl.float32))
    m = gl.arange(0, SIZE, ROW)
    prob = gl.full([SIZE], 1.0, gl.float32, ROW)
    if probs_ptr is not None:
        prob = gl.load(probs_ptr + (first + m) * stride_probs, mask=m < group_rows, other=0.0).to(gl.float32)
    for i in range(count):
        column = begin + i * SIZE
        mbarrier.wait(ready, i & 1)
        if group_rows < SIZE:  # so in few tiles; the rows below are the next group's
            clear_below(buffer, group_rows)
            fence_async_shared()
            barrier()
        u = buffer.index(0).reshape([SIZE, SIZE]).load(TILE)
        v = buffer.index(1).reshape([SIZE, SIZE]).load(TILE)
        barrier()  # until all threads have read them
        load_gates_and_values(h_desc, ready, buffer, first.to(gl.int32), column + SIZE, i + 1 < count)
        x = activate(u, v, prob, numbers, SCALED, CLAMPED, ROUND_FIRST).to(gl.float32)
        columns = num_columns - column
        if row_form.scale_ptr is not None:
            quantize_tile(
                x, row_form, stride_row_m, stride_row_n, tile, tiles, first, column, rows, columns, num_columns,
                limits, FORMAT, POWER_OF_TWO, 1, SIZE,
            )  # fmt: skip
        if column_form.scale_ptr is not None:
            quantize_tile(
                x, column_form, stride_column_m, stride_column_n, tile, tiles, first, column, rows, columns,
                num_columns, limits, FORMAT, POWER_OF_TWO, SIZE, 1,
            )  # fmt: skip
