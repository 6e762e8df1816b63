// SPDX-License-Identifier: GPL-2.0
/*
 * Collapse of anonymous memory that no page table entry maps writable.
 *
 * Memory that was filled and made read-only, that is still write-protected
 * from a fork whose child is long gone, or that is swapped out as a whole has
 * not one writable page table entry. Such a range is worth a huge page like
 * any other, and MADV_COLLAPSE and khugepaged have to make it one:
 *
 *  - without a change to the data or to who may write to them, now and after
 *    mprotect(), fork() and writes through /proc/self/mem;
 *  - but not where nothing is there to collapse, where a page is pinned or
 *    write-protected by userfaultfd, where more pages are shared than
 *    max_ptes_shared allows khugepaged, where ksmd has merged pages, and, by
 *    khugepaged, not in memory that is inaccessible.
 *
 * Cases whose name begins with "control: " passed before that was so.
 *
 * khugepaged is given a number of full scans, not a time. Each case is a
 * process of its own, which is killed if it does not come to an end.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include "../kselftest.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#endif
#ifndef __NR_io_uring_register
#define __NR_io_uring_register 427
#endif

#define THP "/sys/kernel/mm/transparent_hugepage/"
#define KHUGEPAGED THP "khugepaged/"
#define KSM "/sys/kernel/mm/ksm/"
#define MIN_FREE "/proc/sys/vm/min_free_kbytes"
#define PAGEMAP "/proc/self/pagemap"

/* A scan that began before the case was set up does not count. */
#define FULL_SCANS 8
#define KSM_FULL_SCANS 16
#define MAX_TRIES 8
#define CASE_TIMEOUT_MS (120 * 1000)

#define NR_SPARSE 8
#define NR_MERGED 16

/* Bits of /proc/self/pagemap and of /proc/kpageflags */
#define PM_PFN_BITS 55
#define PM_SOFT_DIRTY 55
#define PM_SWAP 62
#define KPF_KSM 21

/*
 * What every case starts with. The value of each is put back at the end;
 * where it is NULL, only that.
 */
static struct setting {
	const char *path;
	const char *value;
	char saved[64];
} settings[] = {
	{ THP "enabled", "never" },
	{ THP "shmem_enabled", "never" },
	{ KHUGEPAGED "defrag", "1" },
	{ KHUGEPAGED "scan_sleep_millisecs", "0" },
	{ KHUGEPAGED "alloc_sleep_millisecs", "0" },
	{ KHUGEPAGED "pages_to_scan", "8192" },
	{ KHUGEPAGED "max_ptes_none", NULL },
	{ KHUGEPAGED "max_ptes_swap", NULL },
	{ KHUGEPAGED "max_ptes_shared", NULL },
	{ KSM "run", "0" },
	{ KSM "sleep_millisecs", "0" },
	{ KSM "pages_to_scan", "8192" },
	/* Follows THP's "enabled", and is not always told to follow it back. */
	{ MIN_FREE, NULL },
};

static const int signals[] = { SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM };
static size_t page_size, pmd_size, nr_pages;
static pid_t main_pid, case_pid;
static int report_fd;
static sigjmp_buf segv_env;

/* Used by the signal handler too, hence no stdio. */
static int write_file(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t ret;

	if (fd < 0)
		return -1;
	ret = write(fd, value, strlen(value));
	close(fd);
	return ret < 0 ? -1 : 0;
}

static int read_file(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t ret;

	if (fd < 0)
		return -1;
	ret = read(fd, buf, size - 1);
	close(fd);
	if (ret < 0)
		return -1;
	buf[ret] = '\0';
	return 0;
}

static void save_settings(void)
{
	char buf[128], *p, *end;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(settings); i++) {
		if (read_file(settings[i].path, buf, sizeof(buf)))
			continue;
		/* Either a bare value or "one [chosen] of many". */
		p = strchr(buf, '[');
		p = p ? p + 1 : buf;
		end = p + strcspn(p, "]\n");
		*end = '\0';
		snprintf(settings[i].saved, sizeof(settings[i].saved), "%.63s",
			 p);
	}
}

static void restore_settings(void)
{
	char buf[64];
	size_t i;

	if (getpid() != main_pid)
		return;
	for (i = 0; i < ARRAY_SIZE(settings); i++) {
		if (!settings[i].saved[0])
			continue;
		/* Written needlessly, min_free_kbytes becomes the user's. */
		if (!strcmp(settings[i].path, MIN_FREE) &&
		    !read_file(MIN_FREE, buf, sizeof(buf)) &&
		    !strncmp(buf, settings[i].saved, strcspn(buf, "\n")))
			continue;
		write_file(settings[i].path, settings[i].saved);
	}
}

static void on_signal(int sig)
{
	if (case_pid > 0)
		kill(-case_pid, SIGKILL);
	restore_settings();
	_exit(128 + sig);
}

/* A case ends with a reason, unless it passes. */
#define finish(code, ...)				\
	do {						\
		dprintf(report_fd, __VA_ARGS__);	\
		_exit(code);				\
	} while (0)
#define fail(...) finish(KSFT_FAIL, __VA_ARGS__)
#define skip(...) finish(KSFT_SKIP, __VA_ARGS__)

/* What the compiler knows about memory is out of date. */
static void clobber(void)
{
	asm volatile("" : : : "memory");
}

static char load(const char *p)
{
	clobber();
	return *p;
}

static void store(char *p, char value)
{
	*p = value;
	clobber();
}

static void set(const char *path, const char *value)
{
	if (write_file(path, value))
		skip("cannot write %s to %s: %s", value, path, strerror(errno));
}

static void set_number(const char *path, size_t value)
{
	char buf[32];

	snprintf(buf, sizeof(buf), "%zu", value);
	set(path, buf);
}

static unsigned int get_number(const char *path)
{
	char buf[64];

	if (read_file(path, buf, sizeof(buf)))
		skip("cannot read %s: %s", path, strerror(errno));
	return strtoul(buf, NULL, 10);
}

static unsigned long rss_anon_kb(void)
{
	unsigned long kb = 0;
	char line[256];
	FILE *f;

	f = fopen("/proc/self/status", "re");
	if (!f)
		skip("cannot read status: %s", strerror(errno));
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "RssAnon: %lu", &kb) == 1)
			break;
	fclose(f);
	return kb;
}

/*
 * The field of /proc/self/smaps for the mapping that addr is in, in kB. Huge
 * pages that are inaccessible are not among what it counts.
 */
static unsigned long smaps_kb(const void *addr, const char *field)
{
	unsigned long start, end, kb = 0, target = (unsigned long)addr;
	bool inside = false;
	char line[PATH_MAX];
	FILE *f;

	f = fopen("/proc/self/smaps", "re");
	if (!f)
		skip("cannot read smaps: %s", strerror(errno));
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = start <= target && target < end;
		else if (inside && !strncmp(line, field, strlen(field)))
			kb = strtoul(line + strlen(field), NULL, 10);
	}
	fclose(f);
	return kb;
}

static unsigned long huge_kb(const void *addr)
{
	return smaps_kb(addr, "AnonHugePages:");
}

static uint64_t pagemap_entry(const char *addr)
{
	int fd = open(PAGEMAP, O_RDONLY | O_CLOEXEC);
	uint64_t entry = 0;

	if (fd < 0 || pread(fd, &entry, sizeof(entry),
			    (uintptr_t)addr / page_size * sizeof(entry)) !=
	    sizeof(entry))
		skip(PAGEMAP ": %s", strerror(errno));
	close(fd);
	return entry;
}

static bool pagemap_bit(const char *addr, int bit)
{
	return pagemap_entry(addr) >> bit & 1;
}

static uint64_t pattern(size_t page, size_t word, int seed)
{
	return ((uint64_t)seed << 56) ^ (page + 1) * 0x9e3779b97f4a7c15ULL ^
	       word;
}

static void fill(char *p, size_t pages, int seed)
{
	uint64_t *q = (void *)p;
	size_t i, j, words = page_size / sizeof(*q);

	for (i = 0; i < pages; i++)
		for (j = 0; j < words; j++)
			q[i * words + j] = pattern(i, j, seed);
	clobber();
}

static bool intact(const char *p, size_t pages, int seed)
{
	const uint64_t *q = (const void *)p;
	size_t i, j, words = page_size / sizeof(*q);

	clobber();
	for (i = 0; i < pages; i++)
		for (j = 0; j < words; j++)
			if (q[i * words + j] != pattern(i, j, seed))
				return false;
	return true;
}

static void expect_intact(const char *p, int seed)
{
	if (!intact(p, nr_pages, seed))
		fail("the data changed");
}

/*
 * nr_pmds aligned huge-page sized ranges with fd at their start, readable and
 * writable. A rim that is inaccessible and smaller than a huge page keeps
 * other mappings away.
 */
static char *map_file(size_t nr_pmds, int fd)
{
	int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
	size_t len = nr_pmds * pmd_size;
	char *p;

	p = mmap(NULL, len + pmd_size, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		skip("mmap: %s", strerror(errno));
	p += pmd_size - (uintptr_t)p % pmd_size;
	p = mmap(p, len, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
	if (p == MAP_FAILED)
		skip("mmap: %s", strerror(errno));
	return p;
}

static char *map(size_t nr_pmds)
{
	return map_file(nr_pmds, -1);
}

/* One range full of small pages. THP is "never" yet. */
static char *map_filled(void)
{
	char *p = map(1);

	fill(p, nr_pages, 1);
	if (huge_kb(p))
		skip("THP \"never\", and still got a huge page");
	return p;
}

static void protect(char *p, int prot)
{
	if (mprotect(p, pmd_size, prot))
		skip("mprotect: %s", strerror(errno));
}

static int try_collapse(char *p, size_t len)
{
	int i;

	/* A page may be locked, or on its way to the LRU, for a moment. */
	for (i = 0; i < MAX_TRIES; i++) {
		if (!madvise(p, len, MADV_COLLAPSE))
			return 0;
		if (errno != EAGAIN)
			break;
	}
	return errno;
}

static void expect_huge(char *p)
{
	if (huge_kb(p) != pmd_size / 1024)
		fail("%lu kB of huge pages", huge_kb(p));
}

static void expect_small(char *p)
{
	if (huge_kb(p))
		fail("was collapsed");
}

static void collapse_unseen(char *p)
{
	int err = try_collapse(p, pmd_size);

	if (err == ENOMEM)
		skip("no huge page to be had");
	if (err)
		fail("MADV_COLLAPSE: %s", strerror(err));
}

static void collapse(char *p)
{
	collapse_unseen(p);
	expect_huge(p);
}

static void collapse_refused(char *p, int expected)
{
	int err = try_collapse(p, pmd_size);

	if (err != expected)
		fail("MADV_COLLAPSE: %s", err ? strerror(err) : "collapsed");
	expect_small(p);
}

static void start_khugepaged(char *p, size_t len)
{
	set(THP "enabled", "madvise");
	if (madvise(p, len, MADV_HUGEPAGE))
		skip("MADV_HUGEPAGE: %s", strerror(errno));
}

static bool khugepaged_collapses(char *p)
{
	unsigned int start = get_number(KHUGEPAGED "full_scans");

	while (!huge_kb(p)) {
		if (get_number(KHUGEPAGED "full_scans") - start > FULL_SCANS)
			return huge_kb(p);
		usleep(1000);
	}
	return true;
}

static void khugepaged_collapse(char *p)
{
	if (!khugepaged_collapses(p))
		fail("not collapsed in %d full scans", FULL_SCANS);
	expect_huge(p);
}

static void khugepaged_refused(char *p)
{
	if (khugepaged_collapses(p))
		fail("khugepaged collapsed it");
}

static void on_segv(int sig)
{
	siglongjmp(segv_env, 1);
}

static void expect_readonly(char *p)
{
	struct sigaction sa = { .sa_handler = on_segv };

	sigaction(SIGSEGV, &sa, NULL);
	if (!sigsetjmp(segv_env, 1)) {
		store(p + pmd_size / 2, 0);
		fail("a write to read-only memory went through");
	}
	signal(SIGSEGV, SIG_DFL);
}

static void expect_write_without_fault(char *p)
{
	struct rusage before, after;

	getrusage(RUSAGE_SELF, &before);
	fill(p, nr_pages, 2);
	getrusage(RUSAGE_SELF, &after);
	if (after.ru_minflt != before.ru_minflt)
		fail("%ld faults to write to the huge page",
		     after.ru_minflt - before.ru_minflt);
	expect_intact(p, 2);
}

/* A child that does what it is asked to, until its parent ends. */
struct peer {
	pid_t pid;
	int ask, answer;
};

enum {
	PEER_CHECK,		/* are your data what they were at the fork? */
	PEER_WRITE,
	PEER_DROP_HALF,
};

static void peer_main(char *p, int in, int out)
{
	char cmd, ok;

	while (read(in, &cmd, 1) == 1) {
		ok = 1;
		if (cmd == PEER_CHECK)
			ok = intact(p, nr_pages, 1);
		else if (cmd == PEER_WRITE)
			fill(p, nr_pages, 3);
		else
			ok = !madvise(p, pmd_size / 2, MADV_DONTNEED);
		if (write(out, &ok, 1) != 1)
			break;
	}
	_exit(0);
}

static struct peer peer_start(char *p)
{
	int in[2], out[2];
	struct peer peer;

	if (pipe(in) || pipe(out))
		skip("pipe: %s", strerror(errno));
	peer.pid = fork();
	if (peer.pid < 0)
		skip("fork: %s", strerror(errno));
	if (!peer.pid) {
		close(in[1]);
		close(out[0]);
		peer_main(p, in[0], out[1]);
	}
	close(in[0]);
	close(out[1]);
	peer.ask = in[1];
	peer.answer = out[0];
	return peer;
}

static void peer_do(struct peer *peer, char cmd, const char *what)
{
	char ok = 0;

	if (write(peer->ask, &cmd, 1) != 1 ||
	    read(peer->answer, &ok, 1) != 1 || !ok)
		fail("child: %s", what);
}

static void peer_exit(struct peer *peer)
{
	int status;

	close(peer->ask);
	if (waitpid(peer->pid, &status, 0) != peer->pid || status)
		fail("child: status %#x", status);
}

/* Both have the data of seed 1; neither may see what the other writes. */
static void expect_private(char *p, struct peer *peer)
{
	fill(p, nr_pages, 2);
	peer_do(peer, PEER_CHECK, "sees the parent's writes");
	peer_do(peer, PEER_WRITE, "cannot write");
	expect_intact(p, 2);
	peer_exit(peer);
	expect_intact(p, 2);
}

static void collapse_prot_read(void)
{
	char *p = map_filled();

	protect(p, PROT_READ);
	collapse(p);
	expect_intact(p, 1);
	expect_readonly(p);
}

/* int stub(void) { return 42; } */
static const struct {
	const char *machine;
	unsigned char code[8];
} stubs[] = {
	{ "x86_64", { 0xb8, 42, 0, 0, 0, 0xc3 } },
	{ "aarch64", { 0x40, 0x05, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6 } },
	{ "riscv64", { 0x13, 0x05, 0xa0, 0x02, 0x67, 0x80, 0x00, 0x00 } },
};

static void collapse_prot_exec(void)
{
	char *p = map_filled(), *code = p + pmd_size / 2;
	int (*fn)(void) = NULL;
	struct utsname uts;
	size_t i;

	uname(&uts);
	for (i = 0; i < ARRAY_SIZE(stubs); i++) {
		if (strcmp(uts.machine, stubs[i].machine))
			continue;
		memcpy(code, stubs[i].code, sizeof(stubs[i].code));
		__builtin___clear_cache(code, code + sizeof(stubs[i].code));
		fn = (void *)code;
	}
	protect(p, PROT_READ | PROT_EXEC);
	if (fn && fn() != 42)
		skip("the stub does not run");
	collapse(p);
	/* On an architecture that has no stub here, the data must do. */
	if (fn && fn() != 42)
		fail("the stub does something else now");
	if (!intact(p, nr_pages / 2, 1))
		fail("the data changed");
	expect_readonly(p);
}

static void khugepaged_prot_read(void)
{
	char *p = map_filled();

	protect(p, PROT_READ);
	start_khugepaged(p, pmd_size);
	khugepaged_collapse(p);
	expect_intact(p, 1);
	expect_readonly(p);
}

static void khugepaged_child_exited(void)
{
	char *p = map_filled();
	struct peer peer = peer_start(p);

	peer_exit(&peer);
	start_khugepaged(p, pmd_size);
	khugepaged_collapse(p);
	expect_intact(p, 1);
	expect_write_without_fault(p);
}

static void collapse_child_exited(void)
{
	char *p = map_filled();
	struct peer peer = peer_start(p);

	peer_exit(&peer);
	collapse(p);
	expect_intact(p, 1);
	expect_write_without_fault(p);
}

static void khugepaged_child_alive(void)
{
	char *p = map_filled();
	struct peer peer = peer_start(p);

	start_khugepaged(p, pmd_size);
	khugepaged_refused(p);
	expect_private(p, &peer);
}

static void khugepaged_half_shared(void)
{
	char *p = map_filled();
	struct peer peer = peer_start(p);

	set_number(KHUGEPAGED "max_ptes_shared", nr_pages / 2);
	peer_do(&peer, PEER_DROP_HALF, "MADV_DONTNEED");
	start_khugepaged(p, pmd_size);
	khugepaged_collapse(p);
	expect_intact(p, 1);
	expect_write_without_fault(p);
	peer_exit(&peer);
}

static void collapse_child_alive(void)
{
	char *p = map_filled();
	struct peer peer = peer_start(p);

	collapse(p);
	expect_intact(p, 1);
	expect_private(p, &peer);
}

static void collapse_swapped(void)
{
	char *p = map_filled();
	size_t i, swapped = 0;
	int try;

	for (try = 0; try < MAX_TRIES && swapped < nr_pages; try++) {
		if (madvise(p, pmd_size, MADV_PAGEOUT))
			skip("MADV_PAGEOUT: %s", strerror(errno));
		for (i = swapped = 0; i < nr_pages; i++)
			swapped += pagemap_bit(p + i * page_size, PM_SWAP);
	}
	if (swapped < nr_pages)
		skip("only %zu of %zu pages went to swap", swapped, nr_pages);
	collapse(p);
	expect_intact(p, 1);
	expect_write_without_fault(p);
}

static char *map_inaccessible(void)
{
	char *p = map(1);

	fill(p, NR_SPARSE, 1);
	protect(p, PROT_NONE);
	return p;
}

/* Counters of RSS lag behind a little: half a huge page is no noise. */
static void expect_not_inflated(unsigned long before)
{
	unsigned long after = rss_anon_kb();

	if (after > before + pmd_size / 2 / 1024)
		fail("RssAnon grew from %lu to %lu kB", before, after);
}

static void khugepaged_prot_none(void)
{
	char *p = map_inaccessible();
	unsigned long rss = rss_anon_kb();

	start_khugepaged(p, pmd_size);
	khugepaged_refused(p);
	expect_not_inflated(rss);
	if (madvise(p, pmd_size, MADV_NOHUGEPAGE))
		skip("MADV_NOHUGEPAGE: %s", strerror(errno));
	protect(p, PROT_READ);
	expect_small(p);
}

static void khugepaged_prot_none_read(void)
{
	char *p = map_inaccessible();
	unsigned long rss = rss_anon_kb();

	start_khugepaged(p, pmd_size);
	khugepaged_refused(p);
	expect_not_inflated(rss);
	/* Without a fault that could tell khugepaged of it. */
	protect(p, PROT_READ);
	khugepaged_collapse(p);
	if (!intact(p, NR_SPARSE, 1))
		fail("the data changed");
	expect_readonly(p);
}

static void khugepaged_prot_none_shmem(void)
{
	int fd = memfd_create("khugepaged_readonly", MFD_CLOEXEC);
	char *p, *anon = map(1);
	struct stat before, after;

	if (fd < 0 || ftruncate(fd, pmd_size))
		skip("memfd: %s", strerror(errno));
	p = map_file(1, fd);
	fill(p, NR_SPARSE, 1);
	protect(p, PROT_NONE);
	fstat(fd, &before);
	set(THP "shmem_enabled", "advise");
	start_khugepaged(p, pmd_size);
	/* Shared memory does not reliably put us on khugepaged's list. */
	fill(anon, 1, 1);
	start_khugepaged(anon, pmd_size);
	khugepaged_refused(p);
	fstat(fd, &after);
	if (before.st_blocks != after.st_blocks)
		fail("the file grew from %lld to %lld blocks",
		     (long long)before.st_blocks, (long long)after.st_blocks);
}

static void collapse_prot_none(void)
{
	char *p = map_filled();

	protect(p, PROT_NONE);
	collapse_unseen(p);
	protect(p, PROT_READ);
	expect_huge(p);
	expect_intact(p, 1);
	expect_readonly(p);
}

static void collapse_emptied(void)
{
	char *p = map_filled();

	if (madvise(p, pmd_size, MADV_DONTNEED))
		skip("MADV_DONTNEED: %s", strerror(errno));
	collapse_refused(p, EINVAL);
	protect(p, PROT_READ);
	collapse_refused(p, EINVAL);
	if (smaps_kb(p, "Rss:"))
		fail("was filled");
}

static void read_zero_pages(char *p)
{
	size_t i;

	for (i = 0; i < pmd_size; i += page_size)
		if (load(p + i))
			fail("not zero");
}

static void collapse_zero_pages(void)
{
	char *p = map_filled();

	/* A mapping that was never written to is refused for another reason. */
	if (madvise(p, pmd_size, MADV_DONTNEED))
		skip("MADV_DONTNEED: %s", strerror(errno));
	read_zero_pages(p);
	collapse_refused(p, EINVAL);
	protect(p, PROT_READ);
	collapse_refused(p, EINVAL);
	if (smaps_kb(p, "Rss:"))
		fail("was filled");
}

static void collapse_zero_then_filled(void)
{
	char *p = map(2);
	int err;

	read_zero_pages(p);
	fill(p + pmd_size, nr_pages, 1);
	if (mprotect(p, 2 * pmd_size, PROT_READ))
		skip("mprotect: %s", strerror(errno));
	err = try_collapse(p, 2 * pmd_size);
	if (err == ENOMEM)
		skip("no huge page to be had");
	if (err != EINVAL)
		fail("MADV_COLLAPSE: %s", strerror(err));
	/* One mapping, hence the sum of both. */
	expect_huge(p);
	expect_intact(p + pmd_size, 1);
	read_zero_pages(p);
}

static void collapse_mprotect_fork(void)
{
	char *p = map_filled();
	struct peer peer;

	protect(p, PROT_READ);
	collapse(p);
	protect(p, PROT_READ | PROT_WRITE);
	fill(p, nr_pages, 2);
	expect_intact(p, 2);
	fill(p, nr_pages, 1);
	peer = peer_start(p);
	expect_private(p, &peer);
}

static void collapse_forced_write(void)
{
	char *p = map_filled(), *target = p + pmd_size / 2;
	struct peer peer;
	char old, new;
	int fd;

	fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		skip("/proc/self/mem: %s", strerror(errno));
	protect(p, PROT_READ);
	collapse(p);
	old = load(target);
	new = ~old;
	if (pwrite(fd, &new, 1, (uintptr_t)target) != 1)
		skip("cannot write to /proc/self/mem: %s", strerror(errno));
	if (load(target) != new)
		fail("the write is lost");
	if (pwrite(fd, &old, 1, (uintptr_t)target) != 1)
		fail("second write: %s", strerror(errno));
	expect_intact(p, 1);
	peer = peer_start(p);
	if (pwrite(fd, &new, 1, (uintptr_t)target) != 1)
		fail("write after fork: %s", strerror(errno));
	if (load(target) != new)
		fail("the write after fork is lost");
	peer_do(&peer, PEER_CHECK, "sees the parent's write");
	peer_exit(&peer);
	expect_readonly(p);
}

static void collapse_soft_dirty(void)
{
	char *p = map_filled(), *page = p + pmd_size / 2;

	if (write_file("/proc/self/clear_refs", "4"))
		skip("clear_refs: %s", strerror(errno));
	if (pagemap_bit(page, PM_SOFT_DIRTY))
		skip("no soft-dirty tracking");
	fill(p, nr_pages, 1);
	if (!pagemap_bit(page, PM_SOFT_DIRTY))
		skip("no soft-dirty tracking");
	protect(p, PROT_READ);
	collapse(p);
	if (!pagemap_bit(page, PM_SOFT_DIRTY))
		fail("soft-dirty is lost");
	expect_intact(p, 1);
	expect_readonly(p);
}

static int uffd_open(char *p, size_t len)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP,
	};
	struct uffdio_register reg = {
		.range = { (uintptr_t)p, len },
		.mode = UFFDIO_REGISTER_MODE_WP,
	};
	int fd;

	fd = syscall(__NR_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (fd < 0)
		skip("userfaultfd: %s", strerror(errno));
	if (ioctl(fd, UFFDIO_API, &api))
		skip("no uffd-wp: %s", strerror(errno));
	if (ioctl(fd, UFFDIO_REGISTER, &reg))
		skip("no uffd-wp here: %s", strerror(errno));
	return fd;
}

static void uffd_wp(int fd, char *p, bool wp)
{
	struct uffdio_writeprotect arg = {
		.range = { (uintptr_t)p, page_size },
		.mode = wp ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
	};

	if (ioctl(fd, UFFDIO_WRITEPROTECT, &arg))
		skip("UFFDIO_WRITEPROTECT: %s", strerror(errno));
}

static char *map_uffd_wp(int *fd)
{
	char *p = map_filled();

	*fd = uffd_open(p, pmd_size);
	uffd_wp(*fd, p + pmd_size / 2, true);
	protect(p, PROT_READ);
	return p;
}

static void collapse_uffd_wp(void)
{
	char *p;
	int fd;

	p = map_uffd_wp(&fd);
	collapse_refused(p, EINVAL);
	expect_intact(p, 1);
}

static void collapse_uffd_wp_lifted(void)
{
	char *p;
	int fd;

	p = map_uffd_wp(&fd);
	uffd_wp(fd, p + pmd_size / 2, false);
	collapse(p);
	expect_intact(p, 1);
	expect_readonly(p);
}

static void pin_by_pipe(char *p, int fds[2])
{
	struct iovec iov = { p, page_size };

	if (pipe(fds))
		skip("pipe: %s", strerror(errno));
	if (vmsplice(fds[1], &iov, 1, 0) != (ssize_t)page_size)
		skip("vmsplice: %s", strerror(errno));
}

static void collapse_vmsplice(void)
{
	char *p = map_filled();
	int fds[2];

	protect(p, PROT_READ);
	pin_by_pipe(p + pmd_size / 2, fds);
	collapse_refused(p, EAGAIN);
	expect_intact(p, 1);
}

static void collapse_vmsplice_drained(void)
{
	char *p = map_filled();
	int fds[2];

	protect(p, PROT_READ);
	pin_by_pipe(p + pmd_size / 2, fds);
	close(fds[0]);
	close(fds[1]);
	collapse(p);
	expect_intact(p, 1);
}

static void collapse_io_uring(void)
{
	/* A register of 120 bytes, of which no field matters here. */
	uint64_t params[15] = { 0 };
	char *p = map_filled();
	struct iovec iov = { p + pmd_size / 2, page_size };
	int fd;

	fd = syscall(__NR_io_uring_setup, 1, params);
	if (fd < 0)
		skip("io_uring_setup: %s", strerror(errno));
	/* IORING_REGISTER_BUFFERS: a long-term pin for writing. */
	if (syscall(__NR_io_uring_register, fd, 0, &iov, 1))
		skip("io_uring_register: %s", strerror(errno));
	protect(p, PROT_READ);
	collapse_refused(p, EAGAIN);
	expect_intact(p, 1);
}

static size_t nr_ksm_pages(char *p)
{
	int fd = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);
	uint64_t pfn, flags;
	size_t i, nr = 0;

	if (fd < 0)
		skip("/proc/kpageflags: %s", strerror(errno));
	for (i = 0; i < nr_pages; i++) {
		pfn = pagemap_entry(p + i * page_size) &
		      ((1ULL << PM_PFN_BITS) - 1);
		if (pread(fd, &flags, sizeof(flags), pfn * sizeof(flags)) !=
		    sizeof(flags))
			skip("/proc/kpageflags: %s", strerror(errno));
		nr += flags >> KPF_KSM & 1;
	}
	close(fd);
	return nr;
}

/* Two full ranges, of which ksmd has merged the first pages, and only those. */
static void map_merged(char **p, char **q, size_t nr)
{
	unsigned int start;
	size_t merged;

	*p = map_filled();
	*q = map_filled();
	fill(*q + nr * page_size, nr_pages - nr, 2);
	if (madvise(*p, pmd_size, MADV_MERGEABLE) ||
	    madvise(*q, pmd_size, MADV_MERGEABLE))
		skip("MADV_MERGEABLE: %s", strerror(errno));
	start = get_number(KSM "full_scans");
	set(KSM "run", "1");
	do {
		usleep(1000);
		merged = nr_ksm_pages(*p);
	} while (merged < nr &&
		 get_number(KSM "full_scans") - start <= KSM_FULL_SCANS);
	set(KSM "run", "0");
	if (nr_ksm_pages(*p) != nr)
		skip("%zu of %zu pages merged", nr_ksm_pages(*p), nr);
}

static void khugepaged_ksm(void)
{
	char *p, *q;

	map_merged(&p, &q, NR_MERGED);
	start_khugepaged(p, pmd_size);
	khugepaged_refused(p);
	if (nr_ksm_pages(p) != NR_MERGED)
		fail("%zu of %d pages are still merged", nr_ksm_pages(p),
		     NR_MERGED);
	expect_intact(p, 1);
}

static void collapse_ksm(void)
{
	char *p, *q;

	map_merged(&p, &q, nr_pages);
	collapse(p);
	expect_intact(p, 1);
	expect_write_without_fault(p);
	expect_intact(q, 1);
}

static const struct {
	const char *name;
	void (*fn)(void);
} cases[] = {
	{ "PROT_READ: MADV_COLLAPSE", collapse_prot_read },
	{ "PROT_READ|PROT_EXEC: MADV_COLLAPSE", collapse_prot_exec },
	{ "PROT_READ: khugepaged", khugepaged_prot_read },
	{ "child exited: khugepaged", khugepaged_child_exited },
	{ "child exited: MADV_COLLAPSE", collapse_child_exited },
	{ "control: child alive, all pages shared: khugepaged refuses",
	  khugepaged_child_alive },
	{ "child alive, max_ptes_shared pages shared: khugepaged",
	  khugepaged_half_shared },
	{ "child alive: MADV_COLLAPSE keeps the data apart",
	  collapse_child_alive },
	{ "all pages swapped out: MADV_COLLAPSE", collapse_swapped },
	{ "control: PROT_NONE: khugepaged refuses", khugepaged_prot_none },
	{ "PROT_NONE made PROT_READ: khugepaged", khugepaged_prot_none_read },
	{ "PROT_NONE shared memory: khugepaged refuses",
	  khugepaged_prot_none_shmem },
	{ "PROT_NONE: MADV_COLLAPSE", collapse_prot_none },
	{ "control: emptied page table: MADV_COLLAPSE refuses",
	  collapse_emptied },
	{ "control: only zero pages: MADV_COLLAPSE refuses",
	  collapse_zero_pages },
	{ "only zero pages, then PROT_READ data: MADV_COLLAPSE goes on",
	  collapse_zero_then_filled },
	{ "collapsed, then mprotect, write, fork, write: copy on write",
	  collapse_mprotect_fork },
	{ "collapsed, then /proc/self/mem, fork: copy on write",
	  collapse_forced_write },
	{ "collapsed: soft-dirty is kept", collapse_soft_dirty },
	{ "control: uffd-wp page: MADV_COLLAPSE refuses", collapse_uffd_wp },
	{ "uffd-wp lifted: MADV_COLLAPSE", collapse_uffd_wp_lifted },
	{ "control: page in a pipe: MADV_COLLAPSE refuses", collapse_vmsplice },
	{ "page no longer in a pipe: MADV_COLLAPSE",
	  collapse_vmsplice_drained },
	{ "control: page pinned by io_uring: MADV_COLLAPSE refuses",
	  collapse_io_uring },
	{ "some pages merged by KSM: khugepaged refuses", khugepaged_ksm },
	{ "all pages merged by KSM: MADV_COLLAPSE", collapse_ksm },
};

static void reset_settings(void)
{
	char buf[32];
	size_t i;

	for (i = 0; i < ARRAY_SIZE(settings); i++)
		if (settings[i].value)
			write_file(settings[i].path, settings[i].value);
	snprintf(buf, sizeof(buf), "%zu", nr_pages - 1);
	write_file(KHUGEPAGED "max_ptes_none", buf);
	snprintf(buf, sizeof(buf), "%zu", nr_pages / 8);
	write_file(KHUGEPAGED "max_ptes_swap", buf);
	snprintf(buf, sizeof(buf), "%zu", nr_pages / 2);
	write_file(KHUGEPAGED "max_ptes_shared", buf);
}

/* Returns a KSFT_ code and, unless that is KSFT_PASS, the reason. */
static int run_case(void (*fn)(void), char *reason, size_t size)
{
	struct pollfd pfd = { .events = POLLIN };
	ssize_t len = 0;
	bool timed_out;
	int fds[2], status;
	siginfo_t info;
	size_t i;

	reset_settings();
	if (pipe2(fds, O_CLOEXEC))
		ksft_exit_fail_msg("pipe: %s\n", strerror(errno));
	fflush(stdout);
	case_pid = fork();
	if (case_pid < 0)
		ksft_exit_fail_msg("fork: %s\n", strerror(errno));
	if (!case_pid) {
		for (i = 0; i < ARRAY_SIZE(signals); i++)
			signal(signals[i], SIG_DFL);
		setpgid(0, 0);
		report_fd = fds[1];
		fn();
		_exit(KSFT_PASS);
	}
	/* The child does so too: whoever is first. */
	setpgid(case_pid, case_pid);
	close(fds[1]);

	/* Ends with a reason, or when the last of the case's processes does. */
	pfd.fd = fds[0];
	timed_out = poll(&pfd, 1, CASE_TIMEOUT_MS) <= 0;
	if (timed_out)
		kill(-case_pid, SIGKILL);
	else
		len = read(fds[0], reason, size - 1);
	reason[len > 0 ? len : 0] = '\0';
	close(fds[0]);

	/* Its number stays taken until it is reaped. */
	waitid(P_PID, case_pid, &info, WEXITED | WNOWAIT);
	kill(-case_pid, SIGKILL);
	waitpid(case_pid, &status, 0);
	case_pid = 0;
	if (timed_out) {
		snprintf(reason, size, "no end after %d s",
			 CASE_TIMEOUT_MS / 1000);
		return KSFT_FAIL;
	}
	if (!WIFEXITED(status)) {
		snprintf(reason, size, "killed by signal %d",
			 WTERMSIG(status));
		return KSFT_FAIL;
	}
	return WEXITSTATUS(status);
}

static bool have_collapse(void)
{
	/* Not a range at all: EINVAL only where the advice is unknown. */
	return !madvise(NULL, 0, MADV_COLLAPSE);
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_signal };
	char reason[256];
	size_t i;

	ksft_print_header();
	if (geteuid())
		ksft_exit_skip("needs root\n");
	if (read_file(THP "hpage_pmd_size", reason, sizeof(reason)))
		ksft_exit_skip("no transparent huge pages\n");
	if (!have_collapse())
		ksft_exit_skip("no MADV_COLLAPSE\n");
	pmd_size = strtoul(reason, NULL, 10);
	page_size = sysconf(_SC_PAGESIZE);
	nr_pages = pmd_size / page_size;

	main_pid = getpid();
	save_settings();
	atexit(restore_settings);
	for (i = 0; i < ARRAY_SIZE(signals); i++)
		sigaction(signals[i], &sa, NULL);

	ksft_set_plan(ARRAY_SIZE(cases));
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		int code = run_case(cases[i].fn, reason, sizeof(reason));

		if (reason[0])
			ksft_print_msg("%s\n", reason);
		if (code == KSFT_PASS)
			ksft_test_result_pass("%s\n", cases[i].name);
		else if (code == KSFT_SKIP)
			ksft_test_result_skip("%s\n", cases[i].name);
		else
			ksft_test_result_fail("%s\n", cases[i].name);
	}
	ksft_finished();
}
