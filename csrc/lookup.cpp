// Pooled and unpooled lookup of all features in one call. Work is cut into blocks of bags that any thread may take: every
// output value is written by one thread in one order, so the result does not depend on the number of threads.
#include <type_traits>
#include <vector>

#include "rows.h"

namespace unequal {
namespace {

constexpr int64_t kAhead = 16;         // rows prefetched ahead of the one being read
constexpr int64_t kBlockLookups = 2048;

struct Block {
  const Feature* feature;
  int64_t first, last;  // bags; for unpooled features, ids
};

// Reads slots[i] and prefetches the row kAhead further on.
template <class T, int D>
inline int64_t slot_and_prefetch(const Table& table, const int64_t* slots, int64_t i, int64_t end) {
  const int64_t next = slots[i + kAhead < end ? i + kAhead : end - 1];
  if (uint64_t(next) < uint64_t(table.rows)) prefetch(row_at<T>(table, next), (D ? D : table.dim) * int64_t(sizeof(T)));
  return slots[i];
}

template <class T, int D>
void pooled(const Table& table, const Feature& feature, int64_t first, int64_t last) {
  constexpr int W = kWidth<D>, N = D / W;
  const int64_t dim = D ? D : table.dim, base = feature.offsets[0], end = feature.offsets[last] - base;
  alignas(64) float buffer[D ? 1 : kMaxDim];
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t from = feature.offsets[bag] - base, to = feature.offsets[bag + 1] - base;
    const float share = feature.pooling == kMean && to > from ? 1.0f / float(to - from) : 1.0f;
    float* out = feature.values + bag * feature.stride;
    Lanes<W> sum[N ? N : 1];
    if constexpr (D != 0) {
      for (int j = 0; j < N; ++j) sum[j] = Lanes<W>{};
    } else {
      std::memset(buffer, 0, size_t(dim) * sizeof(float));
    }
    for (int64_t i = from; i < to; ++i) {
      const int64_t slot = slot_and_prefetch<T, D>(table, feature.slots, i, end);
      if (uint64_t(slot) >= uint64_t(table.rows)) continue;
      const T* row = row_at<T>(table, slot);
      const float scale = feature.weights ? feature.weights[i] * share : share;
      if constexpr (D != 0) {
        for (int j = 0; j < N; ++j) sum[j] += load<W>(row + W * j) * scale;
      } else {
        for (int64_t j = 0; j < dim; ++j) buffer[j] += to_float(row[j]) * scale;
      }
    }
    if constexpr (D != 0) {
      for (int j = 0; j < N; ++j) store<W>(out + W * j, sum[j]);
    } else {
      std::memcpy(out, buffer, size_t(dim) * sizeof(float));
    }
  }
}

template <class T, int D>
void unpooled(const Table& table, const Feature& feature, int64_t first, int64_t last) {
  constexpr int W = kWidth<D>, N = D / W;
  const int64_t dim = D ? D : table.dim;
  for (int64_t i = first; i < last; ++i) {
    const int64_t slot = slot_and_prefetch<T, D>(table, feature.slots, i, last);
    float* out = feature.values + i * feature.stride;
    if (uint64_t(slot) >= uint64_t(table.rows)) {
      std::memset(out, 0, size_t(dim) * sizeof(float));
      continue;
    }
    const T* row = row_at<T>(table, slot);
    if constexpr (D != 0) {
      for (int j = 0; j < N; ++j) store<W>(out + W * j, load<W>(row + W * j));
    } else {
      for (int64_t j = 0; j < dim; ++j) out[j] = to_float(row[j]);
    }
  }
}

template <class T>
void lookup_block(const Table& table, const Block& block) {
  by_dim(table.dim, [&](auto dim) {
    constexpr int D = decltype(dim)::value;
    if (block.feature->pooling == kNone) unpooled<T, D>(table, *block.feature, block.first, block.last);
    else pooled<T, D>(table, *block.feature, block.first, block.last);
  });
}

}  // namespace
}  // namespace unequal

// Returns -1, or the position (features taken one after the other) of the first id outside [0, rows) that is not -1.
// Ids of -1 read as zeros: `strict` counts them as wrong too, as a table with dense ids must.
UNEQUAL_API int64_t uq_lookup(const unequal::Table* tables, const unequal::Feature* features, int64_t feature_count,
                              const uint8_t* strict, int threads) {
  using namespace unequal;
  std::vector<Block> blocks;
  std::vector<int64_t> starts(size_t(feature_count) + 1, 0);
  for (int64_t f = 0; f < feature_count; ++f) {
    const Feature& feature = features[f];
    starts[size_t(f) + 1] = starts[size_t(f)] + feature.count;
    const int64_t items = feature.pooling == kNone ? feature.count : feature.bags;
    const int64_t per_item = feature.pooling == kNone ? 1 : 1 + feature.count / (feature.bags ? feature.bags : 1);
    const int64_t step = kBlockLookups / per_item > 16 ? kBlockLookups / per_item : 16;
    for (int64_t i = 0; i < items; i += step) blocks.push_back({&feature, i, i + step < items ? i + step : items});
  }
  int64_t wrong = INT64_MAX;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(min : wrong)
  for (int64_t b = 0; b < int64_t(blocks.size()); ++b) {
    const Block& block = blocks[size_t(b)];
    const Feature& feature = *block.feature;
    const Table& table = tables[feature.table];
    const int64_t from = feature.pooling == kNone ? block.first : feature.offsets[block.first] - feature.offsets[0];
    const int64_t to = feature.pooling == kNone ? block.last : feature.offsets[block.last] - feature.offsets[0];
    bool bad = false;
    for (int64_t i = from; i < to; ++i) bad |= uint64_t(feature.slots[i]) >= uint64_t(table.rows);
    if (bad && strict[feature.table])
      for (int64_t i = to; i-- > from;)
        if (uint64_t(feature.slots[i]) >= uint64_t(table.rows)) {
          const int64_t position = starts[size_t(&feature - features)] + i;
          wrong = position < wrong ? position : wrong;
        }
    switch (table.dtype) {
      case kFloat32: lookup_block<float>(table, block); break;
      case kFloat16: lookup_block<Half>(table, block); break;
      default: lookup_block<BFloat>(table, block); break;
    }
  }
  return wrong == INT64_MAX ? -1 : wrong;
}
