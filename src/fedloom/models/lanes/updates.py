"""SGD and Adam in one pass over the weights of K devices, devices innermost in memory.

Coefficients are one number per device, repeated to fill a vector. A device whose `active` is 0 keeps weights and state
bit for bit, whatever its gradient. The sum of squares for clipping has sixteen partial sums for each device, so that it
does not depend on K.
"""

import functools
from typing import Any

from .vectors import (
    add,
    div,
    fma,
    kernel,
    load,
    load_integer,
    mask_of,
    mul,
    splat,
    sqrt,
    store,
    sub,
    where_equal,
)

PARTS = 16
"""Partial sums of squares of a device: entries n, n + 16, n + 32, ... of a weight."""

RUN = 256
"""Entries of a partial sum that are added up before they are added to the total, for precision."""


@functools.cache
def sum_squares(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def sum_squares(weights, count, total, devices):
        """total[part, k] += squares of g[part + 16 n, k] for each of `count` weights: pairs of the address of its
        gradient g and the entries of a device."""
        wide, zero = PARTS * devices, splat(lanes, bits, 0.0)
        for pair in range(weights, weights + 16 * count, 16):
            g, numbers = load_integer(pair), load_integer(pair + 8) * devices
            for first in range(0, numbers, RUN * wide):
                last = min(numbers, first + RUN * wide)
                for j in range(0, wide, lanes):
                    every, a = mask_of(lanes, wide - j), zero
                    for at in range(first + j, last, wide):
                        t = load(bits, g + at * size, mask_of(lanes, min(last - at, wide - j)))
                        a = fma(t, t, a)
                    store(add(load(bits, total + j * size, every), a), total + j * size, every)

    return sum_squares


@functools.cache
def sgd(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def sgd(w, g, velocity, active, keep, clip, decay, rate, wide, numbers):
        """velocity = keep * velocity + clip * g + decay * w; w += rate * velocity"""
        zero = splat(lanes, bits, 0.0)
        for v in range(0, wide, lanes):
            every, q = mask_of(lanes, wide - v), v * size
            on, k, c = load(bits, active + q, every), load(bits, keep + q, every), load(bits, clip + q, every)
            d, r = load(bits, decay + q, every), load(bits, rate + q, every)
            for at in range(v, numbers, wide):
                valid, p = mask_of(lanes, numbers - at), at * size
                x, m = load(bits, w + p, valid), load(bits, velocity + p, valid)
                t = fma(d, x, fma(c, load(bits, g + p, valid), mul(k, m)))
                store(where_equal(on, zero, m, t), velocity + p, valid)
                store(where_equal(on, zero, x, fma(r, t, x)), w + p, valid)

    return sgd


@functools.cache
def adam(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def adam(w, g, mean, square, active, clip, unbias, unbias_square, rate, wide, numbers, beta1, beta2, decay, eps):
        """unbias: 1 / (1 - beta ** steps) of each device; rate is negative."""
        zero, small, weight = splat(lanes, bits, 0.0), splat(lanes, bits, eps), splat(lanes, bits, decay)
        new1, new2 = splat(lanes, bits, 1.0 - beta1), splat(lanes, bits, 1.0 - beta2)
        for v in range(0, wide, lanes):
            every, q = mask_of(lanes, wide - v), v * size
            on, c, r = load(bits, active + q, every), load(bits, clip + q, every), load(bits, rate + q, every)
            u1, u2 = load(bits, unbias + q, every), load(bits, unbias_square + q, every)
            for at in range(v, numbers, wide):
                valid, p = mask_of(lanes, numbers - at), at * size
                x, m, s = load(bits, w + p, valid), load(bits, mean + p, valid), load(bits, square + p, valid)
                t = fma(weight, x, mul(c, load(bits, g + p, valid)))
                a = fma(new1, sub(t, m), m)
                b = fma(new2, sub(mul(t, t), s), s)
                moved = fma(r, div(mul(a, u1), add(sqrt(mul(b, u2)), small)), x)
                store(where_equal(on, zero, m, a), mean + p, valid)
                store(where_equal(on, zero, s, b), square + p, valid)
                store(where_equal(on, zero, x, moved), w + p, valid)

    return adam
