/*
 * The write loop: what window decides, carried out by an engine; statistics; failure.
 *
 * A writer holds its lock for as long as one call lasts, so that one writer may be used from many threads, and a
 * descriptor that was closed is never touched again. pio_write accepts one window at the most: the caller's signal
 * handlers run between two calls, and a writer that is stalled can be interrupted at the next window.
 *
 * The file position is the descriptor's own, and is read before each write (one cheap call for up to a window). So
 * O_APPEND, a descriptor that is shared, and a child process that wrote in between need no case of their own.
 *
 * After an error of the data the writer has failed. A wait consumes the writeback error of its descriptor, and the
 * fsync after it would succeed: so the error is kept here, every later call returns it, and nothing is tried again.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "control.h"
#include "engine.h"
#include "prealloc.h"
#include "sys.h"
#include "window.h"

#define STALL_NS 50000 /* a wait that is shorter found its window complete */

struct pio_writer {
	pthread_mutex_t lock;
	int fd;
	int started; /* the first write was made: `appends` is known */
	int appends;
	int closed;
	pio_options options;
	pio_engine engine;
	pio_window plan;
	pio_control control;
	pio_prealloc ahead;
	pio_range last;         /* the pages of the last write */
	uint64_t synced_starts; /* windows started before this many were are covered by a sync of the data */
	pio_stats stats;
};

pio_writer *pio_writer_new(int fd, const pio_options *options) {
	pio_writer *w = calloc(1, sizeof *w);
	if (!w) return NULL;
	pthread_mutex_init(&w->lock, NULL);
	w->fd = fd;
	w->options = *options;
	pio_engine_init(&w->engine, fd, !options->drop_cache, options->io_priority);
	pio_window_init(&w->plan, pio_page_size(), options->window, options->limit);
	pio_control_init(&w->control, options->limit, options->window, options->rate);
	pio_prealloc_init(&w->ahead, fd, options->engine == PIO_NONE ? 0 : options->preallocate);
	return w;
}

/* Frees the memory, and leaves the descriptor alone: it is the caller's. */
void pio_writer_free(pio_writer *w) {
	if (!w) return;
	pio_engine_close(&w->engine);
	pthread_mutex_destroy(&w->lock);
	free(w);
}

int pio_writer_fd(const pio_writer *w) { return w->fd; }

static int fail(pio_writer *w, int rc, int late) {
	if (w->stats.error == 0) {
		w->stats.error = -rc;
		w->stats.late = late;
		pio_prealloc_release(&w->ahead);
	}
	return rc;
}

/* What a call on this writer returns without further ado; 0: nothing. */
static int refusal(const pio_writer *w) {
	if (w->closed) return -EBADF;
	return -w->stats.error;
}

static int paces(const pio_writer *w) { return w->engine.kind != PIO_NONE; }

static int decided(const pio_writer *w) { return w->engine.kind != PIO_UNDECIDED; }

static int choose(pio_writer *w) {
	int rc = pio_engine_choose(&w->engine, w->options.engine, w->last);
	if (!paces(w)) pio_window_clear(&w->plan);
	return rc;
}

static int start(pio_writer *w, pio_range r) {
	if (!decided(w)) {
		int rc = choose(w);
		if (rc < 0) return rc;
	}
	if (!paces(w)) return 0;
	w->stats.windows++;
	return pio_engine_start(&w->engine, r);
}

static int wait(pio_writer *w, pio_range r) {
	uint64_t number = w->plan.starts - (uint64_t)w->plan.started_count - 1;
	if (number < w->synced_starts) return 0;

	uint64_t starts = w->plan.starts;
	int rc = pio_engine_wait(&w->engine, r, pio_window_is_dirty(&w->plan, r));
	/* A sync of the data covers every window, not only the one it was made for. */
	if (rc == 0 && w->engine.kind == PIO_DATASYNC) w->synced_starts = starts;
	return rc;
}

static int stall(pio_writer *w, pio_range r) {
	int64_t begin = SYS.now();
	int rc = wait(w, r);
	int64_t took = SYS.now() - begin;

	if (took >= STALL_NS) {
		w->stats.stalls++;
		w->stats.stall_ns += took;
		if (took > w->stats.longest_stall_ns) w->stats.longest_stall_ns = took;
	}
	return rc;
}

/* Carries out one decision of the planner; errors are of bytes that were accepted earlier. */
static int carry_out(pio_writer *w, int action, pio_range r, int (*wait_for)(pio_writer *, pio_range)) {
	int rc = 0;
	switch (action) {
	case PIO_START:
		rc = start(w, r);
		break;
	case PIO_WAIT:
		rc = wait_for(w, r);
		break;
	case PIO_DROP:
		if (w->options.drop_cache) pio_engine_drop(&w->engine, r);
		break;
	}
	return rc < 0 ? fail(w, rc, 1) : 0;
}

/* The offset at which the next write will land, or a negative errno. */
static int64_t offset(pio_writer *w) {
	if (!w->started) {
		int flags = SYS.get_flags(w->fd);
		if (flags < 0) return flags;
		w->appends = (flags & O_APPEND) != 0;
		w->started = 1;
	}
	int64_t off = SYS.lseek(w->fd, 0, w->appends ? SEEK_END : SEEK_CUR);
	if (off == -ESPIPE) {
		pio_engine_nothing_to_pace(&w->engine, PIO_NOT_A_FILE);
		return 0;
	}
	return off;
}

static int64_t make_room(pio_writer *w, int64_t off) {
	int64_t room;
	pio_range r;
	while (paces(w) && (room = pio_window_room(&w->plan, off)) == 0) {
		int action = pio_window_make_room(&w->plan, off, &r);
		int rc = carry_out(w, action, r, stall);
		if (rc < 0) return rc;
	}
	return paces(w) ? room : INT64_MAX;
}

static int keep_up(pio_writer *w) {
	pio_range r;
	int action;
	while (paces(w) && (action = pio_window_keep_up(&w->plan, &r)) != PIO_DONE) {
		int rc = carry_out(w, action, r, stall);
		if (rc < 0) return rc;
	}
	return 0;
}

/* Sleeps until the rate admits `n` bytes. -EINTR: a signal came first, and nothing was accepted. */
static int keep_rate(pio_writer *w, int64_t n) {
	if (w->control.rate == 0) return 0;
	int64_t delay = pio_control_delay(&w->control, SYS.now(), n);
	return delay > 0 ? SYS.sleep(delay) : 0;
}

static int64_t write_some(pio_writer *w, const void *buf, size_t n) {
	int64_t off = 0, most = pio_control_piece(&w->control);

	if (paces(w) && (off = offset(w)) < 0) return off;
	if (paces(w)) {
		int64_t room = make_room(w, off);
		if (room < 0) return room;
		if (room < most) most = room;
	}
	if (n > (uint64_t)most) n = (size_t)most;
	int rc = keep_rate(w, (int64_t)n);
	if (rc < 0) return rc;

	if (paces(w)) {
		pio_prealloc_before(&w->ahead, off);
		pio_prealloc_ahead(&w->ahead, off, (int64_t)n, w->plan.window);
	}
	int64_t written = pio_engine_write(&w->engine, buf, n);
	if ((written == -ENOSPC || written == -EDQUOT) && pio_prealloc_release(&w->ahead))
		written = pio_engine_write(&w->engine, buf, n);
	/* Neither is an error of the data: the one is for signal handlers, the other for non-blocking descriptors. */
	if (written == -EINTR || written == -EAGAIN) return written;
	if (written < 0) return fail(w, (int)written, 0);
	w->stats.bytes += written;
	if (w->control.rate != 0) pio_control_accepted(&w->control, SYS.now(), written);
	if (!paces(w) || written == 0) return written;

	if (w->appends) {
		int64_t end = SYS.lseek(w->fd, 0, SEEK_CUR);
		if (end >= written) off = end - written;
	}
	int64_t page = w->plan.page;
	w->last.off = off - off % page;
	w->last.len = (off + written + page - 1) / page * page - w->last.off;
	pio_window_wrote(&w->plan, off, written);
	pio_prealloc_wrote(&w->ahead, off, written);
	rc = keep_up(w);
	if (rc < 0) return rc;
	/* An engine is verified right after a write. By the time that room is made, the kernel may have written these pages
	 * back, or the caller may have truncated the file before them. */
	if (!decided(w) && pio_window_is_full(&w->plan) && (rc = choose(w)) < 0) return fail(w, rc, 1);
	return written;
}

/*
 * Writes at the descriptor's position, at most one window. Returns the bytes written (fewer than n: call again), or
 * a negative errno; -EINTR and -EAGAIN (non-blocking descriptors) may be tried again, every other error is final.
 */
int64_t pio_write(pio_writer *w, const void *buf, size_t n) {
	pthread_mutex_lock(&w->lock);
	int64_t r = refusal(w);
	if (r == 0) r = write_some(w, buf, n);
	pthread_mutex_unlock(&w->lock);
	return r;
}

int pio_truncate(pio_writer *w, int64_t size) {
	pthread_mutex_lock(&w->lock);
	int rc = refusal(w);
	if (rc == 0) pio_prealloc_before(&w->ahead, size);
	if (rc == 0) rc = SYS.ftruncate(w->fd, size);
	if (rc == 0) {
		pio_window_truncate(&w->plan, size);
		pio_prealloc_truncated(&w->ahead, size);
	}
	pthread_mutex_unlock(&w->lock);
	return rc;
}

static int finish(pio_writer *w) {
	pio_range r;
	int action;
	while ((action = pio_window_finish(&w->plan, &r)) != PIO_DONE) {
		int rc = carry_out(w, action, r, wait);
		if (rc < 0) return rc;
	}
	return 0;
}

static int sync(pio_writer *w) {
	int rc = 0;
	/* A file that never filled a window pays for the sync and nothing else. */
	int whole = !decided(w) || !paces(w) || w->engine.kind == PIO_DATASYNC;
	if (!whole) rc = finish(w);
	if (rc == 0) {
		rc = pio_engine_sync(&w->engine);
		if (rc < 0) return fail(w, rc, 1);
		if (w->engine.kind == PIO_DATASYNC) {
			w->synced_starts = UINT64_MAX;
			rc = finish(w);
			w->synced_starts = w->plan.starts;
		}
		pio_window_clear(&w->plan);
	}
	return rc;
}

/* Makes all that was written durable: starts and waits for what is left, then fdatasync. */
int pio_sync(pio_writer *w) {
	pthread_mutex_lock(&w->lock);
	int rc = refusal(w);
	if (rc == 0) {
		int64_t begin = SYS.now();
		rc = sync(w);
		w->stats.sync_ns += SYS.now() - begin;
	}
	pthread_mutex_unlock(&w->lock);
	return rc;
}

/* Gives back what is allocated ahead. To be called after the last write, before the sync that is to cover it, and before
 * the file's times are set. */
void pio_release(pio_writer *w) {
	pthread_mutex_lock(&w->lock);
	if (!w->closed) pio_prealloc_release(&w->ahead);
	pthread_mutex_unlock(&w->lock);
}

/* Whoever writes knows that the data go on to this offset of the file. */
void pio_expect(pio_writer *w, int64_t end) {
	pthread_mutex_lock(&w->lock);
	pio_prealloc_expect(&w->ahead, end);
	pthread_mutex_unlock(&w->lock);
}

/*
 * Before the descriptor is closed: starts what is left, and waits for nothing. No call touches the descriptor after this
 * one. Returns the error that the writer failed with, if any.
 */
int pio_writer_close(pio_writer *w) {
	pio_range r;
	int action;

	pthread_mutex_lock(&w->lock);
	int rc = refusal(w);
	if (decided(w) && paces(w))
		while (rc == 0 && (action = pio_window_start_rest(&w->plan, &r)) != PIO_DONE)
			rc = carry_out(w, action, r, stall);
	if (!w->closed) pio_prealloc_release(&w->ahead);
	w->closed = 1;
	pio_engine_close(&w->engine);
	pthread_mutex_unlock(&w->lock);
	return rc;
}

void pio_writer_stats(pio_writer *w, pio_stats *out) {
	pthread_mutex_lock(&w->lock);
	*out = w->stats;
	out->in_flight = paces(w) ? w->plan.dirty_bytes + w->plan.started_bytes : 0;
	out->most_in_flight = paces(w) ? w->plan.most_in_flight : 0;
	out->limit = w->control.limit;
	out->verified_dirty_pages = w->engine.verified_dirty_pages;
	out->engine = w->engine.kind;
	out->reason = w->engine.reason;
	out->reason_errno = w->engine.reason_errno;
	pthread_mutex_unlock(&w->lock);
}
