"""Convolution of K devices with the devices in the lanes of vectors; K is a power of two or a multiple of 16.

Maps are [batch, height, width, channels, K] in memory and weights [kernel height, kernel width, inputs, outputs, K]. A
vector holds (channel, device) pairs: devices only if K is large, channels only if K = 1. Every number is one chain of
fused multiply-adds in one order, so it does not depend on K, on tiles, on chunks or on the width of vectors.
"""

import functools
import math
from typing import Any, NamedTuple

from .vectors import (
    kernel,
    load,
    load_columns,
    load_each,
    load_tile,
    mask_of,
    masks,
    multiply_add,
    pointers,
    store,
    store_each,
    store_tile,
    transpose,
    vector_bytes,
    zeros,
)

NEAR = 256_000
"""Bytes of weights, or of maps, that a part of the loops goes through again and again: half of a usual second cache."""


class Shape(NamedTuple):
    """A convolution of K devices: sizes, stride and padding by (height, width), and bits of a number."""

    batch: int
    height: int
    width: int
    inputs: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: int
    devices: int
    bits: int

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.padding[0] - self.kernel[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.padding[1] - self.kernel[1]) // self.stride[1] + 1


@functools.cache
def lane_count(bits: int) -> int:
    return vector_bytes() * 8 // bits


@functools.cache
def tile_size(channels: int | None = None) -> tuple[int, int]:
    """Rows and columns of the accumulators, as many as the registers hold beside one row and all columns.

    `channels`: the vectors of a pixel; for so few of them that columns would be left over, there are more rows.
    """
    if vector_bytes() < 64:
        return 5, 2
    return (10, 2) if channels is not None and channels <= 2 else (5, 4)


def _vectors(channels: int, groups: int, width: int, lanes: int) -> int:
    """How many vectors hold the channels of a group."""
    return -(-channels // groups * width // lanes)


@functools.cache
def forward_kernel(lanes: int, bits: int, width: int, rows: int, columns: int) -> Any:
    size = bits // 8
    channels, count = lanes // width, rows * columns  # channels of a vector, vectors of a tile

    @kernel
    def forward(x, w, bias, y, B, H, W, C, O, HO, WO, KH, KW, SH, SW, PH, PW, groups, K, chunk):
        unit = K * size
        IG, OG = C // groups, O // groups
        xb, yb, step, tap = H * W * C * unit, HO * WO * O * unit, O * unit, IG * O * unit
        for group in range(groups):
            for v in range(0, K, width):
                xg, shift = x + group * IG * unit + v * size, (group * OG) * unit + v * size
                for oc in range(0, OG, chunk):
                    for b in range(0, B, rows):
                        yp = pointers(rows, y, yb, b, B - 1)
                        for yo in range(HO):
                            dy0, dy1 = max(0, PH - yo * SH), min(KH, H + PH - yo * SH)
                            for o in range(oc, min(OG, oc + chunk), columns * channels):
                                valid = masks(lanes, columns, (OG - o) * width)
                                wp = pointers(columns, w + shift + o * unit, channels * unit, 0, columns)
                                for xo in range(WO):
                                    dx0, dx1 = max(0, PW - xo * SW), min(KW, W + PW - xo * SW)
                                    if bias != 0:
                                        bp = pointers(columns, bias + shift + o * unit, channels * unit, 0, columns)
                                        total = load_columns(bits, rows, bp, valid)
                                    else:
                                        total = zeros(lanes, bits, count)
                                    for dy in range(dy0, dy1):
                                        near = ((yo * SH + dy - PH) * W + (xo * SW + dx0 - PW)) * C * unit
                                        xp = pointers(rows, xg + near, xb, b, B - 1)
                                        q = (dy * KW + dx0) * tap
                                        taps = (
                                            1 if groups == 1 else dx1 - dx0
                                        )  # without groups their inputs are adjacent
                                        for dx in range(taps):
                                            p = dx * C * unit
                                            for _ in range((dx1 - dx0) // taps * IG):
                                                total = multiply_add(total, xp, wp, valid, p, q, width)
                                                p += unit
                                                q += step
                                    at = shift + ((yo * WO + xo) * O + o) * unit
                                    store_tile(total, yp, pointers(columns, at, channels * unit, 0, columns), valid)

    return forward


@functools.cache
def input_gradient_kernel(lanes: int, bits: int, width: int, rows: int, columns: int) -> Any:
    size = bits // 8
    channels, count = lanes // width, rows * columns

    @kernel
    def input_gradient(g, w, dx_, B, H, W, C, O, HO, WO, KH, KW, SH, SW, PH, PW, groups, K, chunk, wi, wo):
        """wi and wo: bytes from one input, and from one output, of the weights to the next."""
        unit = K * size
        IG, OG = C // groups, O // groups
        xb, yb, tap = H * W * C * unit, HO * WO * O * unit, IG * O * unit
        for group in range(groups):
            for v in range(0, K, width):
                gg, shift = g + group * OG * unit + v * size, group * IG * unit + v * size
                wg = w + group * OG * wo + v * size
                for ic in range(0, IG, chunk):
                    for b in range(0, B, rows):
                        xp, gp = pointers(rows, dx_, xb, b, B - 1), pointers(rows, gg, yb, b, B - 1)
                        for yi in range(H):
                            for i in range(ic, min(IG, ic + chunk), columns * channels):
                                valid = masks(lanes, columns, (IG - i) * width)
                                wp = pointers(columns, wg + i * wi, channels * wi, 0, columns)
                                for xi in range(W):
                                    total = zeros(lanes, bits, count)
                                    for dy in range((yi + PH) % SH, KH, SH):
                                        yo = (yi + PH - dy) // SH
                                        if yo < 0 or yo >= HO:
                                            continue
                                        for dx in range((xi + PW) % SW, KW, SW):
                                            xo = (xi + PW - dx) // SW
                                            if xo < 0 or xo >= WO:
                                                continue
                                            p = (yo * WO + xo) * O * unit
                                            q = (dy * KW + dx) * tap
                                            for _ in range(OG):
                                                total = multiply_add(total, gp, wp, valid, p, q, width)
                                                p += unit
                                                q += wo
                                    at = shift + ((yi * W + xi) * C + i) * unit
                                    store_tile(total, xp, pointers(columns, at, channels * unit, 0, columns), valid)

    return input_gradient


@functools.cache
def weight_gradient_kernel(lanes: int, bits: int, width: int, rows: int, columns: int) -> Any:
    size = bits // 8
    channels, count = lanes // width, rows * columns

    @kernel
    def weight_gradient(x, g, dw, B, H, W, C, O, HO, WO, KH, KW, SH, SW, PH, PW, groups, K, images, lines):
        """`images` and `lines` of the maps at a time, which are one or all of the lines if there are several images."""
        unit = K * size
        IG, OG = C // groups, O // groups
        xb, yb, step = H * W * C * unit, HO * WO * O * unit, O * unit
        for group in range(groups):
            for v in range(0, K, width):
                xg, shift = x + group * IG * unit + v * size, group * OG * unit + v * size
                for b0 in range(0, B, images):
                    b1 = min(B, b0 + images)
                    for line in range(0, HO, lines):
                        for o in range(0, OG, columns * channels):
                            valid = masks(lanes, columns, (OG - o) * width)
                            gp = pointers(columns, g + shift + o * unit, channels * unit, 0, columns)
                            off = pointers(columns, shift + o * unit, channels * unit, 0, columns)
                            for dy in range(KH):
                                y0 = max(line, -((dy - PH) // SH))
                                y1 = min(min(HO, line + lines), (H - 1 + PH - dy) // SH + 1)
                                for dx in range(KW):
                                    x0 = max(0, -((dx - PW) // SW))
                                    x1 = min(WO, (W - 1 + PW - dx) // SW + 1)
                                    for i in range(0, IG, rows):
                                        xp = pointers(rows, xg, unit, i, IG - 1)
                                        at = pointers(rows, dw + (dy * KW + dx) * IG * step, step, i, IG - 1)
                                        if b0 == 0 and line == 0:
                                            total = zeros(lanes, bits, count)
                                        else:
                                            total = load_tile(bits, at, off, valid)
                                        for b in range(b0, b1):
                                            for yo in range(y0, y1):
                                                q = b * yb + (yo * WO + x0) * step
                                                p = b * xb + ((yo * SH + dy - PH) * W + (x0 * SW + dx - PW)) * C * unit
                                                for _ in range(x0, x1):
                                                    total = multiply_add(total, xp, gp, valid, p, q, width)
                                                    p += SW * C * unit
                                                    q += step
                                        store_tile(total, at, off, valid)

    return weight_gradient


@functools.cache
def swap_kernel(lanes: int, bits: int, devices: int) -> Any:
    size, in_registers = bits // 8 * devices, devices == 1

    @kernel
    def swap(w, swapped, taps, I, O):
        """[taps, inputs, outputs, K] -> [taps, outputs, inputs, K], by squares."""
        every, whole = mask_of(devices, devices), masks(lanes, lanes, lanes * lanes)
        for tap in range(taps):
            p, q = w + tap * I * O * size, swapped + tap * I * O * size
            for i0 in range(0, I, lanes):
                for o0 in range(0, O, lanes):
                    if in_registers and i0 + lanes <= I and o0 + lanes <= O:
                        rows = pointers(lanes, p + o0 * size, O * size, i0, I)
                        columns = pointers(lanes, q + i0 * size, I * size, o0, O)
                        store_each(transpose(load_each(bits, rows, whole, 0)), columns, whole, 0)
                        continue
                    for o in range(o0, min(O, o0 + lanes)):
                        for i in range(i0, min(I, i0 + lanes)):
                            store(load(bits, p + (i * O + o) * size, every), q + (o * I + i) * size, every)

    return swap


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (
        shape.batch, shape.height, shape.width, shape.inputs, shape.outputs, shape.out_height, shape.out_width,
        *shape.kernel, *shape.stride, *shape.padding, shape.groups, shape.devices,
    )  # fmt: skip


def channels_near(summed: int, channels: int, columns: int) -> int:
    """Output channels whose weights stay in the cache beside the maps.

    Parameters
    ----------
    summed : the products of an output: inputs times taps.
    channels : the channels of a vector.
    columns : the vectors of a tile's row.
    """
    return max(1, NEAR // (summed * vector_bytes() * columns)) * columns * channels


@functools.lru_cache(maxsize=4096)
def plan_forward(shape: Shape) -> tuple[Any, tuple[int, ...]]:
    """The kernel (x, w, bias or 0, y, ...) and its last arguments."""
    lanes = lane_count(shape.bits)
    width = min(lanes, shape.devices)
    rows, columns = tile_size(_vectors(shape.outputs, shape.groups, width, lanes))
    chunk = channels_near(math.prod(shape.kernel) * shape.inputs // shape.groups, lanes // width, columns)
    return forward_kernel(lanes, shape.bits, width, rows, columns), (*_sizes(shape), chunk)


@functools.lru_cache(maxsize=4096)
def plan_input_gradient(shape: Shape) -> tuple[Any, tuple[int, ...], bool]:
    """The kernel (g, w, dx, ...), its last arguments, and whether it takes the weights with inputs before outputs
    swapped: a vector of several channels must be contiguous."""
    lanes = lane_count(shape.bits)
    width = min(lanes, shape.devices)
    rows, columns = tile_size(_vectors(shape.inputs, shape.groups, width, lanes))
    chunk = channels_near(math.prod(shape.kernel) * shape.outputs // shape.groups, lanes // width, columns)
    unit, swapped = shape.devices * shape.bits // 8, width < lanes
    strides = (unit, shape.inputs // shape.groups * unit) if swapped else (shape.outputs * unit, unit)
    function = input_gradient_kernel(lanes, shape.bits, width, rows, columns)
    return function, (*_sizes(shape), chunk, *strides), swapped


@functools.lru_cache(maxsize=4096)
def plan_weight_gradient(shape: Shape) -> tuple[Any, tuple[int, ...]]:
    """The kernel (x, g, dw, ...) and its last arguments."""
    lanes = lane_count(shape.bits)
    width = min(lanes, shape.devices)
    # rows are inputs here, which are often a power of two
    vectors = _vectors(shape.outputs, shape.groups, width, lanes)
    rows, columns = 4, tile_size(vectors)[1]
    if shape.inputs == shape.groups:
        rows, columns = 1, min(2 * tile_size()[1], 1 << (vectors - 1).bit_length())
    image = shape.height * shape.width * shape.inputs + shape.out_height * shape.out_width * shape.outputs
    image *= width * shape.bits // 8
    images = max(1, min(shape.batch, 2 * NEAR // image))
    lines = shape.out_height if image <= 2 * NEAR else max(1, shape.out_height * 2 * NEAR // image)
    return weight_gradient_kernel(lanes, shape.bits, width, rows, columns), (*_sizes(shape), images, lines)
