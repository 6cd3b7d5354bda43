// Stable 63-bit hashes of strings: FNV-1a over the bytes, mixed, sign bit cleared. Ids in files and checkpoints depend
// on it: it never changes.
#include <cstdint>

#include "common.h"

namespace {

inline int64_t hash_bytes(const uint8_t* bytes, int64_t size) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3ull;
  return static_cast<int64_t>(unequal::mix64(hash) & 0x7FFFFFFFFFFFFFFFull);
}

template <typename Offset>
void hash_all(const uint8_t* bytes, const Offset* offsets, int64_t count, int64_t* out) {
  // A multiplication waits for the one before it, so four strings of the usual, short lengths go side by side.
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const int64_t size = offsets[i + 1] - offsets[i];
    if (offsets[i + 2] - offsets[i + 1] == size && offsets[i + 3] - offsets[i + 2] == size &&
        offsets[i + 4] - offsets[i + 3] == size) {
      const uint8_t* at = bytes + offsets[i];
      uint64_t hash[4] = {0xCBF29CE484222325ull, 0xCBF29CE484222325ull, 0xCBF29CE484222325ull, 0xCBF29CE484222325ull};
      for (int64_t k = 0; k < size; ++k)
        for (int lane = 0; lane < 4; ++lane) hash[lane] = (hash[lane] ^ at[lane * size + k]) * 0x100000001B3ull;
      for (int lane = 0; lane < 4; ++lane)
        out[i + lane] = static_cast<int64_t>(unequal::mix64(hash[lane]) & 0x7FFFFFFFFFFFFFFFull);
    } else {
      for (int lane = 0; lane < 4; ++lane)
        out[i + lane] = hash_bytes(bytes + offsets[i + lane], offsets[i + lane + 1] - offsets[i + lane]);
    }
  }
  for (; i < count; ++i) out[i] = hash_bytes(bytes + offsets[i], offsets[i + 1] - offsets[i]);
}

}  // namespace

// The i-th string is bytes[offsets[i] .. offsets[i + 1]).
UNEQUAL_API void uq_hash_strings_32(const uint8_t* bytes, const int32_t* offsets, int64_t count, int64_t* out) {
  hash_all(bytes, offsets, count, out);
}

UNEQUAL_API void uq_hash_strings_64(const uint8_t* bytes, const int64_t* offsets, int64_t count, int64_t* out) {
  hash_all(bytes, offsets, count, out);
}
