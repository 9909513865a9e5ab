/*
 * The whole C API, declared once: cffi reads this file as it is, and pacedio.h includes it for the C compiler.
 * So it holds plain declarations only, no directive but simple constants.
 *
 * Conventions: offsets, lengths and sizes are bytes; times are nanoseconds of CLOCK_MONOTONIC; whatever can fail
 * returns a negative errno.
 */

/* ---- sys: the only way to the kernel ------------------------------------------------------------------- */

/* Pages of a range as cachestat(2) counts them. */
typedef struct pio_pages {
	uint64_t cached;
	uint64_t dirty;
	uint64_t writeback;
	uint64_t evicted;
	uint64_t recently_evicted;
} pio_pages;

/* What statx(2) says of a descriptor. `mount` is the unique mount id where the kernel has it (6.8), else the
 * reusable one (5.8), else 0. */
typedef struct pio_status {
	uint32_t mode;
	uint64_t size;
	uint64_t blocks; /* of 512 bytes */
	uint64_t inode;
	uint64_t mount;
	uint32_t dev_major;
	uint32_t dev_minor;
	uint32_t rdev_major; /* of the device that a device node stands for */
	uint32_t rdev_minor;
	uint32_t user;
} pio_status;

/* A part of a file that has blocks, or will have them. */
typedef struct pio_extent {
	int64_t off;
	int64_t len;
	uint32_t flags; /* FIEMAP_EXTENT_* */
} pio_extent;

/* One entry a system call, each returning its result or a negative errno. Tests replace entries to make the
 * failure branches run; nothing else writes to the table. */
typedef struct pio_sys {
	int64_t (*read)(int fd, void *buf, size_t n);
	int64_t (*pread)(int fd, void *buf, size_t n, int64_t off);
	int64_t (*write)(int fd, const void *buf, size_t n);
	int64_t (*write_uncached)(int fd, const void *buf, size_t n); /* pwritev2(-1, RWF_DONTCACHE) */
	int64_t (*lseek)(int fd, int64_t off, int whence);
	int (*ftruncate)(int fd, int64_t size);
	int (*sync_file_range)(int fd, int64_t off, int64_t len, unsigned int flags);
	int (*fadvise)(int fd, int64_t off, int64_t len, int advice);
	int (*fdatasync)(int fd);
	int (*cachestat)(int fd, int64_t off, int64_t len, pio_pages *out); /* len 0: to the end */
	int (*mmap)(int fd, int64_t off, size_t len, void **out);           /* PROT_READ, MAP_SHARED */
	int (*munmap)(void *addr, size_t len);
	int (*msync)(void *addr, size_t len); /* MS_SYNC */
	int (*mincore)(void *addr, size_t len, unsigned char *vec);
	int (*open)(const char *path, int flags);
	int (*close)(int fd);
	int (*get_flags)(int fd); /* fcntl(F_GETFL) */
	int (*status)(int fd, pio_status *out);
	int (*file_system)(int fd, uint64_t *magic); /* fstatfs(2), f_type */
	int64_t (*available)(int fd);                /* fstatfs(2), bytes that everybody may still use */
	int (*fallocate)(int fd, int mode, int64_t off, int64_t len);
	int (*next_extent)(int fd, int64_t off, pio_extent *out); /* FS_IOC_FIEMAP; 0: no extent ends after `off` */
	int (*inode_flags)(int fd);                               /* FS_IOC_GETFLAGS */
	int64_t (*mount_id)(int fd);                              /* the one that /proc/self/mountinfo has */
	int (*ioprio_get)(void);                     /* of the calling thread */
	int (*ioprio_set)(int priority);
	int64_t (*now)(void);
	int (*sleep)(int64_t ns);
	int (*process)(void);       /* getpid(2) */
	unsigned int (*user)(void); /* geteuid(2) */
	int (*path_status)(const char *path, pio_status *out);                    /* lstat(2) */
	int (*make_directory)(const char *path, unsigned int mode);
	int (*open_or_create)(const char *path, unsigned int mode);               /* to read and write, not through a link */
	int (*map_shared)(int fd, size_t len, void **out);                        /* to read and write */
	int (*only_entry)(const char *directory, char *name, size_t size);        /* 0, 1 or 2 (more) entries; 1: its name */
	int (*lock)(int fd, int64_t byte, int take);                              /* F_OFD_SETLK */
	int (*is_locked)(int fd, int64_t byte);                                   /* F_OFD_GETLK: by others */
	int (*futex_wait)(uint32_t *word, uint32_t value, int64_t ns);
	int (*futex_wake)(uint32_t *word); /* all that wait */
} pio_sys;

extern pio_sys pio_sys_table;

int64_t pio_page_size(void);

/* ---- window: which ranges to start, wait for and drop, and when ------------------------------------------ */

#define PIO_RANGES 32   /* dirty ranges a planner keeps apart */
#define PIO_WINDOWS 256 /* started windows it keeps apart */

typedef struct pio_range {
	int64_t off;
	int64_t len;
} pio_range;

enum {
	PIO_DONE = 0,
	PIO_START = 1,
	PIO_WAIT = 2,
	PIO_DROP = 3
};

typedef struct pio_window {
	int64_t page;
	int64_t window;
	int64_t limit;
	int64_t position;       /* end of the last write */
	int64_t dirty_bytes;    /* sum of dirty[] */
	int64_t started_bytes;  /* sum of started[] */
	int64_t most_in_flight; /* largest sum of the two so far */
	uint64_t starts;        /* windows started so far; the oldest of started[] is number starts - started_count */
	int dirty_count;
	int started_head;
	int started_count;
	int draining;       /* a window's worth of scattered ranges is being started */
	pio_range dropping; /* completed, not yet handed out to be dropped; len 0: nothing */
	pio_range dirty[PIO_RANGES];
	pio_range started[PIO_WINDOWS];
} pio_window;

void pio_window_init(pio_window *p, int64_t page, int64_t window, int64_t limit);
int64_t pio_window_room(const pio_window *p, int64_t off);
void pio_window_wrote(pio_window *p, int64_t off, int64_t len);
void pio_window_truncate(pio_window *p, int64_t size);
int pio_window_keep_up(pio_window *p, pio_range *out);
int pio_window_make_room(pio_window *p, int64_t off, pio_range *out);
int pio_window_finish(pio_window *p, pio_range *out);
int pio_window_start_rest(pio_window *p, pio_range *out);

/* ---- control: how many bytes may be in flight, at what rate ---------------------------------------------- */

/* What is remembered of a window from its start to its completion. */
typedef struct pio_stamp {
	int64_t started; /* when, ns */
	int64_t bytes;
	int64_t delivered; /* by the device, as far as was known then */
	int64_t gap;       /* since a window was last seen to be complete */
	int64_t held;      /* since room for it was granted */
	int alone;         /* nothing else was in flight */
	int demanded;      /* the producer used the room that there was */
	int wanted;        /* or the rate */
} pio_stamp;

enum {
	PIO_DRAINING, /* one small window at a time, to see the delay without a queue */
	PIO_STARTING, /* the limit doubles until the device is found to be busy */
	PIO_PROBING,  /* polite writers as well use what the device holds, to see the rate */
	PIO_STEADY
};

/* Shared by processes, so: fixed widths, no pointers. Times are in ns, of the monotonic clock; 0: none. */
typedef struct pio_control {
	int64_t limit;  /* bytes in flight */
	int64_t window; /* bytes */
	int64_t rate;   /* largest of late, bytes a second */
	int64_t base;   /* delay of a small window on its own, the least of late */
	int64_t long_base;
	int64_t mean, deviation; /* of the delay */
	int64_t gap, held;       /* from a completion, and from a grant, to the next start, on average */
	int64_t delivered; /* bytes, ever */
	int64_t seen_at;   /* when a window was last seen to be complete */
	int64_t round_delivered;
	int64_t round_since;
	int64_t rate_now, rate_before, rate_since; /* two generations of a maximum */
	int64_t base_before;                       /* and of minima */
	int64_t long_now, long_before, long_since;
	int64_t drain_since, drained_delay, drained_least, drained_most;
	int64_t probed_at; /* when a round was valid last */
	int64_t share;     /* of the rate that polite writers take, in 1024ths */
	int64_t share_at;
	int64_t least_delay; /* of the last few of theirs */
	int64_t span_since, span_delivered, span_unwanted, span_stopped;
	int64_t sustained, sustained_before; /* rate over spans, bytes a second; the larger one of the last two */
	int64_t go;        /* what it delivered between stops, when it was last found to stop and go */
	int32_t phase;
	int32_t drained;    /* windows */
	int32_t round_lost; /* the producer was the slower side in it */
	int32_t looks;
	int32_t stops;      /* spans in a row of which it stopped for much */
	int32_t even;       /* bytes are accepted at an even rate, since it does */
} pio_control;

void pio_control_init(pio_control *c);
int pio_control_is_stale(const pio_control *c, int64_t now);
void pio_control_forget(pio_control *c, int64_t now);
void pio_control_started(const pio_control *c, int64_t now, int64_t bytes, int64_t in_flight, int64_t dirty,
			 int64_t granted, int polite, int held_back, pio_stamp *s);
void pio_control_completed(pio_control *c, int64_t now, const pio_stamp *s, int blocked, int polite);
void pio_control_pressure(pio_control *c, int64_t stalled, int64_t own, int64_t interval);
int64_t pio_control_limit(const pio_control *c, int polite);
int64_t pio_control_window(const pio_control *c, int polite);
int64_t pio_control_rate(const pio_control *c, int polite);

typedef struct pio_rate {
	int64_t rate;  /* bytes a second; 0: no cap */
	int64_t burst; /* bytes that may be ahead of the rate */
	int64_t due;   /* when what was accepted so far was due at exactly this rate */
} pio_rate;

void pio_rate_set(pio_rate *r, int64_t window, int64_t rate);
int64_t pio_rate_piece(const pio_rate *r);
int64_t pio_rate_delay(const pio_rate *r, int64_t now, int64_t bytes);
void pio_rate_accepted(pio_rate *r, int64_t now, int64_t bytes);

/* ---- share and device: one budget for all writers of a device --------------------------------------------- */

#define PIO_PROCESSES 64 /* that share a device's budget */

void pio_set_cap(int64_t bytes);

/* ---- engine: start, wait and drop on this file system ---------------------------------------------------- */

/* In the order of preference that a failing engine moves down. PIO_UNDECIDED: no window was filled yet. */
enum {
	PIO_UNDECIDED = 0,
	PIO_AUTO = 0,
	PIO_UNCACHED = 1,
	PIO_RANGE = 2,
	PIO_ADVISE = 3,
	PIO_DATASYNC = 4,
	PIO_NONE = 5
};

/* Why an engine is not the best one. */
enum {
	PIO_BEST,
	PIO_ASKED,           /* the caller named it */
	PIO_CALL_FAILED,     /* the better engine's system call failed; the errno says how */
	PIO_STACKED,         /* written pages are cached in another file's mapping */
	PIO_WRITTEN_THROUGH, /* written pages are clean at once: somebody else caches them */
	PIO_STAYED_DIRTY,    /* the better engine's wait returned and pages were still dirty */
	PIO_KNOWN_TYPE,      /* no cachestat here: the file system's type decided */
	PIO_KEEP_CACHE,      /* the better engine cannot keep pages cached */
	PIO_NO_MAPPING,      /* the better engine needs a mapping, and the file cannot be opened for reading */
	PIO_MEMORY,          /* memory-backed file system: nothing to pace */
	PIO_NOT_A_FILE,      /* pipe, terminal, socket, character device: nothing to pace */
	PIO_DIRECT           /* O_DIRECT: nothing to pace */
};

/* ---- writer: the write loop ------------------------------------------------------------------------------ */

#define PIO_AHEAD -1

typedef struct pio_options {
	int64_t window; /* bytes; 0: as the controller has it */
	int64_t limit;  /* bytes; 0: as the controller has it, in a budget shared with other writers (if polite, both) */
	int64_t rate;   /* bytes a second; 0: no cap */
	int polite;     /* yield to neighbours */
	int share;      /* the budget with other processes */
	int engine;
	int drop_cache;
	int io_priority; /* as ioprio_set(2) takes it; 0: leave the thread's own */
	int64_t preallocate; /* the file's size as expected; PIO_AHEAD: not known; 0: allocate nothing ahead */
} pio_options;

/* Why the limit is what it is. */
enum {
	PIO_BY_NOTHING, /* yet */
	PIO_BY_DEVICE,
	PIO_BY_CGROUP,
	PIO_BY_CONFIGURATION,
	PIO_BY_ENGINE
};

typedef struct pio_stats {
	int64_t bytes;
	int64_t windows; /* started */
	int64_t in_flight;
	int64_t most_in_flight;
	int64_t limit;
	int64_t stalls;
	int64_t stall_ns;
	int64_t longest_stall_ns;
	int64_t sync_ns;
	int64_t base_delay_ns; /* least of late, of a window on the device; 0: not known */
	int64_t delivery_rate; /* largest of late, of the device, bytes a second; 0: not known */
	int limited_by;
	int shared; /* the budget, with other processes */
	int64_t verified_dirty_pages; /* most that verification saw; -1: none made by this writer */
	int engine;
	int reason;
	int reason_errno;
	int error; /* errno of the first error of the data; 0: none */
	int late;  /* that error was of bytes accepted earlier (writeback), not of a write */
} pio_stats;

typedef struct pio_writer pio_writer;

pio_writer *pio_writer_new(int fd, const pio_options *options);
void pio_writer_free(pio_writer *w);
int64_t pio_write(pio_writer *w, const void *buf, size_t n);
int pio_truncate(pio_writer *w, int64_t size);
int pio_sync(pio_writer *w);
int pio_start_rest(pio_writer *w);
int pio_wait_rest(pio_writer *w);
int pio_writer_close(pio_writer *w);
void pio_release(pio_writer *w);
void pio_expect(pio_writer *w, int64_t end);
int pio_writer_fd(const pio_writer *w);
void pio_writer_stats(pio_writer *w, pio_stats *out);

/* ---- resident: which pages of a file are in the page cache ----------------------------------------------- */

int pio_resident_known(int fd);
int64_t pio_resident_pages(int64_t off, int64_t len);
int64_t pio_resident(int fd, int64_t off, int64_t len, unsigned char *resident);
void pio_resident_drop(int fd, int64_t off, int64_t len, const unsigned char *before);

/* ---- reader: reads ahead, and leaves the page cache as it found it ---------------------------------------- */

typedef struct pio_reader pio_reader;

pio_reader *pio_reader_new(int fd, int64_t window, int64_t ahead);
int64_t pio_read(pio_reader *r, void *buf, size_t n);
int64_t pio_left(pio_reader *r);
void pio_reader_close(pio_reader *r);
void pio_reader_free(pio_reader *r);

/* ---- copy: descriptor to descriptor ---------------------------------------------------------------------- */

typedef struct pio_copy pio_copy;

pio_copy *pio_copy_new(int source, pio_writer *w, int readers, int sparse);
int64_t pio_copy_step(pio_copy *c);
int pio_copy_source_failed(const pio_copy *c);
void pio_copy_free(pio_copy *c);
