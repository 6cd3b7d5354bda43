// Where lists of given lengths start, and the smallest length, in one pass: a batch has hundreds of thousands of them.
#include <algorithm>

#include "common.h"

namespace {

template <class T>
int64_t add_up(const T* lengths, int64_t count, int64_t* offsets) {
  int64_t end = 0, smallest = 0;
  offsets[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = lengths[i];
    smallest = std::min(smallest, length);
    end += length;
    offsets[i + 1] = end;
  }
  return smallest;
}

}  // namespace

// Fills offsets [count + 1]; returns the smallest length, or 0 where none is negative. width: bytes of a length, 4 or 8.
UNEQUAL_API int64_t uq_offsets(const void* lengths, int64_t count, int64_t width, int64_t* offsets) {
  return width == 4 ? add_up(static_cast<const int32_t*>(lengths), count, offsets)
                    : add_up(static_cast<const int64_t*>(lengths), count, offsets);
}
