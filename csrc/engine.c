/*
 * Start, wait and drop on this file system, and how an engine is chosen and verified.
 *
 * Theory of operation
 * -------------------
 * sync_file_range may be missing, forbidden, or succeed and do nothing, and no documentation says where. So an engine
 * is verified, not assumed, on the first window of a writer on a mount that this process has not seen: cachestat must
 * find dirty pages right after a write and none after the wait.
 *
 *  - No pages right after a buffered write: they are cached in another file's mapping (overlayfs and other stacked file
 *    systems), and only advice reaches them, if a mapping of the file shows them: `advise`. Else `datasync`.
 *  - Pages, but clean ones: the write went through to somebody else's cache (FUSE and its like), which only a sync
 *    reaches: `datasync`.
 *  - Pages still dirty after a wait, and after a thorough one: the call lies here.
 *
 * "Right after" matters: what a slow producer wrote an hour ago was written back by the kernel long since. So the
 * pages of the last write are looked at, not the whole window.
 *
 *  - No cachestat (before Linux 6.5, or not permitted): the file system's type decides.
 *
 * A call that fails with one of the errors by which kernels say "not here" (move_down_on) moves the writer to the
 * next engine down, once, with the reason kept. Every other error is one of the data, and the writer's to keep.
 *
 * Verdicts are kept for each mount and engine as long as the process lives. The key is the unique mount id (Linux
 * 6.8), else mount id and device number together, since plain mount ids are reused.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "sys.h"

/* Measured (benchmarks/results): see docs/architecture.md, Engines. */
#define BEST PIO_RANGE

/* sync_file_range(2); the names are missing from the headers of some libcs. */
#define START 2U
#define WAIT_BEFORE 1U
#define WAIT_AFTER 4U

/* statfs(2) */
#define TMPFS 0x01021994U
#define RAMFS 0x858458f6U
#define HUGETLBFS 0x958458f6U
#define OVERLAYFS 0x794c7630U
#define ZFS 0x2fc12fc1U
#define FUSE 0x65735546U

#define POLL_NS 500000        /* between two pieces of advice */
#define PATIENCE_NS 100000000 /* until advised pages that stay are synced */
#define FIRST_STAY 16         /* windows that are synced at once thereafter */
#define MOST_STAY 1024

static int move_down_on(int error) {
	switch (error) {
	case ENOSYS:
	case EINVAL:
	case ESPIPE:
	case EOPNOTSUPP:
	case EPERM:
		return 1;
	default:
		return 0;
	}
}

/* ---- verdicts ------------------------------------------------------------------------------------------------ */

#define MOUNTS 64

enum { UNKNOWN, WORKS, FAILS };

typedef struct verdict {
	uint64_t mount, device, type;
	unsigned char of[PIO_NONE + 1];
	unsigned char reason[PIO_NONE + 1];
	int reason_errno[PIO_NONE + 1];
} verdict;

static verdict verdicts[MOUNTS];
static unsigned int verdicts_made;
static pthread_mutex_t verdicts_lock = PTHREAD_MUTEX_INITIALIZER;

static verdict *find_verdict(const pio_engine *e) {
	for (unsigned int i = 0; i < MOUNTS && i < verdicts_made; i++) {
		verdict *v = &verdicts[i];
		if (v->mount == e->mount && v->device == e->device && v->type == e->type) return v;
	}
	return NULL;
}

/* Both only try the lock: a child forked while another thread held it would wait for ever, and whoever does not get
 * it merely verifies once more. */
static int recall(const pio_engine *e, int kind, int *reason, int *reason_errno) {
	int known = UNKNOWN;
	if (pthread_mutex_trylock(&verdicts_lock) != 0) return UNKNOWN;
	const verdict *v = find_verdict(e);
	if (v) {
		known = v->of[kind];
		*reason = v->reason[kind];
		*reason_errno = v->reason_errno[kind];
	}
	pthread_mutex_unlock(&verdicts_lock);
	return known;
}

static void remember(const pio_engine *e, int kind, int known, int reason, int reason_errno) {
	if (pthread_mutex_trylock(&verdicts_lock) != 0) return;
	verdict *v = find_verdict(e);
	if (!v) {
		v = &verdicts[verdicts_made++ % MOUNTS];
		memset(v, 0, sizeof *v);
		v->mount = e->mount;
		v->device = e->device;
		v->type = e->type;
	}
	v->of[kind] = (unsigned char)known;
	v->reason[kind] = (unsigned char)reason;
	v->reason_errno[kind] = reason_errno;
	pthread_mutex_unlock(&verdicts_lock);
}

/* ---- choosing ------------------------------------------------------------------------------------------------ */

void pio_engine_init(pio_engine *e, int fd, int keep_cache, int io_priority) {
	memset(e, 0, sizeof *e);
	e->fd = fd;
	e->keep_cache = keep_cache;
	e->io_priority = io_priority;
	e->mapping_fd = -1;
	e->verified_dirty_pages = -1;
}

void pio_engine_close(pio_engine *e) {
	if (e->mapping_fd >= 0 && e->mapping_fd != e->fd) SYS.close(e->mapping_fd);
	e->mapping_fd = -1;
}

int pio_engine_nothing_to_pace(pio_engine *e, int reason) {
	e->kind = PIO_NONE;
	e->reason = reason;
	return 0;
}

/* `advise` looks at a mapping of the file, which needs a readable descriptor. A second one serves: errors of the data
 * are reported to the first, which stays open. */
static int open_mapping(pio_engine *e) {
	char path[32];
	int flags = SYS.get_flags(e->fd);

	if (e->mapping_fd >= 0) return 1;
	if (flags >= 0 && (flags & O_ACCMODE) == O_RDWR) {
		e->mapping_fd = e->fd;
		return 1;
	}
	snprintf(path, sizeof path, "/proc/self/fd/%d", e->fd);
	e->mapping_fd = SYS.open(path, O_RDONLY | O_NOCTTY | O_NONBLOCK);
	return e->mapping_fd >= 0;
}

/* Takes engine `kind`, or the next one down that this mount and descriptor allow. */
static void take(pio_engine *e, int kind, int reason, int reason_errno) {
	for (;; kind++) {
		int why, how, known = recall(e, kind, &why, &how);
		if (kind >= PIO_DATASYNC) break;
		if (known == FAILS) {
			reason = why;
			reason_errno = how;
			continue;
		}
		if (e->keep_cache && (kind == PIO_ADVISE || kind == PIO_UNCACHED)) {
			reason = PIO_KEEP_CACHE;
			reason_errno = 0;
			continue;
		}
		if (kind == PIO_ADVISE && !open_mapping(e)) {
			reason = PIO_NO_MAPPING;
			reason_errno = -e->mapping_fd;
			e->mapping_fd = -1;
			continue;
		}
		e->verified = known == WORKS;
		break;
	}
	e->kind = kind;
	e->reason = reason;
	e->reason_errno = reason_errno;
}

static void move_down(pio_engine *e, int reason, int reason_errno) {
	remember(e, e->kind, FAILS, reason, reason_errno);
	take(e, e->kind + 1, reason, reason_errno);
}

/* Counts the pages of a range; the most that was seen in flight is kept for the caller's statistics. */
static int count_pages(pio_engine *e, pio_range r, pio_pages *pages) {
	int rc = SYS.cachestat(e->fd, r.off, r.len, pages);
	if (rc < 0) return rc;
	if (!e->verified) {
		int64_t seen = (int64_t)(pages->dirty + pages->writeback);
		if (seen > e->verified_dirty_pages) e->verified_dirty_pages = seen;
	}
	return 0;
}

/* Is any page of the range resident in the file's mapping? Negative errno where nobody can tell. */
static int is_resident(const pio_engine *e, pio_range r) {
	unsigned char vec[4096];
	int64_t page = pio_page_size(), piece = page * (int64_t)sizeof vec;
	void *address;

	for (int64_t off = r.off; off < r.off + r.len; off += piece) {
		int64_t len = r.off + r.len - off < piece ? r.off + r.len - off : piece;
		int rc = SYS.mmap(e->mapping_fd, off, (size_t)len, &address);
		if (rc < 0) return rc;
		rc = SYS.mincore(address, (size_t)len, vec);
		SYS.munmap(address, (size_t)len);
		if (rc < 0) return rc;
		for (int64_t i = 0; i < (len + page - 1) / page; i++)
			if (vec[i] & 1) return 1;
	}
	return 0;
}

/* Finds out, right after `last` was written, whether engine e->kind can work here. */
static void verify_write(pio_engine *e, pio_range last, int flags) {
	pio_pages pages;

	if (e->type == ZFS) { /* counts nothing and maps nothing that a plain write touched */
		if (e->kind < PIO_DATASYNC) take(e, PIO_DATASYNC, PIO_KNOWN_TYPE, 0);
		return;
	}
	if (e->kind == PIO_DATASYNC) return;
	e->counts = count_pages(e, last, &pages) == 0;
	if (e->verified) return;
	if (!e->counts) {
		if (e->type == OVERLAYFS && e->kind < PIO_ADVISE) take(e, PIO_ADVISE, PIO_KNOWN_TYPE, 0);
		if (e->type == FUSE && e->kind < PIO_DATASYNC) take(e, PIO_DATASYNC, PIO_KNOWN_TYPE, 0);
		return;
	}
	if (pages.cached == 0) {
		while (e->kind < PIO_ADVISE) move_down(e, PIO_STACKED, 0);
		if (e->kind == PIO_ADVISE && is_resident(e, last) == 0) move_down(e, PIO_STACKED, 0);
	} else if (pages.dirty + pages.writeback == 0 && !(flags & O_DSYNC)) {
		while (e->kind < PIO_DATASYNC) move_down(e, PIO_WRITTEN_THROUGH, 0);
	}
}

/*
 * Chooses the engine, `last` being the pages that were written a moment ago. 0, or the error of a call that says that
 * the descriptor itself is bad.
 */
int pio_engine_choose(pio_engine *e, int asked, pio_range last) {
	pio_status status;
	int rc = SYS.status(e->fd, &status);
	if (rc < 0) return rc;

	int flags = SYS.get_flags(e->fd);
	if (flags < 0) return flags;
	if (!S_ISREG(status.mode) && !S_ISBLK(status.mode)) return pio_engine_nothing_to_pace(e, PIO_NOT_A_FILE);
	if (flags & O_DIRECT) return pio_engine_nothing_to_pace(e, PIO_DIRECT);
	if (S_ISREG(status.mode)) {
		/* A block device's node lies on devtmpfs, whose type says nothing. */
		if (SYS.file_system(e->fd, &e->type) < 0) e->type = 0;
		if (e->type == TMPFS || e->type == RAMFS || e->type == HUGETLBFS)
			return pio_engine_nothing_to_pace(e, PIO_MEMORY);
	}
	if (asked == PIO_NONE) return pio_engine_nothing_to_pace(e, PIO_ASKED);

	e->mount = status.mount;
	e->device = (uint64_t)status.dev_major << 32 | status.dev_minor;
	if (asked == PIO_AUTO || asked == BEST)
		take(e, BEST, PIO_BEST, 0);
	else
		take(e, asked, PIO_ASKED, 0);
	verify_write(e, last, flags);
	return 0;
}

/* ---- start, wait, drop, sync ----------------------------------------------------------------------------------- */

/* The I/O class is the submitting thread's: it is set around what submits, and put back. */
static int enter_class(const pio_engine *e) {
	if (e->io_priority == 0) return -1;
	int before = SYS.ioprio_get();
	if (before >= 0) SYS.ioprio_set(e->io_priority);
	return before;
}

static void leave_class(const pio_engine *e, int before) {
	if (e->io_priority != 0 && before >= 0) SYS.ioprio_set(before);
}

static int sync_range(const pio_engine *e, pio_range r, unsigned int flags) {
	int rc;
	do
		rc = SYS.sync_file_range(e->fd, r.off, r.len, flags);
	while (rc == -EINTR);
	return rc;
}

static int advise_gone(const pio_engine *e, pio_range r) {
	int rc = SYS.fadvise(e->fd, r.off, r.len, POSIX_FADV_DONTNEED);
	return rc == -EINTR ? 0 : rc; /* it is repeated anyway */
}

static int sync_data(const pio_engine *e) {
	int rc;
	do
		rc = SYS.fdatasync(e->fd);
	while (rc == -EINTR);
	return rc;
}

static int start_once(const pio_engine *e, pio_range r) {
	switch (e->kind) {
	case PIO_UNCACHED: /* the write started it, but for what was written before this engine was chosen */
	case PIO_RANGE:
		return sync_range(e, r, START);
	case PIO_ADVISE:
		return advise_gone(e, r);
	default:
		return 0;
	}
}

/*
 * Waits for a started range. WAIT_BEFORE submits nothing; all three flags write out what is dirty as synchronous I/O
 * that competes with neighbours (kernel commit c553ea4fdf27), so they come only where dirty pages remain or nobody can
 * tell.
 */
static int wait_range(pio_engine *e, pio_range r, int written_again) {
	pio_pages pages;
	int rc = sync_range(e, r, WAIT_BEFORE);
	if (rc < 0) return rc;
	/* What was written again since its start has a start and a wait of its own to come. */
	if (written_again) return 0;

	/* btrfs with compression hands pages to the block layer in two steps and may need two rounds. */
	for (int round = 0; round < 3; round++) {
		if (e->counts) {
			rc = count_pages(e, r, &pages);
			if (rc < 0)
				e->counts = 0;
			else if (pages.dirty + pages.writeback == 0)
				break;
		}
		rc = sync_range(e, r, WAIT_BEFORE | START | WAIT_AFTER);
		if (rc < 0 || !e->counts) return rc;
	}
	if (e->verified) return 0;
	rc = count_pages(e, r, &pages);
	if (rc == 0 && pages.dirty > 0) {
		move_down(e, PIO_STAYED_DIRTY, 0);
		return 0;
	}
	e->verified = 1;
	remember(e, e->kind, WORKS, PIO_BEST, 0);
	return 0;
}

/* A sync of the data of one range; msync(MS_SYNC) hands it to the file that really caches the pages. */
static int sync_mapped(const pio_engine *e, pio_range r) {
	void *address;
	int rc = SYS.mmap(e->mapping_fd, r.off, (size_t)r.len, &address);
	if (rc < 0) return rc;
	rc = SYS.msync(address, (size_t)r.len);
	SYS.munmap(address, (size_t)r.len);
	return rc;
}

/*
 * Repeats the advice until the pages are gone: the first starts their writeback, a later one drops them once that
 * completed.
 *
 * Some pages never go: those that others map or pin, those in a large folio that lies across the window's edge (in a
 * file that was cached before), and, to those who may not write the file, all, since mincore then shows each as resident
 * (Linux 5.2). They are synced instead, after some patience for a slow device. Where one window stayed the next will,
 * so the windows after it are synced at once: first a few, more each time.
 */
static int wait_advised(pio_engine *e, pio_range r) {
	int64_t give_up = SYS.now() + PATIENCE_NS;
	for (;;) {
		int rc = advise_gone(e, r);
		if (rc < 0) return rc;
		rc = is_resident(e, r);
		if (rc < 0) {
			move_down(e, PIO_CALL_FAILED, -rc);
			return 0;
		}
		if (rc == 0) {
			if (!e->verified) remember(e, PIO_ADVISE, WORKS, PIO_BEST, 0);
			e->verified = 1;
			e->staying = e->stayed = 0;
			return 0;
		}
		if (e->staying > 0) {
			e->staying--;
			break;
		}
		if (SYS.now() >= give_up) {
			e->stayed = e->stayed == 0 ? FIRST_STAY : e->stayed < MOST_STAY ? e->stayed * 2 : MOST_STAY;
			e->staying = e->stayed;
			break;
		}
		SYS.sleep(POLL_NS);
	}
	return sync_mapped(e, r);
}

static int wait_once(pio_engine *e, pio_range r, int written_again) {
	switch (e->kind) {
	case PIO_UNCACHED:
	case PIO_RANGE:
		return wait_range(e, r, written_again);
	case PIO_ADVISE:
		return wait_advised(e, r);
	case PIO_DATASYNC:
		return sync_data(e);
	default:
		return 0;
	}
}

/* 0, or the error of the data. Engines move down on the way. */
int pio_engine_start(pio_engine *e, pio_range r) {
	int before = enter_class(e), rc;
	while ((rc = start_once(e, r)) < 0 && e->kind < PIO_DATASYNC && move_down_on(-rc))
		move_down(e, PIO_CALL_FAILED, -rc);
	leave_class(e, before);
	return rc;
}

/* Likewise. `written_again`: parts of the range are dirty again since its start. */
int pio_engine_wait(pio_engine *e, pio_range r, int written_again) {
	int before = enter_class(e), rc, kind;
	do {
		kind = e->kind;
		rc = wait_once(e, r, written_again);
		if (rc < 0 && kind < PIO_DATASYNC && move_down_on(-rc)) {
			if (e->kind == kind) move_down(e, PIO_CALL_FAILED, -rc);
			rc = 0;
		}
		/* The engine below has not started this window yet, and its wait does that where it matters. */
	} while (rc == 0 && e->kind != kind);
	leave_class(e, before);
	return rc;
}

/* Advice is never fatal: what stays cached is clean. */
void pio_engine_drop(pio_engine *e, pio_range r) {
	if (e->kind != PIO_ADVISE) SYS.fadvise(e->fd, r.off, r.len, POSIX_FADV_DONTNEED);
}

int pio_engine_sync(pio_engine *e) {
	int before = enter_class(e);
	int rc = sync_data(e);
	leave_class(e, before);
	if (rc == -EINVAL || rc == -EROFS) {
		/* Pipes, terminals and the like have nothing to sync, which is not the caller's fault. */
		pio_status status;
		if (SYS.status(e->fd, &status) == 0 && !S_ISREG(status.mode) && !S_ISBLK(status.mode)) return 0;
	}
	return rc;
}

/* One write call at the descriptor's offset; the bytes written or a negative errno. */
int64_t pio_engine_write(pio_engine *e, const void *buf, size_t n) {
	if (e->kind == PIO_UNCACHED) {
		int before = enter_class(e);
		int64_t r = SYS.write_uncached(e->fd, buf, n);
		leave_class(e, before);
		if (r >= 0 || !move_down_on((int)-r)) return r;
		move_down(e, PIO_CALL_FAILED, (int)-r);
	}
	return SYS.write(e->fd, buf, n);
}
