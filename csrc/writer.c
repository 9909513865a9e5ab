/*
 * The write loop: what window decides, carried out by an engine; statistics; failure.
 *
 * A writer holds `call` for as long as one call lasts, so that one writer may be used from many threads, and a descriptor
 * that was closed is never touched again. What is in flight is under `lock`, which is given up while the writer waits for
 * its turn: others who need room then wait for its windows (device.c). pio_write accepts one window at the most: the
 * caller's signal handlers run between two calls, and a writer that is stalled can be interrupted at the next window.
 *
 * A writer whose limit follows the device joins it when it is about to have written more than JOIN_AT: until then its file
 * may be a small one, which pays for nothing.
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
#include <sys/stat.h>

#include "control.h"
#include "device.h"
#include "engine.h"
#include "prealloc.h"
#include "sys.h"
#include "window.h"

#define STALL_NS 50000   /* a wait that is shorter found its window complete */
#define BLOCKED_NS 20000 /* one that is longer tells when its window completed */

#define KIB ((int64_t)1024)
#define JOIN_AT (128 * KIB)
/* Of a writer that follows no device: before it joins, and where the engine's waits do not tell when a window completed. */
#define WINDOW (512 * KIB)
#define LIMIT (2048 * KIB)

#define AGAIN 1

struct pio_writer {
	pthread_mutex_t call;
	pthread_mutex_t lock;
	int fd;
	int started; /* the first write was made: `appends` is known */
	int appends;
	int closed;
	pio_options options;
	pio_engine engine;
	pio_window plan;
	pio_rate rate;
	int64_t reserved; /* bytes, of the rate of all writers to the device, for what is written next */
	int64_t ready_at; /* when they are due */
	pio_prealloc ahead;
	pio_range last;         /* the pages of the last write */
	uint64_t synced_starts; /* windows started before this many were are covered by a sync of the data */
	pio_member member;
	int follows;       /* the device, once it has joined */
	pio_stamp *stamps; /* of the started windows; number n is stamps[n % PIO_WINDOWS] */
	pio_stats stats;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- the device ---- */

/* Tells the device what is in flight by now. */
static void settle(pio_writer *w) {
	const pio_window *p = &w->plan;
	if (!w->member.device) return;
	/* A window that was started before the writer joined has no stamp, and is older than all others. */
	int64_t oldest = p->started_count ? most(w->stamps[(p->starts - (uint64_t)p->started_count) % PIO_WINDOWS].started, 1) : 0;
	pio_device_settle(&w->member, p->dirty_bytes + p->started_bytes, p->dirty_bytes, oldest);
}

/* Takes over what the device's controller says by now. */
static void adapt(pio_writer *w) {
	if (!pio_device_has(&w->member)) return; /* in a forked child as well: window and limit stay */
	w->plan.window = pio_device_window(&w->member);
	w->plan.limit = most(pio_device_limit(&w->member), w->plan.window);
	if (!w->options.polite) return;
	int64_t rate = pio_device_rate(&w->member), asked = w->options.rate;
	pio_rate_set(&w->rate, w->plan.window, rate && asked ? least(rate, asked) : most(rate, asked));
}

static pio_writer *writer_of(pio_member *m) {
	return (pio_writer *)(void *)((char *)m - offsetof(pio_writer, member));
}

static void join(pio_writer *w) {
	pio_status status;
	if (SYS.status(w->fd, &status) < 0) return; /* the write will tell */
	w->stamps = calloc(PIO_WINDOWS, sizeof *w->stamps);
	if (!w->stamps) return;
	w->member.lock = &w->lock;
	w->member.limit = w->options.limit;
	w->member.window = w->options.window;
	w->member.polite = w->options.polite;
	/* A block device is written itself, wherever its node is. */
	uint32_t major = S_ISBLK(status.mode) ? status.rdev_major : status.dev_major;
	uint32_t minor = S_ISBLK(status.mode) ? status.rdev_minor : status.dev_minor;
	if (pio_device_join(&w->member, major, minor, w->options.share) < 0) {
		free(w->stamps);
		w->stamps = NULL;
		w->follows = 0; /* the limit stays what it is before joining */
		return;
	}
	pio_device_enter(&w->member);
	settle(w);
}

static void leave(pio_writer *w) {
	pio_device_stats(&w->member, &w->stats);
	pio_device_leave(&w->member);
	free(w->stamps);
	w->stamps = NULL;
	w->follows = 0;
}

pio_writer *pio_writer_new(int fd, const pio_options *options) {
	pio_writer *w = calloc(1, sizeof *w);
	if (!w) return NULL;
	pthread_mutex_init(&w->call, NULL);
	pthread_mutex_init(&w->lock, NULL);
	w->fd = fd;
	w->options = *options;
	w->follows = options->limit == 0 || options->polite;
	int64_t window = options->window ? options->window : WINDOW;
	pio_engine_init(&w->engine, fd, !options->drop_cache, options->io_priority);
	pio_window_init(&w->plan, pio_page_size(), window, options->limit ? options->limit : most(LIMIT, window));
	pio_rate_set(&w->rate, window, options->rate);
	pio_prealloc_init(&w->ahead, fd, options->engine == PIO_NONE ? 0 : options->preallocate);
	return w;
}

/* Frees the memory, and leaves the descriptor alone: it is the caller's. */
void pio_writer_free(pio_writer *w) {
	if (!w) return;
	if (pio_device_has(&w->member)) {
		/* Others may be looking after its windows. */
		pthread_mutex_lock(&w->lock);
		leave(w);
		pthread_mutex_unlock(&w->lock);
	}
	free(w->stamps);
	pio_engine_close(&w->engine);
	pthread_mutex_destroy(&w->lock);
	pthread_mutex_destroy(&w->call);
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

/* A sync of the data for each window is no pipe: the more is synced at once, the faster it is. No limit is least there.
 * Only at the end of a writer's own call: in one, it may be asleep among the device's. */
static void stop_following(pio_writer *w) {
	if (!w->follows || !decided(w) || (paces(w) && w->engine.kind != PIO_DATASYNC)) return;
	leave(w);
	w->plan.window = w->options.window ? w->options.window : WINDOW;
	w->plan.limit = w->options.limit ? w->options.limit : most(LIMIT, w->plan.window);
	pio_rate_set(&w->rate, w->plan.window, w->options.rate);
}

static int start(pio_writer *w, pio_range r) {
	uint64_t number = w->plan.starts - 1;
	if (!decided(w)) {
		int rc = choose(w);
		if (rc < 0) return rc;
	}
	if (!paces(w)) return 0;
	w->stats.windows++;
	if (w->stamps) pio_device_started(&w->member, SYS.now(), r.len, &w->stamps[number % PIO_WINDOWS]);
	return pio_engine_start(&w->engine, r);
}

/* Waits for the window that was popped last, and returns in `*took` how long that was. */
static int wait(pio_writer *w, pio_range r, int64_t *took) {
	uint64_t number = w->plan.starts - (uint64_t)w->plan.started_count - 1;
	uint64_t starts = w->plan.starts;
	int rc = 0;

	*took = 0;
	if (number >= w->synced_starts) {
		int64_t begin = SYS.now();
		rc = pio_engine_wait(&w->engine, r, pio_window_is_dirty(&w->plan, r));
		int64_t now = SYS.now();
		*took = now - begin;
		/* A sync of the data covers every window, not only the one it was made for. */
		if (rc == 0 && w->engine.kind == PIO_DATASYNC) w->synced_starts = starts;
		if (w->stamps && rc == 0 && w->stamps[number % PIO_WINDOWS].started)
			pio_device_completed(&w->member, now, &w->stamps[number % PIO_WINDOWS],
					     *took >= BLOCKED_NS ? *took : 0);
	}
	return rc;
}

/* Carries out one decision of the planner; errors are of bytes that were accepted earlier. Who is stalled by a wait is
 * `stalled`, or nobody. */
static int carry_out(pio_writer *w, int action, pio_range r, pio_stats *stalled) {
	int64_t took = 0;
	int rc = 0;
	switch (action) {
	case PIO_START:
		rc = start(w, r);
		break;
	case PIO_WAIT:
		rc = wait(w, r, &took);
		break;
	case PIO_DROP:
		if (w->options.drop_cache) pio_engine_drop(&w->engine, r);
		break;
	}
	if (stalled && took >= STALL_NS) {
		stalled->stalls++;
		stalled->stall_ns += took;
		stalled->longest_stall_ns = most(stalled->longest_stall_ns, took);
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
	int64_t room = 0;
	pio_range r;
	while (paces(w) && (room = pio_window_room(&w->plan, off)) == 0) {
		int action = pio_window_make_room(&w->plan, off, &r);
		int rc = carry_out(w, action, r, &w->stats);
		if (rc < 0) return rc;
	}
	return paces(w) ? room : INT64_MAX;
}

static int keep_up(pio_writer *w) {
	pio_range r;
	int action;
	while (paces(w) && (action = pio_window_keep_up(&w->plan, &r)) != PIO_DONE) {
		int rc = carry_out(w, action, r, &w->stats);
		if (rc < 0) return rc;
	}
	return 0;
}

/* One step towards less in flight: waits for the oldest window, or starts what is dirty. 0: there was nothing to do. */
static int relieve(pio_writer *w, pio_stats *stalled) {
	pio_range r;
	int done = w->plan.dirty_count > 0 || w->plan.started_count > 0;
	if (!paces(w) || refusal(w) != 0) {
		pio_window_clear(&w->plan); /* nobody will ever wait for it */
	} else if (done) {
		int action = pio_window_make_room(&w->plan, w->plan.position, &r);
		if (carry_out(w, action, r, stalled) == 0) keep_up(w);
	}
	settle(w);
	return done;
}

/* Asks the device for room for `n` of the `room` bytes that the writer's own limit leaves. 0; AGAIN if the writer's windows may
 * have changed meanwhile; or an error. */
static int admit(pio_writer *w, int64_t off, int64_t n, int64_t room) {
	int64_t page = w->plan.page, counted = pio_window_counted(&w->plan, off);
	int idle = 0;
	pio_member *whom;

	if (n <= counted || pio_device_granted(&w->member, (n - counted + page - 1) / page * page)) return 0;
	int64_t need = (room - counted + page - 1) / page * page;
	for (;;) {
		int answer = pio_device_ask(&w->member, need, idle, &whom);
		if (answer == PIO_GRANTED) return 0;
		if (answer == PIO_RELIEVE && whom == &w->member) {
			idle = !relieve(w, &w->stats);
			if (!idle) return AGAIN;
			continue;
		}
		pthread_mutex_unlock(&w->lock);
		pio_device_let_go(&w->member);
		int rc = AGAIN;
		if (answer == PIO_RELIEVE) {
			pio_writer *other = writer_of(whom);
			relieve(other, &w->stats);
			pthread_mutex_unlock(&other->lock);
			pio_device_let_go(&w->member);
		} else if (pio_device_sleep(&w->member) < 0) {
			rc = -EINTR;
		}
		pthread_mutex_lock(&w->lock);
		return rc;
	}
}

/* A polite writer's rate is its own, together with the one that the caller asked for; others share theirs. */
static int is_evened(const pio_writer *w) { return !w->options.polite && pio_device_rate(&w->member) != 0; }

/* Sleeps until the rate admits `n` bytes. -EINTR: a signal came first, and nothing was accepted. Who sleeps for its own sake
 * must not hold up others: they get its grant, and may look after its windows. */
static int keep_rate(pio_writer *w, int64_t n) {
	int64_t now = SYS.now(), delay = pio_rate_delay(&w->rate, now, n);
	if (!is_evened(w)) {
		w->ready_at = w->reserved = 0;
	} else if (n > w->reserved) {
		w->ready_at = now + pio_device_reserve(&w->member, now, n - w->reserved);
		w->reserved = n;
	}
	delay = most(delay, w->ready_at - now);
	if (delay <= 0) return 0;
	pio_device_give_back(&w->member);
	pthread_mutex_unlock(&w->lock);
	pio_device_let_go(&w->member);
	int rc = SYS.sleep(delay);
	pthread_mutex_lock(&w->lock);
	return rc < 0 ? rc : refusal(w);
}

/* How many bytes may be written at `off`, at most one window, if `n` are to be; or an error. */
static int64_t room_for(pio_writer *w, int64_t off, int64_t n) {
	int64_t room;
	for (;;) {
		adapt(w);
		room = make_room(w, off);
		if (room < 0 || !paces(w)) return room;
		if (!w->member.device) break;
		settle(w);
		int rc = admit(w, off, least(n, room), room);
		if (rc == 0) break;
		/* Whoever looked after the windows meanwhile, this writer or another, may have met an error of its data. */
		if (rc > 0) rc = refusal(w);
		if (rc < 0) return rc;
	}
	return room;
}

static int64_t write_some(pio_writer *w, const void *buf, size_t n) {
	int64_t off = 0, largest = pio_rate_piece(&w->rate);

	if (paces(w) && (w->rate.rate != 0 || is_evened(w))) {
		/* First what is to be waited for anyway: after a sleep every window is complete, and nobody knows since when. */
		if ((off = offset(w)) < 0) return off;
		adapt(w);
		int64_t room = make_room(w, off);
		if (room < 0) return room;
		settle(w);
		largest = pio_rate_piece(&w->rate);
		if (is_evened(w)) largest = least(largest, w->plan.window);
	}
	if (n > (uint64_t)largest) n = (size_t)largest;
	int rc = keep_rate(w, (int64_t)n);
	if (rc < 0) return rc;
	if (paces(w) && (off = offset(w)) < 0) return off;
	if (paces(w)) {
		int64_t room = room_for(w, off, (int64_t)n);
		if (room < 0) return room;
		largest = least(room, pio_rate_piece(&w->rate));
	}
	if (n > (uint64_t)largest) n = (size_t)largest;

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
	if (w->rate.rate != 0) pio_rate_accepted(&w->rate, SYS.now(), written);
	w->reserved = most(w->reserved - written, 0);
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
	/* Before anything is started, which is stamped with what is in flight. */
	settle(w);
	rc = keep_up(w);
	if (rc < 0) return rc;
	/* An engine is verified right after a write. By the time that room is made, the kernel may have written these pages
	 * back, or the caller may have truncated the file before them. */
	if (!decided(w) && pio_window_is_full(&w->plan) && (rc = choose(w)) < 0) return fail(w, rc, 1);
	return written;
}

/* Calls come one after the other; within one, others may look after the windows while it sleeps. */
static void begin_call(pio_writer *w) {
	pthread_mutex_lock(&w->call);
	pthread_mutex_lock(&w->lock);
	pio_device_enter(&w->member);
}

static void finish_call(pio_writer *w) {
	settle(w);
	pio_device_exit(&w->member);
	stop_following(w);
	if (w->closed && w->follows) leave(w);
	pthread_mutex_unlock(&w->lock);
	pio_device_let_go(&w->member);
	pthread_mutex_unlock(&w->call);
}

/*
 * Writes at the descriptor's position, at most one window. Returns the bytes written (fewer than n: call again), or
 * a negative errno; -EINTR and -EAGAIN (non-blocking descriptors) may be tried again, every other error is final.
 */
int64_t pio_write(pio_writer *w, const void *buf, size_t n) {
	begin_call(w);
	int64_t r = refusal(w);
	if (r == 0) {
		if (w->follows && !w->member.device && (uint64_t)w->stats.bytes + n > (uint64_t)JOIN_AT) join(w);
		r = write_some(w, buf, n);
	}
	finish_call(w);
	return r;
}

int pio_truncate(pio_writer *w, int64_t size) {
	begin_call(w);
	int rc = refusal(w);
	if (rc == 0) pio_prealloc_before(&w->ahead, size);
	if (rc == 0) rc = SYS.ftruncate(w->fd, size);
	if (rc == 0) {
		pio_window_truncate(&w->plan, size);
		pio_prealloc_truncated(&w->ahead, size);
	}
	finish_call(w);
	return rc;
}

static int finish(pio_writer *w) {
	pio_range r;
	int action;
	while ((action = pio_window_finish(&w->plan, &r)) != PIO_DONE) {
		int rc = carry_out(w, action, r, NULL);
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
		settle(w); /* the sync itself may take long, and nobody is to wait for room meanwhile */
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
	begin_call(w);
	int rc = refusal(w);
	if (rc == 0) {
		int64_t from = SYS.now();
		rc = sync(w);
		w->stats.sync_ns += SYS.now() - from;
	}
	finish_call(w);
	return rc;
}

static int start_rest(pio_writer *w, pio_stats *stalled) {
	pio_range r;
	int action, rc = 0;
	if (!decided(w) || !paces(w)) return 0;
	while (rc == 0 && (action = pio_window_start_rest(&w->plan, &r)) != PIO_DONE) rc = carry_out(w, action, r, stalled);
	return rc;
}

/* For a file that is complete and is to be synced later, with others: starts what is left, its unfinished last page as well. */
int pio_start_rest(pio_writer *w) {
	begin_call(w);
	int rc = refusal(w);
	if (rc == 0 && !decided(w) && w->last.len > 0 && (rc = choose(w)) < 0) rc = fail(w, rc, 1);
	if (rc == 0) rc = start_rest(w, NULL);
	finish_call(w);
	return rc;
}

/* Then waits for it, so that nothing of the file is in flight. Where only a sync of the data would do that, does nothing. */
int pio_wait_rest(pio_writer *w) {
	begin_call(w);
	int rc = refusal(w);
	if (rc == 0 && decided(w) && paces(w) && w->engine.kind != PIO_DATASYNC) rc = finish(w);
	finish_call(w);
	return rc;
}

/* Gives back what is allocated ahead. To be called after the last write, before the sync that is to cover it, and before
 * the file's times are set. */
void pio_release(pio_writer *w) {
	begin_call(w);
	if (!w->closed) pio_prealloc_release(&w->ahead);
	finish_call(w);
}

/* Whoever writes knows that the data go on to this offset of the file. */
void pio_expect(pio_writer *w, int64_t size) {
	begin_call(w);
	pio_prealloc_expect(&w->ahead, size);
	finish_call(w);
}

/*
 * Before the descriptor is closed: starts what is left, and waits for nothing. No call touches the descriptor after this
 * one. Returns the error that the writer failed with, if any.
 */
int pio_writer_close(pio_writer *w) {
	begin_call(w);
	int rc = refusal(w);
	if (rc == 0) rc = start_rest(w, &w->stats);
	if (!w->closed) pio_prealloc_release(&w->ahead);
	w->closed = 1;
	pio_engine_close(&w->engine);
	finish_call(w);
	return rc;
}

void pio_writer_stats(pio_writer *w, pio_stats *out) {
	pthread_mutex_lock(&w->lock);
	*out = w->stats;
	out->in_flight = paces(w) ? w->plan.dirty_bytes + w->plan.started_bytes : 0;
	out->most_in_flight = paces(w) ? w->plan.most_in_flight : 0;
	out->limit = w->plan.limit;
	pio_device_stats(&w->member, out);
	if (w->options.limit && !out->limited_by) out->limited_by = PIO_BY_CONFIGURATION;
	if (decided(w) && (!paces(w) || w->engine.kind == PIO_DATASYNC) && !w->options.limit) out->limited_by = PIO_BY_ENGINE;
	out->verified_dirty_pages = w->engine.verified_dirty_pages;
	out->engine = w->engine.kind;
	out->reason = w->engine.reason;
	out->reason_errno = w->engine.reason_errno;
	pthread_mutex_unlock(&w->lock);
}
