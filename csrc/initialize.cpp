// Fresh rows: uniform numbers of a given standard deviation; see draw.h.
#include "draw.h"

namespace unequal {
namespace {

template <class T>
void fill(const Table& table, const int64_t* ids, int64_t first_slot, int64_t count, uint64_t key, float width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    T* row = row_at<T>(table, first_slot + i);
    const uint64_t id_key = fresh_key(key, ids ? ids[i] : first_slot + i);
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
