# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# Sourced by every script: strict mode, paths, one-line errors, the table of
# bases. Defines nothing that only one script needs.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# What is built, cached or measured; the only place that is written to.
BUILD=${BUILD:-$ROOT/build}
SRC_CACHE=${SRC_CACHE:-$BUILD/src}
ARCH=${ARCH:-x86_64}
export ROOT BUILD SRC_CACHE ARCH
# What was given to our make is not meant for kbuild's.
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES

# die MESSAGE: one clear line on stderr, exit 1.
die()
{
	printf 'error: %s\n' "$*" >&2
	exit 1
}

# say MESSAGE: what is being done, on stderr, so that stdout stays data.
say()
{
	printf '%s\n' "$*" >&2
}

# since SECONDS_AT_START: the elapsed time as m:ss.
since()
{
	local s=$((SECONDS - $1))

	printf '%d:%02d' $((s / 60)) $((s % 60))
}

# need TOOL...: fail with the way out when a tool is missing.
need()
{
	local t

	for t; do
		command -v "$t" >/dev/null ||
			die "$t is missing; run 'make packages' as root"
	done
}

# bases: all rows of patches/*/base as "LINE BASE VERSION SOURCE SUITE SHA256".
bases()
{
	local f

	for f in "$ROOT"/patches/*/base; do
		sed -e 's/#.*//' -e '/^[[:space:]]*$/d' \
			-e "s/^/$(basename "$(dirname "$f")") /" "$f"
	done
}

# line_of BASE: the line whose patches fit BASE. A tree of the user's own
# (BASE=ktree) takes the newest line that is not newer than its version.
line_of()
{
	local row

	if [ "$1" = ktree ]; then
		cat "$BUILD/ktree.line" 2>/dev/null ||
			die "BASE=ktree needs KTREE=DIR, a kernel tree"
		return
	fi
	row=$(bases | awk -v b="$1" '$2 == b { print $1 }')
	[ -n "$row" ] ||
		die "unknown BASE=$1; known: $(bases | awk '{ print $2 }' | paste -sd' ')"
	printf '%s\n' "$row"
}

# topics LINE [TOPIC]: the topics of a line in order, or just TOPIC if the
# line has it.
topics()
{
	local all

	all=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$ROOT/patches/$1/series")
	if [ -z "${2:-}" ]; then
		printf '%s' "${all:+$all$'\n'}"
	elif grep -qxF -- "$2" <<<"$all"; then
		printf '%s\n' "$2"
	else
		die "unknown TOPIC=$2 on the $1 line; known: $(paste -sd' ' <<<"$all")"
	fi
}

# selftests_of LINE TOPIC: its selftests, the new files that it adds there.
selftests_of()
{
	sed -nE 's,^ create mode 100644 tools/testing/selftests/(mm|vm)/([a-z0-9_]+)\.c$,\2,p' \
		"$ROOT/patches/$1/$2"/[0-9]*.patch | sort -u
}

# tree_of BASE STATE: the directory of that kernel tree.
tree_of()
{
	case $2 in
	base | patched) printf '%s/tree/%s/%s\n' "$BUILD" "$1" "$2" ;;
	*) die "unknown STATE=$2; known: base patched" ;;
	esac
}

# objects_of BASE STATE CONFIG: the kbuild O= directory.
objects_of()
{
	printf '%s/.%s-%s\n' "$(tree_of "$1" "$2")" "$ARCH" "$3"
}

# image_of BASE STATE CONFIG: the kernel image to boot.
image_of()
{
	case $ARCH in
	x86_64) printf '%s/arch/x86/boot/bzImage\n' "$(objects_of "$1" "$2" "$3")" ;;
	*) die "unknown ARCH=$ARCH; known: x86_64" ;;
	esac
}

# fragments_of BASE CONFIG: the fragments over tinyconfig, later ones win.
fragments_of()
{
	local line f

	line=$(line_of "$1")
	case $2 in
	test | bench | debug) ;;
	*) die "unknown CONFIG=$2; known: test bench debug" ;;
	esac
	for f in common "$ARCH" "$line" "$2"; do
		[ ! -f "$ROOT/configs/$f.config" ] || printf '%s\n' "$ROOT/configs/$f.config"
	done
}

# lock NAME: one run at a time of what NAME guards, until the script ends.
lock()
{
	mkdir -p "$BUILD"
	exec 9>"$BUILD/$1.lock"
	flock -n 9 && return
	say "waiting for another run ($1) to end"
	flock 9
}

# git_env: from here on git does the same whatever the user's or the system's
# configuration says, whoever owns the files, and asks nothing.
git_env()
{
	# shellcheck disable=SC2046
	unset $(git rev-parse --local-env-vars)
	export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
	export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory \
		GIT_CONFIG_VALUE_0='*'
	export GIT_TERMINAL_PROMPT=0 LC_ALL=C.UTF-8
}

# in_repo GIT-ARGUMENTS: git on the repository of the imported kernels.
in_repo()
{
	git --git-dir="$BUILD/linux.git" "$@"
}

# prune_worktrees: git forgets the work trees that are gone; those of a
# repository that was moved as a whole are found again first.
prune_worktrees()
{
	local tree

	for tree in "$BUILD"/tree/*/{base,patched}; do
		[ ! -e "$tree/.git" ] || in_repo worktree repair "$tree" >/dev/null 2>&1 || true
	done
	in_repo worktree prune
}

# valid_input: BASE, STATE, CONFIG, ARCH and TOPIC name things that exist. Asked
# before anything long begins.
valid_input()
{
	local line

	line=$(line_of "$BASE")
	tree_of "$BASE" "$STATE" >/dev/null
	image_of "$BASE" "$STATE" "$CONFIG" >/dev/null
	fragments_of "$BASE" "$CONFIG" >/dev/null
	topics "$line" "${TOPIC:-}" >/dev/null
}

# KMAKE: arguments of every call of a kernel's make. One that differs in the
# compiler rebuilds the host tools, and objtool rebuilds all the rest.
export CCACHE_DIR=${CCACHE_DIR:-$BUILD/ccache} CCACHE_MAXSIZE=5G
# shellcheck disable=SC2034 # for those who source this
KMAKE=("ARCH=$ARCH" KBUILD_BUILD_USER=mm KBUILD_BUILD_HOST=mm KBUILD_BUILD_VERSION=1
	"KBUILD_BUILD_TIMESTAMP=Thu Jan  1 00:00:00 UTC 1970")
if [ -n "${LLVM:-}" ]; then
	KMAKE+=("LLVM=$LLVM" "CC=ccache clang${LLVM#1}" "HOSTCC=ccache clang${LLVM#1}")
else
	KMAKE+=("CC=ccache ${CROSS_COMPILE:-}gcc" "HOSTCC=ccache gcc")
fi
