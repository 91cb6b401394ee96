#include "tierkv/status.h"
