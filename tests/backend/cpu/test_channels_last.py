"""Runs of pixels are those of the images, and zero beyond their ends."""

import numpy as np
import pytest

from kfac_engine.backend.cpu.shifted_gram import ChannelsLastLines, buffer_numbers

GAP = 3
SIDES = {"line": (7,), "plane": (3, 7), "volume": (2, 3, 7)}


def pixel_by_pixel(x, lines, pixels, shift):
    """``(*lines, len(pixels)·n, channels)``, read one number after another."""
    n, channels, *_, side = x.shape
    found = np.zeros((*map(len, lines), len(pixels), n, channels))
    for spot in np.ndindex(found.shape):
        *line, pixel, image, channel = spot
        at = pixels[pixel] + shift
        if 0 <= at < side:
            place = [some[i] for some, i in zip(lines, line, strict=True)]
            found[spot] = x[(image, channel, *place, at)]
    return found.reshape(*map(len, lines), -1, channels)


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("pixels", [range(7), range(1, 2), range(-GAP, 4), range(5, 7)], ids=str)
@pytest.mark.parametrize("apart", [1, 2])
def test_runs_contain_pixels_and_zeros_outside_line(sides, pixels, apart):
    shifts = 1 + (7 + GAP - pixels.stop) // apart
    lines = ChannelsLastLines(5, 4, sides, GAP, np.dtype(float))
    x = np.random.default_rng(0).standard_normal((5, 4, *sides))
    lines.fill(x)
    box = [range(1, side) for side in sides[:-1]]
    runs = lines.runs(box, pixels, shifts=shifts, apart=apart)
    for i in range(shifts):
        expected = pixel_by_pixel(x, box, pixels, i * apart)
        np.testing.assert_array_equal(runs[..., i, :, :], expected)


def test_unused_images_of_buffer_are_zero():
    lines = ChannelsLastLines(3, 2, (4, 5), 1, np.dtype(np.float32))
    x = np.random.default_rng(1).standard_normal((3, 2, 4, 5)).astype(np.float16)
    box, pixels = [range(4)], range(5)
    lines.fill(x)
    lines.fill(x[:1])
    wanted = np.concatenate([x[:1], np.zeros_like(x[1:])])
    found = lines.runs(box, pixels)[:, 0]
    np.testing.assert_array_equal(found, pixel_by_pixel(wanted, box, pixels, 0))


def test_buffer_numbers_equals_allocated_size():
    lines = ChannelsLastLines(3, 2, (4, 5), 2, np.dtype(float))
    everything = lines.runs([range(4)], range(-2, 5)).size + 2 * 3 * 2  # zeros behind the last line
    assert buffer_numbers(3, 2, (4, 5), 2) == everything
