/*
 * One budget a device, for all its writers that follow the device: who may write next, and who waits for whom.
 *
 * Theory of operation
 * -------------------
 * `total` counts what the writers of this process have in flight, and what they were granted and have not written yet.
 * Together with what other processes have in flight (share.c) it stays below the controller's limit (control.c). Room is
 * granted for the rest of a window at once: so windows stay whole however many writers there are, and with more writers
 * than windows in the budget, they take turns.
 *
 * Who wants room lines up (`since`). Only the first in line is served, so nobody starves, and it works for everyone: it
 * waits for the oldest window under writeback of any writer of this process, not of its own only, and then asks again.
 * The others sleep, on a futex each, and are woken when they are first. What is idle thus never holds up what is not:
 *
 *  - An idle writer's windows are waited for by whoever is first in line.
 *  - Its grant is taken back; it asks again if it ever goes on.
 *  - Its ranges that were never started are started, when nothing else is left.
 *  - Another process's windows cannot be waited for. It does that itself when it waits for room, before it sleeps; if it
 *    is idle, stopped or dead, its bytes do not count any more after the time that the device may have taken for them.
 *
 * A writer's windows are touched only with its lock held, which a writer gives up while it sleeps or works for another. Locks
 * of others are only tried: whoever holds one is awake, and tells when it lets go. Order: a writer's lock, then the
 * device's; the registry's, then the device's.
 *
 * A polite writer is behind all others in line. It may have in flight, together with all others, what the controller gives
 * to polite ones; after FLOOR_NS it is served as the others are, so it never stops altogether.
 *
 * After fork(2) the child begins with an empty registry: its copies of the parent's writers belong to another generation, and
 * are nobody here.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"
#include "disk.h"
#include "sys.h"

#define DEVICES 64
#define LEAST_WINDOW (64 * 1024)
#define MOST_WINDOW (1024 * 1024)
#define MS ((int64_t)1000000)
#define IDLE_NS (6 * MS)      /* a grant not used for this long may be taken back; Python lets threads wait for 5 ms */
#define NAP_NS (20 * MS)      /* of the first in line: news may get lost with a process that is killed */
#define POLITE_NAP_NS (2 * MS)
#define SLEEP_NS (100 * MS)   /* then signal handlers are given their chance */
#define STALE_NS (200 * MS)   /* a process that was not heard of for this long is idle, or to be asked for */
#define CALL_NS (1000 * MS)   /* as long as it may be in a call for: it may have been stopped (SIGSTOP) in it */
#define FLOOR_NS (250 * MS)
#define PRESSURE_NS (100 * MS)
#define MOST_DUE (500 * MS) /* that one may have to wait for the rate; more is garbage */

struct pio_device {
	uint64_t id, sequence;
	int with_others;
	int references;
	pthread_mutex_t lock;
	pio_share share;
	pio_member *members;
	int waiting; /* members asleep */
	int stuck;   /* the first in line is asleep since all that it could have waited for was in somebody's hands */
	int64_t total;
	int64_t stalled; /* blocked in waits so far, ns */
	int64_t missed;  /* bytes that completed while another process had the controller */
	int64_t pressure_at, pressure, pressure_stalled;
};

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static pio_device *registry[DEVICES];
static uint64_t generation = 1;
static int64_t cap; /* bytes that this process may have in flight; 0: no cap */
static int pressure_fd = -1;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* What the kernel will bear without stopping the writers of this process itself (Python reads it: observe.py). */
void pio_set_cap(int64_t bytes) { __atomic_store_n(&cap, bytes, __ATOMIC_RELAXED); }

/* ---- joining and leaving ---- */

/* Nobody opens a device meanwhile: the child would inherit it half made, and hold its slot. */
static void before_fork(void) { pthread_mutex_lock(&registry_lock); }

static void after_fork(void) { pthread_mutex_unlock(&registry_lock); }

static void forget_parent(void) {
	generation++;
	if (pressure_fd >= 0) SYS.close(pressure_fd);
	pressure_fd = -1;
	pthread_mutex_init(&registry_lock, NULL);
	for (int i = 0; i < DEVICES; i++) {
		if (registry[i]) pio_share_forget(&registry[i]->share);
		registry[i] = NULL;
	}
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, forget_parent); }

static pio_device *device_new(uint64_t id, uint64_t sequence, int with_others) {
	pio_device *d = calloc(1, sizeof *d);
	if (!d) return NULL;
	d->id = id;
	d->sequence = sequence;
	d->with_others = with_others;
	if (pio_share_open(&d->share, id, sequence, with_others) < 0) {
		free(d);
		return NULL;
	}
	pthread_mutex_init(&d->lock, NULL);
	return d;
}

static void device_free(pio_device *d) {
	pio_share_close(&d->share);
	pthread_mutex_destroy(&d->lock);
	free(d);
}

static int is_device(const pio_device *d, uint64_t id, uint64_t sequence, int with_others) {
	return d && d->id == id && d->sequence == sequence && d->with_others == with_others;
}

/* Where the device is in the registry, or where it can go: an empty place, or that of one that nobody uses any more. */
static int find_place(uint64_t id, uint64_t sequence, int with_others) {
	int place = -1;
	for (int i = 0; i < DEVICES; i++) {
		const pio_device *d = registry[i];
		if (is_device(d, id, sequence, with_others)) return i;
		if (place < 0 || (registry[place] && !d)) place = !d || d->references == 0 ? i : place;
	}
	return place;
}

/* Makes the writer one of the device's. 0, or why it keeps a budget of its own: -ENOMEM, -EMFILE (too many devices). A device
 * stays when its last writer leaves, since the next file is often on the same one. */
int pio_device_join(pio_member *m, uint32_t major, uint32_t minor, int with_others) {
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	uint64_t id = pio_disk_of(major, minor), sequence = pio_disk_sequence(id);
	int rc = 0;

	pthread_once(&once, watch_forks);
	pthread_mutex_lock(&registry_lock);
	int place = find_place(id, sequence, with_others);
	if (place < 0) {
		rc = -EMFILE;
	} else if (!is_device(registry[place], id, sequence, with_others)) {
		pio_device *unused = registry[place];
		registry[place] = NULL;
		if (unused) device_free(unused);
		registry[place] = device_new(id, sequence, with_others);
		if (!registry[place]) rc = -ENOMEM;
	}
	if (rc == 0) {
		pio_device *d = registry[place];
		pthread_mutex_lock(&d->lock);
		d->references++;
		m->generation = generation;
		m->next = d->members;
		d->members = m;
		m->device = d;
		pthread_mutex_unlock(&d->lock);
	}
	pthread_mutex_unlock(&registry_lock);
	return rc;
}

static pio_device *device_of(const pio_member *m) {
	return m->device && m->generation == generation ? m->device : NULL;
}

int pio_device_has(const pio_member *m) { return device_of(m) != NULL; }

/* ---- the others ---- */

static pio_slot *own_slot(const pio_device *d) { return &d->share.shared->slots[d->share.slot]; }

#define get(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#define put(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELAXED)

static const pio_control *control_of(const pio_device *d) { return &d->share.shared->control; }

/* The memory is shared: whatever is in it must not lead astray. */
static int64_t window_of(const pio_device *d, int polite) {
	int64_t window = pio_control_window(control_of(d), polite), bound = get(cap);
	if (window < LEAST_WINDOW || window > MOST_WINDOW || window % LEAST_WINDOW != 0) window = MOST_WINDOW / 2;
	while (bound > 0 && window > LEAST_WINDOW && 2 * window > bound) window /= 2;
	return window;
}

static int is_draining(const pio_device *d) { return control_of(d)->phase == PIO_DRAINING; }

static int64_t limit_for(const pio_device *d, int polite) {
	int64_t window = window_of(d, polite), bound = get(cap);
	int64_t limit = least(most(pio_control_limit(control_of(d), polite), window), PIO_WINDOWS / 2 * window);
	return bound > 0 ? least(limit, bound) : limit;
}

/* What a writer may have in flight together with all others: at least two windows, if it has windows of its own. */
static int64_t limit_of(const pio_device *d, const pio_member *m, int polite) {
	int64_t limit = limit_for(d, polite);
	return is_draining(d) ? limit : most(limit, 2 * m->window);
}

/* How old a process's news are, and a millisecond more: it may have spoken since `now` was read. A time to come beyond that is no
 * news, but garbage, or of another clock, and counts as very old. */
static uint64_t age_of(const pio_slot *s, int64_t now) { return (uint64_t)now + MS - (uint64_t)get(s->seen_at); }

/* Does what this process said of its bytes in flight still hold? A call may last as long as the device takes; after one, what
 * was started then has completed by now. */
static int is_current(const pio_device *d, int slot, int64_t now) {
	const pio_slot *s = &d->share.shared->slots[slot];
	uint64_t age = age_of(s, now);
	if (age < STALE_NS) return 1;
	return age < CALL_NS && get(s->in_call) && !pio_share_is_dead(&d->share, slot);
}

/* What other processes have in flight; and since when the longest waiting of them waits. */
static int64_t of_others(const pio_device *d, int64_t now, int64_t *since, int *who) {
	int64_t total = 0;
	*since = INT64_MAX;
	*who = -1;
	int used = (int)least(get(d->share.shared->slots_used), PIO_PROCESSES);
	for (int i = 0; i < used; i++) {
		const pio_slot *s = &d->share.shared->slots[i];
		if (i == d->share.slot) continue;
		int64_t in_flight = get(s->in_flight), waiting = get(s->waiting_since);
		if (in_flight > 0 && is_current(d, i, now)) total += in_flight;
		/* Who waits is heard of after each nap. */
		if (waiting > 0 && waiting < *since && age_of(s, now) < STALE_NS) {
			*since = waiting;
			*who = i;
		}
	}
	return total;
}

static void wake(uint32_t *word) {
	__atomic_add_fetch(word, 1, __ATOMIC_RELEASE);
	SYS.futex_wake(word);
}

static void publish(pio_device *d, int64_t now) {
	pio_slot *s = own_slot(d);
	put(s->in_flight, d->total);
	put(s->seen_at, now);
}

/* ---- lining up ---- */

/* Is `a` to be served before `b`? */
static int precedes(const pio_member *a, const pio_member *b, int64_t now) {
	int a_last = a->polite && now - a->since < FLOOR_NS, b_last = b->polite && now - b->since < FLOOR_NS;
	return a_last != b_last ? b_last : a->since < b->since;
}

/* The first in line of those who are asleep. */
static pio_member *first_waiting(const pio_device *d, int64_t now) {
	pio_member *first = NULL;
	if (d->waiting == 0) return NULL;
	for (pio_member *m = d->members; m; m = m->next)
		if (m->waiting && (!first || precedes(m, first, now))) first = m;
	return first;
}

/* There may be room: wakes who is first in line here, and, since it may be their turn, who is in other processes. */
static void tell(pio_device *d, int64_t now) {
	int64_t since;
	int who;
	pio_member *first = first_waiting(d, now);
	put(d->stuck, 0);
	if (first) wake(first->sleeps_on);
	of_others(d, now, &since, &who);
	if (who >= 0) wake(&d->share.shared->slots[who].word);
}

static void take_back(pio_device *d, pio_member *m) {
	d->total -= m->ahead;
	m->ahead = 0;
}

/* Finds something that makes room: takes back idle grants, else names whom to relieve, its lock held. */
static pio_member *find_relief(pio_device *d, pio_member *asking, int64_t now, int *took_back) {
	for (int dirty_ones = 0; dirty_ones < 2; dirty_ones++) {
		pio_member *best = NULL;
		for (pio_member *m = d->members; m; m = m->next) {
			int64_t age = dirty_ones ? m->used_at : m->oldest;
			if (dirty_ones ? m->dirty == 0 || m->oldest != 0 : m->oldest == 0) continue;
			if (best && age >= (dirty_ones ? best->used_at : best->oldest)) continue;
			if (m != asking && pthread_mutex_trylock(m->lock) != 0) continue;
			if (best && best != asking) pthread_mutex_unlock(best->lock);
			best = m;
		}
		if (best) return best;
		if (dirty_ones) break;
		for (pio_member *m = d->members; m; m = m->next)
			if (m != asking && m->ahead > 0 && now - m->used_at >= IDLE_NS) {
				take_back(d, m);
				*took_back = 1;
			}
		if (*took_back) break;
	}
	return NULL;
}

/* Are these bytes left of the last grant? They are not taken back then, until the grant is idle for as long again. */
int pio_device_granted(pio_member *m, int64_t bytes) {
	pio_device *d = device_of(m);
	if (!d) return 1;
	pthread_mutex_lock(&d->lock);
	int enough = bytes <= m->ahead;
	if (enough) m->used_at = SYS.now();
	pthread_mutex_unlock(&d->lock);
	return enough;
}

/*
 * Asks for `need` bytes in place of what is left of the last grant. PIO_GRANTED; or PIO_RELIEVE, `*whom` being the writer
 * whose oldest window is to be waited for (or ranges started); or PIO_SLEEP, then pio_device_sleep is to be called with the
 * writer's own lock released. After both, ask again. `idle`: the last PIO_RELIEVE found nothing to do.
 */
int pio_device_ask(pio_member *m, int64_t need, int idle, pio_member **whom) {
	pio_device *d = device_of(m);
	int64_t since, now;
	int who, answer;
	if (!d) return PIO_GRANTED;

	pthread_mutex_lock(&d->lock);
	now = SYS.now();
	if (m->since == 0) m->since = now;
	take_back(d, m);
	m->used_at = now;
	if (pio_control_is_stale(control_of(d), now) && pio_share_lock_control(&d->share)) {
		pio_control_forget(&d->share.shared->control, now);
		pio_share_unlock_control(&d->share);
	}
again:;
	int last = m->polite && now - m->since < FLOOR_NS;
	int64_t others = of_others(d, now, &since, &who);
	int64_t in_flight = d->total + others;
	pio_member *first = first_waiting(d, now);
	int is_first = !first || first == m || precedes(m, first, now);
	int fits = in_flight == 0 || in_flight + need <= limit_of(d, m, last);
	int turn = is_first && since >= m->since;

	if (fits && turn) {
		d->total += need;
		m->ahead = need;
		m->since = 0;
		m->granted_at = now;
		publish(d, now);
		tell(d, now);
		answer = PIO_GRANTED;
	} else {
		int took_back = 0;
		pio_member *relief = is_first && !idle && !(last && fits) ? find_relief(d, m, now, &took_back) : NULL;
		if (took_back) goto again;
		*whom = relief;
		answer = relief ? PIO_RELIEVE : PIO_SLEEP;
		if (answer == PIO_SLEEP) {
			m->waiting = 1;
			d->waiting++;
			m->sleeps_on = is_first ? &own_slot(d)->word : &m->word;
			m->seen = __atomic_load_n(m->sleeps_on, __ATOMIC_ACQUIRE);
			if (is_first && !last) put(own_slot(d)->waiting_since, m->since);
			if (is_first && !fits) put(d->stuck, 1);
		}
		publish(d, now);
	}
	pthread_mutex_unlock(&d->lock);
	return answer;
}

/* Sleeps until there may be room, as pio_device_ask advised. -EINTR: it was long enough for signal handlers to be run. */
int pio_device_sleep(pio_member *m) {
	pio_device *d = device_of(m);
	if (!d) return 0;
	uint32_t *own = &own_slot(d)->word;
	int64_t nap = m->sleeps_on != own ? SLEEP_NS : m->polite ? POLITE_NAP_NS : NAP_NS;
	int rc = SYS.futex_wait(m->sleeps_on, m->seen, nap);

	pthread_mutex_lock(&d->lock);
	int64_t now = SYS.now();
	m->waiting = 0;
	d->waiting--;
	if (m->sleeps_on == own) put(own_slot(d)->waiting_since, 0);
	publish(d, now);
	int late = now - m->since > SLEEP_NS;
	pthread_mutex_unlock(&d->lock);
	return rc == -EINTR || (late && rc == -ETIMEDOUT) ? -EINTR : 0;
}

/* ---- news of a writer ---- */

/* What the writer has in flight by now, `dirty` of it not started, the oldest of the rest started at `oldest`. */
void pio_device_settle(pio_member *m, int64_t in_flight, int64_t dirty, int64_t oldest) {
	pio_device *d = device_of(m);
	if (!d) return;
	pthread_mutex_lock(&d->lock);
	int64_t now = SYS.now();
	int64_t before = m->in_flight + m->ahead;
	m->ahead = most(m->ahead - most(in_flight - m->in_flight, 0), 0);
	m->in_flight = in_flight;
	m->dirty = dirty;
	m->oldest = oldest;
	d->total += in_flight + m->ahead - before;
	publish(d, now);
	if (in_flight + m->ahead < before) tell(d, now);
	pthread_mutex_unlock(&d->lock);
}

/* The writer's windows are in nobody's hands any more. */
void pio_device_let_go(const pio_member *m) {
	pio_device *d = device_of(m);
	if (!d || !get(d->stuck)) return;
	pthread_mutex_lock(&d->lock);
	const pio_member *first = first_waiting(d, SYS.now());
	if (first != m) {
		put(d->stuck, 0);
		if (first) wake(first->sleeps_on);
	}
	pthread_mutex_unlock(&d->lock);
}

/* The writer will not write for a while. */
void pio_device_give_back(pio_member *m) {
	pio_device *d = device_of(m);
	if (!d) return;
	pthread_mutex_lock(&d->lock);
	if (m->ahead > 0) {
		int64_t now = SYS.now();
		take_back(d, m);
		publish(d, now);
		tell(d, now);
	}
	pthread_mutex_unlock(&d->lock);
}

/* Around every call of the writer that may block: what is under way is no old news. */
void pio_device_enter(const pio_member *m) {
	pio_device *d = device_of(m);
	if (d) __atomic_add_fetch(&own_slot(d)->in_call, 1, __ATOMIC_RELAXED);
}

void pio_device_exit(const pio_member *m) {
	pio_device *d = device_of(m);
	if (d) __atomic_sub_fetch(&own_slot(d)->in_call, 1, __ATOMIC_RELAXED);
}

void pio_device_leave(pio_member *m) {
	pio_device *d = device_of(m);
	m->device = NULL;
	if (!d) return;
	pthread_mutex_lock(&registry_lock);
	pthread_mutex_lock(&d->lock);
	for (pio_member **link = &d->members; *link; link = &(*link)->next)
		if (*link == m) {
			*link = m->next;
			break;
		}
	take_back(d, m);
	d->total -= m->in_flight;
	m->in_flight = m->dirty = m->oldest = 0;
	int64_t now = SYS.now();
	publish(d, now);
	tell(d, now);
	d->references--;
	pthread_mutex_unlock(&d->lock);
	pthread_mutex_unlock(&registry_lock);
}

/* `bytes` of the writer's dirty ones are about to be started. */
void pio_device_started(pio_member *m, int64_t now, int64_t bytes, pio_stamp *s) {
	pio_device *d = device_of(m);
	int64_t since;
	int who;
	if (!d) return;
	int64_t dirty = 0;
	pthread_mutex_lock(&d->lock);
	/* At once, not only when the writer settles: for another one that starts meanwhile they are under writeback. */
	m->dirty = most(m->dirty - bytes, 0);
	for (const pio_member *other = d->members; other; other = other->next) dirty += other->dirty + other->ahead;
	pio_control_started(control_of(d), now, bytes, d->total + of_others(d, now, &since, &who), dirty, m->granted_at, m->polite,
			    m->held_back, s);
	/* Room is left only until one of these is awake. */
	if (d->waiting > 0 || who >= 0) s->demanded = s->wanted = 1;
	m->held_back = 0;
	pthread_mutex_unlock(&d->lock);
}

/* "some avg10=0.00 avg60=0.00 avg300=0.00 total=12345", in microseconds; -1: not known. */
static int64_t read_pressure(void) {
	char text[256];
	int fd = get(pressure_fd), none = -1;
	if (fd < 0) {
		fd = SYS.open("/proc/pressure/io", O_RDONLY);
		if (fd < 0) return -1;
		/* Of two devices at the same moment, one was first. */
		if (!__atomic_compare_exchange_n(&pressure_fd, &none, fd, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
			SYS.close(fd);
			fd = none;
		}
	}
	int64_t n = SYS.pread(fd, text, sizeof text - 1, 0);
	if (n <= 0) return -1;
	text[n] = '\0';
	const char *total = strstr(text, "total=");
	return total ? (int64_t)strtoll(total + 6, NULL, 10) * 1000 : -1;
}

/* Tells the controller what pressure there was since the last look, and what of it was our own. */
static void look_at_pressure(pio_device *d, int64_t now) {
	if (now - d->pressure_at < PRESSURE_NS) return;
	int64_t pressure = read_pressure();
	if (pressure < 0) return;
	if (d->pressure_at && now - d->pressure_at < 10 * PRESSURE_NS) {
		pio_control_pressure(&d->share.shared->control, pressure - d->pressure, d->stalled - d->pressure_stalled,
				     now - d->pressure_at);
	}
	d->pressure_at = now;
	d->pressure = pressure;
	d->pressure_stalled = d->stalled;
}

/* A window was waited for, which blocked for `blocked` ns; 0: it was complete before. */
void pio_device_completed(pio_member *m, int64_t now, const pio_stamp *s, int64_t blocked) {
	pio_device *d = device_of(m);
	if (!d) return;
	pthread_mutex_lock(&d->lock);
	d->stalled += blocked;
	d->missed += s->bytes;
	if (pio_share_lock_control(&d->share)) {
		pio_control *c = &d->share.shared->control;
		c->delivered += d->missed - s->bytes;
		d->missed = 0;
		pio_control_completed(c, now, s, blocked > 0, m->polite);
		if (m->polite) look_at_pressure(d, now);
		pio_share_unlock_control(&d->share);
	}
	pthread_mutex_unlock(&d->lock);
}

/* ---- what the controller says ---- */

int64_t pio_device_window(const pio_member *m) {
	const pio_device *d = device_of(m);
	int64_t window = d ? window_of(d, m->polite) : 0;
	/* To see the delay without a queue, everyone's windows are small for a moment. */
	return m->window && !(d && is_draining(d) && window < m->window) ? m->window : window;
}

int64_t pio_device_limit(const pio_member *m) {
	const pio_device *d = device_of(m);
	int64_t limit = d ? limit_of(d, m, m->polite) : INT64_MAX;
	if (d && is_draining(d)) limit = pio_device_window(m);
	return m->limit > 0 ? least(limit, m->limit) : limit;
}

/* Bytes a second that this writer may accept if it is polite, or all others together; 0: no cap. */
int64_t pio_device_rate(const pio_member *m) {
	const pio_device *d = device_of(m);
	int64_t rate = d ? pio_control_rate(control_of(d), m->polite) : 0;
	/* What is in the shared memory must not stop anybody. */
	return rate <= 0 ? 0 : most(rate, LEAST_WINDOW);
}

/* How long to wait, in ns, until the rate of all writers admits so many bytes, which are counted as accepted by this. Whoever comes
 * next is thus behind this one, in any process. */
int64_t pio_device_reserve(pio_member *m, int64_t now, int64_t bytes) {
	pio_device *d = device_of(m);
	pio_rate rate = {.rate = pio_device_rate(m)};
	if (!d || rate.rate == 0) return 0;
	int64_t *due = &d->share.shared->due, seen = get(*due), delay;
	rate.burst = 2 * window_of(d, 0);
	do {
		rate.due = seen < now + MOST_DUE ? seen : now;
		delay = pio_rate_delay(&rate, now, bytes);
		pio_rate_accepted(&rate, now, bytes);
	} while (!__atomic_compare_exchange_n(due, &seen, rate.due, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
	if (delay > 0) m->held_back = 1;
	return least(delay, MOST_DUE);
}

void pio_device_stats(const pio_member *m, pio_stats *out) {
	const pio_device *d = device_of(m);
	if (!d) return;
	int64_t bound = get(cap);
	const pio_control *c = control_of(d);
	out->base_delay_ns = c->base;
	out->delivery_rate = c->even ? c->sustained : c->rate;
	out->shared = d->share.fd >= 0;
	if (m->limit > 0 && m->limit <= limit_for(d, m->polite))
		out->limited_by = PIO_BY_CONFIGURATION;
	else if (bound > 0 && bound <= most(pio_control_limit(c, m->polite), window_of(d, m->polite)))
		out->limited_by = PIO_BY_CGROUP;
	else
		out->limited_by = c->rate == 0 ? PIO_BY_NOTHING : PIO_BY_DEVICE;
}
