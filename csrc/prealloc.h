#ifndef PACEDIO_PREALLOC_H
#define PACEDIO_PREALLOC_H

#include "pacedio.h"

typedef struct pio_prealloc {
	int fd;
	int off;          /* nothing is allocated ahead (any more) */
	uint64_t type;    /* of the file system, once it is known that the file may be allocated ahead */
	int64_t expected; /* where the data will end; 0: not known */
	int64_t position; /* where the last write ended... */
	int64_t run;      /* ...and where it and those before it without a gap began */
	int64_t end;      /* of the file, once we know */
	int64_t until;    /* blocks are allocated up to here; 0: none by us */
	int64_t guessed;  /* beyond this blocks may be XFS's guess, which is ours to release */
	int64_t next;     /* a write beyond this may need more */
} pio_prealloc;

void pio_prealloc_init(pio_prealloc *p, int fd, int64_t expected);
void pio_prealloc_expect(pio_prealloc *p, int64_t end);
void pio_prealloc_ahead(pio_prealloc *p, int64_t off, int64_t len, int64_t window);
void pio_prealloc_before(pio_prealloc *p, int64_t off);
void pio_prealloc_wrote(pio_prealloc *p, int64_t off, int64_t len);
void pio_prealloc_truncated(pio_prealloc *p, int64_t size);
int pio_prealloc_release(pio_prealloc *p);

#endif
