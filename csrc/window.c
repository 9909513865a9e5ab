/*
 * Which ranges to start, wait for and drop, and when. Pure: told what was written, it answers with ranges, and
 * whoever asks carries them out. It makes no call and reads no clock, so it is tested against a model.
 *
 * Theory of operation
 * -------------------
 * Bytes that were accepted and are not known to be on the device are in flight. They are in one of two places:
 *
 *   dirty[]    ranges not started, sorted, neither overlapping nor adjacent (neighbours are joined as they come)
 *   started[]  windows under writeback, a ring in the order of their starts
 *
 *       wrote()          START              WAIT               DROP
 *   ----------> dirty[] -------> started[] -------> dropping ------->
 *
 * Both count whole pages, since the kernel writes whole pages: one byte written is one page in flight. in flight =
 * dirty + started never exceeds the limit, because room() tells the writer how much it may write next, and
 * make_room() what to do until that is more than nothing. A page that is written again while its window is under
 * writeback counts twice; that errs on the right side.
 *
 * A range is started when a window is complete, that is in one of two cases:
 *
 *  1. It reaches a multiple of the window size in the file. A sequential writer only ever sees this case: windows lie
 *     on fixed boundaries wherever it began, which keeps the page cache's large folios, erase blocks and stripes
 *     whole.
 *  2. The dirty ranges together amount to a window, however scattered (a writer that seeks). All are started then,
 *     in the order of their offsets, so that the block layer can merge them. Until then a seek costs nothing: a
 *     header that is patched and a tail that is continued are joined to what is there. That ends a window early
 *     exactly when patches and tail together fill one.
 *
 * The unfinished page at the writer's position (the hot page) is left out of both: to start it would write it twice,
 * and the next write might have to wait for it. It goes when the position moves past it, or with sync, or when there
 * is no other room left.
 *
 * What completed is dropped but for pages that were written again in the meantime: advising the kernel to drop those
 * would start their writeback behind our back. A DROP is always a whole completed window or the rest of one, never
 * a small write: advice that leaves pages behind makes the kernel drain every CPU's lists.
 */
#include "window.h"

#include <string.h>

static int64_t end_of(pio_range r) { return r.off + r.len; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t page_floor(const pio_window *p, int64_t off) { return off - off % p->page; }
static int64_t to_boundary(const pio_window *p, int64_t off) { return p->window - off % p->window; }
static int64_t in_flight(const pio_window *p) { return p->dirty_bytes + p->started_bytes; }

/* The last page before 2^63, where every file ends, has no end that an offset can tell: it is left to the sync. */
static int64_t page_ceiling(const pio_window *p, int64_t off) {
	int64_t rest = off % p->page, floor = off - rest;
	return rest > 0 && floor <= INT64_MAX - p->page ? floor + p->page : floor;
}

void pio_window_init(pio_window *p, int64_t page, int64_t window, int64_t limit) {
	pio_window_clear(p); /* the arrays hold nothing yet: small files must not pay for clearing them */
	p->page = page;
	p->window = window;
	p->limit = limit;
	p->position = p->most_in_flight = 0;
	p->starts = 0;
}

void pio_window_clear(pio_window *p) {
	p->dirty_count = p->started_count = 0;
	p->dirty_bytes = p->started_bytes = 0;
	p->dropping.len = 0;
	p->draining = 0;
}

/* The first dirty range that ends after `off`, or dirty_count. */
static int first_after(const pio_window *p, int64_t off) {
	int i = 0;
	while (i < p->dirty_count && end_of(p->dirty[i]) <= off) i++;
	return i;
}

int pio_window_is_dirty(const pio_window *p, pio_range range) {
	int i = first_after(p, range.off);
	return i < p->dirty_count && p->dirty[i].off < end_of(range);
}

/* As far as `off` plus this no page is new: what is written there is in flight already. */
int64_t pio_window_counted(const pio_window *p, int64_t off) {
	int i = first_after(p, off);
	int inside = i < p->dirty_count && p->dirty[i].off <= off;
	return (inside ? end_of(p->dirty[i]) : page_floor(p, off)) - off;
}

/*
 * How many bytes may be written at `off` now: to the end of that window at most, and no more than the limit lets in.
 * 0: call make_room first.
 */
int64_t pio_window_room(const pio_window *p, int64_t off) {
	int i = first_after(p, off);
	int inside = i < p->dirty_count && p->dirty[i].off <= off;
	int64_t page = page_floor(p, off);

	if (!inside && p->dirty_count == PIO_RANGES) {
		int joins = i > 0 && end_of(p->dirty[i - 1]) == page;
		if (!joins) return 0;
	}
	int64_t counted = pio_window_counted(p, off);
	int64_t unused = page_floor(p, most(p->limit - in_flight(p), 0));
	return most(least(counted + unused, to_boundary(p, off)), 0);
}

/* Will the next write need room to be made, unless it goes where pages are dirty already? */
int pio_window_is_full(const pio_window *p) {
	return p->dirty_count == PIO_RANGES || p->limit - in_flight(p) < p->page;
}

/* `len` bytes (more than 0) were written at `off`. */
void pio_window_wrote(pio_window *p, int64_t off, int64_t len) {
	int64_t low = page_floor(p, off), high = page_ceiling(p, off + len);
	int first = 0, last;

	p->position = off + len;
	if (high <= low) return;
	while (first < p->dirty_count && end_of(p->dirty[first]) < low) first++;
	for (last = first; last < p->dirty_count && p->dirty[last].off <= high; last++) continue;

	if (first == last && p->dirty_count == PIO_RANGES) {
		/* Only after a write that landed elsewhere than room() was asked for, as with O_APPEND beside another
		 * appender. The nearest range grows over the gap: that counts more than is dirty, never less. */
		if (first == PIO_RANGES) first--;
		last = first + 1;
	}
	if (first == last) {
		memmove(&p->dirty[first + 1], &p->dirty[first],
			(size_t)(p->dirty_count - first) * sizeof p->dirty[0]);
		p->dirty_count++;
	} else {
		low = least(low, p->dirty[first].off);
		high = most(high, end_of(p->dirty[last - 1]));
		for (int i = first; i < last; i++) p->dirty_bytes -= p->dirty[i].len;
		memmove(&p->dirty[first + 1], &p->dirty[last],
			(size_t)(p->dirty_count - last) * sizeof p->dirty[0]);
		p->dirty_count -= last - first - 1;
	}
	p->dirty[first] = (pio_range){low, high - low};
	p->dirty_bytes += high - low;
	p->most_in_flight = most(p->most_in_flight, in_flight(p));
}

/* The file ends at `size` now: nothing beyond it is in flight any more. */
void pio_window_truncate(pio_window *p, int64_t size) {
	int64_t end = page_ceiling(p, size);
	int kept = 0;

	for (int i = 0; i < p->dirty_count; i++) {
		pio_range r = p->dirty[i];
		p->dirty_bytes -= r.len;
		r.len = least(r.len, end - r.off);
		if (r.len <= 0) continue;
		p->dirty_bytes += r.len;
		p->dirty[kept++] = r;
	}
	p->dirty_count = kept;
	for (int i = 0; i < p->started_count; i++) {
		/* Emptied windows stay in the ring, so that its order and numbers hold, and are passed over later. */
		pio_range *r = &p->started[(p->started_head + i) % PIO_WINDOWS];
		int64_t len = most(least(r->len, end - r->off), 0);
		p->started_bytes -= r->len - len;
		r->len = len;
	}
	p->dropping.len = most(least(p->dropping.len, end - p->dropping.off), 0);
}

/* Hands out the next part of what completed that nobody wrote again. */
static int drop(pio_window *p, pio_range *out) {
	while (p->dropping.len > 0) {
		int64_t low = p->dropping.off, high = end_of(p->dropping);
		int64_t again = high, until = high; /* the first part [again, until) that was written again */

		int i = first_after(p, low);
		if (i < p->dirty_count && p->dirty[i].off < high) {
			again = most(p->dirty[i].off, low);
			until = end_of(p->dirty[i]);
		}
		for (int k = 0; k < p->started_count; k++) {
			pio_range r = p->started[(p->started_head + k) % PIO_WINDOWS];
			if (r.len > 0 && end_of(r) > low && r.off < again) {
				again = most(r.off, low);
				until = end_of(r);
			}
		}
		until = least(until, high);
		p->dropping = (pio_range){until, high - until};
		if (again > low) {
			*out = (pio_range){low, again - low};
			return PIO_DROP;
		}
	}
	return PIO_DONE;
}

/* Pops the oldest started window. */
static int wait(pio_window *p, pio_range *out) {
	while (p->started_count > 0) {
		*out = p->started[p->started_head];
		p->started_head = (p->started_head + 1) % PIO_WINDOWS;
		p->started_count--;
		p->started_bytes -= out->len;
		if (out->len == 0) continue;
		p->dropping = *out;
		return PIO_WAIT;
	}
	return PIO_DONE;
}

/* Moves the first `len` bytes of dirty range i to the ring, which must have a place. */
static int start(pio_window *p, int i, int64_t len, pio_range *out) {
	pio_range *r = &p->dirty[i];

	*out = (pio_range){r->off, least(len, to_boundary(p, r->off))};
	r->off += out->len;
	r->len -= out->len;
	p->dirty_bytes -= out->len;
	if (r->len == 0) {
		p->dirty_count--;
		memmove(r, r + 1, (size_t)(p->dirty_count - i) * sizeof *r);
	}
	p->started[(p->started_head + p->started_count++) % PIO_WINDOWS] = *out;
	p->started_bytes += out->len;
	p->starts++;
	return PIO_START;
}

/* The length of dirty range i without the hot page. */
static int64_t cold_length(const pio_window *p, int i) {
	pio_range r = p->dirty[i];
	int hot = p->position % p->page != 0 && page_ceiling(p, p->position) == end_of(r);
	return hot ? r.len - p->page : r.len;
}

/* Starts the first `len` bytes of dirty range i as far as they reach in one window, or waits for a place to note it. */
static int start_or_wait(pio_window *p, int i, int64_t len, pio_range *out) {
	/* A ring full of emptied windows is empty after that, and there is nothing to wait for. */
	if (p->started_count == PIO_WINDOWS && wait(p, out) == PIO_WAIT) return PIO_WAIT;
	return start(p, i, len, out);
}

/* Starts the first dirty range, the hot page only on request. */
static int start_any(pio_window *p, int hot_too, pio_range *out) {
	for (int i = 0; i < p->dirty_count; i++) {
		int64_t len = hot_too ? p->dirty[i].len : cold_length(p, i);
		if (len <= 0) continue;
		return start_or_wait(p, i, len, out);
	}
	return PIO_DONE;
}

/* After a write, until PIO_DONE: start the windows that are complete. */
int pio_window_keep_up(pio_window *p, pio_range *out) {
	int64_t cold = 0;
	if (drop(p, out) == PIO_DROP) return PIO_DROP;
	for (int i = 0; i < p->dirty_count; i++) {
		int64_t len = to_boundary(p, p->dirty[i].off);
		if (len <= cold_length(p, i)) return start_or_wait(p, i, len, out);
		cold += cold_length(p, i);
	}
	if (cold >= p->window) p->draining = 1;
	if (p->draining) {
		int action = start_any(p, 0, out);
		if (action != PIO_DONE) return action;
		p->draining = 0;
	}
	return PIO_DONE;
}

/* While room(off) is 0: one step towards more. */
int pio_window_make_room(pio_window *p, int64_t off, pio_range *out) {
	int action = drop(p, out);
	/* No place to keep another range apart: waiting would not help, starting one does. */
	if (action == PIO_DONE && p->dirty_count == PIO_RANGES) action = start_any(p, 0, out);
	if (action == PIO_DONE) action = wait(p, out);
	if (action == PIO_DONE) action = start_any(p, off != p->position, out);
	if (action == PIO_DONE) action = start_any(p, 1, out);
	return action;
}

/* For a sync, until PIO_DONE: start, wait for and drop everything. */
int pio_window_finish(pio_window *p, pio_range *out) {
	int action = drop(p, out);
	if (action == PIO_DONE) action = start_any(p, 1, out);
	if (action == PIO_DONE) action = wait(p, out);
	return action;
}

/* For a close without a sync, until PIO_DONE: start everything, wait for nothing that is not in the way. */
int pio_window_start_rest(pio_window *p, pio_range *out) {
	int action = drop(p, out);
	return action == PIO_DONE ? start_any(p, 1, out) : action;
}
