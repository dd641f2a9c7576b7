"""How does learning depend on the age of samples, in one picture? Points a run, a line through the means; plain SVG.

``python benchmarks/staleness_picture.py RESULTS.json PICTURE.svg``: RESULTS has ``staleness`` entries of bench_async.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"sampler": "#c2410c", "decoupled": "#2563eb"}
LABELS = {"sampler": "old policy: the sampler's log-probs", "decoupled": "decoupled objective, token weights up to 2"}
LEFT, TOP, WIDTH, HEIGHT = 60, 60, 480, 240
LOW, HIGH = 0.84, 1.0


def draw(entries: Sequence[Mapping[str, Any]], measure: str, title: str) -> str:
    """Return an SVG document with ``measure`` over ``staleness``, one colour an objective."""
    lags = sorted({int(entry["staleness"]) for entry in entries})

    def x_of(lag: int) -> float:
        return LEFT + WIDTH * lags.index(lag) / max(1, len(lags) - 1)

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (HIGH - max(LOW, value)) / (HIGH - LOW)

    width, height = LEFT + WIDTH + 40, TOP + HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{title}</text>',
    ]
    value = LOW
    while value <= HIGH + 1e-9:
        y = y_of(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">{value:.2f}</text>')
        value += 0.04
    parts += [f'<text x="{x_of(lag):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{lag}</text>' for lag in lags]
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle" fill="#475569">'
        "oldest token of a sample, weight versions (4 optimizer steps each)</text>"
    )
    for place, objective in enumerate(COLOURS):
        colour, shift = COLOURS[objective], 4 * (2 * place - 1)
        parts.append(f'<text x="{LEFT}" y="{38 + 14 * place}" fill="{colour}">{LABELS[objective]}</text>')
        means = []
        for lag in lags:
            runs = [float(e[measure]) for e in entries if e["objective"] == objective and e["staleness"] == lag]
            if not runs:
                continue
            x = x_of(lag) + shift
            parts += [
                f'<circle cx="{x:.1f}" cy="{y_of(run):.1f}" r="3" fill="{colour}" opacity="0.5"/>' for run in runs
            ]
            means.append(f"{x:.1f},{y_of(statistics.mean(runs)):.1f}")
        parts.append(f'<polyline points="{" ".join(means)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the file that is named."""
    results, picture = map(Path, sys.argv[1:3])
    entries = json.loads(results.read_text(encoding="utf-8"))["staleness"]
    picture.write_text(
        draw(
            entries, "reward_last_10", "Default job, separate-async: mean training reward of the last 10 of 100 steps"
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
