// SPDX-License-Identifier: GPL-2.0
/*
 * fork() copies the PTEs that map consecutive pages of a large folio as a run:
 * one reference update for all of them.  The first cases count these updates
 * and fail on a kernel that takes one reference per PTE.
 *
 * The controls hold on any kernel.  They look for what a run can get wrong:
 * a bit of one PTE given to its neighbour, a run past the end of the folio, of
 * the VMA or of the page table, a pinned page shared, a count that is off.
 *
 * Nothing here is timed.  Where the parent and a child must do things in turn
 * the child is a puppet that runs functions on the parent's command.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/types.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../kselftest.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT		21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ	22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE	23
#endif

#ifndef BIT_ULL
#define BIT_ULL(n)		(1ull << (n))
#endif

/* From the kernel's kernel-page-flags.h, which is not there on all lines */
#define PF_THP			BIT_ULL(22)

#define PM_PFN			(BIT_ULL(55) - 1)
#define PM_SOFT_DIRTY		BIT_ULL(55)
#define PM_UFFD_WP		BIT_ULL(57)
#define PM_SWAP			BIT_ULL(62)
#define PM_PRESENT		BIT_ULL(63)

#define CASE_TIMEOUT_S		120
#define REPLY_TIMEOUT_MS	60000

/* A run may be cut for latency, but not to less than this */
#define RUN_MIN			32

static size_t page_size, pmd_size;
static unsigned int nr;		/* pages per huge page */
static int kmsg = -1;

/* ---- Reporting ---- */

static void note(const char *fmt, ...)
{
	char line[512];
	va_list args;

	va_start(args, fmt);
	vsnprintf(line, sizeof(line), fmt, args);
	va_end(args);
	ksft_print_msg("%s\n", line);
	fflush(stdout);
}

/* "return fail(...)" and "return skip(...)" say why */
#define fail(fmt, ...)	\
	(note("line %d: " fmt, __LINE__, ##__VA_ARGS__), KSFT_FAIL)
#define skip(fmt, ...)	\
	(note("skip: " fmt, ##__VA_ARGS__), KSFT_SKIP)

/* What the test needs to go on; not the kernel's fault under test */
static void die(const char *what)
{
	note("%s: %s", what, strerror(errno));
	_exit(KSFT_FAIL);
}

/* ---- Files ---- */

static int write_file(const char *name, const char *text)
{
	int fd = open(name, O_WRONLY | O_CLOEXEC | O_TRUNC);
	ssize_t len = strlen(text), ret;

	if (fd < 0)
		return -1;
	ret = write(fd, text, len);
	close(fd);
	return ret == len ? 0 : -1;
}

static ssize_t read_file(const char *name, char *buf, size_t size)
{
	int fd = open(name, O_RDONLY | O_CLOEXEC);
	ssize_t ret, len = 0;

	if (fd < 0)
		return -1;
	while (len < (ssize_t)size - 1) {
		ret = read(fd, buf + len, size - 1 - len);
		if (ret <= 0)
			break;
		len += ret;
	}
	close(fd);
	buf[len] = 0;
	return len;
}

static __u64 read_entry(const char *name, __u64 index)
{
	__u64 entry;
	int fd = open(name, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		die(name);
	if (pread(fd, &entry, sizeof(entry), index * sizeof(entry)) !=
	    sizeof(entry))
		die(name);
	close(fd);
	return entry;
}

static __u64 pm_entry(pid_t pid, const char *addr)
{
	char name[64];

	snprintf(name, sizeof(name), "/proc/%d/pagemap", pid);
	return read_entry(name, (uintptr_t)addr / page_size);
}

/* The entries of @count pages at once: a file per page is slow */
static void pm_entries(pid_t pid, const char *addr, __u64 *entries,
		       unsigned int count)
{
	ssize_t len = count * sizeof(*entries);
	char name[64];
	int fd;

	snprintf(name, sizeof(name), "/proc/%d/pagemap", pid);
	fd = open(name, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		die(name);
	if (pread(fd, entries, len, (uintptr_t)addr / page_size *
		  sizeof(*entries)) != len)
		die(name);
	close(fd);
}

static __u64 pfn_of(pid_t pid, const char *addr)
{
	__u64 entry = pm_entry(pid, addr);

	return entry & PM_PRESENT ? entry & PM_PFN : 0;
}

static unsigned int mapcount(__u64 pfn)
{
	return read_entry("/proc/kpagecount", pfn);
}

static bool is_thp(const char *addr)
{
	__u64 pfn = pfn_of(getpid(), addr);

	return pfn && (read_entry("/proc/kpageflags", pfn) & PF_THP);
}

/*
 * Sum of @field, in kB, over the VMAs of @pid that lie in the range and have
 * the permissions @perms ("rw-p"); NULL means any.
 */
static long smaps_sum(pid_t pid, const char *start, const char *end,
		      const char *perms, const char *field)
{
	unsigned long from, to, kb;
	char name[64], line[512], mode[8];
	size_t len = strlen(field);
	bool in = false;
	long sum = 0;
	FILE *f;

	snprintf(name, sizeof(name), "/proc/%d/smaps", pid);
	f = fopen(name, "re");
	if (!f)
		die(name);
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) == 3)
			in = from >= (unsigned long)start &&
			     to <= (unsigned long)end &&
			     (!perms || !strcmp(mode, perms));
		else if (in && !strncmp(line, field, len) && line[len] == ':' &&
			 sscanf(line + len + 1, "%lu", &kb) == 1)
			sum += kb;
	}
	fclose(f);
	return sum;
}

static long status_kb(pid_t pid, const char *field)
{
	char name[64], buf[8192], *p;

	snprintf(name, sizeof(name), "/proc/%d/status", pid);
	if (read_file(name, buf, sizeof(buf)) < 0)
		die(name);
	p = strstr(buf, field);
	return p ? atol(p + strlen(field) + 1) : -1;
}

/* ---- Settings and their restoration, by the main process alone ---- */

#define THP_DIR	"/sys/kernel/mm/transparent_hugepage/"

static struct setting {
	const char *name, *value;
	char old[64];
	bool changed;
} settings[] = {
	{ THP_DIR "enabled", "madvise" },
	{ THP_DIR "shmem_enabled", "advise" },
	{ THP_DIR "khugepaged/defrag", "0" },
};

static pid_t main_pid, case_pid;
static char instance[128], cgroup[128];

static void set_settings(void)
{
	char buf[256], *from, *to;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(settings); i++) {
		if (read_file(settings[i].name, buf, sizeof(buf)) <= 0)
			continue;
		from = strchr(buf, '[');
		to = from ? strchr(from, ']') : NULL;
		if (to) {
			*to = 0;
			from++;
		} else {
			from = buf;
		}
		snprintf(settings[i].old, sizeof(settings[i].old), "%.60s",
			 from);
		if (!write_file(settings[i].name, settings[i].value))
			settings[i].changed = true;
	}
}

static void restore_settings(void)
{
	unsigned int i;

	if (getpid() != main_pid)
		return;
	for (i = 0; i < ARRAY_SIZE(settings); i++)
		if (settings[i].changed)
			write_file(settings[i].name, settings[i].old);
	if (instance[0])
		rmdir(instance);
	if (cgroup[0])
		rmdir(cgroup);
}

static void on_signal(int sig)
{
	if (getpid() == main_pid) {
		if (case_pid > 0)
			kill(-case_pid, SIGKILL);
		restore_settings();
	}
	signal(sig, SIG_DFL);
	raise(sig);
}

/* ---- The puppet ---- */

struct puppet {
	pid_t pid;
	int order, reply;
};

struct order {
	int (*fn)(void *arg);
	void *arg;
};

static void puppet_serve(int order, int reply)
{
	struct order o;
	int ret;

	while (read(order, &o, sizeof(o)) == sizeof(o)) {
		ret = o.fn(o.arg);
		if (write(reply, &ret, sizeof(ret)) != sizeof(ret))
			break;
	}
	_exit(0);
}

/* Returns the errno of fork() */
static int puppet_fork(struct puppet *p)
{
	int order[2], reply[2], err;

	if (pipe2(order, O_CLOEXEC) || pipe2(reply, O_CLOEXEC))
		die("pipe2");
	fflush(stdout);
	p->pid = fork();
	err = errno;
	if (!p->pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(order[1]);
		close(reply[0]);
		puppet_serve(order[0], reply[1]);
	}
	close(order[0]);
	close(reply[1]);
	p->order = order[1];
	p->reply = reply[0];
	if (p->pid > 0)
		return 0;
	close(p->order);
	close(p->reply);
	return err;
}

static void puppet_start(struct puppet *p)
{
	errno = puppet_fork(p);
	if (errno)
		die("fork");
}

static int puppet_call(struct puppet *p, int (*fn)(void *arg), void *arg)
{
	struct order o = { .fn = fn, .arg = arg };
	struct pollfd pfd = { .fd = p->reply, .events = POLLIN };
	int ret;

	if (write(p->order, &o, sizeof(o)) != sizeof(o))
		die("order to the child");
	if (poll(&pfd, 1, REPLY_TIMEOUT_MS) != 1)
		die("no reply of the child in time");
	if (read(p->reply, &ret, sizeof(ret)) != sizeof(ret))
		die("the child is gone");
	return ret;
}

static void puppet_end(struct puppet *p)
{
	close(p->order);
	close(p->reply);
	kill(p->pid, SIGKILL);
	waitpid(p->pid, NULL, 0);
}

/* ---- Memory ---- */

static char *map_aligned(size_t size, int flags, int fd)
{
	size_t room = size + 2 * pmd_size;
	char *area, *mem;

	/* What surrounds it stays PROT_NONE, so that no VMA merges with it */
	area = mmap(NULL, room, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (area == MAP_FAILED)
		die("mmap");
	mem = (char *)(((uintptr_t)area + pmd_size) & ~(pmd_size - 1));
	mem = mmap(mem, size, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
	if (mem == MAP_FAILED)
		die("mmap");
	return mem;
}

static void advise(char *addr, size_t len, int advice)
{
	if (madvise(addr, len, advice))
		die("madvise");
}

static void protect(char *addr, size_t len, int prot)
{
	if (mprotect(addr, len, prot))
		die("mprotect");
}

static char *page_at(char *mem, unsigned int i)
{
	return mem + i * page_size;
}

/* Each access is meant, none may be merged or left out */
static __u32 peek(char *mem, unsigned int i, unsigned int word)
{
	return __atomic_load_n((__u32 *)page_at(mem, i) + word,
			       __ATOMIC_RELAXED);
}

static void poke(char *mem, unsigned int i, unsigned int word, __u32 value)
{
	__atomic_store_n((__u32 *)page_at(mem, i) + word, value,
			 __ATOMIC_RELAXED);
}

static unsigned int last_word(void)
{
	return page_size / sizeof(__u32) - 1;
}

/* A number that no other page has, at both ends of the page */
static void stamp(char *mem, unsigned int i, __u32 salt)
{
	poke(mem, i, 0, salt + i);
	poke(mem, i, last_word(), ~(salt + i));
}

static bool stamped(char *mem, unsigned int i, __u32 salt)
{
	return peek(mem, i, 0) == salt + i &&
	       peek(mem, i, last_word()) == ~(salt + i);
}

#define SALT		0x10000000u
#define SALT_CHILD	0x20000000u
#define SALT_PARENT	0x30000000u

/* @n huge pages, each page stamped; NULL if there are none to be had */
static char *thp_alloc(unsigned int n)
{
	char *mem = map_aligned(n * pmd_size, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned int i;

	advise(mem, n * pmd_size, MADV_HUGEPAGE);
	for (i = 0; i < n * nr; i++)
		stamp(mem, i, SALT);
	for (i = 0; i < n; i++)
		if (!is_thp(mem + i * pmd_size))
			return NULL;
	return mem;
}

/* Replace the huge page's PMD by PTEs; no PTE differs from another one. */
static bool pte_map(char *mem, unsigned int n)
{
	unsigned int i;

	/*
	 * A VMA boundary inside of the huge page splits its PMD.  Changing
	 * the advice leaves the PTEs alone, a change of protection would not.
	 */
	for (i = 0; i < n; i++) {
		advise(mem + i * pmd_size + page_size, page_size, MADV_DONTDUMP);
		advise(mem + i * pmd_size + page_size, page_size, MADV_DODUMP);
	}
	return !smaps_sum(getpid(), mem, mem + n * pmd_size, NULL,
			  "AnonHugePages") && is_thp(mem);
}

static char *thp_by_ptes(unsigned int n)
{
	char *mem = thp_alloc(n);

	return mem && pte_map(mem, n) ? mem : NULL;
}

static int skip_thp(void)
{
	return skip("no huge page, or none mapped by PTEs");
}

/*
 * The kernel splits a folio only if its references are its mappings plus the
 * known ones: an exact check for a reference too many or too few.
 */
static bool split_debugfs(char *mem, size_t size)
{
	char buf[128];

	snprintf(buf, sizeof(buf), "%d,0x%lx,0x%lx", getpid(),
		 (unsigned long)mem, (unsigned long)mem + size);
	return !write_file("/sys/kernel/debug/split_huge_pages", buf);
}

static int check_split(char *mem, unsigned int n)
{
	unsigned int i, try;
	bool left = true;

	/* Another holder of a reference, khugepaged's scan say, is short */
	for (try = 0; left && try < 20; try++) {
		if (!split_debugfs(mem, n * pmd_size))
			return KSFT_PASS;	/* no debugfs */
		left = false;
		for (i = 0; i < n * nr; i += 64)
			left |= is_thp(page_at(mem, i));
		if (left)
			usleep(10000);
	}
	if (left)
		return fail("a huge page cannot be split: its references are wrong");
	return KSFT_PASS;
}

static int check_mapcounts(pid_t pid, char *mem, unsigned int from,
			   unsigned int to, unsigned int want)
{
	unsigned int i, count;
	__u64 pfn;

	for (i = from; i < to; i++) {
		pfn = pfn_of(pid, page_at(mem, i));
		count = pfn ? mapcount(pfn) : 0;
		if (count != want)
			return fail("page %u is mapped %u times instead of %u", i,
			     count, want);
	}
	return KSFT_PASS;
}

static int check_stamps(char *mem, unsigned int n, __u32 salt)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		if (!stamped(mem, i, salt))
			return fail("page %u holds %#x", i, peek(mem, i, 0));
	return KSFT_PASS;
}

static sigjmp_buf fault_env;

static void on_fault(int sig)
{
	siglongjmp(fault_env, sig);
}

/* Does a read, or a write, of @addr raise SIGSEGV? */
static bool faults(char *addr, bool write)
{
	struct sigaction sa = { .sa_handler = on_fault }, old;
	int sig;

	sigaction(SIGSEGV, &sa, &old);
	sig = sigsetjmp(fault_env, 1);
	if (!sig && write)
		__atomic_fetch_or(addr, 0, __ATOMIC_RELAXED);
	else if (!sig)
		__atomic_load_n(addr, __ATOMIC_RELAXED);
	sigaction(SIGSEGV, &old, NULL);
	return sig;
}

static long minor_faults(void)
{
	struct rusage ru;

	getrusage(RUSAGE_SELF, &ru);
	return ru.ru_minflt;
}

/* ---- page_ref events ---- */

static const char *tracefs(void)
{
	if (!access("/sys/kernel/tracing/events", F_OK))
		return "/sys/kernel/tracing";
	if (!access("/sys/kernel/debug/tracing/events", F_OK))
		return "/sys/kernel/debug/tracing";
	return NULL;
}

#define REF_EVENT "events/page_ref/page_ref_mod/"

static int trace_file(const char *file, const char *text)
{
	char name[256];

	snprintf(name, sizeof(name), "%s/%s", instance, file);
	return write_file(name, text);
}

struct refs {
	unsigned int events;	/* updates that add references */
	unsigned int most;	/* the greatest of them */
	unsigned int total;	/* their sum */
};

/*
 * Fork once and count the references which that added to the folio whose head
 * is @pfn.  The child lives on as @p.
 */
static int count_refs(__u64 pfn, struct puppet *p, struct refs *refs)
{
	char name[256], line[1024], filter[128], *at;
	FILE *f;

	memset(refs, 0, sizeof(*refs));
	snprintf(filter, sizeof(filter),
		 "pfn == %llu && val > 0 && common_pid == %d",
		 (unsigned long long)pfn, getpid());
	if (trace_file("buffer_size_kb", "1024") ||
	    trace_file(REF_EVENT "filter", filter) ||
	    trace_file("trace", "") ||	/* opening it to write empties it */
	    trace_file(REF_EVENT "enable", "1"))
		die("page_ref events");
	puppet_start(p);
	trace_file(REF_EVENT "enable", "0");

	snprintf(name, sizeof(name), "%s/trace", instance);
	f = fopen(name, "re");
	if (!f)
		die(name);
	while (fgets(line, sizeof(line), f)) {
		at = strstr(line, "page_ref_mod:");
		at = at ? strstr(at, " val=") : NULL;
		if (!at)
			continue;
		refs->events++;
		refs->total += atoi(at + 5);
		if ((unsigned int)atoi(at + 5) > refs->most)
			refs->most = atoi(at + 5);
	}
	fclose(f);
	note("%u reference updates, sum %u, greatest %u", refs->events,
	     refs->total, refs->most);
	return KSFT_PASS;
}

static bool have_events(void)
{
	char name[256];

	snprintf(name, sizeof(name), "%s/" REF_EVENT "enable", instance);
	return instance[0] && !access(name, W_OK);
}

static int skip_events(void)
{
	return skip("no page_ref events (CONFIG_DEBUG_PAGE_REF)");
}

/* A run is cut at most every RUN_MIN pages, so few updates make the sum */
static int check_few_updates(const struct refs *refs, unsigned int pages)
{
	if (refs->total != pages)
		return fail("%u references taken for %u PTEs", refs->total, pages);
	if (refs->events > pages / RUN_MIN)
		return fail("%u updates for one run of %u PTEs", refs->events, pages);
	return KSFT_PASS;
}

static int proof_exclusive(void)
{
	struct puppet p;
	struct refs refs;
	char *mem;

	if (!have_events())
		return skip_events();
	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (count_refs(pfn_of(getpid(), mem), &p, &refs))
		return KSFT_FAIL;
	if (check_few_updates(&refs, nr))
		return KSFT_FAIL;
	if (check_mapcounts(p.pid, mem, 0, nr, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	return check_split(mem, 1);
}

static int proof_shared(void)
{
	struct puppet first, p;
	struct refs refs;
	char *mem;

	if (!have_events())
		return skip_events();
	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	puppet_start(&first);
	if (count_refs(pfn_of(getpid(), mem), &p, &refs))
		return KSFT_FAIL;
	if (check_few_updates(&refs, nr))
		return KSFT_FAIL;
	if (check_mapcounts(p.pid, mem, 0, nr, 3))
		return KSFT_FAIL;
	puppet_end(&first);
	puppet_end(&p);
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	return check_split(mem, 1);
}

/* A hole ends a run, so the number of updates is the number of runs */
static int proof_one_per_run(void)
{
	unsigned int i, runs = nr / RUN_MIN;
	struct puppet p;
	struct refs refs;
	__u64 pfn;
	char *mem;

	if (!have_events())
		return skip_events();
	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	pfn = pfn_of(getpid(), mem);
	for (i = RUN_MIN - 1; i < nr; i += RUN_MIN)
		advise(page_at(mem, i), page_size, MADV_DONTNEED);
	if (count_refs(pfn, &p, &refs))
		return KSFT_FAIL;
	if (refs.total != nr - runs)
		return fail("%u references for %u PTEs", refs.total, nr - runs);
	if (refs.events != runs)
		return fail("%u updates for %u runs", refs.events, runs);
	puppet_end(&p);
	return KSFT_PASS;
}

static int control_striped(void)
{
	struct puppet p;
	struct refs refs;
	unsigned int i;
	__u64 pfn;
	char *mem;

	if (!have_events())
		return skip_events();
	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	pfn = pfn_of(getpid(), mem);
	for (i = 1; i < nr; i += 2)
		advise(page_at(mem, i), page_size, MADV_DONTNEED);
	for (i = 1; i < nr; i += 2)
		stamp(mem, i, SALT);
	if (count_refs(pfn, &p, &refs))
		return KSFT_FAIL;
	if (refs.events != nr / 2 || refs.total != nr / 2)
		return fail("%u updates, sum %u, for %u runs of one page", refs.events,
		     refs.total, nr / 2);
	puppet_end(&p);
	return KSFT_PASS;
}

/* ---- A private mapping of a huge page of the page cache ---- */

static char *shmem_by_ptes(void)
{
	int fd = memfd_create("fork_pte_batch", MFD_CLOEXEC);
	unsigned int i;
	char *mem;

	if (fd < 0 || ftruncate(fd, pmd_size))
		die("memfd");
	mem = map_aligned(pmd_size, MAP_SHARED, fd);
	advise(mem, pmd_size, MADV_HUGEPAGE);
	for (i = 0; i < nr; i++)
		stamp(mem, i, SALT);
	if (!is_thp(mem))
		return NULL;
	if (mmap(mem, pmd_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
		 fd, 0) != mem)
		die("mmap");
	close(fd);
	/*
	 * Only a VMA with an anon_vma is copied: write the last page.  That
	 * also rules out a PMD; the other pages come by read faults.
	 */
	stamp(mem, nr - 1, SALT);
	advise(mem, pmd_size, MADV_POPULATE_READ);
	return is_thp(mem) ? mem : NULL;
}

static int proof_file(void)
{
	struct puppet p;
	struct refs refs;
	char *mem;

	if (!have_events())
		return skip_events();
	mem = shmem_by_ptes();
	if (!mem)
		return skip("no huge page in shmem");
	if (count_refs(pfn_of(getpid(), mem), &p, &refs))
		return KSFT_FAIL;
	if (refs.total != nr - 1)
		return fail("%u references for %u PTEs", refs.total, nr - 1);
	if (refs.events > nr / RUN_MIN)
		return fail("%u updates for one run of %u PTEs", refs.events, nr - 1);
	if (check_mapcounts(p.pid, mem, 0, nr - 1, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), mem, 0, nr - 1, 1))
		return KSFT_FAIL;
	return KSFT_PASS;
}

/* ---- Contents: parent and child write, each sees its own ---- */

static int child_write_even(void *arg)
{
	unsigned int i;
	char *mem = arg;

	for (i = 0; i < nr; i += 2)
		stamp(mem, i, SALT_CHILD);
	return 0;
}

static int child_check(void *arg)
{
	unsigned int i;
	char *mem = arg;

	for (i = 0; i < nr; i++)
		if (!stamped(mem, i, i % 2 ? SALT : SALT_CHILD))
			return fail("child's page %u holds %#x", i, peek(mem, i, 0));
	return KSFT_PASS;
}

static int grandchild_write(void *arg)
{
	unsigned int i;
	char *mem = arg;

	for (i = 0; i < nr; i += 3)
		stamp(mem, i, SALT_PARENT);
	return 0;
}

static int grandchild_check(void *arg)
{
	unsigned int i;
	char *mem = arg;

	for (i = 0; i < nr; i++)
		if (!stamped(mem, i, i % 3 ? i % 2 ? SALT : SALT_CHILD :
			     SALT_PARENT))
			return fail("grandchild's page %u holds %#x", i,
			     peek(mem, i, 0));
	return KSFT_PASS;
}

static int child_with_grandchild(void *arg)
{
	struct puppet p;

	puppet_start(&p);
	puppet_call(&p, grandchild_write, arg);
	if (puppet_call(&p, grandchild_check, arg))
		return KSFT_FAIL;
	if (child_check(arg))
		return KSFT_FAIL;
	puppet_end(&p);
	return KSFT_PASS;
}

static int both_write(char *mem)
{
	struct puppet p;
	unsigned int i;

	puppet_start(&p);
	for (i = 1; i < nr; i += 2)
		stamp(mem, i, SALT_PARENT);
	puppet_call(&p, child_write_even, mem);
	if (puppet_call(&p, child_check, mem))
		return KSFT_FAIL;
	if (puppet_call(&p, child_with_grandchild, mem))
		return KSFT_FAIL;
	for (i = 0; i < nr; i++)
		if (!stamped(mem, i, i % 2 ? SALT_PARENT : SALT))
			return fail("parent's page %u holds %#x", i, peek(mem, i, 0));
	puppet_end(&p);
	return KSFT_PASS;
}

static int control_contents(void)
{
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	return both_write(mem);
}

/* The parent writes every page: no write permission may be left behind */
static int child_all_old(void *arg)
{
	return check_stamps(arg, nr, SALT);
}

static int control_parent_writes(void)
{
	struct puppet p;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	puppet_start(&p);
	for (i = 0; i < nr; i++)
		stamp(mem, i, SALT_PARENT);
	if (puppet_call(&p, child_all_old, mem))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_stamps(mem, nr, SALT_PARENT);
}

static int child_write_all(void *arg)
{
	unsigned int i;

	for (i = 0; i < nr; i++)
		stamp(arg, i, SALT_CHILD);
	return 0;
}

static int control_child_writes(void)
{
	struct puppet p;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	puppet_start(&p);
	puppet_call(&p, child_write_all, mem);
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_split(mem, 1);
}

static int control_file_contents(void)
{
	char *mem = shmem_by_ptes();

	if (!mem)
		return skip("no huge page in shmem");
	return both_write(mem);
}

/* ---- The bits of a PTE ---- */

static bool odd_one(unsigned int i)
{
	/* no period that divides a run, first and last of a run both ways */
	return i % 5 == 1 || i % 64 == 63 || i % 128 == 64;
}

static int reset_refs(const char *what)
{
	return write_file("/proc/self/clear_refs", what);
}

static int check_soft_dirty(pid_t pid, char *mem)
{
	__u64 *pm = malloc(nr * sizeof(*pm));
	unsigned int i;

	pm_entries(pid, mem, pm, nr);
	for (i = 0; i < nr; i++)
		if (!!(pm[i] & PM_SOFT_DIRTY) != odd_one(i))
			return fail("page %u: soft-dirty is %d in %s", i,
			     !odd_one(i), pid == getpid() ? "parent" : "child");
	free(pm);
	return KSFT_PASS;
}

static int control_soft_dirty(void)
{
	struct puppet p;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (reset_refs("4") || pm_entry(getpid(), mem) & PM_SOFT_DIRTY)
		return skip("no soft-dirty bit");
	for (i = 0; i < nr; i++)
		if (odd_one(i))
			stamp(mem, i, SALT);
	if (check_soft_dirty(getpid(), mem))
		return KSFT_FAIL;
	puppet_start(&p);
	if (check_soft_dirty(p.pid, mem))
		return KSFT_FAIL;
	if (check_soft_dirty(getpid(), mem))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_split(mem, 1);
}

/*
 * Only some PTEs are writable, the first one is not: a run that asks its first
 * PTE leaves the others writable in the parent.
 */
static int control_mixed_writable(void)
{
	struct puppet p;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (reset_refs("4") || pm_entry(getpid(), mem) & PM_SOFT_DIRTY)
		return skip("no soft-dirty bit, so no mix of permissions");
	for (i = 0; i < nr; i++)
		if (odd_one(i))
			stamp(mem, i, SALT);
	puppet_start(&p);
	for (i = 0; i < nr; i++)
		stamp(mem, i, SALT_PARENT);
	if (puppet_call(&p, child_all_old, mem))
		return KSFT_FAIL;
	puppet_call(&p, child_write_all, mem);
	if (check_stamps(mem, nr, SALT_PARENT))
		return KSFT_FAIL;
	puppet_end(&p);
	return KSFT_PASS;
}

static int check_referenced(pid_t pid, char *mem, unsigned int pages)
{
	long kb = smaps_sum(pid, mem, mem + pmd_size, NULL, "Referenced");
	long want = pages * page_size / 1024;

	if (kb != want)
		return fail("%ld kB are young in the %s instead of %ld", kb,
		     pid == getpid() ? "parent" : "child", want);
	return KSFT_PASS;
}

static int control_young(void)
{
	unsigned int i, young = 0;
	struct puppet p;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	/* The second also flushes the TLB, else a read sets no bit */
	if (reset_refs("1") || reset_refs("4"))
		return skip("no clear_refs");
	reset_refs("1");
	reset_refs("4");
	if (smaps_sum(getpid(), mem, mem + pmd_size, NULL, "Referenced"))
		return skip("the young bit does not go away");
	for (i = 0; i < nr; i++) {
		if (!odd_one(i))
			continue;
		peek(mem, i, 0);
		young++;
	}
	if (smaps_sum(getpid(), mem, mem + pmd_size, NULL, "Referenced") !=
	    (long)(young * page_size / 1024))
		return skip("the young bit is not kept per page");
	puppet_start(&p);
	if (check_referenced(p.pid, mem, 0))
		return KSFT_FAIL;
	if (check_referenced(getpid(), mem, young))
		return KSFT_FAIL;
	puppet_end(&p);
	return KSFT_PASS;
}

static int make_odd_readonly(void *arg)
{
	unsigned int i;

	for (i = 0; i < nr; i++)
		if (odd_one(i))
			protect(page_at(arg, i), page_size, PROT_READ);
	return 0;
}

static int check_dirty(pid_t pid, char *mem, const char *perms,
		       unsigned int pages)
{
	long kb = smaps_sum(pid, mem, mem + pmd_size, perms, "Private_Dirty") +
		  smaps_sum(pid, mem, mem + pmd_size, perms, "Shared_Dirty");
	long want = pages * page_size / 1024;

	if (kb != want)
		return fail("%ld kB of %s are dirty in the %s instead of %ld", kb,
		     perms ? perms : "all", pid == getpid() ? "parent" : "child",
		     want);
	return KSFT_PASS;
}

/*
 * MADV_FREE cleans the huge page, writes dirty some of its PTEs.  smaps tells
 * per VMA, so afterwards each of these pages becomes a VMA of its own.
 */
static int control_dirty(void)
{
	unsigned int i, dirty = 0;
	struct puppet p;
	char *mem;

	mem = thp_alloc(1);
	if (!mem)
		return skip("no huge page");
	advise(mem, pmd_size, MADV_FREE);
	if (!pte_map(mem, 1))
		return skip("the huge page is not mapped by PTEs");
	if (smaps_sum(getpid(), mem, mem + pmd_size, NULL, "Private_Dirty"))
		return skip("MADV_FREE leaves the huge page dirty");
	for (i = 0; i < nr; i++) {
		if (!odd_one(i))
			continue;
		stamp(mem, i, SALT);
		dirty++;
	}
	if (check_dirty(getpid(), mem, NULL, dirty))
		return KSFT_FAIL;
	puppet_start(&p);
	puppet_call(&p, make_odd_readonly, mem);
	if (check_dirty(p.pid, mem, "r--p", dirty))
		return KSFT_FAIL;
	if (check_dirty(p.pid, mem, "rw-p", 0))
		return KSFT_FAIL;
	make_odd_readonly(mem);
	if (check_dirty(getpid(), mem, "r--p", dirty))
		return KSFT_FAIL;
	if (check_dirty(getpid(), mem, "rw-p", 0))
		return KSFT_FAIL;
	puppet_end(&p);

	/* Reclaim may drop what is clean, and nothing else */
	madvise(mem, pmd_size, MADV_PAGEOUT);
	for (i = 0; i < nr; i++)
		if (!stamped(mem, i, SALT) && (odd_one(i) || peek(mem, i, 0)))
			return fail("page %u holds %#x", i, peek(mem, i, 0));
	return KSFT_PASS;
}

/* ---- What ends a run ---- */

static int child_read_all(void *arg)
{
	long before = minor_faults();

	if (check_stamps(arg, nr, SALT))
		return KSFT_FAIL;
	before = minor_faults() - before;
	if (before)
		return fail("reading what fork copied took %ld faults", before);
	return KSFT_PASS;
}

static int control_holes(void)
{
	struct puppet p;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	/* Small pages, zero pages and nothing at all between the huge one's */
	for (i = 0; i < nr; i++)
		if (i % 16 == 3 || i % 16 == 8 || i % 16 == 9 || i % 64 == 62)
			advise(page_at(mem, i), page_size, MADV_DONTNEED);
	for (i = 0; i < nr; i++) {
		if (i % 16 == 3)
			stamp(mem, i, SALT);
		if (i % 16 == 8)
			peek(mem, i, 0);
	}
	puppet_start(&p);
	for (i = 0; i < nr; i++) {
		__u64 ours = pm_entry(getpid(), page_at(mem, i));
		__u64 child = pm_entry(p.pid, page_at(mem, i));

		if ((ours & (PM_PRESENT | PM_PFN)) !=
		    (child & (PM_PRESENT | PM_PFN)))
			return fail("page %u: parent has %#llx, child %#llx", i,
			     (unsigned long long)ours,
			     (unsigned long long)child);
		if (i % 16 == 8 || i % 16 == 9 || i % 64 == 62)
			continue;
		if (check_mapcounts(p.pid, mem, i, i + 1, 2))
			return KSFT_FAIL;
	}
	puppet_end(&p);
	for (i = 0; i < nr; i++) {
		bool hole = i % 16 == 8 || i % 16 == 9 ||
			    (i % 64 == 62 && i % 16 != 3);

		if (hole ? peek(mem, i, 0) : !stamped(mem, i, SALT))
			return fail("page %u holds %#x", i, peek(mem, i, 0));
	}
	return check_split(mem, 1);
}

/* Two pages of the same folio in each other's place: not a run */
static int control_swapped_places(void)
{
	char *mem, *spare;
	struct puppet p;
	unsigned int i;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	spare = map_aligned(page_size, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	for (i = 8; i < nr; i += 32) {
		char *a = page_at(mem, i), *b = page_at(mem, i + 1);

		if (mremap(a, page_size, page_size, MREMAP_MAYMOVE |
			   MREMAP_FIXED, spare) != spare ||
		    mremap(b, page_size, page_size, MREMAP_MAYMOVE |
			   MREMAP_FIXED, a) != a ||
		    mremap(spare, page_size, page_size, MREMAP_MAYMOVE |
			   MREMAP_FIXED, b) != b)
			die("mremap");
	}
	puppet_start(&p);
	for (i = 0; i < nr; i++)
		if (pfn_of(getpid(), page_at(mem, i)) !=
		    pfn_of(p.pid, page_at(mem, i)))
			return fail("page %u: the child has another page", i);
	if (check_mapcounts(p.pid, mem, 0, nr, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_split(mem, 1);
}

static int control_vma_end(void)
{
	struct puppet p;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	/* The child must get the pages 0 to 99 and 200 to the end, no more */
	advise(page_at(mem, 100), 100 * page_size, MADV_DONTFORK);
	puppet_start(&p);
	if (check_mapcounts(getpid(), mem, 0, 100, 2))
		return KSFT_FAIL;
	if (check_mapcounts(getpid(), mem, 100, 200, 1))
		return KSFT_FAIL;
	if (check_mapcounts(getpid(), mem, 200, nr, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	return check_split(mem, 1);
}

static int child_stripes(void *arg)
{
	unsigned int i;
	long before;

	before = minor_faults();
	for (i = 0; i < 60; i++)
		if (i % 3 != 2 && !stamped(arg, i, SALT))
			return fail("page %u holds %#x", i, peek(arg, i, 0));
	before = minor_faults() - before;
	if (before)
		return fail("reading what fork copied took %ld faults", before);
	for (i = 0; i < 60; i++) {
		if (faults(page_at(arg, i), false) != (i % 3 == 2))
			return fail("page %u: a read %s", i,
				    i % 3 == 2 ? "works" : "faults");
		if (faults(page_at(arg, i), true) != (i % 3 != 0))
			return fail("page %u: a write %s", i,
				    i % 3 ? "works" : "faults");
	}
	return KSFT_PASS;
}

static int control_protections(void)
{
	struct puppet p;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	for (i = 0; i < 60; i++)
		if (i % 3)
			protect(page_at(mem, i), page_size,
				i % 3 == 1 ? PROT_READ : PROT_NONE);
	puppet_start(&p);
	if (puppet_call(&p, child_stripes, mem))
		return KSFT_FAIL;
	if (child_stripes(mem))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_split(mem, 1);
}

static int child_unprotect_and_check(void *arg)
{
	if (!faults(page_at(arg, 17), false))
		return fail("PROT_NONE can be read");
	protect(arg, pmd_size, PROT_READ | PROT_WRITE);
	return child_read_all(arg);
}

/* x86 inverts the PFN in such PTEs, so adding to one goes the wrong way */
static int control_prot_none(void)
{
	struct puppet p;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	protect(mem, pmd_size, PROT_NONE);
	puppet_start(&p);
	if (puppet_call(&p, child_unprotect_and_check, mem))
		return KSFT_FAIL;
	protect(mem, pmd_size, PROT_READ | PROT_WRITE);
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	if (check_mapcounts(p.pid, mem, 0, nr, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	return check_split(mem, 1);
}

/* A huge page across the edge of two page tables, at odd offsets */
static int control_mremap(void)
{
	char *mem, *room, *to;
	struct puppet p;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	room = map_aligned(3 * pmd_size, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	to = page_at(room, nr / 2 + 3);
	if (mremap(mem, pmd_size, pmd_size, MREMAP_MAYMOVE | MREMAP_FIXED,
		   to) != to)
		die("mremap");
	if (!is_thp(to))
		return skip("mremap splits the huge page");
	puppet_start(&p);
	if (check_mapcounts(p.pid, to, 0, nr, 2))
		return KSFT_FAIL;
	if (puppet_call(&p, child_read_all, to))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), to, 0, nr, 1))
		return KSFT_FAIL;
	if (check_stamps(to, nr, SALT))
		return KSFT_FAIL;
	return check_split(to, 1);
}

/*
 * Two huge pages with adjacent PFNs in one page table: the PFNs go on where
 * the folio ends.  A run that goes on too takes its references from the wrong
 * folio.
 */
static int control_adjacent_folios(void)
{
	enum { MANY = 16 };
	char *mem, *room, *to, *low = NULL, *high = NULL;
	struct puppet p;
	unsigned int i, k;

	mem = thp_by_ptes(MANY);
	if (!mem)
		return skip_thp();
	for (i = 0; i < MANY && !low; i++) {
		for (k = 0; k < MANY; k++) {
			if (pfn_of(getpid(), mem + k * pmd_size) !=
			    pfn_of(getpid(), mem + i * pmd_size) + nr)
				continue;
			low = mem + i * pmd_size;
			high = mem + k * pmd_size;
			break;
		}
	}
	if (!low)
		return skip("no two huge pages have adjacent PFNs");
	room = map_aligned(3 * pmd_size, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	to = page_at(room, nr / 2 + 5);
	if (mremap(low, pmd_size, pmd_size, MREMAP_MAYMOVE | MREMAP_FIXED,
		   to) != to ||
	    mremap(high, pmd_size, pmd_size, MREMAP_MAYMOVE | MREMAP_FIXED,
		   to + pmd_size) != to + pmd_size)
		die("mremap");
	if (!is_thp(to) || !is_thp(to + pmd_size))
		return skip("mremap splits the huge page");
	puppet_start(&p);
	if (check_mapcounts(p.pid, to, 0, 2 * nr, 2))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), to, 0, 2 * nr, 1))
		return KSFT_FAIL;
	return check_split(to, 2);
}

/* One child has the huge page as a whole, the parent by PTEs: both count */
static int control_pmd_elsewhere(void)
{
	char *mem = thp_alloc(1);
	struct puppet whole, p;

	if (!mem)
		return skip_thp();
	puppet_start(&whole);
	if (!pte_map(mem, 1))
		return skip_thp();
	puppet_start(&p);
	if (check_mapcounts(p.pid, mem, 0, nr, 3))
		return KSFT_FAIL;
	puppet_end(&whole);
	if (check_mapcounts(p.pid, mem, 0, nr, 2))
		return KSFT_FAIL;
	puppet_call(&p, child_write_all, mem);
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	puppet_end(&p);
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	return check_split(mem, 1);
}

/* ---- Pins ---- */

/* linux/io_uring.h needs more of the other headers than some of them have. */
struct ring_params {
	__u32 sq_entries, cq_entries, unused[8];
	struct {
		__u32 head, tail, ring_mask, unused[3], array, resv[3];
	} sq_off;
	struct {
		__u32 head, tail, unused[8];
	} cq_off;
};

struct ring_sqe {
	__u8 opcode, flags;
	__u16 ioprio;
	__s32 fd;
	__u64 off, addr;
	__u32 len, unused[9];
};

#define RING_OFF_SQ			0
#define RING_OFF_CQ			0x8000000
#define RING_OFF_SQES			0x10000000
#define RING_REGISTER_BUFFERS		0
#define RING_UNREGISTER_BUFFERS		1
#define RING_ENTER_GETEVENTS		1
#define RING_OP_WRITE_FIXED		5

struct ring {
	int fd;
	struct ring_params params;
	char *sq, *cq;
	struct ring_sqe *sqes;
};

/* A fixed buffer is a long-term pin, and the ring is the device behind it. */
static int ring_pin(struct ring *ring, char *addr, size_t len)
{
	struct iovec iov = { .iov_base = addr, .iov_len = len };

	memset(ring, 0, sizeof(*ring));
	ring->fd = syscall(__NR_io_uring_setup, 2, &ring->params);
	if (ring->fd < 0)
		return -1;
	fcntl(ring->fd, F_SETFD, FD_CLOEXEC);
	ring->sq = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			ring->fd, RING_OFF_SQ);
	ring->cq = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			ring->fd, RING_OFF_CQ);
	ring->sqes = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			  ring->fd, RING_OFF_SQES);
	if (ring->sq == MAP_FAILED || ring->cq == MAP_FAILED ||
	    ring->sqes == MAP_FAILED)
		return -1;
	return syscall(__NR_io_uring_register, ring->fd,
		       RING_REGISTER_BUFFERS, &iov, 1);
}

/* What the device sees at @addr */
static __u32 ring_see(struct ring *ring, char *addr)
{
	__u32 *tail = (__u32 *)(ring->sq + ring->params.sq_off.tail);
	__u32 *array = (__u32 *)(ring->sq + ring->params.sq_off.array);
	__u32 mask = *(__u32 *)(ring->sq + ring->params.sq_off.ring_mask);
	__u32 *head = (__u32 *)(ring->cq + ring->params.cq_off.head);
	struct ring_sqe *sqe = &ring->sqes[*tail & mask];
	int fd = memfd_create("fork_pte_batch", MFD_CLOEXEC);
	__u32 value = 0;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = RING_OP_WRITE_FIXED;
	sqe->fd = fd;
	sqe->addr = (uintptr_t)addr;
	sqe->len = sizeof(value);
	array[*tail & mask] = *tail & mask;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	if (syscall(__NR_io_uring_enter, ring->fd, 1, 1, RING_ENTER_GETEVENTS,
		    NULL, 0) != 1)
		die("io_uring_enter");
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	if (pread(fd, &value, sizeof(value), 0) != sizeof(value))
		die("what the device wrote");
	close(fd);
	return value;
}

static void ring_unpin(struct ring *ring)
{
	if (syscall(__NR_io_uring_register, ring->fd,
		    RING_UNREGISTER_BUFFERS, NULL, 0))
		die("RING_UNREGISTER_BUFFERS");
	munmap(ring->sq, page_size);
	munmap(ring->cq, page_size);
	munmap(ring->sqes, page_size);
	close(ring->fd);
}

static int control_pinned(void)
{
	__u64 *before = malloc(nr * sizeof(*before));
	__u64 *parent = malloc(nr * sizeof(*parent));
	__u64 *child = malloc(nr * sizeof(*child));
	struct puppet p;
	struct ring ring;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (ring_pin(&ring, page_at(mem, 200), page_size))
		return skip("no io_uring fixed buffer");
	pm_entries(getpid(), mem, before, nr);
	puppet_start(&p);
	pm_entries(getpid(), mem, parent, nr);
	pm_entries(p.pid, mem, child, nr);
	for (i = 0; i < nr; i++) {
		if ((parent[i] ^ before[i]) & PM_PFN)
			return fail("page %u of the parent was replaced", i);
		if (!(child[i] & PM_PRESENT))
			return fail("page %u of the child is missing", i);
		if (!((child[i] ^ before[i]) & PM_PFN))
			return fail("page %u of a pinned folio is shared", i);
	}
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	if (check_mapcounts(p.pid, mem, 0, nr, 1))
		return KSFT_FAIL;
	for (i = 0; i < nr; i++)
		stamp(mem, i, SALT_PARENT);
	if (ring_see(&ring, page_at(mem, 200)) != SALT_PARENT + 200)
		return fail("the device does not see what the parent wrote");
	if (puppet_call(&p, child_all_old, mem))
		return KSFT_FAIL;
	puppet_end(&p);
	ring_unpin(&ring);
	/* The pin is given back by a work item on newer kernels */
	return check_split(mem, 1);
}

/* A pin elsewhere in the process must not make runs go away, nor be shared */
static int control_pinned_neighbour(void)
{
	struct puppet p;
	struct ring ring;
	unsigned int i;
	char *mem;

	mem = thp_by_ptes(3);
	if (!mem)
		return skip_thp();
	if (ring_pin(&ring, page_at(mem, nr + nr - 1), page_size))
		return skip("no io_uring fixed buffer");
	puppet_start(&p);
	for (i = 0; i < 3 * nr; i += 7) {
		bool shared = pfn_of(getpid(), page_at(mem, i)) ==
			      pfn_of(p.pid, page_at(mem, i));

		if (shared == (i / nr == 1))
			return fail("page %u is %s", i, shared ? "shared" : "copied");
	}
	puppet_end(&p);
	ring_unpin(&ring);
	return check_split(mem, 3);
}

/*
 * fork() cannot get the pages for the copies: the limit leaves no room and
 * nothing in the group may be killed to make some.
 */
static int control_pinned_nomem(void)
{
	struct puppet p;
	struct ring ring;
	char file[192], text[32];
	char *mem;
	int err;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (!cgroup[0])
		return skip("no memory controller in a cgroup2 hierarchy");
	if (ring_pin(&ring, page_at(mem, 7), page_size))
		return skip("no io_uring fixed buffer");
	snprintf(file, sizeof(file), "%s/cgroup.procs", cgroup);
	snprintf(text, sizeof(text), "%d", getpid());
	if (write_file("/proc/self/oom_score_adj", "-1000") ||
	    write_file(file, text))
		return skip("cannot enter a memory cgroup");
	snprintf(file, sizeof(file), "%s/memory.swap.max", cgroup);
	write_file(file, "0");
	snprintf(file, sizeof(file), "%s/memory.max", cgroup);
	if (write_file(file, "1048576"))
		return skip("cannot set memory.max");
	err = puppet_fork(&p);
	write_file(file, "max");
	if (!err)
		return fail("fork had room for %zu copies in 1 MiB", pmd_size);
	if (err != ENOMEM)
		return fail("fork says %s", strerror(err));
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	puppet_start(&p);
	if (check_mapcounts(p.pid, mem, 0, nr, 1))
		return KSFT_FAIL;
	puppet_end(&p);
	ring_unpin(&ring);
	return check_split(mem, 1);
}

/* vmsplice takes references and no pin: pages in a pipe are shared by fork. */
static int control_vmsplice(void)
{
	struct iovec iov;
	struct puppet p;
	__u32 value;
	int fds[2];
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	if (pipe2(fds, O_CLOEXEC))
		die("pipe2");
	iov.iov_base = page_at(mem, 33);
	iov.iov_len = sizeof(value);
	puppet_start(&p);
	if (vmsplice(fds[1], &iov, 1, 0) != sizeof(value))
		return skip("no vmsplice");
	if (check_mapcounts(p.pid, mem, 0, nr, 2))
		return KSFT_FAIL;
	stamp(mem, 33, SALT_PARENT);
	if (read(fds[0], &value, sizeof(value)) != sizeof(value))
		die("read of the pipe");
	if (value != SALT + 33)
		return fail("a write after fork is in the pipe: %#x", value);
	if (puppet_call(&p, child_all_old, mem))
		return KSFT_FAIL;
	puppet_end(&p);
	return KSFT_PASS;
}

/* ---- Swap entries within a run; more of them than a swap count holds ---- */

static int control_swap(void)
{
	enum { MANY = 70 };
	unsigned int i, k, swapped = 0;
	struct puppet p[MANY];
	char *mem;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	for (i = 4; i < nr; i += 24) {
		advise(page_at(mem, i), page_size, MADV_DONTNEED);
		stamp(mem, i, SALT);
	}
	for (i = 4; i < nr; i += 24)
		madvise(page_at(mem, i), page_size, MADV_PAGEOUT);
	for (i = 0; i < nr; i++)
		swapped += !!(pm_entry(getpid(), page_at(mem, i)) & PM_SWAP);
	if (!swapped)
		return skip("nothing can be swapped out");
	for (k = 0; k < MANY; k++)
		puppet_start(&p[k]);
	for (k = 0; k < MANY; k += 23) {
		long kb = smaps_sum(p[k].pid, mem, mem + pmd_size, NULL, "Swap");

		if (kb != (long)(swapped * page_size / 1024))
			return fail("child %u has %ld kB in swap, the parent %zu", k,
			     kb, swapped * page_size / 1024);
	}
	if (check_mapcounts(p[0].pid, mem, 0, 4, MANY + 1))
		return KSFT_FAIL;
	if (puppet_call(&p[0], child_all_old, mem))
		return KSFT_FAIL;
	if (puppet_call(&p[MANY - 1], child_all_old, mem))
		return KSFT_FAIL;
	for (k = 0; k < MANY; k++)
		puppet_end(&p[k]);
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	if (check_mapcounts(getpid(), mem, 0, 4, 1))
		return KSFT_FAIL;
	return check_split(mem, 1);
}

/* ---- userfaultfd write protection ---- */

static int uffd_open(__u64 features)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = features | UFFD_FEATURE_PAGEFAULT_FLAG_WP,
	};
	int fd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return -1;
	if (ioctl(fd, UFFDIO_API, &api)) {
		close(fd);
		return -1;
	}
	return fd;
}

static int uffd_protect_odd_ones(int fd, char *mem)
{
	struct uffdio_register reg = {
		.range = { .start = (uintptr_t)mem, .len = pmd_size },
		.mode = UFFDIO_REGISTER_MODE_WP,
	};
	struct uffdio_writeprotect wp = {
		.range = { .len = page_size },
		.mode = UFFDIO_WRITEPROTECT_MODE_WP,
	};
	unsigned int i;

	if (ioctl(fd, UFFDIO_REGISTER, &reg))
		return -1;
	for (i = 0; i < nr; i++) {
		wp.range.start = (uintptr_t)page_at(mem, i);
		if (odd_one(i) && ioctl(fd, UFFDIO_WRITEPROTECT, &wp))
			return -1;
	}
	return 0;
}

static int check_uffd_wp(pid_t pid, char *mem, bool any)
{
	__u64 *pm = malloc(nr * sizeof(*pm));
	unsigned int i;

	pm_entries(pid, mem, pm, nr);
	for (i = 0; i < nr; i++)
		if (!!(pm[i] & PM_UFFD_WP) != (any && odd_one(i)))
			return fail("page %u: uffd-wp is %d in the %s", i,
			     !!(pm[i] & PM_UFFD_WP),
			     pid == getpid() ? "parent" : "child");
	free(pm);
	return KSFT_PASS;
}

static int control_uffd_unregistered(void)
{
	struct puppet p;
	char *mem;
	int fd;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	fd = uffd_open(0);
	if (fd < 0 || uffd_protect_odd_ones(fd, mem))
		return skip("no userfaultfd write protection");
	puppet_start(&p);
	if (check_uffd_wp(p.pid, mem, false))
		return KSFT_FAIL;
	if (check_uffd_wp(getpid(), mem, true))
		return KSFT_FAIL;
	/* No handler is there for the child, so its writes must not wait */
	puppet_call(&p, child_write_all, mem);
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	puppet_end(&p);
	close(fd);
	return check_split(mem, 1);
}

/* fork() waits until somebody has read the event */
static void *uffd_read_event(void *arg)
{
	struct pollfd pfd = { .fd = *(int *)arg, .events = POLLIN };
	struct uffd_msg msg;

	if (poll(&pfd, 1, REPLY_TIMEOUT_MS) == 1 &&
	    read(pfd.fd, &msg, sizeof(msg)) == sizeof(msg) &&
	    msg.event == UFFD_EVENT_FORK)
		return (void *)(uintptr_t)msg.arg.fork.ufd;
	return NULL;
}

static int control_uffd_event_fork(void)
{
	pthread_t thread;
	struct puppet p;
	void *child_fd;
	char *mem;
	int fd;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	fd = uffd_open(UFFD_FEATURE_EVENT_FORK);
	if (fd < 0 || uffd_protect_odd_ones(fd, mem))
		return skip("no userfaultfd write protection or fork event");
	if (pthread_create(&thread, NULL, uffd_read_event, &fd))
		die("pthread_create");
	puppet_start(&p);
	pthread_join(thread, &child_fd);
	if (!child_fd)
		return fail("no fork event");
	if (check_uffd_wp(p.pid, mem, true))
		return KSFT_FAIL;
	if (check_uffd_wp(getpid(), mem, true))
		return KSFT_FAIL;
	puppet_end(&p);
	close((uintptr_t)child_fd);
	close(fd);
	return check_split(mem, 1);
}

/* ---- Accounting ---- */

static int control_rss(void)
{
	enum { HUGE_PAGES = 8 };
	long rss, anon, want = HUGE_PAGES * pmd_size / 1024;
	struct puppet p;
	char *mem;

	mem = thp_by_ptes(HUGE_PAGES);
	if (!mem)
		return skip_thp();
	puppet_start(&p);
	rss = smaps_sum(p.pid, mem, mem + HUGE_PAGES * pmd_size, NULL, "Rss");
	if (rss != want)
		return fail("the child maps %ld kB instead of %ld", rss, want);
	/* The counter may lag, by less than a quarter of the huge pages */
	rss = smaps_sum(p.pid, NULL, (char *)-1l, NULL, "Anonymous");
	anon = status_kb(p.pid, "RssAnon:");
	if (labs(anon - rss) > want / 4)
		return fail("RssAnon is %ld kB, the child maps %ld kB", anon, rss);
	puppet_end(&p);
	return check_split(mem, HUGE_PAGES);
}

static int control_many_forks(void)
{
	enum { FORKS = 1000 };
	unsigned int i, status;
	char *mem;
	pid_t pid;

	mem = thp_by_ptes(1);
	if (!mem)
		return skip_thp();
	for (i = 0; i < FORKS; i++) {
		pid = fork();
		if (!pid)
			_exit(!stamped(mem, i % nr, SALT));
		if (pid < 0 || waitpid(pid, (int *)&status, 0) != pid || status)
			return fail("fork %u: %s", i, pid < 0 ? strerror(errno) :
			     "the child's page differs");
	}
	if (check_stamps(mem, nr, SALT))
		return KSFT_FAIL;
	if (check_mapcounts(getpid(), mem, 0, nr, 1))
		return KSFT_FAIL;
	if (smaps_sum(getpid(), mem, mem + pmd_size, NULL, "Rss") !=
	    (long)(pmd_size / 1024))
		return fail("Rss differs");
	return check_split(mem, 1);
}

/*
 * Fork while threads write and others reclaim, split and migrate the memory.
 * A writer sets the first word of a page, then the last one, to the same
 * count: any snapshot has a first word equal to the last or one ahead.
 */
enum { STRESS_HUGE = 4, STRESS_FORKS = 60, WRITERS = 2 };

static char *stress_mem;
static bool stress_stop;

static void *stress_write(void *arg)
{
	unsigned int i, me = (uintptr_t)arg;
	__u32 count = 1;

	while (!__atomic_load_n(&stress_stop, __ATOMIC_RELAXED)) {
		for (i = me; i < STRESS_HUGE * nr; i += WRITERS) {
			poke(stress_mem, i, 0, count);
			__atomic_thread_fence(__ATOMIC_SEQ_CST);
			poke(stress_mem, i, last_word(), count);
			poke(stress_mem, i, 1, i);
		}
		count++;
	}
	return NULL;
}

static void *stress_reclaim(void *arg)
{
	unsigned int round = 0;

	(void)arg;
	while (!__atomic_load_n(&stress_stop, __ATOMIC_RELAXED)) {
		char *huge = stress_mem + round % STRESS_HUGE * pmd_size;

		switch (round++ % 4) {
		case 0:
			madvise(page_at(huge, round % nr), page_size,
				MADV_PAGEOUT);
			break;
		case 1:
			split_debugfs(huge, pmd_size / 2);
			break;
		case 2:
			write_file("/proc/sys/vm/compact_memory", "1");
			break;
		default:
			/* Build a new huge page, mapped by PTEs at once */
			advise(huge, pmd_size, MADV_DONTNEED);
			madvise(huge, page_size, MADV_POPULATE_WRITE);
			madvise(page_at(huge, 1), page_size, MADV_DONTDUMP);
			madvise(page_at(huge, 1), page_size, MADV_DODUMP);
		}
		usleep(2000);
	}
	return NULL;
}

static int stress_check(void)
{
	__u32 first, last, id;
	unsigned int i;

	for (i = 0; i < STRESS_HUGE * nr; i++) {
		first = peek(stress_mem, i, 0);
		last = peek(stress_mem, i, last_word());
		id = peek(stress_mem, i, 1);
		/* Zero: the page was dropped between two of the stores */
		if (first && last && first != last && first != last + 1)
			return 1;
		if (id && id != i)
			return 2;
	}
	return 0;
}

static int control_stress(void)
{
	pthread_t threads[WRITERS + 1];
	unsigned int i;
	int status = 0;
	pid_t pid;

	stress_mem = thp_by_ptes(STRESS_HUGE);
	if (!stress_mem)
		return skip("no huge page");
	memset(stress_mem, 0, STRESS_HUGE * pmd_size);
	for (i = 0; i < WRITERS; i++)
		if (pthread_create(&threads[i], NULL, stress_write,
				   (void *)(uintptr_t)i))
			die("pthread_create");
	if (pthread_create(&threads[i], NULL, stress_reclaim, NULL))
		die("pthread_create");
	for (i = 0; i < STRESS_FORKS && !status; i++) {
		pid = fork();
		if (!pid)
			_exit(stress_check());
		if (pid < 0 || waitpid(pid, &status, 0) != pid)
			die("fork");
	}
	__atomic_store_n(&stress_stop, true, __ATOMIC_RELAXED);
	for (i = 0; i < WRITERS + 1; i++)
		pthread_join(threads[i], NULL);
	if (status)
		return fail("fork %u: the snapshot is torn (%#x)", i, status);
	return KSFT_PASS;
}

/* ---- Main ---- */

static const char * const complaints[] = {
	"BUG:", "WARNING:", "Bad rss-counter", "Bad page", "Oops",
	"non-zero pgtables_bytes", "possible recursive locking",
};

/* New complaints of the kernel since the last call */
static unsigned int console_complaints(void)
{
	unsigned int i, found = 0;
	char line[2048];
	ssize_t len;

	if (kmsg < 0)
		return 0;
	for (;;) {
		len = read(kmsg, line, sizeof(line) - 1);
		if (len < 0 && errno == EPIPE)
			continue;	/* overwritten: go on with the oldest */
		if (len <= 0)
			return found;
		line[len] = 0;
		line[strcspn(line, "\n")] = 0;
		for (i = 0; i < ARRAY_SIZE(complaints); i++) {
			char *at = strstr(line, complaints[i]);

			if (at) {
				note("console: %s", at);
				found++;
				break;
			}
		}
	}
}

static int control_console(void)
{
	if (kmsg < 0)
		return skip("no /dev/kmsg");
	return KSFT_PASS;	/* main() adds what the console says */
}

static const struct {
	const char *name;
	int (*fn)(void);
} cases[] = {
	{ "one reference update for a run of exclusive pages", proof_exclusive },
	{ "one reference update for a run of shared pages", proof_shared },
	{ "as many reference updates as runs", proof_one_per_run },
	{ "one reference update for a run of file pages", proof_file },
	{ "control: runs of one page", control_striped },
	{ "control: contents in parent, child and grandchild", control_contents },
	{ "control: the parent's writes do not reach the child",
	  control_parent_writes },
	{ "control: the child's writes do not reach the parent",
	  control_child_writes },
	{ "control: contents of a private file mapping", control_file_contents },
	{ "control: write permission per page", control_mixed_writable },
	{ "control: soft-dirty per page", control_soft_dirty },
	{ "control: young per page", control_young },
	{ "control: dirty per page", control_dirty },
	{ "control: uffd-wp, child not registered", control_uffd_unregistered },
	{ "control: uffd-wp, child registered", control_uffd_event_fork },
	{ "control: holes, zero pages and small pages", control_holes },
	{ "control: pages in swapped places", control_swapped_places },
	{ "control: end of the VMA", control_vma_end },
	{ "control: protections by page", control_protections },
	{ "control: PROT_NONE", control_prot_none },
	{ "control: across two page tables", control_mremap },
	{ "control: adjacent folios", control_adjacent_folios },
	{ "control: mapped by a PMD elsewhere", control_pmd_elsewhere },
	{ "control: pinned page", control_pinned },
	{ "control: pinned page in a neighbour", control_pinned_neighbour },
	{ "control: pinned page, no memory", control_pinned_nomem },
	{ "control: vmsplice", control_vmsplice },
	{ "control: swap entries and many children", control_swap },
	{ "control: rss counters", control_rss },
	{ "control: many forks", control_many_forks },
	{ "control: stress", control_stress },
	{ "control: clean console", control_console },
};

/* Each case is a process group of its own, so that a hang can be ended. */
static int run_case(int (*fn)(void))
{
	struct timespec tick = { .tv_nsec = 5000000 };
	int status, waited;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0) {
		note("fork: %s", strerror(errno));
		return KSFT_FAIL;
	}
	if (!pid) {
		setpgid(0, 0);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		_exit(fn());
	}
	setpgid(pid, pid);
	case_pid = pid;
	for (waited = 0; waited < CASE_TIMEOUT_S * 200; waited++) {
		pid_t ret = waitpid(pid, &status, WNOHANG);

		if (ret == pid)
			break;
		nanosleep(&tick, NULL);
	}
	kill(-pid, SIGKILL);
	case_pid = 0;
	if (waited == CASE_TIMEOUT_S * 200) {
		note("no end after %d s", CASE_TIMEOUT_S);
		waitpid(pid, &status, 0);
		return KSFT_FAIL;
	}
	if (!WIFEXITED(status)) {
		note("killed by signal %d", WTERMSIG(status));
		return KSFT_FAIL;
	}
	return WEXITSTATUS(status);
}

static void setup(void)
{
	const char *dir = tracefs();
	char buf[64];

	main_pid = getpid();
	atexit(restore_settings);
	signal(SIGINT, on_signal);
	signal(SIGTERM, on_signal);
	signal(SIGHUP, on_signal);
	set_settings();

	if (dir) {
		snprintf(instance, sizeof(instance),
			 "%s/instances/fork_pte_batch_%d", dir, getpid());
		if (mkdir(instance, 0700))
			instance[0] = 0;
	}
	if (!access("/sys/fs/cgroup/cgroup.subtree_control", W_OK)) {
		write_file("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
		snprintf(cgroup, sizeof(cgroup),
			 "/sys/fs/cgroup/fork_pte_batch_%d", getpid());
		if (mkdir(cgroup, 0700))
			cgroup[0] = 0;
	}
	kmsg = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (kmsg >= 0)
		lseek(kmsg, 0, SEEK_END);

	page_size = getpagesize();
	if (read_file(THP_DIR "hpage_pmd_size", buf, sizeof(buf)) > 0)
		pmd_size = strtoul(buf, NULL, 0);
	nr = pmd_size / page_size;
}

int main(void)
{
	unsigned int i;

	ksft_print_header();
	if (geteuid())
		ksft_exit_skip("needs root for page frame numbers\n");
	setup();
	if (nr < 2 * RUN_MIN)
		ksft_exit_skip("no transparent huge pages\n");
	ksft_set_plan(ARRAY_SIZE(cases));
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		int ret = run_case(cases[i].fn);

		if (console_complaints() && ret != KSFT_FAIL) {
			note("the console is not clean");
			ret = KSFT_FAIL;
		}
		if (ret == KSFT_PASS)
			ksft_test_result_pass("%s\n", cases[i].name);
		else if (ret == KSFT_SKIP)
			ksft_test_result_skip("%s\n", cases[i].name);
		else
			ksft_test_result_fail("%s\n", cases[i].name);
		fflush(stdout);
	}
	if (ksft_get_fail_cnt())
		ksft_exit_fail();
	ksft_exit_pass();
}
