#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Read and finish the mails of a series (git format-patch output).

Prevents a cover letter that is lost between patches/ and a tree, and mails
whose identity changes although their content did not.

usage: mails.py cover TOPIC COVER      the message of the topic's cover commit
       mails.py finish LINE TOPIC VERSION DATE DIR
                                       give the mails in DIR stable ids
       mails.py lint DIR               one line per fault of form in DIR
"""

import email.header
import email.utils
import hashlib
import re
import sys
from pathlib import Path

THREAD_HEADERS = ("message-id", "in-reply-to", "references")


class Mail:
    """A mail as git format-patch writes it: headers as lines, body as text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        head, _, self.body = text.partition("\n\n")
        first, _, head = head.partition("\n")
        self.envelope = first
        # Unfolded: b4 0.12 stumbles over a Subject of two lines.
        self.headers = re.sub(r"\n[ \t]+", " ", head).split("\n")

    def get(self, name: str) -> str:
        """The decoded value of a header."""
        for header in self.headers:
            key, _, value = header.partition(":")
            if key.lower() == name:
                parts = email.header.decode_header(value.strip())
                return str(email.header.make_header(parts))
        return ""

    def author(self) -> tuple[str, str]:
        return email.utils.parseaddr(self.get("from"))

    def subject(self) -> str:
        """Without [PATCH …]."""
        return re.sub(r"^\[PATCH[^]]*\] *", "", self.get("subject"))

    def version(self) -> int:
        found = re.match(r"\[PATCH[^]]* v(\d+)[ \]]", self.get("subject"))
        return int(found[1]) if found else 1

    def message(self) -> str:
        """What becomes the commit message's body."""
        return re.split(r"^(?:---$|diff -)", self.body, maxsplit=1, flags=re.M)[0]

    def digest(self) -> str:
        headers = [h for h in self.headers if not h.lower().startswith(THREAD_HEADERS)]
        text = "\n".join([*headers, "", self.body])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def write(self) -> None:
        text = "\n".join([self.envelope, *self.headers]) + "\n\n" + self.body
        self.path.write_bytes(text.encode("utf-8", "surrogateescape"))


def encoded(header: str) -> str:
    """A header of a cover letter, which git leaves in UTF-8, as others are."""
    if header.isascii():
        return header
    name, patch, text = re.split(r": (\[PATCH[^]]*\] )?", header, maxsplit=1)
    return f"{name}: {patch or ''}" + email.header.Header(text, "utf-8").encode().replace("\n", "")


def mails(directory: Path) -> list[Mail]:
    return [Mail(path) for path in sorted(directory.glob("[0-9]*.patch"))]


def cover(topic: str, path: Path) -> str:
    """Subject and text of a cover letter, without what git adds below: the
    shortlog, the diffstat and the base."""
    letter, *patches = mails(path.parent)
    first = min(patch.author()[0] for patch in patches)
    shortlog = re.compile(rf"^{re.escape(first)} \(\d+\):$", re.M)
    found = list(shortlog.finditer(letter.body))
    if not found:
        sys.exit(f"error: {path}: no shortlog below the text; write it by 'make refresh'")
    text = letter.body[: found[-1].start()].strip()
    message = f"{letter.subject()}\n\n{text}\n\n"
    if letter.version() > 1:
        message += f"Version: {letter.version()}\n"
    return message + f"Topic: {topic}\n"


def finish(line: str, topic: str, version: str, date: str, directory: Path) -> None:
    """git format-patch puts the time of day into Message-IDs and the cover's
    Date: use the content and the newest patch's date instead."""
    series = mails(directory)
    letter = series[0]
    letter.headers = [
        f"Date: {date}" if h.lower().startswith("date:") else encoded(h)
        for h in letter.headers
    ]
    slug = f"{topic}-{line}"
    change = hashlib.sha256(slug.encode()).hexdigest()[:12]
    # Cover commits have no patch-id that could be a prerequisite.
    body = re.sub(r"^prerequisite-patch-id: 0+\n", "", letter.body, flags=re.M)
    letter.body = body.rstrip("\n") + f"\nchange-id: {slug}-{change}\n"
    if not letter.body.isascii() and not letter.get("content-type"):
        letter.headers += [
            "MIME-Version: 1.0",
            "Content-Type: text/plain; charset=UTF-8",
            "Content-Transfer-Encoding: 8bit",
        ]
    digests = [mail.digest() for mail in series]
    # The cover stands for the whole series.
    digests[0] = hashlib.sha256("".join(digests).encode()).hexdigest()
    day = email.utils.parsedate_to_datetime(date).strftime("%Y%m%d")
    domain = letter.author()[1].rpartition("@")[2]
    ids = [
        f"<{day}-{topic}-v{version}-{i}-{digest[:12]}@{domain}>"
        for i, digest in enumerate(digests)
    ]
    for i, mail in enumerate(series):
        rest = [h for h in mail.headers if not h.lower().startswith(THREAD_HEADERS)]
        thread = [f"In-Reply-To: {ids[0]}", f"References: {ids[0]}"] if i else []
        mail.headers = [f"Message-ID: {ids[i]}", *thread, *rest]
        mail.write()


def lint_mail(mail: Mail, number: int, last: int, top: str) -> list[str]:
    """Faults of one mail that b4 or a maintainer would stumble over."""
    faults = []
    if not mail.subject():
        faults.append("no subject")
    elif not re.match(rf"\[PATCH[^]]* 0*{number}/0*{last}\] ", mail.get("subject")):
        faults.append(f"subject does not say [PATCH {number}/{last}]")
    if not re.fullmatch(r"<[^<>@\s]+@[^<>@\s]+>", mail.get("message-id")):
        faults.append("no Message-ID")
    if number and (mail.get("in-reply-to"), mail.get("references")) != (top, top):
        faults.append("In-Reply-To and References do not name the cover letter")
    if re.search(r"^From ", mail.body, re.M):
        faults.append("a line begins with 'From ': an mbox splits there")
    ours = "\n".join([mail.message(), *re.findall(r"^\+.*", mail.body, re.M)])
    if found := re.search(r"(?<![\w./])/(?:home|root|work)/[\w./-]+", ours):
        faults.append(f"names a path of one machine: {found[0]}")
    if not all(mail.author()):
        faults.append("no author")
    if not number:
        if not re.search(r"^base-commit: [0-9a-f]{40}$", mail.body, re.M):
            faults.append("no base-commit")
        if not re.search(r"^change-id: \S+\n*\Z", mail.body, re.M):
            faults.append("change-id is not last")
        return faults
    lines = mail.message().rstrip().splitlines()
    signed = "Signed-off-by: {} <{}>".format(*mail.author())
    if not lines or lines[-1] != signed:
        faults.append(f"the message does not end with '{signed}'")
    diffs = re.split(r"^diff --git ", mail.body, flags=re.M)[1:]
    if not diffs:
        faults.append("no diff")
    for diff in diffs:
        if "\n@@ " in diff and not re.search(r"^index [0-9a-f]{12,}\.\.", diff, re.M):
            faults.append(f"no index line for {diff.split()[0]}")
    return faults


def lint(directory: Path) -> int:
    series = mails(directory)
    faults = []
    if len(series) < 2:
        faults.append(f"{directory}: no cover letter with patches")
    else:
        top = series[0].get("message-id")
        if len({mail.get("message-id") for mail in series}) < len(series):
            faults.append(f"{directory}: two mails have the same Message-ID")
        for number, mail in enumerate(series):
            if not mail.path.name.startswith(f"{number:04}-"):
                faults.append(f"{mail.path}: a number is missing before it")
            for fault in lint_mail(mail, number, len(series) - 1, top):
                faults.append(f"{mail.path}: {fault}")
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


def main() -> int:
    match sys.argv[1:]:
        case ["cover", topic, path]:
            sys.stdout.buffer.write(
                cover(topic, Path(path)).encode("utf-8", "surrogateescape")
            )
        case ["finish", line, topic, version, date, directory]:
            finish(line, topic, version, date, Path(directory))
        case ["lint", directory]:
            return lint(Path(directory))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
