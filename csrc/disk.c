/*
 * Which disk a block device is on. Partitions and logical volumes have numbers of their own, but one queue together.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "disk.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#include "sys.h"

#define MOST_LAYERS 8

static int64_t read_text(const char *path, char *text, size_t size) {
	int fd = SYS.open(path, O_RDONLY);
	if (fd < 0) return fd;
	int64_t n = SYS.pread(fd, text, size - 1, 0);
	SYS.close(fd);
	if (n >= 0) text[n] = '\0';
	return n;
}

/* Reads "8:0" from one of sysfs' files. */
static int read_numbers(const char *path, uint32_t *major, uint32_t *minor) {
	char text[32];
	char *end;
	if (read_text(path, text, sizeof text) <= 0) return 0;
	unsigned long first = strtoul(text, &end, 10);
	if (*end != ':') return 0;
	*major = (uint32_t)first;
	*minor = (uint32_t)strtoul(end + 1, NULL, 10);
	return 1;
}

static int is_partition(const char *device) {
	char path[320];
	snprintf(path, sizeof path, "%s/partition", device);
	int fd = SYS.open(path, O_RDONLY);
	if (fd < 0) return 0;
	SYS.close(fd);
	return 1;
}

/* The disk's major and minor number in the upper and lower half: of the disk that a partition is on, or that a device
 * mapper's device maps to if that is a single one. What cannot be found out stays as it is. */
uint64_t pio_disk_of(uint32_t major, uint32_t minor) {
	char device[64], path[384], name[256];
	for (int layer = 0; layer < MOST_LAYERS && major != 0; layer++) {
		snprintf(device, sizeof device, "/sys/dev/block/%u:%u", major, minor);
		if (is_partition(device)) {
			snprintf(path, sizeof path, "%s/../dev", device);
		} else {
			snprintf(path, sizeof path, "%s/slaves", device);
			if (SYS.only_entry(path, name, sizeof name) != 1) break;
			snprintf(path, sizeof path, "%s/slaves/%s/dev", device, name);
		}
		if (!read_numbers(path, &major, &minor)) break;
	}
	return (uint64_t)major << 32 | minor;
}

/* Which of the disks that had this number one after the other it is (Linux 5.15); 0 where that is not known. */
uint64_t pio_disk_sequence(uint64_t disk) {
	char path[64], text[32];
	snprintf(path, sizeof path, "/sys/dev/block/%u:%u/diskseq", (unsigned int)(disk >> 32), (unsigned int)(disk & 0xffffffffU));
	return read_text(path, text, sizeof text) > 0 ? strtoull(text, NULL, 10) : 0;
}
