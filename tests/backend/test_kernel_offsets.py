"""Products of lines add up to the pixels that each pair of taps sees."""

from collections import Counter
from itertools import pairwise, product

import pytest

from kfac_engine.backend.kernel_offsets import border_strips, line_products
from tests.backend.geometries import CORNERS, STRIDE_ONE, nightly_but_covering

CASES = nightly_but_covering(
    [case for case in [*CORNERS, *STRIDE_ONE[::3]] if set(case.window.strides) == {1}]
)


def seen_together(case, u, v):
    """Pixels under tap ``v``, of all outputs whose taps ``u`` and ``v`` are on the image."""
    window, found = case.window, Counter()
    for output in product(*map(range, window.output_shape(case.sides))):
        first, second = (
            tuple(
                o + t * d - b
                for o, t, d, b in zip(output, tap, window.dilations, window.begins, strict=True)
            )
            for tap in (u, v)
        )
        if all(
            0 <= p < side and 0 <= q < side
            for p, q, side in zip(first, second, case.sides, strict=True)
        ):
            found[second] += 1
    return found


def counted(case, group, block):
    """Pixels that the products of a block count, those with a partner on the image."""
    found = Counter()
    for index, along, sign in block.terms:
        part = group.products[index]
        apart = (part.alongs[along]) * case.window.dilations[-1]
        for *line, pixel in product(*part.lines, part.pixels):
            if 0 <= pixel + apart < case.sides[-1]:
                found[*line, pixel] += sign
    return Counter({pixel: count for pixel, count in found.items() if count})


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_terms_of_block_count_pixels_seen_by_taps(case, joined):
    groups = line_products(case.window, case.sides, joined=joined)
    taps = list(product(*map(range, case.window.kernel)))
    blocks = [(block.u, block.v) for group in groups for block in group.blocks]
    assert sorted(blocks) == sorted((u, v) for u in taps for v in taps if v <= u)
    for group in groups:
        for block in group.blocks:
            assert counted(case, group, block) == seen_together(case, block.u, block.v)


@pytest.mark.parametrize("case", CASES)
def test_border_strips_are_disjoint_and_contain_partners(case):
    groups = line_products(case.window, case.sides, joined=True)
    strips = border_strips(groups)
    assert all(a.stop <= b.start for a, b in pairwise(strips))
    for part in (part for group in groups for part in group.products if part.sign < 0):
        both = {*part.pixels, *part.partners}
        assert sum(both <= set(strip) for strip in strips) == 1
