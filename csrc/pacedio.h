#ifndef PACEDIO_H
#define PACEDIO_H

#include <stddef.h>
#include <stdint.h>

#include "pacedio.cdef.h"

#endif
