#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Compares the samples of one workload program on two kernels.

Prevents a mean that hides an outlier: it gives the median and the spread of
every row, per unit, and the ratio of the medians.

usage: bench.py BASE.samples PATCHED.samples

Input: lines "sample ROW NANOSECONDS UNITS", as tools/mm/bench.h prints them.
In a guest with ICOUNT=1 a nanosecond is an instruction; they are not time.
"""

import statistics
import sys
from pathlib import Path


def samples(path: Path) -> dict[str, list[float]]:
    """Instructions per unit of each row, in the order of the file."""
    rows: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        match line.split():
            case ["sample", row, nanoseconds, units]:
                rows.setdefault(row, []).append(int(nanoseconds) / int(units))
    return rows


def main() -> int:
    """Print the table."""
    if len(sys.argv) != 3:
        print("error: usage: bench.py BASE.samples PATCHED.samples", file=sys.stderr)
        return 2
    base, patched = (samples(Path(name)) for name in sys.argv[1:])
    if not base or base.keys() != patched.keys():
        lost = ", ".join(sorted(base.keys() ^ patched.keys())) or "all"
        print(f"error: rows without samples on one of the kernels: {lost}", file=sys.stderr)
        return 1
    print("instructions per unit, not time; median, (max - min) / median, number of samples")
    print(f"{'row':20}{'base':>12}{'patched':>12}{'ratio':>8}{'spread':>16}{'n':>9}")
    for row in base:
        pair = (base[row], patched[row])
        middle = [statistics.median(values) for values in pair]
        spread = [(max(v) - min(v)) / m if m else 0 for v, m in zip(pair, middle)]
        print(
            f"{row:20}{middle[0]:12.2f}{middle[1]:12.2f}{middle[1] / middle[0]:8.3f}"
            f"{spread[0]:8.2%}{spread[1]:8.2%}{len(pair[0]):5}{len(pair[1]):4}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
