/*
 * Blocks allocated ahead of the writer, so that files written side by side do not end up in pieces.
 *
 * Theory of operation
 * -------------------
 * A file system chooses blocks when writeback starts. Plain writers leave it a lot to choose for at once; a paced one
 * starts a window at a time, and the windows of files that are written side by side come to lie in turns. So before a
 * write that goes beyond what is allocated, fallocate(KEEP_SIZE) allocates more:
 *
 *     run ............ off ..... end ............. until
 *     [written         ][this write][allocated ahead ]
 *
 *  - As much as the file holds, from 128 MiB to 1 GiB, and up to a multiple of that, so that a file has few pieces
 *    whatever its size; where the final size is known, all of it at once.
 *  - At most a 64th of what everybody may still use, and nothing where that is below 1 MiB, so that whoever writes
 *    beside us does not run out of space because of what we might write.
 *  - First with the write that fills a window, before that is started. A smaller file has no part in any of this.
 *  - Only at the file's end. What is written inside it has its blocks, or is a hole that somebody wants.
 *
 * What is left beyond the end is released with ftruncate to the size that the file has: at close, at the end of a copy,
 * after a failure, and when a write says that there is no space. The same before a write or a truncate that leaves
 * a hole, which would otherwise have blocks; a writer that leaves holes is left alone from then on. Nothing is released
 * when the size is not the one that we know: somebody else wrote at the end, and a truncate might take bytes away. (One
 * who does so between our look and the truncate is not protected. Two who write at one file's end need O_APPEND, and
 * with that nothing is allocated.) A killed process leaves its blocks to the file, until somebody truncates it.
 *
 * Which files: those on ext4, xfs and btrfs, where it was measured to help. Not where blocks lie beyond the end already
 * (FIEMAP): they are somebody else's, and not ours to release. Only delayed allocation does not count, which is XFS's
 * own guess. Not where btrfs compresses, since it does not compress what goes to allocated blocks: neither files with
 * the flag, nor on a mount with the option, which only /proc/self/mountinfo tells.
 *
 * XFS marks a file for good that fallocate was called on: it no longer releases its own guesses beyond the end when the
 * file is closed. So we do, where what we write goes beyond what we allocated. Guesses for those who append to the file
 * later stay.
 *
 * None of this is ever an error of the data. Whatever fails ends the allocating ahead for this writer.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#include "prealloc.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/stat.h>

#include "sys.h"

#define MIB ((int64_t)1024 * 1024)
#define LEAST_STEP (128 * MIB)
#define MOST_STEP (1024 * MIB)
#define SHARE 64        /* at most this part of what is free... */
#define LEAST_SHARE MIB /* ...and nothing where that is less than this */
#define LOOK_AGAIN (16 * MIB) /* written until it may be more again */

/* statfs(2) */
#define EXT4 0xef53U
#define XFS 0x58465342U
#define BTRFS 0x9123683eU

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t down(int64_t off, int64_t unit) { return off - off % unit; }
static int64_t up(int64_t off, int64_t unit) { return down(off + unit - 1, unit); }

void pio_prealloc_init(pio_prealloc *p, int fd, int64_t expected) {
	memset(p, 0, sizeof *p);
	p->fd = fd;
	p->off = expected == 0;
	p->expected = most(expected, 0);
	p->guessed = INT64_MAX;
}

void pio_prealloc_expect(pio_prealloc *p, int64_t end) { p->expected = end; }

/* Does the mount compress, or can nobody tell? */
static int mount_compresses(int fd) {
	static const char option[] = ",compress";
	char text[4096];
	int64_t n, number = 0, mount = SYS.mount_id(fd);
	int in_number = 1, matched = 0, found = 0;
	int mounts = mount < 0 ? -1 : SYS.open("/proc/self/mountinfo", O_RDONLY);
	if (mounts < 0) return 1;
	while (option[matched] && (n = SYS.read(mounts, text, sizeof text)) > 0) {
		for (int64_t i = 0; option[matched] && i < n; i++) {
			char c = text[i];
			if (c == '\n') {
				number = 0;
				in_number = 1;
			} else if (in_number) {
				in_number = c >= '0' && c <= '9';
				if (in_number) number = number * 10 + (c - '0');
			} else if (number == mount) {
				found = 1;
				matched = c == option[matched] ? matched + 1 : c == option[0];
			}
		}
	}
	SYS.close(mounts);
	return !found || !option[matched];
}

/* May this file be allocated ahead? */
static int examine(pio_prealloc *p, const pio_status *status) {
	uint64_t type;
	pio_extent extent;
	int flags = SYS.get_flags(p->fd);
	if (flags < 0 || (flags & (O_APPEND | O_DIRECT)) || !S_ISREG(status->mode)) return 0;
	if (SYS.file_system(p->fd, &type) < 0 || (type != EXT4 && type != XFS && type != BTRFS)) return 0;

	int rc = SYS.next_extent(p->fd, up(p->end, pio_page_size()), &extent);
	if (rc < 0 || (rc > 0 && !(extent.flags & FIEMAP_EXTENT_DELALLOC))) return 0;
	p->type = type;
	if (type != BTRFS) return 1;
	flags = SYS.inode_flags(p->fd);
	return flags >= 0 && !(flags & FS_COMPR_FL) && !mount_compresses(p->fd);
}

/* Up to where to allocate for a write at `off`; `off`: nothing. */
static int64_t target(const pio_prealloc *p, int64_t off) {
	int64_t available = SYS.available(p->fd), share = available / SHARE, step = LEAST_STEP;
	if (p->expected > off && p->expected - off <= available) return p->expected;
	if (share < LEAST_SHARE || off > INT64_MAX - 3 * MOST_STEP) return off;
	while (step < MOST_STEP && step * 2 <= off) step *= 2;
	int64_t to = down(off + LEAST_SHARE, step) + step;
	return to - off <= share ? to : down(off + share, pio_page_size());
}

/* Before `len` bytes are written at `off`. */
void pio_prealloc_ahead(pio_prealloc *p, int64_t off, int64_t len, int64_t window) {
	pio_status status;
	int64_t end = off + len, run = off == p->position ? p->run : off;
	if (p->off || end <= p->next || (p->type == 0 && end - run < window)) return;
	if (SYS.status(p->fd, &status) < 0 || (p->until > 0 && status.size != (uint64_t)p->end)) {
		/* Somebody else moved the file's end, and what we allocated is now theirs. */
		p->until = 0;
		p->off = 1;
		return;
	}
	p->end = p->next = (int64_t)status.size;
	if (off < p->end || end == p->expected || (off > p->end && end > p->expected)) return;
	if (p->type == 0 && !examine(p, &status)) {
		p->off = 1;
		return;
	}
	/* What was written just before is given its blocks by the same call. btrfs would write it to others first, and
	 * wait for that. */
	int64_t from = most(p->type == BTRFS ? up(off, pio_page_size()) : run, p->until), to = target(p, off);
	if (to <= end) {
		p->next = end + LOOK_AGAIN;
		return;
	}
	p->until = p->next = to;
	if (p->type == XFS) p->guessed = to;
	if (SYS.fallocate(p->fd, FALLOC_FL_KEEP_SIZE, from, to - from) < 0) {
		/* Some of it may have been allocated. */
		pio_prealloc_release(p);
		p->off = 1;
	}
}

/* Before the file is extended from `off` on by a write, or to it by a truncate: a hole that this leaves has no blocks. */
void pio_prealloc_before(pio_prealloc *p, int64_t off) {
	if (off <= p->end || p->until <= p->end) return;
	pio_prealloc_release(p);
	p->off = 1;
}

void pio_prealloc_wrote(pio_prealloc *p, int64_t off, int64_t len) {
	if (off != p->position) p->run = off;
	p->position = off + len;
	p->end = most(p->end, p->position);
}

/* Nothing is allocated beyond the end any more. */
static void released(pio_prealloc *p) {
	p->until = 0;
	p->next = p->end;
	if (p->guessed < INT64_MAX) p->guessed = p->end;
}

/* A truncate releases what lies beyond the new end. */
void pio_prealloc_truncated(pio_prealloc *p, int64_t size) {
	p->end = size;
	released(p);
	p->position = -1; /* what lies before the next write may be a hole now */
}

/* Releases what is allocated beyond the end; 0: nothing was. */
int pio_prealloc_release(pio_prealloc *p) {
	pio_status status;
	int rc, held = p->until > up(p->end, pio_page_size()) || p->end > p->guessed;
	released(p);
	if (!held || SYS.status(p->fd, &status) < 0 || status.size != (uint64_t)p->end) return 0;
	do
		rc = SYS.ftruncate(p->fd, p->end);
	while (rc == -EINTR);
	return rc == 0;
}
