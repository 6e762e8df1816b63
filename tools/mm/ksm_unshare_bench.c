// SPDX-License-Identifier: GPL-2.0
/*
 * What it costs to unmerge KSM pages with MADV_UNMERGEABLE.
 *
 * Rows, with what a unit is:
 *	dense		64 MiB, all KSM pages; a KSM page
 *	dense_write	the same, and a write to each page afterwards; a KSM page
 *	sparse		256 MiB of ordinary pages, every 100th a KSM page; a page
 *			of the range
 *	hole		1 GiB with nothing but a KSM page every 100th page; a page
 *			of the range
 *
 * Usage: ksm_unshare_bench [samples [row]...]
 *
 * Each sample is taken by a child with a region of its own, which ksmd merges
 * first: it is stopped while the unmerge is timed.  Needs root.
 */
#include "bench.h"
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>

#define KSM		"/sys/kernel/mm/ksm/"
#define KPF_KSM		(1ull << 21)
#define PM_PFN		((1ull << 55) - 1)
#define STEP		100	/* of sparse and hole */
#define POLLS		20000

static const struct row {
	const char *name;
	size_t size;
	int step;		/* every how manieth page is a KSM page */
	bool populate;		/* the others too */
	bool write;
} rows[] = {
	{ "dense", 64 << 20, 1, false, false },
	{ "dense_write", 64 << 20, 1, false, true },
	{ "sparse", 256 << 20, STEP, true, false },
	{ "hole", 1 << 30, STEP, false, false },
};

static size_t page;
static uint64_t *result;

static void ksm_write(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, value, strlen(value)) < 0)
		bench_die(path);
	close(fd);
}

static bool is_ksm(int pagemap, int flags, const char *addr)
{
	uint64_t entry, value;

	if (pread(pagemap, &entry, 8, (uintptr_t)addr / page * 8) != 8 ||
	    pread(flags, &value, 8, (entry & PM_PFN) * 8) != 8)
		bench_die("pagemap");
	return value & KPF_KSM;
}

/* Wait until each @step'th page is merged. */
static void wait_merged(const char *mem, size_t size, size_t step)
{
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	int flags = open("/proc/kpageflags", O_RDONLY);
	size_t off = 0;
	int polls;

	if (pagemap < 0 || flags < 0)
		bench_die("pagemap");
	for (polls = 0; polls < POLLS && off < size; polls++) {
		while (off < size && is_ksm(pagemap, flags, mem + off))
			off += step;
		if (off < size)
			usleep(10000);
	}
	if (off < size) {
		fprintf(stderr, "ksmd does not merge\n");
		exit(1);
	}
	close(pagemap);
	close(flags);
}

static void sample(const struct row *row)
{
	size_t step = row->step * page, off;
	uint64_t start;
	char *mem;

	mem = bench_mmap(row->size, 2 << 20);
	madvise(mem, row->size, MADV_NOHUGEPAGE);
	for (off = 0; off < row->size; off += step)
		memset(mem + off, 'k', page);
	if (madvise(mem, row->size, MADV_MERGEABLE))
		bench_die("MADV_MERGEABLE");
	ksm_write(KSM "run", "1");
	wait_merged(mem, row->size, step);
	ksm_write(KSM "run", "0");
	if (row->populate)
		for (off = 0; off < row->size; off += page)
			if (off % step)
				*(size_t *)(mem + off) = off;

	start = bench_now();
	if (madvise(mem, row->size, MADV_UNMERGEABLE))
		bench_die("MADV_UNMERGEABLE");
	if (row->write)
		for (off = 0; off < row->size; off += page)
			*(volatile char *)(mem + off) = 'w';
	*result = bench_now() - start;
}

static unsigned long long sample_in_child(void *arg)
{
	int status;
	pid_t pid = fork();

	if (pid < 0)
		bench_die("fork");
	if (!pid) {
		sample(arg);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status) {
		fprintf(stderr, "sample failed: %#x\n", status);
		exit(1);
	}
	/* Nothing is mapped any longer: this empties KSM's trees. */
	ksm_write(KSM "run", "2");
	ksm_write(KSM "run", "0");
	return *result;
}

int main(int argc, char **argv)
{
	int samples = argc > 1 ? atoi(argv[1]) : 10;
	const struct row *row;
	int i;

	page = sysconf(_SC_PAGESIZE);
	result = mmap(NULL, page, PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (result == MAP_FAILED)
		bench_die("mmap");
	ksm_write(KSM "run", "0");
	ksm_write(KSM "sleep_millisecs", "0");
	ksm_write(KSM "pages_to_scan", "4096");
	for (row = rows; row < rows + sizeof(rows) / sizeof(*rows); row++) {
		for (i = 2; i < argc && strcmp(argv[i], row->name); i++)
			;
		if (argc > 2 && i == argc)
			continue;
		bench_run(row->name, samples,
			  row->size / page, sample_in_child, (void *)row);
	}
	return 0;
}
