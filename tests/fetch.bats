#!/usr/bin/env bats
# SPDX-License-Identifier: GPL-2.0
# scripts/fetch: sources from a mirror, the cache, and what goes wrong there.

load fake.sh

setup()
{
	fake_line
}

in_repo()
{
	git --git-dir=build/linux.git "$@"
}

@test "fetch: the tarball becomes a tag with the kernel's files" {
	[ "$(scripts/fetch 6.1)" = v6.1.5 ]
	[ "$(in_repo log -1 --format='%s %at %ct' v6.1.5)" = 'Linux 6.1.5 1714979289 1714979289' ]
	[ "$(in_repo ls-tree -r v6.1.5 scripts/run.sh | cut -c1-6)" = 100755 ]
	[ "$(in_repo ls-tree -r v6.1.5 scripts/link | cut -c1-6)" = 120000 ]
	cmp <(in_repo show v6.1.5:mm/ksm.c) "$FAKE/src/linux-6.1.5/mm/ksm.c"
}

@test "fetch: the second time nobody asks the mirror" {
	scripts/fetch 6.1
	rm "$FAKE_MIRROR/log"
	[ "$(scripts/fetch 6.1)" = v6.1.5 ]
	[ ! -e "$FAKE_MIRROR/log" ]
}

@test "fetch: two machines get the same commit" {
	scripts/fetch 6.1
	first=$(in_repo rev-parse v6.1.5)
	fake_source 6.1.9
	fake_base 6.1 6.1.9 6.1.9
	cp -a . ../other
	cd ../other
	rm -rf build
	HOME=/nonexistent TZ=Asia/Tokyo scripts/fetch 6.1.9
	HOME=/nonexistent TZ=Asia/Tokyo scripts/fetch 6.1
	[ "$(in_repo rev-parse v6.1.5)" = "$first" ]
}

@test "fetch: unknown BASE" {
	run scripts/fetch 5.4
	one_error 'unknown BASE=5.4; known: 6.1$'
}

@test "fetch: a missing tool is named" {
	for tool in bash dirname env sed basename awk paste git python3 sort; do
		ln -s "$(command -v "$tool")" "$FAKE/bin/$tool"
	done
	PATH=$FAKE/bin run scripts/fetch 6.1
	one_error "xz is missing; run 'make packages'"
}

@test "fetch: no network and an empty cache" {
	touch "$FAKE_MIRROR/offline"
	run scripts/fetch 6.1
	one_error 'linux=6.1.5-1 .*Could not resolve.* KTREE=DIR, or put linux_6.1.5.orig.tar.xz into '
}

@test "fetch: no network, but the tarball is in SRC_CACHE" {
	touch "$FAKE_MIRROR/offline"
	mkdir "$FAKE/cache"
	cp "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz" "$FAKE/cache"
	[ "$(SRC_CACHE=$FAKE/cache scripts/fetch 6.1)" = v6.1.5 ]
}

@test "fetch: a damaged file in the cache is fetched again" {
	mkdir -p build/src
	head -c 100 "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz" >build/src/linux_6.1.5.orig.tar.xz
	run scripts/fetch 6.1
	[ "$status" = 0 ]
	[[ $output == *'linux_6.1.5.orig.tar.xz is damaged; removed'* ]]
	cmp build/src/linux_6.1.5.orig.tar.xz "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz"
}

@test "fetch: a damaged download does not reach the cache" {
	touch "$FAKE_MIRROR/corrupt"
	run scripts/fetch 6.1
	one_error 'arrived damaged'
	[ -z "$(ls -A build/src)" ]
	rm "$FAKE_MIRROR/corrupt"
	[ "$(scripts/fetch 6.1)" = v6.1.5 ]
}

@test "fetch: a mirror that offers other bytes under the pinned version" {
	sed -i 's/[0-9a-f]\{64\}$/'"$(printf '%064d' 0)/" patches/6.1/base
	run scripts/fetch 6.1
	one_error 'is not the one that patches/ records'
	[ -z "$(ls -A build/src)" ]
}

@test "fetch: a full disk while lists or tarball arrive" {
	touch "$FAKE_MIRROR/full"
	run scripts/fetch 6.1
	one_error 'no space left'
	rm "$FAKE_MIRROR/full"
	touch "$FAKE_MIRROR/fullget"
	run scripts/fetch 6.1
	one_error 'no space left'
	[ -z "$(ls -A build/src)" ]
}

@test "fetch: a full disk while the source is imported" {
	mkdir build
	mount -t tmpfs -o size=200k tmpfs build 2>/dev/null || skip 'may not mount a tmpfs'
	head -c 3000000 /dev/urandom >"$FAKE/src/linux-6.1.5/mm/big.c"
	tar -C "$FAKE/src" -cJf "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz" linux-6.1.5
	rm patches/6.1/base
	fake_base 6.1 6.1 6.1.5
	mkdir "$FAKE/cache"
	cp "$FAKE_MIRROR"/linux_6.1.5* "$FAKE/cache"
	SRC_CACHE=$FAKE/cache run scripts/fetch 6.1
	tags=$(in_repo tag)
	left=$(find build/linux.git -name 'tmp_pack_*')
	umount build
	one_error 'import of Linux 6.1.5: no space left'
	[ -z "$tags$left" ]
}

@test "fetch: a disk that is really full while the tarball arrives" {
	mkdir build
	mount -t tmpfs -o size=200k tmpfs build 2>/dev/null || skip 'may not mount a tmpfs'
	head -c 3000000 /dev/urandom >>"$FAKE_MIRROR/linux_6.1.5.orig.tar.xz"
	rm patches/6.1/base
	fake_base 6.1 6.1 6.1.5
	run scripts/fetch 6.1
	left=$(find build/src -type f)
	umount build
	one_error 'no space left in .*/build for linux_6.1.5.orig.tar.xz'
	[ -z "$left" ]
}

@test "fetch: a mirror in the middle of an update is asked once more" {
	touch "$FAKE_MIRROR/sync"
	run scripts/fetch 6.1
	[ "$status" = 0 ]
	[[ $output == *'trying once more'* ]]
}

@test "fetch: a version that is gone: the newest of its line, and it stays" {
	fake_source 6.1.9
	fake_source 6.1.10
	fake_source 6.2.1
	sed -i '/6\.1\.5/d' "$FAKE_MIRROR/list"
	run scripts/fetch 6.1
	[ "$status" = 0 ]
	[[ $output == *'linux=6.1.5-1 is gone from bookworm-security; 6.1.10-1, '*v6.1.10 ]]
	touch "$FAKE_MIRROR/offline"
	run scripts/fetch 6.1
	[ "$status" = 0 ]
	[[ $output == *'6.1.10 stands in'*v6.1.10 ]]
}

@test "fetch: a version that is listed but not there" {
	fake_source 6.1.9
	fake_source 6.1.10
	printf '%s\n' linux_6.1.5.orig.tar.xz linux_6.1.10.orig.tar.xz >"$FAKE_MIRROR/lacks"
	[ "$(scripts/fetch 6.1)" = v6.1.9 ]
}

@test "fetch: the whole line is gone" {
	fake_source 6.2.1
	sed -i '/6\.1\.5/d' "$FAKE_MIRROR/list"
	run scripts/fetch 6.1
	one_error 'gone from bookworm-security, and so is the rest of its line; .*KTREE=DIR'
}

@test "fetch: a tarball that ends early is no kernel" {
	xz -dc "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz" | head -c 5000 | xz >"$FAKE_MIRROR/short"
	mv "$FAKE_MIRROR/short" "$FAKE_MIRROR/linux_6.1.5.orig.tar.xz"
	rm patches/6.1/base
	fake_base 6.1 6.1 6.1.5
	run scripts/fetch 6.1
	one_error 'damaged archive'
	[ -z "$(in_repo tag)" ]
}

@test "fetch: an interrupted import leaves no tag, the next run goes on" {
	xz=$(command -v xz)
	sleep=$(PATH=/usr/bin:/bin command -v sleep)
	printf '#!/bin/sh\n"%s" "$@" | head -c 4000\n"%s" 30\n' "$xz" "$sleep" >"$FAKE/bin/xz"
	chmod +x "$FAKE/bin/xz"
	run timeout -s INT 2 scripts/fetch 6.1
	[ "$status" -ne 0 ]
	[ -z "$(in_repo tag)" ]
	rm "$FAKE/bin/xz"
	[ "$(scripts/fetch 6.1)" = v6.1.5 ]
	[ -z "$(find build/linux.git -name 'tmp_pack_*')" ]
}

@test "fetch: a linux-source package, without what Debian adds" {
	dir=$FAKE/linux-source-6.1
	fake_kernel 6.1.7 "$dir"
	sed -i 's/^int line_7;/&\nEXPORT_SYMBOL_GPL(line_7);/' "$dir/mm/ksm.c"
	diff -u --label a/mm/ksm.c --label b/mm/ksm.c \
		"$FAKE/src/linux-6.1.5/mm/ksm.c" "$dir/mm/ksm.c" \
		>patches/6.1/debian.patch || true
	mkdir -p deb/DEBIAN deb/usr/src
	printf 'Package: linux-source-6.1\nVersion: 6.1.7-2\nArchitecture: all\nMaintainer: x\nDescription: x\n' >deb/DEBIAN/control
	tar -C "$FAKE" -cJf deb/usr/src/linux-source-6.1.tar.xz linux-source-6.1
	dpkg-deb -b deb "$FAKE_MIRROR/linux-source-6.1_6.1.7-2_all.deb" >/dev/null
	echo 'linux-source-6.1 6.1.7-2 linux-source-6.1_6.1.7-2_all.deb' >>"$FAKE_MIRROR/list"
	fake_base 6.1 6.1.7 6.1.7 linux-source-6.1=6.1.7-2
	run scripts/fetch 6.1.7
	[ "$status" = 0 ]
	[[ $output == *v6.1.7 ]]
	cmp <(in_repo show v6.1.7:mm/ksm.c) "$FAKE/src/linux-6.1.5/mm/ksm.c"
	[ "$(in_repo tag)" = v6.1.7 ]
}
