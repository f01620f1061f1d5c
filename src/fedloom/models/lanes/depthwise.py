"""Depthwise convolution of K devices: one filter for each (channel, device) pair, which are the lanes of vectors.

Maps are [batch, height, width, columns] and weights [kernel height, kernel width, columns], columns being channels
times devices. Every number is one chain of fused multiply-adds in one order, whatever the number of columns.
"""

import functools
from typing import Any

from .vectors import REVISION, kernel, load_each, masks, multiply_each, pointers, repeat, store_each, zeros


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
                        valid = repeat(rows, masks(lanes, 1, J - j, REVISION)[0])
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
                for xi in range(W):
                    for j in range(0, J, lanes):
                        valid = repeat(rows, masks(lanes, 1, J - j, REVISION)[0])
                        total = zeros(lanes, bits, rows)
                        for dy in range((yi + PH) % SH, KH, SH):
                            yo = (yi + PH - dy) // SH
                            if yo < 0 or yo >= HO:
                                continue
                            for dx in range((xi + PW) % SW, KW, SW):
                                xo = (xi + PW - dx) // SW
                                if xo < 0 or xo >= WO:
                                    continue
                                p = (yo * WO + xo) * near + j * size
                                q = (dy * KW + dx) * near + j * size
                                total = multiply_each(total, gp, repeat(rows, w), valid, p, q)
                        store_each(total, xp, valid, (yi * W + xi) * near + j * size)

    return depthwise_input_gradient


@functools.cache
def weight_gradient_kernel(lanes: int, bits: int, columns: int) -> Any:
    size = bits // 8
    span = lanes * size

    @kernel
    def depthwise_weight_gradient(x, g, dw, B, H, W, J, HO, WO, KH, KW, SH, SW, PH, PW):
        near, xb, yb = J * size, H * W * J * size, HO * WO * J * size
        for j in range(0, J, lanes * columns):
            valid = masks(lanes, columns, J - j, REVISION)
            xp, gp = (
                pointers(columns, x + j * size, span, 0, columns),
                pointers(columns, g + j * size, span, 0, columns),
            )
            wp = pointers(columns, dw + j * size, span, 0, columns)
            for dy in range(KH):
                y0, y1 = max(0, -((dy - PH) // SH)), min(HO, (H - 1 + PH - dy) // SH + 1)
                for dx in range(KW):
                    x0, x1 = max(0, -((dx - PW) // SW)), min(WO, (W - 1 + PW - dx) // SW + 1)
                    total = zeros(lanes, bits, columns)
                    for b in range(B):
                        for yo in range(y0, y1):
                            p = b * xb + ((yo * SH + dy - PH) * W + x0 * SW + dx - PW) * near
                            q = b * yb + (yo * WO + x0) * near
                            for _ in range(x0, x1):
                                total = multiply_each(total, xp, gp, valid, p, q)
                                p += SW * near
                                q += near
                    store_each(total, wp, valid, (dy * KW + dx) * near)

    return depthwise_weight_gradient
