// Backward fused with the optimizer: lookups are grouped by row, each row's gradients are summed in the order of their
// positions, and the row is updated once. No gradient of a table is ever materialised.
//
//   1. Count, in chunks of lookups, how many fall into each bucket. Buckets are ranges of rows in ascending order, so that
//      rows are updated in the order of their addresses: address translation then costs half as much as in random order.
//      They are finer where row numbers are low, like floating-point numbers: ids are often numbered by popularity.
//   2. Place (row, position) pairs into their buckets, in order of position.
//   3. Take batches of buckets in any order on any thread: sort in cache, sum each run of equal rows, apply the optimizer.
//   4. Rows read more than kLongRun times are left over: their runs are summed in pieces of kLongRun by all threads, the
//      pieces added in order, the row updated. So a sum's order depends on the data alone, never on the threads.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "optimizers.h"

namespace unequal {
namespace {

constexpr int64_t kChunk = 8192;
constexpr int64_t kBatchLookups = 1024;
constexpr int64_t kLongRun = 512;
constexpr int64_t kRowsAhead = 8;       // rows are prefetched this many rows ahead of the one being updated
constexpr int64_t kGradientsAhead = 12;  // and gradients this many lookups ahead

using Pair = uint64_t;  // row in the high half, position in the low half
inline int64_t row_of(Pair pair) { return int64_t(pair >> 32); }
inline uint32_t position_of(Pair pair) { return uint32_t(pair); }

struct FeatureRun {      // a feature as the update sees it
  const Feature* feature;
  int64_t first;         // its first position
  bool one_each;         // position − first is the gradient's row: unpooled, or one id per bag
  const float* values;   // the gradient's rows
  int64_t stride;
};

struct TableRun {
  const Table* table;
  std::vector<int> features;  // into the FeatureRuns, in order of position
  int64_t lookups = 0;
  int fine = 0;               // buckets per doubling of the row number: 2^fine
  int64_t buckets = 0, first_bucket = 0;
  bool plain = true;          // one feature without weights: the fast path
};

// The bucket of a row, and how many low bits of the row number vary within it. Ascends with the row.
inline int64_t bucket_of(int64_t row, int fine, int& loose) {
  const int top = row ? 63 - __builtin_clzll(uint64_t(row)) : 0;
  loose = top > fine ? top - fine : 0;
  return (int64_t(loose) << fine) + (row >> loose);
}
inline int64_t bucket_of(int64_t row, int fine) {
  int loose;
  return bucket_of(row, fine, loose);
}

struct Chunk {
  int feature, table;
  int64_t first, last;     // ids of the feature
  int64_t counts;          // where its bucket counts start
};

// Where a row and its state lie.
struct Row {
  void* weights;
  float* state[2];
};

template <int D, int O>
inline Row locate(const Table& t, int64_t slot) {
  int64_t place;
  const int slab = slab_of(t.slab_log2, slot, place);
  const int64_t dim = D ? D : t.dim, first = state_per_row<O>(0, dim), second = state_per_row<O>(1, dim);
  return {static_cast<char*>(t.weights[slab]) + place * dim * (t.dtype == kFloat32 ? 4 : 2),
          {first ? t.state[0][slab] + place * first : nullptr, second ? t.state[1][slab] + place * second : nullptr}};
}

template <int D, int O>
inline void prefetch_row(const Table& t, int64_t slot) {
  const Row row = locate<D, O>(t, slot);
  const int64_t dim = D ? D : t.dim;
  if (t.dtype == kFloat32) prefetch(row.weights, dim * 4);
  else prefetch(row.weights, dim * 2);
  if (state_per_row<O>(0, dim)) prefetch(row.state[0], state_per_row<O>(0, dim) * 4);
  if (state_per_row<O>(1, dim)) prefetch(row.state[1], state_per_row<O>(1, dim) * 4);
}

struct Work {
  const TableRun* table;
  int64_t first, last;  // buckets
};

struct LongRun {
  const TableRun* table;
  const Pair* first;
  int64_t length, partial;
};

// Buffers kept between steps: fresh pages cost more than the work done in them.
template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;
  T* get(size_t n) {
    if (n > size) {
      std::free(data);
      size = n + n / 4;
      data = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
      if (!data) {
        size = 0;
        throw std::bad_alloc();
      }
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};

struct Workspace {
  Buffer<Pair> pairs;
  Buffer<uint32_t> bags, counts;
  Buffer<float> partials, packed;
};

struct Step {
  std::vector<FeatureRun> features;
  std::vector<TableRun> tables;
  uint32_t* bags = nullptr;  // [positions]: the bag of each lookup of a pooled feature with several ids per bag

  const FeatureRun& feature_of(const TableRun& table, uint32_t position) const {
    size_t k = table.features.size() - 1;
    while (k > 0 && features[size_t(table.features[k])].first > int64_t(position)) --k;
    return features[size_t(table.features[k])];
  }
  const float* gradient(const FeatureRun& run, uint32_t position) const {
    const int64_t row = run.one_each ? int64_t(position) - run.first : int64_t(bags[position]);
    return run.values + row * run.stride;
  }
  // sum ← Σ of the gradients of [from, to), prefetching up to `end`.
  template <int D>
  __attribute__((always_inline)) inline void add_up(const TableRun& run, const Pair* from, const Pair* to, const Pair* end, float* sum) const {
    constexpr int W = kWidth<D>, N = D / W;
    const int64_t dim = D ? D : run.table->dim;
    if (run.plain) {
      const FeatureRun& only = features[size_t(run.features[0])];
      Lanes<W> lanes[N ? N : 1];
      if constexpr (D != 0) {
        for (int j = 0; j < N; ++j) lanes[j] = Lanes<W>{};
      } else {
        std::fill(sum, sum + dim, 0.0f);
      }
      for (const Pair* p = from; p < to; ++p) {
        if (p + kGradientsAhead < end) prefetch(gradient(only, position_of(p[kGradientsAhead])), dim * 4);
        const float* gradient_row = gradient(only, position_of(*p));
        if constexpr (D != 0) {
          for (int j = 0; j < N; ++j) lanes[j] += load<W>(gradient_row + W * j);
        } else {
          for (int64_t j = 0; j < dim; ++j) sum[j] += gradient_row[j];
        }
      }
      if constexpr (D != 0)
        for (int j = 0; j < N; ++j) store<W>(sum + W * j, lanes[j]);
      return;
    }
    std::fill(sum, sum + dim, 0.0f);
    for (const Pair* p = from; p < to; ++p) {
      if (p + kGradientsAhead < end) {
        const uint32_t next = position_of(p[kGradientsAhead]);
        prefetch(gradient(feature_of(run, next), next), dim * 4);
      }
      const FeatureRun& feature = feature_of(run, position_of(*p));
      const float* gradient_row = gradient(feature, position_of(*p));
      const float* weights = feature.feature->pooling == kNone ? nullptr : feature.feature->weights;
      const float factor = weights ? weights[int64_t(position_of(*p)) - feature.first] : 1.0f;
      for (int64_t j = 0; j < dim; ++j) sum[j] += factor * gradient_row[j];
    }
  }

  template <int D, int O>
  __attribute__((always_inline)) inline void update_row(const Table& t, int64_t slot, float* sum) const {
    const Row row = locate<D, O>(t, slot);
    if (t.dtype == kFloat32) return apply<D, O>(t, static_cast<float*>(row.weights), row.state[0], row.state[1], sum);
    update_narrow_row<D, O>(t, slot, row, sum);
  }
  template <int D, int O>
  __attribute__((noinline)) void update_narrow_row(const Table& t, int64_t slot, const Row& row, float* sum) const {
    alignas(64) float wide[kMaxDim];
    const uint64_t key = row_key(t.rounding_key, slot);
    const auto narrow = [&](auto* stored) {
      for (int64_t j = 0; j < t.dim; ++j) wide[j] = to_float(stored[j]);
      apply<D, O>(t, wide, row.state[0], row.state[1], sum);
      store_rounded(stored, wide, t.dim, key);
    };
    if (t.dtype == kFloat16) narrow(static_cast<Half*>(row.weights));
    else narrow(static_cast<BFloat*>(row.weights));
  }

  // Sums and updates every row of the sorted pairs [first, last), except those read too often, which go to `left`.
  template <int D, int O>
  void update_all(const TableRun& run, const Pair* first, const Pair* last, std::vector<const Pair*>& starts, float* sum,
                  std::vector<LongRun>& left) const {
    const Table& table = *run.table;
    starts.clear();
    for (const Pair* p = first; p < last; ++p)
      if (p == first || row_of(*p) != row_of(p[-1])) starts.push_back(p);
    const int64_t rows = int64_t(starts.size());
    starts.push_back(last);
    for (int64_t r = -kRowsAhead; r < rows; ++r) {
      if (r + kRowsAhead < rows) prefetch_row<D, O>(table, row_of(*starts[size_t(r + kRowsAhead)]));
      if (r < 0) continue;
      const Pair *p = starts[size_t(r)], *end = starts[size_t(r) + 1];
      if (end - p > kLongRun) {
        left.push_back({&run, p, end - p, 0});
      } else {
        add_up<D>(run, p, end, last, sum);
        update_row<D, O>(table, row_of(*p), sum);
      }
    }
  }
};

// Sorts by row pairs whose rows differ in their low `bits` only, keeping equal rows in order of position.
void sort_pairs(Pair* pairs, int64_t n, int bits, std::vector<Pair>& scratch) {
  if (bits == 0) return;
  if (n < 48) {  // pairs are unique and positions ascend with their low half: sorting whole pairs does
    for (int64_t i = 1; i < n; ++i) {
      const Pair pair = pairs[i];
      int64_t j = i;
      for (; j > 0 && pairs[j - 1] > pair; --j) pairs[j] = pairs[j - 1];
      pairs[j] = pair;
    }
    return;
  }
  if (int64_t(scratch.size()) < n) scratch.resize(size_t(n));
  Pair *from = pairs, *to = scratch.data();
  const int passes = (bits + 8) / 9, width = (bits + passes - 1) / passes;
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t counts[513] = {};
    const int shift = 32 + pass * width;
    const uint32_t mask = (1u << width) - 1;
    for (int64_t i = 0; i < n; ++i) ++counts[((from[i] >> shift) & mask) + 1];
    for (uint32_t b = 1; b <= mask; ++b) counts[b] += counts[b - 1];
    for (int64_t i = 0; i < n; ++i) to[counts[(from[i] >> shift) & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != pairs) std::copy(from, from + n, pairs);
}

int bits_of(int64_t n) {  // the smallest b with 2^b >= n
  int bits = 0;
  while ((int64_t(1) << bits) < n) ++bits;
  return bits;
}

}  // namespace
}  // namespace unequal

// Returns 0, or 1 where memory for the step's buffers could not be had (nothing was updated then).
UNEQUAL_API int uq_update(const unequal::Table* tables, int64_t table_count, const unequal::Feature* features,
                          int64_t feature_count, int threads) try {
  using namespace unequal;
  static thread_local Workspace workspace;
  Step step;
  step.tables.resize(size_t(table_count));
  int64_t positions = 0;
  for (int64_t f = 0; f < feature_count; ++f) {
    const Feature& feature = features[f];
    FeatureRun run{&feature, positions, feature.pooling == kNone, feature.values, feature.stride};
    if (!run.one_each && feature.count == feature.bags) {
      run.one_each = true;
      for (int64_t b = 0; b < feature.bags && run.one_each; ++b)
        run.one_each = feature.offsets[b + 1] - feature.offsets[b] == 1;
    }
    positions += feature.count;
    TableRun& table = step.tables[size_t(feature.table)];
    table.features.push_back(int(f));
    table.lookups += feature.count;
    table.plain = table.features.size() == 1 && !(feature.weights && feature.pooling != kNone);
    step.features.push_back(run);
  }
  int64_t buckets = 0, counters = 0;
  std::vector<Chunk> chunks;
  std::vector<size_t> first_chunk;
  for (int64_t t = 0; t < table_count; ++t) {
    TableRun& run = step.tables[size_t(t)];
    run.table = &tables[t];
    run.fine = std::min(bits_of(run.lookups / 4096), 10);
    run.buckets = bucket_of(std::max<int64_t>(tables[t].rows - 1, 0), run.fine) + 1;
    run.first_bucket = buckets;
    buckets += run.buckets;
    first_chunk.push_back(chunks.size());
    for (int f : run.features)
      for (int64_t i = 0; i < features[f].count; i += kChunk) {
        chunks.push_back({f, int(t), i, std::min(i + kChunk, features[f].count), counters});
        counters += run.buckets;
      }
  }
  first_chunk.push_back(chunks.size());
  // A bag's gradient that several ids read is copied to lie beside its neighbours' (divided by the bag's length for a mean):
  // in the module's output it is one piece of a wide row, and every piece lies on another page.
  int64_t packed = 0;
  const auto is_packed = [](const FeatureRun& run) {
    return run.feature->pooling == kMean || (run.feature->pooling == kSum && run.feature->count > run.feature->bags);
  };
  bool needs_bags = false;
  for (const FeatureRun& run : step.features) {
    packed += is_packed(run) ? run.feature->bags * tables[run.feature->table].dim : 0;
    needs_bags |= !run.one_each;
  }
  float* pieces = packed ? workspace.packed.get(size_t(packed)) : nullptr;
  for (FeatureRun& run : step.features)
    if (is_packed(run)) {
      const Feature& feature = *run.feature;
      const int64_t dim = tables[feature.table].dim;
      run.values = pieces;
      run.stride = dim;
#pragma omp parallel for schedule(static) num_threads(threads)
      for (int64_t bag = 0; bag < feature.bags; ++bag) {
        const int64_t length = feature.offsets[bag + 1] - feature.offsets[bag];
        const float share = feature.pooling == kMean && length > 0 ? 1.0f / float(length) : 1.0f;
        for (int64_t j = 0; j < dim; ++j) pieces[bag * dim + j] = feature.values[bag * feature.stride + j] * share;
      }
      pieces += feature.bags * dim;
    }
  step.bags = needs_bags ? workspace.bags.get(size_t(positions)) : nullptr;
  Pair* pairs = workspace.pairs.get(size_t(positions));
  uint32_t* counts = workspace.counts.get(size_t(counters));
  std::vector<int64_t> bucket_start(size_t(buckets) + 1, 0);
  const int64_t chunk_count = int64_t(chunks.size());

#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t c = 0; c < chunk_count; ++c) {
    const Chunk& chunk = chunks[size_t(c)];
    const FeatureRun& run = step.features[size_t(chunk.feature)];
    const Feature& feature = *run.feature;
    const TableRun& table = step.tables[size_t(chunk.table)];
    uint32_t* count = counts + chunk.counts;
    std::fill(count, count + table.buckets, 0u);
    for (int64_t i = chunk.first; i < chunk.last; ++i)
      if (feature.slots[i] >= 0) ++count[bucket_of(feature.slots[i], table.fine)];
    if (run.one_each) continue;
    const int64_t* offsets = feature.offsets;
    int64_t bag = std::upper_bound(offsets, offsets + feature.bags + 1, offsets[0] + chunk.first) - offsets - 1;
    for (int64_t i = chunk.first; i < chunk.last; ++bag) {
      const int64_t end = std::min(offsets[bag + 1] - offsets[0], chunk.last);
      for (; i < end; ++i) step.bags[run.first + i] = uint32_t(bag);
    }
  }

  int64_t place = 0;
  for (int64_t t = 0; t < table_count; ++t) {
    const TableRun& run = step.tables[size_t(t)];
    for (int64_t b = 0; b < run.buckets; ++b) {
      bucket_start[size_t(run.first_bucket + b)] = place;
      for (size_t c = first_chunk[size_t(t)]; c < first_chunk[size_t(t) + 1]; ++c) {
        uint32_t& count = counts[chunks[c].counts + b];
        const uint32_t n = count;
        count = uint32_t(place);
        place += n;
      }
    }
  }
  bucket_start[size_t(buckets)] = place;

#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t c = 0; c < chunk_count; ++c) {
    const Chunk& chunk = chunks[size_t(c)];
    const FeatureRun& run = step.features[size_t(chunk.feature)];
    const int64_t* slots = run.feature->slots;
    const int fine = step.tables[size_t(chunk.table)].fine;
    uint32_t* next = counts + chunk.counts;
    for (int64_t i = chunk.first; i < chunk.last; ++i)
      if (slots[i] >= 0) pairs[next[bucket_of(slots[i], fine)]++] = Pair(slots[i]) << 32 | Pair(run.first + i);
  }

  std::vector<Work> work;
  for (const TableRun& run : step.tables)
    for (int64_t b = run.first_bucket, end = run.first_bucket + run.buckets; b < end;) {
      const int64_t first = b, from = bucket_start[size_t(b)];
      while (b < end && bucket_start[size_t(b)] - from < kBatchLookups) ++b;
      if (bucket_start[size_t(b)] > from) work.push_back({&run, first, b});
    }
  std::vector<LongRun> long_runs;

#pragma omp parallel num_threads(threads)
  {
    std::vector<Pair> scratch;
    std::vector<LongRun> mine;
    std::vector<const Pair*> starts;
    alignas(64) float sum[kMaxDim];
#pragma omp for schedule(dynamic) nowait
    for (int64_t w = 0; w < int64_t(work.size()); ++w) {
      const TableRun& run = *work[size_t(w)].table;
      Pair* first = pairs + bucket_start[size_t(work[size_t(w)].first)];
      Pair* last = pairs + bucket_start[size_t(work[size_t(w)].last)];
      for (int64_t b = work[size_t(w)].first; b < work[size_t(w)].last; ++b) {
        Pair* bucket = pairs + bucket_start[size_t(b)];
        const int64_t n = bucket_start[size_t(b) + 1] - bucket_start[size_t(b)];
        int loose = 0;
        if (n > 1 && (bucket_of(row_of(*bucket), run.fine, loose), loose)) sort_pairs(bucket, n, loose, scratch);
      }
      by_dim(run.table->dim, [&](auto dim) {
        by_optimizer(run.table->optimizer, [&](auto optimizer) {
          step.template update_all<decltype(dim)::value, decltype(optimizer)::value>(run, first, last, starts, sum, mine);
        });
      });
    }
#pragma omp critical(unequal_long_runs)
    long_runs.insert(long_runs.end(), mine.begin(), mine.end());
  }

  if (!long_runs.empty()) {
    int64_t floats = 0;
    std::vector<std::pair<const LongRun*, int64_t>> parts;
    for (LongRun& run : long_runs) {
      run.partial = floats;
      const int64_t count = (run.length + kLongRun - 1) / kLongRun;
      floats += count * run.table->table->dim;
      for (int64_t k = 0; k < count; ++k) parts.emplace_back(&run, k);
    }
    float* partials = workspace.partials.get(size_t(floats));
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t k = 0; k < int64_t(parts.size()); ++k) {
      const LongRun& run = *parts[size_t(k)].first;
      const Pair* from = run.first + parts[size_t(k)].second * kLongRun;
      const Pair* to = std::min(from + kLongRun, run.first + run.length);
      const int64_t dim = run.table->table->dim;
      by_dim(dim, [&](auto constant) {
        step.template add_up<decltype(constant)::value>(*run.table, from, to, to,
                                                        partials + run.partial + parts[size_t(k)].second * dim);
      });
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t k = 0; k < int64_t(long_runs.size()); ++k) {
      const LongRun& run = long_runs[size_t(k)];
      const Table& table = *run.table->table;
      float* sum = partials + run.partial;
      for (int64_t piece = 1; piece * kLongRun < run.length; ++piece)
        for (int64_t j = 0; j < table.dim; ++j) sum[j] += sum[piece * table.dim + j];
      by_dim(table.dim, [&](auto dim) {
        by_optimizer(table.optimizer, [&](auto optimizer) {
          step.template update_row<decltype(dim)::value, decltype(optimizer)::value>(table, row_of(*run.first), sum);
        });
      });
    }
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
