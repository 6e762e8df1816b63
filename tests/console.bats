#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# console.py on kernel consoles. Recorded from a guest: clean, memcg-oom, oom,
# panic, user-segfault, warning-6.1; the rest follows the kernel's formats.

bats_require_minimum_version 1.5.0

setup()
{
	cd "$BATS_TEST_DIRNAME/data/console" || return
	CONSOLE=$BATS_TEST_DIRNAME/../scripts/console.py
}

# golden LOG: the verdict is the recorded one, and red unless it is empty.
golden()
{
	run "$CONSOLE" "$1.log"
	diff -u "$1.golden" <(printf '%s' "${output:+$output$'\n'}")
	[ "$status" -eq "$([ -s "$1.golden" ] && echo 1 || echo 0)" ]
}

@test "console: atomic" {
	golden atomic
}

@test "console: bad page" {
	golden bad-page
}

@test "console: caller stamp" {
	golden caller-stamp
}

@test "console: clean" {
	golden clean
}

@test "console: exit counters" {
	golden exit-counters
}

@test "console: hung task" {
	golden hung-task
}

@test "console: innocent" {
	golden innocent
}

@test "console: kasan" {
	golden kasan
}

@test "console: lockdep circular" {
	golden lockdep-circular
}

@test "console: lockdep held" {
	golden lockdep-held
}

@test "console: lockdep irq" {
	golden lockdep-irq
}

@test "console: lockdep rcu" {
	golden lockdep-rcu
}

@test "console: memcg oom" {
	golden memcg-oom
}

@test "console: oom no task" {
	golden oom-no-task
}

@test "console: oom" {
	golden oom
}

@test "console: oops 6.1" {
	golden oops-6.1
}

@test "console: oops arm64" {
	golden oops-arm64
}

@test "console: oops gpf 6.12" {
	golden oops-gpf-6.12
}

@test "console: oops panic" {
	golden oops-panic
}

@test "console: oops powerpc" {
	golden oops-powerpc
}

@test "console: page table check" {
	golden page-table-check
}

@test "console: panic" {
	golden panic
}

@test "console: rcu stall" {
	golden rcu-stall
}

@test "console: slab" {
	golden slab
}

@test "console: soft lockup" {
	golden soft-lockup
}

@test "console: swap" {
	golden swap
}

@test "console: ubsan" {
	golden ubsan
}

@test "console: user segfault" {
	golden user-segfault
}

@test "console: vm warn page" {
	golden vm-warn-page
}

@test "console: warning 6.1" {
	golden warning-6.1
}

@test "console: warning 7.3" {
	golden warning-7.3
}

# with_lists: console.py beside pattern files of the test's own.
with_lists()
{
	cp "$CONSOLE" "$BATS_TEST_DIRNAME"/../scripts/console-{patterns,allow} \
		"$BATS_TEST_TMPDIR"
	CONSOLE=$BATS_TEST_TMPDIR/console.py
}

@test "console: an allowed report is shown and does not count" {
	with_lists
	printf '\n# known, harmless\nwarning kvmalloc_node\n' >> "$BATS_TEST_TMPDIR/console-allow"
	run "$CONSOLE" warning-6.1.log
	[ "$status" -eq 0 ]
	[[ $output == "allowed warning: WARNING: "* ]]
	run "$CONSOLE" warning-7.3.log
	[ "$status" -eq 0 ]
}

@test "console: an exception allows nothing else" {
	with_lists
	printf '\n# known, harmless\nwarning kvmalloc_node\n' >> "$BATS_TEST_TMPDIR/console-allow"
	run "$CONSOLE" oops-6.1.log
	[ "$status" -eq 1 ]
	cat warning-6.1.log panic.log > "$BATS_TEST_TMPDIR/both.log"
	run "$CONSOLE" "$BATS_TEST_TMPDIR/both.log"
	[ "$status" -eq 1 ]
}

@test "console: an exception without its reason is one clear error" {
	with_lists
	printf '\nwarning kvmalloc_node\n' >> "$BATS_TEST_TMPDIR/console-allow"
	run "$CONSOLE" clean.log
	[ "$status" -eq 2 ]
	[[ $output == "error: console-allow:"*": no reason above: warning kvmalloc_node" ]]
}

@test "console: a broken pattern is one clear error" {
	with_lists
	echo 'bug ^BUG: (' >> "$BATS_TEST_TMPDIR/console-patterns"
	run "$CONSOLE" clean.log
	[ "$status" -eq 2 ]
	[[ $output == "error: console-patterns:"* ]]
}
