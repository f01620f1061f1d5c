"""Depthwise convolution of K devices: one filter for each (channel, device) pair, which are the lanes of vectors.

Maps are [batch, height, width, columns] and weights [kernel height, kernel width, columns], columns being channels
times devices. Every number is one chain of fused multiply-adds in one order, whatever the number of columns.
"""

import functools
from typing import Any

from .convolution import tile_size
from .vectors import (
    grid,
    kernel,
    load_each,
    masks,
    masks_inside,
    multiply_each,
    pointers,
    repeat,
    repeat_each,
    store_each,
    zeros,
)

EXAMPLES = 2
"""Examples at a time in the forward pass: few, so that what several taps read of them stays in the cache."""


@functools.cache
def forward_kernel(lanes: int, bits: int, rows: int) -> Any:
    size = bits // 8

    @kernel
    def depthwise_forward(x, w, bias, y, B, H, W, J, HO, WO, KH, KW, SH, SW, PH, PW):
        near, xb, yb = J * size, H * W * J * size, HO * WO * J * size
        for b in range(0, B, rows):
            xp, yp = pointers(rows, x, xb, b, B - 1), pointers(rows, y, yb, b, B - 1)
            for yo in range(HO):
                dy0, dy1 = max(0, PH - yo * SH), min(KH, H + PH - yo * SH)
                for xo in range(WO):
                    dx0, dx1 = max(0, PW - xo * SW), min(KW, W + PW - xo * SW)
                    for j in range(0, J, lanes):
                        valid = repeat(rows, masks(lanes, 1, J - j)[0])
                        if bias != 0:
                            total = load_each(bits, repeat(rows, bias + j * size), valid, 0)
                        else:
                            total = zeros(lanes, bits, rows)
                        for dy in range(dy0, dy1):
                            p = ((yo * SH + dy - PH) * W + xo * SW + dx0 - PW) * near + j * size
                            q = (dy * KW + dx0) * near + j * size
                            for _ in range(dx0, dx1):
                                total = multiply_each(total, xp, repeat(rows, w), valid, p, q)
                                p += near
                                q += near
                        store_each(total, yp, valid, (yo * WO + xo) * near + j * size)

    return depthwise_forward


@functools.cache
def input_gradient_kernel(lanes: int, bits: int, rows: int) -> Any:
    size = bits // 8

    @kernel
    def depthwise_input_gradient(g, w, dx_, B, H, W, J, HO, WO, KH, KW, SH, SW, PH, PW):
        near, xb, yb = J * size, H * W * J * size, HO * WO * J * size
        for b in range(0, B, rows):
            gp, xp = pointers(rows, g, yb, b, B - 1), pointers(rows, dx_, xb, b, B - 1)
            for yi in range(H):
                # of the taps that meet an output, the first whose output is in the map, and the end
                dy0, dy1 = (yi + PH) % SH + max(0, (yi + PH) // SH - HO + 1) * SH, min(KH, yi + PH + 1)
                for xi in range(W):
                    dx0, dx1 = (xi + PW) % SW + max(0, (xi + PW) // SW - WO + 1) * SW, min(KW, xi + PW + 1)
                    for j in range(0, J, lanes):
                        valid = repeat(rows, masks(lanes, 1, J - j)[0])
                        total = zeros(lanes, bits, rows)
                        for dy in range(dy0, dy1, SH):
                            p = ((yi + PH - dy) // SH * WO + (xi + PW - dx0) // SW) * near + j * size
                            q = (dy * KW + dx0) * near + j * size
                            for _ in range(dx0, dx1, SW):
                                total = multiply_each(total, gp, repeat(rows, w), valid, p, q)
                                p -= near
                                q += SW * near
                        store_each(total, xp, valid, (yi * W + xi) * near + j * size)

    return depthwise_input_gradient


@functools.cache
def weight_gradient_kernel(lanes: int, bits: int, taps: int, columns: int) -> Any:
    size, count = bits // 8, taps * columns
    span = lanes * size
    edge = 1 if taps > 1 else 0  # at the edges of a map some of several taps are outside

    @kernel
    def depthwise_weight_gradient(x, g, dw, B, H, W, J, HO, WO, KH, KW, SH, SW, PH, PW):
        """`taps`, which KW is a multiple of, at a time: they share what is read of the gradient."""
        near, xb = J * size, H * W * J * size
        for j in range(0, J, lanes * columns):
            valid = masks(lanes, columns, J - j)
            every = repeat_each(taps, valid)
            for dy in range(KH):
                y0, y1 = max(0, -((dy - PH) // SH)), min(HO, (H - 1 + PH - dy) // SH + 1)
                for dx in range(0, KW, taps):
                    first = dx - PW  # where the taps of the first output lie
                    x0, x1 = min(WO, max(0, -(first // SW))), min(WO, (W - first - taps) // SW + 1)
                    x1 = max(x0, x1)
                    total = zeros(lanes, bits, count)
                    for b in range(B):
                        for yo in range(y0, y1):
                            p = x + b * xb + ((yo * SH + dy - PH) * W + first) * near + j * size
                            q = g + (b * HO + yo) * WO * near + j * size
                            xp = grid(taps, columns, p, near, span)
                            gp = grid(taps, columns, q, 0, span)
                            for xo in range(edge * x0):
                                inside = masks_inside(taps, valid, xo * SW + first, W)
                                total = multiply_each(total, xp, gp, inside, xo * SW * near, xo * near)
                            for xo in range(x0, x1):
                                total = multiply_each(total, xp, gp, every, xo * SW * near, xo * near)
                            for xo in range(WO - edge * (WO - x1), WO):
                                inside = masks_inside(taps, valid, xo * SW + first, W)
                                total = multiply_each(total, xp, gp, inside, xo * SW * near, xo * near)
                    store_each(total, grid(taps, columns, dw + j * size, near, span), every, (dy * KW + dx) * near)

    return depthwise_weight_gradient


def tap_tile(taps: int, outputs: int, vectors: int) -> tuple[int, int]:
    """How many taps of a line, and vectors of channels, a weight's gradient is summed up for at a time.

    Parameters
    ----------
    taps : the taps of a line.
    outputs : the pixels of an output's line, most of which all taps have to reach.
    vectors : the vectors that hold all channels.
    """
    rows, columns = tile_size()
    if outputs < 2 * taps or taps > rows * columns // 2:
        return 1, min(vectors, 2 * columns)
    return taps, min(vectors, rows * columns // taps)
