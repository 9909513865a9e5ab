#ifndef PACEDIO_DISK_H
#define PACEDIO_DISK_H

#include "pacedio.h"

uint64_t pio_disk_of(uint32_t major, uint32_t minor);
uint64_t pio_disk_sequence(uint64_t disk);

#endif
