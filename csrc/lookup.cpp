// Pooled and unpooled lookup of all features in one call. Work is cut into blocks that any thread may take: every output value
// is written by one thread in one order, so the result does not depend on the number of threads. A block of pooled features is
// a few bags of all of them, because those lie side by side in the output: going feature by feature would touch every page of
// it once per feature.
#include <type_traits>
#include <vector>

#include "rows.h"

namespace unequal {
namespace {

constexpr int64_t kAhead = 16;         // rows prefetched ahead of the one being read
constexpr int64_t kBlockLookups = 2048;
constexpr int64_t kLargeOutput = 4 << 20;  // bytes; larger outputs are written past the caches, which they would flush

struct Block {  // bags [first, last) of `count` pooled features, or ids [first, last) of one unpooled feature
  const Feature* features;
  int64_t count, first, last;
};

// A table's rows by slot; with one slab that is one multiplication.
template <class T, int D, bool OneSlab>
struct Rows {
  const Table& table;
  const T* base = static_cast<const T*>(table.weights[0]);
  const uint64_t rows = uint64_t(table.rows);
  const int64_t dim = D ? D : table.dim;

  bool has(int64_t slot) const { return uint64_t(slot) < rows; }
  const T* at(int64_t slot) const { return OneSlab ? base + slot * dim : row_at<T>(table, slot); }
  // Prefetches the row of slots[i + kAhead], or nothing where that is past the end.
  void prefetch_ahead(const int64_t* slots, int64_t i, int64_t end) const {
    if (i + kAhead < end && has(slots[i + kAhead])) prefetch(at(slots[i + kAhead]), dim * int64_t(sizeof(T)));
  }
};

template <int W>
inline void put(float* out, Lanes<W> value, bool streams) {
  if (streams) stream<W>(out, value);
  else store<W>(out, value);
}

template <class T, int D, bool OneSlab>
void pooled(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
  constexpr int W = kWidth<D>, N = D / W;
  const bool streams = D && large && can_stream<W>(feature.values, feature.stride);
  const Rows<T, D, OneSlab> rows{table};
  const int64_t dim = rows.dim, base = feature.offsets[0], end = feature.offsets[last] - base;
  const int64_t* slots = feature.slots;
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
      rows.prefetch_ahead(slots, i, end);
      if (!rows.has(slots[i])) continue;
      const T* row = rows.at(slots[i]);
      const float scale = feature.weights ? feature.weights[i] * share : share;
      if constexpr (D != 0) {
        for (int j = 0; j < N; ++j) sum[j] += load<W>(row + W * j) * scale;
      } else {
        for (int64_t j = 0; j < dim; ++j) buffer[j] += to_float(row[j]) * scale;
      }
    }
    if constexpr (D != 0) {
      for (int j = 0; j < N; ++j) put<W>(out + W * j, sum[j], streams);
    } else {
      std::memcpy(out, buffer, size_t(dim) * sizeof(float));
    }
  }
}

template <class T, int D, bool OneSlab>
void unpooled(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
  constexpr int W = kWidth<D>, N = D / W;
  const bool streams = D && large && can_stream<W>(feature.values, feature.stride);
  const Rows<T, D, OneSlab> rows{table};
  const int64_t* slots = feature.slots;
  for (int64_t i = first; i < last; ++i) {
    rows.prefetch_ahead(slots, i, last);
    float* out = feature.values + i * feature.stride;
    if (!rows.has(slots[i])) {
      std::memset(out, 0, size_t(rows.dim) * sizeof(float));
      continue;
    }
    const T* row = rows.at(slots[i]);
    if constexpr (D != 0) {
      for (int j = 0; j < N; ++j) put<W>(out + W * j, load<W>(row + W * j), streams);
    } else {
      for (int64_t j = 0; j < rows.dim; ++j) out[j] = to_float(row[j]);
    }
  }
}

template <class T>
void lookup_part(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
  by_dim(table.dim, [&](auto dim) {
    constexpr int D = decltype(dim)::value;
    if (table.slab_log2 < 0) {
      if (feature.pooling == kNone) unpooled<T, D, true>(table, feature, first, last, large);
      else pooled<T, D, true>(table, feature, first, last, large);
    } else {
      if (feature.pooling == kNone) unpooled<T, D, false>(table, feature, first, last, large);
      else pooled<T, D, false>(table, feature, first, last, large);
    }
  });
}

// The ids that bags [first, last) of a feature read, or those ids themselves where it is not pooled.
inline void span(const Feature& feature, int64_t first, int64_t last, int64_t& from, int64_t& to) {
  const bool pooled = feature.pooling != kNone;
  from = pooled ? feature.offsets[first] - feature.offsets[0] : first;
  to = pooled ? feature.offsets[last] - feature.offsets[0] : last;
}

void prefetch_start(const Table& table, const Feature& feature, int64_t first, int64_t last) {
  int64_t from, to;
  span(feature, first, last, from, to);
  const int64_t bytes = table.dim * (table.dtype == kFloat32 ? 4 : 2);
  for (int64_t i = from; i < to && i < from + kAhead; ++i)
    if (uint64_t(feature.slots[i]) < uint64_t(table.rows)) {
      if (table.dtype == kFloat32) prefetch(row_at<float>(table, feature.slots[i]), bytes);
      else prefetch(row_at<Half>(table, feature.slots[i]), bytes);
    }
}

}  // namespace
}  // namespace unequal


// Returns -1, or the position (features taken one after the other) of the first id outside [0, rows) that is not -1.
// Ids of -1 read as zeros: `strict` counts them as wrong too, as a table with dense ids must.
UNEQUAL_API int64_t uq_lookup(const unequal::Table* tables, const unequal::Feature* features, int64_t feature_count,
                              const uint8_t* strict, int threads) {
  using namespace unequal;
  std::vector<Feature> sorted(features, features + feature_count);  // pooled ones first
  std::vector<int64_t> starts(size_t(feature_count), 0);             // first position of each, in the caller's order
  for (int64_t f = 1; f < feature_count; ++f) starts[size_t(f)] = starts[size_t(f) - 1] + features[f - 1].count;
  std::vector<int64_t> start_of;
  for (int pass = 0, at = 0; pass < 2; ++pass)
    for (int64_t f = 0; f < feature_count; ++f)
      if ((features[f].pooling == kNone) == (pass == 1)) {
        sorted[size_t(at++)] = features[f];
        start_of.push_back(starts[size_t(f)]);
      }
  int64_t pooled = 0, pooled_ids = 0;
  while (pooled < feature_count && sorted[size_t(pooled)].pooling != kNone) pooled_ids += sorted[size_t(pooled++)].count;
  std::vector<Block> blocks;
  if (pooled) {
    const int64_t bags = sorted[0].bags, per_bag = pooled + pooled_ids / (bags ? bags : 1);
    const int64_t step = kBlockLookups / per_bag > 16 ? kBlockLookups / per_bag : 16;
    for (int64_t i = 0; i < bags; i += step) blocks.push_back({sorted.data(), pooled, i, i + step < bags ? i + step : bags});
  }
  for (int64_t f = pooled; f < feature_count; ++f) {
    const int64_t count = sorted[size_t(f)].count;
    for (int64_t i = 0; i < count; i += kBlockLookups)
      blocks.push_back({&sorted[size_t(f)], 1, i, i + kBlockLookups < count ? i + kBlockLookups : count});
  }
  int64_t floats = 0;
  for (int64_t f = 0; f < feature_count; ++f)
    floats += tables[features[f].table].dim * (features[f].pooling == kNone ? features[f].count : features[f].bags);
  const bool large = floats * int64_t(sizeof(float)) >= kLargeOutput;
  int64_t wrong = INT64_MAX;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(min : wrong)
  for (int64_t b = 0; b < int64_t(blocks.size()); ++b) {
    const Block& block = blocks[size_t(b)];
    prefetch_start(tables[block.features->table], *block.features, block.first, block.last);
    for (int64_t f = 0; f < block.count; ++f) {
      const Feature& feature = block.features[f];
      const Table& table = tables[feature.table];
      if (f + 1 < block.count) prefetch_start(tables[(&feature)[1].table], (&feature)[1], block.first, block.last);
      if (strict[feature.table]) {
        int64_t from, to;
        span(feature, block.first, block.last, from, to);
        bool bad = false;
        for (int64_t i = from; i < to; ++i) bad |= uint64_t(feature.slots[i]) >= uint64_t(table.rows);
        for (int64_t i = from; bad && i < to; ++i)
          if (uint64_t(feature.slots[i]) >= uint64_t(table.rows)) {
            const int64_t position = start_of[size_t(&feature - sorted.data())] + i;
            wrong = position < wrong ? position : wrong;
            break;
          }
      }
      switch (table.dtype) {
        case kFloat32: lookup_part<float>(table, feature, block.first, block.last, large); break;
        case kFloat16: lookup_part<Half>(table, feature, block.first, block.last, large); break;
        default: lookup_part<BFloat>(table, feature, block.first, block.last, large); break;
      }
    }
    if (large) finish_stream();
  }
  return wrong == INT64_MAX ? -1 : wrong;
}
