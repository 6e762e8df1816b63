#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# scripts/series-lint: each fault of form that it is there for, one at a time.

load fake.sh

setup()
{
	fake_ready
	patch=$(echo patches/6.1/one/0001-*)
}

# finds PATTERN: lint is red and says it.
finds()
{
	run scripts/series-lint
	[ "$status" -ne 0 ]
	grep -qE -- "$1" <<<"$output" || { echo "not '$1': $output"; return 1; }
}

@test "series-lint: a good series" {
	run scripts/series-lint
	[ "$status" = 0 ]
	[ "$(grep -c '^ok - ' <<<"$output")" = 6 ]
}

@test "series-lint: a line that begins with From" {
	sed -i 's/^Why it is right./From here on it is right./' "$patch"
	finds "0001-.*: a line begins with 'From '"
}

@test "series-lint: no Message-ID, no In-Reply-To, twice the same" {
	sed -i '/^Message-ID/d' "$patch"
	finds '0001-.*: no Message-ID'
	sed -i '/^In-Reply-To/d' patches/6.1/one/0002-*
	finds '0002-.*: In-Reply-To and References do not name the cover letter'
	sed -i "2i $(sed -n '/^Message-ID/p' patches/6.1/one/0002-*)" "$patch"
	finds 'two mails have the same Message-ID'
}

@test "series-lint: Signed-off-by missing, not last, somebody else's" {
	sed -i '/^Signed-off-by/d' "$patch"
	finds "does not end with 'Signed-off-by: A U Thor"
	sed -i 's/^---$/Signed-off-by: A U Thor <author@example.org>\nCc: x@example.org\n---/' "$patch"
	finds "does not end with 'Signed-off-by: A U Thor"
	sed -i '/^Cc: /d; s/^Signed-off-by.*/Signed-off-by: B <b@example.org>/' "$patch"
	finds "does not end with 'Signed-off-by: A U Thor"
}

@test "series-lint: no subject, wrong count, no index line" {
	sed -i 's/^Subject.*/Subject: [PATCH 1\/2] /' "$patch"
	finds '0001-.*: no subject'
	sed -i 's/^Subject.*/Subject: [PATCH 1\/3] mm: x/' "$patch"
	finds '0001-.*: subject does not say \[PATCH 1/2\]'
	sed -i '/^index /d' "$patch"
	finds '0001-.*: no index line for a/mm/ksm.c'
}

@test "series-lint: a path of one machine" {
	local home=/home

	sed -i "s,^Why it is right.,See $home/thor/linux/mm.," "$patch"
	finds "names a path of one machine: $home/thor/linux/mm"
}

@test "series-lint: base-commit and change-id" {
	sed -i '/^base-commit/d' patches/6.1/one/0000-*
	finds '0000-.*: no base-commit'
	echo more >>patches/6.1/one/0000-cover-letter.patch
	finds '0000-.*: change-id is not last'
}

@test "series-lint: series and directories" {
	echo two >>patches/6.1/series
	finds '^# \+two|^# -two'
	sed -i '/two/d' patches/6.1/series
	mkdir patches/6.1/three
	finds '^# [-+]three'
}

@test "series-lint: a patch of the middle is missing" {
	rm "$patch"
	finds '0002-.*: a number is missing before it'
}

@test "series-lint: rows of base" {
	echo '6.1.9 6.1.9 linux=6.1.9-1 bookworm' >>patches/6.1/base
	finds '6.1.9: not BASE VERSION SOURCE SUITE SHA256'
	sed -i '$d' patches/6.1/base
	sed -i 's/[0-9a-f]\{64\}/abc/' patches/6.1/base
	finds '6.1: not a SHA256: abc'
	sed -i 's/linux=6.1.5-1/linux=6.1.6-1/' patches/6.1/base
	finds 'linux=6.1.6-1 is not PACKAGE=6.1.5-REVISION'
	: >patches/6.1/base
	finds 'no row for BASE=6.1'
}

@test "series-lint: a probe that is missing, empty or broken" {
	echo 'there mm/ksm.c foo' >patches/6.1/one/probe
	finds 'probe: bad line: there mm/ksm.c foo'
	echo 'present mm/ksm.c' >patches/6.1/one/probe
	finds 'probe: bad line: present mm/ksm.c'
	echo 'present mm/ksm.c a(' >patches/6.1/one/probe
	finds 'probe: bad line'
	echo '# nothing' >patches/6.1/one/probe
	finds 'tells nothing'
	rm patches/6.1/one/probe
	finds 'probe is missing'
}

@test "series-lint: a whole file that is not what the patches add" {
	echo '/* more */' >>tools/testing/selftests/mm/first.c
	finds "tools/testing/selftests/mm/first.c is not what patches/6.1 adds"
	rm tools/testing/selftests/mm/first.c
	finds "first.c is not what patches/6.1 adds"
	echo stray >tools/testing/selftests/mm/stray.c
	finds 'no series adds tools/testing/selftests/mm/stray.c'
}
