/*
 * How many bytes may be in flight, and at what rate they may be accepted. Pure: the clock comes in as an argument.
 *
 * The limit is the one that the caller configured.
 *
 * The rate is kept as ATM's generic cell rate algorithm does (ITU-T I.371): `due` is when the bytes accepted so far
 * should have been accepted at exactly this rate, and more may come once they would be ahead of it by no more than
 * `burst`. A pause saves nothing up beyond that. The burst is a window, or 40 ms worth where that is less: 2 % of
 * any two seconds. Bytes are accepted in pieces of half a burst, so that a sleep that overran by less than the other
 * half does not slow the schedule down.
 */
#include "control.h"

#define SECOND 1000000000.0
#define BURSTS_A_SECOND 25

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t duration(const pio_control *c, int64_t bytes) {
	return (int64_t)((double)bytes * SECOND / (double)c->rate);
}

void pio_control_init(pio_control *c, int64_t limit, int64_t window, int64_t rate) {
	c->limit = limit;
	c->rate = rate;
	c->burst = most(least(window, rate / BURSTS_A_SECOND), 1);
	c->due = 0;
}

/* The most bytes to accept at once. */
int64_t pio_control_piece(const pio_control *c) { return c->rate > 0 ? most(c->burst / 2, 1) : INT64_MAX; }

/* How long to wait, in ns, before `bytes` may be accepted; 0: now. */
int64_t pio_control_delay(const pio_control *c, int64_t now, int64_t bytes) {
	if (c->rate <= 0) return 0;
	return most(c->due + duration(c, bytes) - duration(c, c->burst) - now, 0);
}

void pio_control_accepted(pio_control *c, int64_t now, int64_t bytes) {
	if (c->rate > 0) c->due = most(c->due, now) + duration(c, bytes);
}
