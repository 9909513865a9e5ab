#ifndef PACEDIO_WINDOW_H
#define PACEDIO_WINDOW_H

#include "pacedio.h"

/* What only the writer asks; the rest is in pacedio.cdef.h. */
int pio_window_is_dirty(const pio_window *p, pio_range range); /* does any of it await its start? */
int pio_window_is_full(const pio_window *p);                    /* will a new page need room to be made? */
int64_t pio_window_counted(const pio_window *p, int64_t off);   /* bytes from there that need no new page */
void pio_window_clear(pio_window *p);                          /* all is known to be on the device */

#endif
