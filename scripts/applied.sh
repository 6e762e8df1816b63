# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# Sourced by apply and refresh: what a patched tree was made of. Prevents both
# a tree that silently lags behind patches/ and work that is done twice.

# mails_sum DIRECTORY: a checksum of a topic's mails, "-" if there are none.
mails_sum()
{
	if compgen -G "$1/*.patch" >/dev/null; then
		cat -- "$1"/*.patch | sha256sum | cut -d' ' -f1
	else
		echo -
	fi
}

# inputs_of BASE TAG DIRECTORY: everything that decides what commits come out.
inputs_of()
{
	local topic

	printf 'tag %s\n' "$(in_repo rev-parse "$2^{commit}")"
	printf 'tools %s\n' "$(cat "$ROOT"/scripts/{stack,mails.py} | sha256sum | cut -d' ' -f1)"
	while IFS= read -r topic; do
		printf 'topic %s %s %s\n' "$topic" "$(mails_sum "$3/$topic")" \
			"$(sha256sum "$3/$topic/probe" 2>/dev/null | cut -d' ' -f1)"
	done < <(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$3/series")
}

# recorded BASE: the inputs of the applied commit, and "left TOPIC" lines.
recorded()
{
	in_repo cat-file blob "refs/inputs/$1" 2>/dev/null || true
}

# record_applied BASE COMMIT RECORD: before the tree moves there, so that an
# interrupted move can be finished.
record_applied()
{
	local blob

	blob=$(in_repo hash-object -w --stdin <<<"$3")
	in_repo update-ref --stdin <<-EOF
	update refs/applied/$1 $2
	update refs/inputs/$1 $blob
	EOF
}

# whole_file PATH: where a new file of a kernel lives in this repository.
whole_file()
{
	case $1 in
	tools/testing/selftests/vm/*) printf 'tools/testing/selftests/mm/%s\n' "${1#*/vm/}" ;;
	*) printf '%s\n' "$1" ;;
	esac
}
