// Fresh rows: uniform numbers of a given standard deviation, drawn from (seed, table, id, column) alone, so that a row starts
// the same whenever and wherever it is made.
#include "rows.h"

namespace unequal {
namespace {

inline float draw(uint64_t key, int64_t column) {
  const uint64_t words = mix64(key + uint64_t(column / 2 + 1) * kGolden);
  const uint32_t bits = uint32_t(column % 2 ? words >> 8 : words >> 40) & 0xFFFFFFu;
  return float(bits) * 0x1p-24f - 0.5f;
}

inline void put(float* to, float x) { *to = x; }
// To the nearest, ties to even: just under half a unit is added, or half a unit where the last bit that is kept is odd.
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline void put(BFloat* to, float x) { *to = round_to(x, 0x7FFFu + (bits_of(x) >> 16 & 1u), BFloat{}); }
inline void put(Half* to, float x) {
  if (std::fabs(x) < 0x1p-14f)  // where the spacing is 2^-24
    to->bits = uint16_t((bits_of(x) >> 16 & 0x8000u) | uint16_t(std::nearbyint(std::fabs(x) * 0x1p24f)));
  else
    *to = round_to(x, 0xFFFu + (bits_of(x) >> 13 & 1u), Half{});
}

template <class T>
void fill(const Table& table, const int64_t* ids, int64_t first_slot, int64_t count, uint64_t key, float width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    T* row = row_at<T>(table, first_slot + i);
    const uint64_t id_key = mix64(key + uint64_t(ids ? ids[i] : first_slot + i) * kGolden);
    for (int64_t j = 0; j < table.dim; ++j) put(row + j, draw(id_key, j) * width);
  }
}

}  // namespace
}  // namespace unequal

// Fills rows [first_slot, first_slot + count); row i is that of ids[i], or of its own number where ids is null.
// width: the numbers are uniform in ±width/2.
UNEQUAL_API void uq_initialize(const unequal::Table* table, const int64_t* ids, int64_t first_slot, int64_t count,
                               uint64_t key, float width, int threads) {
  using namespace unequal;
  switch (table->dtype) {
    case kFloat32: return fill<float>(*table, ids, first_slot, count, key, width, threads);
    case kFloat16: return fill<Half>(*table, ids, first_slot, count, key, width, threads);
    default: return fill<BFloat>(*table, ids, first_slot, count, key, width, threads);
  }
}

// Stochastic rounding of whole rows to float16 or bfloat16, as the update does it: row i is that of slots[i].
UNEQUAL_API void uq_round(const float* values, uint16_t* out, const int64_t* slots, int64_t rows, int64_t dim, int64_t dtype,
                          uint64_t rounding_key) {
  using namespace unequal;
  for (int64_t i = 0; i < rows; ++i) {
    const uint64_t key = row_key(rounding_key, slots[i]);
    if (dtype == kFloat16) store_rounded(reinterpret_cast<Half*>(out + i * dim), values + i * dim, dim, key);
    else store_rounded(reinterpret_cast<BFloat*>(out + i * dim), values + i * dim, dim, key);
  }
}
