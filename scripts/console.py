#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Finds what a kernel complains about on its console.

A test can pass while the kernel warns of a leak or a lock inversion: without
this such a run would be green. Patterns and exceptions are in the files
console-patterns and console-allow beside this one.
"""

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEFORE = 5  # lines of context ahead of a report
AFTER = 10  # lines shown of a report that has no end of its own
LONGEST = 150  # a report whose end is not found within is cut here

# "[    1.234567] ", "[    1.234567][   T12] ", "<4>[    1.2] "
STAMP = re.compile(r"^(<\d+>)?\[\s*\d+\.\d+\](\[\s*[CT]\d+\])? ?")
RULE = re.compile(r"^=+$")
END = re.compile(r"^---\[ end ")
STACK_END = re.compile(r"^ </TASK>")


@dataclass
class Pattern:
    """A name and the expression that finds it."""

    name: str
    regex: re.Pattern[str]


@dataclass
class Report:
    """One complaint: the lines [start, end) of the log, and what it is."""

    start: int
    end: int
    names: list[str]
    title: str
    context: list[str] = field(default_factory=list)
    allowed: bool = False


def load(path: Path, reasons: bool = False) -> list[Pattern]:
    """Reads lines of "NAME REGEX"; with reasons, each needs a comment above."""
    rows: list[Pattern] = []
    reason = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("#"):
            reason = True
            continue
        if not line.strip():
            reason = False
            continue
        name, _, regex = line.partition(" ")
        if not regex.strip():
            raise ValueError(f"{path.name}:{number}: not 'NAME REGEX': {line}")
        if reasons and not reason:
            raise ValueError(f"{path.name}:{number}: no reason above: {line}")
        try:
            rows.append(Pattern(name, re.compile(regex.strip())))
        except re.error as err:
            raise ValueError(f"{path.name}:{number}: {err}: {regex}") from err
    return rows


def bare(line: str) -> str:
    """The message of a console line, without its time stamp."""
    return STAMP.sub("", line.rstrip("\r\n"))


def end_of(text: list[str], start: int) -> int:
    """The line after the report that starts at start."""
    limit = min(len(text), start + LONGEST)
    ends = [END, STACK_END]
    if start and RULE.match(text[start - 1]) and text[start].startswith("BUG: KASAN"):
        # Its stacks come first, the state of the memory last.
        ends = [RULE]
    for regex in ends:
        for i in range(start + 1, limit):
            if regex.match(text[i]):
                return i + 1
    return min(len(text), start + AFTER)


def scan(lines: list[str], patterns: list[Pattern], allow: list[Pattern]) -> list[Report]:
    """All reports of a console log, in order; allowed ones are marked."""
    text = [bare(line) for line in lines]
    named = [next((p.name for p in patterns if p.regex.search(t)), "") for t in text]
    reports: list[Report] = []
    i = 0
    while i < len(text):
        if not named[i]:
            i += 1
            continue
        end = end_of(text, i)
        names = list(dict.fromkeys(n for n in named[i:end] if n))
        report = Report(i, end, names, text[i])
        report.context = lines[max(0, i - BEFORE):end]
        report.allowed = len(names) == 1 and any(
            a.name == names[0] and a.regex.search(line) for a in allow for line in text[i:end]
        )
        reports.append(report)
        i = end
    return reports


def classify(log: bytes) -> list[Report]:
    """Reports of a console log by the repository's own pattern files."""
    lines = log.decode(errors="replace").replace("\r", "").split("\n")
    return scan(
        lines, load(HERE / "console-patterns"), load(HERE / "console-allow", reasons=True)
    )


def main() -> int:
    """console.py LOG: one line per report, "NAMES: TITLE"; 1 if any counts."""
    parser = argparse.ArgumentParser(description="find complaints in a kernel console log")
    parser.add_argument("log", type=Path)
    args = parser.parse_args()
    try:
        reports = classify(args.log.read_bytes())
    except (OSError, ValueError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    for r in reports:
        print(f"{'allowed ' if r.allowed else ''}{'+'.join(r.names)}: {r.title}")
    return int(any(not r.allowed for r in reports))


if __name__ == "__main__":
    sys.exit(main())
