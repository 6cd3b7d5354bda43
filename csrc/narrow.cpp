// Tables whose rows differ in width, beside reading and updating them: the directory of live rows, the candidates that are
// followed without a row, and moving rows from one width to another.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "draw.h"
#include "narrow.h"
#include "optimizers.h"

namespace unequal {
namespace {

constexpr int64_t kFindAhead = 16;
constexpr int64_t kTogether = 64;  // ids whose homes are brought near before the first is looked up
constexpr int64_t kWays = 8;  // candidates of a bucket

enum DirectoryKind : int64_t { kByArray = 0, kShortIds = 1, kLongIds = 2 };

// One of n places, from the high bits of a hash: n need not be a power of two. It is below 2^31.
inline uint64_t spread_over(int64_t id, uint64_t n) { return (mix64(uint64_t(id) * kGolden + kGolden) >> 32) * n >> 32; }

template <class Id>
struct __attribute__((packed)) Entry {
  Id id;
  int32_t slot;  // -1: empty
};

template <class Id>
struct Hashed {
  Entry<Id>* entries;
  uint64_t capacity;

  // Where to begin, brought near.
  uint64_t home(int64_t id) const {
    const uint64_t at = spread_over(id, capacity);
    __builtin_prefetch(entries + at);
    return at;
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
  uint64_t home(int64_t id) const {
    if (uint64_t(id) < capacity) __builtin_prefetch(slots + id);
    return 0;
  }
  int32_t* at(int64_t id, uint64_t, bool) const { return uint64_t(id) < capacity ? slots + id : nullptr; }
};

template <class Body>
inline void by_kind(int64_t kind, void* memory, int64_t capacity, Body&& body) {
  switch (kind) {
    case kByArray: return body(Array{static_cast<int32_t*>(memory), uint64_t(capacity)});
    case kShortIds: return body(Hashed<uint32_t>{static_cast<Entry<uint32_t>*>(memory), uint64_t(capacity)});
    default: return body(Hashed<int64_t>{static_cast<Entry<int64_t>*>(memory), uint64_t(capacity)});
  }
}

inline int32_t load_slot(const int32_t* at) {  // entries are packed: a slot may lie anywhere
  int32_t slot;
  std::memcpy(&slot, at, 4);
  return slot;
}

// Writes the row's values as they will be with `chunks` chunks (and a mask): those it had, and fresh ones for the rest.
template <class T>
void rebuild(const Table& t, const NarrowRow* old, const NarrowRow& made, int64_t id, uint64_t mask, float std_width,
             const int64_t* per_value) {
  const uint64_t key = fresh_key(t.key, id);
  T* to = reinterpret_cast<T*>(made.record);
  const T* from = old ? reinterpret_cast<const T*>(old->record) : nullptr;
  const uint64_t had = !old ? 0 : t.masked ? old->mask() : old->chunks >= 64 ? ~0ull : (1ull << old->chunks) - 1;
  for (int64_t place = 0; place < made.chunks; ++place) {
    int64_t chunk = place, source = old && place < old->chunks ? place : -1;
    if (t.masked) {
      uint64_t left = mask;
      for (int64_t k = 0; k < place; ++k) left &= left - 1;
      chunk = __builtin_ctzll(left);
      source = had >> chunk & 1 ? __builtin_popcountll(had & ((1ull << chunk) - 1)) : -1;
    }
    for (int64_t j = 0; j < t.chunk; ++j) {
      const int64_t at = place * t.chunk + j;
      if (source >= 0) to[at] = from[source * t.chunk + j];
      else put(to + at, draw(key, chunk * t.chunk + j) * std_width);
      for (int which = 0; which < 2; ++which)
        if (per_value[which])
          made.state(which)[at] = source >= 0 ? old->state(which)[source * t.chunk + j] : 0.0f;
    }
  }
  if (t.masked) made.set_mask(mask);
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
    for (int64_t first = 0; first < count; first += kTogether) {
      const int64_t n = std::min(kTogether, count - first);
      uint64_t homes[kTogether];
      for (int64_t i = 0; i < n; ++i) homes[i] = directory.home(ids[first + i]);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t* at = directory.at(ids[first + i], homes[i], false);
        slots[first + i] = at ? load_slot(at) : -1;
        missing += slots[first + i] < 0;
      }
    }
  });
  return missing;
}

// Puts (id, slot) pairs; the caller sees to it that there is room.
UNEQUAL_API void uq_narrow_put(int64_t kind, void* memory, int64_t capacity, const int64_t* ids, const int64_t* slots,
                               int64_t count) {
  using namespace unequal;
  by_kind(kind, memory, capacity, [&](auto directory) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kFindAhead < count) directory.home(ids[i + kFindAhead]);
      const int32_t slot = int32_t(slots[i]);
      std::memcpy(directory.at(ids[i], directory.home(ids[i]), true), &slot, 4);
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

// Follows ids that have no row (slots[i] = -1) and gives them the slot of their candidate. Buckets have kWays candidates; in one
// step each takes up at most one newcomer, the smallest id, in place of its least useful candidate that was not read now.
// keys, stamps: [buckets · kWays]; utilities: likewise · `each`; a negative one: nobody. Returns 1 where memory was short.
UNEQUAL_API int uq_narrow_follow(int64_t* keys, float* utilities, int32_t* stamps, int64_t buckets, int64_t each, int32_t step,
                                 int64_t class_bits, const int64_t* ids, int64_t count, int64_t* slots) try {
  using namespace unequal;
  // Kept between steps: of each bucket the newcomer's place among `newcomers`, or -1.
  struct Newcomer {
    int64_t bucket, id, way;
  };
  struct Unknown {
    int64_t at, bucket;
  };
  static thread_local std::vector<int64_t> missing, newcomer_of;
  static thread_local std::vector<Newcomer> newcomers;
  static thread_local std::vector<Unknown> unknown;
  if (!newcomers.empty()) std::fill(newcomer_of.begin(), newcomer_of.end(), int64_t(-1));  // memory was short the last time
  missing.clear();
  newcomers.clear();
  unknown.clear();
  if (int64_t(newcomer_of.size()) < buckets) newcomer_of.resize(size_t(buckets), -1);
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0) missing.push_back(i);
  for (size_t m = 0; m < missing.size(); ++m) {
    const int64_t i = missing[m], id = ids[i];
    if (m + kFindAhead < missing.size())
      __builtin_prefetch(keys + int64_t(spread_over(ids[missing[m + kFindAhead]], uint64_t(buckets))) * kWays);
    const int64_t bucket = int64_t(spread_over(id, uint64_t(buckets)));
    for (int64_t k = bucket * kWays; k < (bucket + 1) * kWays; ++k)
      if (keys[k] == id && utilities[k * each] >= 0) {
        slots[i] = k << class_bits;
        stamps[k] = step;
        break;
      }
    if (slots[i] >= 0) continue;
    unknown.push_back({i, bucket});
    int64_t& newcomer = newcomer_of[size_t(bucket)];
    if (newcomer < 0) {
      newcomer = int64_t(newcomers.size());
      newcomers.push_back({bucket, id, -1});
    } else {
      newcomers[size_t(newcomer)].id = std::min(newcomers[size_t(newcomer)].id, id);
    }
  }
  for (Newcomer& newcomer : newcomers) {
    float least = 0;
    for (int64_t k = newcomer.bucket * kWays; k < (newcomer.bucket + 1) * kWays; ++k) {
      float utility = 0;
      for (int64_t u = 0; u < each; ++u) utility += utilities[k * each + u];
      if (stamps[k] != step && (newcomer.way < 0 || utility < least)) {
        newcomer.way = k;
        least = utility;
      }
    }
    if (newcomer.way < 0) continue;
    keys[newcomer.way] = newcomer.id;
    stamps[newcomer.way] = step;
    std::fill(utilities + newcomer.way * each, utilities + (newcomer.way + 1) * each, 0.0f);
  }
  for (const Unknown& lookup : unknown) {
    const Newcomer& newcomer = newcomers[size_t(newcomer_of[size_t(lookup.bucket)])];
    if (newcomer.id == ids[lookup.at] && newcomer.way >= 0) slots[lookup.at] = newcomer.way << class_bits;
  }
  for (const Newcomer& newcomer : newcomers) newcomer_of[size_t(newcomer.bucket)] = -1;
  newcomers.clear();
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Makes the records that rows will have at new slots: `made` holds them one after the other, `starts` says where each begins.
// old[i]: the slot it has now, or -1: a fresh row. masks: of the new rows, or null. utilities: of fresh rows, [count · each].
UNEQUAL_API void uq_narrow_rebuild(const unequal::Table* table, const int64_t* ids, const int64_t* old, const int64_t* slots,
                                   const int64_t* masks, const float* utilities, int64_t count, float std_width, float* made,
                                   const int64_t* starts, int threads) {
  using namespace unequal;
  const Table& t = *table;
  by_optimizer(t.optimizer, [&](auto optimizer) {
    constexpr int O = decltype(optimizer)::value;
    const int64_t per_value[2] = {state_per_row<O>(0, 2) == 2, state_per_row<O>(1, 2) == 2};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t chunks = slots[i] & ((int64_t(1) << t.class_bits) - 1);
      const NarrowRow row{made + starts[i], chunks, t.records + chunks};
      NarrowRow before{};
      if (old[i] >= 0) before = narrow_row(t, old[i]);
      const NarrowRow* had = old[i] >= 0 && before.chunks ? &before : nullptr;
      for (int which = 0; which < 2; ++which)
        if (state_per_row<O>(which, 2) == 1) *row.state(which) = had ? *had->state(which) : 0.0f;
      for (int64_t u = 0; u < t.utilities; ++u)
        row.utility()[u] = old[i] >= 0 ? before.utility()[u] : utilities ? utilities[i * t.utilities + u] : 0.0f;
      const uint64_t mask = masks ? uint64_t(masks[i]) : 0;
      switch (t.dtype) {
        case kFloat32: rebuild<float>(t, had, row, ids[i], mask, std_width, per_value); break;
        case kFloat16: rebuild<Half>(t, had, row, ids[i], mask, std_width, per_value); break;
        default: rebuild<BFloat>(t, had, row, ids[i], mask, std_width, per_value); break;
      }
    }
  });
}

// Puts such records to their slots.
UNEQUAL_API void uq_narrow_place(const unequal::Table* table, const int64_t* slots, int64_t count, const float* made,
                                 const int64_t* starts) {
  using namespace unequal;
  for (int64_t i = 0; i < count; ++i) {
    const NarrowRow row = narrow_row(*table, slots[i]);
    std::memcpy(row.record, made + starts[i], size_t(row.layout->words) * 4);
  }
}
