"""Draw the chart of recovery times, docs/pictures/recovery-times.svg, from a result of tests/bench/recovery.py.

python tests/bench/recovery.py | tail -n 1 > docs/pictures/recovery-times.json
python tests/pictures/chart.py
"""

import json
from pathlib import Path

from svg import GREY, INK, LINE, box, line, picture, text

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
RESULT, PICTURE = FOLDER / "recovery-times.json", FOLDER / "recovery-times.svg"
BARS = (
    ("spare", "deadpool-run, with a spare", "#2563eb"),
    ("no spare", "deadpool-run, without a spare", "#60a5fa"),
    ("torchrun", "torchrun, checkpoint after each step", "#9ca3af"),
)
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 262, 70, 58, 44
STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Distances of the axis's marks."""


def chart(result):
    """Return the chart of one result as SVG."""
    found = [(*bar, result["results"][bar[0]]) for bar in BARS if bar[0] in result["results"]]
    most = max(each["max_s"] for *_, each in found)
    step = next(each for each in STEPS_S if most / each <= 6)
    end = step * -(-most // step)
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = TOP + ROW * len(found)
    ranks = result["parameters"]["ranks"]
    parts = [
        text(16, 26, f"From kill -9 of a rank to the next step of all {ranks} ranks", font_size=16, font_weight="bold"),
        text(16, 45, "Bars are medians, dots are single kills. Seconds; less is better.", fill=GREY),
    ]
    for number in range(round(end / step) + 1):
        x = LEFT + number * step * scale
        parts.append(line((x, TOP), (x, bottom), stroke=LINE))
        parts.append(text(x, bottom + 17, f"{number * step:g}", text_anchor="middle", fill=GREY))
    for row, (_, label, colour, values) in enumerate(found):
        y = TOP + ROW * row + 8
        median = values["p50_s"]
        parts.append(text(LEFT - 10, y + 19, label, text_anchor="end"))
        parts.append(box(LEFT, y, median * scale, 28, fill=colour))
        parts += [
            f'<circle cx="{LEFT + each * scale:.1f}" cy="{y + 14}" r="3" fill="{INK}" fill-opacity="0.45"/>'
            for each in values["total_s"]
        ]
        parts.append(text(LEFT + values["max_s"] * scale + 10, y + 19, f"{median:.2f} s", font_weight="bold"))
    height = bottom + 58
    medians = ", ".join(f"{label} {values['p50_s']:.2f} s" for _, label, _, values in found)
    parts.append(text(16, bottom + 44, footnote(result), font_size=11, fill=GREY))
    return picture(WIDTH, height, f"Recovery times, medians: {medians}", parts)


def footnote(result):
    """Return what the figures were measured on."""
    machine, parameters = result["machine"], result["parameters"]
    kills = ", ".join(str(len(result["results"][name]["total_s"])) for name, *_ in BARS if name in result["results"])
    return (
        f"tests/bench/recovery.py: tiny GPT, {parameters['parallel'].upper()} on Gloo, {machine['cores']} cores "
        f"(load {machine['load_1min']:.0f}), torch {machine['torch']}; {kills} kills."
    )


def main():
    PICTURE.write_text(chart(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
