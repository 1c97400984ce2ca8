"""The figure of docs/evidence.md: goodput over the number of GPUs, a panel for each wait in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")

LINES = {
    "Young's optimum": ("#222222", "--", "Young's optimum"),
    "jobkit, spares": ("#0b6e99", "-", "jobkit, spare nodes"),
    "jobkit, defaults": ("#2a9d5c", "-", "jobkit, defaults"),
    "jobkit, without in_place": ("#c08a00", "-", "jobkit, always requeued"),
    "Submitit's pattern": ("#c0392b", "-", "Submitit's pattern"),
    "Lightning, auto_requeue": ("#8e44ad", ":", "Lightning, auto_requeue"),
}
"""Colour, style and label of each policy."""

LEAST_APART = 0.052
"""Of the axis, between two labels."""


class Point(Protocol):
    """What is drawn of a policy on a cluster."""

    gpus: int
    queue_hours: float
    policy: str

    @property
    def goodput(self) -> float: ...

    @property
    def error(self) -> float: ...


def draw(played: Sequence[Point], file: Path) -> None:
    """Write a PNG."""
    queues = sorted({one.queue_hours for one in played})
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(queues), figsize=(4.0 * len(queues) + 2.0, 4.8), sharey=True, squeeze=False)
    for axis, hours in zip(axes[0], queues, strict=True):
        sizes = sorted({one.gpus for one in played})
        ends = []
        for policy, (colour, style, label) in LINES.items():
            points = sorted(
                (one for one in played if one.policy == policy and one.queue_hours == hours), key=lambda one: one.gpus
            )
            if points:
                places = [one.gpus for one in points]
                heights = [one.goodput for one in points]
                errors = [one.error for one in points]
                axis.errorbar(places, heights, yerr=errors, color=colour, linestyle=style, linewidth=2, capsize=2)
                ends.append((heights[-1], label, colour))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
        axis.set_ylim(0, 1)
        axis.grid(axis="y", color="#dddddd")
        axis.set_xlabel("GPUs")
        axis.set_title(f"each requeue waits {hours:g} h")
        if axis is axes[0][-1]:
            for height, (_, label, colour) in zip(_apart(ends), sorted(ends), strict=True):
                axis.annotate(
                    label,
                    (1.0, height),
                    xycoords=("axes fraction", "data"),
                    xytext=(8, 0),
                    textcoords="offset points",
                    color=colour,
                    va="center",
                )
    axes[0][0].set_ylabel("goodput: new steps / wall time")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _apart(ends: Sequence[tuple[float, str, str]]) -> list[float]:
    """Heights for labels at the ends of lines, from the lowest to the highest, none upon another."""
    heights: list[float] = []
    for height, _, _ in sorted(ends):
        heights.append(max(height, heights[-1] + LEAST_APART) if heights else height)
    return heights
