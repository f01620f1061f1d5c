"""Convolutions of 3 x 3 by fewer products. Lavin & Gray, Fast Algorithms for Convolutional Neural Networks, 2016.

Tiles of m x m outputs are computed from (m + 2) x (m + 2) inputs. Tiles and kernels are transformed, multiplied entry
by entry, summed over input channels, and transformed back: (m + 2)^2 products instead of 9 m^2. Rounding errors are
several times those of direct sums, so this is for evaluation alone. Which m there is depends on the sizes of the layer
only, and every number is made in one order, so it depends neither on K nor on the batch.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

from .convolution import NEAR, Shape, channels_near, lane_count, tile_size
from .vectors import (
    add_each,
    kernel,
    load,
    load_each,
    load_window,
    mask_of,
    masks,
    multiply_add,
    pointers,
    repeat,
    store_each,
    store_tile,
    store_window,
    transform,
    zeros,
)

KERNEL = 3
POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), Fraction(1, 2))
"""Where polynomials are evaluated, besides infinity: the first of them for smaller tiles."""

TILES = (2, 3, 4, 5)
LEAST = 32
"""Channels in and out from which on it is faster than direct sums."""

NEAR_TILES, LEAST_TILES = 16 * NEAR, 60
"""Transformed tiles at a time: bytes that stay in the cache, and how many make it worth to read the weights again."""


class Matrices(NamedTuple):
    """Of inputs [m + 2, m + 2], weights [m + 2, 3] and outputs [m, m + 2], as `vectors.transform` takes them."""

    inputs: str
    weights: str
    outputs: str


@functools.cache
def transforms(m: int) -> Matrices:
    """The matrices of the algorithm of Cook and Toom.

    Parameters
    ----------
    m : outputs of a tile, in a row.
    """
    points = list(POINTS[: m + 1])
    others = [[other for other in points if other != point] for point in points]
    scales = [math.prod(point - other for other in rest) for point, rest in zip(points, others, strict=True)]
    inputs = [_polynomial(roots, m + 2) for roots in (*others, points)]
    weights = [[point**power / scale for power in range(KERNEL)] for point, scale in zip(points, scales, strict=True)]
    outputs = [[*(point**power for point in points), Fraction(power == m - 1)] for power in range(m)]
    return Matrices(_text(inputs), _text([*weights, [Fraction(0), Fraction(0), Fraction(1)]]), _text(outputs))


def _polynomial(roots: list[Fraction], length: int) -> list[Fraction]:
    """The coefficients of a product of x - root, from the constant on."""
    found = [Fraction(1)]
    for root in roots:
        found = [before - root * own for before, own in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found + [Fraction(0)] * (length - len(found))


def _text(matrix: list[list[Fraction]]) -> str:
    return ";".join(" ".join(map(str, row)) for row in matrix)


def find_tile(shape: Shape) -> int | None:
    """The smallest m, which rounds least, with few products for maps of this size; None if direct sums are better.

    Parameters
    ----------
    shape : the convolution.
    """
    fits = shape.kernel == (KERNEL, KERNEL) and shape.stride == (1, 1) and shape.groups == 1
    if not fits or min(shape.inputs, shape.outputs) < LEAST:
        return None
    products = {m: math.prod(tile_grid(shape, m)) * (m + 2) ** 2 for m in TILES}
    fewest = min(products.values())
    if fewest * 4 > _direct_products(shape) * 3:
        return None
    return next(m for m in TILES if products[m] * 10 <= fewest * 11)


def tile_grid(shape: Shape, m: int) -> tuple[int, int]:
    """The tiles of an example, down and across.

    Parameters
    ----------
    shape : the convolution.
    m : outputs of a tile, in a row.
    """
    return -(-shape.out_height // m), -(-shape.out_width // m)


def _direct_products(shape: Shape) -> int:
    """Of a pair of channels, without those with the padding."""
    sizes = zip((shape.height, shape.width), (shape.out_height, shape.out_width), shape.padding, strict=True)
    return math.prod(sum(0 <= y + d - pad < n for y in range(out) for d in range(KERNEL)) for n, out, pad in sizes)


@functools.cache
def weight_kernel(lanes: int, bits: int, m: int) -> Any:
    size, points, matrix = bits // 8, (m + 2) ** 2, transforms(m).weights

    @kernel
    def transform_weights(w, u, J):
        """[3, 3, J] -> [points, J]"""
        wp, up = pointers(9, w, J * size, 0, 9), pointers(points, u, J * size, 0, points)
        for j in range(0, J, lanes):
            valid = mask_of(lanes, J - j)
            tile = transform(load_each(bits, wp, repeat(9, valid), j * size), matrix)
            store_each(tile, up, repeat(points, valid), j * size)

    return transform_weights


@functools.cache
def input_kernel(lanes: int, bits: int, m: int) -> Any:
    size, points, window, matrix = bits // 8, (m + 2) ** 2, m + 2, transforms(m).inputs

    @kernel
    def transform_inputs(x, v, first, last, H, W, J, down, across, PH, PW):
        """Tiles from first to last of maps [batch, H, W, J] -> [points, tiles, J]"""
        near = J * size
        for t in range(first, last):
            b, place = t // (down * across), t % (down * across)
            y0, x0 = place // across * m - PH, place % across * m - PW
            vp = pointers(points, v + (t - first) * near, (last - first) * near, 0, points)
            for j in range(0, J, lanes):
                valid = mask_of(lanes, J - j)
                at = x + b * H * W * near + j * size
                tile = load_window(bits, window, window, at, W * near, near, y0, x0, H, W, valid)
                store_each(transform(tile, matrix), vp, repeat(points, valid), j * size)

    return transform_inputs


@functools.cache
def product_kernel(lanes: int, bits: int, width: int, rows: int, columns: int) -> Any:
    size = bits // 8
    channels, count = lanes // width, rows * columns

    @kernel
    def multiply_tiles(v, u, r, points, T, C, O, K, chunk):
        """[points, T, C, K] and [points, C, O, K] -> [points, T, O, K]"""
        unit = K * size
        for point in range(points):
            for s in range(0, K, width):
                vs, us, rs = (
                    v + point * T * C * unit + s * size,
                    u + point * C * O * unit + s * size,
                    r + point * T * O * unit + s * size,
                )
                for oc in range(0, O, chunk):
                    for t in range(0, T, rows):
                        vp, rp = pointers(rows, vs, C * unit, t, T - 1), pointers(rows, rs, O * unit, t, T - 1)
                        for o in range(oc, min(O, oc + chunk), columns * channels):
                            valid = masks(lanes, columns, (O - o) * width)
                            up = pointers(columns, us + o * unit, channels * unit, 0, columns)
                            total = zeros(lanes, bits, count)
                            p = q = 0
                            for _ in range(C):
                                total = multiply_add(total, vp, up, valid, p, q, width)
                                p += unit
                                q += O * unit
                            store_tile(total, rp, pointers(columns, o * unit, channels * unit, 0, columns), valid)

    return multiply_tiles


@functools.cache
def output_kernel(lanes: int, bits: int, m: int) -> Any:
    size, points, matrix = bits // 8, (m + 2) ** 2, transforms(m).outputs

    @kernel
    def transform_outputs(r, bias, y, first, last, H, W, J, down, across):
        """[points, tiles, J] -> tiles from first to last of maps [batch, H, W, J]"""
        near = J * size
        for t in range(first, last):
            b, place = t // (down * across), t % (down * across)
            y0, x0 = place // across * m, place % across * m
            rp = pointers(points, r + (t - first) * near, (last - first) * near, 0, points)
            for j in range(0, J, lanes):
                valid = mask_of(lanes, J - j)
                tile = transform(load_each(bits, rp, repeat(points, valid), j * size), matrix)
                if bias != 0:
                    tile = add_each(tile, load(bits, bias + j * size, valid))
                at = y + b * H * W * near + j * size
                store_window(tile, m, m, at, W * near, near, y0, x0, H, W, valid)

    return transform_outputs


class Plan:
    """A convolution by tiles, for so many devices.

    Parameters
    ----------
    shape : the convolution.
    m : outputs of a tile, in a row.
    """

    def __init__(self, shape: Shape, m: int):
        lanes, bits, devices = lane_count(shape.bits), shape.bits, shape.devices
        width = min(lanes, devices)
        rows, columns = tile_size()
        self.points, self.size = (m + 2) ** 2, bits // 8
        self.weights = weight_kernel(lanes, bits, m)
        self.inputs, self.outputs = input_kernel(lanes, bits, m), output_kernel(lanes, bits, m)
        self.product = product_kernel(lanes, bits, width, rows, columns)
        grid = tile_grid(shape, m)
        self.tiles = shape.batch * math.prod(grid)
        self.input_sizes = shape.height, shape.width, shape.inputs * devices, *grid, *shape.padding
        self.output_sizes = shape.out_height, shape.out_width, shape.outputs * devices, *grid
        self.product_sizes = (
            shape.inputs, shape.outputs, devices, channels_near(shape.inputs, lanes // width, columns)
        )  # fmt: skip
        self.weight_numbers = shape.inputs * shape.outputs * devices
        numbers = self.points * (shape.inputs + shape.outputs) * devices
        fitting = max(LEAST_TILES, NEAR_TILES // (numbers * self.size)) // rows * rows
        self.step = min(self.tiles, fitting)
        self.scratch = numbers * self.step  # transformed inputs, then products
        self.products_at = self.points * shape.inputs * devices * self.step * self.size

    def transform_weights(self, weight: int, found: int) -> None:
        """[3, 3, inputs, outputs, K] -> [points, inputs, outputs, K], given by their addresses.

        Parameters
        ----------
        weight : the weight.
        found : where the result goes.
        """
        self.weights(weight, found, self.weight_numbers)

    def __call__(self, x: int, weight: int, bias: int, y: int, scratch: int) -> None:
        """Compute all outputs; arguments are addresses.

        Parameters
        ----------
        x : the inputs.
        weight : the transformed weight.
        bias : the bias; 0: none.
        y : where the outputs go.
        scratch : memory for `scratch` numbers.
        """
        products = scratch + self.products_at
        for first in range(0, self.tiles, self.step):
            last = min(self.tiles, first + self.step)
            self.inputs(x, scratch, first, last, *self.input_sizes)
            self.product(scratch, weight, products, self.points, last - first, *self.product_sizes)
            self.outputs(products, bias, y, first, last, *self.output_sizes)
