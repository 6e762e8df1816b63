#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# guest.py's checks ahead of any boot: bad input is one clear line.

setup_file()
{
	export PROGRAM=$BATS_FILE_TMPDIR/prog
	echo 'int main(void) { return 0; }' > "$PROGRAM.c"
	gcc -static -o "$PROGRAM" "$PROGRAM.c"
	gcc -o "$PROGRAM-dynamic" "$PROGRAM.c"
	gcc -c -o "$PROGRAM.o" "$PROGRAM.c"
	gcc -static-pie -o "$PROGRAM-pie" "$PROGRAM.c"
	# The same program, but for arm64: e_machine is the halfword at 18.
	cp "$PROGRAM" "$PROGRAM-arm64"
	printf '\267\0' | dd of="$PROGRAM-arm64" bs=1 seek=18 conv=notrunc status=none
}

setup()
{
	export BUILD=$BATS_TEST_TMPDIR/build
	unset ARCH SMP MEM ICOUNT HUGEPAGES TIMEOUT V
}

# refused TEXT [NAME=VALUE...]: guest.py says "error: TEXT…" and no more.
refused()
{
	local text=$1

	shift
	run env "$@" "$BATS_TEST_DIRNAME/../scripts/guest.py" \
		--kernel "${KERNEL-/nowhere/bzImage}"
	printf '%s\n' "$output"
	[ "$status" -eq "${STATUS-2}" ]
	[ "${#lines[@]}" -eq 1 ]
	[[ $output == "error: $text"* ]]
}

@test "guest: no program" {
	refused 'RUN= names no program' RUN=
	refused 'RUN= names no program' RUN=' ; ;'
}

@test "guest: a missing program" {
	refused '/nowhere/prog does not exist' RUN="$PROGRAM; /nowhere/prog 3"
}

@test "guest: a directory" {
	refused '/: Is a directory' RUN=/
}

@test "guest: a dynamic program" {
	refused "$PROGRAM-dynamic is dynamically linked; build it with 'gcc -static'" \
		RUN="$PROGRAM-dynamic"
}

@test "guest: a script" {
	refused "$PROGRAM.c is not an ELF program" RUN="$PROGRAM.c"
}

@test "guest: an object file" {
	refused "$PROGRAM.o is an object file or a core" RUN="$PROGRAM.o"
}

@test "guest: a program of another architecture" {
	refused "$PROGRAM-arm64 is not a 64-bit program for ARCH=x86_64" RUN="$PROGRAM-arm64"
}

@test "guest: two programs of one name" {
	mkdir "$BATS_TEST_TMPDIR/other"
	cp "$PROGRAM-pie" "$BATS_TEST_TMPDIR/other/prog"
	refused "$BATS_TEST_TMPDIR/other/prog is not the only program called prog" \
		RUN="$PROGRAM; $BATS_TEST_TMPDIR/other/prog"
}

@test "guest: an open quote" {
	refused "RUN=$PROGRAM 'x: No closing quotation" RUN="$PROGRAM 'x"
}

@test "guest: settings that are no numbers or sizes" {
	refused 'SMP=0 is not a whole number of 1 or more' RUN="$PROGRAM" SMP=0
	refused 'TIMEOUT=1m is not a whole number' RUN="$PROGRAM" TIMEOUT=1m
	refused 'MEM=lots is not a size such as 512M or 3G' RUN="$PROGRAM" MEM=lots
	refused 'MEM=64M is too small' RUN="$PROGRAM" MEM=64M
	refused 'ICOUNT=yes is neither 0 nor 1' RUN="$PROGRAM" ICOUNT=yes
	refused 'HUGEPAGES=4000 takes more than half of MEM=3G' RUN="$PROGRAM" HUGEPAGES=4000
}

@test "guest: an unknown architecture" {
	refused 'ARCH=m68k has no guest; known: ' RUN="$PROGRAM" ARCH=m68k
}

@test "guest: a missing kernel, for static and static-pie programs" {
	refused "there is no kernel /nowhere/bzImage; build it with 'make kernel'" \
		RUN="$PROGRAM 'a; b'; $PROGRAM-pie"
}

@test "guest: a QEMU that does not start" {
	command -v qemu-system-x86_64 > /dev/null || skip "no QEMU"
	echo "no kernel" > "$BATS_TEST_TMPDIR/bzImage"
	STATUS=74 KERNEL=$BATS_TEST_TMPDIR/bzImage refused 'QEMU does not start: ' \
		RUN="$PROGRAM" ICOUNT=1
}

@test "guest: a missing QEMU" {
	local tool bin=$BATS_TEST_TMPDIR/bin

	mkdir "$bin"
	for tool in python3 env gcc as ld; do
		ln -s "$(command -v $tool)" "$bin/$tool"
	done
	STATUS=74 KERNEL=$PROGRAM refused 'qemu-system-x86_64 is missing' \
		RUN="$PROGRAM" PATH="$bin"
}

@test "guest: the initramfs is a newc archive, the same each time" {
	cd "$BATS_TEST_DIRNAME/../scripts"
	python3 -B - > "$BATS_TEST_TMPDIR/sum" <<-X
	import hashlib, guest
	program = guest.Program(["./prog", "a b", ""], guest.Path("./prog"), "")
	for i in range(2):
	    data = guest.initramfs(b"init", [program], {"prog": b"12345"})
	    print(hashlib.sha256(data).hexdigest())
	open("$BATS_TEST_TMPDIR/cpio", "wb").write(data)
	X
	[ "$(sort -u "$BATS_TEST_TMPDIR/sum" | wc -l)" -eq 1 ]
	command -v cpio > /dev/null || skip "no cpio to read it back"
	cd "$BATS_TEST_TMPDIR"
	mkdir out
	cd out
	cpio -idm --quiet < ../cpio
	[ "$(cat run/prog)" = 12345 ]
	[ "$(tr '\0' '|' < commands)" = '3|/run/prog|a b||' ]
	[ -x init ]
}
