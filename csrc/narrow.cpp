// Tables whose rows differ in width, in a step: the directory of live rows, and the candidates that are followed without a row.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "narrow.h"

namespace unequal {
namespace {

constexpr int64_t kFindAhead = 16;
constexpr int64_t kBlock = 4096;   // ids that a thread takes at a time
constexpr int64_t kTogether = 64;  // ids whose homes are brought near before the first is looked up
constexpr int64_t kWays = 8;       // candidates of a bucket
constexpr uint64_t kLine = 8;      // entries of short ids that lie in a line of the cache

// Of kNumbered the higher bits say the rest: class_bits from bit 8 on, chunks from 16, of how many parts this is one from 32.
enum DirectoryKind : int64_t { kByArray = 0, kShortIds = 1, kLongIds = 2, kNumbered = 3 };

// One of n places, from the high bits of a hash: n need not be a power of two. It is below 2^31.
inline uint64_t spread_over(int64_t id, uint64_t n) { return (mix64(uint64_t(id) * kGolden + kGolden) >> 32) * n >> 32; }

inline int32_t load_slot(const int32_t* at) {  // entries are packed: a slot may lie anywhere
  int32_t slot;
  std::memcpy(&slot, at, 4);
  return slot;
}

template <class Id>
struct __attribute__((packed)) Entry {
  Id id;
  int32_t slot;  // -1: empty
};

template <class Id>
struct Hashed {
  Entry<Id>* entries;
  uint64_t capacity;

  // Where to begin: short ids at the first of the 8 entries of a line, which are compared at once.
  uint64_t home(int64_t id) const {
    return sizeof(Id) == 4 ? spread_over(id, capacity / kLine) * kLine : spread_over(id, capacity);
  }
  void bring(uint64_t home) const { __builtin_prefetch(entries + home); }
  int64_t find(int64_t id, uint64_t home) const {
#if defined(__AVX512F__)
    if constexpr (sizeof(Id) == 4) {
      // Empty entries are of the id -1 and the slot -1, so that it does not matter whether one of them is taken for the id's.
      const __m512i wanted = _mm512_set1_epi32(int32_t(uint32_t(id)));
      for (uint64_t k = home;; k = k + kLine == capacity ? 0 : k + kLine) {
        const __m512i line = _mm512_loadu_si512(entries + k);
        const uint32_t found = _mm512_cmpeq_epi32_mask(line, wanted) & 0x5555;
        if (__builtin_expect(found, 1)) {
          const int64_t slot = entries[k + __builtin_ctz(found) / 2].slot;
          return uint64_t(id) >> 32 ? -1 : slot;  // a longer id is none of them
        }
        if (_mm512_mask_cmplt_epi32_mask(0xAAAA, line, _mm512_setzero_si512())) return -1;
      }
    }
#endif
    const int32_t* slot = at(id, home, false);
    return slot ? load_slot(slot) : -1;
  }
  // The id's slot, or null; with `insert` the place for it.
  int32_t* at(int64_t id, uint64_t home, bool insert) const {
    for (uint64_t k = home;; k = k + 1 == capacity ? 0 : k + 1) {
      Entry<Id>& entry = entries[k];
      const bool empty = entry.slot < 0;
      if (empty && !insert) return nullptr;
      if (empty) entry.id = Id(id);
      if (empty || int64_t(entry.id) == id) return reinterpret_cast<int32_t*>(reinterpret_cast<char*>(&entry) + sizeof(Id));
    }
  }
};

struct Array {
  int32_t* slots;
  uint64_t capacity;
  uint64_t home(int64_t id) const { return std::min(uint64_t(id), capacity); }
  void bring(uint64_t home) const { __builtin_prefetch(slots + home); }
  int32_t* at(int64_t id, uint64_t, bool) const { return uint64_t(id) < capacity ? slots + id : nullptr; }
  int64_t find(int64_t id, uint64_t) const { return uint64_t(id) < capacity ? slots[id] : -1; }
};

// All rows are there, equally wide, in the order of their ids.
struct Numbered {
  int64_t class_bits, chunks, of;
  uint64_t capacity;
  uint64_t home(int64_t) const { return 0; }
  void bring(uint64_t) const {}
  int32_t* at(int64_t, uint64_t, bool) const { return nullptr; }
  int64_t find(int64_t id, uint64_t) const {
    return uint64_t(id) < capacity ? (of == 1 ? id : id / of) << class_bits | chunks : -1;
  }
};

template <class Body>
inline void by_kind(int64_t kind, void* memory, int64_t capacity, Body&& body) {
  switch (kind & 255) {
    case kNumbered: return body(Numbered{kind >> 8 & 255, kind >> 16 & 0xFFFF, kind >> 32, uint64_t(capacity)});
    case kByArray: return body(Array{static_cast<int32_t*>(memory), uint64_t(capacity)});
    case kShortIds: return body(Hashed<uint32_t>{static_cast<Entry<uint32_t>*>(memory), uint64_t(capacity)});
    default: return body(Hashed<int64_t>{static_cast<Entry<int64_t>*>(memory), uint64_t(capacity)});
  }
}

// slots[i] ← the slot of ids[i], or -1. Returns how many have none.
template <class Directory>
int64_t find_all(const Directory& directory, const int64_t* ids, int64_t count, int64_t* slots) {
  int64_t missing = 0;
  uint64_t homes[kTogether];
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t n = std::min(kTogether, count - first);
    for (int64_t i = 0; i < n; ++i) homes[i] = directory.home(ids[first + i]);  // alone, so that it is done in vectors
    for (int64_t i = 0; i < n; ++i) directory.bring(homes[i]);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = directory.find(ids[first + i], homes[i]);
      slots[first + i] = slot;
      missing += slot < 0;
    }
  }
  return missing;
}

// A table's ids in a batch: those of one feature, or of several that read it.
struct Ids {
  const int64_t* ids;
  int64_t count;
  int64_t* slots;
};

// Candidates of a table.
struct Followed {
  int64_t* keys;
  float* utilities;
  int32_t* stamps;
  int64_t buckets, each;

  // Which of the bucket's candidates it is, or -1.
  int64_t find(int64_t bucket, int64_t id) const {
    const int64_t first = bucket * kWays;
#if defined(__AVX512F__)
    for (uint32_t same = _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(keys + first), _mm512_set1_epi64(id)); same; same &= same - 1)
      if (utilities[(first + __builtin_ctz(same)) * each] >= 0) return first + __builtin_ctz(same);
#else
    for (int64_t k = first; k < first + kWays; ++k)
      if (keys[k] == id && utilities[k * each] >= 0) return k;
#endif
    return -1;
  }
};

struct Missing {
  int64_t id, bucket;
  int64_t* slot;
};

// Follows ids that have no row (slot -1) and gives them the slot of their candidate. Buckets have kWays candidates; in one step
// each takes up at most one newcomer, the smallest id, in place of its least useful candidate that was not read now.
// `most`: ids without a row that there can be.
void follow(const Followed& followed, int32_t step, int64_t class_bits, const Ids* parts, int64_t count, int64_t most) {
  // Kept between steps: of each bucket the newcomer's place among `newcomers`, or -1.
  struct Newcomer {
    int64_t bucket, id, way;
  };
  static thread_local std::vector<int32_t> newcomer_of;
  static thread_local std::vector<Newcomer> newcomers;
  static thread_local std::vector<Missing> missing;
  if (!newcomers.empty()) std::fill(newcomer_of.begin(), newcomer_of.end(), -1);  // memory was short the last time
  missing.resize(size_t(most) + 1);
  newcomers.clear();
  if (int64_t(newcomer_of.size()) < followed.buckets) newcomer_of.resize(size_t(followed.buckets), -1);
  size_t found = 0;  // each id is written, and the next one over it where it has a row: a branch could not be foretold
  for (const Ids* part = parts; part < parts + count; ++part)
    for (int64_t i = 0; i < part->count; ++i) {
      missing[found].id = part->ids[i];
      missing[found].slot = part->slots + i;
      found += part->slots[i] < 0;
    }
  missing.resize(found);
  for (Missing& one : missing) one.bucket = int64_t(spread_over(one.id, uint64_t(followed.buckets)));
  size_t unknown = 0;
  for (size_t m = 0; m < missing.size(); ++m) {
    if (m + kFindAhead < missing.size()) {
      const int64_t next = missing[m + kFindAhead].bucket * kWays;
      __builtin_prefetch(followed.keys + next);
      __builtin_prefetch(followed.utilities + next * followed.each);
      __builtin_prefetch(followed.stamps + next);
    }
    const Missing now = missing[m];
    const int64_t way = followed.find(now.bucket, now.id);
    if (way >= 0) {
      *now.slot = way << class_bits;
      followed.stamps[way] = step;
      continue;
    }
    missing[unknown++] = now;
    int32_t& newcomer = newcomer_of[size_t(now.bucket)];
    if (newcomer < 0) {
      newcomer = int32_t(newcomers.size());
      newcomers.push_back({now.bucket, now.id, -1});
    } else {
      newcomers[size_t(newcomer)].id = std::min(newcomers[size_t(newcomer)].id, now.id);
    }
  }
  for (Newcomer& newcomer : newcomers) {
    float least = 0;
    for (int64_t k = newcomer.bucket * kWays; k < (newcomer.bucket + 1) * kWays; ++k) {
      float utility = 0;
      for (int64_t u = 0; u < followed.each; ++u) utility += followed.utilities[k * followed.each + u];
      if (followed.stamps[k] != step && (newcomer.way < 0 || utility < least)) {
        newcomer.way = k;
        least = utility;
      }
    }
    if (newcomer.way < 0) continue;
    followed.keys[newcomer.way] = newcomer.id;
    followed.stamps[newcomer.way] = step;
    std::fill(followed.utilities + newcomer.way * followed.each, followed.utilities + (newcomer.way + 1) * followed.each, 0.0f);
  }
  for (size_t m = 0; m < unknown; ++m) {
    const Newcomer& newcomer = newcomers[size_t(newcomer_of[size_t(missing[m].bucket)])];
    if (newcomer.id == missing[m].id && newcomer.way >= 0) *missing[m].slot = newcomer.way << class_bits;
  }
  for (const Newcomer& newcomer : newcomers) newcomer_of[size_t(newcomer.bucket)] = -1;
  newcomers.clear();
}

}  // namespace
}  // namespace unequal

// slots[i] ← the slot of ids[i], or -1. Returns how many have none.
UNEQUAL_API int64_t uq_narrow_find(int64_t kind, void* memory, int64_t capacity, const int64_t* ids, int64_t count,
                                   int64_t* slots, int threads) {
  using namespace unequal;
  int64_t missing = 0;
  by_kind(kind, memory, capacity, [&](auto directory) {
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : missing)
    for (int64_t first = 0; first < count; first += kBlock)
      missing += find_all(directory, ids + first, std::min(kBlock, count - first), slots + first);
  });
  return missing;
}

// Puts (id, slot) pairs, but for slots of -1; the caller sees to it that there is room.
UNEQUAL_API void uq_narrow_put(int64_t kind, void* memory, int64_t capacity, const int64_t* ids, const int64_t* slots,
                               int64_t count) {
  using namespace unequal;
  by_kind(kind, memory, capacity, [&](auto directory) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kFindAhead < count) directory.bring(directory.home(ids[i + kFindAhead]));
      const int32_t slot = int32_t(slots[i]);
      if (slot < 0) continue;
      if (int32_t* at = directory.at(ids[i], directory.home(ids[i]), true)) std::memcpy(at, &slot, 4);
    }
  });
}

// Lists what the directory holds. Returns how much.
UNEQUAL_API int64_t uq_narrow_entries(int64_t kind, void* memory, int64_t capacity, int64_t* ids, int64_t* slots) {
  using namespace unequal;
  int64_t n = 0;
  const auto list = [&](int64_t id, int64_t slot) {
    if (slot < 0) return;
    ids[n] = id;
    slots[n++] = slot;
  };
  for (int64_t k = 0; k < capacity; ++k) {
    if (kind == kByArray) list(k, static_cast<int32_t*>(memory)[k]);
    else if (kind == kShortIds) list(static_cast<Entry<uint32_t>*>(memory)[k].id, static_cast<Entry<uint32_t>*>(memory)[k].slot);
    else list(static_cast<Entry<int64_t>*>(memory)[k].id, static_cast<Entry<int64_t>*>(memory)[k].slot);
  }
  return n;
}

UNEQUAL_API void uq_narrow_buckets(const int64_t* ids, int64_t count, int64_t buckets, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = int64_t(unequal::spread_over(ids[i], uint64_t(buckets)));
}

// See `follow`. keys, stamps: [buckets · kWays]; utilities: likewise · `each`; a negative one: nobody. Returns 1 where memory was
// short.
UNEQUAL_API int uq_narrow_follow(int64_t* keys, float* utilities, int32_t* stamps, int64_t buckets, int64_t each, int32_t step,
                                 int64_t class_bits, const int64_t* ids, int64_t count, int64_t* slots) try {
  using namespace unequal;
  const Ids all{ids, count, slots};
  follow({keys, utilities, stamps, buckets, each}, step, class_bits, &all, 1, count);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Of all tables of a module at once. `Found` and `FoundIn` hold 8-byte fields only and are mirrored in kernels/cpu/narrow.py.
struct FoundIn {
  int64_t kind;
  void* memory;
  int64_t capacity;
  int64_t rows;      // ids are below it; -1: any are right
  int64_t first, last;  // its features
  int64_t* keys;
  float* utilities;
  int32_t* stamps;
  int64_t buckets;   // 0: every id has the candidate of its own number
  int64_t each, class_bits, step;
};
struct Found {
  int64_t table;
  int64_t first, count;  // of the ids
  int64_t missing;       // filled in: how many have no row
  int64_t wrong;         // the first that is no id of the table, or -1
};

// Finds the slots of all ids. Features of a table lie together.
UNEQUAL_API void uq_narrow_find_all(const FoundIn* tables, Found* features, int64_t feature_count, const int64_t* ids,
                                    int64_t* slots, int threads) {
  using namespace unequal;
  struct Block {
    int64_t feature, first, last;
  };
  std::vector<Block> blocks;
  for (int64_t f = 0; f < feature_count; ++f) {
    features[f].missing = 0;
    features[f].wrong = -1;
    for (int64_t i = 0; i < features[f].count; i += kBlock)
      blocks.push_back({f, i, std::min(i + kBlock, features[f].count)});
  }
  std::vector<std::pair<int64_t, int64_t>> found(blocks.size());  // what is missing, the first wrong one
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); ++b) {
    const Found& feature = features[blocks[b].feature];
    const FoundIn& table = tables[feature.table];
    const int64_t first = feature.first + blocks[b].first, count = blocks[b].last - blocks[b].first;
    found[b] = {0, -1};
    if (table.rows >= 0) {
      uint64_t most = 0;  // negative ones are the largest
      for (int64_t i = 0; i < count; ++i) most = std::max(most, uint64_t(ids[first + i]));
      for (int64_t i = 0; most >= uint64_t(table.rows) && found[b].second < 0; ++i)
        if (uint64_t(ids[first + i]) >= uint64_t(table.rows)) found[b].second = blocks[b].first + i;
    }
    by_kind(table.kind, table.memory, table.capacity,
            [&](auto directory) { found[b].first = find_all(directory, ids + first, count, slots + first); });
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    Found& feature = features[blocks[b].feature];
    feature.missing += found[b].first;
    if (feature.wrong < 0) feature.wrong = found[b].second;
  }
}

// Follows the ids of all tables that have no row. Returns 1 where memory was short.
UNEQUAL_API int uq_narrow_follow_all(const FoundIn* tables, int64_t table_count, const Found* features,
                                     const int64_t* ids, int64_t* slots, int threads) {
  using namespace unequal;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(max : failed)
  for (int64_t t = 0; t < table_count; ++t) try {
      const FoundIn& table = tables[t];
      int64_t missing = 0;
      std::vector<Ids> parts;
      for (int64_t f = table.first; f < table.last; ++f) {
        missing += features[f].missing;
        parts.push_back({ids + features[f].first, features[f].count, slots + features[f].first});
      }
      if (!missing) continue;
      if (!table.buckets) {
        for (const Ids& part : parts)
          for (int64_t i = 0; i < part.count; ++i)
            part.slots[i] = part.slots[i] < 0 ? part.ids[i] << table.class_bits : part.slots[i];
        continue;
      }
      follow({table.keys, table.utilities, table.stamps, table.buckets, table.each}, int32_t(table.step), table.class_bits,
             parts.data(), int64_t(parts.size()), missing);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  return failed;
}
