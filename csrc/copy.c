/*
 * From one descriptor to another: extents, holes, reading ahead, dropping behind.
 *
 * Theory of operation
 *
 * One thread at a time writes: whoever calls pio_copy_step. A writer that waits for its windows keeps the device busy
 * with at most `limit` bytes, so reading has to go on meanwhile, and one read at a time does not keep a fast device
 * busy either. Several reader threads therefore fill a ring of buffers, in order of the file:
 *
 *     issued - 1 ...... taken
 *     [filling][ready][filling][ready] -> pio_write, holes -> lseek
 *
 * A reader takes the next free slot and the next piece of the file under the lock, reads without the lock, and marks
 * the slot ready. The step waits until the oldest slot is ready and writes it. Errors and the end of the file travel
 * through the ring as well, so what precedes them in the file is written first. Without reader threads (a small file,
 * no threads to be had, a source that has no offsets) the step reads by itself.
 *
 * The page cache of the source is left as it was found. A piece of which no page is resident is read with O_DIRECT
 * through a second descriptor, which touches no page. Otherwise, or where O_DIRECT does not work, it is read through
 * the cache, and those of its pages that were not resident before are dropped after it. What was resident "before"
 * must be asked before the kernel reads ahead of us, so it is asked for a whole region ahead. Where mincore does not
 * tell (resident.c) nothing is dropped.
 *
 * Holes are asked for one extent at a time while going (SEEK_DATA, SEEK_HOLE), never listed in advance: they move
 * while a file is written to. An answer that is out of date costs a hole or copies a moment's state of the file, as
 * any copy of a changing file does.
 *
 * A source that shrinks ends the copy where a read found its end. A source that grows is followed to its new end
 * again and again, as long as it grew by at most half of what was copied meanwhile; so a copy ends, after at most
 * twice the size that it found, however fast the source grows. Pipes, devices and files of size 0 (/proc) are read
 * until the end, whenever that comes, as cp does.
 *
 * The size is believed only so far: cp reads until the end, and file systems exist (some of FUSE) whose files hold more
 * than they say. So the last piece begins where the size ends, is read to see that nothing is there, and is followed by
 * another one if it was full.
 *
 * Whoever waits for a source that hangs must still hear of signals: a step never waits longer than PATIENCE_NS for the
 * readers. On FUSE, where reads are answered by a program that may never do so, there is always one, and O_DIRECT is not
 * used: the kernel waits for it so that not even SIGKILL ends the wait.
 *
 * After fork(2) the child has no reader threads: there pio_copy_step fails and pio_copy_free joins nobody.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHUNK ((int64_t)512 * 1024)        /* one read; the pieces end where multiples of it end */
#define REGION ((int64_t)16 * 1024 * 1024) /* asked for residency at once; more than any readahead */
#define LEAST_PAGE 4096
#define FUSE 0x65735546 /* statfs(2) */
#define PATIENCE_NS ((int64_t)100 * 1000 * 1000)
#define MOST_READERS 64

typedef struct slot {
	unsigned char *buffer; /* holds the source from the page that `at` is in */
	int64_t at;
	int64_t len; /* of the hole, or wanted */
	int64_t filled; /* so far, of the buffer */
	int64_t got;    /* bytes of `len` that were read, fewer only at the source's end; or a negative errno */
	int hole;
	int64_t extent; /* its end, as far as is known */
	int beyond; /* what the size says */
	int cached; /* some of its pages were resident */
	int ready;
	unsigned char before[CHUNK / LEAST_PAGE];
} slot;

struct pio_copy {
	pio_writer *writer;
	int source;
	int target;
	int buffered; /* the source, or a descriptor of our own for it; only it is seeked and read through the cache */
	int direct;   /* with O_DIRECT, or -1 */
	int streaming;
	int fuse;
	int process;
	int error; /* of pio_copy_new; 0: none */
	int source_failed;
	int64_t page;

	/* The step's. */
	int64_t start;   /* where in the target the source's first byte goes */
	int64_t copied;  /* from there, holes included */
	int64_t written; /* of the oldest slot */
	int ends_in_hole;
	int finished;

	/* The readers', under the lock. */
	int known;  /* whether mincore tells */
	int sparse; /* whether to look for holes */
	int64_t next;
	int64_t end; /* as far as is known */
	int64_t lap; /* how far the end moved when it was last looked at */
	int64_t extent_end;
	int64_t region; /* number of the region that `resident` begins with, -1: none yet */
	unsigned char resident[2 * REGION / LEAST_PAGE];

	pthread_mutex_t lock;
	pthread_cond_t filled;
	pthread_cond_t room;
	uint64_t issued; /* slots handed out to readers so far; number n is slots[n % slot_count] */
	uint64_t taken;  /* and done with */
	int exhausted;   /* there is no next piece */
	int stop;
	int threads;
	int slot_count;
	slot *slots;
	pthread_t readers[MOST_READERS];
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t down(int64_t off, int64_t unit) { return off - off % unit; }

/* ---- what to read next ---- */

static int64_t source_size(const pio_copy *c) {
	pio_status status;
	int error = SYS.status(c->source, &status);
	return error < 0 ? error : (int64_t)status.size;
}

/* Follows a source that grew; see above. */
static int another_lap(pio_copy *c) {
	int64_t growth = source_size(c) - c->end;
	if (growth <= 0 || growth > c->lap / 2) return 0;
	c->lap = growth;
	c->end += growth;
	return 1;
}

static void look_at_region(pio_copy *c, int64_t region, unsigned char *resident) {
	int64_t off = region * REGION, len = least(REGION, c->end - off);
	/* What is not known counts as resident: nothing of it is dropped. */
	memset(resident, 1, (size_t)(REGION / c->page));
	if (len > 0 && pio_resident(c->source, off, len, resident) < 0)
		memset(resident, 1, (size_t)(REGION / c->page));
}

/* Drops what pieces could not drop by themselves: pages that the kernel read ahead all the same, since it came upon the
 * mark of somebody else's readahead, were still under I/O, or belong to a folio that reaches past the piece. */
static void drop_region(const pio_copy *c, int64_t region, const unsigned char *resident) {
	pio_resident_drop(c->source, region * REGION, REGION, resident);
}

/* Notes which pages of a piece were resident before the copy came near it. */
static void note_residency(pio_copy *c, slot *s) {
	int64_t region = s->at / REGION, pages = REGION / c->page;
	int64_t first = s->at / c->page, count = pio_resident_pages(s->at, s->len);
	if (c->region != region) {
		if (c->region >= 0) drop_region(c, c->region, c->resident);
		if (c->region >= 0 && c->region + 1 == region)
			memcpy(c->resident, c->resident + pages, (size_t)pages);
		else
			look_at_region(c, region, c->resident);
		look_at_region(c, region + 1, c->resident + pages);
		c->region = region;
	}
	memcpy(s->before, c->resident + (first - region * pages), (size_t)count);
	s->cached = memchr(s->before, 1, (size_t)count) != NULL;
}

/* Where data begin at or after `next`, at most at the end; finds the end of their extent. */
static int64_t next_data(pio_copy *c) {
	int64_t data = SYS.lseek(c->buffered, c->next, SEEK_DATA);
	if (data == -ENXIO) {
		/* A hole up to the end, which may have come nearer. */
		int64_t size = source_size(c);
		if (size < c->end) c->end = size > c->next ? size : c->next;
		return c->end;
	}
	if (data < 0) {
		c->sparse = 0;
		return c->next;
	}
	if (data == c->next) {
		int64_t hole = SYS.lseek(c->buffered, c->next, SEEK_HOLE);
		/* Nothing moved on: the data have gone since. Read them as they are now. */
		c->extent_end = hole > c->next ? hole : c->next + CHUNK;
	}
	return least(data, c->end);
}

/* Describes the next piece of the source in `s`; 0 at the end. */
static int next_piece(pio_copy *c, slot *s) {
	do {
		while (c->next < c->end) {
			int64_t end = c->end, data = c->next;
			if (c->sparse && c->next >= c->extent_end) data = next_data(c);
			s->at = c->next;
			s->hole = data > c->next;
			s->beyond = 0;
			s->cached = 0;
			if (s->hole) {
				end = data;
			} else {
				if (c->sparse) end = least(c->extent_end, c->end);
				end = least(end, down(c->next, CHUNK) + CHUNK);
			}
			s->extent = c->sparse ? least(c->extent_end, c->end) : c->end;
			s->len = end - s->at;
			if (s->len <= 0) break; /* the end came nearer */
			if (!s->hole && c->known) note_residency(c, s);
			c->next = end;
			return 1;
		}
	} while (another_lap(c));
	if (source_size(c) > c->next) return 0; /* it grows faster than it is followed */
	s->at = c->next;
	s->len = down(c->next, CHUNK) + CHUNK - c->next;
	s->extent = 0;
	s->hole = 0;
	s->beyond = 1;
	c->next += s->len;
	c->end = c->next;
	return 1;
}

/* ---- reading ---- */

static int unsupported(int64_t error) {
	return error == -EINVAL || error == -EOPNOTSUPP || error == -ENOSYS || error == -EPERM;
}

/* Reads a piece and leaves the page cache as it was. Reads whole pages, as O_DIRECT needs it; the file may end in the
 * midst of one. Where a signal came (`got` is -EINTR) the next call goes on. */
static void fill(const pio_copy *c, slot *s) {
	int64_t from = down(s->at, c->page), skip = s->at - from, got = s->filled;
	int64_t want = down(skip + s->len + c->page - 1, c->page);
	int fd = s->cached || s->beyond || c->direct < 0 ? c->buffered : c->direct;
	while (got < skip + s->len) {
		int64_t r = SYS.pread(fd, s->buffer + got, (size_t)(want - got), from + got);
		if (r == -EINTR) {
			s->filled = got;
			s->got = r;
			return;
		}
		if (fd == c->direct && unsupported(r)) {
			/* Also where O_DIRECT read in part and cannot go on from there. */
			fd = c->buffered;
			continue;
		}
		if (r < 0) {
			got = r;
			break;
		}
		if (r == 0) break;
		got += r;
	}
	/* Also after O_DIRECT: of compressed files btrfs reads through the cache then. */
	if (c->known && !s->beyond) pio_resident_drop(c->source, s->at, s->len, s->before);
	if (got >= 0) got = got < skip ? 0 : least(got - skip, s->len);
	s->got = got;
}

/* The slot to read into next, described; NULL when there is nothing left to read. Under the lock. */
static slot *issue(pio_copy *c) {
	slot *s = &c->slots[c->issued % (uint64_t)c->slot_count];
	if (c->exhausted || !next_piece(c, s)) {
		c->exhausted = 1;
		return NULL;
	}
	s->ready = s->hole;
	s->filled = s->beyond ? s->at % c->page : 0; /* and the page that the size ends in stays alone */
	c->issued++;
	return s;
}

static void *reader(void *argument) {
	pio_copy *c = argument;
	pthread_mutex_lock(&c->lock);
	for (;;) {
		slot *s;
		while (!c->stop && !c->exhausted && c->issued - c->taken == (uint64_t)c->slot_count)
			pthread_cond_wait(&c->room, &c->lock);
		if (c->stop || !(s = issue(c))) break;
		if (!s->hole) {
			pthread_mutex_unlock(&c->lock);
			do fill(c, s);
			while (s->got == -EINTR);
			pthread_mutex_lock(&c->lock);
			s->ready = 1;
			if (s->got < s->len) c->exhausted = 1;
		}
		pthread_cond_signal(&c->filled);
	}
	pthread_cond_signal(&c->filled);
	pthread_cond_broadcast(&c->room); /* the others have nothing left to do either */
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* ---- the step ---- */

/* The oldest slot, once it is ready, in `*out`; NULL at the end. -EINTR: signal handlers are to run, then call again. */
static int oldest(pio_copy *c, slot **out) {
	slot *s = &c->slots[c->taken % (uint64_t)c->slot_count];
	int error = 0;
	if (c->threads == 0) {
		if (c->issued == c->taken) s = issue(c);
		if (s && !s->ready) {
			fill(c, s);
			if (s->got == -EINTR) return -EINTR;
			s->ready = 1;
		}
	} else {
		int64_t until = SYS.now() + PATIENCE_NS;
		struct timespec deadline = {
			.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
		pthread_mutex_lock(&c->lock);
		while (error == 0 && !(c->issued > c->taken ? s->ready : c->exhausted))
			error = pthread_cond_timedwait(&c->filled, &c->lock, &deadline);
		if (c->issued == c->taken) s = NULL;
		pthread_mutex_unlock(&c->lock);
		if (error) return -EINTR;
	}
	*out = s;
	return 0;
}

static void done_with_oldest(pio_copy *c) {
	c->written = 0;
	pthread_mutex_lock(&c->lock);
	c->taken++;
	pthread_cond_signal(&c->room);
	pthread_mutex_unlock(&c->lock);
}

/* A device may take nothing and call it no error; from the step, 0 would mean the end. */
static int64_t write_some(pio_copy *c, const unsigned char *bytes, int64_t count) {
	int64_t n = pio_write(c->writer, bytes, (size_t)count);
	return n == 0 ? -ENOSPC : n;
}

/* Copies a source that has no offsets, or says that it is empty. */
static int64_t stream(pio_copy *c) {
	slot *s = c->slots;
	int64_t n;
	if (c->written == s->got) {
		n = SYS.read(c->source, s->buffer, (size_t)CHUNK);
		if (n < 0 && n != -EINTR) c->source_failed = 1;
		if (n <= 0) return n;
		s->got = n;
		c->written = 0;
	}
	n = write_some(c, s->buffer + c->written, s->got - c->written);
	if (n > 0) c->written += n;
	return n;
}

static int64_t skip_hole(pio_copy *c, const slot *s) {
	int64_t len = s->len, r = SYS.lseek(c->target, c->start + c->copied + len, SEEK_SET);
	if (r < 0) return r;
	c->copied += len;
	c->ends_in_hole = 1;
	done_with_oldest(c);
	return len;
}

static int64_t write_data(pio_copy *c, const slot *s) {
	if (!s->beyond) pio_expect(c->writer, c->start + s->extent);
	int64_t n = write_some(c, s->buffer + s->at % c->page + c->written, s->got - c->written);
	if (n < 0) return n;
	c->ends_in_hole = 0;
	c->copied += n;
	c->written += n;
	if (c->written == s->got) {
		c->finished = s->got < s->len;
		done_with_oldest(c);
	}
	return n;
}

static int64_t finish(pio_copy *c) {
	c->finished = 1;
	if (c->ends_in_hole) {
		int error = pio_truncate(c->writer, c->start + c->copied);
		if (error < 0) return error;
		c->ends_in_hole = 0;
	}
	pio_release(c->writer);
	return 0;
}

/* Copies on: at most one window or one hole. Returns by how many bytes, 0 at the end, or a negative errno, after which
 * pio_copy_source_failed says whose it is; -EINTR means that a signal may have come and that the call is to be
 * repeated. */
int64_t pio_copy_step(pio_copy *c) {
	slot *s = NULL;
	if (c->error) return c->error;
	if (c->process != SYS.process()) return -ECHILD;
	if (c->streaming) return stream(c);
	if (!c->finished && oldest(c, &s) < 0) return -EINTR;
	if (!s) return finish(c);
	if (s->hole) return skip_hole(c, s);
	if (s->got < 0) {
		c->source_failed = 1;
		return s->got;
	}
	return s->got == 0 ? finish(c) : write_data(c, s);
}

int pio_copy_source_failed(const pio_copy *c) { return c->source_failed; }

/* ---- beginning and end ---- */

static int open_again(int fd, int flags) {
	char path[32];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	return SYS.open(path, O_RDONLY | flags);
}

/* A hole can be left where the target has nothing yet and can be written at any offset. */
static int can_leave_holes(const pio_copy *c) {
	pio_status status;
	int flags = SYS.get_flags(c->target);
	return c->start >= 0 && flags >= 0 && !(flags & O_APPEND) && SYS.status(c->target, &status) == 0 &&
	       S_ISREG(status.mode) && (uint64_t)c->start >= status.size;
}

static void open_source(pio_copy *c, int sparse) {
	pio_status status;
	uint64_t magic;
	int flags = SYS.get_flags(c->source);
	c->error = flags < 0 ? flags : SYS.status(c->source, &status);
	/* A descriptor that may not be read would be opened again for reading below. */
	if (c->error == 0 && ((flags & O_ACCMODE) == O_WRONLY || (flags & O_PATH))) c->error = -EBADF;
	if (c->error < 0) {
		c->source_failed = 1;
		return;
	}
	c->streaming = !S_ISREG(status.mode) || status.size == 0 || status.size > INT64_MAX;
	if (c->streaming) {
		int64_t r = SYS.lseek(c->source, 0, SEEK_SET);
		if (r < 0 && r != -ESPIPE) {
			c->error = (int)r;
			c->source_failed = 1;
		}
		return;
	}
	c->end = c->lap = (int64_t)status.size;
	c->start = SYS.lseek(c->target, 0, SEEK_CUR);
	c->sparse = sparse && status.blocks * 512 < status.size && can_leave_holes(c);
	c->known = pio_resident_known(c->source);
	c->fuse = SYS.file_system(c->source, &magic) == 0 && magic == FUSE;
	if (!c->fuse) c->direct = open_again(c->source, O_DIRECT);
	c->buffered = open_again(c->source, 0);
	if (c->buffered < 0)
		c->buffered = c->source;
	else
		/* Exactly the pages asked for: others could be told from what was resident before only by luck. The
		 * caller's own descriptor is left as it is. */
		SYS.fadvise(c->buffered, 0, 0, POSIX_FADV_RANDOM);
}

static void start_readers(pio_copy *c, int readers) {
	sigset_t all, before;
	/* Signals are for the threads that know what to do with them. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	while (c->threads < readers && pthread_create(&c->readers[c->threads], NULL, reader, c) == 0) c->threads++;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Prepares to copy what `source` holds, from its beginning, to the position of the writer's descriptor. `readers`: the
 * most threads that read ahead. `sparse`: leave holes where the source has some. NULL: no memory. Whatever else fails
 * is told by the first step. The two descriptors and the writer stay the caller's. */
pio_copy *pio_copy_new(int source, pio_writer *w, int readers, int sparse) {
	pio_copy *c = calloc(1, sizeof *c);
	pthread_condattr_t monotonic;
	int64_t chunks;
	if (!c) return NULL;
	c->writer = w;
	c->source = c->buffered = source;
	c->target = pio_writer_fd(w);
	c->direct = -1;
	c->process = SYS.process();
	c->page = pio_page_size();
	c->region = -1;
	pthread_mutex_init(&c->lock, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&c->filled, &monotonic);
	pthread_condattr_destroy(&monotonic);
	pthread_cond_init(&c->room, NULL);
	open_source(c, sparse);
	/* A single piece is read by the step: no thread could be ahead of it. */
	chunks = (c->end + CHUNK - 1) / CHUNK;
	if ((chunks <= 1 && !c->fuse) || readers < 0) readers = 0;
	readers = (int)least(least(readers, MOST_READERS), chunks);
	c->slot_count = readers ? 2 * readers : 1;
	c->slots = calloc((size_t)c->slot_count, sizeof *c->slots);
	if (!c->slots) goto failed;
	for (int i = 0; i < c->slot_count; i++) {
		void *buffer;
		if (posix_memalign(&buffer, (size_t)c->page, (size_t)CHUNK) != 0) goto failed;
		c->slots[i].buffer = buffer;
	}
	start_readers(c, readers);
	return c;
failed:
	pio_copy_free(c);
	return NULL;
}

/* Ends the reader threads, after the reads that they are in, and releases everything. */
void pio_copy_free(pio_copy *c) {
	if (!c) return;
	/* In a forked child the lock may be held by a thread that does not exist there. */
	if (c->process == SYS.process()) {
		pthread_mutex_lock(&c->lock);
		c->stop = 1;
		pthread_cond_broadcast(&c->room);
		pthread_mutex_unlock(&c->lock);
		for (int i = 0; i < c->threads; i++) pthread_join(c->readers[i], NULL);
		if (c->region >= 0) {
			drop_region(c, c->region, c->resident);
			drop_region(c, c->region + 1, c->resident + REGION / c->page);
		}
		pthread_cond_destroy(&c->room);
		pthread_cond_destroy(&c->filled);
		pthread_mutex_destroy(&c->lock);
	}
	if (c->buffered != c->source) SYS.close(c->buffered);
	if (c->direct >= 0) SYS.close(c->direct);
	for (int i = 0; c->slots && i < c->slot_count; i++) free(c->slots[i].buffer);
	free(c->slots);
	free(c);
}
