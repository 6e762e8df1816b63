#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# Guests that pass, fail, warn, panic, hang and run out of memory, for real.
# KERNEL=IMAGE, any kernel of ours. 'make check' runs this; some 2 minutes.

setup_file()
{
	export PROG=$BATS_FILE_TMPDIR/prog
	gcc -O2 -Wall -static -o "$PROG" "$BATS_TEST_DIRNAME/data/prog.c"
	# Shared by all cases, so that KVM is probed once.
	export BUILD=$BATS_FILE_TMPDIR/build
}

setup()
{
	[ -n "${KERNEL:-}" ] || skip "KERNEL=IMAGE is not given"
	unset ARCH SMP MEM ICOUNT HUGEPAGES TIMEOUT V
	LOG=$BATS_TEST_TMPDIR/log
	OUT=$BATS_TEST_TMPDIR/out
	ERR=$BATS_TEST_TMPDIR/err
}

# guest STATUS RUN [NAME=VALUE...]: boots, expects that exit status.
guest()
{
	local want=$1 got=0 run=$2

	shift 2
	env RUN="$run" "$@" "$BATS_TEST_DIRNAME/../scripts/guest.py" \
		--kernel "$KERNEL" --log "$LOG" > "$OUT" 2> "$ERR" 3>&- || got=$?
	cat "$ERR"
	[ "$got" -eq "$want" ]
}

@test "boot-guest: status 3 is kept, later programs run" {
	guest 3 "$PROG exit 0; $PROG exit 3; $PROG exit 4; $PROG 'a  \"b'"
	[ "$(cat "$OUT")" = "no deed called 'a  \"b'" ]
	[ "$(cat "$LOG/4.out")" = "$(cat "$OUT")" ]
}

@test "boot-guest: a signal is 128 and its number" {
	guest 139 "$PROG segv"
}

@test "boot-guest: output is passed byte for byte" {
	guest 0 "$PROG binary"
	python3 -c 'import sys; sys.exit(sys.stdin.buffer.read() != bytes(range(256)) * 200)' < "$OUT"
}

@test "boot-guest: the machine is ready" {
	guest 0 "$PROG machine" HUGEPAGES=17
	grep -q 'cwd=/run home=/root uid=0 input=-1' "$OUT"
	grep -q 'nr_hugepages: 17$' "$OUT"
	grep -q '/dev/zram0' "$OUT"
	grep -q ' /tmp tmpfs .*huge=always' "$OUT"
	for fs in proc sysfs devtmpfs debugfs tracefs cgroup2; do
		grep -q ": [^ ]* [^ ]* $fs " "$OUT"
	done
	grep -q ' /dev/shm tmpfs ' "$OUT"
}

@test "boot-guest: a WARNING is red though the program passed" {
	guest 70 "$PROG warn"
	grep -q '^--- warning: WARNING: .*mm/util.c' "$ERR"
	grep -q 'end trace' "$ERR"
	grep -qx 'error: the kernel reported: warning' "$ERR"
}

@test "boot-guest: a panic is red and names the program" {
	guest 71 "$PROG write /proc/sys/vm/panic_on_oom 2; $PROG eat; $PROG exit 0" \
		MEM=256M HUGEPAGES=0
	grep -q '^--- panic: Kernel panic - not syncing: Out of memory' "$ERR"
	grep -q "^guest: '$PROG exit 0' never ran" "$ERR"
	grep -q "^error: kernel panic; '$PROG eat' had run for " "$ERR"
}

@test "boot-guest: out of memory is red, init survives" {
	guest 137 "$PROG eat; $PROG exit 0" MEM=256M HUGEPAGES=0
	grep -q '^--- oom: Out of memory: Killed process' "$ERR"
	grep -q '"status": 0' "$LOG/guest.json"
}

@test "boot-guest: a silent hang ends and says what ran" {
	guest 72 "$PROG exit 0; $PROG spin" TIMEOUT=10
	grep -q "^error: nothing was heard for 10 s; '$PROG spin' had run for 1[0-9] s" "$ERR"
}

@test "boot-guest: a hang that talks ends too" {
	guest 72 "$PROG ticks" TIMEOUT=2
	grep -q "^error: not done after 40 s; '$PROG ticks' had run for " "$ERR"
	grep -qx tick "$OUT"
}

@test "boot-guest: a guest that switches itself off is red" {
	guest 73 "$PROG poweroff; $PROG exit 0"
	grep -q "^error: the guest ended early; '$PROG poweroff' had run for " "$ERR"
}

@test "boot-guest: ICOUNT=1 counts the same twice" {
	guest 0 "$PROG clock" ICOUNT=1
	cp "$OUT" "$OUT.first"
	guest 0 "$PROG clock" ICOUNT=1
	diff "$OUT.first" "$OUT"
}

@test "boot-guest: a signal ends QEMU, the next run is clean" {
	local pid child i

	RUN="$PROG ticks" "$BATS_TEST_DIRNAME/../scripts/guest.py" --kernel "$KERNEL" \
		--log "$LOG" > "$OUT" 2> "$ERR" 3>&- &
	pid=$!
	for ((i = 0; i < 60; i++)); do
		! grep -q tick "$OUT" || break
		sleep 1
	done
	child=$(pgrep -P "$pid")
	kill -TERM "$pid"
	wait "$pid" || [ $? -eq 143 ]
	[ ! -e "/proc/$child" ]
	guest 0 "$PROG exit 0"
}
