#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# scripts/apply, stack and worktree: the series in its tree, and the tree as
# the user's own place of work.

load fake.sh

setup()
{
	fake_ready
	tree=build/tree/6.1/patched
}

@test "apply: the same commits from the same patches, whatever git is told" {
	fake_topic two second
	cp -a . ../other
	cd ../other
	rm -rf build
	git config --global am.threeWay true
	git config --global apply.whitespace fix
	git config --global commit.gpgSign true
	git config --global user.name Somebody
	before=$(find "$HOME")
	TZ=Asia/Tokyo scripts/apply 6.1
	[ "$(git -C "$tree" rev-parse HEAD)" = "$(git -C "../repo/$tree" rev-parse HEAD)" ]
	[ "$(git -C "$tree" log -1 --format='%an %cn %ad %cd')" = \
		'A U Thor A U Thor Sun Jun 2 10:00:00 2024 +0200 Sun Jun 2 10:00:00 2024 +0200' ]
	# Neither git nor b4 left anything there.
	[ "$(find "$HOME")" = "$before" ]
}

@test "apply: each topic opens with an empty commit, its cover letter" {
	mapfile -t commits < <(git -C "$tree" rev-list --reverse v6.1.5..)
	[ "${#commits[@]}" = 3 ]
	git -C "$tree" diff --quiet v6.1.5 "${commits[0]}"
	[ "$(git -C "$tree" log -1 --format=%B "${commits[0]}")" = \
		$'mm: what one is for\n\nCosts 3 µs.\n\nTopic: one' ]
}

@test "apply: nothing is done twice, the base is not touched" {
	scripts/worktree 6.1 base
	touch -d 2001-01-01 "$tree/mm/ksm.c"
	run scripts/apply 6.1
	[ "$output" = "$PWD/$tree" ]
	[ "$(stat -c %y "$tree/mm/ksm.c" | cut -c1-4)" = 2001 ]
	not grep -q first build/tree/6.1/base/mm/ksm.c
}

@test "apply: a topic that is in already is left out, and it says so" {
	fake_topic two second
	rm -rf build
	printf '# tells it\npresent mm/ksm.c ^int line_30;\nabsent mm/ksm.c ^int nothing\n' \
		>patches/6.1/one/probe
	run scripts/apply 6.1
	[ "$status" = 0 ]
	[[ $output == *'one: already in v6.1.5, left out'* ]]
	grep -qx 'int second;' "$tree/mm/ksm.c"
	[ ! -e "$tree/tools/testing/selftests/vm/first.c" ]
	# The next run says it, too.
	run scripts/apply 6.1
	[[ $output == *'one: already in v6.1.5, left out'* ]]
}

@test "apply: one false line of a probe, or a file that is not there: not in" {
	printf 'present mm/ksm.c ^int line_29\nabsent mm/ksm.c ^int line_30;\n' >patches/6.1/one/probe
	rm -rf build
	scripts/apply 6.1
	grep -qx 'int first;' "$tree/mm/ksm.c"
	printf 'absent mm/gone.c foo\n' >patches/6.1/one/probe
	rm -rf build
	scripts/apply 6.1
	grep -qx 'int first;' "$tree/mm/ksm.c"
}

@test "apply: a broken probe is an error" {
	printf 'present mm/ksm.c (\n' >patches/6.1/one/probe
	run scripts/apply 6.1
	one_error 'probe: bad line: present mm/ksm.c \($'
}

@test "apply: a conflict names patch, file and hunk, and leaves the tree" {
	before=$(git -C "$tree" rev-parse HEAD)
	fake_source 6.1.9
	fake_base 6.1 6.1.9 6.1.9
	sed -i 's/^int line_31;/int other;/' "$FAKE/src/linux-6.1.9/mm/ksm.c"
	tar -C "$FAKE/src" -cJf "$FAKE_MIRROR/linux_6.1.9.orig.tar.xz" linux-6.1.9
	sed -i '/^6.1.9/d' patches/6.1/base
	fake_base 6.1 6.1.9 6.1.9
	run scripts/apply 6.1.9
	one_error 'patches/6.1/one/0001-mm-ksm-first.patch does not apply to v6.1.9: mm/ksm.c, hunk 1 \(@@ -27,7 \+27,7 @@ int line_26;\)$'
	[ ! -e build/tree/6.1.9/patched ]
	[ -z "$(ls build/stack)" ]
	[ "$(git -C "$tree" rev-parse HEAD)" = "$before" ]
}

@test "apply: no fuzz, but an offset is fine" {
	for change in '1i int offset;:ok' 's/^int line_28;/int fuzz;/:no'; do
		version=6.1.$((RANDOM % 1000 + 10))
		fake_source "$version"
		sed -i "${change%:*}" "$FAKE/src/linux-$version/mm/ksm.c"
		tar -C "$FAKE/src" -cJf "$FAKE_MIRROR/linux_$version.orig.tar.xz" "linux-$version"
		fake_base 6.1 "$version" "$version"
		run scripts/apply "$version"
		[ "${change#*:}/$status" = ok/0 ] || [ "${change#*:}/$status" = no/1 ]
	done
}

@test "apply: a file that a patch changes is not there" {
	fake_source 6.1.9
	rm "$FAKE/src/linux-6.1.9/mm/ksm.c"
	tar -C "$FAKE/src" -cJf "$FAKE_MIRROR/linux_6.1.9.orig.tar.xz" linux-6.1.9
	fake_base 6.1 6.1.9 6.1.9
	run scripts/apply 6.1.9
	one_error '0001-mm-ksm-first.patch does not apply to v6.1.9: mm/ksm.c: does not exist in index'
}

@test "apply: the user's changes and commits stay, and it says so" {
	echo 'int mine;' >>"$tree/mm/ksm.c"
	run scripts/apply 6.1
	[ "$status" = 0 ]
	[[ $output == *"has changes that are not in patches/: 'make refresh BASE=6.1' writes them"* ]]
	git -C "$tree" commit -qam mine
	run scripts/apply 6.1
	[ "$status" = 0 ]
	[[ $output == *'has changes that are not in patches/'* ]]
	grep -qx 'int mine;' "$tree/mm/ksm.c"
}

@test "apply: new patches in a clean tree: only files that differ are written" {
	cp -a patches ../old
	fake_topic two second
	git -C "$tree" switch -q -c mine
	mkdir "$tree/.x86_64-test"
	touch -d 2001-01-01 "$tree"/mm/*.c
	git -C "$tree" status >/dev/null
	rm -rf patches
	cp -a ../old patches
	scripts/apply 6.1
	not grep -q second "$tree/mm/ksm.c"
	[ "$(stat -c %y "$tree/mm/huge_memory.c" | cut -c1-4)" = 2001 ]
	[ -d "$tree/.x86_64-test" ]
	# A branch of the user's is not moved.
	[ "$(git -C "$tree" log -1 --format=%s mine)" = 'selftests/vm: test of second' ]
}

@test "apply: tree and patches both changed" {
	cp -a patches ../old
	fake_topic two second
	echo 'int mine;' >>"$tree/mm/ksm.c"
	rm -rf patches
	cp -a ../old patches
	run scripts/apply 6.1
	one_error "both .*patched and patches/6.1 have changed; .*stash"
	grep -qx 'int mine;' "$tree/mm/ksm.c"
	# The way out that the message names:
	git -C "$tree" stash -q -u
	git -C "$tree" reset -q --hard refs/applied/6.1
	scripts/apply 6.1
	not grep -q second "$tree/mm/ksm.c"
}

@test "apply: a move that was killed half-way is finished" {
	old=$(git -C "$tree" rev-parse HEAD)
	cp -a patches ../old
	fake_topic two second
	new=$(git -C "$tree" rev-parse HEAD)
	# As after a kill: one file written, the lock left.
	git -C "$tree" checkout -q --detach "$old"
	git -C "$tree" show "$new:mm/ksm.c" >"$tree/mm/ksm.c"
	touch "$(git -C "$tree" rev-parse --path-format=absolute --git-path index.lock)"
	git -C "$tree" update-ref refs/moving/6.1/patched "$new"
	scripts/apply 6.1
	[ "$(git -C "$tree" rev-parse HEAD)" = "$new" ]
	[ -z "$(git -C "$tree" status --porcelain)" ]
	not git -C "$tree" rev-parse -q --verify refs/moving/6.1/patched
}

@test "apply: what killed runs left is no obstacle" {
	head=$(git -C "$tree" rev-parse HEAD)
	rm -rf "$tree"
	mkdir -p build/stack/6.1/tree/.git/rebase-apply build/tree/6.1/patched.new/mm
	git --git-dir=build/linux.git update-ref -d refs/applied/6.1
	scripts/apply 6.1
	[ "$(git -C "$tree" rev-parse HEAD)" = "$head" ]
	[ ! -e build/tree/6.1/patched.new ]
}

@test "apply: a repository that was moved to another place" {
	scripts/worktree 6.1 base
	mv "$PWD" "$PWD.moved"
	cd "$PWD.moved"
	scripts/worktree 6.1 base
	scripts/apply 6.1
	[ -z "$(git -C "$tree" status --porcelain)" ]
}

@test "apply: a tree that belongs to nothing is not overwritten" {
	rm -rf build/linux.git
	run scripts/apply 6.1
	one_error 'patched is no work tree of .*linux.git; move it away'
}

@test "apply: a patch of the middle is missing" {
	rm patches/6.1/one/0001-*
	run scripts/apply 6.1
	one_error 'one holds 1 patches, but its cover letter says 2'
}

@test "worktree: the base is not for edits" {
	scripts/worktree 6.1 base
	echo 'int mine;' >>build/tree/6.1/base/mm/ksm.c
	run scripts/worktree 6.1 base
	one_error 'base has changes'
}
