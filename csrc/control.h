#ifndef PACEDIO_CONTROL_H
#define PACEDIO_CONTROL_H

#include "pacedio.h"

#endif
