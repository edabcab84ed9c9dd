"""The picture is drawn from any report, in one piece, and nothing on it covers anything else."""

from dataclasses import replace

import pytest
from matplotlib.image import imread

from paramstore.demo.picture import DPI, SIZE_INCHES, draw
from paramstore.demo.traffic import Traffic

pytestmark = pytest.mark.slow


def test_picture_has_the_promised_size_and_is_not_blank(report, tmp_path):
    draw(report, tmp_path / "report.png")
    pixels = imread(tmp_path / "report.png")
    assert pixels.shape[:2] == (int(SIZE_INCHES[1] * DPI), int(SIZE_INCHES[0] * DPI))
    assert 0.05 < (pixels[..., :3] < 0.98).any(axis=2).mean() < 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_picture_of_a_store_that_moved_nothing_is_drawn(report, tmp_path):
    first, resumed = (tuple(replace(trace, traffic=Traffic()) for trace in side) for side in (report.first, report.resumed))
    routed = tuple(tuple(0 for _ in row) for row in report.routed_tokens)
    draw(replace(report, first=first, resumed=resumed, routed_tokens=routed), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
