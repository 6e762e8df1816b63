# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# What the tests of the scripts share: a scratch copy of the repository, whose
# build/ is the test's own, and the check for "one clear line".

# scratch_repo: a copy of what git has (or would have) in $BATS_TEST_TMPDIR.
scratch_repo()
{
	local top

	top=$(cd "$BATS_TEST_DIRNAME/.." && pwd)
	REPO=$BATS_TEST_TMPDIR/repo
	mkdir -p "$REPO"
	(cd "$top" && git ls-files -co --exclude-standard -z |
		tar -c --null --ignore-failed-read -T - 2>/dev/null) | tar -x -C "$REPO"
	export BUILD=$REPO/build
	unset BASE TOPIC STATE CONFIG ARCH KTREE SRC_CACHE RUN SMP MEM ICOUNT V W C LLVM
	unset MAKEFLAGS MFLAGS MAKELEVEL
}

# one_line_error REGEX: the last run failed with exactly one line "error: …"
# on its output that matches, and nothing else that cries.
one_line_error()
{
	[ "$status" -ne 0 ] || { echo "passed: $output"; return 1; }
	[ "$(grep -c '^error: ' <<<"$output")" -eq 1 ] || { echo "$output"; return 1; }
	grep -qE "^error: .*$1" <<<"$output" || { echo "$output"; return 1; }
	! grep -qE '(command not found|No such file|unbound variable|Traceback)' <<<"$output" ||
		{ echo "$output"; return 1; }
}
