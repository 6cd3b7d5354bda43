#include "common.h"
// Raised whenever a signature changes, so that a stale library is noticed instead of called.
UNEQUAL_API int uq_abi_version() { return 1; }
