#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# KTREE=DIR: the user's own tree, which is only read.

load fake.sh

setup()
{
	fake_line
	fake_source 6.12.3
	fake_source 7.3.1
	fake_base 6.12 6.12 6.12.3
	fake_base 7.3 7.3 7.3.1
	tree=$FAKE/mine
	fake_kernel 6.1.77 "$tree"
	# Ignored by the kernel's .gitignore, tracked all the same.
	mkdir "$tree/scripts/tags"
	touch "$tree/mm/.kunitconfig" "$tree/scripts/tags/run"
	export KTREE=$tree
}

# gitified: the tree becomes a git work tree with two commits.
gitified()
{
	git -C "$tree" init -q
	git -C "$tree" add .
	git -C "$tree" add -f mm/.kunitconfig scripts/tags
	git -C "$tree" commit -qm one
	echo 'int two;' >>"$tree/mm/ksm.c"
	git -C "$tree" commit -qam two
}

# state: every file of the tree, .git included, with content and times.
state()
{
	find "$tree" -printf '%p %s %T@ %m\n' | sort
	find "$tree" -type f -print0 | sort -z | xargs -0 sha256sum
}

@test "ktree: a git tree's HEAD, with its own commit id, and nothing written" {
	gitified
	# A stale index tempts git to refresh it.
	touch "$tree"/mm/*.c
	before=$(state)
	[ "$(scripts/fetch ktree)" = ktree ]
	[ "$(git --git-dir=build/linux.git rev-parse ktree)" = "$(git -C "$tree" rev-parse HEAD)" ]
	[ "$(state)" = "$before" ]
	[ "$(cat build/ktree.line)" = 6.1 ]
}

@test "ktree: uncommitted changes are not used, and it says so" {
	gitified
	echo 'int three;' >>"$tree/mm/ksm.c"
	before=$(state)
	run scripts/fetch ktree
	[ "$status" = 0 ]
	[[ $output == *'uncommitted changes; its HEAD is used'* ]]
	git --git-dir=build/linux.git show ktree:mm/ksm.c | tail -n 1 | grep -qx 'int two;'
	[ "$(state)" = "$before" ]
}

@test "ktree: it follows HEAD" {
	gitified
	scripts/worktree ktree base
	echo 'int three;' >>"$tree/mm/ksm.c"
	git -C "$tree" commit -qam three
	scripts/worktree ktree base
	cmp "$tree/mm/ksm.c" build/tree/ktree/base/mm/ksm.c
}

@test "ktree: a shallow clone and a linked work tree" {
	gitified
	git clone -q --depth=1 "file://$tree" "$tree.shallow"
	KTREE=$tree.shallow scripts/fetch ktree
	git -C "$tree" worktree add -q --detach "$tree.linked" HEAD^
	KTREE=$tree.linked scripts/fetch ktree
	[ "$(git --git-dir=build/linux.git rev-parse ktree)" = "$(git -C "$tree" rev-parse HEAD^)" ]
}

@test "ktree: our own patched tree as KTREE loses no history" {
	scripts/apply 6.1
	fake_topic one first
	KTREE=$PWD/build/tree/6.1/patched scripts/fetch ktree
	[ "$(git -C build/tree/6.1/patched rev-list --count HEAD)" = 4 ]
}

@test "ktree: unpacked source, without what a build left in it" {
	echo object >"$tree/mm/ksm.o"
	ln "$tree/mm/ksm.c" "$tree/mm/twin.c"
	before=$(state)
	run scripts/fetch ktree
	[ "$status" = 0 ]
	[ "$(state)" = "$before" ]
	git --git-dir=build/linux.git cat-file -e ktree:mm/twin.c
	not git --git-dir=build/linux.git cat-file -e ktree:mm/ksm.o
	[ "$(git --git-dir=build/linux.git ls-tree ktree scripts/run.sh | cut -c1-6)" = 100755 ]
	[ "$(git --git-dir=build/linux.git show ktree:scripts/link)" = ../mm/ksm.c ]
}

@test "ktree: unpacked source is imported again only when it changed" {
	scripts/fetch ktree
	run scripts/fetch ktree
	[ "$output" = ktree ]
	echo 'int more;' >>"$tree/mm/ksm.c"
	scripts/fetch ktree
	git --git-dir=build/linux.git show ktree:mm/ksm.c | tail -n 1 | grep -qx 'int more;'
}

@test "ktree: unpacked source gives the files of the tarball's import" {
	scripts/fetch ktree
	first=$(git --git-dir=build/linux.git rev-parse 'ktree^{tree}')
	gitified
	git -C "$tree" reset -q --hard HEAD^
	[ "$(git -C "$tree" rev-parse 'HEAD^{tree}')" = "$first" ]
}

@test "ktree: the newest line that is not newer, else the oldest" {
	for pair in 6.1.9:6.1 6.6.4:6.1 6.12.1:6.12 7.0.1:6.12 7.3.0:7.3 8.1.0:7.3 5.4.1:6.1; do
		fake_kernel "${pair%:*}" "$FAKE/v${pair%:*}"
		KTREE=$FAKE/v${pair%:*} scripts/fetch ktree
		[ "$(cat build/ktree.line)" = "${pair#*:}" ]
	done
}

@test "ktree: no directory, no kernel, no commit, no KTREE" {
	KTREE=$tree.gone run scripts/fetch ktree
	one_error 'KTREE=.*gone is no directory'
	mkdir "$tree.empty"
	KTREE=$tree.empty run scripts/fetch ktree
	one_error 'is no kernel tree'
	git init -q "$tree.empty"
	KTREE=$tree.empty run scripts/fetch ktree
	one_error 'has no commit'
	KTREE='' run scripts/fetch ktree
	one_error 'BASE=ktree needs KTREE=DIR'
}
