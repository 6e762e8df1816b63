#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Import one kernel source, a tar stream, as a commit of a git repository.

Prevents trees that differ from machine to machine: the same files give the
same commit id, on every machine and in every order of imports. An import
that was interrupted leaves no tag, so that nothing is built from half a tree.

usage: import.py GIT-DIR TAG SUBJECT COMMAND...
COMMAND writes the tar stream; its first path component is dropped.
"""

import os
import subprocess
import sys
import tarfile
import time
from typing import BinaryIO

# Nobody's in particular: an import is not the work of the one who ran it.
IDENTITY = b"Linux kernel import <linux-import@localhost>"


class Progress:
    """What was done since when: a line that moves on a terminal, else one
    every ten seconds."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.start = self.last = time.monotonic()
        self.tty = sys.stderr.isatty()

    def show(self, files: int, size: int, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.last < (0.5 if self.tty else 10):
            return
        self.last = now
        gone = int(now - self.start)
        sys.stderr.write(
            f"{chr(13) if self.tty else ''}importing {self.what}: {files} files, "
            f"{size >> 20} MiB, {gone // 60}:{gone % 60:02}"
            f"{'' if self.tty and not last else chr(10)}"
        )
        sys.stderr.flush()


def quoted(path: bytes) -> bytes:
    """The path as fast-import reads it."""
    if path.startswith(b'"') or b"\n" in path:
        path = path.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        return b'"' + path.replace(b"\n", b"\\n") + b'"'
    return path


def copy(tar: tarfile.TarFile, out: BinaryIO, what: str) -> tuple[list[bytes], int]:
    """Send every file as a blob; return fast-import's lines that put them
    into a tree, and the newest time stamp."""
    tree: list[bytes] = []
    newest = size = 0
    progress = Progress(what)
    for member in tar:
        path = os.fsencode(member.name).partition(b"/")[2]
        if member.isdir() or not path:
            continue
        if member.isfile():
            stream = tar.extractfile(member)
            data = stream.read() if stream else b""
            mode = b"100755" if member.mode & 0o100 else b"100644"
        elif member.issym():
            data = os.fsencode(member.linkname)
            mode = b"120000"
        else:
            raise tarfile.TarError(f"{member.name} is no file and no symlink")
        tree.append(b"M %s :%d %s\n" % (mode, len(tree) + 1, quoted(path)))
        out.write(b"blob\nmark :%d\ndata %d\n" % (len(tree), len(data)))
        out.write(data)
        newest = max(newest, int(member.mtime))
        size += len(data)
        progress.show(len(tree), size)
    progress.show(len(tree), size, last=True)
    return tree, newest


def main() -> int:
    git_dir, tag, subject, *command = sys.argv[1:]
    source = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # Fast compression: the pack is a cache, and zlib is most of the time.
    git = subprocess.Popen(
        [
            *("git", f"--git-dir={git_dir}", "-c", "core.compression=1"),
            *("fast-import", "--quiet", "--force", "--done"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert source.stdout and source.stderr and git.stdin and git.stderr
    problem = ""
    try:
        with tarfile.open(fileobj=source.stdout, mode="r|") as tar:
            tree, newest = copy(tar, git.stdin, subject)
        source.stdout.read()
        said = source.stderr.read().decode(errors="replace").strip()
        if source.wait():
            problem = f"{command[0]}: {said.splitlines()[-1] if said else 'failed'}"
        elif not tree:
            problem = "there are no files in it"
        else:
            git.stdin.write(
                b"commit refs/tags/%s\n" % tag.encode()
                + b"committer %s %d +0000\n" % (IDENTITY, newest)
                + b"data %d\n%s\n" % (len(subject.encode()) + 1, subject.encode())
                + b"".join(tree)
                + b"done\n"
            )
        git.stdin.close()
    except tarfile.TarError as error:
        problem = f"damaged archive: {error}"
    except BrokenPipeError:
        pass  # fast-import ended early and says why below
    except KeyboardInterrupt:
        problem = "interrupted"
    finally:
        source.kill()
        if problem:
            git.kill()
    said = git.stderr.read().decode(errors="replace")
    if git.wait() and not problem:
        fatal = [line for line in said.splitlines() if line.startswith("fatal: ")]
        problem = fatal[0].removeprefix("fatal: ") if fatal else "git fast-import failed"
        if "diskspace" in said or "No space left" in said:
            problem = f"no space left in {git_dir}; free some and run again"
    if problem:
        print(f"error: import of {subject}: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
