"""The picture of the front page: the layer's speed beside its peers.

    python -m benchmarks.layer_picture > docs/pictures/layer-speed.svg

The figures are those of docs/results/layer-h200.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "results" / "layer-h200.json"
WHAT = "TFLOP/s of the experts' products, forward and backward"
VERSIONS = {  # by the names of the table
    "stock torch": "stock torch",
    "torch.compile": "torch.compile",
    "bf16": "moe_fast, bf16",
    "FP8 block, weights kept": "moe_fast, FP8 by blocks",
}
SPEED = "with backward (÷ stock)"  # the column
COLOURS = ("#9e9e9e", "#607d8b", "#3f51b5", "#ff7043")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 380, 60, 60, 64
BAR, GAP = 38, 44  # the width of a bar, and the space between two models
STEP = 200  # TFLOP/s between two lines of the grid


def picture(record: dict[str, Any]) -> str:
    """The bars of each model as SVG."""
    return "\n".join(_lines(record)) + "\n"


def speeds_of(record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """TFLOP/s of each version by model."""
    table = record["tables"][0]
    column = table["columns"].index(SPEED)
    speeds: dict[str, dict[str, int]] = {}
    for name, shown in VERSIONS.items():
        for row in table["rows"]:
            if row[1] == name:
                speeds.setdefault(row[0], {})[shown] = int(row[column].split()[0])
    return speeds


def _lines(record: dict[str, Any]) -> Iterator[str]:
    speeds = speeds_of(record)
    most = max(speed for bars in speeds.values() for speed in bars.values())
    scale = (HEIGHT - TOP - BOTTOM) / most
    base = HEIGHT - BOTTOM
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(LEFT, 22, f"{record['title']}: {WHAT}", "start")
    for speed in range(0, int(most) + 1, STEP):
        y = base - speed * scale
        yield f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield _text(LEFT - 6, y + 4, str(speed), "end")
    x = LEFT + GAP / 2
    for model, bars in speeds.items():
        yield _text(x + BAR * len(bars) / 2, base + 18, model)
        for (name, speed), colour in zip(bars.items(), COLOURS, strict=True):
            y = base - speed * scale
            size = f'x="{x:.1f}" y="{y:.1f}" width="{BAR - 3}" height="{base - y:.1f}"'
            yield f'<rect {size} fill="{colour}"><title>{model}, {name}: {speed} TFLOP/s</title></rect>'
            yield _text(x + BAR / 2 - 1, y - 4, str(speed))
            x += BAR
        x += GAP
    x = LEFT
    for name, colour in zip(next(iter(speeds.values())), COLOURS, strict=True):
        yield f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 18, HEIGHT - 11, name, "start")
        x += 190
    yield "</svg>"


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{words}</text>'


if __name__ == "__main__":
    print(picture(json.loads(FIGURES.read_text())), end="")
