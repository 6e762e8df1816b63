#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# scripts/refresh: patches/ from a tree and back, byte for byte, and what it
# refuses.

load fake.sh

setup()
{
	fake_ready
	tree=build/tree/6.1/patched
}

# unchanged: patches/ and the whole files are as they were at kept.
kept()
{
	rm -rf ../kept
	mkdir ../kept
	cp -a patches tools ../kept
}
unchanged()
{
	diff -r ../kept/patches patches && diff -r ../kept/tools tools
}

@test "refresh: straight after apply it changes nothing, here and in a new clone" {
	fake_topic two second
	kept
	scripts/refresh 6.1
	unchanged
	rm -rf build
	scripts/apply 6.1
	TZ=Asia/Tokyo scripts/refresh 6.1
	unchanged
	[ "$(find patches -name '*.patch' | wc -l)" = 6 ]
}

@test "refresh: what the mails look like" {
	cover=patches/6.1/one/0000-cover-letter.patch
	grep -qx 'Subject: \[PATCH 0/2\] mm: what one is for' "$cover"
	grep -qx 'Date: Sun, 2 Jun 2024 10:00:00 +0200' "$cover"
	grep -qx 'Content-Type: text/plain; charset=UTF-8' "$cover"
	grep -qx 'Costs 3 µs.' "$cover"
	grep -qx "base-commit: $(git -C "$tree" rev-parse v6.1.5)" "$cover"
	tail -n 1 "$cover" | grep -qxE 'change-id: one-6.1-[0-9a-f]{12}'
	id=$(sed -n 's/^Message-ID: //p' "$cover")
	[[ $id =~ ^\<20240602-one-v1-0-[0-9a-f]{12}@example.org\>$ ]]
	for patch in patches/6.1/one/000[12]-*.patch; do
		grep -qxF "In-Reply-To: $id" "$patch"
		grep -qxE 'index [0-9a-f]{40}\.\.[0-9a-f]{40}( 100644)?' "$patch"
	done
}

@test "refresh: b4 and git am take the mails as they are, from anywhere" {
	fake_topic two second
	mkdir "$FAKE/out"
	cat patches/6.1/one/*.patch >"$FAKE/one.mbx"
	git config --global user.name 'A Maintainer'
	git config --global user.email maintainer@example.org
	git clone -q build/linux.git ../kernel
	git -C ../kernel checkout -q v6.1.5
	(cd ../kernel && b4 -n am -o "$FAKE/out" -n one.mbx -m "$FAKE/one.mbx" \
		"$(sed -n 's/^Message-ID: <\(.*\)>/\1/p' ../repo/patches/6.1/one/0000*)") >../b4.log 2>&1 || true
	cat ../b4.log
	grep 'Base: using specified base-commit' ../b4.log
	git -C ../kernel am -q -3 "$FAKE/out/one.mbx"
	[ "$(git -C ../kernel rev-parse 'HEAD^{tree}')" = "$(git -C "$tree" rev-parse 'HEAD~3^{tree}')" ]
}

@test "refresh: a changed patch is written, the others keep their bytes" {
	kept
	git -C "$tree" reset -q --hard HEAD^
	sed -i 's/^int first;/int better;/' "$tree/mm/ksm.c"
	git -C "$tree" commit -q -a --amend --no-edit
	printf 'int first_test;\n' >"$tree/tools/testing/selftests/vm/first.c"
	commit 2024-06-02 'selftests/vm: test of first'
	scripts/refresh 6.1
	grep -q '^+int better;' patches/6.1/one/0001-*
	cmp tools/testing/selftests/mm/first.c ../kept/tools/testing/selftests/mm/first.c
	cmp patches/6.1/one/probe ../kept/patches/6.1/one/probe
	cmp <(sed 4,5d patches/6.1/one/0002-*) <(sed 4,5d ../kept/patches/6.1/one/0002-*) ||
		diff <(grep -v '^In-Reply-To\|^References' patches/6.1/one/0002-*) \
			<(grep -v '^In-Reply-To\|^References' ../kept/patches/6.1/one/0002-*)
	# The tree is at the ids that everyone gets.
	head=$(git -C "$tree" rev-parse HEAD)
	rm -rf build
	scripts/apply 6.1
	[ "$(git -C "$tree" rev-parse HEAD)" = "$head" ]
}

@test "refresh: the cover letter is edited by rewording its commit" {
	# git refuses to reword an empty commit; edit and amend is the way.
	GIT_SEQUENCE_EDITOR='sed -i 1s/pick/edit/' git -C "$tree" rebase -q -i v6.1.5
	GIT_EDITOR='sed -i "s/what one is for/why – a longer subject that does not fit into a line of a mail header/; s/Costs 3/Costs 2/"' \
		git -C "$tree" commit -q --amend --allow-empty
	git -C "$tree" rebase --continue
	scripts/refresh 6.1
	grep -qx 'Costs 2 µs.' patches/6.1/one/0000*
	kept
	rm -rf build
	scripts/apply 6.1
	scripts/refresh 6.1
	unchanged
	git -C "$tree" log -1 --format=%s HEAD~2 | grep -q 'why – a longer subject .* mail header$'
}

@test "refresh: a second version says so everywhere" {
	git -C "$tree" checkout -q v6.1.5
	git -C "$tree" commit -q --allow-empty -m 'mm: second try' -m 'Text.' -m $'Version: 2\nTopic: one'
	git -C "$tree" cherry-pick refs/applied/6.1~1 refs/applied/6.1
	scripts/refresh 6.1
	grep -q '^Subject: \[PATCH v2 1/2\] mm/ksm: first' patches/6.1/one/0001-*
	grep -q '^Message-ID: <20240602-one-v2-1-' patches/6.1/one/0001-*
	kept
	rm -rf build
	scripts/apply 6.1
	[ "$(git -C "$tree" log -1 --format=%s)" = 'selftests/vm: test of first' ]
	scripts/refresh 6.1
	unchanged
}

@test "refresh: a topic that its probe leaves out stays as it is" {
	fake_topic two second
	printf 'present mm/ksm.c ^int line_30;\n' >patches/6.1/one/probe
	# Without the first topic's prerequisite the second is written anew.
	rm -rf build
	scripts/apply 6.1
	cp -a patches/6.1/one ../one
	scripts/refresh 6.1
	diff -r ../one patches/6.1/one
}

@test "refresh: only the line's own base" {
	fake_source 6.1.9
	fake_base 6.1 6.1.9 6.1.9
	run scripts/refresh 6.1.9
	one_error 'patches/6.1 are written from the tree of BASE=6.1, not BASE=6.1.9'
	unset KTREE
	run scripts/refresh 5.4
	one_error 'unknown BASE=5.4'
}

@test "refresh: no tree" {
	rm -rf build/tree
	run scripts/refresh 6.1
	one_error "no tree to write patches from; run 'make tree BASE=6.1'"
}

@test "refresh: uncommitted, in the middle of a rebase, fixup" {
	kept
	echo 'int mine;' >>"$tree/mm/ksm.c"
	run scripts/refresh 6.1
	one_error 'has uncommitted changes'
	git -C "$tree" commit -qa --fixup HEAD
	run scripts/refresh 6.1
	one_error 'is to be squashed'
	git -C "$tree" reset -q --hard HEAD^
	GIT_SEQUENCE_EDITOR='sed -i 1s/pick/edit/' git -C "$tree" rebase -q -i --empty=keep v6.1.5
	run scripts/refresh 6.1
	one_error 'in the middle of a rebase'
	unchanged
}

@test "refresh: a commit that belongs to no topic, an unknown topic, a gap" {
	kept
	git -C "$tree" checkout -q v6.1.5
	echo 'int mine;' >>"$tree/mm/huge_memory.c"
	commit 2024-06-03 'mm: mine'
	run scripts/refresh 6.1
	one_error 'comes before the first cover letter'
	git -C "$tree" checkout -q refs/applied/6.1
	git -C "$tree" commit -q --allow-empty -m empty
	run scripts/refresh 6.1
	one_error 'is empty, but no cover letter'
	git -C "$tree" commit -q --amend --allow-empty -m new -m 'Topic: three'
	run scripts/refresh 6.1
	one_error 'Topic: three is not in patches/6.1/series'
	git -C "$tree" commit -q --amend --allow-empty -m new -m 'Topic: one'
	run scripts/refresh 6.1
	one_error 'holds the topics one one, but patches/6.1/series wants one'
	git -C "$tree" checkout -q v6.1.5
	run scripts/refresh 6.1
	one_error 'holds the topics .*, but patches/6.1/series wants one'
	unchanged
}

@test "refresh: patches that changed under the tree are not overwritten" {
	sed -i 's/^Why it is right/Why/' patches/6.1/one/0001-*
	kept
	run scripts/refresh 6.1
	one_error 'has changed since the tree was made'
	unchanged
}

@test "refresh: an interrupted run leaves patches/ whole" {
	kept
	sed -i 's/^int line_50;/int late;/' "$tree/mm/ksm.c"
	commit 2024-06-04 'mm/ksm: late'
	printf '#!/bin/sh\nexec /usr/bin/env sleep 30\n' >"$FAKE/bin/b4"
	chmod +x "$FAKE/bin/b4"
	rm "$FAKE/bin/sleep"
	run timeout -s INT 2 scripts/refresh 6.1
	[ "$status" -ne 0 ]
	unchanged
	rm "$FAKE/bin/b4"
	scripts/refresh 6.1
	ls patches/6.1/one/0003-mm-ksm-late.patch
}
