#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Compares the selftests' results on the base and on the patched kernel.

Prevents a green run that proves nothing: a test that passes without the
patches too, that was planned and never ran, or that passed on a kernel which
crashed or warned.

usage: results.py --base BASE --config CONFIG --ktap-parser DIR --out DIR
                  --run STATE:TEST:LOGDIR … [--meta KEY=VALUE …]
                  [--reproduce COMMAND …]

STATE is base or patched, TEST a program's name, LOGDIR what guest.py --log
wrote when it ran TEST on that kernel. DIR of --ktap-parser is the kernel's
tools/testing/kunit. --meta adds to meta.json, a dot in KEY nests
(base.commit=…); --reproduce names a command that repeats the run.

A test counts if it fails or skips on the base and passes on the patched
kernel. A control (name "control: …") must pass on both; if it skips it is
counted as skipped. stdout is TAP, a line per test, with a closing count; what
else the base kernel did wrong is a comment there. DIR gets ktap.txt,
junit.xml and meta.json. In ktap.txt a failure on the base that must be is
"ok … # XFAIL", as kselftest says it, so that each "not ok" is a problem. Exit
0 only if all that must pass passed; 1 if not, 2 on bad input.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

STATES = ("base", "patched")
# Exit statuses of a kselftest that ran to its end: pass, fail, skip.
FAILED, SKIPPED = 1, 4
CONTROL = "control: "

# "ok 3 # SKIP name", as kselftest.h prints it, is no result line to the
# kernel's parser: it wants the name ahead of the directive.
BARE = re.compile(r"^(\s*)(?:not )?ok (\d+) (?:- )?# (SKIP|XFAIL|error)\b ?(.*)$")
# An expected failure is not a pass; the parser takes each "ok" for one.
XFAIL = re.compile(r"^(\s*ok \d+ .*) # XFAIL\b(.*)$")
RESULT = re.compile(r"^\s*(?:not )?ok \d+\b")
REASON = re.compile(r"^\s*(?:not )?ok \d+ (?:- )?(.*) # SKIP ?(.*)$")


class BadInput(Exception):
    """One clear line for the user."""


@dataclass
class Case:
    """A leaf of the tree of results."""

    path: str
    verdict: str  # pass, fail, skip, crash, not run
    reason: str = ""
    log: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One selftest on one kernel."""

    cases: list[Case] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: bool = False  # the whole program said: not here


@dataclass
class Row:
    """One line of the table: a case on both kernels, and what it is worth."""

    test: str
    name: str
    base: str
    patched: str
    kind: str
    judgement: str  # ok, skip or "FAIL: why"
    log: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether this row alone makes the run red."""
        return self.judgement.startswith("FAIL")


def load_parser(directory: Path) -> Any:
    """The kernel's own parser. Nothing is written beside it."""
    if not (directory / "kunit_parser.py").is_file():
        raise BadInput(f"{directory} has no kunit_parser.py; give a tree's tools/testing/kunit")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(directory.resolve()))
    # Its printer keeps the stdout that it finds when it is imported.
    with contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module("kunit_parser")


def normalise(line: str) -> str:
    """Writes a result line so that the kernel's parser reads all of it."""
    bare = BARE.match(line)
    if bare:
        indent, num, directive, text = bare.groups()
        name, _, reason = text.strip().partition(" # ")
        name = name.replace("#", "").strip() or f"case {num}"
        if directive == "error":
            return f"{indent}not ok {num} {name}"
        extra = "XFAIL " if directive == "XFAIL" else ""
        return f"{indent}ok {num} {name} # SKIP {extra}{reason}".rstrip()
    return XFAIL.sub(r"\1 # SKIP XFAIL\2", line)


def parse_tree(parser: Any, lines: list[str]) -> Any:
    """The parser's tree of results."""
    with contextlib.redirect_stdout(io.StringIO()) as sink:
        args: list[Any] = [lines]
        # 6.1 and 6.12 print through a global, later ones take a printer.
        if len(inspect.signature(parser.parse_run_tests).parameters) > 1:
            args.append(parser.Printer(output=sink))
        return parser.parse_run_tests(*args)


VERDICTS = {"SUCCESS": "pass", "FAILURE": "fail", "SKIPPED": "skip"}


def leaves(node: Any, path: str, cases: list[Case], reasons: dict[str, str]) -> int:
    """Appends the leaves under a node; returns how many results are below."""
    results = 0
    for number, sub in enumerate(node.subtests, 1):
        own = sub.name.strip()
        name = path + (own or f"case {number}")
        # What is planned and missing has no name.
        verdict = VERDICTS.get(sub.status.name, "crash") if own else "not run"
        before = len(cases)
        results += 1 + leaves(sub, name + "/", cases, reasons)
        below = [c.verdict for c in cases[before:]]
        if not below or (verdict == "fail" and "fail" not in below):
            reason = reasons.get(own, "") if verdict == "skip" else ""
            # Some parsers keep the result line in the log, some do not.
            log = [line.strip() for line in sub.log if line.strip() and not RESULT.match(line)]
            cases.append(Case(name, verdict, reason, log))
    return results


def read_guest(logdir: Path, test: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """guest.json, the entry of the program in it, and the program's output."""
    try:
        guest = json.loads((logdir / "guest.json").read_text())
    except FileNotFoundError:
        raise BadInput(f"{logdir} has no guest.json; it is what guest.py --log writes") from None
    except ValueError as err:
        raise BadInput(f"{logdir}/guest.json: {err}") from None
    for index, program in enumerate(guest["programs"], 1):
        if program["name"] == test:
            out = logdir / f"{index}.out"
            text = out.read_bytes().decode(errors="replace") if out.exists() else ""
            return guest, program, text
    raise BadInput(f"{logdir}/guest.json: no program {test} ran there")


def read_run(parser: Any, guest: dict[str, Any], program: dict[str, Any], text: str) -> Run:
    """Cases and problems of one selftest on one kernel."""
    run = Run()
    lines = [normalise(line) for line in text.replace("\r", "").split("\n")]
    reasons = {m[1]: m[2] for m in map(REASON.match, lines) if m}
    tree = parse_tree(parser, lines)
    found = leaves(tree, "", run.cases, reasons)
    extra = sum(1 for line in lines if RESULT.match(line)) - found
    status = program["status"]
    ended = status in (0, FAILED, SKIPPED)

    unrun = [c for c in run.cases if c.verdict == "not run"]
    if status == SKIPPED and all(c.verdict in ("skip", "not run") for c in run.cases):
        # "Not here", before or instead of the cases.
        run.skipped = True
        for case in unrun:
            case.verdict = "skip"
        unrun = []
    elif not ended and unrun:
        unrun[0].verdict = "crash"

    if not ended:
        how = guest["why"] if status is None else f"exit status {status}"
        run.problems.append(how or "did not end")
    for report in guest["reports"]:
        if not report["allowed"]:
            run.problems.append(f"{'+'.join(report['names'])}: {report['title']}")
    if run.skipped:
        return run
    if not run.cases:
        run.problems.append("no KTAP result in its output")
    elif tree.expected_count is None:
        run.problems.append("no plan: what never ran cannot be told")
    if extra > 0:
        # The parser stops at the plan and says nothing of the rest.
        run.problems.append(f"more results than planned: {extra}")
    bad = [c for c in run.cases if c.verdict not in ("pass", "skip")]
    if status == 0 and bad:
        run.problems.append(f"exit status 0 though {len(bad)} did not pass")
    if status == FAILED and run.cases and not bad:
        run.problems.append("exit status 1 though no case failed")
    for name in duplicates(c.path for c in run.cases):
        run.problems.append(f"two cases are called '{name}'")
    return run


def duplicates(names: Iterable[str]) -> list[str]:
    """Names that occur more than once."""
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name in names:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)


def same_case(a: Case, b: Case) -> bool:
    """Whether a is b with the reason of a skip after its name."""
    return a.verdict == "skip" and bool(re.match(re.escape(b.path) + r"\W", a.path))


def pair(base: Run, patched: Run) -> list[tuple[Case | None, Case | None]]:
    """Joins the cases of both kernels: by name, else by place."""
    partner: dict[int, int] = {}
    taken: set[int] = set()

    def join(rule: Callable[[int, Case, int, Case], bool]) -> None:
        for i, new in enumerate(patched.cases):
            for j, old in enumerate(base.cases):
                if i not in partner and j not in taken and rule(i, new, j, old):
                    partner[i] = j
                    taken.add(j)

    join(lambda _i, new, _j, old: new.path == old.path)
    join(lambda _i, new, _j, old: same_case(new, old) or same_case(old, new))
    if len(base.cases) == len(patched.cases):
        # Cases that never ran have no name, and skips may have lost theirs.
        nameless = {"not run", "crash", "skip"}
        join(lambda i, new, j, old: i == j and bool({new.verdict, old.verdict} & nameless))

    pairs: list[tuple[Case | None, Case | None]] = [
        (base.cases[partner[i]] if i in partner else None, new)
        for i, new in enumerate(patched.cases)
    ]
    return pairs + [(old, None) for j, old in enumerate(base.cases) if j not in taken]


def best_name(*cases: Case | None) -> str:
    """The name that a result gave, not the one that a missing or a skip lacks."""
    order = {"pass": 0, "fail": 0, "skip": 1}
    return min((c for c in cases if c), key=lambda c: order.get(c.verdict, 2)).path


def judge(control: bool, base: str, patched: str) -> str:
    """The rule of the repository."""
    for state, verdict in (("base", base), ("patched", patched)):
        if verdict == "not run":
            return f"FAIL: planned, never ran on {state}"
    if control:
        for state, verdict in (("base", base), ("patched", patched)):
            if verdict not in ("pass", "skip"):
                return f"FAIL: {verdict} on {state}"
        return "skip" if "skip" in (base, patched) else "ok"
    if patched != "pass":
        return f"FAIL: {patched} on patched"
    if base == "pass":
        return "FAIL: proves nothing, passes on base too"
    return "ok"


def compare(test: str, base: Run, patched: Run) -> list[Row]:
    """The rows of one selftest."""
    for run, other in ((base, patched), (patched, base)):
        if run.skipped and not run.cases:
            run.cases = [Case(c.path, "skip", "the whole test") for c in other.cases]
    rows: list[Row] = []
    for old, new in pair(base, patched):
        name = best_name(new, old)
        before = old.verdict if old else "not run"
        after = new.verdict if new else "not run"
        control = name.rpartition("/")[2].startswith(CONTROL)
        log: list[str] = []
        for state, case in (("base", old), ("patched", new)):
            log += [f"{state}: {line}" for line in (case.log if case else [])]
            if case and case.reason:
                log.append(f"{state}: skip: {case.reason}")
        kind = "control" if control else "test"
        rows.append(Row(test, name, before, after, kind, judge(control, before, after), log))
    if not rows:
        rows.append(Row(test, "(no case)", "-", "-", "run", "FAIL: nothing ran"))
    # What the base kernel does wrong may be the very defect; it is shown.
    for problem in base.problems:
        rows.append(Row(test, problem, "seen", "-", "run", "ok"))
    for problem in patched.problems:
        rows.append(Row(test, problem, "-", "seen", "run", "FAIL: on patched"))
    return rows


def counts(row: Row) -> bool:
    """Whether a row is a test; what is only shown of the base is not."""
    return row.kind != "run" or row.failed


def terminal(rows: list[Row]) -> str:
    """TAP with both verdicts of each test, and the log of what failed."""
    tests = [r for r in rows if counts(r)]
    width = max((len(r.name) for r in tests), default=0)
    out = ["TAP version 13", f"1..{len(tests)}"]
    number = 0
    for i, row in enumerate(rows):
        if i == 0 or row.test != rows[i - 1].test:
            out.append(f"# {row.test}")
        if not counts(row):
            out.append(f"# on base: {row.name}")
            continue
        number += 1
        skip = "SKIP " if row.judgement == "skip" else ""
        why = row.judgement.removeprefix("FAIL: ") if row.failed else ""
        about = f"base {row.base}, patched {row.patched}, {row.kind}{why and ': ' + why}"
        result = f"{'not ok' if row.failed else 'ok'} {number} {row.name}"
        pad = width + len(f"not ok {number} ")
        out.append(f"{result:{pad}} # {skip}{why if row.kind == 'run' else about}")
        if row.failed:
            out += [f"#     {line}" for line in row.log]
    return "\n".join(out)


def ktap_line(number: int, row: Row, state: str) -> str:
    """One result line: what must fail on the base and does is XFAIL."""
    verdict = row.base if state == "base" else row.patched
    name = re.sub(r"\s+", " ", row.name.replace("#", ""))
    must_fail = state == "base" and row.kind == "test"
    if row.kind == "run":
        bad = state == "patched" and row.failed
        return f"{'not ok' if bad else 'ok'} {number} {name}" + ("" if bad else " # XFAIL")
    if verdict == "skip":
        bad = row.kind == "test" and state == "patched"
        return f"not ok {number} {name}" if bad else f"ok {number} {name} # SKIP"
    if must_fail and verdict in ("fail", "crash"):
        return f"ok {number} {name} # XFAIL {verdict} on the base"
    if must_fail and verdict == "pass":
        return f"not ok {number} {name} # XPASS proves nothing"
    return f"{'ok' if verdict == 'pass' else 'not ok'} {number} {name}"


def ktap(rows: list[Row]) -> str:
    """KTAP: a subtest per selftest, in it one per state, in it the cases."""
    tests = list(dict.fromkeys(r.test for r in rows))
    out = ["KTAP version 1", f"1..{len(tests)}"]

    def close(indent: str, since: int, number: int, name: str) -> None:
        """Ends the subtest whose lines begin at since."""
        bad = any(line.lstrip().startswith("not ok") for line in out[since:])
        out.append(f"{indent}{'not ok' if bad else 'ok'} {number} {name}")

    for t, test in enumerate(tests, 1):
        test_start = len(out)
        out += ["  KTAP version 1", f"  # Subtest: {test}", f"  1..{len(STATES)}"]
        for s, state in enumerate(STATES):
            mine = [
                r for r in rows
                if r.test == test and (r.kind != "run" or (r.base, r.patched)[s] != "-")
            ]
            state_start = len(out)
            out += ["    KTAP version 1", f"    # Subtest: {state}", f"    1..{len(mine)}"]
            out += ["    " + ktap_line(i, r, state) for i, r in enumerate(mine, 1)]
            close("  ", state_start, s + 1, state)
        close("", test_start, t, test)
    return "\n".join(out) + "\n"


def clean(text: str) -> str:
    """Text that XML can hold."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "?", text)


def junit(rows: list[Row], group: str) -> str:
    """JUnit: a suite per selftest."""
    out = ['<?xml version="1.0" encoding="utf-8"?>', "<testsuites>"]
    for test in dict.fromkeys(r.test for r in rows):
        mine = [r for r in rows if r.test == test]
        failed = sum(r.failed for r in mine)
        skipped = sum(r.judgement == "skip" for r in mine)
        out.append(
            f'  <testsuite name={quoteattr(test)} tests="{len(mine)}" '
            f'failures="{failed}" errors="0" skipped="{skipped}">'
        )
        for r in mine:
            out.append(
                f"    <testcase classname={quoteattr(group + '.' + test)} "
                f"name={quoteattr(clean(r.name))}>"
            )
            states = f"base: {r.base}, patched: {r.patched}, kind: {r.kind}"
            text = clean("\n".join([states, *r.log]))
            if r.failed:
                out.append(f"      <failure message={quoteattr(r.judgement)}/>")
            elif r.judgement == "skip":
                out.append(f"      <skipped message={quoteattr(states)}/>")
            out.append(f"      <system-out>{escape(text)}</system-out>")
            out.append("    </testcase>")
        out.append("  </testsuite>")
    out.append("</testsuites>")
    return "\n".join(out) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a whole file or none."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def nest(meta: dict[str, Any], key: str, value: Any) -> None:
    """meta["a"]["b"] = value for key a.b."""
    *above, last = key.split(".")
    for name in above:
        meta = meta.setdefault(name, {})
    meta[last] = value


def work(args: argparse.Namespace) -> int:
    """The whole job."""
    parser = load_parser(args.ktap_parser)
    runs: dict[str, dict[str, Run]] = {}
    meta: dict[str, Any] = {"base_name": args.base, "config": args.config}
    for word in args.meta:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"--meta {word} is not KEY=VALUE")
        nest(meta, key, value)
    meta["reproduce"] = args.reproduce
    meta["runs"] = []
    for word in args.run:
        state, test, logdir = (word.split(":", 2) + ["", ""])[:3]
        if state not in STATES or not test or not logdir:
            raise BadInput(f"--run {word} is not base:TEST:LOGDIR or patched:TEST:LOGDIR")
        guest, program, text = read_guest(Path(logdir), test)
        runs.setdefault(test, {})[state] = read_run(parser, guest, program, text)
        about = {k: guest[k] for k in (
            "release", "kernel_sha256", "qemu", "accel", "smp", "mem", "command", "reports"
        )}
        again = f"make guest BASE={args.base} STATE={state} CONFIG={args.config} "
        again += f"SMP={guest['smp']} MEM={guest['mem']} RUN={shlex.quote(program['command'])}"
        meta["runs"].append(
            {"state": state, "test": test, **about, "program": program, "reproduce": again}
        )
    rows: list[Row] = []
    for test, states in runs.items():
        for state in STATES:
            if state not in states:
                raise BadInput(f"no --run {state}:{test}:LOGDIR; each test needs both kernels")
        rows += compare(test, states["base"], states["patched"])
    print(terminal(rows))

    counted = [r for r in rows if counts(r)]
    failed = sum(r.failed for r in counted)
    skipped = sum(r.judgement == "skip" for r in counted)
    passed = len(counted) - failed - skipped
    meta["counts"] = {"passed": passed, "failed": failed, "skipped": skipped}
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "ktap.txt", ktap(rows))
    write(args.out / "junit.xml", junit(rows, f"{args.base}.{args.config}"))
    write(args.out / "meta.json", json.dumps(meta, indent=2) + "\n")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)


def main() -> int:
    """Parses the command line; turns bad input into one line."""
    parser = argparse.ArgumentParser(description="compare selftests on base and patched kernel")
    parser.add_argument("--base", required=True, help="name of the base, for example 6.1")
    parser.add_argument("--config", required=True, help="test, bench or debug")
    parser.add_argument("--ktap-parser", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--run", action="append", required=True, metavar="STATE:TEST:LOGDIR")
    parser.add_argument("--meta", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--reproduce", action="append", default=[], metavar="COMMAND")
    args = parser.parse_args()
    try:
        return work(args)
    except (BadInput, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
