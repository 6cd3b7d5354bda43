// What every CPU kernel shares: the export macro, the counter-based generator, the descriptors Python fills in.
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

enum DType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum Pooling : int64_t { kNone = 0, kSum = 1, kMean = 2 };

// Both structs hold 8-byte fields only and are mirrored by numpy record types in kernels/cpu.py.
struct Table {
  void* const* weights;      // one pointer per slab
  float* const* state[2];    // likewise, or null
  int64_t slab_log2;         // -1: one slab holds all rows; else slab k holds 2^(slab_log2 + k) rows
  int64_t rows;              // slots are in [0, rows)
  int64_t dim;
  int64_t dtype;
  int64_t optimizer;
  double lr, decay, beta1, beta2, eps, trust, correction1, correction2;
  uint64_t rounding_key;     // of this table and step
};

struct Feature {
  int64_t table;
  int64_t pooling;
  int64_t count;             // ids
  int64_t bags;              // samples
  const int64_t* slots;      // [count]; -1 reads as zeros and is never updated
  const int64_t* offsets;    // [bags + 1], counted from offsets[0]
  const float* weights;      // [count] or null
  float* values;             // pooled: [bags, stride]; otherwise [count, stride]; output of lookup, gradient of update
  int64_t stride;
};

}  // namespace unequal
