"""Sums over maps and what normalizations make of them, with the (channel, device) pairs of a map in the lanes.

A map is [segments, rows, columns] in memory, columns being channels times devices. Batch norm has one segment, the
whole batch; group norm has one for each example. Every sum runs over rows in the same order for any number of columns.
NaN passes through everything: a diverged device must look diverged.

Kernels that differ in one pass are written out. Lanes and bits must be literals where a vector is loaded, and Numba
passes literals on to no function that a kernel calls.
"""

import functools
from typing import Any

from .convolution import tile_size
from .vectors import (
    add,
    add_pairs,
    div,
    fma,
    grid,
    kernel,
    largest,
    load,
    load_each,
    mask_of,
    masks,
    masks_inside,
    mul,
    plus,
    plus_squares,
    repeat_each,
    splat,
    sqrt,
    store,
    store_each,
    sub,
    times_each,
    where_above,
    where_each,
    where_equal,
    zeros,
)

NONE, RELU, RELU6 = 0, 1, 2
"""Activations that a normalization applies at once."""


@functools.cache
def column_sums(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def column_sums(x, total, segments, rows, columns, factor):
        """total[s, j] = factor * sum of x[s, :, j]"""
        row = columns * size
        for s in range(segments):
            for j in range(0, columns, lanes):
                valid = mask_of(lanes, columns - j)
                p = x + (s * rows * columns + j) * size
                a = b = c = d = splat(lanes, bits, 0.0)
                for _ in range(rows // 4):
                    a = add(a, load(bits, p, valid))
                    b = add(b, load(bits, p + row, valid))
                    c = add(c, load(bits, p + 2 * row, valid))
                    d = add(d, load(bits, p + 3 * row, valid))
                    p += 4 * row
                for _ in range(rows % 4):
                    a = add(a, load(bits, p, valid))
                    p += row
                found = mul(add(add(a, b), add(c, d)), splat(lanes, bits, factor))
                store(found, total + (s * columns + j) * size, valid)

    return column_sums


@functools.cache
def moments(lanes: int, bits: int, across: int) -> Any:
    size, count = bits // 8, 4 * across
    span = lanes * size

    @kernel
    def moments(x, mean, variance, segments, rows, columns):
        """The mean and biased variance of each column, in two passes. Four sums of each column, as in `column_sums`."""
        row = columns * size
        share = splat(lanes, bits, 1.0 / rows)
        for s in range(segments):
            for j in range(0, columns, lanes * across):
                valid = masks(lanes, across, columns - j)
                every, first = repeat_each(4, valid), masks_inside(4, valid, 0, 1)
                p = grid(4, across, x + (s * rows * columns + j) * size, row, span)
                at = 0
                total = zeros(lanes, bits, count)
                for _ in range(rows // 4):
                    total = plus(total, load_each(bits, p, every, at))
                    at += 4 * row
                for _ in range(rows % 4):
                    total = plus(total, load_each(bits, p, first, at))
                    at += row
                center = times_each(add_pairs(add_pairs(total, across), across), share)
                store_each(center, grid(1, across, mean + (s * columns + j) * size, 0, span), valid, 0)
                at = 0
                total = zeros(lanes, bits, count)
                for _ in range(rows // 4):
                    total = plus_squares(total, load_each(bits, p, every, at), center)
                    at += 4 * row
                for _ in range(rows % 4):
                    t = where_each(first, load_each(bits, p, first, at), repeat_each(4, center))
                    total = plus_squares(total, t, center)
                    at += row
                spread = times_each(add_pairs(add_pairs(total, across), across), share)
                store_each(spread, grid(1, across, variance + (s * columns + j) * size, 0, span), valid, 0)

    return moments


def moments_across(columns: int, lanes: int) -> int:
    """The vectors of neighboring columns that `moments` goes through at once: as many as the registers hold.

    Parameters
    ----------
    columns : how many columns there are.
    lanes : those of a vector.
    """
    return min(tile_size()[1], -(-columns // lanes))


@functools.cache
def scale_columns(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def scale_columns(x, scale, shift, y, segments, rows, columns, activation):
        """y = activation(x * scale + shift)"""
        zero, six = splat(lanes, bits, 0.0), splat(lanes, bits, 6.0)
        p = 0
        for s in range(segments):
            for _ in range(rows):
                for j in range(0, columns, lanes):
                    valid, q = mask_of(lanes, columns - j), (s * columns + j) * size
                    t = fma(
                        load(bits, x + p + j * size, valid), load(bits, scale + q, valid), load(bits, shift + q, valid)
                    )
                    if activation != 0:
                        t = where_above(t, zero, t, zero)
                        if activation == 2:
                            t = where_above(six, t, t, six)
                    store(t, y + p + j * size, valid)
                p += columns * size

    return scale_columns


@functools.cache
def gradient_sums(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def gradient_sums(g, x, center, scale, shift, total, weighted, segments, rows, columns, activation):
        """The sums of the gradient behind the activation, and of that times x - center."""
        zero, six = splat(lanes, bits, 0.0), splat(lanes, bits, 6.0)
        row = columns * size
        for s in range(segments):
            for j in range(0, columns, lanes):
                valid, q = mask_of(lanes, columns - j), (s * columns + j) * size
                m, f, h = load(bits, center + q, valid), load(bits, scale + q, valid), load(bits, shift + q, valid)
                a = b = a2 = b2 = zero
                p = (s * rows * columns + j) * size
                for _ in range(rows // 2):
                    t, d = load(bits, x + p, valid), load(bits, g + p, valid)
                    u, e = load(bits, x + p + row, valid), load(bits, g + p + row, valid)
                    if activation != 0:
                        z = fma(t, f, h)
                        d = where_above(z, zero, d, zero)
                        v = fma(u, f, h)
                        e = where_above(v, zero, e, zero)
                        if activation == 2:
                            d = where_above(six, z, d, zero)
                            e = where_above(six, v, e, zero)
                    a = add(a, d)
                    b = fma(d, sub(t, m), b)
                    a2 = add(a2, e)
                    b2 = fma(e, sub(u, m), b2)
                    p += 2 * row
                if rows % 2:
                    t, d = load(bits, x + p, valid), load(bits, g + p, valid)
                    if activation != 0:
                        z = fma(t, f, h)
                        d = where_above(z, zero, d, zero)
                        if activation == 2:
                            d = where_above(six, z, d, zero)
                    a = add(a, d)
                    b = fma(d, sub(t, m), b)
                store(add(a, a2), total + q, valid)
                store(add(b, b2), weighted + q, valid)

    return gradient_sums


@functools.cache
def gradient_columns(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def gradient_columns(g, x, scale, shift, slope, offset, plus, dx, segments, rows, columns, activation):
        """dx = scale * gradient behind the activation + slope * x + offset, and + plus if there is one."""
        zero, six = splat(lanes, bits, 0.0), splat(lanes, bits, 6.0)
        p = 0
        for s in range(segments):
            for _ in range(rows):
                for j in range(0, columns, lanes):
                    valid, q, at = mask_of(lanes, columns - j), (s * columns + j) * size, p + j * size
                    t, d, f = load(bits, x + at, valid), load(bits, g + at, valid), load(bits, scale + q, valid)
                    if activation != 0:
                        z = fma(t, f, load(bits, shift + q, valid))
                        d = where_above(z, zero, d, zero)
                        if activation == 2:
                            d = where_above(six, z, d, zero)
                    found = fma(d, f, fma(t, load(bits, slope + q, valid), load(bits, offset + q, valid)))
                    if plus != 0:
                        found = add(found, load(bits, plus + at, valid))
                    store(found, dx + at, valid)
                p += columns * size

    return gradient_columns


@functools.cache
def pool_columns(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def pool_columns(x, scale, shift, y, batch, height, width, columns, per_example):
        """The largest relu(x * scale + shift) of windows of 2 x 2. `per_example`: bytes from an example's scale to the
        next one's."""
        zero = splat(lanes, bits, 0.0)
        near, below = columns * size, width * columns * size
        q = y
        for b in range(batch):
            for i in range(height // 2):
                p = x + (b * height + 2 * i) * below
                for _ in range(width // 2):
                    for j in range(0, columns, lanes):
                        valid, at, k = mask_of(lanes, columns - j), p + j * size, b * per_example + j * size
                        f, h = load(bits, scale + k, valid), load(bits, shift + k, valid)
                        top = fma(load(bits, at, valid), f, h)
                        t = fma(load(bits, at + near, valid), f, h)
                        top = largest(top, t)
                        t = fma(load(bits, at + below, valid), f, h)
                        top = largest(top, t)
                        t = fma(load(bits, at + below + near, valid), f, h)
                        top = largest(top, t)
                        store(where_above(top, zero, top, zero), q + j * size, valid)
                    p += 2 * near
                    q += near

    return pool_columns


@functools.cache
def pool_gradient_sums(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def pool_gradient_sums(g, x, y, center, scale, shift, total, weighted, segments, batch, height, width, columns):
        """As `gradient_sums`; a window's gradient goes to the first of its largest numbers, if that is above zero."""
        zero = splat(lanes, bits, 0.0)
        near, below, lines, across = columns * size, width * columns * size, height // 2, width // 2
        examples = batch // segments
        for s in range(segments):
            for j in range(0, columns, lanes):
                valid, k = mask_of(lanes, columns - j), (s * columns + j) * size
                m, f, h = load(bits, center + k, valid), load(bits, scale + k, valid), load(bits, shift + k, valid)
                a = c = zero
                for b in range(s * examples, (s + 1) * examples):
                    for i in range(lines):
                        p = x + (b * height + 2 * i) * below + j * size
                        q = ((b * lines + i) * across * columns + j) * size
                        for _ in range(across):
                            x0, x1 = load(bits, p, valid), load(bits, p + near, valid)
                            x2, x3 = load(bits, p + below, valid), load(bits, p + below + near, valid)
                            top = load(bits, y + q, valid)
                            d = where_above(top, zero, load(bits, g + q, valid), zero)
                            t = where_equal(fma(x2, f, h), top, x2, x3)
                            t = where_equal(fma(x1, f, h), top, x1, t)
                            t = where_equal(fma(x0, f, h), top, x0, t)
                            a = add(a, d)
                            c = fma(d, sub(t, m), c)
                            p += 2 * near
                            q += near
                store(a, total + k, valid)
                store(c, weighted + k, valid)

    return pool_gradient_sums


@functools.cache
def pool_gradient_columns(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def pool_gradient_columns(g, x, y, scale, shift, slope, offset, dx, batch, height, width, columns, per_example):
        zero = splat(lanes, bits, 0.0)
        near, below, lines, across = columns * size, width * columns * size, height // 2, width // 2
        for b in range(batch):
            for i in range(lines):
                p = (b * height + 2 * i) * below
                q = (b * lines + i) * across * columns * size
                for _ in range(across):
                    for j in range(0, columns, lanes):
                        valid, k = mask_of(lanes, columns - j), b * per_example + j * size
                        f, h = load(bits, scale + k, valid), load(bits, shift + k, valid)
                        u, v = load(bits, slope + k, valid), load(bits, offset + k, valid)
                        top = load(bits, y + q + j * size, valid)
                        d = where_above(top, zero, load(bits, g + q + j * size, valid), zero)
                        d = mul(d, f)
                        at = p + j * size
                        t = load(bits, x + at, valid)
                        e = where_equal(fma(t, f, h), top, d, zero)
                        d = sub(d, e)
                        store(fma(t, u, add(v, e)), dx + at, valid)
                        t = load(bits, x + at + near, valid)
                        e = where_equal(fma(t, f, h), top, d, zero)
                        d = sub(d, e)
                        store(fma(t, u, add(v, e)), dx + at + near, valid)
                        t = load(bits, x + at + below, valid)
                        e = where_equal(fma(t, f, h), top, d, zero)
                        d = sub(d, e)
                        store(fma(t, u, add(v, e)), dx + at + below, valid)
                        t = load(bits, x + at + below + near, valid)
                        store(fma(t, u, add(v, d)), dx + at + below + near, valid)
                    p += 2 * near
                    q += near
            for i in range(height):  # what no window covers: the last line or column of an odd map
                for c in range(0 if height % 2 and i == height - 1 else 2 * across, width):
                    for j in range(0, columns, lanes):
                        valid, k = mask_of(lanes, columns - j), b * per_example + j * size
                        at = ((b * height + i) * width + c) * near + j * size
                        t = load(bits, x + at, valid)
                        store(fma(t, load(bits, slope + k, valid), load(bits, offset + k, valid)), dx + at, valid)

    return pool_gradient_columns


@functools.cache
def norm_coefficients(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def norm_coefficients(mean, variance, weight, bias, root, scale, shift, segments, channels, devices, group, eps):
        """From the moments of columns to those of groups of channels, which replace the means; root = 1 / sqrt(variance
        + eps), and scale and shift of x."""
        one, share, small = splat(lanes, bits, 1.0), splat(lanes, bits, 1.0 / group), splat(lanes, bits, eps)
        unit = devices * size
        for s in range(segments):
            for first in range(0, channels, group):
                for v in range(0, devices, lanes):
                    valid, base = mask_of(lanes, devices - v), (s * channels + first) * unit + v * size
                    m = load(bits, mean + base, valid)
                    spread = load(bits, variance + base, valid)
                    if group > 1:
                        for c in range(1, group):
                            m = add(m, load(bits, mean + base + c * unit, valid))
                        m = mul(m, share)
                        spread = splat(lanes, bits, 0.0)
                        for c in range(group):
                            t = sub(load(bits, mean + base + c * unit, valid), m)
                            spread = add(spread, fma(t, t, load(bits, variance + base + c * unit, valid)))
                        spread = mul(spread, share)
                    r = div(one, sqrt(add(spread, small)))
                    for c in range(group):
                        p, q = base + c * unit, (first + c) * unit + v * size
                        f = r
                        if weight != 0:
                            f = mul(r, load(bits, weight + q, valid))
                        h = mul(m, f)
                        h = sub(load(bits, bias + q, valid), h) if bias != 0 else sub(splat(lanes, bits, 0.0), h)
                        store(m, mean + p, valid)
                        store(r, root + p, valid)
                        store(f, scale + p, valid)
                        store(h, shift + p, valid)

    return norm_coefficients


@functools.cache
def norm_gradients(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def norm_gradients(
        total, weighted, mean, root, weight, dw, db, slope, offset, segments, channels, devices, group, share
    ):
        """The gradients of weight and bias, and slope and offset of x in its own. share: 1 / numbers of a group, or 0
        if the statistics are constants."""
        unit, part, zero = devices * size, splat(lanes, bits, share), splat(lanes, bits, 0.0)
        for s in range(segments):
            for first in range(0, channels, group):
                for v in range(0, devices, lanes):
                    valid, base = mask_of(lanes, devices - v), (s * channels + first) * unit + v * size
                    r, m = load(bits, root + base, valid), load(bits, mean + base, valid)
                    a = b = zero
                    for c in range(group):
                        p, q = base + c * unit, (first + c) * unit + v * size
                        t, u = load(bits, total + p, valid), mul(load(bits, weighted + p, valid), r)
                        if dw != 0:
                            store(u if s == 0 else add(load(bits, dw + q, valid), u), dw + q, valid)
                        if db != 0:
                            store(t if s == 0 else add(load(bits, db + q, valid), t), db + q, valid)
                        if weight != 0:
                            f = load(bits, weight + q, valid)
                            t, u = mul(t, f), mul(u, f)
                        a, b = add(a, t), add(b, u)
                    k = sub(zero, mul(mul(r, r), mul(b, part)))
                    h = sub(zero, fma(k, m, mul(r, mul(a, part))))
                    for c in range(group):
                        store(k, slope + base + c * unit, valid)
                        store(h, offset + base + c * unit, valid)

    return norm_gradients


@functools.cache
def parametric_coefficients(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def parametric_coefficients(mean, variance, weight, center, bias, root, scale, shift, segments, columns, eps):
        """For FedSup's normalization: root mean square of x - center; a column that equals its center has scale 0."""
        one, zero, small = splat(lanes, bits, 1.0), splat(lanes, bits, 0.0), splat(lanes, bits, eps)
        for s in range(segments):
            for j in range(0, columns, lanes):
                valid, p, q = mask_of(lanes, columns - j), (s * columns + j) * size, j * size
                m = load(bits, center + q, valid)
                t = sub(load(bits, mean + p, valid), m)
                square = fma(t, t, load(bits, variance + p, valid))
                r = sqrt(where_equal(square, zero, one, square))
                f = where_equal(square, zero, zero, div(load(bits, weight + q, valid), add(r, small)))
                store(r, root + p, valid)
                store(f, scale + p, valid)
                store(sub(load(bits, bias + q, valid), mul(m, f)), shift + p, valid)

    return parametric_coefficients


@functools.cache
def parametric_gradients(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def parametric_gradients(
        total, weighted, mean, root, scale, center, dw, dc, db, slope, offset, segments, columns, rows, eps
    ):
        zero, small, count = splat(lanes, bits, 0.0), splat(lanes, bits, eps), splat(lanes, bits, rows)
        for s in range(segments):
            for j in range(0, columns, lanes):
                valid, p, q = mask_of(lanes, columns - j), (s * columns + j) * size, j * size
                a, b, r = load(bits, total + p, valid), load(bits, weighted + p, valid), load(bits, root + p, valid)
                f, m = load(bits, scale + p, valid), load(bits, center + q, valid)
                # of a constant column root is 1, weighted and scale are 0: no gradient but that of the bias
                inverse = div(splat(lanes, bits, 1.0), add(r, small))
                w = mul(b, inverse)
                k = sub(zero, div(mul(mul(b, f), inverse), mul(r, count)))
                moved = mul(count, sub(load(bits, mean + p, valid), m))
                c = sub(zero, fma(f, a, mul(k, moved)))
                store(k, slope + p, valid)
                store(sub(zero, mul(k, m)), offset + p, valid)
                if s > 0:
                    w, c = add(w, load(bits, dw + q, valid)), add(c, load(bits, dc + q, valid))
                    a = add(a, load(bits, db + q, valid))
                store(w, dw + q, valid)
                store(c, dc + q, valid)
                store(a, db + q, valid)

    return parametric_gradients
