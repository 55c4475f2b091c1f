"""The Triton kernels of `TopRho` and `DiversitySelect`: what `export/functions.py` says in standard operators.

Ties go to the lower index: equal rows are given the same arithmetic wherever they stand, so their cosines are equal.

`top_rho` is one launch: every block finds the `count`-th largest norm for itself, then averages its own columns.

`diversity_select` runs the phases `first` to `last` (exclusive): 0 measures the rows, 1 compares them with what is
reserved, and each one after that is a round, which chooses `batch` candidates and compares the rows with them. The
maximum so far is kept in `scratch`, +inf once a token is chosen or no candidate. Each phase is a launch
(`diversity_phase` in `compile.py`), of any number of blocks a group, which all choose alike and compare each its own
rows.

Work and traffic, N tokens of width D, R reserved and K chosen in rounds of b: 2*N*D*(R+K-b) FLOP, and N*D elements
read 2 + R/32 + (K-b)/16 times, mostly from L2. For N=576, D=1024, fp16, 64 + 64, b=16 that is 132 MFLOP and 8.3 MB:
2 us at the rates of an H200-class GPU, were it one kernel on all of it. It is not: six dependent launches, in each a
chain of loads, 32 counts to find a threshold, or both. With `top_rho` an H200 takes 100 us in a CUDA graph
(docs/measurements/gpu-h200.md). Time grows as N * (R + K) once N passes 128 blocks of 32 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rounding leaves the cosine of equal tokens on either side of 1. All above this are equal, so that they tie.
SAME = tl.constexpr(1.0 - 2.0**-18)


@triton.jit
def order_key(value):
    """A uint32 for each fp32 that is ordered as they are; -0 and 0 are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_key(values, n, k, SIGN: tl.constexpr, CHUNK: tl.constexpr):
    """The k-th smallest key of SIGN * values [n], and how many keys are below it: bit by bit, from the highest."""
    key = tl.zeros([], tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    below = tl.zeros([], tl.int32)
    for _ in range(32):
        trial = key | bit
        smaller = tl.zeros([CHUNK], tl.int32)
        for start in range(0, n, CHUNK):
            place = start + tl.arange(0, CHUNK)
            value = tl.load(values + place, mask=place < n, other=0.0)
            smaller += ((place < n) & (order_key(SIGN * value) < trial)).to(tl.int32)
        count = tl.sum(smaller)
        if count < k:
            key = trial
            below = count
        bit = bit >> 1
    return key, below


@triton.jit
def among_smallest(values, place, n, key, ties, seen, SIGN: tl.constexpr):
    """Which of SIGN * values[place] are below `key`, or among the first `ties` that equal it; `seen` came before."""
    value = tl.load(values + place, mask=place < n, other=0.0)
    equal = (place < n) & (order_key(SIGN * value) == key)
    rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
    smaller = (place < n) & (order_key(SIGN * value) < key)
    return smaller | (equal & (rank <= ties)), seen + tl.sum(equal.to(tl.int32))


@triton.jit
def top_rho(
    norms,  # [G,N] fp32
    tokens,  # [G,N,D]
    n,
    width,
    count,
    sink,  # out: [G,1,D]
    outlier,  # out: [G,N] int32: TensorRT plugins take no BOOL
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    part = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    norms += group * n
    tokens += group * n * width
    outlier += group * n
    key, below = kth_key(norms, n, count, -1.0, CHUNK)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, n, ROWS):
        place = start + tl.arange(0, ROWS)
        top, seen = among_smallest(norms, place, n, key, count - below, seen, -1.0)
        if part == 0:
            tl.store(outlier + place, top.to(tl.int32), mask=place < n)
        if tl.sum(top.to(tl.int32)) > 0:
            row = tokens + place.to(tl.int64)[:, None] * width + column[None, :]
            x = tl.load(row, mask=top[:, None] & (column < width)[None, :], other=0.0)
            total += tl.sum(x.to(tl.float32), axis=0)
    mean = tl.math.div_rn(total, count.to(tl.float32))
    tl.store(sink + group * width + column, mean.to(sink.dtype.element_ty), mask=column < width)


@triton.jit
def measure_rows(tokens, row, n, width, scale, inverse, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Store each row's scale, a power of two that brings its largest element to 2**14, and 1 / its scaled length.

    Then no square overflows or vanishes, and scaling rounds nothing in any type. A zero row's is 0 for 1 / length.
    """
    there = (row < n)[:, None]
    start = tokens + row.to(tl.int64)[:, None] * width
    largest = tl.zeros([ROWS, DEPTH], tl.float32)
    for k in range(0, width, DEPTH):
        column = (k + tl.arange(0, DEPTH))[None, :]
        x = tl.load(start + column, mask=there & (column < width), other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    exponent = tl.max(largest, axis=1).to(tl.int32, bitcast=True) >> 23
    factor = (tl.minimum(254 + 14 - exponent, 254) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros([ROWS, DEPTH], tl.float32)
    for k in range(0, width, DEPTH):
        column = (k + tl.arange(0, DEPTH))[None, :]
        x = tl.load(start + column, mask=there & (column < width), other=0.0).to(tl.float32) * factor[:, None]
        squares += x * x
    length = tl.math.sqrt_rn(tl.sum(squares, axis=1))
    tl.store(scale + row, factor, mask=row < n)
    tl.store(inverse + row, tl.where(length > 0.0, tl.math.div_rn(1.0, length), 0.0), mask=row < n)


@triton.jit
def largest_cosine(
    tokens,
    row,
    n,
    width,
    scale,
    inverse,
    members,
    count,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[ROWS] the largest cosine of each row with the `count` rows that `members` names; whether it is one of them.

    Weighted part by part: a tensor core truncates as it adds, which over a long row would pass what `SAME` forgives.
    """
    # A scaled bfloat16 is a float16 exactly, but for what is 2**-32 of the row's largest element.
    kind: tl.constexpr = tl.float32 if tokens.dtype.element_ty == tl.float32 else tl.float16
    factor = tl.load(scale + row, mask=row < n, other=0.0)
    weight = tl.load(inverse + row, mask=row < n, other=0.0)
    start = tokens + row.to(tl.int64)[None, :] * width
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    found = tl.zeros([ROWS], tl.int32)
    for first in range(0, count, MEMBERS):
        place = first + tl.arange(0, MEMBERS)
        valid = place < count
        member = tl.load(members + place, mask=valid, other=0)
        member_factor = tl.load(scale + member, mask=valid, other=0.0)
        member_weight = tl.load(inverse + member, mask=valid, other=0.0)
        cosine = tl.zeros([MEMBERS, ROWS], tl.float32)
        for k in range(0, width, DEPTH):
            depth = k + tl.arange(0, DEPTH)
            inside = depth < width
            a = tl.load(
                tokens + member[:, None] * width + depth[None, :], mask=valid[:, None] & inside[None, :], other=0.0
            )
            b = tl.load(start + depth[:, None], mask=(row < n)[None, :] & inside[:, None], other=0.0)
            a = (a.to(tl.float32) * member_factor[:, None]).to(kind)
            b = (b.to(tl.float32) * factor[None, :]).to(kind)
            cosine += tl.dot(a, b, input_precision="ieee") * member_weight[:, None]
        cosine = tl.where(valid[:, None], tl.minimum(cosine * weight[None, :], SAME), float("-inf"))
        largest = tl.maximum(largest, tl.max(cosine, axis=0))
        itself = valid[:, None] & (member[:, None] == row[None, :])
        found = tl.maximum(found, tl.max(itself.to(tl.int32), axis=0))
    return largest, found > 0


@triton.jit
def diversity_select(
    tokens,  # [G,N,D]
    candidate,  # [G,N] int32: TensorRT plugins take no BOOL
    reserved,  # [G,reserves] int64
    n,
    width,
    reserves,
    count,
    batch,
    first,
    last,
    chosen,  # out: [G,count] int64
    scratch,  # [G,4,N] fp32
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    tokens += group * n * width
    candidate += group * n
    reserved += group * reserves
    chosen += group * count
    scale = scratch + group * 4 * n
    inverse = scale + n
    for phase in range(first, last):
        # What this phase reads other blocks still read, so it is written to the other half.
        before = inverse + n + (phase % 2) * n
        after = inverse + n + ((phase + 1) % 2) * n
        taken = (phase - 2) * batch
        width_of_round = tl.minimum(batch, count - taken)
        is_last = taken + width_of_round == count
        if phase >= 2:
            # Every block of the group writes the same choice to the same place.
            key, below = kth_key(before, n, width_of_round, 1.0, CHUNK)
            ties = width_of_round - below
            seen = tl.zeros([], tl.int32)
            written = tl.where(is_last, 0, taken)
            for start in range(0, n, CHUNK):
                place = start + tl.arange(0, CHUNK)
                fresh, seen = among_smallest(before, place, n, key, ties, seen, 1.0)
                if is_last:
                    # All that was chosen, in ascending order, over what stood there round by round.
                    earlier = tl.load(before + place, mask=place < n, other=0.0) == float("inf")
                    allowed = tl.load(candidate + place, mask=place < n, other=0) != 0
                    fresh = (fresh | earlier) & allowed
                slot = written + tl.cumsum(fresh.to(tl.int32), axis=0) - 1
                tl.store(chosen + slot, place.to(tl.int64), mask=fresh & (slot < count))
                written += tl.sum(fresh.to(tl.int32))
            tl.debug_barrier()
        for block in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
            row = block * ROWS + tl.arange(0, ROWS)
            if phase == 0:
                measure_rows(tokens, row, n, width, scale, inverse, ROWS, DEPTH)
            elif phase == 1:
                closest, _ = largest_cosine(
                    tokens, row, n, width, scale, inverse, reserved, reserves, ROWS, 32, DEPTH
                )
                allowed = tl.load(candidate + row, mask=row < n, other=0) != 0
                tl.store(after + row, tl.where(allowed, closest, float("inf")), mask=row < n)
            elif not is_last:
                closest, itself = largest_cosine(
                    tokens, row, n, width, scale, inverse, chosen + taken, width_of_round, ROWS, 16, DEPTH
                )
                closest = tl.maximum(closest, tl.load(before + row, mask=row < n, other=0.0))
                tl.store(after + row, tl.where(itself, float("inf"), closest), mask=row < n)
        tl.debug_barrier()
