#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""Boots a kernel in QEMU, runs static host programs in it, keeps their status.

Prevents green runs that mean nothing: a program that passed while the kernel
warned, a guest that died or hung before the program ran, KVM that is there
and does not work.

usage: guest.py --kernel IMAGE [--log DIR]

Environment: RUN="prog args; prog2" (shell quoting), ARCH, SMP (4), MEM (3G),
HUGEPAGES (64), ICOUNT=1 (deterministic: one CPU, the clock counts
instructions), TIMEOUT (seconds of silence, 120; the whole run may last 20
times as long), V=1 (kernel console on stderr), BUILD.

stdout is what the programs write, byte for byte. Exit status:
   2  bad input
  71  kernel panic
  72  hang or time-out
  73  the guest ended before its programs did
  74  QEMU does not start
or else, as all programs ran, the first of their statuses that is not 0
(128 + signal if killed); or, if all are 0:
  70  the kernel reported a problem on its console

DIR (build/guest/log) gets console.log, N.out (output of program N) and
guest.json (what ran, where, with what result).
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import console

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("BUILD") or ROOT / "build")
KVM_CACHE = BUILD / "guest" / "kvm"

EXIT_INPUT = 2
EXIT_REPORT = 70
EXIT_PANIC = 71
EXIT_TIMEOUT = 72
EXIT_ENDED = 73
EXIT_QEMU = 74

PROBE_SECONDS = 30  # KVM that works reaches init in one or two
WHOLE = 20  # the bound on the whole run, in TIMEOUTs
POWER_OFF_SECONDS = 15


@dataclass
class Machine:
    """What differs between architectures."""

    qemu: str
    elf: int  # e_machine
    options: list[str]
    cpu_kvm: str
    cpu_tcg: str
    console: str
    ports: str  # names of the second and third serial port
    hugepage_mib: int


# One row per architecture whose guest was seen to work.
MACHINES = {
    "x86_64": Machine(
        "qemu-system-x86_64", 62, [], "host", "max", "ttyS0",
        "guest.out=ttyS1 guest.ctl=ttyS2", 2,
    ),
}


class Trouble(Exception):
    """One clear line for the user, and the exit status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def bad(text: str) -> NoReturn:
    """Rejects an input."""
    raise Trouble(EXIT_INPUT, text)


@dataclass
class Program:
    """One command of RUN."""

    argv: list[str]
    path: Path
    sha256: str
    status: int | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name that it has in the guest."""
        return self.path.name

    @property
    def what(self) -> str:
        """The command as typed."""
        return shlex.join(self.argv)


@dataclass
class Settings:
    """The environment, checked."""

    arch: str
    machine: Machine
    smp: int
    mem: str
    hugepages: int
    icount: bool
    timeout: int
    verbose: bool


def number(name: str, default: int, least: int) -> int:
    """A whole number from the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        bad(f"{name}={text} is not a whole number of {least} or more")
    return int(text)


def settings() -> Settings:
    """Reads and checks the environment."""
    arch = os.environ.get("ARCH") or "x86_64"
    if arch not in MACHINES:
        bad(f"ARCH={arch} has no guest; known: {' '.join(MACHINES)}")
    machine = MACHINES[arch]
    mem = os.environ.get("MEM") or "3G"
    match = re.fullmatch(r"(\d+)([MG])", mem)
    if not match:
        bad(f"MEM={mem} is not a size such as 512M or 3G")
    mib = int(match[1]) * (1024 if match[2] == "G" else 1)
    if mib < 256:
        bad(f"MEM={mem} is too small; give 256M or more")
    pages = number("HUGEPAGES", 64, 0)
    if pages * machine.hugepage_mib > mib // 2:
        bad(
            f"HUGEPAGES={pages} takes more than half of MEM={mem}; "
            f"give at most {mib // 2 // machine.hugepage_mib} or more MEM"
        )
    icount = os.environ.get("ICOUNT") or "0"
    if icount not in ("0", "1"):
        bad(f"ICOUNT={icount} is neither 0 nor 1")
    return Settings(
        arch, machine, number("SMP", 4, 1), mem, pages, icount == "1",
        number("TIMEOUT", 120, 1), (os.environ.get("V") or "0") != "0",
    )


def split_commands(run: str) -> list[list[str]]:
    """Splits RUN at semicolons outside quotes, then into words."""
    pieces = re.findall(r"""(?:[^;"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*'|["'\\])+""", run, re.S)
    try:
        commands = [shlex.split(piece) for piece in pieces]
    except ValueError as err:
        bad(f"RUN={run}: {err}")
    return [c for c in commands if c]


def check_program(path: Path, machine: Machine, arch: str) -> bytes:
    """The program's bytes, if it can run alone in the guest."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        bad(f"{path} does not exist; RUN= takes static programs of this host")
    except OSError as err:
        bad(f"{path}: {err.strerror}")
    static = "build it with 'gcc -static'"
    if data[:4] != b"\x7fELF" or len(data) < 64:
        bad(f"{path} is not an ELF program; {static}")
    little = data[5] == 1
    order = "<" if little else ">"
    kind, elf = struct.unpack_from(order + "HH", data, 16)
    if data[4] != 2 or not little or elf != machine.elf:
        bad(f"{path} is not a 64-bit program for ARCH={arch}")
    if kind not in (2, 3):
        bad(f"{path} is an object file or a core, not a program; {static}")
    phoff, = struct.unpack_from(order + "Q", data, 32)
    size, count = struct.unpack_from(order + "HH", data, 54)
    for i in range(count):
        segment, = struct.unpack_from(order + "I", data, phoff + i * size)
        if segment == 3:
            bad(f"{path} is dynamically linked; {static}")
    return data


def read_programs(run: str, conf: Settings) -> tuple[list[Program], dict[str, bytes]]:
    """The commands of RUN and the files that they need."""
    programs: list[Program] = []
    files: dict[str, bytes] = {}
    for argv in split_commands(run):
        path = Path(argv[0])
        data = check_program(path, conf.machine, conf.arch)
        if files.setdefault(path.name, data) != data:
            bad(f"{path} is not the only program called {path.name}; rename one")
        programs.append(Program(argv, path, hashlib.sha256(data).hexdigest()))
    if not programs:
        bad('RUN= names no program; give RUN="prog args; prog2"')
    return programs, files


def build_init(arch: str) -> Path:
    """Compiles guest/init.c when it is newer than the result."""
    source = ROOT / "guest" / "init.c"
    out = BUILD / "guest" / f"init-{arch}"
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    gcc = (os.environ.get("CROSS_COMPILE") or "") + "gcc"
    part = out.with_suffix(f".{os.getpid()}")
    command = [gcc, "-O2", "-Wall", "-Wextra", "-static", "-D_GNU_SOURCE",
               "-o", str(part), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        bad(f"{gcc} is missing; run 'make packages' as root")
    if done.returncode:
        sys.stderr.write(done.stderr)
        bad(f"guest/init.c does not compile with {gcc} -static")
    part.replace(out)
    return out


def cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """A newc archive of (name, mode, data): no root, same input same bytes."""
    out = bytearray()
    for inode, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08X" % f for f in fields) + raw
        out += bytes(-len(out) % 4)
        out += data
        out += bytes(-len(out) % 4)
    return bytes(out)


def initramfs(init: bytes, programs: list[Program], files: dict[str, bytes]) -> bytes:
    """Init, the programs under /run, and the list of commands."""
    words: list[str] = []
    for program in programs:
        words += [str(len(program.argv)), f"/run/{program.name}", *program.argv[1:]]
    listing = "".join(word + "\0" for word in words)
    entries = [(name, 0o40755, b"") for name in ("dev", "proc", "sys", "tmp", "run")]
    entries += [("init", 0o100755, init), ("commands", 0o100644, os.fsencode(listing))]
    entries += [(f"run/{name}", 0o100755, data) for name, data in sorted(files.items())]
    return cpio(entries)


class Guest:
    """A running QEMU and its three channels: console, output, control."""

    def __init__(self, conf: Settings, accel: str, kernel: Path, initrd: bytes, log: Path):
        self.conf = conf
        self.ended: int | None = None
        self.fds: dict[str, int] = {}
        # In memory: nothing to clean up, however this ends.
        image = os.memfd_create("initrd")
        with os.fdopen(image, "wb", closefd=False) as file:
            file.write(initrd)
        ends = [image]
        serial: list[str] = []
        for name in ("console", "output", "control"):
            ours, theirs = os.pipe()
            self.fds[name] = ours
            ends.append(theirs)
            serial += ["-chardev", f"file,id={name},path=/dev/fd/{theirs}"]
            serial += ["-serial", f"chardev:{name}"]
        self.cmdline = command_line(conf)
        machine = conf.machine
        cpu = machine.cpu_kvm if accel == "kvm" else machine.cpu_tcg
        self.command = [
            machine.qemu, *machine.options, *accelerator(conf, accel), "-cpu", cpu,
            "-m", conf.mem, "-nodefaults", "-no-user-config", "-display", "none",
            "-no-reboot", "-kernel", str(kernel), "-initrd", f"/dev/fd/{image}",
            "-append", self.cmdline,
        ]
        self.errors = log / "qemu.log"
        # Whatever ends this script, even SIGKILL, ends QEMU too.
        guarded = ["setpriv", "--pdeathsig", "KILL", *self.command, *serial]
        try:
            with self.errors.open("wb") as errors:
                self.process = subprocess.Popen(
                    guarded, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    pass_fds=ends,
                )
        except FileNotFoundError:
            raise Trouble(EXIT_QEMU, "setpriv is missing; install util-linux") from None
        finally:
            for fd in ends:
                os.close(fd)

    def stop(self) -> None:
        """Ends QEMU, gently first; notes the status if it ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ended = self.process.wait(0.2)
        if self.ended is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


def accelerator(conf: Settings, accel: str) -> list[str]:
    """QEMU's options for the processor."""
    if conf.icount:
        return ["-accel", "tcg,thread=single", "-smp", "1", "-icount", "shift=0,sleep=off"]
    if accel == "kvm":
        return ["-accel", "kvm", "-smp", str(conf.smp)]
    return ["-accel", "tcg,thread=multi", "-smp", str(conf.smp)]


def command_line(conf: Settings) -> str:
    """The kernel's arguments."""
    words = [
        f"console={conf.machine.console}", "panic=-1", conf.machine.ports,
        f"hugepages={conf.hugepages}",
    ]
    if conf.icount:
        # One node: measurements are of the plain machine.
        words += ["nokaslr", "norandmaps"]
    else:
        # Two nodes for the tests that migrate. The balancer would unmap pages
        # under the tests that count faults.
        words += ["numa=fake=2", "numa_balancing=disable"]
    return " ".join(words)


class Watch:
    """Copies the channels of a guest until it ends or hangs, and what was seen."""

    def __init__(self, guest: Guest, programs: list[Program], log: Path, stdout: int | None):
        self.guest = guest
        self.programs = programs
        self.log = log
        self.stdout = stdout
        self.release = ""  # of the kernel, once init runs
        self.running = 0  # number of the program that runs, from 1
        self.since = time.monotonic()  # of what runs, or of the last event
        self.finished = False
        self.hang = ""
        self.notes: list[str] = []
        self.pending = b""
        self.outfile: BinaryIO | None = None

    def output(self, data: bytes) -> None:
        """What a program wrote."""
        if self.outfile:
            self.outfile.write(data)
        while self.stdout is not None and data:
            data = data[os.write(self.stdout, data):]

    def close_output(self) -> None:
        """No program runs any more."""
        if self.outfile:
            self.outfile.close()
            self.outfile = None

    def control(self, data: bytes) -> None:
        """Messages of init; guest/init.c lists them."""
        # A program's last words precede its status: what is in the output
        # pipe by now was written before.
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self.guest.fds["output"], 65536):
                self.output(written)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "note":
                self.notes.append(rest)
                print(f"guest: {rest}", file=sys.stderr)
                continue
            now = time.monotonic()
            if word == "init":
                self.release = rest
            elif word == "run":
                self.running = int(rest)
                self.outfile = (self.log / f"{rest}.out").open("wb", buffering=0)
            elif word == "exit":
                program = self.programs[self.running - 1]
                program.status = int(rest.split()[1])
                program.seconds = round(now - self.since, 3)
                self.running = 0
                self.close_output()
            elif word == "done":
                self.finished = True
            self.since = now

    def copy(self, bound: float) -> None:
        """Follows the guest, for as long as bound."""
        start = last = time.monotonic()
        verbose = self.guest.conf.verbose
        with (
            (self.log / "console.log").open("wb", buffering=0) as console_log,
            selectors.DefaultSelector() as selector,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(self.close_output)
            for name, pipe in self.guest.fds.items():
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ, name)
            while selector.get_map() and not self.over(start, last, bound):
                for key, _ in selector.select(0.5):
                    last = time.monotonic()
                    try:
                        data = os.read(key.fd, 65536)
                    except BlockingIOError:
                        continue
                    if not data:
                        selector.unregister(key.fd)
                    elif key.data == "output":
                        self.output(data)
                    elif key.data == "control":
                        self.control(data)
                    else:
                        console_log.write(data)
                        if verbose:
                            sys.stderr.buffer.write(data)
                            sys.stderr.buffer.flush()

    def over(self, start: float, last: float, bound: float) -> bool:
        """Whether it is time to give up; notes why if that is a fault."""
        now = time.monotonic()
        if self.finished:
            # A machine that cannot switch itself off is no fault.
            return now - self.since > POWER_OFF_SECONDS
        if now - last > self.guest.conf.timeout:
            self.hang = f"nothing was heard for {self.guest.conf.timeout} s"
        elif now - start > bound:
            self.hang = f"not done after {round(bound)} s"
        return bool(self.hang)


def kvm_key() -> str:
    """Changes when KVM may have begun or ceased to work."""
    try:
        dev = os.stat("/dev/kvm")
    except OSError:
        return ""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {dev.st_rdev} {dev.st_ino} {dev.st_ctime_ns} {os.geteuid()}"


def choose_accel(conf: Settings, kernel: Path, init: bytes) -> str:
    """KVM only if this kernel really reaches init with it."""
    key = kvm_key()
    if not key or conf.icount or os.uname().machine != conf.arch:
        return "tcg"
    with contextlib.suppress(OSError, ValueError):
        old = json.loads(KVM_CACHE.read_text())
        if old["key"] == key:
            return str(old["accel"])
    print("guest: trying whether KVM boots a kernel here", file=sys.stderr)
    probe = Settings(
        conf.arch, conf.machine, 1, "512M", 0, False, PROBE_SECONDS, False
    )
    with tempfile.TemporaryDirectory(dir=BUILD / "guest", prefix="probe.") as name:
        log = Path(name)
        guest = Guest(probe, "kvm", kernel, initramfs(init, [], {}), log)
        try:
            watch = Watch(guest, [], log, None)
            watch.copy(PROBE_SECONDS)
        finally:
            guest.stop()
    if watch.finished:
        print("guest: KVM works", file=sys.stderr)
        return "kvm"
    print("guest: KVM does not boot it; using TCG", file=sys.stderr)
    return "tcg"


def keep_accel(conf: Settings, accel: str) -> None:
    """Keeps the answer, once a kernel that works has confirmed it."""
    key = kvm_key()
    if key and not conf.icount:
        part = KVM_CACHE.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"key": key, "accel": accel}))
        part.replace(KVM_CACHE)


def show(seen: Watch, reports: list[console.Report], status: int) -> None:
    """Prints what explains a status: reports in context, what failed."""
    for report in reports:
        if not report.allowed:
            print(f"--- {'+'.join(report.names)}: {report.title}", file=sys.stderr)
            for line in report.context:
                print(f"    {line}", file=sys.stderr)
            print("---", file=sys.stderr)
    if status in (EXIT_TIMEOUT, EXIT_ENDED):
        for line in last_lines(seen.log / "console.log"):
            print(f"    {line}", file=sys.stderr)
    for index, program in enumerate(seen.programs, 1):
        if program.status:
            print(f"guest: '{program.what}' ended with status {program.status}", file=sys.stderr)
        elif program.status is None and seen.release and index != seen.running:
            print(f"guest: '{program.what}' never ran", file=sys.stderr)


def what_ran(seen: Watch) -> str:
    """Where the guest was, in words."""
    seconds = round(time.monotonic() - seen.since)
    if seen.running:
        return f"'{seen.programs[seen.running - 1].what}' had run for {seconds} s"
    if seen.finished:
        return "it was powering off"
    ended = [p for p in seen.programs if p.status is not None]
    if ended:
        return f"'{ended[-1].what}' had ended {seconds} s before"
    if seen.release:
        return "init ran and no program yet"
    return f"the kernel booted for {seconds} s and did not reach init"


def last_lines(path: Path, count: int = 5) -> list[str]:
    """The end of a log."""
    lines = path.read_bytes().decode(errors="replace").replace("\r", "").splitlines()
    return [line for line in lines if line.strip()][-count:]


def verdict(seen: Watch, reports: list[console.Report]) -> tuple[int, str]:
    """The exit status and, if it is not that of a program, why."""
    counted = [r for r in reports if not r.allowed]
    where = what_ran(seen)
    console_log = seen.log / "console.log"
    if any("panic" in r.names for r in counted):
        return EXIT_PANIC, f"kernel panic; {where}"
    if seen.hang:
        return EXIT_TIMEOUT, f"{seen.hang}; {where}; the console is in {console_log}"
    if not seen.finished:
        if not console_log.stat().st_size and seen.guest.ended:
            why = last_lines(seen.guest.errors, 1) or [f"exit status {seen.guest.ended}"]
            return EXIT_QEMU, f"QEMU does not start: {why[0]}"
        return EXIT_ENDED, f"the guest ended early; {where}; see {console_log}"
    first = next((p.status for p in seen.programs if p.status), 0)
    if first:
        return first, ""
    if counted:
        names = sorted({name for r in counted for name in r.names})
        return EXIT_REPORT, f"the kernel reported: {', '.join(names)}"
    return 0, ""


def qemu_version(qemu: str) -> str:
    """The first line of QEMU's --version."""
    done = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0]


def boot(kernel: Path, log: Path) -> int:
    """The whole job."""
    # First of all: no error may leave an older run's results to be read.
    for stale in [*log.glob("*.out"), log / "guest.json", log / "console.log"]:
        stale.unlink(missing_ok=True)
    conf = settings()
    programs, files = read_programs(os.environ.get("RUN") or "", conf)
    if not kernel.is_file():
        bad(f"there is no kernel {kernel}; build it with 'make kernel'")
    if not shutil.which(conf.machine.qemu):
        raise Trouble(EXIT_QEMU, f"{conf.machine.qemu} is missing; run 'make packages' as root")
    init = build_init(conf.arch).read_bytes()
    log.mkdir(parents=True, exist_ok=True)
    accel = choose_accel(conf, kernel, init)
    started = time.monotonic()
    guest = Guest(conf, accel, kernel, initramfs(init, programs, files), log)
    try:
        seen = Watch(guest, programs, log, sys.stdout.fileno())
        seen.copy(WHOLE * conf.timeout)
    finally:
        guest.stop()
    if seen.release:
        keep_accel(conf, accel)

    reports = console.classify((log / "console.log").read_bytes())
    status, why = verdict(seen, reports)
    show(seen, reports, status)
    summary = {
        "status": status,
        "why": why,
        "kernel": str(kernel),
        "kernel_sha256": hashlib.sha256(kernel.read_bytes()).hexdigest(),
        "release": seen.release,
        "qemu": qemu_version(conf.machine.qemu),
        "accel": "tcg icount" if conf.icount else accel,
        "smp": 1 if conf.icount else conf.smp,
        "mem": conf.mem,
        "command": shlex.join(guest.command),
        "seconds": round(time.monotonic() - started, 1),
        "notes": seen.notes,
        "reports": [
            {"names": r.names, "title": r.title, "allowed": r.allowed} for r in reports
        ],
        "programs": [
            {"name": p.name, "command": p.what, "sha256": p.sha256,
             "status": p.status, "seconds": p.seconds}
            for p in programs
        ],
    }
    part = log / "guest.json.part"
    part.write_text(json.dumps(summary, indent=2) + "\n")
    part.replace(log / "guest.json")
    if why:
        raise Trouble(status, why)
    return status


def main() -> int:
    """Parses the command line; turns trouble into one line."""
    parser = argparse.ArgumentParser(description="boot a kernel, run static programs in it")
    parser.add_argument("--kernel", type=Path, required=True, help="kernel image")
    parser.add_argument("--log", type=Path, default=BUILD / "guest" / "log", help="directory")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return boot(args.kernel, args.log)
    except Trouble as err:
        print(f"error: {err}", file=sys.stderr)
        return err.status
    except BrokenPipeError:
        # Nobody reads the output any more; the guest is gone by now.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except (OSError, ValueError) as err:
        print(f"error: {err}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
