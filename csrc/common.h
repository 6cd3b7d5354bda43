// What every CPU kernel shares: the export macro, the counter-based generator, work sharing.
#pragma once
#include <cstdint>

#define UNEQUAL_API extern "C" __attribute__((visibility("default")))

namespace unequal {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// A bijection of 64-bit words whose every output bit depends on every input bit (the finaliser of splitmix64).
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  x ^= x >> 31;
  return x;
}

}  // namespace unequal
