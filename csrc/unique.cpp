// Distinct ids in the order in which they first appear, and for every id its place among them. Ids are spread over buckets by
// a hash; a bucket is made unique by one thread; ranks follow from positions, so any number of threads gives the same.
#include <algorithm>
#include <new>
#include <vector>

#include "common.h"

namespace unequal {
namespace {

constexpr int64_t kChunk = 16384;
constexpr int64_t kBucketIds = 4096;

inline uint64_t scatter(int64_t id) { return mix64(uint64_t(id) * kGolden + kGolden); }

constexpr int64_t kTogether = int64_t(1) << 20;

// For one thread: a single pass, in which a hash table of ranks tells whether an id was met before.
int64_t unique_in_one_pass(const int64_t* ids, int64_t count, int64_t* distinct, int64_t* inverse, int64_t* counts) {
  int bits = 6;
  while ((int64_t(1) << bits) < 2 * count) ++bits;
  const size_t mask = (size_t(1) << bits) - 1;
  std::vector<int32_t> table(mask + 1, -1);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i];
    size_t at = size_t(scatter(id) >> (64 - bits));
    while (table[at] >= 0 && distinct[table[at]] != id) at = (at + 1) & mask;
    if (table[at] < 0) {
      distinct[found] = id;
      counts[found] = 0;
      table[at] = int32_t(found++);
    }
    inverse[i] = table[at];
    ++counts[table[at]];
  }
  return found;
}

}  // namespace
}  // namespace unequal

// distinct, counts: [count] at most; inverse: [count]. Returns the number of distinct ids, or -1 where memory ran out.
UNEQUAL_API int64_t uq_unique(const int64_t* ids, int64_t count, int64_t* distinct, int64_t* inverse, int64_t* counts,
                              int threads) try {
  using namespace unequal;
  if (threads == 1 && count <= kTogether) return unique_in_one_pass(ids, count, distinct, inverse, counts);
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
