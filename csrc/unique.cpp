// Distinct ids in the order in which they first appear, and for every id its place among them. Ids are spread over buckets by
// a hash; a bucket is made unique by one thread; ranks follow from positions, so any number of threads gives the same.
#include <algorithm>
#include <new>
#include <vector>

#include "buffer.h"
#include "common.h"

namespace unequal {
namespace {

constexpr int64_t kChunk = 16384;
constexpr int64_t kBucketIds = 4096;

inline uint64_t scatter(int64_t id) { return mix64(uint64_t(id) * kGolden + kGolden); }

// As many ids as one thread takes in one pass: where there are others, less.
constexpr int64_t kTogether = int64_t(1) << 20, kShared = int64_t(1) << 16;

// Ids that lie in several places: [spans, 2] where each begins and ends.
struct Spans {
  const int64_t* ends;
  int64_t count;
  int64_t total() const {
    int64_t ids = 0;
    for (int64_t s = 0; s < count; ++s) ids += ends[2 * s + 1] - ends[2 * s];
    return ids;
  }
};

// The rank of each id among the distinct ones, by the id itself: for tables with few rows.
struct Direct {
  int32_t* ranks;
  Direct(Buffer<int32_t>& memory, int64_t rows) : ranks(memory.get(size_t(rows))) { std::fill(ranks, ranks + rows, -1); }
  int32_t& operator()(int64_t id, const int64_t*) const { return ranks[id]; }
};

// Likewise, by a hash: an id is met again where the rank leads to it.
struct Hashed {
  int32_t* ranks;
  size_t mask;
  int shift;
  Hashed(Buffer<int32_t>& memory, int64_t count) {
    int bits = 6;
    while ((int64_t(1) << bits) < 2 * count) ++bits;
    ranks = memory.get(size_t(1) << bits);
    mask = (size_t(1) << bits) - 1;
    shift = 64 - bits;
    std::fill(ranks, ranks + mask + 1, -1);
  }
  int32_t& operator()(int64_t id, const int64_t* distinct) const {
    size_t at = size_t(scatter(id) >> shift);
    while (ranks[at] >= 0 && distinct[ranks[at]] != id) at = (at + 1) & mask;
    return ranks[at];
  }
};

// For one thread: a single pass. inverse lies as ids do.
template <class Ranks>
int64_t unique_in_one_pass(const int64_t* ids, Spans spans, const Ranks& rank_of, int64_t* distinct, int64_t* inverse,
                           int64_t* counts) {
  int64_t found = 0;
  for (int64_t s = 0; s < spans.count; ++s)
    for (int64_t i = spans.ends[2 * s]; i < spans.ends[2 * s + 1]; ++i) {
      int32_t& rank = rank_of(ids[i], distinct);
      if (rank < 0) {
        distinct[found] = ids[i];
        counts[found] = 0;
        rank = int32_t(found++);
      }
      inverse[i] = rank;
      ++counts[rank];
    }
  return found;
}

inline Buffer<int32_t>& scratch() {
  static thread_local Buffer<int32_t> memory;
  return memory;
}

bool all_inside(const int64_t* ids, Spans spans, int64_t rows) {
  bool outside = false;
  for (int64_t s = 0; s < spans.count; ++s)
    for (int64_t i = spans.ends[2 * s]; i < spans.ends[2 * s + 1]; ++i) outside |= uint64_t(ids[i]) >= uint64_t(rows);
  return !outside;
}

// A table of a step. All fields have 8 bytes; filled in by kernels/cpu/dealing.py.
struct Asked {
  int64_t first_span, spans;
  int64_t rows;              // ids must be in [0, rows); -1: any are right
  int64_t at;                // where its distinct ids are to lie; -1: they are not asked for
};

}  // namespace
}  // namespace unequal

// distinct, counts: [count] at most; inverse: [count]. Returns the number of distinct ids, or -1 where memory ran out.
UNEQUAL_API int64_t uq_unique(const int64_t* ids, int64_t count, int64_t* distinct, int64_t* inverse, int64_t* counts,
                              int threads) try {
  using namespace unequal;
  if (threads == 1 && count <= kTogether) {
    const int64_t whole[2] = {0, count};
    return unique_in_one_pass(ids, {whole, 1}, Hashed(scratch(), count), distinct, inverse, counts);
  }
  int bits = 0;
  while (bits < 12 && (kBucketIds << bits) < count) ++bits;
  const int64_t buckets = int64_t(1) << bits, chunks = (count + kChunk - 1) / kChunk;
  const auto bucket_of = [&](int64_t id) { return bits ? int64_t(scatter(id) >> (64 - bits)) : 0; };
  std::vector<int64_t> place(size_t(chunks * buckets), 0), start(size_t(buckets) + 1, 0), rank(size_t(chunks) + 1, 0);
  std::vector<int64_t> positions(size_t(count), 0);

#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t i = c * kChunk; i < std::min(count, (c + 1) * kChunk); ++i) ++place[size_t(c * buckets + bucket_of(ids[i]))];
  int64_t total = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    start[size_t(b)] = total;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t n = place[size_t(c * buckets + b)];
      place[size_t(c * buckets + b)] = total;
      total += n;
    }
  }
  start[size_t(buckets)] = total;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t i = c * kChunk; i < std::min(count, (c + 1) * kChunk); ++i)
      positions[size_t(place[size_t(c * buckets + bucket_of(ids[i]))]++)] = i;

  // Within a bucket positions ascend, so an id's first entry is its first appearance. inverse holds that position for now.
  bool failed = false;
#pragma omp parallel num_threads(threads)
  {
    std::vector<int64_t> table;
#pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < buckets; ++b) {
      const int64_t first = start[size_t(b)], last = start[size_t(b) + 1];
      size_t capacity = 16;
      while (capacity < size_t(2 * (last - first))) capacity *= 2;
      try {
        table.assign(capacity, -1);
      } catch (const std::bad_alloc&) {
#pragma omp atomic write
        failed = true;
        continue;
      }
      for (int64_t k = first; k < last; ++k) {
        const int64_t position = positions[size_t(k)], id = ids[position];
        size_t at = size_t(scatter(id)) & (capacity - 1);
        while (table[at] >= 0 && ids[table[at]] != id) at = (at + 1) & (capacity - 1);
        if (table[at] < 0) table[at] = position;
        inverse[position] = table[at];
      }
    }
  }
  if (failed) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t i = c * kChunk; i < std::min(count, (c + 1) * kChunk); ++i) rank[size_t(c) + 1] += inverse[i] == i;
  for (int64_t c = 0; c < chunks; ++c) rank[size_t(c) + 1] += rank[size_t(c)];
  // positions is free again: it takes the rank of every first appearance.
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; ++c) {
    int64_t next = rank[size_t(c)];
    for (int64_t i = c * kChunk; i < std::min(count, (c + 1) * kChunk); ++i)
      if (inverse[i] == i) {
        distinct[next] = ids[i];
        positions[size_t(i)] = next++;
      }
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) inverse[i] = positions[size_t(inverse[i])];
  const int64_t found = rank[size_t(chunks)];
  std::fill(counts, counts + found, 0);
  for (int64_t i = 0; i < count; ++i) ++counts[inverse[i]];
  return found;
} catch (const std::bad_alloc&) {
  return -1;
}

// The same for all tables of a step, each of which reads some spans of the ids. distinct, counts: each table's at the place it was
// given; inverse lies as ids do; found: how many distinct ids each table has. Returns the first table that was asked for an id
// outside of its rows, `count` where none was, or -1 where memory ran out.
UNEQUAL_API int64_t uq_unique_tables(const int64_t* ids, const int64_t* spans, const void* described, int64_t count,
                                     int64_t* distinct, int64_t* inverse, int64_t* counts, int64_t* found, int threads) try {
  using namespace unequal;
  const Asked* tables = static_cast<const Asked*>(described);
  const int64_t together = threads == 1 ? kTogether : kShared;
  int64_t wrong = count;
  bool failed = false;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < count; ++t) {
    const Asked& table = tables[t];
    const Spans own{spans + 2 * table.first_span, table.spans};
    found[t] = 0;
    if (table.rows >= 0 && !all_inside(ids, own, table.rows)) {
#pragma omp critical
      wrong = std::min(wrong, t);
      continue;
    }
    const int64_t total = own.total();
    if (table.at < 0 || !total || total > together) continue;
    try {
      int64_t *mine = distinct + table.at, *times = counts + table.at;
      if (table.rows >= 0 && table.rows <= 4 * total)
        found[t] = unique_in_one_pass(ids, own, Direct(scratch(), table.rows), mine, inverse, times);
      else
        found[t] = unique_in_one_pass(ids, own, Hashed(scratch(), total), mine, inverse, times);
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      failed = true;
    }
  }
  if (failed) return -1;
  if (wrong < count) return wrong;
  // Tables with very many ids, one after the other.
  for (int64_t t = 0; t < count; ++t) {
    const Spans own{spans + 2 * tables[t].first_span, tables[t].spans};
    const int64_t total = own.total(), at = tables[t].at;
    if (at < 0 || total <= together) continue;
    std::vector<int64_t> joined, places(static_cast<size_t>(total));
    joined.reserve(static_cast<size_t>(total));
    for (int64_t s = 0; s < own.count; ++s) joined.insert(joined.end(), ids + own.ends[2 * s], ids + own.ends[2 * s + 1]);
    found[t] = uq_unique(joined.data(), total, distinct + at, places.data(), counts + at, threads);
    if (found[t] < 0) return -1;
    const int64_t* place = places.data();
    for (int64_t s = 0; s < own.count; ++s)
      for (int64_t i = own.ends[2 * s]; i < own.ends[2 * s + 1]; ++i) inverse[i] = *place++;
  }
  return count;
} catch (const std::bad_alloc&) {
  return -1;
}
