import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models.charts import HEIGHT, SPOTS, WIDTH, Series, histogram, line_chart, location_chart, number, ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0"),
        (-0.12345, "−0.123"),
        (12.0, "12"),
        (1234567, "1,234,567"),
        (512.37, "512.4"),
        (0.00012, "1.20e−04"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_few_and_inside(low, width):
    places = ticks(low, low + width)
    assert 1 <= len(places) <= 6
    assert all(low - 1e-6 * width <= x <= low + width + 1e-6 * width for x in places)


def test_ticks_of_a_plain_range():
    assert ticks(0, 1) == [0, 0.5, 1] or ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 100) == [0, 50, 100] or ticks(0, 100) == [0, 20, 40, 60, 80, 100]


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=30))
def test_every_finite_point_is_drawn_inside(points):
    svg = line_chart([Series("loss", points)], label="loss")
    drawn = re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    assert len(drawn) == sum(math.isfinite(y) for _, y in points)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in drawn)


def test_names_are_escaped():
    svg = line_chart([Series('<b>"x"', [(0, 1), (1, 2)])], label='"><script>')
    assert "<b>" not in svg and "<script>" not in svg


def test_a_location_chart_draws_bins_curve_and_band_in_the_frame():
    svg = location_chart([(0.1, -1.0, 5), (1.0, 0.5, 50)], lambda p: math.log(p) / 2, label="mean", band=lambda p: 1.0)
    assert svg.count("<circle") == 2 and svg.count("<polygon") == 1
    ys = [float(y) for y in re.findall(r"[\d.]+,([-\d.]+)", svg)]
    assert all(0 <= y <= HEIGHT for y in ys)
    assert "location 0.1: −1 (5 rewards)" in svg


def test_a_location_chart_without_bins_still_draws_its_curve():
    assert "<polyline" in location_chart([], lambda p: 0.0, label="mean")


def test_a_band_lies_in_the_frame_and_a_long_line_speaks_at_few_points():
    points = [(x, 1.0) for x in range(1000)]
    svg = line_chart([Series("a", points, [(x, -5.0, 9.0) for x in range(1000)])], label="a")
    band = re.search(r'polygon class="band s0" points="([^"]*)"', svg).group(1)
    ys = [float(point.split(",")[1]) for point in band.split()]
    assert len(ys) == 2000 and min(ys) > 0 and max(ys) < HEIGHT
    assert svg.count("<circle") <= SPOTS and svg.count('class="dot') == 0


def test_bars_are_as_high_as_their_share():
    svg = histogram([(1, 1, 30), (2, 2, 10)], label="lengths", x_label="tokens")
    heights = [float(h) for h in re.findall(r'height="([\d.]+)"><title>', svg)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    assert "1: 30 (75 %)" in svg
