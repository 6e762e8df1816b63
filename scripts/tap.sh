# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# Sourced by scripts whose result is TAP: one line per test, the output of a
# failed one below it.

# tap NAME COMMAND...: run it; its output is shown only when it fails.
tap()
{
	# COMMAND may be a function, which sees these names.
	local tap_name=$1 tap_out

	shift
	if tap_out=$("$@" 2>&1); then
		printf 'ok - %s\n' "$tap_name"
	else
		printf 'not ok - %s\n' "$tap_name"
		printf '# %s\n' "${tap_out//$'\n'/$'\n'# }"
		TAP_FAILED=1
	fi
}
# shellcheck disable=SC2034 # the caller exits with it
TAP_FAILED=0
