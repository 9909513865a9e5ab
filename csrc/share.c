/*
 * What the processes that write to one device know of each other: a small file in memory, one a device and user.
 *
 * Theory of operation
 * -------------------
 * The file holds the device's controller and a slot for each process, in which only that process writes (others count up
 * `word`, to wake it). So nothing has to be locked to read how much is in flight, and a process that is killed at any moment
 * leaves nothing locked:
 *
 *  - A slot belongs to whoever holds the lock on one byte of the file (an open file description's record lock, fcntl(2)). The
 *    kernel releases it when the process ends, however it ends, and whoever looks for a slot takes it over. A waiting process
 *    asks the kernel the same way whether one that is in its way still lives.
 *  - The controller is updated under the lock on another byte, which is only ever tried: a sample that finds it taken is
 *    dropped, but for its bytes. `updating` tells whether the last holder came to its end; if not, the controller begins anew.
 *
 * The file lies in /dev/shm, in a directory of the user's own that nobody else may write, since who can write it could hold up
 * everyone. So processes of one user share, within one container if /dev/shm is the container's own. Where there is no such
 * directory or no free slot, a process keeps its own budget. The file is never removed: what it knows of the device is there
 * for the next process, and removing it would race with one that has just opened it.
 */
#include "share.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "control.h"
#include "sys.h"

#define LAYOUT 1 /* part of the name: changes with pio_shared */

enum { CONTROL_BYTE, FIRST_SLOT_BYTE };

/* Claims a slot that nobody holds the lock on. */
static int claim(pio_share *s) {
	for (int i = 0; i < PIO_PROCESSES; i++) {
		if (SYS.lock(s->fd, FIRST_SLOT_BYTE + i, 1) < 0) continue;
		pio_slot *slot = &s->shared->slots[i];
		__atomic_store_n(&slot->waiting_since, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&slot->in_flight, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&slot->in_call, 0, __ATOMIC_RELAXED);
		s->slot = i;
		int used = __atomic_load_n(&s->shared->slots_used, __ATOMIC_RELAXED);
		while (used <= i && !__atomic_compare_exchange_n(&s->shared->slots_used, &used, i + 1, 0, __ATOMIC_RELAXED,
								 __ATOMIC_RELAXED))
			continue;
		return 0;
	}
	return -EAGAIN;
}

static int open_file(uint64_t device) {
	char directory[64], path[128];
	pio_status status;
	unsigned int user = SYS.user();

	snprintf(directory, sizeof directory, "/dev/shm/pacedio-%u", user);
	int rc = SYS.make_directory(directory, 0700);
	if (rc < 0 && rc != -EEXIST) return rc;
	rc = SYS.path_status(directory, &status); /* of the link, if it is one */
	if (rc < 0) return rc;
	if (status.mode != (S_IFDIR | 0700) || status.user != user) return -EPERM;
	snprintf(path, sizeof path, "%s/%d-%u:%u", directory, LAYOUT, (unsigned int)(device >> 32),
		 (unsigned int)(device & 0xffffffffU));
	return SYS.open_or_create(path, 0600);
}

static int open_shared(pio_share *s, uint64_t device) {
	void *address;
	s->fd = open_file(device);
	if (s->fd < 0) return s->fd;
	/* It grows to this if it is smaller; zeros are what it should be before anybody wrote to it. A hole would be filled
	 * at the first touch, and a full /dev/shm be a signal that nobody expects. */
	int rc = SYS.fallocate(s->fd, 0, 0, (int64_t)sizeof(pio_shared));
	if (rc == 0) rc = SYS.map_shared(s->fd, sizeof(pio_shared), &address);
	if (rc == 0) {
		s->shared = address;
		rc = claim(s);
		if (rc < 0) SYS.munmap(address, sizeof(pio_shared));
	}
	if (rc < 0) {
		SYS.close(s->fd);
		s->fd = -1;
	}
	return rc;
}

/* With the other processes on the device, the `sequence`th of its number, or alone where that cannot be had. 0, or -ENOMEM. */
int pio_share_open(pio_share *s, uint64_t device, uint64_t sequence, int with_others) {
	s->fd = -1;
	s->slot = 0;
	if (!with_others || open_shared(s, device) < 0) {
		void *memory;
		if (posix_memalign(&memory, _Alignof(pio_shared), sizeof(pio_shared)) != 0) return -ENOMEM;
		s->shared = memset(memory, 0, sizeof(pio_shared));
		s->shared->slots_used = 1;
	}
	if (pio_share_lock_control(s)) {
		/* Nobody was here before, or on another disk that had this number. */
		if (s->shared->control.limit == 0 || s->shared->sequence != sequence) {
			pio_control_init(&s->shared->control);
			s->shared->sequence = sequence;
		}
		pio_share_unlock_control(s);
	}
	return 0;
}

void pio_share_close(pio_share *s) {
	if (s->fd < 0) {
		free(s->shared);
		return;
	}
	pio_slot *slot = &s->shared->slots[s->slot];
	__atomic_store_n(&slot->waiting_since, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->in_flight, 0, __ATOMIC_RELAXED);
	SYS.munmap(s->shared, sizeof(pio_shared));
	SYS.close(s->fd);
}

/* The lock belongs to the open file, which the child has now as well, by its descriptor and by its mapping: it must not hold
 * the parent's slot after its death. */
void pio_share_forget(pio_share *s) {
	if (s->fd < 0) return;
	SYS.munmap(s->shared, sizeof(pio_shared));
	SYS.close(s->fd);
}

int pio_share_is_dead(const pio_share *s, int slot) {
	return s->fd >= 0 && slot != s->slot && SYS.is_locked(s->fd, FIRST_SLOT_BYTE + slot) == 0;
}

int pio_share_lock_control(const pio_share *s) {
	if (s->fd >= 0) {
		int rc = 0;
		for (int i = 0; i < 3; i++) {
			rc = SYS.lock(s->fd, CONTROL_BYTE, 1);
			if (rc == 0) break;
		}
		if (rc < 0) return 0;
		if (s->shared->updating) pio_control_init(&s->shared->control);
	}
	s->shared->updating = 1;
	return 1;
}

void pio_share_unlock_control(const pio_share *s) {
	s->shared->updating = 0;
	if (s->fd >= 0) SYS.lock(s->fd, CONTROL_BYTE, 0);
}
