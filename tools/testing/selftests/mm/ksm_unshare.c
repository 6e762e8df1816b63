// SPDX-License-Identifier: GPL-2.0
/*
 * What KSM must not lose: the state of the PTEs that it merges, and the pages
 * that it is told to unmerge.
 *
 * Merging: a page that is write-protected through userfaultfd, or soft-dirty,
 * is so after ksmd has merged it, else its next write goes unseen.
 *
 * Unmerging, by MADV_UNMERGEABLE, by mremap() or by writing 2 to
 * /sys/kernel/mm/ksm/run: success means that no KSM page is left in the range,
 * whatever its protection and whoever tracks its writes.  Write tracking
 * survives.  It ends when it cannot succeed, and when the caller is killed.
 *
 * Pages are looked at through /proc/self/pagemap and /proc/kpageflags, which
 * needs root.  Each case runs in a child of its own that is given up after a
 * while; "control" cases pass on kernels with and without the defects.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <linux/userfaultfd.h>

#include "../kselftest.h"

#ifndef MADV_NOHUGEPAGE
#define MADV_NOHUGEPAGE		15
#endif
#ifndef MPOL_MF_MOVE_ALL
#define MPOL_MF_MOVE_ALL	4
#endif
#ifndef BIT_ULL
#define BIT_ULL(nr)		(1ULL << (nr))
#endif

#define PM_SOFT_DIRTY		BIT_ULL(55)
#define PM_UFFD_WP		BIT_ULL(57)
#define PM_SWAP			BIT_ULL(62)
#define PM_PRESENT		BIT_ULL(63)
#define PM_PFN			(BIT_ULL(55) - 1)
#define KPF_KSM			BIT_ULL(21)
#define KPF_ZERO_PAGE		BIT_ULL(24)

#define KSM_DIR			"/sys/kernel/mm/ksm/"

#define NR_PAGES		128	/* of most cases */
#define NR_MANY			4096	/* where the unmerge has to take a while */
#define CASE_SECONDS		120
#define SHORT_SECONDS		10

#define ARRAY_LEN(a)		(sizeof(a) / sizeof((a)[0]))

static size_t pagesize;
static int pagemap_fd, kpageflags_fd;
static pid_t main_pid;

/* What this test writes to, and what it found there. */
static struct setting {
	const char *path;
	const char *value;	/* for the duration of the test */
	char saved[32];
} settings[] = {
	{ KSM_DIR "run", "0" },
	{ KSM_DIR "sleep_millisecs", "0" },
	{ KSM_DIR "pages_to_scan", "4096" },
	{ KSM_DIR "use_zero_pages", "0" },
	{ KSM_DIR "smart_scan", "0" },
};

static int read_file(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY);
	ssize_t len;

	if (fd < 0)
		return -1;
	len = read(fd, buf, size - 1);
	close(fd);
	if (len < 0)
		return -1;
	buf[len] = 0;
	return 0;
}

static int write_file(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY);
	int ret;

	if (fd < 0)
		return -1;
	ret = write(fd, value, strlen(value)) < 0 ? -1 : 0;
	close(fd);
	return ret;
}

static void restore_settings(void)
{
	size_t i;

	if (getpid() != main_pid)
		return;
	for (i = 0; i < ARRAY_LEN(settings); i++)
		if (settings[i].saved[0])
			write_file(settings[i].path, settings[i].saved);
}

static void restore_and_die(int sig)
{
	restore_settings();
	signal(sig, SIG_DFL);
	raise(sig);
}

static void apply_settings(void)
{
	static const int signals[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM };
	size_t i;

	for (i = 0; i < ARRAY_LEN(settings); i++)
		if (read_file(settings[i].path, settings[i].saved,
			      sizeof(settings[i].saved)))
			settings[i].saved[0] = 0;
	atexit(restore_settings);
	for (i = 0; i < ARRAY_LEN(signals); i++)
		signal(signals[i], restore_and_die);
	for (i = 0; i < ARRAY_LEN(settings); i++)
		if (settings[i].saved[0])
			write_file(settings[i].path, settings[i].value);
}

/* The child of a case ends through one of these. */
#define fail(fmt, ...)							\
	do {								\
		ksft_print_msg("line %d: " fmt "\n", __LINE__,		\
			       ##__VA_ARGS__);				\
		_exit(KSFT_FAIL);					\
	} while (0)

#define skip(fmt, ...)							\
	do {								\
		ksft_print_msg(fmt "\n", ##__VA_ARGS__);		\
		_exit(KSFT_SKIP);					\
	} while (0)

#define die(what)	fail("%s: %s", what, strerror(errno))

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec + ts.tv_nsec / 1e9;
}

/* The exit status of @pid, or -1 if it does not end in time. */
static int wait_status(pid_t pid, int seconds)
{
	double end = now() + seconds;
	int status;

	do {
		if (waitpid(pid, &status, WNOHANG) == pid)
			return status;
		usleep(2000);
	} while (now() < end);
	return -1;
}

/* Fork; the child looks at its own pages. */
static pid_t fork_worker(void)
{
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		ksft_exit_fail_msg("fork: %s\n", strerror(errno));
	if (!pid) {
		pagemap_fd = open("/proc/self/pagemap", O_RDONLY);
		if (pagemap_fd < 0)
			die("pagemap");
	}
	return pid;
}

static unsigned long long pagemap_entry(const char *addr)
{
	unsigned long long entry;

	if (pread(pagemap_fd, &entry, sizeof(entry),
		  (uintptr_t)addr / pagesize * sizeof(entry)) != sizeof(entry))
		die("pagemap");
	return entry;
}

static unsigned long long page_flags(const char *addr)
{
	unsigned long long flags, entry = pagemap_entry(addr);

	if (!(entry & PM_PRESENT))
		return 0;
	if (pread(kpageflags_fd, &flags, sizeof(flags),
		  (entry & PM_PFN) * sizeof(flags)) != sizeof(flags))
		die("kpageflags");
	return flags;
}

static int count_flag(const char *mem, int pages, unsigned long long flag)
{
	int i, found = 0;

	for (i = 0; i < pages; i++)
		found += !!(page_flags(mem + i * pagesize) & flag);
	return found;
}

static int count_bit(const char *mem, int pages, unsigned long long bit)
{
	int i, found = 0;

	for (i = 0; i < pages; i++)
		found += !!(pagemap_entry(mem + i * pagesize) & bit);
	return found;
}

static void fill(char *mem, int pages, int byte)
{
	int i;

	for (i = 0; i < pages; i++)
		memset(mem + i * pagesize, byte, pagesize);
}

static void check_content(const char *mem, int pages, int byte)
{
	size_t i;

	for (i = 0; i < pages * pagesize; i++)
		if (mem[i] != byte)
			fail("byte %zu is %d, not %d", i, mem[i], byte);
}

/* Identical pages between two guards that keep other areas from merging. */
static char *map_pages(int pages, int byte)
{
	size_t size = pages * pagesize;
	char *mem = mmap(NULL, size + 2 * pagesize, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (mem == MAP_FAILED)
		die("mmap");
	mem += pagesize;
	if (mprotect(mem, size, PROT_READ | PROT_WRITE))
		die("mprotect");
	madvise(mem, size, MADV_NOHUGEPAGE);
	fill(mem, pages, byte);
	return mem;
}

static unsigned long full_scans(void)
{
	char buf[32];

	if (read_file(KSM_DIR "full_scans", buf, sizeof(buf)))
		die("full_scans");
	return strtoul(buf, NULL, 10);
}

/* Let ksmd merge the range, then stop it: what it did stays to be looked at. */
static void merge(char *mem, int pages, unsigned long long flag)
{
	double end = now() + CASE_SECONDS / 2;
	unsigned long scans;
	int found;

	if (madvise(mem, pages * pagesize, MADV_MERGEABLE))
		die("MADV_MERGEABLE");
	if (write_file(KSM_DIR "run", "1"))
		die("run");
	do {
		scans = full_scans();
		while (full_scans() < scans + 2 && now() < end)
			usleep(2000);
		found = count_flag(mem, pages, flag);
	} while (found < pages && now() < end);
	if (write_file(KSM_DIR "run", "0"))
		die("run");
	if (found < pages)
		skip("ksmd merged %d pages of %d", found, pages);
}

static int uffd_open(unsigned long long features)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = features,
	};
	int fd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		skip("userfaultfd: %s", strerror(errno));
	if (ioctl(fd, UFFDIO_API, &api))
		skip("UFFDIO_API: %s", strerror(errno));
	if (!(api.features & UFFD_FEATURE_PAGEFAULT_FLAG_WP))
		skip("no write-protection through userfaultfd");
	return fd;
}

static void uffd_register(int fd, char *mem, int pages)
{
	struct uffdio_register reg = {
		.range = { (uintptr_t)mem, pages * pagesize },
		.mode = UFFDIO_REGISTER_MODE_WP,
	};

	if (ioctl(fd, UFFDIO_REGISTER, &reg))
		die("UFFDIO_REGISTER");
}

static void uffd_protect(int fd, char *mem, int pages, bool protect)
{
	struct uffdio_writeprotect wp = {
		.range = { (uintptr_t)mem, pages * pagesize },
		.mode = protect ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
	};

	if (ioctl(fd, UFFDIO_WRITEPROTECT, &wp))
		die("UFFDIO_WRITEPROTECT");
}

static void *write_byte(void *addr)
{
	*(char *)addr = 'W';
	return NULL;
}

/* A write to @addr must be reported, and go through once allowed. */
static void check_write_traps(int fd, char *addr)
{
	struct pollfd pfd = { .fd = fd, .events = POLLIN };
	struct uffd_msg msg;
	pthread_t writer;

	if (pthread_create(&writer, NULL, write_byte, addr))
		fail("pthread_create");
	if (poll(&pfd, 1, SHORT_SECONDS * 1000) != 1)
		fail("nobody reported the write");
	if (read(fd, &msg, sizeof(msg)) != sizeof(msg))
		die("read from userfaultfd");
	if (msg.event != UFFD_EVENT_PAGEFAULT ||
	    !(msg.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP))
		fail("event %d, not a write-protection fault", msg.event);
	uffd_protect(fd, addr, 1, false);
	pthread_join(writer, NULL);
	if (*addr != 'W')
		fail("the write is lost");
}

static void clear_soft_dirty(void)
{
	if (write_file("/proc/self/clear_refs", "4"))
		skip("clear_refs: %s", strerror(errno));
}

static void need_soft_dirty(void)
{
	char *mem = map_pages(2, 'd');
	bool works;

	clear_soft_dirty();
	mem[0] = 1;
	works = (pagemap_entry(mem) & PM_SOFT_DIRTY) &&
		!(pagemap_entry(mem + pagesize) & PM_SOFT_DIRTY);
	munmap(mem, 2 * pagesize);
	if (!works)
		skip("no soft-dirty tracking");
}

/* Merging: half of the range is tracked, each page keeps what it had. */

static void merge_uffd_wp(bool zero)
{
	char *mem = map_pages(NR_PAGES, zero ? 0 : 'm');
	int fd = uffd_open(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
	int half = NR_PAGES / 2;

	uffd_register(fd, mem, NR_PAGES);
	uffd_protect(fd, mem, half, true);
	if (zero && write_file(KSM_DIR "use_zero_pages", "1"))
		skip("use_zero_pages: %s", strerror(errno));
	merge(mem, NR_PAGES, zero ? KPF_ZERO_PAGE : KPF_KSM);
	if (count_bit(mem, half, PM_UFFD_WP) != half)
		fail("%d of %d pages are still protected",
		     count_bit(mem, half, PM_UFFD_WP), half);
	if (count_bit(mem + half * pagesize, half, PM_UFFD_WP))
		fail("pages are protected that were not");
	check_write_traps(fd, mem);
	check_write_traps(fd, mem + (half - 1) * pagesize);
	mem[half * pagesize] = 1;
}

static void merge_keeps_uffd_wp(void)
{
	merge_uffd_wp(false);
}

static void merge_keeps_uffd_wp_zero(void)
{
	merge_uffd_wp(true);
}

static void merge_soft_dirty(bool zero)
{
	int byte = zero ? 0 : 's', half = NR_PAGES / 2;
	char *mem;

	need_soft_dirty();
	mem = map_pages(NR_PAGES, byte);
	clear_soft_dirty();
	fill(mem, half, byte);
	if (zero && write_file(KSM_DIR "use_zero_pages", "1"))
		skip("use_zero_pages: %s", strerror(errno));
	merge(mem, NR_PAGES, zero ? KPF_ZERO_PAGE : KPF_KSM);
	if (count_bit(mem, half, PM_SOFT_DIRTY) != half)
		fail("%d of %d pages are still soft-dirty",
		     count_bit(mem, half, PM_SOFT_DIRTY), half);
	if (count_bit(mem + half * pagesize, half, PM_SOFT_DIRTY))
		fail("pages are soft-dirty that were not");
}

static void merge_keeps_soft_dirty(void)
{
	merge_soft_dirty(false);
}

static void merge_keeps_soft_dirty_zero(void)
{
	merge_soft_dirty(true);
}

static void merge_invents_nothing(void)
{
	char *mem;
	int fd;

	need_soft_dirty();
	mem = map_pages(NR_PAGES, 'n');
	fd = uffd_open(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
	uffd_register(fd, mem, NR_PAGES);
	clear_soft_dirty();
	merge(mem, NR_PAGES, KPF_KSM);
	if (count_bit(mem, NR_PAGES, PM_SOFT_DIRTY | PM_UFFD_WP))
		fail("merging tracks pages that nobody asked for");
	check_content(mem, NR_PAGES, 'n');
}

/* Unmerging, by each of the ways that user space has. */

enum way { MADVISE, RUN, MREMAP };

static int count_ksm(const char *mem, int pages)
{
	return count_flag(mem, pages, KPF_KSM);
}

static char *map_merged(int pages, int byte)
{
	char *mem = map_pages(pages, byte);

	merge(mem, pages, KPF_KSM);
	return mem;
}

/* Does /proc/self/smaps call the area that holds @addr mergeable? */
static bool is_mergeable(const char *addr)
{
	unsigned long start, end;
	bool inside = false, mergeable = false;
	char line[512];
	FILE *smaps = fopen("/proc/self/smaps", "r");

	if (!smaps)
		die("smaps");
	while (fgets(line, sizeof(line), smaps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = (uintptr_t)addr >= start &&
				 (uintptr_t)addr < end;
		else if (inside && !strncmp(line, "VmFlags:", 8))
			mergeable = strstr(line, " mg");
	}
	fclose(smaps);
	return mergeable;
}

/* Unmerge [@mem, @mem + @pages) by @way; tells where the pages are then. */
static char *unmerge(enum way way, char *mem, int pages)
{
	size_t size = pages * pagesize;
	char *target;

	switch (way) {
	case MADVISE:
		if (madvise(mem, size, MADV_UNMERGEABLE))
			die("MADV_UNMERGEABLE");
		break;
	case RUN:
		if (write_file(KSM_DIR "run", "2"))
			die("run");
		if (write_file(KSM_DIR "run", "0"))
			die("run");
		break;
	case MREMAP:
		target = mmap(NULL, size, PROT_NONE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (target == MAP_FAILED)
			die("mmap");
		mem = mremap(mem, size, size, MREMAP_MAYMOVE | MREMAP_FIXED,
			     target);
		if (mem == MAP_FAILED)
			die("mremap");
		break;
	}
	return mem;
}

static void check_unmerged(const char *mem, int pages)
{
	int left = count_ksm(mem, pages);

	if (left)
		fail("success, but %d of %d KSM pages are left, the area is %smergeable",
		     left, pages, is_mergeable(mem) ? "" : "not ");
}

static void unmerge_plain(enum way way)
{
	char *mem = unmerge(way, map_merged(NR_PAGES, 'p'), NR_PAGES);
	bool mergeable = way != MADVISE;

	check_unmerged(mem, NR_PAGES);
	if (is_mergeable(mem) != mergeable)
		fail("wrong VmFlags");
	check_content(mem, NR_PAGES, 'p');
	fill(mem, NR_PAGES, 'q');
	check_content(mem, NR_PAGES, 'q');
}

static void plain_madvise(void)
{
	unmerge_plain(MADVISE);
}

static void plain_run(void)
{
	unmerge_plain(RUN);
}

static void plain_mremap(void)
{
	unmerge_plain(MREMAP);
}

static void unmerge_uffd_wp(enum way way, unsigned long long features)
{
	char *mem = map_merged(NR_PAGES, 'u');
	int half = NR_PAGES / 2, fd;

	fd = uffd_open(UFFD_FEATURE_PAGEFAULT_FLAG_WP | features);
	uffd_register(fd, mem, NR_PAGES);
	uffd_protect(fd, mem, half, true);
	if (count_ksm(mem, NR_PAGES) != NR_PAGES)
		fail("write-protection unmerged pages");
	mem = unmerge(way, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	check_content(mem, NR_PAGES, 'u');
	/* Without UFFD_FEATURE_EVENT_REMAP the moved area is not registered. */
	if (way == MREMAP)
		return;
	if (count_bit(mem, half, PM_UFFD_WP) != half)
		fail("%d of %d pages are still protected",
		     count_bit(mem, half, PM_UFFD_WP), half);
	if (count_bit(mem + half * pagesize, half, PM_UFFD_WP))
		fail("pages are protected that were not");
	if (!(features & UFFD_FEATURE_SIGBUS))
		check_write_traps(fd, mem);
}

static void uffd_wp_madvise(void)
{
	unmerge_uffd_wp(MADVISE, 0);
}

static void uffd_wp_run(void)
{
	unmerge_uffd_wp(RUN, 0);
}

static void uffd_wp_mremap(void)
{
	unmerge_uffd_wp(MREMAP, 0);
}

static void uffd_wp_sigbus(void)
{
	unmerge_uffd_wp(MADVISE, UFFD_FEATURE_SIGBUS);
}

static void unmerge_soft_dirty(void)
{
	int half = NR_PAGES / 2;
	char *mem;

	need_soft_dirty();
	mem = map_pages(NR_PAGES, 's');
	clear_soft_dirty();
	merge(mem, NR_PAGES, KPF_KSM);
	mem = unmerge(MADVISE, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	if (count_bit(mem, NR_PAGES, PM_SOFT_DIRTY))
		fail("%d pages are soft-dirty that nobody wrote to",
		     count_bit(mem, NR_PAGES, PM_SOFT_DIRTY));
	fill(mem, half, 't');
	if (count_bit(mem, NR_PAGES, PM_SOFT_DIRTY) != half)
		fail("%d pages are soft-dirty, %d were written",
		     count_bit(mem, NR_PAGES, PM_SOFT_DIRTY), half);
}

static void unmerge_prot(enum way way, int prot)
{
	char *mem = map_merged(NR_PAGES, 'r');
	size_t size = NR_PAGES * pagesize;

	if (mprotect(mem, size, prot))
		die("mprotect");
	if (count_ksm(mem, NR_PAGES) != NR_PAGES)
		fail("mprotect() unmerged pages");
	mem = unmerge(way, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	if (mprotect(mem, size, PROT_READ | PROT_WRITE))
		die("mprotect");
	check_content(mem, NR_PAGES, 'r');
	fill(mem, NR_PAGES, 'w');
	check_content(mem, NR_PAGES, 'w');
}

static void prot_none_madvise(void)
{
	unmerge_prot(MADVISE, PROT_NONE);
}

static void prot_none_run(void)
{
	unmerge_prot(RUN, PROT_NONE);
}

static void prot_none_mremap(void)
{
	unmerge_prot(MREMAP, PROT_NONE);
}

static void prot_read(void)
{
	unmerge_prot(MADVISE, PROT_READ);
}

static void unmerge_part(void)
{
	char *mem = map_merged(NR_PAGES, 'o');
	int half = NR_PAGES / 2;

	unmerge(MADVISE, mem + half / 2 * pagesize, half);
	check_unmerged(mem + half / 2 * pagesize, half);
	if (count_ksm(mem, NR_PAGES) != NR_PAGES - half)
		fail("%d pages outside of the range are merged, not %d",
		     count_ksm(mem, NR_PAGES), NR_PAGES - half);
	if (!is_mergeable(mem))
		fail("the rest of the area is not mergeable");
	check_content(mem, NR_PAGES, 'o');
}

static void unmerge_discarded(void)
{
	char *mem = map_merged(NR_PAGES, 'd');
	int half = NR_PAGES / 2;

	if (madvise(mem, half * pagesize, MADV_DONTNEED))
		die("MADV_DONTNEED");
	unmerge(MADVISE, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	if (count_bit(mem, half, PM_PRESENT))
		fail("unmerging brought discarded pages back");
	check_content(mem, half, 0);
	check_content(mem + half * pagesize, half, 'd');
}

static void unmerge_zero_pages(void)
{
	char *mem = map_pages(NR_PAGES, 0);

	if (write_file(KSM_DIR "use_zero_pages", "1"))
		skip("use_zero_pages: %s", strerror(errno));
	merge(mem, NR_PAGES, KPF_ZERO_PAGE);
	unmerge(MADVISE, mem, NR_PAGES);
	if (count_flag(mem, NR_PAGES, KPF_ZERO_PAGE) != NR_PAGES)
		fail("%d zero pages of %d are left",
		     count_flag(mem, NR_PAGES, KPF_ZERO_PAGE), NR_PAGES);
	check_content(mem, NR_PAGES, 0);
	fill(mem, NR_PAGES, 'z');
	check_content(mem, NR_PAGES, 'z');
}

/* Either side of a fork unmerges, the other keeps its KSM pages. */
static void unmerge_forked(bool child_does)
{
	char *mem = map_merged(NR_PAGES, 'f');
	int to_child[2], to_parent[2];
	char c;
	pid_t pid;
	int status;

	if (pipe(to_child) || pipe(to_parent))
		die("pipe");
	pid = fork_worker();
	if (!pid) {
		if (child_does) {
			unmerge(MADVISE, mem, NR_PAGES);
			check_unmerged(mem, NR_PAGES);
		} else {
			if (read(to_child[0], &c, 1) != 1)
				die("read");
			if (count_ksm(mem, NR_PAGES) != NR_PAGES)
				fail("the parent unmerged the child");
		}
		check_content(mem, NR_PAGES, 'f');
		fill(mem, NR_PAGES, 'c');
		if (write(to_parent[1], "", 1) != 1)
			die("write");
		_exit(KSFT_PASS);
	}
	if (!child_does) {
		unmerge(MADVISE, mem, NR_PAGES);
		check_unmerged(mem, NR_PAGES);
		if (write(to_child[1], "", 1) != 1)
			die("write");
	}
	status = wait_status(pid, CASE_SECONDS / 2);
	if (status)
		fail("the child ended with status %#x", status);
	if (child_does && count_ksm(mem, NR_PAGES) != NR_PAGES)
		fail("the child unmerged the parent");
	check_content(mem, NR_PAGES, 'f');
}

static void fork_child_unmerges(void)
{
	unmerge_forked(true);
}

static void fork_parent_unmerges(void)
{
	unmerge_forked(false);
}

/* A pipe holds a reference to a KSM page: it goes on reading the old page. */
static void unmerge_pinned(void)
{
	char *mem = map_merged(NR_PAGES, 'i');
	struct iovec iov = { mem, pagesize };
	char buf[16];
	int fds[2];

	if (pipe(fds))
		die("pipe");
	if (vmsplice(fds[1], &iov, 1, 0) != (ssize_t)pagesize)
		skip("vmsplice: %s", strerror(errno));
	unmerge(MADVISE, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	fill(mem, NR_PAGES, 'j');
	if (read(fds[0], buf, sizeof(buf)) != sizeof(buf))
		die("read");
	check_content(mem, NR_PAGES, 'j');
	if (buf[0] != 'i' || buf[sizeof(buf) - 1] != 'i')
		fail("the pipe reads what was written later");
}

/* Pages are migrated, back and forth where there are two nodes. */
static atomic_bool stop_moving;

struct moved {
	char *mem;
	int pages;
	pid_t pid;
};

static void *move_loop(void *arg)
{
	struct moved *moved = arg;
	int i, node, *nodes, *status;
	void **addr;

	addr = calloc(moved->pages, sizeof(*addr));
	nodes = calloc(moved->pages, sizeof(*nodes));
	status = calloc(moved->pages, sizeof(*status));
	if (!addr || !nodes || !status)
		fail("out of memory");
	for (node = 0; !stop_moving; node = !node) {
		for (i = 0; i < moved->pages; i++) {
			addr[i] = moved->mem + i * pagesize;
			nodes[i] = node;
		}
		if (syscall(__NR_move_pages, moved->pid, moved->pages, addr,
			    nodes, status, MPOL_MF_MOVE_ALL) < 0)
			write_file("/proc/sys/vm/compact_memory", "1");
	}
	free(addr);
	free(nodes);
	free(status);
	return NULL;
}

static void unmerge_moving(void)
{
	static const enum way ways[] = { MADVISE, RUN };
	struct moved moved = { .pages = 4 * NR_PAGES, .pid = getpid() };
	pthread_t mover;
	size_t i;

	for (i = 0; i < ARRAY_LEN(ways); i++) {
		moved.mem = map_merged(moved.pages, 'v');
		stop_moving = false;
		if (pthread_create(&mover, NULL, move_loop, &moved))
			fail("pthread_create");
		usleep(20000);
		unmerge(ways[i], moved.mem, moved.pages);
		stop_moving = true;
		pthread_join(mover, NULL);
		check_unmerged(moved.mem, moved.pages);
		check_content(moved.mem, moved.pages, 'v');
		munmap(moved.mem, moved.pages * pagesize);
	}
}

/* A timer interrupts the unmerge all the time, it still gets to its end. */
static void on_alarm(int sig)
{
	(void)sig;
}

static void unmerge_interrupted(void)
{
	struct itimerval timer = { { 0, 20000 }, { 0, 20000 } };
	struct sigaction action = {
		.sa_handler = on_alarm,
		.sa_flags = SA_RESTART,
	};
	char *mem = map_merged(NR_MANY, 't');

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &timer, NULL);
	unmerge(MADVISE, mem, NR_MANY);
	memset(&timer, 0, sizeof(timer));
	setitimer(ITIMER_REAL, &timer, NULL);
	check_unmerged(mem, NR_MANY);
}

/*
 * What the parent and the child of the following cases tell each other. The
 * child closes stdout, so that nobody waits for its end if it cannot be killed.
 */
struct shared {
	atomic_bool ready, begun, ended;
};

static struct shared *map_shared(void)
{
	struct shared *shared = mmap(NULL, pagesize, PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (shared == MAP_FAILED)
		die("mmap");
	return shared;
}

static void wait_for(atomic_bool *flag)
{
	double end = now() + CASE_SECONDS / 2;

	while (!*flag && now() < end)
		sched_yield();
}

static void kill_unmerge(void)
{
	struct shared *shared = map_shared();
	char *mem;
	pid_t pid;
	int delay, status;

	for (delay = 8000; delay >= 500; delay /= 2) {
		memset(shared, 0, sizeof(*shared));
		pid = fork_worker();
		if (!pid) {
			mem = map_merged(NR_MANY, 'k');
			shared->begun = true;
			madvise(mem, NR_MANY * pagesize, MADV_UNMERGEABLE);
			shared->ended = true;
			_exit(KSFT_PASS);
		}
		wait_for(&shared->begun);
		usleep(delay);
		kill(pid, SIGKILL);
		status = wait_status(pid, SHORT_SECONDS);
		if (status == -1)
			fail("still there %d s after SIGKILL", SHORT_SECONDS);
		if (!shared->begun)
			skip("ksmd did not merge in time");
		if (!shared->ended && WIFSIGNALED(status))
			return;
	}
	skip("the unmerge was always faster than the signal");
}

/* A control group for the worker of a case, which alone is in it. */
static char group[128], group_root[64];
static bool group_enabled;

static int write_group(const char *dir, const char *file, const char *value)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, file);
	return write_file(path, value);
}

static void remove_group(void)
{
	rmdir(group);
	if (group_enabled)
		write_group(group_root, "cgroup.subtree_control", "-memory");
}

static void make_group(void)
{
	char type[32], line[256], path[128];
	FILE *mounts = fopen("/proc/mounts", "r");

	while (mounts && fgets(line, sizeof(line), mounts))
		if (sscanf(line, "%*s %63s %31s", path, type) == 2 &&
		    !strcmp(type, "cgroup2"))
			snprintf(group_root, sizeof(group_root), "%.63s", path);
	if (mounts)
		fclose(mounts);
	if (!group_root[0])
		skip("no cgroup2");
	snprintf(path, sizeof(path), "%s/cgroup.subtree_control", group_root);
	if (read_file(path, line, sizeof(line)))
		skip("cgroup2: %s", strerror(errno));
	if (!strstr(line, "memory")) {
		if (write_file(path, "+memory"))
			skip("no memory controller");
		group_enabled = true;
	}
	snprintf(group, sizeof(group), "%s/ksm_unshare.%d", group_root,
		 getpid());
	if (mkdir(group, 0700)) {
		remove_group();
		skip("%s: %s", group, strerror(errno));
	}
}

/*
 * Nobody in the group may be killed for its limit, so the charge of a copy
 * fails.  Then so does the unmerge, which can be repeated with more memory.
 */
static void memcg_worker(void)
{
	char *mem, value[32], path[256];
	int ret, err, left, limit;

	if (write_file("/proc/self/oom_score_adj", "-1000"))
		skip("oom_score_adj: %s", strerror(errno));
	mem = map_merged(NR_MANY, 'g');
	write_group(group, "memory.swap.max", "0");
	snprintf(value, sizeof(value), "%zu", NR_MANY / 2 * pagesize);
	snprintf(path, sizeof(path), "%s/memory.max", group);
	limit = open(path, O_WRONLY);
	if (limit < 0 || write(limit, value, strlen(value)) < 0)
		skip("memory.max: %s", strerror(errno));
	ret = madvise(mem, NR_MANY * pagesize, MADV_UNMERGEABLE);
	err = errno;
	/* Before anything else: even a page of stack could be one too many. */
	if (write(limit, "max", 3) != 3)
		die("memory.max");
	left = count_ksm(mem, NR_MANY);
	if (!left)
		skip("the limit did not matter");
	if (!ret)
		fail("success with %d KSM pages left", left);
	if (err != EAGAIN && err != ENOMEM)
		fail("%s, not EAGAIN", strerror(err));
	if (!is_mergeable(mem))
		fail("not mergeable, but %d KSM pages are left", left);
	unmerge(MADVISE, mem, NR_MANY);
	check_unmerged(mem, NR_MANY);
	if (is_mergeable(mem))
		fail("still mergeable");
	check_content(mem, NR_MANY, 'g');
}

/*
 * Many pages of each of a few contents, so that there is more to swap out. A
 * pipe that holds a page of each content keeps them all in the swap cache.
 */
static void swap_out(bool in_pipe)
{
	char *mem = map_pages(NR_PAGES, 'x');
	int i, fds[2], try, swapped = 0;
	struct iovec iov;

	for (i = 0; i < NR_PAGES; i++)
		mem[i * pagesize] = i % 16;
	merge(mem, NR_PAGES, KPF_KSM);
	if (in_pipe && pipe(fds))
		die("pipe");
	for (i = 0; in_pipe && i < 16; i++) {
		iov.iov_base = mem + i * pagesize;
		iov.iov_len = pagesize;
		if (vmsplice(fds[1], &iov, 1, SPLICE_F_NONBLOCK) != (ssize_t)pagesize)
			skip("vmsplice: %s", strerror(errno));
	}
	for (try = 0; try < 500 && swapped < NR_PAGES / 4; try++) {
		if (write_group(group, "memory.reclaim", "1M") &&
		    errno == ENOENT)
			break;
		usleep(2000);
		swapped = count_bit(mem, NR_PAGES, PM_SWAP);
	}
	if (!swapped)
		skip("could not swap out KSM pages");
	unmerge(MADVISE, mem, NR_PAGES);
	check_unmerged(mem, NR_PAGES);
	for (i = 0; i < NR_PAGES; i++)
		if (mem[i * pagesize] != i % 16 ||
		    mem[(i + 1) * pagesize - 1] != 'x')
			fail("page %d has wrong content", i);
	/* What was still in the swap cache has been mapped by reading it. */
	if (in_pipe)
		check_unmerged(mem, NR_PAGES);
	fill(mem, NR_PAGES, 'y');
	check_content(mem, NR_PAGES, 'y');
}

static void swap_worker(void)
{
	swap_out(false);
}

static void swap_cache_worker(void)
{
	swap_out(true);
}

static void run_in_group(void (*worker)(void))
{
	int status;
	pid_t pid;

	make_group();
	pid = fork_worker();
	if (!pid) {
		if (write_group(group, "cgroup.procs", "0"))
			skip("%s: %s", group, strerror(errno));
		worker();
		_exit(KSFT_PASS);
	}
	status = wait_status(pid, CASE_SECONDS - SHORT_SECONDS);
	if (status == -1) {
		write_group(group, "memory.max", "max");
		kill(pid, SIGKILL);
		wait_status(pid, SHORT_SECONDS / 2);
	}
	remove_group();
	if (status == -1 || !WIFEXITED(status))
		fail("the worker ended with status %#x", status);
	_exit(WEXITSTATUS(status));
}

static void memcg_limit(void)
{
	run_in_group(memcg_worker);
}

static void swapped(void)
{
	run_in_group(swap_worker);
}

static void in_swap_cache(void)
{
	run_in_group(swap_cache_worker);
}

/*
 * One thread unmerges protected pages, another closes the userfaultfd, which
 * has to wait for the mmap lock that the first one holds.
 */
static char *close_mem;
static struct shared *close_shared;

static void *unmerge_thread(void *arg)
{
	(void)arg;
	close_shared->begun = true;
	madvise(close_mem, NR_MANY * pagesize, MADV_UNMERGEABLE);
	close_shared->ended = true;
	return NULL;
}

static void close_worker(int delay)
{
	pthread_t thread;
	bool overlap;
	int fd;

	close_mem = map_merged(NR_MANY, 'h');
	fd = uffd_open(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
	uffd_register(fd, close_mem, NR_MANY);
	uffd_protect(fd, close_mem, NR_MANY, true);
	fflush(stdout);
	close(STDOUT_FILENO);
	close(STDERR_FILENO);
	close_shared->ready = true;
	if (pthread_create(&thread, NULL, unmerge_thread, NULL))
		_exit(KSFT_FAIL);
	wait_for(&close_shared->begun);
	usleep(delay);
	overlap = !close_shared->ended;
	close(fd);
	pthread_join(thread, NULL);
	if (count_ksm(close_mem, NR_MANY))
		_exit(KSFT_FAIL);
	_exit(overlap ? KSFT_PASS : KSFT_SKIP);
}

static void uffd_close(void)
{
	int delay, status;
	pid_t pid;

	close_shared = map_shared();
	for (delay = 4000; delay >= 250; delay /= 2) {
		memset(close_shared, 0, sizeof(*close_shared));
		pid = fork_worker();
		if (!pid)
			close_worker(delay);
		wait_for(&close_shared->ready);
		status = wait_status(pid, 2 * SHORT_SECONDS);
		if (status == -1) {
			kill(pid, SIGKILL);
			fail("close() and the unmerge do not end%s",
			     wait_status(pid, SHORT_SECONDS / 2) == -1 ?
			     ", and cannot be killed" : "");
		}
		if (!WIFEXITED(status))
			fail("the worker ended with status %#x", status);
		if (WEXITSTATUS(status) == KSFT_PASS)
			return;
		if (WEXITSTATUS(status) == KSFT_FAIL)
			fail("KSM pages are left");
	}
	skip("the unmerge was always faster than close()");
}

static const struct test_case {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "merge keeps uffd-wp", merge_keeps_uffd_wp },
	{ "merge to the zero page keeps uffd-wp", merge_keeps_uffd_wp_zero },
	{ "merge keeps soft-dirty", merge_keeps_soft_dirty },
	{ "merge to the zero page keeps soft-dirty",
	  merge_keeps_soft_dirty_zero },
	{ "control: merge sets no tracking bit", merge_invents_nothing },
	{ "unmerge by madvise under uffd-wp", uffd_wp_madvise },
	{ "unmerge by run=2 under uffd-wp", uffd_wp_run },
	{ "unmerge by mremap under uffd-wp", uffd_wp_mremap },
	{ "unmerge under uffd-wp with UFFD_FEATURE_SIGBUS", uffd_wp_sigbus },
	{ "unmerge leaves soft-dirty alone", unmerge_soft_dirty },
	{ "unmerge by madvise of PROT_NONE", prot_none_madvise },
	{ "unmerge by run=2 of PROT_NONE", prot_none_run },
	{ "unmerge by mremap of PROT_NONE", prot_none_mremap },
	{ "control: unmerge of PROT_READ", prot_read },
	{ "control: unmerge by madvise", plain_madvise },
	{ "control: unmerge by run=2", plain_run },
	{ "control: unmerge by mremap", plain_mremap },
	{ "control: unmerge of a part", unmerge_part },
	{ "control: unmerge of discarded pages", unmerge_discarded },
	{ "control: unmerge leaves use_zero_pages alone", unmerge_zero_pages },
	{ "control: unmerge in the child of a fork", fork_child_unmerges },
	{ "control: unmerge in the parent of a fork", fork_parent_unmerges },
	{ "control: unmerge of a page that a pipe reads", unmerge_pinned },
	{ "control: unmerge of pages on the move", unmerge_moving },
	{ "control: unmerge of swapped pages", swapped },
	{ "unmerge of pages in the swap cache", in_swap_cache },
	{ "control: unmerge with a timer running", unmerge_interrupted },
	{ "control: unmerge over the limit of a memcg", memcg_limit },
	{ "control: unmerge ends by SIGKILL", kill_unmerge },
	/* The last one: on a kernel that hangs, nothing gets rid of it. */
	{ "unmerge while userfaultfd is closed", uffd_close },
};

static void run_case(const struct test_case *test)
{
	int status;
	pid_t pid;

	pid = fork_worker();
	if (!pid) {
		test->run();
		_exit(KSFT_PASS);
	}
	status = wait_status(pid, CASE_SECONDS);
	if (status == -1) {
		kill(pid, SIGKILL);
		ksft_print_msg("no end after %d seconds%s\n", CASE_SECONDS,
			       wait_status(pid, SHORT_SECONDS) == -1 ?
			       ", cannot be killed" : "");
	}
	write_file(KSM_DIR "run", "0");
	write_file(KSM_DIR "use_zero_pages", "0");
	if (WIFSIGNALED(status) && status != -1)
		ksft_print_msg("killed by signal %d\n", WTERMSIG(status));
	if (status == -1 || !WIFEXITED(status))
		ksft_test_result_fail("%s\n", test->name);
	else if (WEXITSTATUS(status) == KSFT_SKIP)
		ksft_test_result_skip("%s\n", test->name);
	else
		ksft_test_result(WEXITSTATUS(status) == KSFT_PASS, "%s\n",
				 test->name);
}

int main(void)
{
	size_t i;

	ksft_print_header();
	main_pid = getpid();
	pagesize = sysconf(_SC_PAGESIZE);
	if (geteuid())
		ksft_exit_skip("needs root\n");
	if (access(KSM_DIR "run", W_OK))
		ksft_exit_skip("no KSM\n");
	kpageflags_fd = open("/proc/kpageflags", O_RDONLY);
	if (kpageflags_fd < 0)
		ksft_exit_skip("no /proc/kpageflags\n");
	ksft_set_plan(ARRAY_LEN(cases));
	apply_settings();
	for (i = 0; i < ARRAY_LEN(cases); i++)
		run_case(&cases[i]);
	ksft_finished();
}
