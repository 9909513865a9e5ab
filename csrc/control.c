/*
 * How many bytes may be in flight on a device, and at what rate bytes may be accepted. Pure: the clock comes in as an
 * argument, windows come in as samples, limit and rate come out.
 *
 * Theory of operation
 * -------------------
 * A device is a pipe: it has a delivery rate and a delay, and their product is what must be in flight to keep it busy.
 * Less leaves it idle, more only waits in its queue, and every neighbour with it. The same holds for a network path, and
 * congestion control has found out how to stay at that point without being told either number. From there come:
 *
 *  - the two estimates, a windowed maximum of the delivery rate and a windowed minimum of the delay, since the one can be
 *    seen only while the pipe is full and the other only while it is not; and the sample that is ignored because the
 *    sender had nothing to send (BBR: Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14/5, 2016);
 *  - the target, in flight as it would be without a queue plus a fixed little, and a start that doubles only while no
 *    queue builds up (Vegas: Brakmo, O'Malley, Peterson, "TCP Vegas", SIGCOMM 1994);
 *  - giving way: delay above the base means that somebody else is there (LEDBAT, RFC 6817).
 *
 * Samples. A window is stamped when it is started, and its completion is reported with the stamp. When it completed is
 * known only if somebody was blocked in a wait for it: a wait that returns at once says that it is over, not since when.
 * So every completion counts as delivered, but only those that were waited for end an interval or say what the delay
 * was. Rate is measured over rounds, of at least two limits' worth of bytes and some milliseconds, from one such moment to
 * another: single windows jitter too much. A round during which the producer left room unused says nothing of the device.
 *
 *     delay = from a window's start to its completion
 *     base  = delay of a small window with nothing else under writeback, the least of late
 *     rate  = largest of the rounds of the last second or so
 *     slack = time for a waiter to get the processor + time from there to the next start + mean deviation of delays
 *     limit = rate x (base + slack) + window
 *
 * rate x base + window keeps the pipe full, for its delay and for the window that passes through it; slack, while a completion
 * is noticed and the next window is filled and started, and through the device's whims. Where the pipe is not full, rate =
 * limit / delay, so that the formula is then above the limit, which therefore grows until it is full: that is the probe
 * upwards, and needs no case of its own. If the device becomes slower the maximum expires; if it becomes faster the limit
 * grows again.
 *
 * Many writers. With more of them than windows in the budget, room is granted to one that then has to fill its window, while
 * others wait for the processor to do so. What is held that way is in flight, but not on the device. So the limit grows by what
 * the device delivers in that time, to twice the above at the most.
 *
 * Start. The limit begins with FIRST_LIMIT and doubles each round for as long as the formula is not below it. A device of
 * 20 MB/s thus never has more than that first limit queued, a fast one is known within a few tens of MiB.
 *
 * Drain. In a standing queue of our own making no window's delay is the base. So every ten seconds, and to begin with, a few
 * small windows are sent one by one: that is the probe downwards. Small ones, because the time that a large one takes to be
 * transferred is not known from the rate: a device with a burst allowance lets one through much faster than many. Where no
 * round was valid for a minute, since polite writers leave room unused, rounds follow in which they do not, until one changes
 * nothing.
 *
 * Window. Many devices serve only so many requests at once, so that larger ones are faster; and to whoever comes next, few
 * large ones ahead are less of a queue than many small ones. But in a pipe of little content they are most of what is in
 * flight. So: what the pipe holds without them, and no less than a device of this rate takes in 150 microseconds; from 1 GB/s
 * on, where the processor's time for each window counts, no less than 512 KiB.
 *
 * Politeness. A polite writer leaves the pipe partly empty: it takes at most POLITE of rate and product. Windows that take
 * longer than the base (kept for minutes, or a neighbour that stays would become the base) and pressure that is not our
 * own (PSI) lower its share by a quarter each time, or by half where they take much longer; without either it recovers
 * within two seconds. It never goes below a sixteenth of the rate. While the limit is being learned, a polite writer adds half
 * of what is known to fit in, each round, instead of doubling it, and keeps to that in the rounds of a probe: nobody's first
 * second has to suffer a queue of ours.
 *
 * Stop and go. Some devices let through what they allow for a while as fast as it comes, and then nothing until that while is
 * over: a control group's io.max, in slices of a tenth of a second. What is in flight there does not matter; whoever is faster
 * stands still for the rest of each slice. So where nothing completes for a good part of two spans of half a second, bytes are
 * accepted from all writers together at an even rate, a sixteenth above that of the spans. The device then stops for little
 * enough to be noticed by nobody but us. Where it does not stop at all it may allow for more, and is given a quarter more, until
 * it delivers as much as it did between its stops.
 *
 * The rate that a caller asks for is kept as ATM's generic cell rate algorithm does (ITU-T I.371): `due` is when the bytes
 * accepted so far should have been accepted at exactly this rate, and more may come once they would be ahead of it by no
 * more than `burst`. A pause saves nothing up beyond that. The burst is a window, or 40 ms worth where that is less: 2 % of
 * any two seconds. Bytes are accepted in pieces of half a burst, so that a sleep that overran by less than the other
 * half does not slow the schedule down.
 */
#include "control.h"

#define KIB ((int64_t)1024)
#define MS ((int64_t)1000000)
#define SECOND ((int64_t)1000000000)

#define FIRST_LIMIT (1024 * KIB)
#define FIRST_WINDOW (512 * KIB)
#define FAST_WINDOW (512 * KIB)
#define LEAST_WINDOW (64 * KIB)
#define MOST_WINDOW (1024 * KIB)
#define MOST_LIMIT (PIO_WINDOWS / 2 * MOST_WINDOW)

#define FAST ((int64_t)1000 * 1000 * 1000) /* bytes a second, from where on the processor's time for a window counts */
#define WAKE (MS / 10) /* until a waiter has the processor, now and then */
#define MOST_SLACK MS /* or half the base, if that is more */
#define MOST_HELD (10 * MS)
#define WINDOW_TIME (MS * 15 / 100)
#define ROUND (50 * MS)
#define PROBE_ROUND (40 * MS)
#define PROBE_EVERY (60 * SECOND)
#define PROBE_PATIENCE (SECOND / 2)
#define RATE_AGE (SECOND / 2)     /* of one of two generations */
#define LONG_BASE_AGE (300 * SECOND)
#define DRAIN_EVERY (10 * SECOND)
#define LEAST_DRAINED 3
#define MANY_DRAINED 8
#define MOST_DRAINED 16
#define DRAIN (20 * MS)
#define DRAIN_PATIENCE (SECOND / 10) /* and eight times the base */
#define STALE (60 * SECOND)       /* what was learned before a pause as long as this is forgotten */

#define FULL_SHARE 1024
#define POLITE (FULL_SHARE * 65 / 100)
#define LEAST_SHARE (FULL_SHARE / 16)
#define LOOKS 4
#define CROWDED (MS / 2)
#define PRESSED 16 /* at most this part of what is left of the time */
#define RECOVERY (2 * SECOND)

#define SPAN (SECOND / 2)
#define STOP (4 * MS) /* and eight times the base: nothing completed for so long */
#define STOPPED 6     /* a part of the span that is not to be spent so */

#define BURSTS_A_SECOND 25

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* a x b / c without overflow; the results are far below 2^53. */
static int64_t scaled(int64_t a, int64_t b, int64_t c) { return (int64_t)((double)a * (double)b / (double)c); }

/* What a device of this rate delivers in `ns`. */
static int64_t content(int64_t rate, int64_t ns) { return scaled(rate, ns, SECOND); }

static int64_t transfer(const pio_control *c, int64_t bytes) { return c->rate > 0 ? scaled(bytes, SECOND, c->rate) : 0; }

/* ---- how many bytes may be in flight ---- */

void pio_control_init(pio_control *c) {
	*c = (pio_control){.limit = FIRST_LIMIT, .window = FIRST_WINDOW, .phase = PIO_DRAINING, .share = POLITE};
}

int pio_control_is_stale(const pio_control *c, int64_t now) { return c->seen_at && now - c->seen_at > STALE; }

/* After a long pause: what was learned before it may not hold any more. */
void pio_control_forget(pio_control *c, int64_t now) {
	int64_t delivered = c->delivered;
	if (!pio_control_is_stale(c, now)) return;
	pio_control_init(c);
	c->delivered = delivered;
}

/* `bytes` were started, room for which was `granted` at that time, which makes `in_flight` on this device, `dirty` of them not
 * started. */
void pio_control_started(const pio_control *c, int64_t now, int64_t bytes, int64_t in_flight, int64_t dirty, int64_t granted,
			 int polite, int held_back, pio_stamp *s) {
	s->started = now;
	s->bytes = bytes;
	s->delivered = c->delivered;
	s->alone = in_flight - dirty <= bytes;
	/* Room for another window, and nobody has taken it: the producer is the slower side. */
	polite = polite && c->phase != PIO_STEADY;
	s->demanded = in_flight + pio_control_window(c, polite) > (polite ? pio_control_limit(c, polite) : c->limit);
	s->wanted = s->demanded || held_back;
	s->gap = now - c->seen_at;
	s->held = now - granted;
}

/* A small window went, alone if all is well. The drain ends after a few, or many that are fast. */
static void note_drained(pio_control *c, int64_t now, int64_t delay, const pio_stamp *s) {
	if (c->drain_since == 0) c->drain_since = now;
	int64_t took = now - c->drain_since;
	if (s->alone && s->bytes <= LEAST_WINDOW) {
		c->drained++;
		c->drained_delay += delay;
		c->drained_most = most(c->drained_most, delay);
		c->drained_least = c->drained_least ? least(c->drained_least, delay) : delay;
	}
	if (c->drained < LEAST_DRAINED ? took < DRAIN_PATIENCE + 8 * c->base : c->drained < MOST_DRAINED && took < DRAIN)
		return;

	if (c->drained > 0) {
		/* Of many the mean, since a fast device is late now and then, but without the one that was late most. */
		int64_t mean = c->drained > 1 ? (c->drained_delay - c->drained_most) / (c->drained - 1) : 0;
		int64_t base = c->drained < MANY_DRAINED ? c->drained_least : mean;
		if (now - c->long_since >= LONG_BASE_AGE) {
			c->long_before = c->long_now;
			c->long_now = 0;
			c->long_since = now;
		}
		c->base = c->base_before ? least(base, c->base_before) : base;
		c->base_before = base;
		c->long_now = c->long_now ? least(c->long_now, base) : base;
		c->long_base = c->long_before ? least(c->long_now, c->long_before) : c->long_now;
	}
	c->drained_delay = c->drained_most = c->drained_least = 0;
	c->drained = 0;
	c->drain_since = now;
	c->phase = c->rate == 0 ? PIO_STARTING : now - c->probed_at >= PROBE_EVERY ? PIO_PROBING : PIO_STEADY;
	c->round_since = 0;
}

/* As TCP has it (RFC 6298), but the deviation over more samples. */
static void note_deviation(pio_control *c, int64_t delay) {
	if (c->mean == 0) c->mean = delay;
	c->deviation += ((delay > c->mean ? delay - c->mean : c->mean - delay) - c->deviation) / 16;
	c->mean += (delay - c->mean) / 8;
}

static void note_rate(pio_control *c, int64_t now, int64_t rate) {
	if (now - c->rate_since >= RATE_AGE) {
		c->rate_before = c->rate_now;
		c->rate_now = 0;
		c->rate_since = now;
	}
	c->rate_now = most(c->rate_now, rate);
	c->rate = most(c->rate_before, c->rate_now);
}

static int64_t window_for(const pio_control *c, int first) {
	int64_t wanted = most(content(c->rate, c->base) * 11 / 10, content(c->rate, WINDOW_TIME));
	if (c->rate >= FAST) wanted = most(wanted, FAST_WINDOW);
	int64_t window = LEAST_WINDOW;
	/* The power of two that is nearest. Once there, a smaller one only for a reason. */
	while (window < MOST_WINDOW && wanted >= (c->window > window && !first ? window * 17 / 12 : window * 3 / 2)) window *= 2;
	return window;
}

/* Rounded up, but not for the sake of a little; what is the limit already stays so for a little less. */
static int64_t whole_windows(const pio_control *c, int64_t bytes) {
	int64_t limit = (bytes + c->window - c->window / 4) / c->window * c->window;
	return limit == c->limit - c->window && bytes > limit + c->window / 8 ? c->limit : limit;
}

/* One is filled while another is under writeback; where the processor is busy, that is noticed late. */
static int64_t least_windows(const pio_control *c) { return c->rate >= FAST ? 4 : 2; }

static int64_t target_of(const pio_control *c) {
	int64_t slack = least(WAKE + c->gap + c->deviation, most(c->base / 2, MOST_SLACK));
	int64_t target = content(c->rate, c->base + slack) + c->window;
	return target + least(content(c->rate, most(c->held - c->gap, 0)), target);
}

static void end_of_round(pio_control *c, int64_t now) {
	int64_t limit = c->limit, window = c->window;

	c->probed_at = now;
	note_rate(c, now, scaled(c->delivered - c->round_delivered, SECOND, now - c->round_since));
	if (c->phase == PIO_STARTING && target_of(c) >= c->limit && c->limit < MOST_LIMIT) {
		c->limit *= 2;
		return;
	}
	c->window = window_for(c, c->phase == PIO_STARTING);
	c->limit = least(most(whole_windows(c, target_of(c)), least_windows(c) * c->window), MOST_LIMIT);
	if (c->phase == PIO_STARTING)
		c->phase = PIO_PROBING;
	else if (c->limit == limit && c->window == window)
		c->phase = PIO_STEADY;
}

static void begin_round(pio_control *c, int64_t now) {
	c->round_delivered = c->delivered;
	c->round_since = now;
	c->round_lost = 0;
}

static void note_round(pio_control *c, int64_t now, const pio_stamp *s) {
	int64_t bytes = c->delivered - c->round_delivered;
	int64_t span = c->phase == PIO_STEADY ? ROUND : c->phase == PIO_PROBING ? PROBE_ROUND : 1;

	if (c->round_since == 0 || c->phase == PIO_DRAINING) {
		begin_round(c, now);
		return;
	}
	/* A window that was started before the round says nothing of it. */
	if (s->delivered >= c->round_delivered && !s->demanded) c->round_lost = 1;
	if (bytes < 2 * c->limit || now - c->round_since < span) return;
	if (!c->round_lost) end_of_round(c, now);
	begin_round(c, now);
}

static void begin_span(pio_control *c, int64_t now) {
	c->span_since = now;
	c->span_delivered = c->delivered;
	c->span_unwanted = c->span_stopped = 0;
}

static void end_of_span(pio_control *c, int64_t now) {
	int64_t took = now - c->span_since, delivered = c->delivered - c->span_delivered, rate = scaled(delivered, SECOND, took);

	c->sustained = most(rate, c->sustained_before);
	c->sustained_before = rate;
	if (c->even) {
		c->stops = c->span_stopped > 0;
		c->even = c->sustained < c->go / 10 * 9;
	} else if (c->span_stopped < took / STOPPED) {
		c->stops = 0;
	} else {
		c->go = scaled(delivered, SECOND, most(took - c->span_stopped, 1));
		c->even = ++c->stops > 1;
	}
}

/* `idle`: for how long nothing was seen to complete, with this window under writeback; 0: not known. */
static void note_span(pio_control *c, int64_t now, int64_t idle, const pio_stamp *s) {
	if (c->phase != PIO_STEADY) {
		c->span_since = 0;
		return;
	}
	if (c->span_since == 0) {
		begin_span(c, now);
		return;
	}
	if (!s->wanted) c->span_unwanted += s->bytes;
	if (idle > STOP + 8 * c->base) c->span_stopped += idle;
	if (now - c->span_since < SPAN) return;
	/* Else it was the producer who stopped. */
	if (c->span_unwanted <= (c->delivered - c->span_delivered) / 8) end_of_span(c, now);
	begin_span(c, now);
}

/* The least of a few delays is what counts: single ones are late for many reasons. */
static void note_politeness(pio_control *c, int64_t now, int64_t delay, const pio_stamp *s) {
	int64_t base = c->long_base + transfer(c, s->bytes);

	if (c->looks == 0 || delay < c->least_delay) c->least_delay = delay;
	if (++c->looks < LOOKS) return;
	c->looks = 0;
	int64_t crowded = most(base / 2, CROWDED);
	if (c->least_delay > base + crowded)
		c->share = most(c->share - c->share / (c->least_delay > base + 4 * crowded ? 2 : 4), LEAST_SHARE);
	else if (c->share_at)
		c->share = least(c->share + scaled(POLITE, least(now - c->share_at, RECOVERY), RECOVERY), POLITE);
	c->share_at = now;
}

/* A window was found to be complete. `blocked`: its waiter was blocked until now, so now is when it completed. */
void pio_control_completed(pio_control *c, int64_t now, const pio_stamp *s, int blocked, int polite) {
	int64_t delay = most(now - s->started, 1), idle = least(now - c->seen_at, delay);
	c->seen_at = now;
	c->delivered += s->bytes;
	note_span(c, now, blocked ? idle : 0, s);
	if (!blocked) return;

	if (c->phase == PIO_STEADY && s->demanded) note_deviation(c, delay);
	if (s->demanded) {
		c->gap += (least(s->gap, MOST_SLACK) - c->gap) / 16;
		c->held += (least(s->held, MOST_HELD) - c->held) / 16;
	}
	if (polite && c->phase == PIO_STEADY && c->long_base) note_politeness(c, now, delay, s);
	if (c->phase == PIO_DRAINING) note_drained(c, now, delay, s);
	/* If the producer is too slow to be probed with, that is polite enough. */
	int64_t patience = PROBE_PATIENCE + 16 * c->base;
	if (c->phase == PIO_PROBING &&
	    (now - most(c->drain_since, c->probed_at) > patience || now - c->drain_since > 4 * patience)) {
		c->phase = PIO_STEADY;
		c->probed_at = now;
	}
	if (c->phase == PIO_STEADY && now - c->drain_since >= DRAIN_EVERY) {
		c->phase = PIO_DRAINING;
		c->drain_since = now;
	}
	note_round(c, now, s);
}

/*
 * Somebody was stalled on I/O for `stalled` of the last `interval` ns, and this process's writers were for `own` of it. Who
 * gives way wants to know of the others; the two overlap, and are taken as independent:
 * (1 - stalled) = (1 - own) x (1 - others). The kernel weighs processors, so that one stalled writer on an idle machine counts
 * for less than its time: what is seen of the others is the least that there is, and shows more clearly the less we do
 * ourselves.
 */
void pio_control_pressure(pio_control *c, int64_t stalled, int64_t own, int64_t interval) {
	int64_t free_of_own = interval - own;
	if (free_of_own < interval / 10) return; /* nothing can be told from so little */
	if (stalled - own > free_of_own / PRESSED) c->share = most(c->share - c->share / 4, LEAST_SHARE);
}

/* The most bytes that may be in flight on the device. */
int64_t pio_control_limit(const pio_control *c, int polite) {
	if (c->phase == PIO_DRAINING) return 1; /* window */
	if (!polite) return c->limit;
	/* It starts with what the pipe holds as far as is known, and half as much again to see whether it holds more. */
	if (c->phase == PIO_STARTING) return least(most(content(c->rate, c->base) * 3 / 2 + c->window, FIRST_LIMIT), c->limit);
	if (c->phase == PIO_PROBING) return least(content(c->rate, c->base) * 9 / 8 + 2 * c->window, c->limit);
	int64_t product = content(c->rate, c->base) + c->window;
	/* A window is being filled; but with room for it the rate alone would hold windows back, no wait would ever block, and
	 * nobody would know how long they took. */
	return product / FULL_SHARE * c->share + pio_control_window(c, polite) / 2;
}

/* How much is to be started at once. */
int64_t pio_control_window(const pio_control *c, int polite) {
	if (c->phase == PIO_DRAINING) return LEAST_WINDOW;
	return polite && c->phase == PIO_STEADY ? most(c->window / 2, LEAST_WINDOW) : c->window;
}

/* Bytes a second that a polite writer may accept, or all others together; 0: no cap. */
int64_t pio_control_rate(const pio_control *c, int polite) {
	int64_t rate = c->even ? c->sustained : c->rate;
	if (c->phase != PIO_STEADY) return 0;
	if (polite) return most(rate / FULL_SHARE * c->share, 1);
	return c->even ? most(rate + rate / (c->stops ? 16 : 4), 1) : 0;
}

/* ---- at what rate bytes may be accepted ---- */

static int64_t duration(const pio_rate *r, int64_t bytes) { return scaled(bytes, SECOND, r->rate); }

void pio_rate_set(pio_rate *r, int64_t window, int64_t rate) {
	r->rate = rate;
	r->burst = most(least(window, rate / BURSTS_A_SECOND), 1);
}

/* The most bytes to accept at once. */
int64_t pio_rate_piece(const pio_rate *r) { return r->rate > 0 ? most(r->burst / 2, 1) : INT64_MAX; }

/* How long to wait, in ns, before `bytes` may be accepted; 0: now. */
int64_t pio_rate_delay(const pio_rate *r, int64_t now, int64_t bytes) {
	if (r->rate <= 0) return 0;
	return most(r->due + duration(r, bytes) - duration(r, r->burst) - now, 0);
}

void pio_rate_accepted(pio_rate *r, int64_t now, int64_t bytes) {
	if (r->rate > 0) r->due = most(r->due, now) + duration(r, bytes);
}
