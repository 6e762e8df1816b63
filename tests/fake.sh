# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by tests of the sources, the trees and the series: a repository of
# their own with a tiny kernel, and a stand-in for apt with a mirror in a
# directory, so that they need neither network nor time.

FAKE=$BATS_FILE_TMPDIR/work

# fake_repo: a repository with our scripts, and nothing of an earlier test.
fake_repo()
{
	rm -rf "$FAKE"
	mkdir -p "$FAKE"/{repo/patches,home,bin,mirror,src}
	cp -a "$BATS_TEST_DIRNAME/../scripts" "$FAKE/repo/scripts"
	fake_env
}

# fake_env: work in that repository, as nobody in particular.
fake_env()
{
	unset BUILD SRC_CACHE KTREE BASE TOPIC
	export HOME=$FAKE/home FAKE_MIRROR=$FAKE/mirror PATH=$FAKE/bin:$PATH
	export GIT_AUTHOR_NAME='A U Thor' GIT_AUTHOR_EMAIL=author@example.org
	export GIT_COMMITTER_NAME='A U Thor' GIT_COMMITTER_EMAIL=author@example.org
	cd "$FAKE/repo" || return 1
}

# fake_kernel VERSION DIR: the files of a kernel.
fake_kernel()
{
	local i

	mkdir -p "$2"/{mm,scripts,include/linux,tools/testing/selftests/vm}
	printf 'VERSION = %s\nPATCHLEVEL = %s\nSUBLEVEL = %s\nEXTRAVERSION =\n' \
		"$(cut -d. -f1 <<<"$1")" "$(cut -d. -f2 <<<"$1")" \
		"$(cut -d. -f3 <<<"$1")" >"$2/Makefile"
	# As long as a real one: nobody may stop reading it half-way.
	yes '# filler' | head -n 20000 >>"$2/Makefile"
	printf '.*\n*.o\nvmlinux\ntags\n!.gitignore\n' >"$2/.gitignore"
	for i in $(seq 60); do
		printf 'int line_%s;\n' "$i"
	done >"$2/mm/ksm.c"
	sed 's/line/huge/' "$2/mm/ksm.c" >"$2/mm/huge_memory.c"
	printf 'TEST_GEN_FILES = cow\n' >"$2/tools/testing/selftests/vm/Makefile"
	printf '#!/bin/sh\n' >"$2/scripts/run.sh"
	chmod +x "$2/scripts/run.sh"
	ln -s ../mm/ksm.c "$2/scripts/link"
}

# fake_source VERSION: its original tarball on the mirror, listed as
# linux=VERSION-1.
fake_source()
{
	local dir=$FAKE/src/linux-$1

	fake_kernel "$1" "$dir"
	find "$dir" -print0 | xargs -0 touch -h -d '2024-05-06 07:08:09 UTC'
	tar -C "$FAKE/src" -cJf "$FAKE_MIRROR/linux_$1.orig.tar.xz" "linux-$1"
	printf 'linux %s-1 linux_%s.orig.tar.xz\n' "$1" "$1" >>"$FAKE_MIRROR/list"
}

# fake_base LINE BASE VERSION [SOURCE]: a row of patches/LINE/base.
fake_base()
{
	local source=${4:-linux=$3-1} file=linux_$3.orig.tar.xz

	[ -z "${4:-}" ] || file=${4%%=*}_${4#*=}_all.deb
	mkdir -p "patches/$1"
	touch "patches/$1/series"
	printf '%s %s %s bookworm-security %s\n' "$2" "$3" "$source" \
		"$(sha256sum <"$FAKE_MIRROR/$file" | cut -d' ' -f1)" >>"patches/$1/base"
}

# fake_apt: first in PATH, an apt that knows only $FAKE_MIRROR. Files in $FAKE_MIRROR
# make it fail: offline, full, sync (once), lacks, corrupt.
fake_apt()
{
	cat >"$FAKE/bin/apt-get" <<-'EOF'
	#!/usr/bin/env bash
	set -eu
	echo "$*" >>"$FAKE_MIRROR/log"
	fail() { echo "E: $*" >&2; exit 100; }
	case $* in
	indextargets*)
		echo 'Debian|Debian|http://mirror.invalid/debian/'
		echo 'Debian|Debian-Security|http://mirror.invalid/debian-security/'
		echo 'Other|Other|http://other.invalid/debian/'
		exit ;;
	*update)
		[ ! -e "$FAKE_MIRROR/offline" ] || fail "Failed to fetch http://mirror.invalid  Could not resolve 'mirror.invalid'"
		[ ! -e "$FAKE_MIRROR/full" ] || fail 'Write error - write (28: No space left on device)'
		[ ! -e "$FAKE_MIRROR/sync" ] || { rm "$FAKE_MIRROR/sync"; fail 'File has unexpected size. Mirror sync in progress?'; }
		exit ;;
	esac
	want=${*: -1}
	while read -r package version file; do
		[ "$package=$version" = "$want" ] || continue
		case $* in *--print-uris*)
			printf "'http://mirror.invalid/%s' %s %s SHA256:%s\n" "$file" "$file" \
				"$(stat -c %s "$FAKE_MIRROR/$file")" "$(sha256sum <"$FAKE_MIRROR/$file" | cut -d' ' -f1)"
			exit ;;
		esac
		! grep -qxF "$file" "$FAKE_MIRROR/lacks" 2>/dev/null || fail "Failed to fetch $file  404  Not Found"
		[ ! -e "$FAKE_MIRROR/fullget" ] || fail 'Write error - write (28: No space left on device)'
		cp "$FAKE_MIRROR/$file" .
		[ ! -e "$FAKE_MIRROR/corrupt" ] || echo more >>"$file"
		exit 0
	done <"$FAKE_MIRROR/list"
	fail "Unable to find a source package for $want"
	EOF
	cat >"$FAKE/bin/apt-cache" <<-'EOF'
	#!/usr/bin/env bash
	package=${*: -1}
	awk -v p="$package" '$1 == p { print $1 " | " $2 " | http://mirror.invalid" }' "$FAKE_MIRROR/list"
	EOF
	# No test waits for a mirror.
	printf '#!/bin/sh\n' >"$FAKE/bin/sleep"
	chmod +x "$FAKE"/bin/*
}

# fake_line: a repository with BASE=6.1 (6.1.5) on the mirror.
fake_line()
{
	fake_repo
	fake_apt
	fake_source 6.1.5
	fake_base 6.1 6.1 6.1.5
}

# fake_ready: the same with topic "one" in its tree. It is made once per file,
# and put back at the same place, which git's work trees know, for each test.
fake_ready()
{
	if [ ! -d "$FAKE.ready" ]; then
		fake_line
		fake_topic one first
		cp -a "$FAKE" "$FAKE.ready"
	fi
	cd /
	rm -rf "$FAKE"
	cp -a "$FAKE.ready" "$FAKE"
	fake_env
}

# commit DATE SUBJECT [FILE]: one signed patch in the patched tree.
commit()
{
	local tree=build/tree/6.1/patched

	git -C "$tree" add -A
	GIT_AUTHOR_DATE="$1T10:00:00+0200" git -C "$tree" commit -q \
		-m "$2" -m 'Why it is right.' \
		-m 'Signed-off-by: A U Thor <author@example.org>'
}

# fake_topic NAME WORD: a topic of two patches, one of them a new test, written by
# refresh; appended to the series.
fake_topic()
{
	local tree=build/tree/6.1/patched line=30

	scripts/apply 6.1
	[ ! -s patches/6.1/series ] || line=45
	echo "$1" >>patches/6.1/series
	mkdir "patches/6.1/$1"
	echo "present mm/ksm.c ^int $2;" >"patches/6.1/$1/probe"
	git -C "$tree" commit -q --allow-empty -m "mm: what $1 is for" \
		-m 'Costs 3 µs.' -m "Topic: $1"
	sed -i "s/^int line_$line;/int $2;/" "$tree/mm/ksm.c"
	commit 2024-06-01 "mm/ksm: $2"
	echo "int $2_test;" >"$tree/tools/testing/selftests/vm/$2.c"
	commit 2024-06-02 "selftests/vm: test of $2"
	scripts/refresh 6.1
}

# one_error PATTERN: bats' run failed with exactly one line of error, and it
# matches.
one_error()
{
	[ "$status" -ne 0 ] || { echo "succeeded: $output"; return 1; }
	[ "$(grep -c '^error: ' <<<"$output")" = 1 ] || { echo "not one error: $output"; return 1; }
	grep -qE "^error: .*$1" <<<"$output" || { echo "not '$1': $output"; return 1; }
}

# not COMMAND...: bats does not see a failing "! COMMAND".
not()
{
	if "$@"; then
		return 1
	fi
}
