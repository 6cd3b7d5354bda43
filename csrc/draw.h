// Numbers of fresh rows, drawn from (seed, table, id, column) alone, so that a row starts the same whenever and wherever it is made.
#pragma once
#include "rows.h"

namespace unequal {

inline uint64_t fresh_key(uint64_t table_key, int64_t id) { return mix64(table_key + uint64_t(id) * kGolden); }

// Uniform in ±1/2.
inline float draw(uint64_t key, int64_t column) {
  const uint64_t words = mix64(key + uint64_t(column / 2 + 1) * kGolden);
  const uint32_t bits = uint32_t(column % 2 ? words >> 8 : words >> 40) & 0xFFFFFFu;
  return float(bits) * 0x1p-24f - 0.5f;
}

inline void put(float* to, float x) { *to = x; }
// To the nearest, ties to even: just under half a unit is added, or half a unit where the last bit that is kept is odd.
inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline void put(BFloat* to, float x) { *to = round_to(x, 0x7FFFu + (float_bits(x) >> 16 & 1u), BFloat{}); }
inline void put(Half* to, float x) {
  if (std::fabs(x) < 0x1p-14f)  // where the spacing is 2^-24
    to->bits = uint16_t((float_bits(x) >> 16 & 0x8000u) | uint16_t(std::nearbyint(std::fabs(x) * 0x1p24f)));
  else
    *to = round_to(x, 0xFFFu + (float_bits(x) >> 13 & 1u), Half{});
}

}  // namespace unequal
