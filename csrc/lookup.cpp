// Pooled and unpooled lookup of all features in one call. Work is cut into blocks, feature by feature, that any thread may
// take: every output value is written by one thread in one order, so the result does not depend on the number of threads.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "narrow.h"

namespace unequal {
namespace {

constexpr int64_t kAhead = 16;         // rows prefetched ahead of the one being read
constexpr int64_t kNarrowAhead = 32;   // narrow ones: they take fewer lines
constexpr int64_t kBlockLookups = 4096;
constexpr int64_t kLargeOutput = 4 << 20;  // bytes; larger outputs are written past the caches, which they would flush

struct Block {
  size_t feature;
  int64_t first, last;  // bags of a pooled feature, ids of an unpooled one
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
  void prefetch_row(const int64_t* slots, int64_t i, int64_t end) const {
    if (i < end && has(slots[i])) prefetch(at(slots[i]), dim * int64_t(sizeof(T)));
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
  for (int64_t i = 0; i < kAhead; ++i) rows.prefetch_row(slots, feature.offsets[first] - base + i, end);
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
      rows.prefetch_row(slots, i + kAhead, end);
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
  for (int64_t i = 0; i < kAhead; ++i) rows.prefetch_row(slots, first + i, last);
  for (int64_t i = first; i < last; ++i) {
    rows.prefetch_row(slots, i + kAhead, last);
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

// sum ← sum + scale · row, for any row, in memory.
template <class T>
inline void add_chunks(const Table& table, int64_t slot, float scale, float* sum) {
  if (slot < 0) return;
  const NarrowRow row = narrow_row(table, slot);
  const T* values = reinterpret_cast<const T*>(row.record);
  each_chunk(table, row, [&](int64_t place, int64_t column, int64_t count) {
    for (int64_t j = 0; j < count; ++j) sum[column + j] += to_float(values[place + j]) * scale;
  });
}

// Which ids a bag has, or a place of a list.
struct Span {
  const Feature& feature;
  const bool listed = feature.pooling == kNone;
  const int64_t base = feature.offsets[0];
  int64_t from(int64_t k) const { return listed ? k : feature.offsets[k] - base; }
};

template <class T>
void narrow_part(const Table& table, const Feature& feature, int64_t first, int64_t last) {
  const int64_t* slots = feature.slots;
  const Span span{feature};
  const int64_t end = span.from(last);
  const auto prefetch_at = [&](int64_t i) {
    if (i >= end || slots[i] < 0) return;
    const NarrowRow row = narrow_row(table, slots[i]);
    prefetch(row.record, row.layout->width * int64_t(sizeof(T)));
  };
  for (int64_t i = 0; i < kAhead; ++i) prefetch_at(span.from(first) + i);
  for (int64_t k = first; k < last; ++k) {
    float* out = feature.values + k * feature.stride;
    const int64_t from = span.from(k), to = span.from(k + 1);
    const float share = feature.pooling == kMean && to > from ? 1.0f / float(to - from) : 1.0f;
    std::memset(out, 0, size_t(table.dim) * sizeof(float));
    for (int64_t i = from; i < to; ++i) {
      prefetch_at(i + kAhead);
      add_chunks<T>(table, slots[i], feature.weights && !span.listed ? feature.weights[i] * share : share, out);
    }
  }
}

#if defined(UNEQUAL_LIVE_LANES)
// The same where rows have their first chunks and D is known: sums stay in registers, and nothing branches on how
// wide a row is.
template <class T, int D>
void first_chunks(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
  constexpr int W = D % UNEQUAL_LIVE_LANES ? 8 : UNEQUAL_LIVE_LANES, N = D / W;
  using Places = NarrowRows<W>;
  const bool streams = large && can_stream<W>(feature.values, feature.stride);
  const int64_t* slots = feature.slots;
  const Span span{feature};
  const int64_t end = span.from(last);
  Places rows(table);
  rows.classes[0].row_bytes = 0;  // candidates have no values: whichever it is, nothing of it need be brought near
  typename Places::Place ahead[kNarrowAhead];
  const auto bring = [&](int64_t i) {
    const typename Places::Place place = rows.at(slots[i]);
    prefetch_part<D * int64_t(sizeof(T))>(place.record, place.of->read_bytes);
    ahead[uint64_t(i) % kNarrowAhead] = place;
  };
  for (int64_t i = span.from(first); i < std::min(span.from(first) + kNarrowAhead, end); ++i) bring(i);
  for (int64_t k = first; k < last; ++k) {
    const int64_t from = span.from(k), to = span.from(k + 1);
    const float share = feature.pooling == kMean && to > from ? 1.0f / float(to - from) : 1.0f;
    Lanes<W> sum[N] = {};
    for (int64_t i = from; i < to; ++i) {
      const typename Places::Place place = ahead[uint64_t(i) % kNarrowAhead];
      if (i + kNarrowAhead < end) bring(i + kNarrowAhead);
      const float scale = feature.weights && !span.listed ? feature.weights[i] * share : share;
      for (int j = 0; j < N; ++j) {
        const typename Places::Live live = place.of->live[j];
        const T* values = reinterpret_cast<const T*>(place.record + place.of->at[j]);
        sum[j] = add_live(sum[j], load_live(values, live), Lanes<W>{} + scale, live);
      }
    }
    float* out = feature.values + k * feature.stride;
    for (int j = 0; j < N; ++j) put<W>(out + W * j, sum[j], streams);
  }
}
#endif

template <class T, int D>
void narrow_rows(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
#if defined(UNEQUAL_LIVE_LANES)
  if constexpr (D != 0)
    if (!table.masked && table.dim / table.chunk <= kMaxChunks) return first_chunks<T, D>(table, feature, first, last, large);
#endif
  (void)large;
  narrow_part<T>(table, feature, first, last);
}

template <class T>
void lookup_part(const Table& table, const Feature& feature, int64_t first, int64_t last, bool large) {
  by_dim(table.dim, [&](auto dim) {
    constexpr int D = decltype(dim)::value;
    if (table.chunk) return narrow_rows<T, D>(table, feature, first, last, large);
    if (table.slab_log2 < 0) {
      if (feature.pooling == kNone) unpooled<T, D, true>(table, feature, first, last, large);
      else pooled<T, D, true>(table, feature, first, last, large);
    } else {
      if (feature.pooling == kNone) unpooled<T, D, false>(table, feature, first, last, large);
      else pooled<T, D, false>(table, feature, first, last, large);
    }
  });
}

}  // namespace
}  // namespace unequal

// Returns -1, or the position (features taken one after the other) of the first id of a strict table outside [0, rows). In
// other tables a slot of -1 reads as zeros.
UNEQUAL_API int64_t uq_lookup(const unequal::Table* tables, int64_t, const unequal::FeatureSpec* specs, int64_t spec_count,
                              const unequal::Request* request, int threads) {
  using namespace unequal;
  const std::vector<Feature> features = features_of(tables, specs, spec_count, *request);
  std::vector<Block> blocks;
  std::vector<int64_t> positions;  // the first of each feature
  int64_t position = 0, floats = 0;
  for (const Feature& feature : features) {
    const int64_t length = feature.pooling == kNone ? feature.count : feature.bags;
    const int64_t blocks_of_it = (std::max(feature.count, length) + kBlockLookups - 1) / kBlockLookups;
    for (int64_t b = 0; b < blocks_of_it; ++b)
      blocks.push_back({positions.size(), length * b / blocks_of_it, length * (b + 1) / blocks_of_it});
    positions.push_back(position);
    position += feature.count;
    floats += length * tables[feature.table].dim;
  }
  const bool large = floats * int64_t(sizeof(float)) >= kLargeOutput;
  int64_t wrong = INT64_MAX;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(min : wrong)
  for (int64_t b = 0; b < int64_t(blocks.size()); ++b) {
    const Block& block = blocks[size_t(b)];
    const Feature& feature = features[block.feature];
    const Table& table = tables[feature.table];
    if (table.strict) {
      const bool pooled = feature.pooling != kNone;
      const int64_t from = pooled ? feature.offsets[block.first] - feature.offsets[0] : block.first;
      const int64_t to = pooled ? feature.offsets[block.last] - feature.offsets[0] : block.last;
      bool bad = false;
      for (int64_t i = from; i < to; ++i) bad |= uint64_t(feature.slots[i]) >= uint64_t(table.rows);
      for (int64_t i = from; bad && i < to; ++i)
        if (uint64_t(feature.slots[i]) >= uint64_t(table.rows)) {
          wrong = std::min(wrong, positions[block.feature] + i);
          break;
        }
    }
    switch (table.dtype) {
      case kFloat32: lookup_part<float>(table, feature, block.first, block.last, large); break;
      case kFloat16: lookup_part<Half>(table, feature, block.first, block.last, large); break;
      default: lookup_part<BFloat>(table, feature, block.first, block.last, large); break;
    }
    if (large) finish_stream();
  }
  return wrong == INT64_MAX ? -1 : wrong;
}
