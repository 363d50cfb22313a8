"""Codes and scales of blocks of 128 of an activation, on NVIDIA's Hopper, in Gluon.

As `quantization._hopper`, but a tile is computed from its gates and its values: no activation is
stored before it is encoded. The bits are those of `_activations`, and then of `_quantize`.
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
    """128 columns of 128 rows of both halves on their way."""
    mbarrier.expect(ready, 2 * SIZE * SIZE * 2, pred=wanted)
    for half in gl.static_range(2):
        load_tile(h_desc, [half, first, column], ready, buffer.index(half), pred=wanted)


@constexpr_function
def assembly_of_eight(half: bool, scaled: bool, clamped: bool, round_first: bool) -> str:
    """u σ(αu) · (v + offset) · p of eight numbers.

    The instructions are those of `_activations`, or fewer that differ in no bit: σ's denominator is
    1 to 2, so that its reciprocal is that of the quotient; and an exponential is seldom subnormal.
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


@constexpr_function
def gradient_of_eight(half: bool, scaled: bool, clamped: bool, round_first: bool) -> str:
    """As `assembly_of_eight`: du, dv, and for each of the eight the sum of their d_out · act."""
    kind = "f16" if half else "bf16"
    eight, four = range(8), range(4)
    prob, offset, clamp, alpha = ([f"${at + i}" for i in eight] for at in (28, 36, 44, 52))
    lines = [f".reg .f32 {name}<8>;" for name in "uvderstx"] + [".reg .pred negative;"]

    def unpack(pair: str, low: str, high: str) -> str:
        if half:
            return f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {pair}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h; }}"
        words = f"shl.b32 t, {pair}, 16; mov.b32 {low}, t; and.b32 t, {pair}, 0xffff0000; mov.b32 {high}, t;"
        return f"{{ .reg .b32 t; {words} }}"

    def rounded(name: str) -> list[str]:
        pairs = [(f"{name}{2 * i}", f"{name}{2 * i + 1}") for i in four]
        return [
            f"{{ .reg .b32 w; cvt.rn.{kind}x2.f32 w, {high}, {low}; {unpack('w', low, high)} }}" for low, high in pairs
        ]

    lines += [unpack(f"${16 + i}", f"u{2 * i}", f"u{2 * i + 1}") for i in four]
    lines += [unpack(f"${20 + i}", f"v{2 * i}", f"v{2 * i + 1}") for i in four]
    lines += [unpack(f"${24 + i}", f"d{2 * i}", f"d{2 * i + 1}") for i in four]
    if clamped:
        lines += [".reg .pred freeu<8>, freev<8>;"]
        for i in eight:
            lines.append(f"setp.le.f32 freeu{i}, u{i}, {clamp[i]}; min.NaN.f32 u{i}, u{i}, {clamp[i]};")
            lines.append(f"abs.f32 r{i}, v{i}; setp.le.f32 freev{i}, r{i}, {clamp[i]};")
            lines.append(f"neg.f32 r{i}, {clamp[i]}; min.NaN.f32 v{i}, v{i}, {clamp[i]}; max.NaN.f32 v{i}, v{i}, r{i};")
    lines += [f"mul.rn.f32 x{i}, u{i}, {alpha[i]};" if scaled else f"mov.f32 x{i}, u{i};" for i in eight]
    lines += [f"abs.f32 r{i}, x{i}; mul.rn.f32 r{i}, r{i}, 0fBFB8AA3B;" for i in eight]  # -1 / ln 2
    lines += [f"ex2.approx.f32 e{i}, r{i};" for i in eight]
    for i in eight:
        # s in r, the slope in t, the value in u, v + offset in v
        lines.append(f"add.rn.f32 r{i}, e{i}, 0f3F800000; mul.rn.f32 t{i}, r{i}, r{i};")
        lines.append(f"rcp.approx.ftz.f32 t{i}, t{i}; mul.rn.f32 t{i}, t{i}, e{i}; mul.rn.f32 t{i}, u{i}, t{i};")
        lines.append(f"rcp.approx.ftz.f32 r{i}, r{i};")
        lines.append(f"setp.lt.f32 negative, x{i}, 0f00000000; @negative mul.rn.f32 r{i}, r{i}, e{i};")
        lines.append(f"fma.rn.f32 t{i}, t{i}, {alpha[i]}, r{i};" if scaled else f"add.rn.f32 t{i}, t{i}, r{i};")
        lines.append(f"mul.rn.f32 u{i}, u{i}, r{i}; add.rn.f32 v{i}, v{i}, {offset[i]}; mul.rn.f32 x{i}, u{i}, v{i};")
        lines.append(f"mul.rn.f32 s{i}, d{i}, {prob[i]};")
    if round_first:
        lines += rounded("x") + rounded("s")
    lines.append("mul.rn.f32 $8, d0, x0;")
    lines += [f"fma.rn.f32 $8, d{i}, x{i}, $8;" for i in range(1, 8)] + [f"mov.f32 ${i}, $8;" for i in range(9, 16)]
    for i in eight:
        lines.append(f"mul.rn.f32 t{i}, s{i}, t{i}; mul.rn.f32 t{i}, t{i}, v{i}; mul.rn.f32 u{i}, s{i}, u{i};")
        if clamped:
            lines.append(f"selp.f32 t{i}, t{i}, 0f00000000, freeu{i}; selp.f32 u{i}, u{i}, 0f00000000, freev{i};")
    lines += [f"cvt.rn.{kind}x2.f32 ${i}, t{2 * i + 1}, t{2 * i};" for i in four]
    lines += [f"cvt.rn.{kind}x2.f32 ${4 + i}, u{2 * i + 1}, u{2 * i};" for i in four]
    return "{ " + "\n".join(lines) + " }"


@gluon.jit
def clear_below(buffer, known, TILES: gl.constexpr):
    """Rows from `known` on become 0, and so does their activation."""
    for half in gl.static_range(TILES):
        tile = buffer.index(half).reshape([SIZE, SIZE])
        inside = gl.arange(0, SIZE, ROW) < known
        tile.store(gl.where(inside[:, None], tile.load(TILE), 0.0))


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
        *("stride_probs", "offset", "clamp", "alpha", "stride_splits", "num_rows", "num_groups", "parts", "steps"),
        *("epsilon", "infinity"),
    ]
)
def quantize_activated_tiles_kernel(
    h_desc, probs_ptr, stride_probs, offset, clamp, alpha, splits_ptr, stride_splits,
    # results, as for `quantize_blocks_kernel`
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    # sizes; `parts` programs per tile of rows, `steps` each
    num_rows, num_columns, num_groups, parts, steps,
    # numbers, as bits of a float64
    epsilon, infinity,
    SCALED: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr, FORMAT: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, WHOLE: gl.constexpr, BLOCK_G: gl.constexpr,
):  # fmt: skip
    """Blocks of 1 × 128, 128 × 1, or both of one load. Gates and values of the next tile are on
    their way while this one's are in registers.
    """
    buffer = gl.allocate_shared_memory(h_desc.dtype, [2, 1, SIZE, SIZE], h_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(ready, count=1)
    fence_async_shared()
    tile, tiles = gl.program_id(0) // parts, gl.num_programs(0) // parts
    first, read, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G)
    begin = gl.program_id(0) % parts * (steps * SIZE)
    end = written if WHOLE else read
    count = gl.where(first < end, gl.minimum(gl.cdiv(num_columns - begin, SIZE), steps), 0)
    rows = gl.maximum(gl.minimum(written - first, SIZE), 0).to(gl.int32)
    known = gl.maximum(gl.minimum(read - first, SIZE), 0).to(gl.int32)
    load_gates_and_values(h_desc, ready, buffer, first.to(gl.int32), begin, count > 0)
    limits = (number(epsilon, gl.float32), number(infinity, gl.float32))
    numbers = (number(offset, gl.float32), number(clamp, gl.float32), number(alpha, gl.float32))
    m = gl.arange(0, SIZE, ROW)
    prob = gl.full([SIZE], 1.0, gl.float32, ROW)
    if probs_ptr is not None:
        prob = gl.load(probs_ptr + (first + m) * stride_probs, mask=m < known, other=0.0).to(gl.float32)
    for i in range(count):
        column = begin + i * SIZE
        mbarrier.wait(ready, i & 1)
        if known < SIZE:  # few tiles; below are the next group's rows
            clear_below(buffer, known, 2)
            fence_async_shared()
            barrier()
        u = buffer.index(0).reshape([SIZE, SIZE]).load(TILE)
        v = buffer.index(1).reshape([SIZE, SIZE]).load(TILE)
        barrier()  # all have read them
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


@gluon.jit
def either(a, b):
    return a


@gluon.jit
def differentiate(u, v, d, prob, numbers, SCALED: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr):
    """du, dv and each row's sum of d · act, as in `_activations`."""
    du, dv, part = gl.inline_asm_elementwise(
        gradient_of_eight(u.dtype == gl.float16, SCALED, CLAMPED, ROUND_FIRST),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r" + ",=&f" * 8 + ",r" * 12 + ",f" * 32,
        [u, v, d, prob[:, None], numbers[0], numbers[1], numbers[2]],
        dtype=(u.dtype, u.dtype, gl.float32), is_pure=True, pack=8,
    )  # fmt: skip
    part = gl.reduce(part.reshape([SIZE, SIZE // 8, 8]), 2, either)
    return du, dv, gl.convert_layout(gl.sum(part, 1), ROW)


@gluon.jit
def load_for_gradient(d_desc, h_desc, ready, buffer, first, column, wanted):
    """128 columns of 128 rows of gates and of d_out on their way."""
    mbarrier.expect(ready.index(0), 2 * SIZE * SIZE * 2, pred=wanted)
    load_tile(h_desc, [0, first, column], ready.index(0), buffer.index(0), pred=wanted)
    load_tile(d_desc, [0, first, column], ready.index(0), buffer.index(1), pred=wanted)


@gluon.jit
def load_values(h_desc, ready, buffer, first, column, wanted):
    """And of values."""
    mbarrier.expect(ready.index(1), SIZE * SIZE * 2, pred=wanted)
    load_tile(h_desc, [1, first, column], ready.index(1), buffer.index(2), pred=wanted)


@gluon.jit(
    do_not_specialize=[
        *("stride_probs", "offset", "clamp", "alpha", "stride_splits", "num_rows", "num_groups", "parts", "steps"),
        *("epsilon", "infinity"),
    ]
)
def quantize_gradient_tiles_kernel(
    d_desc, h_desc, probs_ptr, stride_probs, offset, clamp, alpha, splits_ptr, stride_splits,
    # results, as for `quantize_blocks_kernel`; sums of d_probs, [columns / 128, rows], or None
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n, part_ptr,
    # sizes, of the gates alone; `parts` programs per tile of rows, `steps` each
    num_rows, width, num_groups, parts, steps,
    # numbers, as bits of a float64
    epsilon, infinity,
    SCALED: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr, FORMAT: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, WHOLE: gl.constexpr, BLOCK_G: gl.constexpr,
):  # fmt: skip
    """The same of the gradient of gates and values, of whole tiles each."""
    buffer = gl.allocate_shared_memory(h_desc.dtype, [3, 1, SIZE, SIZE], h_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    tile, tiles = gl.program_id(0) // parts, gl.num_programs(0) // parts
    first, read, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G)
    begin = gl.program_id(0) % parts * (steps * SIZE)
    end = written if WHOLE else read
    count = gl.where(first < end, gl.minimum(gl.cdiv(width - begin, SIZE), steps), 0)
    rows = gl.maximum(gl.minimum(written - first, SIZE), 0).to(gl.int32)
    known = gl.maximum(gl.minimum(read - first, SIZE), 0).to(gl.int32)
    load_for_gradient(d_desc, h_desc, ready, buffer, first.to(gl.int32), begin, count > 0)
    load_values(h_desc, ready, buffer, first.to(gl.int32), begin, count > 0)
    limits = (number(epsilon, gl.float32), number(infinity, gl.float32))
    numbers = (number(offset, gl.float32), number(clamp, gl.float32), number(alpha, gl.float32))
    m = gl.arange(0, SIZE, ROW)
    for i in range(count):
        column = begin + i * SIZE
        prob = gl.full([SIZE], 1.0, gl.float32, ROW)
        if probs_ptr is not None:
            prob = gl.load(probs_ptr + (first + m) * stride_probs, mask=m < known, other=0.0).to(gl.float32)
        for k in gl.static_range(2):
            mbarrier.wait(ready.index(k), i & 1)
        if known < SIZE:  # few tiles; below are the next group's rows
            clear_below(buffer, known, 3)
            fence_async_shared()
            barrier()
        gates = buffer.index(0).reshape([SIZE, SIZE]).load(TILE)
        d_out = buffer.index(1).reshape([SIZE, SIZE]).load(TILE)
        values = buffer.index(2).reshape([SIZE, SIZE])
        x, of_values, part = differentiate(gates, values.load(TILE), d_out, prob, numbers, SCALED, CLAMPED, ROUND_FIRST)
        if part_ptr is not None:
            gl.store(part_ptr + (column // SIZE).to(gl.int64) * num_rows + first + m, part, mask=m < known)
        values.store(of_values)  # each thread in its own place
        fence_async_shared()
        barrier()  # all have read gates and d_out
        more = i + 1 < count
        load_for_gradient(d_desc, h_desc, ready, buffer, first.to(gl.int32), column + SIZE, more)
        for half in gl.static_range(2):
            if half == 1:
                x = values.load(TILE)
                barrier()
                load_values(h_desc, ready, buffer, first.to(gl.int32), column + SIZE, more)
            place = column + half * width
            y = x.to(gl.float32)
            if row_form.scale_ptr is not None:
                quantize_tile(
                    y, row_form, stride_row_m, stride_row_n, tile, tiles, first, place, rows, SIZE, 2 * width,
                    limits, FORMAT, POWER_OF_TWO, 1, SIZE,
                )  # fmt: skip
            if column_form.scale_ptr is not None:
                quantize_tile(
                    y, column_form, stride_column_m, stride_column_n, tile, tiles, first, place, rows, SIZE,
                    2 * width, limits, FORMAT, POWER_OF_TWO, SIZE, 1,
                )  # fmt: skip
