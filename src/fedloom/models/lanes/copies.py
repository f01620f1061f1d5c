"""Copy blocks of numbers between weights that lie in memory as the kernels want them: many blocks in one call."""

import functools
from typing import Any

from .vectors import add, kernel, load, load_integer, mask_of, store


@functools.cache
def copy_blocks(lanes: int, bits: int) -> Any:
    size = bits // 8

    @kernel
    def copy_blocks(x, y, blocks, count, adds):
        """y = x, or y = y + x, in each of `count` blocks: twelve integers each. They are where it begins in x and in y;
        its sizes along three axes, and the numbers of a run along the innermost one; the bytes from one entry of each
        of the three axes to the next, in x and in y."""
        for at in range(blocks, blocks + 96 * count, 96):
            x0, y0, run = x + load_integer(at), y + load_integer(at + 8), load_integer(at + 40)
            n0, n1, n2 = load_integer(at + 16), load_integer(at + 24), load_integer(at + 32)
            xs0, xs1, xs2 = load_integer(at + 48), load_integer(at + 56), load_integer(at + 64)
            ys0, ys1, ys2 = load_integer(at + 72), load_integer(at + 80), load_integer(at + 88)
            for i0 in range(n0):
                for i1 in range(n1):
                    p, q = x0 + i0 * xs0 + i1 * xs1, y0 + i0 * ys0 + i1 * ys1
                    for _ in range(n2):
                        for j in range(0, run, lanes):
                            valid = mask_of(lanes, run - j)
                            t = load(bits, p + j * size, valid)
                            if adds != 0:
                                t = add(t, load(bits, q + j * size, valid))
                            store(t, q + j * size, valid)
                        p += xs2
                        q += ys2

    return copy_blocks
