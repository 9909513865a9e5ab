#ifndef PACEDIO_SYS_H
#define PACEDIO_SYS_H

#include "pacedio.h"

/* Every system call of the library goes through this table; see pacedio.cdef.h. */
#define SYS (pio_sys_table)

#endif
