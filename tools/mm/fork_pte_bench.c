// SPDX-License-Identifier: GPL-2.0
/*
 * What fork() costs per page, by the way in which the memory is mapped.
 *
 *	fork_pte_bench [MiB [samples [region...]]]
 *
 * region   what it is                                      units
 * empty    nothing: the bare process                       1
 * thp      transparent huge pages mapped by PTEs           pages
 * order0   small pages                                     pages
 * striped  pages of huge pages alternate with small ones,  pages
 *          so that no two neighbours are of one folio
 * holes    every other page of the huge pages is gone      pages left
 * private  MAP_PRIVATE of a huge tmpfs file, the first     pages
 *          page of each huge page written; needs /tmp
 *          with huge=always, else it has small pages
 *
 * Each sample builds its region anew, since do_wp_page() copies what a fork
 * left shared: a region that was forked and written holds small pages.  From
 * one region come the rows REGION (fork), REGION-forkexit (fork, exit of the
 * child and wait), REGION-refork (fork again: the pages are read-only now and
 * no longer exclusive) and REGION-munmap.
 */
#include "bench.h"
#include <sched.h>
#include <string.h>
#include <sys/wait.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ	22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE	23
#endif
#ifndef SCHED_RESET_ON_FORK
#define SCHED_RESET_ON_FORK	0x40000000
#endif

#define PMD_SIZE	(2ul << 20)

static size_t page_size, size;
static char *region;

static void advise(char *mem, size_t len, int advice)
{
	if (madvise(mem, len, advice))
		bench_die("madvise");
}

/*
 * The child may not run before the parent has read the clock, so the parent
 * is a real-time task for the time of the fork, and the child never is.
 */
static void realtime(int on)
{
	struct sched_param param = { .sched_priority = on ? 1 : 0 };
	int policy = on ? SCHED_FIFO | SCHED_RESET_ON_FORK : SCHED_OTHER;

	if (sched_setscheduler(0, policy, &param))
		bench_die("sched_setscheduler");
}

static void timed_fork(unsigned long long *forked, unsigned long long *waited)
{
	unsigned long long start;
	pid_t pid;

	realtime(1);
	start = bench_now();
	pid = fork();
	if (!pid)
		_exit(0);
	*forked = bench_now() - start;
	if (pid < 0)
		bench_die("fork");
	if (waitpid(pid, NULL, 0) != pid)
		bench_die("waitpid");
	*waited = bench_now() - start;
	realtime(0);
}

/*
 * A VMA boundary inside of a huge page maps it by PTEs.  A change of advice
 * leaves the PTEs as they are, one of protection would not.
 */
static void pte_map(char *mem, size_t len)
{
	char *last;

	for (last = mem + PMD_SIZE - page_size; last < mem + len;
	     last += PMD_SIZE) {
		advise(last, page_size, MADV_DONTDUMP);
		advise(last, page_size, MADV_DODUMP);
	}
}

static void build_empty(void)
{
	region = bench_mmap(page_size, PMD_SIZE);
}

static void build_order0(void)
{
	region = bench_mmap(size, PMD_SIZE);
	advise(region, size, MADV_NOHUGEPAGE);
	advise(region, size, MADV_POPULATE_WRITE);
}

static void build_thp(void)
{
	region = bench_mmap(size, PMD_SIZE);
	advise(region, size, MADV_HUGEPAGE);
	advise(region, size, MADV_POPULATE_WRITE);
	pte_map(region, size);
}

static void build_holes(void)
{
	char *p;

	build_thp();
	for (p = region; p < region + size; p += 2 * page_size)
		advise(p, page_size, MADV_DONTNEED);
}

static void build_striped(void)
{
	build_holes();
	advise(region, size, MADV_POPULATE_WRITE);
}

static void build_private(void)
{
	char name[] = "/tmp/fork_pte_bench.XXXXXX", *p;
	int fd = mkstemp(name);

	if (fd < 0)
		bench_die(name);
	unlink(name);
	if (ftruncate(fd, size))
		bench_die("ftruncate");
	region = bench_mmap(size, PMD_SIZE);
	if (mmap(region, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
		 fd, 0) == MAP_FAILED)
		bench_die("mmap of a file");
	advise(region, size, MADV_POPULATE_WRITE);
	if (mmap(region, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
		 fd, 0) == MAP_FAILED)
		bench_die("mmap of a file");
	close(fd);
	/* Only a written mapping is copied at all, and a PMD never is. */
	for (p = region; p < region + size; p += PMD_SIZE)
		*p = 1;
	advise(region, size, MADV_POPULATE_READ);
}

static const struct {
	const char *name;
	void (*build)(void);
} regions[] = {
	{ "empty", build_empty },
	{ "thp", build_thp },
	{ "order0", build_order0 },
	{ "striped", build_striped },
	{ "holes", build_holes },
	{ "private", build_private },
	{ NULL }
};

static void print(const char *name, const char *what, unsigned long long ns,
		  unsigned long long units)
{
	char row[64];

	snprintf(row, sizeof(row), "%s%s", name, what);
	bench_sample(row, ns, units);
}

static void measure(const char *name, void (*build)(void), size_t len,
		    unsigned long long units, int samples)
{
	unsigned long long forked, waited, again, unmapped, unused;
	int i;

	for (i = -BENCH_WARMUP; i < samples; i++) {
		build();
		timed_fork(&forked, &waited);
		timed_fork(&again, &unused);
		unmapped = bench_now();
		bench_munmap(region, len);
		unmapped = bench_now() - unmapped;
		if (i < 0)
			continue;
		print(name, "", forked, units);
		print(name, "-forkexit", waited, units);
		print(name, "-refork", again, units);
		print(name, "-munmap", unmapped, units);
	}
}

static int wanted(const char *name, char **list)
{
	if (!*list)
		return 1;
	while (*list)
		if (!strcmp(name, *list++))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	char *none = NULL, **list = argc > 3 ? argv + 3 : &none;
	size_t mib = argc > 1 ? strtoul(argv[1], NULL, 0) : 256;
	int samples = argc > 2 ? atoi(argv[2]) : BENCH_SAMPLES;
	unsigned long long units;
	size_t len;
	int i;

	page_size = sysconf(_SC_PAGESIZE);
	size = mib << 20;
	if (!size || size % PMD_SIZE || samples < 1) {
		fprintf(stderr, "usage: %s [MiB, even [samples [region...]]]\n",
			argv[0]);
		return 2;
	}
	for (i = 0; regions[i].name; i++) {
		if (!wanted(regions[i].name, list))
			continue;
		len = regions[i].build == build_empty ? page_size : size;
		units = len / page_size;
		if (regions[i].build == build_holes)
			units /= 2;
		measure(regions[i].name, regions[i].build, len, units, samples);
	}
	return 0;
}
