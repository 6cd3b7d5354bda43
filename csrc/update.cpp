// Backward fused with the optimizer: lookups are grouped by row, each row's gradients are summed in the order of their
// positions, and the row is updated once. No gradient of a table is ever materialised.
//
//   1. Lookups become (row, gradient) pairs. Those of a table with many lookups are first placed into buckets, which are ranges
//      of rows in ascending order: count, in chunks of lookups, how many fall into each, then place them in order. Buckets
//      are finer where row numbers are low, like floating-point numbers: ids are often numbered by popularity.
//   2. Take tables with few lookups, and runs of buckets of the others, in any order on any thread: sort in cache, sum each run
//      of equal rows, apply the optimizer. Rows are met in the order of their addresses: address translation then costs half
//      as much as in random order.
//   3. Rows read more than kLongRun times are left over: all threads sum their pieces, then the row is updated.
//
// A sum is that of its pieces of kPiece gradients, added in order: it depends on the data alone, never on the threads.
#include <algorithm>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <omp.h>

#include "buffer.h"
#include "pairs.h"
#include "row_update.h"

namespace unequal {
namespace {

constexpr int64_t kFewLookups = 16384;     // a table with no more lookups is sorted in one piece
constexpr int64_t kBucketLookups = 16384;  // aimed at in the others
constexpr int64_t kPartLookups = 8192;     // buckets are taken together until they have as many
constexpr int64_t kChunk = 8192;           // lookups that a thread counts or places at a time
constexpr int64_t kPackedBags = 512;       // bags that a thread copies at a time
constexpr int64_t kPiece = 512;            // gradients
constexpr int64_t kLongRun = 32 * kPiece;
constexpr int64_t kRowsAhead = 8;          // rows are prefetched this many rows ahead of the one being updated
constexpr int64_t kNarrowAhead = 16;       // narrow ones: they take fewer lines
constexpr int64_t kGradientsAhead = 12;    // and gradients this many lookups ahead

struct FeatureRun {       // a feature as the update sees it
  const Feature* feature;
  int64_t first;          // the number of its first gradient
  const float* values;    // the gradient's rows
  int64_t stride;
  uint32_t* bags;         // of a pooled feature with weights: the bag of each id, and numbers count ids; otherwise null

  const float* gradient(int64_t number) const {
    const int64_t index = number - first;
    return values + (bags ? int64_t(bags[index]) : index) * stride;
  }
};

struct TableRun {
  const Table* table;
  std::vector<size_t> features;           // into the FeatureRuns
  int64_t lookups = 0, first_pair = 0;
  int64_t numbers = 0;                    // of gradients, or of ids where they are weighted
  int fine = 0;                           // buckets per doubling of the row number: 2^fine
  int64_t buckets = 0, first_bucket = 0;  // none: few lookups
  int64_t rows = 0;                       // numbers of rows are below it
  std::optional<RowNumbers> numbered;     // how rows are numbered where that is not their slot
  bool plain = true;                      // one feature without weights: the fast path
};

struct Chunk {
  size_t feature, table;
  int64_t first, last;     // ids of the feature
  int64_t counts;          // where its bucket counts start
};

struct Pack {              // bags of a feature whose gradients are copied
  const FeatureRun* run;
  float* to;
  int64_t first, last;
};

// Calls body with the number of a row as a function of its slot.
template <class Body>
inline void with_numbers(const TableRun& table, Body&& body) {
  if (table.numbered) return body([&numbers = *table.numbered](int64_t slot) { return numbers.of(slot); });
  body([](int64_t slot) { return slot; });
}

// Calls visit(slot, number of the gradient) for ids [first, last) of a feature, in order, except those without a row.
template <class Visit>
inline void each_lookup(const FeatureRun& run, int64_t first, int64_t last, Visit&& visit) {
  const int64_t *slots = run.feature->slots, *offsets = run.feature->offsets;
  if (run.feature->pooling == kNone) {
    for (int64_t i = first; i < last; ++i)
      if (slots[i] >= 0) visit(slots[i], run.first + i);
    return;
  }
  int64_t bag = std::upper_bound(offsets, offsets + run.feature->bags + 1, offsets[0] + first) - offsets - 1;
  for (int64_t i = first; i < last; ++bag) {
    const int64_t end = std::min(offsets[bag + 1] - offsets[0], last);
    for (; i < end; ++i) {
      if (run.bags) run.bags[i] = uint32_t(bag);
      if (slots[i] >= 0) visit(slots[i], run.first + (run.bags ? i : bag));
    }
  }
}

struct Part {               // buckets [first, last) of a table, or all of it where it has none
  const TableRun* table;
  int64_t first, last;
};

struct LongRun {
  const TableRun* table;
  const Pair* first;
  int64_t length, partial;
};

struct Workspace {
  Buffer<Pair> pairs, scratch;
  Buffer<uint32_t> bags, counts, starts;
  Buffer<float> partials, packed;
};

struct Step {
  std::vector<FeatureRun> features;
  std::vector<TableRun> tables;

  const FeatureRun& feature_of(const TableRun& table, uint32_t number) const {
    size_t k = table.features.size() - 1;
    while (k > 0 && features[table.features[k]].first > int64_t(number)) --k;
    return features[table.features[k]];
  }

  // sum ← Σ of the gradients of [from, to), prefetching up to `end`.
  template <int D>
  __attribute__((always_inline)) inline void add_piece(const TableRun& run, const Pair* from, const Pair* to, const Pair* end,
                                                       float* sum) const {
    constexpr int W = kWidth<D>, N = D / W;
    const int64_t dim = D ? D : run.table->dim;
    if (D && run.plain) {
      const float* values = features[run.features[0]].values;
      const int64_t stride = features[run.features[0]].stride;
      Lanes<W> lanes[N ? N : 1] = {};
      for (const Pair* p = from; p < to; ++p) {
        if (p + kGradientsAhead < end) prefetch(values + number_of(p[kGradientsAhead]) * stride, D * 4);
        const float* gradient = values + number_of(*p) * stride;
        for (int j = 0; j < N; ++j) lanes[j] += load<W>(gradient + W * j);
      }
      for (int j = 0; j < N; ++j) store<W>(sum + W * j, lanes[j]);
      return;
    }
    std::fill(sum, sum + dim, 0.0f);
    for (const Pair* p = from; p < to; ++p) {
      if (p + kGradientsAhead < end) {
        const uint32_t next = number_of(p[kGradientsAhead]);
        prefetch(feature_of(run, next).gradient(next), dim * 4);
      }
      const FeatureRun& feature = feature_of(run, number_of(*p));
      const float* gradient = feature.gradient(number_of(*p));
      const float factor = feature.bags ? feature.feature->weights[int64_t(number_of(*p)) - feature.first] : 1.0f;
      for (int64_t j = 0; j < dim; ++j) sum[j] += factor * gradient[j];
    }
  }

  // Likewise of all pieces.
  template <int D>
  __attribute__((always_inline)) inline void add_up(const TableRun& run, const Pair* from, const Pair* to, const Pair* end,
                                                    float* sum) const {
    add_piece<D>(run, from, std::min(from + kPiece, to), end, sum);
    if (to - from > kPiece) add_further_pieces<D>(run, from + kPiece, to, end, sum);
  }
  template <int D>
  __attribute__((noinline)) void add_further_pieces(const TableRun& run, const Pair* from, const Pair* to, const Pair* end,
                                                    float* sum) const {
    alignas(64) float piece[D ? D : kMaxDim];
    for (; from < to; from += kPiece) {
      add_piece<D>(run, from, std::min(from + kPiece, to), end, piece);
      for (int64_t j = 0; j < (D ? D : run.table->dim); ++j) sum[j] += piece[j];
    }
  }

  template <int D, int O>
  __attribute__((always_inline)) inline void update_row(const Table& t, int64_t slot, float* sum, int64_t reads) const {
    if (t.chunk) return update_part<D, O>(t, slot, sum, reads);
    const Row row = locate<D, O>(t, slot);
    if (t.dtype == kFloat32) return apply<D, O>(t, static_cast<float*>(row.weights), row.state[0], row.state[1], sum, t.dim);
    apply_rounded<D, O>(t, slot, row.weights, row.state[0], row.state[1], sum, t.dim);
  }

#if defined(UNEQUAL_LIVE_LANES)
  // Sums and updates every row of the sorted pairs where rows have their first chunks: see update_first.
  template <int D, int O>
  __attribute__((noinline)) void update_by_class(const TableRun& run, const Pair* first, const Pair* last,
                                                 const uint32_t* starts, int64_t rows, std::vector<LongRun>& left) const {
    const Table& table = *run.table;
    ClassOfRows next(table, *run.numbered), now(table, *run.numbered);
    char* ahead[kNarrowAhead];
    alignas(64) float sum[D];
    for (int64_t r = -kNarrowAhead; r < rows; ++r) {
      char* record = ahead[uint64_t(r) % kNarrowAhead];
      if (r + kNarrowAhead < rows) {
        char* coming = next.record(row_of(first[starts[r + kNarrowAhead]]));
        prefetch_part<D * 4>(coming, next.row_bytes);
        ahead[uint64_t(r) % kNarrowAhead] = coming;
      }
      if (r < 0) continue;
      const Pair *p = first + starts[r], *end = first + starts[r + 1];
      if (end - p > kLongRun) {
        left.push_back({&run, p, end - p, 0});
      } else {
        add_up<D>(run, p, end, last, sum);
        now.record(row_of(*p));
        update_first<D, O>(table, *now.layout, reinterpret_cast<float*>(record), now.chunks == run.numbered->widest, sum, end - p);
      }
    }
  }
#endif

  // Sums and updates every row of the sorted pairs [first, last), except those read too often, which go to `left`.
  // starts: room for one more than there are pairs.
  template <int D, int O>
  void update_all(const TableRun& run, const Pair* first, const Pair* last, uint32_t* starts,
                  std::vector<LongRun>& left) const {
    const Table& table = *run.table;
    alignas(64) float sum[D ? D : kMaxDim];
    int64_t rows = 0, previous = -1;
    for (int64_t i = 0; i < last - first; ++i) {  // without a branch, which could not be predicted
      starts[rows] = uint32_t(i);
      rows += row_of(first[i]) != previous;
      previous = row_of(first[i]);
    }
    starts[rows] = uint32_t(last - first);
#if defined(UNEQUAL_LIVE_LANES)
    if constexpr (D != 0 && D % 16 == 0 && (O == kRowWiseAdagrad || O == kSGD))
      if (run.numbered) return update_by_class<D, O>(run, first, last, starts, rows, left);
#endif
    for (int64_t r = -kRowsAhead; r < rows; ++r) {
      if (r + kRowsAhead < rows) prefetch_row<D, O>(table, row_of(first[starts[r + kRowsAhead]]));
      if (r < 0) continue;
      const Pair *p = first + starts[r], *end = first + starts[r + 1];
      if (end - p > kLongRun) {
        left.push_back({&run, p, end - p, 0});
      } else {
        add_up<D>(run, p, end, last, sum);
        update_row<D, O>(table, row_of(*p), sum, end - p);
      }
    }
  }
};

}  // namespace
}  // namespace unequal

// number: of the step, from 0. Returns 0, or 1 where memory for the step's buffers could not be had (nothing was updated then).
UNEQUAL_API int uq_update(const unequal::Table* fixed_tables, int64_t table_count, const unequal::FeatureSpec* specs,
                          int64_t spec_count, const unequal::Request* request, double lr_factor, int64_t number,
                          int threads) try {
  using namespace unequal;
  static thread_local Workspace workspace;
  std::vector<Table> tables(fixed_tables, fixed_tables + table_count);
  for (Table& table : tables) {
    table.lr *= lr_factor;
    table.correction1 = 1 - std::pow(table.beta1, double(number + 1));
    table.correction2 = 1 - std::pow(table.beta2, double(number + 1));
    table.rounding_key = mix64(table.key + uint64_t(number + 1) * kGolden);
  }
  const std::vector<Feature> features = features_of(tables.data(), specs, spec_count, *request);
  Step step;
  step.tables.resize(size_t(table_count));
  // A bag's gradient that several ids read is copied to lie beside its neighbours' (divided by the bag's length for a mean):
  // in the module's output it is one piece of a wide row, and every piece lies on another page.
  const auto is_packed = [](const Feature& feature) {
    return feature.pooling == kMean || (feature.pooling == kSum && feature.count > feature.bags);
  };
  const auto is_weighted = [](const Feature& feature) { return feature.weights && feature.pooling != kNone; };
  int64_t packed_floats = 0, weighted_ids = 0, lookups = 0;
  for (const Feature& feature : features) {
    packed_floats += is_packed(feature) ? feature.bags * tables[size_t(feature.table)].dim : 0;
    weighted_ids += is_weighted(feature) ? feature.count : 0;
    lookups += feature.count;
  }
  float* packed = workspace.packed.get(size_t(packed_floats));
  uint32_t* bags = workspace.bags.get(size_t(weighted_ids));
  Pair* pairs = workspace.pairs.get(size_t(lookups));
  step.features.reserve(features.size());
  std::vector<Pack> packs;
  for (const Feature& feature : features) {
    TableRun& table = step.tables[size_t(feature.table)];
    const bool weighted = is_weighted(feature);
    step.features.push_back({&feature, table.numbers, feature.values, feature.stride, weighted ? bags : nullptr});
    if (is_packed(feature)) {
      FeatureRun& run = step.features.back();
      run.values = packed;
      run.stride = tables[size_t(feature.table)].dim;
      for (int64_t bag = 0; bag < feature.bags; bag += kPackedBags)
        packs.push_back({&run, packed, bag, std::min(bag + kPackedBags, feature.bags)});
      packed += feature.bags * run.stride;
    }
    bags += weighted ? feature.count : 0;
    table.features.push_back(step.features.size() - 1);
    table.lookups += feature.count;
    table.numbers += weighted || feature.pooling == kNone ? feature.count : feature.bags;
    table.plain = table.features.size() == 1 && !weighted;
  }
  int64_t buckets = 0, counters = 0, first_pair = 0;
  std::vector<Chunk> chunks;
  std::vector<size_t> first_chunk;
  for (int64_t t = 0; t < table_count; ++t) {
    TableRun& run = step.tables[size_t(t)];
    run.table = &tables[size_t(t)];
    run.rows = run.table->rows;
#if defined(UNEQUAL_LIVE_LANES)
    if (run.lookups && goes_first(*run.table)) run.rows = run.numbered.emplace(*run.table).count;
#endif
    run.first_pair = first_pair;
    first_pair += run.lookups;
    first_chunk.push_back(chunks.size());
    if (run.lookups <= kFewLookups) continue;
    run.fine = std::min(bits_of(run.lookups / kBucketLookups), 10);
    run.buckets = bucket_of(std::max<int64_t>(run.rows - 1, 0), run.fine) + 1;
    run.first_bucket = buckets;
    buckets += run.buckets + 1;
    for (size_t f : run.features)
      for (int64_t i = 0; i < features[f].count; i += kChunk) {
        chunks.push_back({f, size_t(t), i, std::min(i + kChunk, features[f].count), counters});
        counters += run.buckets;
      }
  }
  first_chunk.push_back(chunks.size());
  uint32_t* counts = workspace.counts.get(size_t(counters));
  std::vector<int64_t> bucket_start(size_t(buckets), 0);  // of each table, and where its last one ends

#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic) nowait
    for (size_t k = 0; k < packs.size(); ++k) {
      const Feature& feature = *packs[k].run->feature;
      const int64_t dim = packs[k].run->stride;
      for (int64_t bag = packs[k].first; bag < packs[k].last; ++bag) {
        const int64_t length = feature.offsets[bag + 1] - feature.offsets[bag];
        const float share = feature.pooling == kMean && length > 0 ? 1.0f / float(length) : 1.0f;
        for (int64_t j = 0; j < dim; ++j) packs[k].to[bag * dim + j] = feature.values[bag * feature.stride + j] * share;
      }
    }
#pragma omp for schedule(dynamic)
    for (size_t c = 0; c < chunks.size(); ++c) {
      const TableRun& table = step.tables[chunks[c].table];
      const int64_t* slots = features[chunks[c].feature].slots;
      uint32_t* count = counts + chunks[c].counts;
      std::fill(count, count + table.buckets, 0u);
      with_numbers(table, [&](auto&& row) {
        for (int64_t i = chunks[c].first; i < chunks[c].last; ++i)
          if (slots[i] >= 0) ++count[bucket_of(row(slots[i]), table.fine)];
      });
    }
  }

  std::vector<Part> parts;
  int64_t longest = 0;  // lookups of a part
  for (int64_t t = 0; t < table_count; ++t) {
    const TableRun& run = step.tables[size_t(t)];
    if (!run.buckets) {
      parts.push_back({&run, 0, 0});
      longest = std::max(longest, run.lookups);
      continue;
    }
    int64_t place = run.first_pair;
    int64_t* starts = &bucket_start[size_t(run.first_bucket)];
    for (int64_t b = 0, first = 0; b < run.buckets; ++b) {
      starts[b] = place;
      for (size_t c = first_chunk[size_t(t)]; c < first_chunk[size_t(t) + 1]; ++c)
        place += std::exchange(counts[chunks[c].counts + b], uint32_t(place));
      if (place - starts[first] >= kPartLookups || b + 1 == run.buckets) {
        parts.push_back({&run, first, b + 1});
        longest = std::max(longest, place - starts[first]);
        first = b + 1;
      }
    }
    starts[run.buckets] = place;
  }
  // Small parts last, so that the threads end together.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& a, const Part& b) { return a.table->lookups > b.table->lookups; });
  Pair* scratch = workspace.scratch.get(size_t(longest * threads));
  uint32_t* starts = workspace.starts.get(size_t((longest + 1) * threads));
  std::vector<LongRun> long_runs;

#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (size_t c = 0; c < chunks.size(); ++c) {
      const TableRun& table = step.tables[chunks[c].table];
      const int fine = table.fine;
      uint32_t* next = counts + chunks[c].counts;
      with_numbers(table, [&](auto&& row) {
        each_lookup(step.features[chunks[c].feature], chunks[c].first, chunks[c].last, [&](int64_t slot, int64_t number) {
          const int64_t its = row(slot);
          pairs[next[bucket_of(its, fine)]++] = pair_of(its, number);
        });
      });
    }
    Pair* my_scratch = scratch + longest * omp_get_thread_num();
    uint32_t* my_starts = starts + (longest + 1) * omp_get_thread_num();
    std::vector<LongRun> mine;
#pragma omp for schedule(dynamic) nowait
    for (size_t k = 0; k < parts.size(); ++k) {
      const TableRun& run = *parts[k].table;
      Pair *first = pairs + run.first_pair, *last = first;
      if (run.buckets) {
        const int64_t* bucket = &bucket_start[size_t(run.first_bucket)];
        first = pairs + bucket[parts[k].first];
        last = pairs + bucket[parts[k].last];
        for (int64_t b = parts[k].first; b < parts[k].last; ++b) {
          int loose = 0;
          if (bucket[b + 1] > bucket[b]) bucket_of(row_of(pairs[bucket[b]]), run.fine, loose);
          sort_pairs(pairs + bucket[b], bucket[b + 1] - bucket[b], loose, my_scratch);
        }
      } else {
        with_numbers(run, [&](auto&& row) {
          for (size_t f : run.features)
            each_lookup(step.features[f], 0, features[f].count,
                        [&](int64_t slot, int64_t number) { *last++ = pair_of(row(slot), number); });
        });
        sort_pairs(first, last - first, bits_of(run.rows), my_scratch);
      }
      by_dim(run.table->dim, [&](auto dim) {
        by_optimizer(run.table->optimizer, [&](auto optimizer) {
          step.template update_all<decltype(dim)::value, decltype(optimizer)::value>(run, first, last, my_starts, mine);
        });
      });
    }
#pragma omp critical(unequal_long_runs)
    long_runs.insert(long_runs.end(), mine.begin(), mine.end());
  }

  if (!long_runs.empty()) {
    int64_t floats = 0;
    std::vector<std::pair<const LongRun*, int64_t>> pieces;
    for (LongRun& run : long_runs) {
      run.partial = floats;
      const int64_t count = (run.length + kPiece - 1) / kPiece;
      floats += count * run.table->table->dim;
      for (int64_t k = 0; k < count; ++k) pieces.emplace_back(&run, k);
    }
    float* partials = workspace.partials.get(size_t(floats));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
      for (size_t k = 0; k < pieces.size(); ++k) {
        const LongRun& run = *pieces[k].first;
        const Pair* from = run.first + pieces[k].second * kPiece;
        const Pair* to = std::min(from + kPiece, run.first + run.length);
        const int64_t dim = run.table->table->dim;
        by_dim(dim, [&](auto constant) {
          step.template add_piece<decltype(constant)::value>(*run.table, from, to, to,
                                                             partials + run.partial + pieces[k].second * dim);
        });
      }
#pragma omp for schedule(dynamic)
      for (size_t k = 0; k < long_runs.size(); ++k) {
        const LongRun& run = long_runs[k];
        const Table& table = *run.table->table;
        float* sum = partials + run.partial;
        int64_t slot = row_of(*run.first);
        if (run.table->numbered) slot = run.table->numbered->slot(slot);
        for (int64_t piece = 1; piece * kPiece < run.length; ++piece)
          for (int64_t j = 0; j < table.dim; ++j) sum[j] += sum[piece * table.dim + j];
        by_dim(table.dim, [&](auto dim) {
          by_optimizer(table.optimizer, [&](auto optimizer) {
            step.template update_row<decltype(dim)::value, decltype(optimizer)::value>(table, slot, sum, run.length);
          });
        });
      }
    }
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
