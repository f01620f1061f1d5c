"""Vectors of numbers as values in Numba: explicit LLVM vectors, so that speed does not depend on auto-vectorization.

Addresses are integers and offsets count bytes. Shapes are literal arguments or part of a type, so kernels built of
these functions can be cached on disk. Masks leave out lanes beyond the end of a row, whatever its length.
"""

import hashlib
import logging
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils, event
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, models, register_model

logger = logging.getLogger(__name__)
literal_intrinsic = intrinsic(prefer_literal=True)
INT64, INT32, BIT = ir.IntType(64), ir.IntType(32), ir.IntType(1)

REVISION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


class Vector(types.Type):
    """A vector of `lanes` numbers of `bits` bits."""

    def __init__(self, lanes: int, bits: int):
        self.lanes, self.bits = lanes, bits
        super().__init__(name=f"Vector({lanes}, {bits})")


class Mask(types.Type):
    """Which of `lanes` numbers are there."""

    def __init__(self, lanes: int):
        self.lanes = lanes
        super().__init__(name=f"Mask({lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector):
        super().__init__(manager, kind, _vector(kind.lanes, kind.bits))


@register_model(Mask)
class MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Mask):
        super().__init__(manager, kind, ir.VectorType(BIT, kind.lanes))


def vector_bytes() -> int:
    """The bytes of this processor's vectors: 64 with AVX-512, else 32."""
    if config.CPU_FEATURES is not None:
        features = config.CPU_FEATURES
    elif config.CPU_NAME not in (None, "host"):
        features = ""
    else:
        features = "+avx512f" if llvm.get_host_cpu_features().get("avx512f") else ""
    return 64 if "+avx512f" in features else 32


class _Announcer(event.Listener):
    """Says that kernels are compiled, which takes seconds; not if they come from the cache on disk."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(__package__):
            _announce()

    def on_end(self, event: Any) -> None:
        pass


@lru_cache
def _announce() -> None:
    """Once per process."""
    logger.info("compiling kernels for this processor; it takes some seconds, and only the first time")


event.register("numba:compile", _Announcer())


class KernelCache(FunctionCache):
    """Numba's cache on disk, which knows a kernel's own file; kernels are also made of what is in this one."""

    def _index_key(self, *about: Any) -> Any:
        return *super()._index_key(*about), REVISION


def kernel(function: Any) -> Any:
    """Compile a function on its first call; from the cache on disk if there is a folder that can be written."""
    compiled = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder for the cache
        compiled._cache = KernelCache(function)
    return compiled


def _scalar(bits: int) -> Any:
    return ir.FloatType() if bits == 32 else ir.DoubleType()


def _vector(lanes: int, bits: int) -> Any:
    return ir.VectorType(_scalar(bits), lanes)


def _constant(lanes: int, bits: int, number: float) -> Any:
    return ir.Constant(_vector(lanes, bits), [ir.Constant(_scalar(bits), number)] * lanes)


def _int(number: int) -> Any:
    return ir.Constant(INT64, number)


def _load(builder: Any, address: Any, mask: Any, lanes: int, bits: int) -> Any:
    kind = _vector(lanes, bits)
    signature = ir.FunctionType(kind, [kind.as_pointer(), INT32, ir.VectorType(BIT, lanes), kind])
    name = f"llvm.masked.load.v{lanes}f{bits}.p0v{lanes}f{bits}"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    pointer = builder.inttoptr(address, kind.as_pointer())
    return builder.call(function, [pointer, ir.Constant(INT32, bits // 8), mask, _constant(lanes, bits, 0.0)])


def _store(builder: Any, value: Any, address: Any, mask: Any, lanes: int, bits: int) -> None:
    kind = _vector(lanes, bits)
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), INT32, ir.VectorType(BIT, lanes)])
    name = f"llvm.masked.store.v{lanes}f{bits}.p0v{lanes}f{bits}"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    pointer = builder.inttoptr(address, kind.as_pointer())
    builder.call(function, [value, pointer, ir.Constant(INT32, bits // 8), mask])


def _fused(builder: Any, lanes: int, bits: int) -> Any:
    kind = _vector(lanes, bits)
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{lanes}f{bits}"
    )


def _mask(builder: Any, lanes: int, left: Any) -> Any:
    """Lanes with a number below `left`."""
    numbers = ir.VectorType(INT64, lanes)
    first = builder.insert_element(ir.Constant(numbers, ir.Undefined), left, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
    limit = builder.shuffle_vector(first, ir.Constant(numbers, ir.Undefined), zeros)
    return builder.icmp_signed("<", ir.Constant(numbers, list(range(lanes))), limit)


def _nothing(lanes: int) -> Any:
    """The mask of no lane."""
    return ir.Constant(ir.VectorType(BIT, lanes), [0] * lanes)


@literal_intrinsic
def zeros(context: Any, lanes: Any, bits: Any, count: Any) -> Any:
    kind = Vector(lanes.literal_value, bits.literal_value)
    result = types.UniTuple(kind, count.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return target.make_tuple(builder, result, [_constant(kind.lanes, kind.bits, 0.0)] * result.count)

    return result(lanes, bits, count), generate


@literal_intrinsic
def pointers(context: Any, count: Any, base: Any, stride: Any, first: Any, last: Any) -> Any:
    """base + n * stride for n from first on; those beyond last repeat it."""
    result = types.UniTuple(types.int64, count.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, base, stride, first, last = arguments
        found = []
        for n in range(result.count):
            index = builder.add(first, _int(n))
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
            found.append(builder.add(base, builder.mul(index, stride)))
        return target.make_tuple(builder, result, found)

    return result(count, types.int64, types.int64, types.int64, types.int64), generate


@literal_intrinsic
def masks(context: Any, lanes: Any, count: Any, left: Any) -> Any:
    """The masks of successive vectors, when `left` numbers are left."""
    result = types.UniTuple(Mask(lanes.literal_value), count.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = lanes.literal_value
        found = [_mask(builder, size, builder.sub(arguments[2], _int(n * size))) for n in range(result.count)]
        return target.make_tuple(builder, result, found)

    return result(lanes, count, types.int64), generate


@literal_intrinsic
def load_columns(context: Any, bits: Any, rows: Any, columns: Any, mask: Any) -> Any:
    """A tile all of whose rows are the vectors at `columns`."""
    kind = Vector(mask.dtype.lanes, bits.literal_value)
    result = types.UniTuple(kind, rows.literal_value * columns.count)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, valid = (cgutils.unpack_tuple(builder, arguments[n]) for n in (2, 3))
        found = [_load(builder, p, m, kind.lanes, kind.bits) for p, m in zip(at, valid, strict=True)]
        return target.make_tuple(builder, result, found * rows.literal_value)

    return result(bits, rows, columns, mask), generate


@literal_intrinsic
def load_tile(context: Any, bits: Any, rows: Any, columns: Any, mask: Any) -> Any:
    """The vectors at row + column."""
    kind = Vector(mask.dtype.lanes, bits.literal_value)
    result = types.UniTuple(kind, rows.count * columns.count)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, off, valid = (cgutils.unpack_tuple(builder, arguments[n]) for n in (1, 2, 3))
        found = [
            _load(builder, builder.add(p, q), m, kind.lanes, kind.bits)
            for p in at
            for q, m in zip(off, valid, strict=True)
        ]
        return target.make_tuple(builder, result, found)

    return result(bits, rows, columns, mask), generate


@literal_intrinsic
def store_tile(context: Any, tile: Any, rows: Any, columns: Any, mask: Any) -> Any:
    """Store a tile at row + column."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, off, valid = (cgutils.unpack_tuple(builder, argument) for argument in arguments)
        kind, number = tile.dtype, 0
        for p in at:
            for q, m in zip(off, valid, strict=True):
                _store(builder, values[number], builder.add(p, q), m, kind.lanes, kind.bits)
                number += 1
        return target.get_dummy_value()

    return types.void(tile, rows, columns, mask), generate


@literal_intrinsic
def multiply_add(context: Any, tile: Any, rows: Any, columns: Any, mask: Any, a: Any, b: Any, width: Any) -> Any:
    """tile[r, c] += row[r] * column[c]. A row is `width` numbers at row + a, repeated to fill the lanes; a column is a
    vector at column + b."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, off, valid = (cgutils.unpack_tuple(builder, argument) for argument in arguments[:4])
        kind, size = tile.dtype, width.literal_value
        short = _vector(size, kind.bits)
        pattern = ir.Constant(ir.VectorType(INT32, kind.lanes), [n % size for n in range(kind.lanes)])
        left = []
        for p in at:
            one = builder.load(builder.inttoptr(builder.add(p, arguments[4]), short.as_pointer()))
            one.align = kind.bits // 8
            full = size == kind.lanes
            left.append(one if full else builder.shuffle_vector(one, ir.Constant(short, ir.Undefined), pattern))
        right = [
            _load(builder, builder.add(q, arguments[5]), m, kind.lanes, kind.bits)
            for q, m in zip(off, valid, strict=True)
        ]
        function, found = _fused(builder, kind.lanes, kind.bits), []
        for r, row in enumerate(left):
            for c, column in enumerate(right):
                found.append(builder.call(function, [row, column, values[r * len(right) + c]]))
        return target.make_tuple(builder, tile, found)

    return tile(tile, rows, columns, mask, types.int64, types.int64, width), generate


@literal_intrinsic
def mask_of(context: Any, lanes: Any, left: Any) -> Any:
    """The mask of a vector when `left` numbers are left."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _mask(builder, lanes.literal_value, arguments[1])

    return Mask(lanes.literal_value)(lanes, types.int64), generate


@literal_intrinsic
def load(context: Any, bits: Any, address: Any, mask: Any) -> Any:
    kind = Vector(mask.lanes, bits.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[1], arguments[2], kind.lanes, kind.bits)

    return kind(bits, types.int64, mask), generate


@literal_intrinsic
def load_integer(context: Any, address: Any) -> Any:
    """The integer of 64 bits at an address."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], INT64.as_pointer()))

    return types.int64(types.int64), generate


@literal_intrinsic
def store(context: Any, value: Any, address: Any, mask: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, arguments[0], arguments[1], arguments[2], value.lanes, value.bits)
        return target.get_dummy_value()

    return types.void(value, types.int64, mask), generate


@literal_intrinsic
def splat(context: Any, lanes: Any, bits: Any, number: Any) -> Any:
    """A vector of one number."""
    kind = Vector(lanes.literal_value, bits.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[2]
        if kind.bits == 32:
            value = builder.fptrunc(value, ir.FloatType())
        whole = _vector(kind.lanes, kind.bits)
        first = builder.insert_element(ir.Constant(whole, ir.Undefined), value, ir.Constant(INT32, 0))
        pattern = ir.Constant(ir.VectorType(INT32, kind.lanes), [0] * kind.lanes)
        return builder.shuffle_vector(first, ir.Constant(whole, ir.Undefined), pattern)

    return kind(lanes, bits, types.float64), generate


@literal_intrinsic
def add(context: Any, left: Any, right: Any) -> Any:
    return left(left, right), lambda target, builder, signature, a: builder.fadd(a[0], a[1])


@literal_intrinsic
def sub(context: Any, left: Any, right: Any) -> Any:
    return left(left, right), lambda target, builder, signature, a: builder.fsub(a[0], a[1])


@literal_intrinsic
def mul(context: Any, left: Any, right: Any) -> Any:
    return left(left, right), lambda target, builder, signature, a: builder.fmul(a[0], a[1])


@literal_intrinsic
def div(context: Any, left: Any, right: Any) -> Any:
    return left(left, right), lambda target, builder, signature, a: builder.fdiv(a[0], a[1])


@literal_intrinsic
def fma(context: Any, left: Any, right: Any, plus: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(_fused(builder, left.lanes, left.bits), arguments)

    return left(left, right, plus), generate


@literal_intrinsic
def sqrt(context: Any, value: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = _vector(value.lanes, value.bits)
        name = f"llvm.sqrt.v{value.lanes}f{value.bits}"
        return builder.call(
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name), arguments
        )

    return value(value), generate


@literal_intrinsic
def where_above(context: Any, left: Any, right: Any, value: Any, other: Any) -> Any:
    """value where left > right or one of them is NaN, else other."""

    def generate(target: Any, builder: Any, signature: Any, a: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">", a[0], a[1]), a[2], a[3])

    return value(left, right, value, other), generate


@literal_intrinsic
def largest(context: Any, left: Any, right: Any) -> Any:
    """The larger of two; NaN if one of them is NaN."""

    def generate(target: Any, builder: Any, signature: Any, a: Any) -> Any:
        found = builder.select(builder.fcmp_ordered(">", a[0], a[1]), a[0], a[1])
        return builder.select(builder.fcmp_unordered("uno", a[0], a[0]), a[0], found)

    return left(left, right), generate


@literal_intrinsic
def where_equal(context: Any, left: Any, right: Any, value: Any, other: Any) -> Any:
    """value where left == right, else other."""

    def generate(target: Any, builder: Any, signature: Any, a: Any) -> Any:
        return builder.select(builder.fcmp_ordered("==", a[0], a[1]), a[2], a[3])

    return value(left, right, value, other), generate


@literal_intrinsic
def multiply_each(context: Any, tile: Any, left: Any, right: Any, mask: Any, a: Any, b: Any) -> Any:
    """tile[n] += vector at left[n] + a times vector at right[n] + b."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, first, second, valid = (cgutils.unpack_tuple(builder, argument) for argument in arguments[:4])
        kind, found = tile.dtype, []
        for value, p, q, m in zip(values, first, second, valid, strict=True):
            x = _load(builder, builder.add(p, arguments[4]), m, kind.lanes, kind.bits)
            y = _load(builder, builder.add(q, arguments[5]), m, kind.lanes, kind.bits)
            found.append(builder.call(_fused(builder, kind.lanes, kind.bits), [x, y, value]))
        return target.make_tuple(builder, tile, found)

    return tile(tile, left, right, mask, types.int64, types.int64), generate


@literal_intrinsic
def transpose(context: Any, tile: Any) -> Any:
    """A square of as many vectors as they have lanes, with rows and columns swapped."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, lanes = cgutils.unpack_tuple(builder, arguments[0]), tile.dtype.lanes
        apart = lanes // 2
        while apart:
            # squares of this size swap their upper right and lower left quarters
            upper = [lane + lanes - apart if lane & apart else lane for lane in range(lanes)]
            lower = [lane + lanes if lane & apart else lane + apart for lane in range(lanes)]
            for n in range(lanes):
                if not n & apart:
                    pair = values[n], values[n + apart]
                    for row, pattern in ((n, upper), (n + apart, lower)):
                        mask = ir.Constant(ir.VectorType(INT32, lanes), pattern)
                        values[row] = builder.shuffle_vector(*pair, mask)
            apart //= 2
        return target.make_tuple(builder, tile, values)

    return tile(tile), generate


@literal_intrinsic
def repeat(context: Any, count: Any, value: Any) -> Any:
    """The same value so many times."""
    result = types.UniTuple(value, count.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return target.make_tuple(builder, result, [arguments[1]] * result.count)

    return result(count, value), generate


@literal_intrinsic
def repeat_each(context: Any, count: Any, values: Any) -> Any:
    """All of the values, so many times."""
    result = types.UniTuple(values.dtype, count.literal_value * values.count)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = cgutils.unpack_tuple(builder, arguments[1]) * count.literal_value
        return target.make_tuple(builder, result, found)

    return result(count, values), generate


@literal_intrinsic
def grid(context: Any, rows: Any, columns: Any, base: Any, down: Any, across: Any) -> Any:
    """base + row * down + column * across, row by row."""
    result = types.UniTuple(types.int64, rows.literal_value * columns.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, base, down, across = arguments
        starts = [builder.add(base, builder.mul(down, _int(row))) for row in range(rows.literal_value)]
        steps = [builder.mul(across, _int(column)) for column in range(columns.literal_value)]
        return target.make_tuple(builder, result, [builder.add(start, step) for start in starts for step in steps])

    return result(rows, columns, types.int64, types.int64, types.int64), generate


@literal_intrinsic
def masks_inside(context: Any, rows: Any, mask: Any, first: Any, end: Any) -> Any:
    """The masks of each row, which is number first, first + 1, ...; empty unless that is from 0 to end."""
    kind = mask.dtype
    result = types.UniTuple(kind, rows.literal_value * mask.count)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        valid, nothing = cgutils.unpack_tuple(builder, arguments[1]), _nothing(kind.lanes)
        # as unsigned numbers, those below zero are beyond every end
        inside = [
            builder.icmp_unsigned("<", builder.add(arguments[2], _int(row)), arguments[3])
            for row in range(rows.literal_value)
        ]
        return target.make_tuple(
            builder, result, [builder.select(one, each, nothing) for one in inside for each in valid]
        )

    return result(rows, mask, types.int64, types.int64), generate


@literal_intrinsic
def store_each(context: Any, tile: Any, at: Any, mask: Any, offset: Any) -> Any:
    """Store each vector of a tile at its own address + offset."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, addresses, valid = (cgutils.unpack_tuple(builder, argument) for argument in arguments[:3])
        for value, p, m in zip(values, addresses, valid, strict=True):
            _store(builder, value, builder.add(p, arguments[3]), m, tile.dtype.lanes, tile.dtype.bits)
        return target.get_dummy_value()

    return types.void(tile, at, mask, types.int64), generate


@literal_intrinsic
def load_each(context: Any, bits: Any, at: Any, mask: Any, offset: Any) -> Any:
    """The vectors at each address + offset."""
    kind = Vector(mask.dtype.lanes, bits.literal_value)
    result = types.UniTuple(kind, at.count)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses, valid = (cgutils.unpack_tuple(builder, arguments[n]) for n in (1, 2))
        found = [
            _load(builder, builder.add(p, arguments[3]), m, kind.lanes, kind.bits)
            for p, m in zip(addresses, valid, strict=True)
        ]
        return target.make_tuple(builder, result, found)

    return result(bits, at, mask, types.int64), generate


@literal_intrinsic
def load_window(
    context: Any, bits: Any, rows: Any, columns: Any, base: Any, line: Any, near: Any, y: Any, x: Any, height: Any,
    width: Any, mask: Any,
) -> Any:  # fmt: skip
    """The pixels of a window that begins in line y and column x of a map; zero outside of the map.

    `line` and `near`: bytes from a line, and from a pixel, to the next one.
    """
    kind = Vector(mask.lanes, bits.literal_value)
    result = types.UniTuple(kind, rows.literal_value * columns.literal_value)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = [
            _load(builder, address, valid, kind.lanes, kind.bits)
            for address, valid in _window(builder, rows.literal_value, columns.literal_value, mask.lanes, arguments[3:])
        ]
        return target.make_tuple(builder, result, found)

    return result(bits, rows, columns, *[types.int64] * 7, mask), generate


@literal_intrinsic
def store_window(
    context: Any, tile: Any, rows: Any, columns: Any, base: Any, line: Any, near: Any, y: Any, x: Any, height: Any,
    width: Any, mask: Any,
) -> Any:  # fmt: skip
    """Store the pixels of a window that lie in the map."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        window = _window(builder, rows.literal_value, columns.literal_value, mask.lanes, arguments[3:])
        for value, (address, valid) in zip(cgutils.unpack_tuple(builder, arguments[0]), window, strict=True):
            _store(builder, value, address, valid, tile.dtype.lanes, tile.dtype.bits)
        return target.get_dummy_value()

    return types.void(tile, rows, columns, *[types.int64] * 7, mask), generate


def _window(builder: Any, rows: int, columns: int, lanes: int, arguments: Any) -> list[tuple[Any, Any]]:
    """Addresses and masks of a window's pixels, line by line."""
    base, line, near, y, x, height, width, mask = arguments
    nothing = _nothing(lanes)

    def axis(start: Any, count: int, end: Any, stride: Any) -> list[tuple[Any, Any]]:
        places = [builder.add(start, _int(n)) for n in range(count)]
        # as unsigned numbers, those below zero are beyond every end
        return [(builder.mul(place, stride), builder.icmp_unsigned("<", place, end)) for place in places]

    return [
        (builder.add(base, builder.add(down, right)), builder.select(builder.and_(above, before), mask, nothing))
        for down, above in axis(y, rows, height, line)
        for right, before in axis(x, columns, width, near)
    ]


@literal_intrinsic
def add_each(context: Any, tile: Any, value: Any) -> Any:
    """The vectors of a tile, each plus the same one."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        return target.make_tuple(builder, tile, [builder.fadd(one, arguments[1]) for one in values])

    return tile(tile, value), generate


@literal_intrinsic
def times_each(context: Any, tile: Any, value: Any) -> Any:
    """The vectors of a tile, each times the same one."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        return target.make_tuple(builder, tile, [builder.fmul(one, arguments[1]) for one in values])

    return tile(tile, value), generate


@literal_intrinsic
def plus(context: Any, tile: Any, other: Any) -> Any:
    """The sum of two tiles."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs = zip(*(cgutils.unpack_tuple(builder, argument) for argument in arguments), strict=True)
        return target.make_tuple(builder, tile, [builder.fadd(left, right) for left, right in pairs])

    return tile(tile, other), generate


@literal_intrinsic
def plus_squares(context: Any, tile: Any, values: Any, center: Any) -> Any:
    """A tile plus the squares of values - center; `center` is a row, for all rows."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals, numbers, row = (cgutils.unpack_tuple(builder, argument) for argument in arguments)
        fused, found = _fused(builder, tile.dtype.lanes, tile.dtype.bits), []
        for n, (total, number) in enumerate(zip(totals, numbers, strict=True)):
            apart = builder.fsub(number, row[n % len(row)])
            found.append(builder.call(fused, [apart, apart, total]))
        return target.make_tuple(builder, tile, found)

    return tile(tile, values, center), generate


@literal_intrinsic
def where_each(context: Any, mask: Any, tile: Any, other: Any) -> Any:
    """The lanes of a tile that are there; those of another one elsewhere."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        each = zip(*(cgutils.unpack_tuple(builder, argument) for argument in arguments), strict=True)
        return target.make_tuple(builder, tile, [builder.select(*one) for one in each])

    return tile(mask, tile, other), generate


@literal_intrinsic
def add_pairs(context: Any, tile: Any, columns: Any) -> Any:
    """The sums of neighboring rows of a tile: of the first and the second, of the third and the fourth."""
    across = columns.literal_value
    result = types.UniTuple(tile.dtype, tile.count // 2)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        below = [n + across for n in range(tile.count) if n // across % 2 == 0]
        found = [builder.fadd(values[n - across], values[n]) for n in below]
        return target.make_tuple(builder, result, found)

    return result(tile, columns), generate


@literal_intrinsic
def transform(context: Any, tile: Any, matrix: Any) -> Any:
    """matrix @ tile @ matrix transposed, of a square tile of vectors.

    `matrix`: a text of fractions, rows apart by semicolons, which is how a kernel can have it as a constant.
    """
    coefficients = [[Fraction(word) for word in row.split()] for row in matrix.literal_value.split(";")]
    after, before = len(coefficients), len(coefficients[0])
    result = types.UniTuple(tile.dtype, after * after)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        rows = [values[n * before : (n + 1) * before] for n in range(before)]
        columns = [_combine(builder, tile.dtype, coefficients, column) for column in zip(*rows, strict=True)]
        found = [_combine(builder, tile.dtype, coefficients, row) for row in zip(*columns, strict=True)]
        return target.make_tuple(builder, result, [value for row in found for value in row])

    return result(tile, matrix), generate


def _combine(builder: Any, kind: Vector, coefficients: list[list[Fraction]], values: Any) -> list[Any]:
    """The sums of values times each row of coefficients."""
    fused, found = _fused(builder, kind.lanes, kind.bits), []
    for row in coefficients:
        total = None
        for factor, value in zip(row, values, strict=True):
            if not factor:
                continue
            constant = _constant(kind.lanes, kind.bits, float(factor))
            if total is None:
                total = value if factor == 1 else builder.fmul(value, constant)
            elif abs(factor) == 1:
                total = builder.fadd(total, value) if factor == 1 else builder.fsub(total, value)
            else:
                total = builder.call(fused, [value, constant, total])
        found.append(total)
    return found
