// SPDX-License-Identifier: GPL-2.0
/*
 * What a guest must survive or report, one deed per word: exit N, binary,
 * segv, spin, ticks, eat, warn, poweroff, clock, machine, write FILE TEXT.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/types.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Of mm/gup_test.h. */
struct gup_test {
	__u64 get_delta_usec, put_delta_usec, addr, size;
	__u32 nr_pages_per_call, gup_flags, test_flags, which_pages[8];
};
#define GUP_FAST_BENCHMARK	_IOWR('g', 1, struct gup_test)

static void show(const char *file)
{
	char line[512];
	FILE *f = fopen(file, "r");

	while (f && fgets(line, sizeof(line), f))
		printf("%s: %s", file, line);
	if (f)
		fclose(f);
}

static int machine(void)
{
	char cwd[64];

	printf("cwd=%s home=%s uid=%d input=%d\n", getcwd(cwd, sizeof(cwd)),
	       getenv("HOME"), getuid(), getchar());
	show("/proc/mounts");
	show("/proc/swaps");
	show("/proc/sys/vm/nr_hugepages");
	return 0;
}

/* kvmalloc() of more than INT_MAX bytes warns on every kernel. */
static int warn(void)
{
	struct gup_test gup = {
		.addr = 1 << 20, .size = 1ULL << 41, .nr_pages_per_call = 1,
	};
	int fd = open("/sys/kernel/debug/gup_test", O_RDWR);

	if (fd < 0)
		return 1;
	ioctl(fd, GUP_FAST_BENCHMARK, &gup);
	return 0;
}

/* Locked, so that swap does not put it off. */
static int eat(void)
{
	while (mmap(NULL, 32 << 20, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_LOCKED,
		    -1, 0) != MAP_FAILED)
		;
	return 1;
}

static int binary(void)
{
	unsigned char all[256];
	int i;

	for (i = 0; i < 256; i++)
		all[i] = i;
	for (i = 0; i < 200; i++)
		if (write(1, all, sizeof(all)) != sizeof(all))
			return 1;
	return 0;
}

/* Nanoseconds of one fork after warming up. */
static int clock_fork(void)
{
	struct timespec a, b;
	int i;

	for (i = 0; i < 10; i++) {
		clock_gettime(CLOCK_MONOTONIC_RAW, &a);
		if (!fork())
			_exit(0);
		clock_gettime(CLOCK_MONOTONIC_RAW, &b);
		wait(NULL);
	}
	printf("%ld\n", (b.tv_sec - a.tv_sec) * 1000000000 + b.tv_nsec - a.tv_nsec);
	return 0;
}

static int write_file(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY);

	return fd < 0 || write(fd, text, strlen(text)) < 0;
}

int main(int argc, char **argv)
{
	const char *deed = argc > 1 ? argv[1] : "";

	if (!strcmp(deed, "exit"))
		return atoi(argv[2]);
	if (!strcmp(deed, "binary"))
		return binary();
	if (!strcmp(deed, "segv"))
		raise(SIGSEGV);
	if (!strcmp(deed, "spin"))
		for (;;)
			;
	for (; !strcmp(deed, "ticks"); sleep(1))
		puts("tick");
	if (!strcmp(deed, "eat"))
		return eat();
	if (!strcmp(deed, "warn"))
		return warn();
	if (!strcmp(deed, "poweroff"))
		reboot(RB_POWER_OFF);
	if (!strcmp(deed, "clock"))
		return clock_fork();
	if (!strcmp(deed, "machine"))
		return machine();
	if (!strcmp(deed, "write"))
		return write_file(argv[2], argv[3]);
	printf("no deed called '%s'\n", deed);
	return 1;
}
