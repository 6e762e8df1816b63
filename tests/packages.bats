#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# Installing what is missing. A dpkg-query, an id and an apt-get of the test's
# own stand for the machine.

bats_require_minimum_version 1.5.0
load helper

setup()
{
	scratch_repo
	cd "$REPO" || return
	mkdir bin
	cat >bin/dpkg-query <<'X'
#!/bin/bash
shift 2
for p; do [ "$p" = qemu-system-x86 ] || echo "installed $p"; done
X
	cat >bin/apt-get <<'X'
#!/bin/bash
echo "$*" >>apt.log
[ ! -e offline ] || { echo 'E: Failed to fetch: no route'; exit 100; }
X
	printf '#!/bin/bash\necho ${FAKE_UID:-0}\n' >bin/id
	chmod +x bin/*
	PATH=$PWD/bin:$PATH
}

@test "what is missing is shown, then installed" {
	run scripts/packages
	[ "$status" -eq 0 ]
	[ "$output" = 'installing: qemu-system-x86' ]
	grep -q '^install -y --no-install-recommends qemu-system-x86$' apt.log
}

@test "without root: the exact apt line" {
	FAKE_UID=1000 run scripts/packages
	one_line_error 'as root run: apt-get update && apt-get install -y --no-install-recommends qemu-system-x86$'
	[ ! -e apt.log ]
}

@test "without network: apt's reason and the line to try again" {
	touch offline
	run scripts/packages
	one_line_error 'E: Failed to fetch: no route.*apt-get install'
}

@test "nothing missing, nothing said" {
	printf '#!/bin/bash\nshift 2\nfor p; do echo "installed $p"; done\n' >bin/dpkg-query
	run scripts/packages
	[ "$status" -eq 0 ]
	[ -z "$output" ]
}
