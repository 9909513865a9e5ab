#ifndef PACEDIO_DEVICE_H
#define PACEDIO_DEVICE_H

#include <pthread.h>

#include "share.h"

typedef struct pio_device pio_device;

/* A writer, as its device sees it. What is below `lock` is the device's. */
typedef struct pio_member {
	pio_device *device; /* NULL: none */
	int polite;
	pthread_mutex_t *lock; /* held whenever the writer's windows are touched */
	int64_t limit;         /* of its own, if that is less than the device's; 0: none */
	int64_t window;        /* likewise */

	struct pio_member *next;
	uint64_t generation; /* of the process: a forked child's copies are nobody */
	int64_t in_flight;
	int64_t dirty;
	int64_t ahead;       /* granted, not written yet */
	int64_t oldest;      /* when the oldest of its windows under writeback was started; 0: none */
	int64_t granted_at;  /* when it was granted room last */
	int64_t used_at;     /* when it last wrote */
	int64_t since;       /* when it began to want room; 0: it does not */
	int held_back;       /* it slept for the device's rate, and has not started a window since */
	int waiting;         /* it is asleep */
	uint32_t word;       /* a futex to sleep on */
	uint32_t seen;       /* its value when sleep was advised */
	uint32_t *sleeps_on;
} pio_member;

enum {
	PIO_GRANTED,
	PIO_RELIEVE, /* do something for the member handed out, whose lock is held, unless it is the one that asks */
	PIO_SLEEP
};

int pio_device_join(pio_member *m, uint32_t major, uint32_t minor, int with_others);
int pio_device_has(const pio_member *m);
void pio_device_leave(pio_member *m);
void pio_device_enter(const pio_member *m);
void pio_device_exit(const pio_member *m);
int pio_device_granted(pio_member *m, int64_t bytes);
int pio_device_ask(pio_member *m, int64_t need, int idle, pio_member **whom);
int pio_device_sleep(pio_member *m);
void pio_device_let_go(const pio_member *m);
void pio_device_give_back(pio_member *m);
void pio_device_settle(pio_member *m, int64_t in_flight, int64_t dirty, int64_t oldest);
void pio_device_started(pio_member *m, int64_t now, int64_t bytes, pio_stamp *s);
void pio_device_completed(pio_member *m, int64_t now, const pio_stamp *s, int64_t blocked);
int64_t pio_device_limit(const pio_member *m);
int64_t pio_device_window(const pio_member *m);
int64_t pio_device_rate(const pio_member *m);
int64_t pio_device_reserve(pio_member *m, int64_t now, int64_t bytes);
void pio_device_stats(const pio_member *m, pio_stats *out);

#endif
