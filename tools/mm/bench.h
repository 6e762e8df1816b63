/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What every workload program of this directory shares.
 *
 * A program prints one line per sample and nothing else on stdout:
 *
 *	sample <row> <nanoseconds> <units>
 *
 * <row> is a short name without blanks, <units> what the reader divides by
 * (pages, as a rule).  Medians and ratios are the reader's business.  Under
 * QEMU's "-icount shift=0" one nanosecond of CLOCK_MONOTONIC_RAW is one guest
 * instruction, so never sleep, and never print, between two clock reads.
 *
 * Include it first: it asks libc for the GNU interfaces.
 */
#ifndef TOOLS_MM_BENCH_H
#define TOOLS_MM_BENCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BENCH_SAMPLES	15
#define BENCH_WARMUP	2

static inline void bench_die(const char *what)
{
	perror(what);
	exit(1);
}

static inline unsigned long long bench_now(void)
{
	struct timespec ts;

	if (clock_gettime(CLOCK_MONOTONIC_RAW, &ts))
		bench_die("clock_gettime");
	return ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

/*
 * Private anonymous memory that starts at a multiple of @align (a power of
 * two), with an unmapped gap on both sides: no neighbour can be merged to it.
 */
static inline char *bench_mmap(size_t size, size_t align)
{
	size_t page = sysconf(_SC_PAGESIZE);
	size_t room = size + align + 2 * page;
	char *area, *mem;

	area = mmap(NULL, room, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED)
		bench_die("mmap");
	mem = (char *)(((uintptr_t)area + page + align - 1) & ~(align - 1));
	if (munmap(area, mem - area) ||
	    munmap(mem + size, area + room - (mem + size)))
		bench_die("munmap");
	return mem;
}

static inline void bench_munmap(char *mem, size_t size)
{
	if (munmap(mem, size))
		bench_die("munmap");
}

static inline void bench_sample(const char *row, unsigned long long ns,
				unsigned long long units)
{
	printf("sample %s %llu %llu\n", row, ns, units);
	fflush(stdout);
}

/*
 * Print @samples samples of @row.  @fn does one whole round (build, measure,
 * tear down) and returns the measured nanoseconds, so that no sample sees what
 * the one before left behind; the first rounds warm up and are not printed.
 */
static inline void bench_run(const char *row, int samples, unsigned long long units,
			     unsigned long long (*fn)(void *arg), void *arg)
{
	unsigned long long ns;
	int i;

	for (i = -BENCH_WARMUP; i < samples; i++) {
		ns = fn(arg);
		if (i >= 0)
			bench_sample(row, ns, units);
	}
}

#endif /* TOOLS_MM_BENCH_H */
