#ifndef PACEDIO_SHARE_H
#define PACEDIO_SHARE_H

#include "pacedio.h"

/* A process, as the others on this device see it. Only itself writes here; others count up `word`, to wake it. */
typedef struct pio_slot {
	_Alignas(64) int64_t seen_at; /* when it last did anything, on the monotonic clock */
	int64_t in_flight;            /* bytes */
	int64_t waiting_since;        /* 0: it does not wait for room */
	uint32_t in_call;             /* it is in a call: old news may be true still */
	uint32_t word;                /* a futex; changes whenever there may be room */
} pio_slot;

typedef struct pio_shared {
	pio_control control;
	uint64_t sequence; /* of the disk: which of those that had this number */
	int64_t due;       /* when what all writers but polite ones accepted was due, at the controller's rate */
	int32_t updating; /* whoever died at this left `control` in pieces */
	int32_t slots_used;
	pio_slot slots[PIO_PROCESSES];
} pio_shared;

typedef struct pio_share {
	pio_shared *shared;
	int fd;   /* holds this process's lock on its slot; -1: the memory is our own */
	int slot; /* ours */
} pio_share;

int pio_share_open(pio_share *s, uint64_t device, uint64_t sequence, int with_others);
void pio_share_close(pio_share *s);
void pio_share_forget(pio_share *s); /* in a forked child */
int pio_share_is_dead(const pio_share *s, int slot);
int pio_share_lock_control(const pio_share *s);
void pio_share_unlock_control(const pio_share *s);

#endif
