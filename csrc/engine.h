#ifndef PACEDIO_ENGINE_H
#define PACEDIO_ENGINE_H

#include "pacedio.h"

typedef struct pio_engine {
	int fd;
	int kind; /* PIO_UNDECIDED, or what start, wait and drop do */
	int reason;
	int reason_errno;
	int keep_cache;
	int io_priority;
	int counts;     /* cachestat works on this descriptor */
	int verified;   /* on this mount, by this writer or an earlier one */
	int staying;    /* windows that `advise` syncs before it is patient again */
	int stayed;     /* what that number was last */
	int mapping_fd; /* readable, for `advise`; -1: none, fd: the descriptor itself */
	int64_t verified_dirty_pages;
	uint64_t mount;
	uint64_t device;
	uint64_t type; /* of the file system, as fstatfs has it */
} pio_engine;

void pio_engine_init(pio_engine *e, int fd, int keep_cache, int io_priority);
void pio_engine_close(pio_engine *e);

int pio_engine_nothing_to_pace(pio_engine *e, int reason);
int pio_engine_choose(pio_engine *e, int asked, pio_range last);
int pio_engine_start(pio_engine *e, pio_range r);
int pio_engine_wait(pio_engine *e, pio_range r, int written_again);
void pio_engine_drop(pio_engine *e, pio_range r);
int pio_engine_sync(pio_engine *e);
int64_t pio_engine_write(pio_engine *e, const void *buf, size_t n);

#endif
