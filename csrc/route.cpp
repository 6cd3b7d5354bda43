// Which rank answers for an id: rows that are copied to every rank or to every node lie nearer than their owner.
#include <algorithm>
#include <new>
#include <vector>

#include "directory.h"

namespace unequal {
namespace {

struct Dealer {
  uint64_t parts;
  bool hashed;
  // Dense ids in turn, others by their mixed bits.
  int64_t operator()(int64_t id) const {
    return int64_t((hashed ? mix64(uint64_t(id)) & ~(uint64_t(1) << 63) : uint64_t(id)) % parts);
  }
};

}  // namespace
}  // namespace unequal

// Sorts ids by tier and, within it, by the rank that answers, keeping the order of those that have both in common.
// An id that the directory (null: none) knows by a number below cuts[0] is in the first tier, below cuts[1] in the second, and so
// on; all others are in the last. Its place is part_of(id) / divisor % places. order[k]: the position of the k-th;
// sizes: [cuts + 1, places]; numbers: what the directory gave for every id, -1 where it knows none. Returns -1 without memory.
UNEQUAL_API int uq_route(const int64_t* ids, int64_t count, const void* directory, int64_t capacity, const int64_t* cuts,
                         int64_t cut_count, int64_t parts, int64_t divisor, int64_t places, int hashed, int64_t* order,
                         int64_t* sizes, int64_t* numbers) try {
  using namespace unequal;
  const Dealer part_of{uint64_t(parts), hashed != 0};
  Entry* entries = static_cast<Entry*>(const_cast<void*>(directory));
  const uint64_t mask = uint64_t(capacity) - 1;
  std::vector<int32_t> group(static_cast<size_t>(count));
  std::fill(sizes, sizes + (cut_count + 1) * places, 0);
  for (int64_t i = 0; i < count; ++i) {
    int64_t tier = cut_count, number = -1;
    if (entries) {
      if (i + kAhead < count) __builtin_prefetch(entries + home(ids[i + kAhead], mask));
      const Entry* entry = probe(entries, mask, ids[i]);
      if (entry->slot >= 0) number = entry->slot;
    }
    numbers[i] = number;
    for (int64_t c = cut_count - 1; c >= 0 && number >= 0 && number < cuts[c]; --c) tier = c;
    const int64_t at = tier * places + part_of(ids[i]) / divisor % places;
    group[size_t(i)] = int32_t(at);
    ++sizes[at];
  }
  std::vector<int64_t> next(size_t((cut_count + 1) * places), 0);
  for (size_t g = 1; g < next.size(); ++g) next[g] = next[g - 1] + sizes[g - 1];
  for (int64_t i = 0; i < count; ++i) order[next[size_t(group[size_t(i)])]++] = i;
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// Ids of bags dealt out: the ids themselves, part by part, and of each part the lengths of its share of every bag, [parts, bags].
UNEQUAL_API void uq_deal_bags(const int64_t* ids, const int64_t* lengths, int64_t bags, int64_t parts, int hashed,
                              int64_t* dealt, int64_t* dealt_lengths, int64_t* sizes) {
  const unequal::Dealer part_of{uint64_t(parts), hashed != 0};
  std::fill(dealt_lengths, dealt_lengths + parts * bags, 0);
  const int64_t* id = ids;
  for (int64_t b = 0; b < bags; ++b)
    for (int64_t i = 0; i < lengths[b]; ++i) ++dealt_lengths[part_of(*id++) * bags + b];
  std::vector<int64_t> next(size_t(parts), 0);
  int64_t total = 0;
  for (int64_t p = 0; p < parts; ++p) {
    next[size_t(p)] = total;
    sizes[p] = 0;
    for (int64_t b = 0; b < bags; ++b) sizes[p] += dealt_lengths[p * bags + b];
    total += sizes[p];
  }
  for (int64_t i = 0; i < total; ++i) dealt[next[size_t(part_of(ids[i]))]++] = ids[i];
}
