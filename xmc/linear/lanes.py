"""One step of dual coordinate descent for a document and the labels of a block at once, a label in each SIMD lane.

Written as vector instructions: compiled loops over 16 labels spend more on guarding against overlap of their arrays
than on the sums. Choosing documents, and when to stop, is `solver.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

# How many labels a block may have. The tuple's length, not its content, tells the compiler the number of lanes.
LANES = {width: (0,) * width for width in (8, 16)}

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
# Partial sums of a dot product: enough to hide the latency of an addition, and the same for every width, so that a
# label's weights do not depend on how many labels share its block.
_SUMS = 4


class _Lanes:
    """Builds instructions on vectors of `width` floats."""

    def __init__(self, context: Any, builder: Any, width: int) -> None:
        self.context, self.builder, self.width = context, builder, width
        self.floats = ir.VectorType(_FLOAT, width)
        self.zero = ir.Constant(self.floats, [0.0] * width)

    def data(self, array_type: Any, array: Any) -> Any:
        """Where an array's items begin."""
        return self.context.make_array(array_type)(self.context, self.builder, array).data

    def at(self, data: Any, row: Any) -> Any:
        """Where row `row` of an array of `width` columns begins, as vector."""
        item = self.builder.gep(data, [self.builder.mul(row, ir.Constant(_INT64, self.width))])
        return self.builder.bitcast(item, self.floats.as_pointer())

    def load(self, pointer: Any) -> Any:
        return self.builder.load(pointer, align=4)

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer, align=4)

    def spread(self, scalar: Any) -> Any:
        """The same float in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
        zeros = ir.Constant(ir.VectorType(_INT32, self.width), [0] * self.width)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def add_product(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, in one instruction where the processor has it."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=["contract"]), c, flags=["contract"])

    def mask(self, bits: Any) -> Any:
        """The lowest bits of an integer as one truth value a lane."""
        narrow = self.builder.trunc(bits, ir.IntType(self.width))
        return self.builder.bitcast(narrow, ir.VectorType(ir.IntType(1), self.width))

    def bits(self, mask: Any) -> Any:
        """The opposite of `mask`."""
        return self.builder.zext(self.builder.bitcast(mask, ir.IntType(self.width)), _INT32)

    def loop(self, begin: Any, end: Any, step: int, sums: list[Any], body: Callable) -> list[Any]:
        """for t in range(begin, end, step): sums = body(t, sums); returns the sums."""
        builder, before = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        t = builder.phi(_INT64)
        carried = [builder.phi(self.floats) for _ in sums]
        t.add_incoming(begin, before)
        for phi, start in zip(carried, sums, strict=True):
            phi.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", t, end), inside, after)
        builder.position_at_end(inside)
        results = body(t, carried)
        t.add_incoming(builder.add(t, ir.Constant(_INT64, step)), builder.block)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return carried

    def dot(self, begin: Any, end: Any, term: Callable, total: Any) -> Any:
        """total + Σ_t x_t · w_t over begin ≤ t < end, where term(t) gives x_t and the place of the vector w_t."""
        builder = self.builder

        def add(t: Any, total: Any) -> Any:
            x, place = term(t)
            return self.add_product(self.spread(x), self.load(place), total)

        def add_several(t: Any, sums: list[Any]) -> list[Any]:
            return [add(builder.add(t, ir.Constant(_INT64, i)), one) for i, one in enumerate(sums)]

        count = builder.sub(end, begin)
        whole = builder.sub(end, builder.and_(count, ir.Constant(_INT64, _SUMS - 1)))
        sums = self.loop(begin, whole, _SUMS, [total] + [self.zero] * (_SUMS - 1), add_several)
        while len(sums) > 1:
            sums = [builder.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        return self.loop(whole, end, 1, sums, lambda t, one: [add(t, one[0])])[0]

    def add_scaled(self, begin: Any, end: Any, term: Callable, delta: Any) -> None:
        """w_t += x_t · delta over begin ≤ t < end."""

        def move(t: Any, _: list[Any]) -> list[Any]:
            x, place = term(t)
            self.store(self.add_product(self.spread(x), delta, self.load(place)), place)
            return []

        self.loop(begin, end, 1, [], move)


@intrinsic
def step(
    typing_context: Any,
    lanes: Any,  # an entry of LANES
    weights: Any,  # (C × lanes) float32
    columns: Any,  # int32, values: float32: the document's entries are begin … end−1
    values: Any,
    begin: Any,
    end: Any,
    dense_weights: Any,  # (d × lanes) float32
    dense: Any,  # (N × d) float32; the document's row begins at item dense_begin
    dense_begin: Any,
    num_dense: Any,
    bias_weights: Any,  # (1 × lanes) float32
    bias: Any,
    alpha: Any,  # (n × lanes) float32; the document's row is `row`
    row: Any,
    diagonal: Any,  # what α itself adds to its gradient: 1/2C, and the square of what only this document has
    inverse: Any,  # 1 / (|x|² + bias² + 1/2C)
    active: Any,  # bits: the labels that move
    positive: Any,  # bits: the labels that the document has
    ignore: Any,  # a projected gradient no larger than this moves nothing
    highest: Any,  # (1 × lanes) float32, raised to the projected gradient
    lowest: Any,  # (1 × lanes) float32, lowered to it
) -> Any:
    """Move the α of one document and the weights of the active labels; returns the bits of those that moved."""
    number, real, bits = types.int64, types.float32, types.uint32
    signature = bits(
        lanes, weights, columns, values, number, number, dense_weights, dense, number, number,
        bias_weights, real, alpha, number, real, real, bits, bits, real, highest, lowest,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _Lanes(context, builder, len(signature.args[0]))
        given = dict(zip(_ARGUMENTS, args, strict=True))
        data = {
            name: v.data(kind, given[name])
            for name, kind in zip(_ARGUMENTS, signature.args, strict=True)
            if isinstance(kind, types.Array)
        }

        def sparse_term(t: Any) -> tuple[Any, Any]:
            column = builder.sext(builder.load(builder.gep(data["columns"], [t])), _INT64)
            return builder.load(builder.gep(data["values"], [t])), v.at(data["weights"], column)

        def dense_term(t: Any) -> tuple[Any, Any]:
            item = builder.gep(data["dense"], [builder.add(given["dense_begin"], t)])
            return builder.load(item), v.at(data["dense_weights"], t)

        zero = ir.Constant(_INT64, 0)
        bias_place = v.at(data["bias_weights"], zero)
        alpha_place = v.at(data["alpha"], given["row"])
        highest_place, lowest_place = v.at(data["highest"], zero), v.at(data["lowest"], zero)

        # gradient of the dual: y (w·x + bias) + α · diagonal − 1
        score = builder.fmul(v.spread(given["bias"]), v.load(bias_place))
        score = v.dot(given["begin"], given["end"], sparse_term, score)
        score = v.dot(zero, given["num_dense"], dense_term, score)
        positive = v.mask(given["positive"])
        signed = builder.select(positive, score, builder.fsub(v.zero, score))
        old = v.load(alpha_place)
        minus_one = ir.Constant(v.floats, [-1.0] * v.width)
        gradient = builder.fadd(v.add_product(old, v.spread(given["diagonal"]), minus_one), signed)

        # projected: where α is 0 already, only a negative gradient moves it
        def lesser(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", a, b), a, b)

        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        at_bound = builder.fcmp_ordered("==", old, v.zero)
        projected = builder.select(at_bound, lesser(gradient, v.zero), gradient)
        projected = builder.select(v.mask(given["active"]), projected, v.zero)
        v.store(greater(v.load(highest_place), projected), highest_place)
        v.store(lesser(v.load(lowest_place), projected), lowest_place)
        size = greater(projected, builder.fsub(v.zero, projected))
        moves = builder.fcmp_ordered(">", size, v.spread(given["ignore"]))
        moved = v.bits(moves)

        with builder.if_then(builder.icmp_unsigned("!=", moved, ir.Constant(_INT32, 0))):
            target = greater(builder.fsub(old, builder.fmul(gradient, v.spread(given["inverse"]))), v.zero)
            new = builder.select(moves, target, old)
            v.store(new, alpha_place)
            change = builder.fsub(new, old)
            delta = builder.select(positive, change, builder.fsub(v.zero, change))
            v.store(v.add_product(v.spread(given["bias"]), delta, v.load(bias_place)), bias_place)
            v.add_scaled(given["begin"], given["end"], sparse_term, delta)
            v.add_scaled(zero, given["num_dense"], dense_term, delta)
        return moved

    return signature, generate


_ARGUMENTS = (
    "lanes", "weights", "columns", "values", "begin", "end", "dense_weights", "dense", "dense_begin", "num_dense",
    "bias_weights", "bias", "alpha", "row", "diagonal", "inverse", "active", "positive", "ignore", "highest", "lowest",
)  # fmt: skip
