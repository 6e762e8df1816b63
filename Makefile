# SPDX-License-Identifier: GPL-2.0
# The command line of the project; "make help" lists it. Each target calls
# one script in scripts/, with the variables below in its environment.

BASE	?= 6.1
CONFIG	?= test
ARCH	?= x86_64
STATE	?= patched
export BASE CONFIG ARCH STATE TOPIC KTREE RUN SMP MEM ICOUNT HUGEPAGES TIMEOUT
export SRC_CACHE C V W LLVM CROSS_COMPILE

# A tree of the user's own goes by the name of ktree.
ifneq ($(KTREE),)
override BASE := ktree
endif
# kernel habit: O= says where everything that is built goes
ifneq ($(O),)
export BUILD := $(abspath $(O))
endif

SHELL := bash
MAKEFLAGS += --no-print-directory --no-builtin-rules
.NOTPARALLEL:
.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@echo 'Commands (make COMMAND VARIABLE=value …):'
	@sed -nE 's/^([a-z]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 12
	@echo 'Variables:'
	@sed -nE 's/^#v ([A-Z_]+) (.*)/  \1\t\2/p' Makefile | expand -t 12

#v BASE kernel to work on: 6.1 6.1.192 6.12 6.12.38 7.3 (default 6.1)
#v KTREE a kernel tree of your own instead of BASE; it is only read
#v TOPIC one topic instead of all of the line
#v STATE base or patched (default patched)
#v CONFIG test, bench or debug (default test)
#v ARCH x86_64
#v RUN programs for the guest: "prog args; prog2" (static, copied in)
#v SMP CPUs of the guest (default 4)
#v MEM memory of the guest (default 3G)
#v HUGEPAGES hugetlb pool of the guest (default 64)
#v TIMEOUT seconds of silence after which a guest hangs (default 120)
#v ICOUNT 1: deterministic guest, whose clock counts instructions
#v O where to build (default build/)
#v SRC_CACHE where source tarballs are kept (default build/src)
#v V as in the kernel's own Makefile; so are W, C and LLVM

.PHONY: packages
packages: ## install what the project needs (Debian, root)
	@scripts/packages

.PHONY: boot
boot: packages ## base and patched kernel, each booted, the selftests in both, verdicts
	@scripts/boot

.PHONY: check
check: packages ## the project's tests; what CI runs
	@set -o pipefail; scripts/check | scripts/summary

.PHONY: lint
lint: packages ## the tests that need no kernel, under a minute
	@set -o pipefail; scripts/lint | scripts/summary

.PHONY: tree
tree: packages ## a git worktree of the base with the series as commits, to work in
	@scripts/tree

.PHONY: refresh
refresh: packages ## write patches/ from that tree
	@scripts/refresh "$(BASE)"

.PHONY: kernel
kernel: packages ## one kernel: BASE= STATE= CONFIG=
	@scripts/tree
	@scripts/kernel "$(BASE)" "$(STATE)" "$(CONFIG)"

.PHONY: guest
guest: packages ## boot a kernel and run static programs in it: RUN="prog args; prog2"
	@scripts/guest

.PHONY: bench
bench: packages ## instructions of the workload programs, base and patched
	@scripts/bench

.PHONY: mutations
mutations: packages ## break a topic on purpose; its selftest must turn red
	@set -o pipefail; scripts/mutations | scripts/summary

.PHONY: clean
clean: ## remove build/ (trees with work that is not in patches/ are kept)
	@scripts/clean
