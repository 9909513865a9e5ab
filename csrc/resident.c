/*
 * Which pages of a file are in the page cache, so that whoever reads it can leave the cache as it was found.
 *
 * posix_fadvise(DONTNEED) releases pages whoever brought them in, so only pages that were not resident before the
 * read may be dropped after it. mincore(2) over a short-lived mapping says which those are, and costs no I/O and no
 * page fault: the mapping is never touched.
 *
 * Since Linux 5.2 mincore answers only for files that the caller owns or may write; for all others it reports every
 * page as resident (kernel commit 134fca9063ad). To take that for an answer would only mean that nothing is dropped,
 * but a reader that chooses how to read by it would choose wrongly as well, so the two are told apart: a page that
 * cannot be resident is asked for first (pio_resident_known).
 */
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

/* A folio can reach past the end of the file, but none is this large. */
#define PAST_ANY_FOLIO ((int64_t)1 << 30)

static int64_t page_down(int64_t off) { return off - off % pio_page_size(); }

static int64_t pages_of(int64_t off, int64_t len) {
	int64_t page = pio_page_size();
	return (off + len - page_down(off) + page - 1) / page;
}

/* Whether mincore tells the truth about this descriptor's file: 1, or 0 where it does not, or cannot be asked. */
int pio_resident_known(int fd) {
	pio_status status;
	unsigned char beyond = 1;
	void *address;
	size_t page = (size_t)pio_page_size();
	int error = SYS.status(fd, &status);
	if (error < 0 || !S_ISREG(status.mode) || status.size > (uint64_t)(INT64_MAX - 2 * PAST_ANY_FOLIO)) return 0;
	/* A file system with a smaller largest file refuses the mapping: not known. */
	if (SYS.mmap(fd, page_down((int64_t)status.size + PAST_ANY_FOLIO), page, &address) < 0) return 0;
	error = SYS.mincore(address, page, &beyond);
	SYS.munmap(address, page);
	return error == 0 && !(beyond & 1);
}

/* How many elements pio_resident fills in for this range: one a page that the range touches. */
int64_t pio_resident_pages(int64_t off, int64_t len) { return len > 0 ? pages_of(off, len) : 0; }

/* Fills in `resident`, 1 or 0 a page from the one that holds `off` on. Returns how many of them are resident, or a
 * negative errno. Means something only where pio_resident_known. */
int64_t pio_resident(int fd, int64_t off, int64_t len, unsigned char *resident) {
	int64_t start = page_down(off), count = pio_resident_pages(off, len), found = 0;
	size_t size = (size_t)(count * pio_page_size());
	void *address;
	int error;
	if (count == 0) return 0;
	error = SYS.mmap(fd, start, size, &address);
	if (error < 0) return error;
	error = SYS.mincore(address, size, resident);
	SYS.munmap(address, size);
	if (error < 0) return error;
	for (int64_t i = 0; i < count; i++) {
		resident[i] &= 1; /* the other bits are reserved */
		found += resident[i];
	}
	return found;
}

/* Drops the pages of the range that `before`, filled in by pio_resident for the same range, calls not resident: one
 * call a run of them. A hint: what the kernel answers is no error of the caller's. */
void pio_resident_drop(int fd, int64_t off, int64_t len, const unsigned char *before) {
	int64_t page = pio_page_size(), start = page_down(off), count = pio_resident_pages(off, len), run = 0;
	for (int64_t i = 0; i <= count; i++) {
		if (i < count && !before[i]) {
			run++;
		} else if (run > 0) {
			/* Whole pages, also at the end of the file: the kernel leaves a page that is named in part. */
			SYS.fadvise(fd, start + (i - run) * page, run * page, POSIX_FADV_DONTNEED);
			run = 0;
		}
	}
}
