"""Draw docs/kglm/scale.png from the records: growth with samples and centres, and how few centres are enough."""

import json
from pathlib import Path

import numpy as np
from common import DOCS, picture, subplots

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def main() -> None:
    """Read the records and write the figure."""
    growth = json.loads((RECORDS / "kglm-growth-cpu.json").read_text(encoding="utf-8"))["results"]
    centres = json.loads((DOCS / "records" / "centres.json").read_text(encoding="utf-8"))["result"]
    figure, axes = subplots(1, 3, width=10.5, height=3.2)
    for axis, table in zip(axes[0], growth, strict=False):
        of = table["asked"]["of"]
        x, y = (np.array([row[column] for row in table["rows"]]) for column in (of, "time (s)"))
        slope, height = np.polyfit(np.log(x), np.log(y), 1)
        axis.loglog(x, y, "o", color="C0")
        axis.loglog(x, np.exp(height) * x**slope, color="C0", label=f"slope {slope:.2f}")
        other = next(column for column in ("centres", "n") if column != of)
        axis.set(xlabel=of, ylabel="processor seconds", title=f"logistic, {other} = {table['rows'][0][other]}")
        axis.set_xticks(x, [str(value) for value in x])
        axis.minorticks_off()
        axis.legend(frameon=False)
    for rule in ("kmeans", "leverage", "uniform"):
        rows = [row for row in centres["rows"] if row["rule"] == rule]
        axes[0, 2].loglog([row["centres"] for row in rows], [row["over exact (%)"] for row in rows], "o-", label=rule)
    axes[0, 2].axhline(1.0, color="grey", linewidth=0.8)
    axes[0, 2].set(xlabel="centres", ylabel="held-out log-loss over exact, %", title="n = 5000 (grey: 1 %)")
    axes[0, 2].legend(frameon=False)
    (DOCS / "scale.png").write_bytes(picture(figure))


if __name__ == "__main__":
    main()
