"""The pictures of the documentation: drawn from the results beside them, and complete in themselves."""

import json
import re
from xml.etree import ElementTree as ET

import chart
import explain
import pytest

PICTURES = sorted(chart.FOLDER.glob("*.svg"))


def test_the_chart_is_drawn_from_the_result():
    drawn = chart.chart(json.loads(chart.RESULT.read_text(encoding="utf-8")))
    assert chart.PICTURE.read_text(encoding="utf-8") == drawn, "run `python tests/pictures/chart.py`"


def test_the_drawings_are_those_of_the_program():
    for name, drawn in explain.pictures().items():
        kept = (explain.FOLDER / name).read_text(encoding="utf-8")
        assert kept == drawn, "run `python tests/pictures/explain.py`"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_loads_nothing(picture):
    text = picture.read_text(encoding="utf-8")
    ET.fromstring(text)
    addresses = set(re.findall(r"https?://[^\s\"')]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
