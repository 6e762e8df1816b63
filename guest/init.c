// SPDX-License-Identifier: GPL-2.0
/*
 * PID 1 of the guest: prepares the machine for memory-management tests, runs
 * the programs listed in /commands in order, reports each exit status and
 * powers off.
 *
 * Three channels, so that no stream can be mistaken for another: the kernel
 * console, the programs' output (raw, byte for byte) and the control messages
 * below. Which terminals carry the last two comes from the kernel command
 * line, guest.out=NAME and guest.ctl=NAME, for machines name them differently.
 *
 *	init RELEASE		user space is reached
 *	note TEXT		something that the programs may miss
 *	run N			program N (from 1) starts
 *	exit N STATUS		it ended; 128 + number if a signal killed it
 *	done STATUS		the first status that is not 0
 *
 * /commands holds, per program, the number of arguments and then each of
 * them, all NUL terminated; the first is the path.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <linux/membarrier.h>

#define ZRAM_SIZE	(256UL << 20)

static const char *out_tty = "/dev/ttyS1";
static const char *ctl_tty = "/dev/ttyS2";
static int ctl = -1;

static char *const environment[] = {
	"PATH=/run:/bin:/sbin:/usr/bin:/usr/sbin", "HOME=/root", "USER=root",
	"SHELL=/bin/sh", "TERM=dumb", "LC_ALL=C", "PWD=/run", NULL
};

static void write_all(int fd, const char *buf, size_t len)
{
	while (len) {
		ssize_t done = write(fd, buf, len);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return;
		buf += done;
		len -= done;
	}
}

static void __attribute__((format(printf, 1, 2))) tell(const char *fmt, ...)
{
	char line[512];
	va_list ap;
	int len;

	va_start(ap, fmt);
	len = vsnprintf(line, sizeof(line) - 1, fmt, ap);
	va_end(ap);
	if (len > (int)sizeof(line) - 2)
		len = sizeof(line) - 2;
	line[len++] = '\n';
	write_all(ctl, line, len);
}

/* A terminal that passes each byte as it is: no CR before LF, no echo. */
static int open_raw(const char *path)
{
	struct termios tio;
	int fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);

	if (fd < 0)
		return fd;
	if (!tcgetattr(fd, &tio)) {
		cfmakeraw(&tio);
		cfsetspeed(&tio, B115200);
		tio.c_cflag |= CLOCAL;
		tcsetattr(fd, TCSANOW, &tio);
	}
	return fd;
}

/* Reads a file of unknown size; the result ends in a NUL of its own. */
static char *slurp(const char *path, size_t *size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t len = 0, room = 4096;
	char *buf = malloc(room);
	ssize_t done;

	if (fd < 0 || !buf)
		return NULL;
	while ((done = read(fd, buf + len, room - len - 1)) > 0) {
		len += done;
		if (len == room - 1) {
			room *= 2;
			buf = realloc(buf, room);
			if (!buf)
				return NULL;
		}
	}
	close(fd);
	buf[len] = '\0';
	if (size)
		*size = len;
	return buf;
}

static int put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t done;

	if (fd < 0)
		return -1;
	done = write(fd, text, strlen(text));
	close(fd);
	return done < 0 ? -1 : 0;
}

static void attach(const char *fs, const char *dir, const char *options)
{
	mkdir(dir, 0755);
	/* Kernels without THP or shmem reject huge=; a plain tmpfs still serves. */
	if (mount(fs, dir, fs, 0, options) && options)
		mount(fs, dir, fs, 0, NULL);
}

static void mount_all(void)
{
	attach("devtmpfs", "/dev", NULL);
	attach("tmpfs", "/dev/shm", NULL);
	attach("proc", "/proc", NULL);
	attach("sysfs", "/sys", NULL);
	attach("tmpfs", "/tmp", "huge=always,mode=1777");
	attach("debugfs", "/sys/kernel/debug", NULL);
	attach("tracefs", "/sys/kernel/tracing", NULL);
	attach("cgroup2", "/sys/fs/cgroup", NULL);
	mkdir("/root", 0700);
	mkdir("/run", 0755);
}

/* Swap on zram, written by hand: the guest has no mkswap. */
static void start_swap(void)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *head = calloc(1, page);
	/* Offsets of union swap_header: info follows 1024 bytes of bootbits. */
	unsigned int *info = (unsigned int *)(head + 1024);
	char size[32];
	int fd;

	snprintf(size, sizeof(size), "%lu", ZRAM_SIZE);
	if (put("/sys/block/zram0/disksize", size)) {
		tell("note no swap: no zram device: %s", strerror(errno));
		return;
	}
	info[0] = 1;				/* version */
	info[1] = ZRAM_SIZE / page - 1;		/* last_page */
	memcpy(head + page - 10, "SWAPSPACE2", 10);
	fd = open("/dev/zram0", O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, head, page) != (ssize_t)page || fsync(fd) ||
	    swapon("/dev/zram0", 0))
		tell("note no swap: /dev/zram0: %s", strerror(errno));
	if (fd >= 0)
		close(fd);
	free(head);
}

/* The value of NAME= on the kernel command line, as a path under /dev. */
static const char *port(const char *cmdline, const char *name,
			const char *otherwise)
{
	const char *word = strstr(cmdline, name);
	char *path;

	if (!word)
		return otherwise;
	word += strlen(name);
	if (asprintf(&path, "/dev/%.*s", (int)strcspn(word, " \n"), word) < 0)
		return otherwise;
	return path;
}

/* A pool that the kernel could not fill makes hugetlb tests skip: say so. */
static void check_hugetlb(const char *cmdline)
{
	const char *word = strstr(cmdline, "hugepages=");
	char *got = slurp("/proc/sys/vm/nr_hugepages", NULL);
	long want = word ? atol(word + strlen("hugepages=")) : 0;

	if (!got)
		got = "0";
	if (atol(got) < want)
		tell("note only %ld of %ld hugetlb pages", atol(got), want);
}

static int run(char **argv)
{
	pid_t pid, child = fork();
	int status = 0;

	if (!child) {
		int null, out;

		setsid();
		null = open("/dev/null", O_RDONLY);
		out = open_raw(out_tty);
		dup2(null, 0);
		dup2(out, 1);
		dup2(out, 2);
		if (null > 2)
			close(null);
		if (chdir("/run"))
			_exit(126);
		execve(argv[0], argv, environment);
		tell("note cannot run %s: %s", argv[0], strerror(errno));
		_exit(errno == ENOENT ? 127 : 126);
	}
	if (child < 0) {
		tell("note cannot fork: %s", strerror(errno));
		return 126;
	}
	/* Orphans of the programs end here too. */
	do {
		pid = waitpid(-1, &status, 0);
	} while (pid != child && !(pid < 0 && errno == ECHILD));

	return WIFSIGNALED(status) ? 128 + WTERMSIG(status)
				   : WEXITSTATUS(status);
}

/* The control message must not overtake output that is still on its way. */
static void drain(void)
{
	int fd = open_raw(out_tty);

	if (fd >= 0) {
		tcdrain(fd);
		close(fd);
	}
}

static int run_all(void)
{
	int first = 0, nr = 0;
	size_t len = 0;
	char *commands = slurp("/commands", &len);
	char *p = commands;

	if (!commands) {
		tell("note /commands is missing");
		return 126;
	}
	while (p < commands + len) {
		int status, i, argc = atoi(p);
		char **argv = calloc(argc + 1, sizeof(*argv));

		for (i = 0; i < argc; i++) {
			p += strlen(p) + 1;
			argv[i] = p;
		}
		p += strlen(p) + 1;
		tell("run %d", ++nr);
		status = run(argv);
		drain();
		tell("exit %d %d", nr, status);
		if (!first)
			first = status;
		free(argv);
	}
	return first;
}

int main(void)
{
	struct utsname uts;
	char *cmdline;
	int fd, status;

	/*
	 * The kernel opened its console for us. Its terminal may share an
	 * interrupt with the ports used here, and nothing is to be said there.
	 */
	for (fd = 0; fd < 3; fd++)
		close(fd);
	mount_all();
	open("/dev/null", O_RDWR);
	dup2(0, 1);
	dup2(0, 2);

	cmdline = slurp("/proc/cmdline", NULL);
	if (cmdline) {
		out_tty = port(cmdline, "guest.out=", out_tty);
		ctl_tty = port(cmdline, "guest.ctl=", ctl_tty);
	}
	ctl = open_raw(ctl_tty);
	uname(&uts);
	tell("init %s", uts.release);

	start_swap();
	if (cmdline)
		check_hugetlb(cmdline);
	status = run_all();

	/*
	 * Wait for a grace period: what the programs freed by RCU is looked at
	 * by the kernel's checks only then.
	 */
	syscall(__NR_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0);
	tell("done %d", status);
	tcdrain(ctl);
	sync();
	reboot(RB_POWER_OFF);
	/* No way to switch this machine off; whoever started it will. */
	for (;;)
		pause();
}
