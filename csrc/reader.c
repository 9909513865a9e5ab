/*
 * Reads a file ahead, and leaves the page cache as it found it.
 *
 * The file is looked at in windows, aligned ranges of a fixed length. Before a window can be touched, by a read or
 * by reading ahead, it is recorded: which of its pages are resident. Once the position has moved past it, the pages
 * that were not resident are dropped. The recorded windows are neighbours, from the one that holds the position up
 * to a window more than what is asked for from the kernel: a file system that brings in more than it was asked for
 * (btrfs reads whole compressed extents) still touches recorded pages only.
 *
 * The kernel's own readahead would run past the recorded windows, so it is turned off for the descriptor
 * (POSIX_FADV_RANDOM) and asked for by window instead (POSIX_FADV_WILLNEED). How far ahead grows with the run of
 * bytes read in sequence, as it does in the kernel: a reader that hops about the file is not made to read megabytes
 * for every hop. A seek out of the recorded windows drops them and begins anew.
 *
 * Most files that are read are small and resident. These cost one statx and one cachestat more than a plain read:
 * where cachestat counts every page of a window, there is nothing to record, nothing to ask for and nothing to drop.
 * A smaller count proves nothing (it is zero on overlayfs), and mincore has to say.
 *
 * Reads are read(2) at the descriptor's position, which is asked for every time: the position is shared with whoever
 * else holds the descriptor, as it is with io.FileIO. What cannot be recorded (pipes, terminals, files in /proc,
 * others' files, of which the kernel does not say what is resident) is read plainly, and nothing is dropped.
 *
 * Limits: pages that others bring in between our record and our drop are dropped too, if nobody has them mapped.
 * The drop at a seek or at close waits for what is still being read ahead, since a page under I/O cannot be dropped.
 */
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>

typedef struct recorded {
	int64_t read_to;       /* from the window's start up to here, the window was read */
	int asked;             /* WILLNEED was given */
	int resident;          /* every page was: `before` is not filled in */
	unsigned char *before; /* a byte a page, 1: was resident */
} recorded;

struct pio_reader {
	int fd;
	int process;
	pthread_mutex_t lock;
	int plain;      /* nothing is recorded */
	int known;      /* mincore was seen to tell the truth of this file */
	int advised;    /* the kernel's own readahead is off */
	int64_t window; /* bytes */
	int64_t ahead;  /* bytes, the most to read ahead */
	int64_t size;   /* of the file, when last asked */
	int64_t run;    /* where the run of sequential reads began */
	int64_t next;   /* where it would go on; -1: nothing was read yet */
	int64_t begin;  /* of the first recorded window */
	int first;      /* its index in windows[] */
	int count;
	int capacity;
	recorded windows[];
};

static recorded *window_at(pio_reader *r, int i) { return &r->windows[(r->first + i) % r->capacity]; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Waits until no page of the window that we asked for is still under I/O. Pages that were read are not. */
static void settle(pio_reader *r, const recorded *w, int64_t off) {
	int64_t page = pio_page_size(), end = least(off + r->window, r->size);
	char byte;
	if (!w->asked) return;
	for (int64_t at = w->read_to - w->read_to % page; at < end; at += page)
		if (!w->before[(at - off) / page]) SYS.pread(r->fd, &byte, 1, at);
}

static void drop_first(pio_reader *r) {
	recorded *w = window_at(r, 0);
	if (!w->resident) {
		settle(r, w, r->begin);
		pio_resident_drop(r->fd, r->begin, r->window, w->before);
	}
	r->first = (r->first + 1) % r->capacity;
	r->begin += r->window;
	r->count--;
}

static void drop_all(pio_reader *r) {
	while (r->count > 0) drop_first(r);
}

static void drop_passed(pio_reader *r, int64_t pos) {
	while (r->count > 0 && r->begin + r->window <= pos) drop_first(r);
}

/* Gives up recording: drops what was recorded and leaves reading ahead to the kernel. */
static void be_plain(pio_reader *r) {
	drop_all(r);
	if (r->advised) SYS.fadvise(r->fd, 0, 0, POSIX_FADV_NORMAL);
	r->plain = 1;
}

/* Records the window behind the recorded ones. */
static int record(pio_reader *r) {
	int64_t off = r->begin + r->count * r->window, len = least(r->window, r->size - off);
	int64_t pages = pio_resident_pages(off, len), found;
	recorded *w = window_at(r, r->count);
	pio_pages cached;
	int error = SYS.cachestat(r->fd, off, len, &cached);
	w->read_to = off;
	w->asked = 0;
	w->resident = error == 0 && cached.cached >= (uint64_t)pages;
	if (!w->resident) {
		/* Who may not ask cachestat may not ask mincore (can_do_cachestat, can_do_mincore). */
		if (error == -EPERM) return error;
		if (!r->known && !(r->known = pio_resident_known(r->fd))) return -EPERM;
		/* The whole window, also past the end of a file that may grow. */
		found = pio_resident(r->fd, off, r->window, w->before);
		if (found < 0) return (int)found;
		w->resident = found == pio_resident_pages(off, r->window);
	}
	r->count++;
	return 0;
}

/* Asks for the size. Returns whether the file can be recorded. */
static int look(pio_reader *r) {
	pio_status status;
	if (SYS.status(r->fd, &status) < 0 || !S_ISREG(status.mode)) {
		be_plain(r);
		return 0;
	}
	r->size = (int64_t)status.size;
	return 1;
}

/* Records and asks for what a read of `n` bytes at `pos` is about to touch. Returns how many of them to read now. */
static int64_t prepare(pio_reader *r, int64_t pos, int64_t n) {
	int64_t end, reach;
	/* At the end as last seen, a read is expected to find nothing; if it does, the next one asks again. */
	if (pos == r->size && pos > 0) return n;
	if (n > r->size - pos && !look(r)) return n;
	if (pos >= r->size) return n;
	if (pos < r->begin) drop_all(r);
	drop_passed(r, pos);
	if (r->count == 0) r->begin = pos - pos % r->window;
	if (pos != r->next) r->run = pos;
	reach = pos + least(n + 2 * (pos - r->run), r->ahead);
	end = least(reach + r->window, r->size);
	while (r->begin + r->count * r->window < end) {
		if (record(r) < 0) {
			be_plain(r);
			return n;
		}
		if (!r->advised && (r->begin + r->count * r->window < r->size || !window_at(r, r->count - 1)->resident)) {
			SYS.fadvise(r->fd, 0, 0, POSIX_FADV_RANDOM);
			r->advised = 1;
		}
	}
	/* A first small read may well be the only one. */
	if (pos > r->run || n > r->window / 8) {
		for (int i = 0; i < r->count && r->begin + i * r->window < reach; i++) {
			recorded *w = window_at(r, i);
			if (w->asked || w->resident) continue;
			SYS.fadvise(r->fd, r->begin + i * r->window, r->window, POSIX_FADV_WILLNEED);
			w->asked = 1;
		}
	}
	return least(n, r->window - pos % r->window);
}

static void note(pio_reader *r, int64_t pos, int64_t got) {
	r->next = pos + got;
	for (int i = 0; i < r->count; i++) {
		recorded *w = window_at(r, i);
		if (pos <= w->read_to && w->read_to < r->next) w->read_to = least(r->next, r->begin + (i + 1) * r->window);
	}
	drop_passed(r, r->next);
}

static int64_t read_recorded(pio_reader *r, char *buf, int64_t n, int64_t pos) {
	int64_t done = 0;
	while (done < n) {
		int64_t part = r->plain ? n - done : prepare(r, pos, n - done);
		int64_t got = SYS.read(r->fd, buf + done, (size_t)part);
		if (got < 0) return done > 0 ? done : got; /* the next read meets the error again */
		if (!r->plain) note(r, pos, got);
		pos += got;
		done += got;
		if (got < part) break;
	}
	return done;
}

/* Reads up to `n` bytes at the descriptor's position and moves it. Returns how many, 0 at the end, or a negative
 * errno: -EINTR so that the caller may run signal handlers, -EAGAIN where nothing is there yet. Fewer than `n` only
 * where read(2) gave fewer. What several threads read of a file are whole pieces of it, as read(2) gives them. */
int64_t pio_read(pio_reader *r, void *buf, size_t n) {
	int64_t pos, got = 0;
	/* In a forked child whose parent was reading, nobody would unlock it. */
	if (pthread_mutex_trylock(&r->lock) != 0) {
		if (r->process != SYS.process()) return SYS.read(r->fd, buf, n);
		pthread_mutex_lock(&r->lock);
	}
	pos = r->plain ? -1 : SYS.lseek(r->fd, 0, SEEK_CUR);
	if (pos < 0 && !r->plain) be_plain(r); /* a pipe */
	if (!r->plain) got = read_recorded(r, buf, n < INT64_MAX / 4 ? (int64_t)n : INT64_MAX / 4, pos);
	pthread_mutex_unlock(&r->lock);
	/* Not under the lock: this may wait for whoever writes to the pipe. */
	return pos < 0 ? SYS.read(r->fd, buf, n) : got;
}

/* How many bytes there are up to the end of the file, as far as that is known: 0 for a pipe, or in /proc. */
int64_t pio_left(pio_reader *r) {
	int64_t left = 0;
	if (pthread_mutex_trylock(&r->lock) != 0) return 0;
	if (!r->plain && look(r)) left = r->size - SYS.lseek(r->fd, 0, SEEK_CUR);
	pthread_mutex_unlock(&r->lock);
	return left > 0 ? left : 0;
}

/* `window` is made a whole number of pages; `ahead` is at most how many bytes are asked for from the kernel ahead of
 * the position, and at least a window. The descriptor stays the caller's. NULL: no memory. */
pio_reader *pio_reader_new(int fd, int64_t window, int64_t ahead) {
	int64_t page = pio_page_size(), pages = window > page ? (window + page - 1) / page : 1;
	/* The windows that hold the position and the end of what is asked for, those between, and one more. */
	int64_t capacity = (ahead > pages * page ? ahead / (pages * page) : 1) + 3;
	size_t head = sizeof(pio_reader) + (size_t)capacity * sizeof(recorded);
	pio_reader *r = calloc(1, head + (size_t)(capacity * pages));
	if (r == NULL) return NULL;
	r->fd = fd;
	r->window = pages * page;
	r->ahead = ahead > r->window ? ahead : r->window;
	r->next = -1;
	r->capacity = (int)capacity;
	r->process = SYS.process();
	pthread_mutex_init(&r->lock, NULL);
	for (int64_t i = 0; i < capacity; i++) r->windows[i].before = (unsigned char *)r + head + i * pages;
	return r;
}

/* Drops what was read ahead and what was read last. To be called while the descriptor is still open; reads are -EBADF
 * afterwards. */
void pio_reader_close(pio_reader *r) {
	if (pthread_mutex_trylock(&r->lock) == 0) {
		be_plain(r);
		pthread_mutex_unlock(&r->lock);
	}
	r->fd = -1;
}

void pio_reader_free(pio_reader *r) {
	if (!r) return;
	pthread_mutex_destroy(&r->lock);
	free(r);
}
