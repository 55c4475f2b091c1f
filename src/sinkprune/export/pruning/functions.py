"""The custom operations of domain `sinkprune`: `TopRho` and `DiversitySelect`, as ONNX function bodies.

Each is one node in a sanitizer graph. Its body has standard operators, so that a runtime without our plugin computes
it too. Plugin kernels are tested against it. Ties go to the lower index, as in ONNX TopK. Arithmetic is fp32 for
tokens of every type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from sinkprune.contract.budgets import MOST_AT_ONCE, diversity_group
from sinkprune.export.graph import BOOL, FLOAT, INT64
from sinkprune.export.pruning.plan import TokenCount, outlier_count

DOMAIN = "sinkprune"
ROUNDS = "sinkprune.rounds"
"""The domain of functions without a plugin that choose tokens round by round."""

_LOWEST = float("-inf")
# Rounding moves the cosine of equal tokens to either side of 1. Larger cosines count as equal, so that they tie.
SAME = 1.0 - 2.0**-18
STEPS = 2.0**16
"""Preferred distances tie in steps of 1 / STEPS, because rounding moves equal ones apart."""


def top_rho(opset: int) -> ir.Function:
    """Return `TopRho`: the mean of each group's tokens of largest norm, and their mask (method.md section 1, 1-2).

    Inputs: norms [G,N] fp32, tokens [G,N,D] float. Attribute `per_mille`: rho; the count is its share of N rounded
    up, at least 1. Outputs: sink [G,1,D] in the type of `tokens`, outlier [G,N] bool.
    """

    def body(op: Any, norms: ir.Value, tokens: ir.Value) -> list[ir.Value]:
        count = outlier_count(op, op.Shape(norms, start=1, end=2), _attribute(op, "per_mille"))
        _, top = op.TopK(norms, count, axis=-1, largest=1, sorted=1, _outputs=2)
        members = gathered(op, op.Cast(tokens, to=FLOAT), top)
        sink = op.CastLike(op.ReduceMean(members, [1], keepdims=1), tokens)
        nowhere, ones = op.Expand(0, op.Shape(norms)), op.Expand(1, op.Shape(top))
        return [sink, op.Cast(op.ScatterElements(nowhere, top, ones, axis=1), to=BOOL)]

    return local_function(DOMAIN, "TopRho", body, opset, ["per_mille"])


def diversity_rounds(count: TokenCount, most: int, least: int) -> int:
    """Return the rounds that choose `count` tokens; for a computed count, the most for any count from 1 to `most`."""
    counts = [count] if isinstance(count, int) else range(1, most + 1)
    return max(-(-each // diversity_group(each, least)) for each in counts)


def preferring_select(rounds: int, opset: int) -> ir.Function:
    """Return `PreferringSelect`: `DiversitySelect` of the candidates of largest preference * (1 - similarity).

    It has a fifth input, preference [G,N] fp32 from 0 to 1, and no plugin. The product is rounded to steps of
    1 / STEPS. With nothing reserved, every similarity starts at -1.
    """

    def body(
        op: Any, tokens: ir.Value, candidate: ir.Value, reserved: ir.Value, count: ir.Value, preference: ir.Value
    ) -> ir.Value:
        def order(closeness: ir.Value) -> ir.Value:
            return op.Round(op.Mul(op.Mul(preference, op.Sub(closeness, 1.0)), STEPS))

        return _in_rounds(op, tokens, candidate, reserved, count, rounds, -1.0, order)

    return local_function(ROUNDS, "PreferringSelect", body, opset, ["rounds"])


def diversity_select(rounds: int, opset: int) -> ir.Function:
    """Return `DiversitySelect`: the candidates least similar to the kept tokens (method.md section 1, 4).

    Each round takes the `diversity_group` candidates whose largest cosine similarity to the kept set is smallest.
    Members of a round are not compared with each other. With nothing reserved, every similarity starts at -inf. The
    cosine with a zero row is 0. Cosines above 1 - 2**-18 are equal.

    Inputs: tokens [G,N,D] float, candidate [G,N] bool (at least `count` in each group), reserved [G,R] int64,
    count [1] int64. Attribute `rounds`: the least. Output: chosen [G,count] int64, ascending.

    The body has `rounds` rounds, which are enough (`diversity_rounds`). It has no Loop, because the TensorRT versions
    that we tried compile no Loop in a function.
    """

    def body(op: Any, tokens: ir.Value, candidate: ir.Value, reserved: ir.Value, count: ir.Value) -> ir.Value:
        return _in_rounds(op, tokens, candidate, reserved, count, rounds, _LOWEST, lambda closeness: closeness)

    return local_function(DOMAIN, "DiversitySelect", body, opset, ["rounds"])


def _in_rounds(
    op: Any,
    tokens: ir.Value,
    candidate: ir.Value,
    reserved: ir.Value,
    count: ir.Value,
    rounds: int,
    lowest: float,
    order: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Write the rounds of `DiversitySelect`, which take the candidates of smallest `order` of their closeness.

    Closeness [G,N] is the largest cosine with what is kept, from `lowest` on.
    """
    unit = unit_rows(op, op.Cast(tokens, to=FLOAT))
    # A column defines the maximum when nothing is reserved.
    floor = op.Expand(lowest, op.Concat(op.Shape(candidate), [1], axis=0))
    similarity = op.Concat(floor, cosines(op, unit, reserved), axis=-1)
    closeness = op.ReduceMax(similarity, [-1], keepdims=0)

    n = op.Shape(candidate, start=1, end=2)
    width = op.Max(op.Min(op.Div(count, _attribute(op, "rounds")), [MOST_AT_ONCE]), [1])
    place = op.Range(0, op.Squeeze(width), 1)
    nowhere = op.Expand(0, op.Shape(candidate))
    available, left = candidate, count
    for _ in range(rounds):
        open_to_choice = op.Where(available, order(closeness), float("inf"))
        _, index = op.TopK(open_to_choice, width, axis=-1, largest=0, sorted=1, _outputs=2)
        # The last round may take fewer than it ranks.
        fresh = op.Less(place, left)
        similarity = op.Where(fresh, cosines(op, unit, index), _LOWEST)
        closeness = op.Max(closeness, op.ReduceMax(similarity, [-1], keepdims=0))
        mark = op.Expand(op.Cast(fresh, to=INT64), op.Shape(index))
        taken = op.Cast(op.ScatterElements(nowhere, index, mark, axis=1), to=BOOL)
        available = op.And(available, op.Not(taken))
        left = op.Sub(left, width)

    chosen = op.And(candidate, op.Not(available))
    column = op.Cast(op.Range(0, op.Squeeze(n), 1), to=FLOAT)
    raster = op.Where(chosen, column, op.Cast(n, to=FLOAT))
    ascending, _ = op.TopK(raster, count, axis=-1, largest=0, sorted=1, _outputs=2)
    return op.Cast(ascending, to=INT64)


def unit_rows(op: Any, x: ir.Value) -> ir.Value:
    """Return rows of length 1; zero rows stay zero. Division by the largest element first prevents overflow."""
    largest = op.ReduceMax(op.Abs(x), [-1], keepdims=1)
    scaled = op.Div(x, op.Where(op.Greater(largest, 0.0), largest, 1.0))
    length = op.ReduceL2(scaled, [-1], keepdims=1)
    return op.Div(scaled, op.Where(op.Greater(length, 0.0), length, 1.0))


def centred(op: Any, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the rows `x` [G,N,D] without their mean, and the distinctiveness [G,N] of each, both fp32: Cen-Prune
    ("Centering before Pruning: Lightweight Geometry Correction for Diversity-Based Visual Token Pruning in LVLMs").

    A row is distinctive if its mean cosine with all rows is small, mean included. From 0 to 1 over each group; 1 if
    all rows are equally so.
    """
    rows = op.Cast(x, to=FLOAT)
    unit = unit_rows(op, rows)
    similarity = op.ReduceSum(op.Mul(unit, op.ReduceMean(unit, [1], keepdims=1)), [-1], keepdims=0)
    largest = op.ReduceMax(similarity, [-1], keepdims=1)
    spread = op.Sub(largest, op.ReduceMin(similarity, [-1], keepdims=1))
    differ = op.Greater(spread, 1.0 - SAME)
    distinctive = op.Where(differ, op.Div(op.Sub(largest, similarity), op.Where(differ, spread, 1.0)), 1.0)
    return op.Sub(rows, op.ReduceMean(rows, [1], keepdims=1)), distinctive


def cosines(op: Any, unit: ir.Value, index: ir.Value) -> ir.Value:
    """Return [G,N,K]: the cosine of every row of `unit` [G,N,D] with its rows `index` [G,K], at most `SAME`."""
    return op.Min(op.MatMul(unit, op.Transpose(gathered(op, unit, index), perm=[0, 2, 1])), SAME)


def gathered(op: Any, rows: ir.Value, index: ir.Value) -> ir.Value:
    """Return [G,K,D]: the rows `index` [G,K] of `rows` [G,N,D]."""
    return op.GatherND(rows, op.Unsqueeze(index, [-1]), batch_dims=1)


def _attribute(op: Any, name: str) -> ir.Value:
    """Return the function's integer attribute `name`, as a [1] tensor."""
    return op.Unsqueeze(op.Constant(value_int=ir.RefAttr("value_int", name, ir.AttributeType.INT)), [0])


def local_function(
    domain: str, name: str, body: Callable[..., Any], opset: int, attributes: Sequence[str] = ()
) -> ir.Function:
    """Return `body` as a function of an ONNX file, with integer `attributes`.

    The first parameter of `body` are the operators. The others name the function's inputs.
    """
    values = [ir.Value(name=parameter) for parameter in [*signature(body).parameters][1:]]
    declared = [ir.Attr(attribute, ir.AttributeType.INT, None) for attribute in attributes]
    return build_function(body, values, domain=domain, name=name, attributes=declared, opset_imports={"": opset})
