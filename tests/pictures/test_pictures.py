"""The pictures of the documentation: drawn from the results beside them, and complete in themselves."""

import json
import re
from xml.etree import ElementTree as ET

import chart
import explain
import pytest
import status

PICTURES = sorted(chart.FOLDER.glob("*.svg"))


def test_the_chart_is_drawn_from_the_result():
    drawn = chart.chart(json.loads(chart.RESULT.read_text(encoding="utf-8")))
    assert chart.PICTURE.read_text(encoding="utf-8") == drawn, "run `python tests/pictures/chart.py`"


def test_the_drawings_are_those_of_the_program():
    for name, drawn in explain.pictures().items():
        kept = (explain.FOLDER / name).read_text(encoding="utf-8")
        assert kept == drawn, "run `python tests/pictures/explain.py`"


def test_the_live_status_looks_like_its_pictures(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")  # rich has no colours and another width on terminals without abilities
    status.main(tmp_path)
    kept = {path.name: path.read_text(encoding="utf-8") for path in status.PICTURES.glob("status-*.svg")}
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert kept.keys() == drawn.keys()
    assert [name for name in kept if kept[name] != drawn[name]] == [], "run `python tests/pictures/status.py`"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_loads_nothing(picture):
    text = picture.read_text(encoding="utf-8")
    ET.fromstring(text)
    addresses = set(re.findall(r"https?://[^\s\"')]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
