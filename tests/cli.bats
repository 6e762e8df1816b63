#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# Bad input to the command line: one clear line, non-zero, nothing lost.

bats_require_minimum_version 1.5.0
load helper

setup()
{
	scratch_repo
	cd "$REPO" || return
	# The packages are not what is tested here.
	printf '#!/bin/bash\n' >scripts/packages
}

@test "an unknown BASE names the known ones" {
	run make boot BASE=5.10
	one_line_error 'unknown BASE=5.10; known: 6.1 '
}

@test "an unknown TOPIC names the known ones" {
	run make boot TOPIC=nonsense
	one_line_error 'unknown TOPIC=nonsense on the 6.1 line; known: .*khugepaged-ro'
}

@test "an unknown CONFIG names the known ones" {
	run make boot CONFIG=fast
	one_line_error 'unknown CONFIG=fast; known: test bench debug'
}

@test "an unknown ARCH names the known ones" {
	run make boot ARCH=vax
	one_line_error 'unknown ARCH=vax; known: x86_64'
}

@test "an unknown STATE names the known ones" {
	run make kernel STATE=mended
	one_line_error 'unknown STATE=mended; known: base patched'
}

@test "guest without programs says how to give them" {
	run make guest
	one_line_error 'RUN is empty; give programs: '
}

@test "a KTREE that is no kernel tree" {
	mkdir empty
	run make boot KTREE=empty
	one_line_error 'empty'
}

@test "help lists every command" {
	run make help
	[ "$status" -eq 0 ]
	for c in boot check lint tree refresh kernel guest clean; do
		grep -qE "^  $c " <<<"$output"
	done
}

@test "a plain make gives the help" {
	run make
	[ "$status" -eq 0 ]
	grep -q 'make COMMAND' <<<"$output"
}

@test "clean keeps a tree that holds work" {
	mkdir -p build/tree/6.1
	git init -q build/tree/6.1/patched
	git -C build/tree/6.1/patched -c user.name=t -c user.email=t@t commit -q --allow-empty -m work
	run make clean
	one_line_error "holds work that is not in patches/"
	[ -d build/tree/6.1/patched ]
}

@test "clean removes build" {
	mkdir -p build/src
	run make clean
	[ "$status" -eq 0 ]
	[ ! -e build ]
}

@test "clean keeps a branch and a stash" {
	git init -q --bare build/linux.git
	commit=$(git --git-dir=build/linux.git -c user.name=t -c user.email=t@t \
		commit-tree -m work "$(git --git-dir=build/linux.git mktree </dev/null)")
	git --git-dir=build/linux.git update-ref refs/heads/mine "$commit"
	run make clean
	one_line_error 'holds work of yours .refs/heads/mine.'
	[ -d build/linux.git ]
}

@test "the closing count: passed, failed, skipped" {
	run scripts/summary <<-X
	1..4
	ok 1 one
	ok - two
	ok 3 three # SKIP no swap
	3 passed, 0 failed, 1 skipped
	okay, no test
	X
	[ "$status" -eq 0 ]
	[ "${lines[-1]}" = '2 passed, 0 failed, 1 skipped' ]
	[ "$(grep -c passed <<<"$output")" -eq 1 ]
}

@test "the closing count: a failure, or no test at all, is red" {
	run scripts/summary <<<'not ok 1 one'
	[ "$status" -eq 1 ]
	[ "$output" = $'not ok 1 one\n0 passed, 1 failed, 0 skipped' ]
	run scripts/summary </dev/null
	[ "$status" -eq 1 ]
}

@test "bench and mutations name a topic that has none" {
	cp -r patches/6.1/fork-pte patches/6.1/nothing
	echo nothing >>patches/6.1/series
	printf '#!/bin/bash\n' >scripts/tree
	run make bench TOPIC=nothing
	one_line_error 'no workload program in tools/mm/ for nothing'
	run make mutations TOPIC=nothing
	grep -q '^error: no mutation in tests/mutations/ for nothing' <<<"$output"
	[ "$status" -ne 0 ]
}
