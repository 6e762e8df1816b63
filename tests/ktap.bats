#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# results.py on recorded outputs, by each kernel's own KTAP parser that is at
# hand: KUNIT="DIR DIR…", or what the trees under build/ have. Golden results
# in data/ktap/CASE/golden.

setup()
{
	cd "$BATS_TEST_DIRNAME/data/ktap" || return
	RESULTS=$BATS_TEST_DIRNAME/../scripts/results.py
	local d build=${BUILD:-$BATS_TEST_DIRNAME/../build}
	PARSERS=()
	for d in ${KUNIT:-"$build"/tree/*/base/tools/testing/kunit}; do
		[ ! -e "$d/kunit_parser.py" ] || PARSERS+=("$d")
	done
}

# guest CASE STATE: writes what guest.py would have left of that run. The
# case's file status says "STATE EXIT [WHY]"; WHY of a program that ended is
# a report on the console.
guest()
{
	local dir=$BATS_TEST_TMPDIR/$2 exit why report=

	read -r exit why < <(sed -n "s/^$2 //p" "$1/status")
	mkdir -p "$dir"
	cp "$1/$2.out" "$dir/1.out"
	if [ "$exit" != null ] && [ -n "$why" ]; then
		report="{\"names\": [\"warning\"], \"title\": \"$why\", \"allowed\": false}"
	fi
	cat > "$dir/guest.json" <<-X
	{"status": ${exit/null/71}, "why": "$why", "release": "6.1.164",
	 "kernel_sha256": "0", "qemu": "7.2", "accel": "tcg", "smp": 4,
	 "mem": "3G", "command": "qemu", "reports": [$report],
	 "programs": [{"name": "prog", "command": "./prog", "sha256": "0",
		       "status": $exit, "seconds": 1}]}
	X
}

# results DIR [ARG...]: results.py with the parser in DIR on both states.
results()
{
	local parser=$1

	shift
	"$RESULTS" --base 6.1 --config test --ktap-parser "$parser" \
		--out "$BATS_TEST_TMPDIR/out" \
		--run "base:prog:$BATS_TEST_TMPDIR/base" \
		--run "patched:prog:$BATS_TEST_TMPDIR/patched" "$@"
}

# golden CASE: table and exit status are as recorded, with every parser, and
# the files agree with them.
golden()
{
	local parser

	[ ${#PARSERS[@]} -gt 0 ] || skip "no kernel tree under build/"
	guest "$1" base
	guest "$1" patched
	for parser in "${PARSERS[@]}"; do
		run results "$parser"
		diff -u "$1/golden" <(printf '%s\nexit %s\n' "$output" "$status")
		diff -u "$1/golden.ktap" "$BATS_TEST_TMPDIR/out/ktap.txt"
		python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' \
			"$BATS_TEST_TMPDIR/out/junit.xml"
		# Red and "not ok" go together.
		! grep -q '^ *not ok' "$BATS_TEST_TMPDIR/out/ktap.txt" || [ "$status" -eq 1 ]
	done
}

@test "ktap: beyond plan" {
	golden beyond-plan
}

@test "ktap: control fails on base" {
	golden control-fails-on-base
}

@test "ktap: control skips" {
	golden control-skips
}

@test "ktap: crash in last case" {
	golden crash-in-last-case
}

@test "ktap: crash on base" {
	golden crash-on-base
}

@test "ktap: crash on patched" {
	golden crash-on-patched
}

@test "ktap: good" {
	golden good
}

@test "ktap: harness" {
	golden harness
}

@test "ktap: nested" {
	golden nested
}

@test "ktap: nested crash" {
	golden nested-crash
}

@test "ktap: never ran" {
	golden never-ran
}

@test "ktap: no ktap" {
	golden no-ktap
}

@test "ktap: no plan" {
	golden no-plan
}

@test "ktap: proves nothing" {
	golden proves-nothing
}

@test "ktap: report on base" {
	golden report-on-base
}

@test "ktap: report on patched" {
	golden report-on-patched
}

@test "ktap: same name" {
	golden same-name
}

@test "ktap: skip all on base" {
	golden skip-all-on-base
}

@test "ktap: skip all on patched" {
	golden skip-all-on-patched
}

@test "ktap: skip on patched" {
	golden skip-on-patched
}

@test "ktap: wrong exit status" {
	golden wrong-exit-status
}

@test "ktap: xfail is no pass" {
	golden xfail-is-no-pass
}

@test "ktap: meta.json nests keys and keeps the commands" {
	[ ${#PARSERS[@]} -gt 0 ] || skip "no kernel tree under build/"
	guest good base
	guest good patched
	run results "${PARSERS[0]}" --meta base.commit=abc --reproduce "make boot"
	[ "$status" -eq 0 ]
	python3 - "$BATS_TEST_TMPDIR/out/meta.json" <<-X
	import json, sys
	meta = json.load(open(sys.argv[1]))
	assert meta["base"]["commit"] == "abc"
	assert meta["reproduce"] == ["make boot"]
	assert meta["counts"] == {"passed": 4, "failed": 0, "skipped": 0}
	assert [r["state"] for r in meta["runs"]] == ["base", "patched"]
	X
}

@test "ktap: nothing is written beside the parser" {
	[ ${#PARSERS[@]} -gt 0 ] || skip "no kernel tree under build/"
	cp -r "${PARSERS[0]}" "$BATS_TEST_TMPDIR/kunit"
	rm -rf "$BATS_TEST_TMPDIR/kunit/__pycache__"
	guest good base
	guest good patched
	results "$BATS_TEST_TMPDIR/kunit"
	[ ! -e "$BATS_TEST_TMPDIR/kunit/__pycache__" ]
}

@test "ktap: a run without its counterpart is one clear error" {
	[ ${#PARSERS[@]} -gt 0 ] || skip "no kernel tree under build/"
	guest good base
	run "$RESULTS" --base 6.1 --config test --ktap-parser "${PARSERS[0]}" \
		--out "$BATS_TEST_TMPDIR/out" --run "base:prog:$BATS_TEST_TMPDIR/base"
	[ "$status" -eq 2 ]
	[ "$output" = "error: no --run patched:prog:LOGDIR; each test needs both kernels" ]
}

@test "ktap: a directory without a parser is one clear error" {
	run results /nowhere
	[ "$status" -eq 2 ]
	[ "$output" = "error: /nowhere has no kunit_parser.py; give a tree's tools/testing/kunit" ]
}
