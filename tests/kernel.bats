#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# Configuring and building: options that do not stick, failures, ^C and the run
# after it. The kernel tree is a few lines of make that behave like kbuild.

bats_require_minimum_version 1.5.0
load helper

setup()
{
	scratch_repo
	cd "$REPO" || return
	# shellcheck disable=SC2153 # set by scratch_repo
	tree=$BUILD/tree/6.1/base
	mkdir -p "$tree/scripts/kconfig"
	cat >"$tree/Makefile" <<'X'
o := $(O)
tinyconfig:
	echo CONFIG_TINY=y > $o/.config
olddefconfig:
	grep -v '$(DROP)' $o/.config > $o/.c; mv $o/.c $o/.config
bzImage:
	echo "  CC      mm/memory.o"
	if [ -e broken ]; then echo "mm/memory.c:3:1: error: expected ;"; exit 1; fi
	if [ -e slow ]; then touch started; sleep 60; fi
	mkdir -p $o/arch/x86/boot && touch $o/arch/x86/boot/bzImage
X
	sed -i '1i DROP ?= CONFIG_NEVER' "$tree/Makefile"
	cat >"$tree/scripts/kconfig/merge_config.sh" <<'X'
#!/bin/bash
shift 5
cat "$@" >>.config
X
	chmod +x "$tree/scripts/kconfig/merge_config.sh"
	build=(scripts/kernel 6.1 base test)
}

@test "prints the image, and the documented directory leads to it" {
	run --separate-stderr "${build[@]}"
	[ "$status" -eq 0 ]
	[ "$output" = "$tree/.x86_64-test/arch/x86/boot/bzImage" ]
	[ -e build/x86_64/6.1/test/base/arch/x86/boot/bzImage ]
}

@test "an option that does not stick is named" {
	DROP=CONFIG_KSM run "${build[@]}"
	one_line_error 'options of configs/ did not stick: CONFIG_KSM=y$'
	# and is not taken for configured by the next run
	run "${build[@]}"
	[ "$status" -eq 0 ]
}

@test "a changed fragment configures anew" {
	"${build[@]}"
	echo 'CONFIG_NEW=y' >>configs/test.config
	"${build[@]}"
	grep -q CONFIG_NEW=y "$tree/.x86_64-test/.config"
}

@test "a failed build shows the compiler's words and names the log" {
	touch "$tree/broken"
	run "${build[@]}"
	one_line_error 'kernel 6.1 base test x86_64 failed .build.; the full log is .*/build.log'
	grep -q 'mm/memory.c:3:1: error: expected ;' <<<"$output"
}

@test "a second build in the same directory is refused" {
	mkdir -p "$tree/.x86_64-test"
	exec 8>"$tree/.x86_64-test/.lock"
	flock 8
	run "${build[@]}"
	one_line_error 'another build is running'
}

@test "interrupted, and the run after it" {
	touch "$tree/slow"
	"${build[@]}" >out 2>&1 3>&- &
	pid=$!
	for _ in $(seq 100); do [ ! -e "$tree/started" ] || break; sleep 0.1; done
	kill -TERM $pid
	status=0
	wait $pid || status=$?
	[ "$status" -eq 1 ]
	grep -q '^error: .*interrupted; the next run goes on from here$' out
	! pgrep -f "make -C $tree" || false
	rm "$tree/slow"
	run "${build[@]}"
	[ "$status" -eq 0 ]
}

@test "no tree: says how to get one" {
	run scripts/kernel 6.1 patched test
	one_line_error "no tree; run 'make tree BASE=6.1'"
}

@test "a missing tool: says how to get it" {
	mkdir bin
	for t in bash dirname basename sed awk paste cat; do ln -s "$(command -v $t)" bin/; done
	PATH=$PWD/bin run "${build[@]}"
	one_line_error "ccache is missing; run 'make packages' as root"
}
