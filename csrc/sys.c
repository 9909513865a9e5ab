/*
 * The only code that makes system calls: one table entry a call, each returning its result or a negative errno.
 *
 * Calls go through libc and never through syscall(2) where libc has them: on 32-bit ARM and PowerPC the kernel
 * takes the arguments of sync_file_range and posix_fadvise in another order. posix_fadvise returns its error and
 * leaves errno alone.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#include "sys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Newer than the headers that the library must build with: all architectures share the number (Linux 6.5), the
 * flag (6.14) and the statx bits (5.8, 6.8). */
#ifndef __NR_cachestat
#define __NR_cachestat 451
#endif
#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif
#ifndef STATX_MNT_ID
#define STATX_MNT_ID 0x1000U
#endif
#ifndef STATX_MNT_ID_UNIQUE
#define STATX_MNT_ID_UNIQUE 0x4000U
#endif

#define IOPRIO_WHO_PROCESS 1

/* More than this is cut short by the kernel anyway (MAX_RW_COUNT); asking for no more keeps 32-bit size_t and
 * ssize_t apart. */
#define MOST_BYTES ((size_t)0x7ffff000)

static size_t at_most(size_t n) { return n < MOST_BYTES ? n : MOST_BYTES; }

static int64_t result(int64_t r) { return r < 0 ? -(int64_t)errno : r; }

static int status_of(int r) { return r < 0 ? -errno : r; }

static int64_t sys_read(int fd, void *buf, size_t n) { return result(read(fd, buf, at_most(n))); }

static int64_t sys_pread(int fd, void *buf, size_t n, int64_t off) {
	return result(pread(fd, buf, at_most(n), (off_t)off));
}

static int64_t sys_write(int fd, const void *buf, size_t n) { return result(write(fd, buf, at_most(n))); }

static int64_t sys_write_uncached(int fd, const void *buf, size_t n) {
	/* iovec has no const form; pwritev2 only reads. */
	union {
		const void *in;
		void *out;
	} base = {.in = buf};
	struct iovec vector = {.iov_base = base.out, .iov_len = at_most(n)};
	return result(pwritev2(fd, &vector, 1, (off_t)-1, RWF_DONTCACHE));
}

static int64_t sys_lseek(int fd, int64_t off, int whence) { return result(lseek(fd, (off_t)off, whence)); }

static int sys_ftruncate(int fd, int64_t size) { return status_of(ftruncate(fd, (off_t)size)); }

static int sys_sync_file_range(int fd, int64_t off, int64_t len, unsigned int flags) {
	return status_of(sync_file_range(fd, (off_t)off, (off_t)len, flags));
}

static int sys_fadvise(int fd, int64_t off, int64_t len, int advice) {
	return -posix_fadvise(fd, (off_t)off, (off_t)len, advice);
}

static int sys_fdatasync(int fd) { return status_of(fdatasync(fd)); }

static int sys_cachestat(int fd, int64_t off, int64_t len, pio_pages *out) {
	struct {
		uint64_t off, len;
	} range = {(uint64_t)off, (uint64_t)len};
	return status_of((int)syscall(__NR_cachestat, fd, &range, out, 0U));
}

static int sys_mmap(int fd, int64_t off, size_t len, void **out) {
	void *address = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, (off_t)off);
	if (address == MAP_FAILED) return -errno;
	*out = address;
	return 0;
}

static int sys_munmap(void *addr, size_t len) { return status_of(munmap(addr, len)); }

static int sys_msync(void *addr, size_t len) { return status_of(msync(addr, len, MS_SYNC)); }

static int sys_mincore(void *addr, size_t len, unsigned char *vec) { return status_of(mincore(addr, len, vec)); }

static int sys_open(const char *path, int flags) { return status_of(open(path, flags | O_CLOEXEC)); }

static int sys_close(int fd) { return status_of(close(fd)); }

static int sys_get_flags(int fd) { return status_of(fcntl(fd, F_GETFL)); }

static void status_from(const struct stat *s, pio_status *out) {
	out->mode = s->st_mode;
	out->size = (uint64_t)s->st_size;
	out->blocks = (uint64_t)s->st_blocks;
	out->inode = s->st_ino;
	out->dev_major = major(s->st_dev);
	out->dev_minor = minor(s->st_dev);
	out->rdev_major = major(s->st_rdev);
	out->rdev_minor = minor(s->st_rdev);
	out->mount = 0;
	out->user = s->st_uid;
}

/* Container runtimes forbid with EPERM what is newer than they are. (libc itself does without where it is ENOSYS.) */
static int status_without_statx(int fd, pio_status *out) {
	struct stat s;
	if (fstat(fd, &s) < 0) return -errno;
	status_from(&s, out);
	return 0;
}

static int sys_status(int fd, pio_status *out) {
	struct statx s;
	memset(&s, 0, sizeof s);
	/* Kernels ignore mask bits that they do not know, and report in stx_mask what they filled in. */
	if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_MNT_ID | STATX_MNT_ID_UNIQUE, &s) < 0)
		return errno == EPERM ? status_without_statx(fd, out) : -errno;
	out->mode = s.stx_mode;
	out->size = s.stx_size;
	out->blocks = s.stx_blocks;
	out->inode = s.stx_ino;
	out->dev_major = s.stx_dev_major;
	out->dev_minor = s.stx_dev_minor;
	out->rdev_major = s.stx_rdev_major;
	out->rdev_minor = s.stx_rdev_minor;
	out->user = s.stx_uid;
	out->mount = 0;
	if (s.stx_mask & (STATX_MNT_ID | STATX_MNT_ID_UNIQUE)) {
#ifdef STATX_ATTR_MOUNT_ROOT
		out->mount = s.stx_mnt_id;
#endif
	}
	return 0;
}

static int sys_file_system(int fd, uint64_t *magic) {
	struct statfs s;
	if (fstatfs(fd, &s) < 0) return -errno;
	*magic = (uint64_t)s.f_type & 0xffffffffU; /* f_type is a signed 32-bit number on some architectures */
	return 0;
}

static int64_t sys_available(int fd) {
	struct statfs s;
	if (fstatfs(fd, &s) < 0) return -(int64_t)errno;
	uint64_t blocks = s.f_bavail, block = (uint64_t)s.f_frsize;
	return block > 0 && blocks > INT64_MAX / block ? INT64_MAX : (int64_t)(blocks * block);
}

static int sys_fallocate(int fd, int mode, int64_t off, int64_t len) {
	return status_of(fallocate(fd, mode, (off_t)off, (off_t)len));
}

static int sys_next_extent(int fd, int64_t off, pio_extent *out) {
	union {
		struct fiemap map;
		unsigned char room[sizeof(struct fiemap) + sizeof(struct fiemap_extent)];
	} u;
	memset(&u, 0, sizeof u);
	u.map.fm_start = (uint64_t)off;
	u.map.fm_length = FIEMAP_MAX_OFFSET - (uint64_t)off;
	u.map.fm_extent_count = 1;
	if (ioctl(fd, FS_IOC_FIEMAP, &u.map) < 0) return -errno;
	if (u.map.fm_mapped_extents == 0) return 0;
	struct fiemap_extent first;
	memcpy(&first, u.room + sizeof(struct fiemap), sizeof first);
	out->off = (int64_t)first.fe_logical;
	out->len = (int64_t)first.fe_length;
	out->flags = first.fe_flags;
	return 1;
}

static int sys_inode_flags(int fd) {
	int flags = 0; /* the kernel writes an int, whatever the request's number says */
	if (ioctl(fd, FS_IOC_GETFLAGS, &flags) < 0) return -errno;
	return flags & INT_MAX;
}

static int64_t sys_mount_id(int fd) {
#ifdef STATX_ATTR_MOUNT_ROOT
	struct statx s;
	memset(&s, 0, sizeof s);
	if (statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &s) < 0) return -errno;
	if (s.stx_mask & STATX_MNT_ID) return (int64_t)s.stx_mnt_id;
#else
	(void)fd;
#endif
	return -ENOSYS;
}

static int sys_ioprio_get(void) { return status_of((int)syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0)); }

static int sys_ioprio_set(int priority) {
	return status_of((int)syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, priority));
}

static int64_t sys_now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int sys_sleep(int64_t ns) {
	struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
	return status_of(nanosleep(&t, NULL));
}

static int sys_process(void) { return (int)getpid(); }

static unsigned int sys_user(void) { return geteuid(); }

static int sys_path_status(const char *path, pio_status *out) {
	struct stat s;
	if (lstat(path, &s) < 0) return -errno;
	status_from(&s, out);
	return 0;
}

static int sys_make_directory(const char *path, unsigned int mode) { return status_of(mkdir(path, (mode_t)mode)); }

static int sys_open_or_create(const char *path, unsigned int mode) {
	return status_of(open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, (mode_t)mode));
}

static int sys_map_shared(int fd, size_t len, void **out) {
	void *address = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (address == MAP_FAILED) return -errno;
	*out = address;
	return 0;
}

static int sys_only_entry(const char *directory, char *name, size_t size) {
	DIR *listing = opendir(directory);
	const struct dirent *entry;
	int count = 0;
	if (!listing) return -errno;
	while (count < 2 && (entry = readdir(listing)))
		if (entry->d_name[0] != '.' && count++ == 0) snprintf(name, size, "%s", entry->d_name);
	closedir(listing);
	return count;
}

/* Locks of the open file, not of the process: they survive a close of another descriptor of the file. */
static int sys_lock(int fd, int64_t byte, int take) {
	struct flock lock = {.l_type = take ? F_WRLCK : F_UNLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
	return status_of(fcntl(fd, F_OFD_SETLK, &lock));
}

static int sys_is_locked(int fd, int64_t byte) {
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
	return fcntl(fd, F_OFD_GETLK, &lock) < 0 ? -errno : lock.l_type != F_UNLCK;
}

static int sys_futex_wait(uint32_t *word, uint32_t value, int64_t ns) {
	struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
	return status_of((int)syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0));
}

static int sys_futex_wake(uint32_t *word) {
	return status_of((int)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0));
}

pio_sys pio_sys_table = {
	.read = sys_read,
	.pread = sys_pread,
	.write = sys_write,
	.write_uncached = sys_write_uncached,
	.lseek = sys_lseek,
	.ftruncate = sys_ftruncate,
	.sync_file_range = sys_sync_file_range,
	.fadvise = sys_fadvise,
	.fdatasync = sys_fdatasync,
	.cachestat = sys_cachestat,
	.mmap = sys_mmap,
	.munmap = sys_munmap,
	.msync = sys_msync,
	.mincore = sys_mincore,
	.open = sys_open,
	.close = sys_close,
	.get_flags = sys_get_flags,
	.status = sys_status,
	.file_system = sys_file_system,
	.available = sys_available,
	.fallocate = sys_fallocate,
	.next_extent = sys_next_extent,
	.inode_flags = sys_inode_flags,
	.mount_id = sys_mount_id,
	.ioprio_get = sys_ioprio_get,
	.ioprio_set = sys_ioprio_set,
	.now = sys_now,
	.sleep = sys_sleep,
	.process = sys_process,
	.user = sys_user,
	.path_status = sys_path_status,
	.make_directory = sys_make_directory,
	.open_or_create = sys_open_or_create,
	.map_shared = sys_map_shared,
	.only_entry = sys_only_entry,
	.lock = sys_lock,
	.is_locked = sys_is_locked,
	.futex_wait = sys_futex_wait,
	.futex_wake = sys_futex_wake,
};

int64_t pio_page_size(void) {
	static int64_t size; /* sysconf(3) is no system call, but not free either */
	if (size == 0) size = (int64_t)sysconf(_SC_PAGESIZE);
	return size;
}
