// Where live rows are found: id → slot, as an array, by open addressing, or worked out where all rows are there.
#pragma once
#include <algorithm>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common.h"

namespace unequal {

constexpr uint64_t kLine = 8;      // entries of short ids that lie in a line of the cache
constexpr int64_t kLineBytes = 64;
constexpr int64_t kWays = 8;       // candidates of a bucket

// Of kNumbered the higher bits say the rest: class_bits from bit 8 on, chunks from 16, of how many parts this is one from 32; of
// kFollowed which part this is from 8 on, of how many from 32.
enum DirectoryKind : int64_t { kByArray = 0, kShortIds = 1, kLongIds = 2, kNumbered = 3, kFollowed = 4 };

// One of n places, from the high bits of a hash: n need not be a power of two. It is below 2^31.
inline uint64_t spread_over(int64_t id, uint64_t n) { return (mix64(uint64_t(id) * kGolden + kGolden) >> 32) * n >> 32; }

inline int32_t load_slot(const int32_t* at) {  // entries are packed: a slot may lie anywhere
  int32_t slot;
  std::memcpy(&slot, at, 4);
  return slot;
}

#if defined(__AVX512F__)
#define UNEQUAL_LINES
struct Line {  // 16 words that lie together, and which of them are so, as bits
  __m512i words;
  explicit Line(const void* at) : words(_mm512_loadu_si512(at)) {}
  uint32_t equal(uint32_t word) const { return _mm512_cmpeq_epi32_mask(words, _mm512_set1_epi32(int32_t(word))); }
  uint32_t negative() const { return _mm512_cmplt_epi32_mask(words, _mm512_setzero_si512()); }
};
#elif defined(__AVX2__)
#define UNEQUAL_LINES
struct Line {
  __m256i low, high;
  explicit Line(const void* at)
      : low(_mm256_loadu_si256(static_cast<const __m256i*>(at))), high(_mm256_loadu_si256(static_cast<const __m256i*>(at) + 1)) {}
  static uint32_t signs(__m256i words) { return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(words))); }
  uint32_t equal(uint32_t word) const {
    const __m256i wanted = _mm256_set1_epi32(int32_t(word));
    return signs(_mm256_cmpeq_epi32(low, wanted)) | signs(_mm256_cmpeq_epi32(high, wanted)) << 8;
  }
  uint32_t negative() const { return signs(low) | signs(high) << 8; }
};
#endif

template <class Id>
struct __attribute__((packed)) NarrowEntry {
  Id id;
  int32_t slot;  // -1: empty
};

template <class Id>
struct Hashed {
  NarrowEntry<Id>* entries;
  uint64_t capacity;

  // Where to begin: short ids at the first of the 8 entries of a line, which are compared at once.
  uint64_t home(int64_t id) const {
    return sizeof(Id) == 4 ? spread_over(id, capacity / kLine) * kLine : spread_over(id, capacity);
  }
  void bring(uint64_t home) const {
    __builtin_prefetch(entries + home);
    if (sizeof(Id) == 8) __builtin_prefetch(reinterpret_cast<const char*>(entries + home) + kLineBytes - 1);
  }
  // Whether there are as many entries from `k` on as are looked at together.
  bool looks_at([[maybe_unused]] uint64_t k) const {
#if defined(UNEQUAL_LINES)
    return __builtin_expect(k + kLineBytes / sizeof(NarrowEntry<Id>) + (sizeof(Id) == 8) <= capacity, 1);
#else
    return false;
#endif
  }
  // What the entries say that lie together from `k` on: the slot, or -1. Returns whether it is sure. Without a branch: which ids
  // have a row cannot be foretold. An empty entry is of the id -1 and the slot -1, so that it may be taken for the id's.
  bool look([[maybe_unused]] int64_t id, [[maybe_unused]] uint64_t k, int64_t& slot) const {
#if defined(UNEQUAL_LINES)
    constexpr int kWords = sizeof(NarrowEntry<Id>) / 4, kEntries = 16 / kWords;
    constexpr uint32_t kFirst = kWords == 2 ? 0x5555 : 0x1249;  // of the entries' words
    if (looks_at(k)) {
      const Line line(entries + k);
      uint32_t same = line.equal(uint32_t(id)) & kFirst;
      if (kWords == 3) same &= line.equal(uint32_t(uint64_t(id) >> 32)) >> 1;
      const uint32_t empty = line.negative() & kFirst << (kWords - 1);
      const int64_t held = entries[k + uint64_t(__builtin_ctz(same | 1u << (kWords * (kEntries - 1))) / kWords)].slot;
      const bool longer = kWords == 2 && uint64_t(id) >> 32;  // then it is none of them
      slot = held | -int64_t(!same) | -int64_t(longer);
      return (same | empty) != 0;
    }
#endif
    slot = -1;
    return false;
  }
  // Where to go on when `look` was not sure.
  uint64_t behind(uint64_t k) const {
    if (!looks_at(k)) return k;
    k += kLineBytes / sizeof(NarrowEntry<Id>);
    return k == capacity ? 0 : k;
  }
  int64_t find(int64_t id, uint64_t k) const {
    int64_t slot = -1;
    for (; looks_at(k); k = behind(k))
      if (look(id, k, slot)) return slot;
    const int32_t* held = at(id, k, false);
    return held ? load_slot(held) : -1;
  }
  // The place for an id's slot, as `at` finds it: most often the first empty one of its line, which takes no branch to find.
  int32_t* place_for(int64_t id, uint64_t home) const {
#if defined(UNEQUAL_LINES)
    constexpr int kWords = sizeof(NarrowEntry<Id>) / 4;
    constexpr uint32_t kFirst = kWords == 2 ? 0x5555 : 0x1249;
    if (looks_at(home)) {
      const Line line(entries + home);
      const uint32_t empty = line.negative() & kFirst << (kWords - 1), same = line.equal(uint32_t(id)) & kFirst;
      if (__builtin_expect(empty && !same, 1)) {
        NarrowEntry<Id>& entry = entries[home + uint64_t(__builtin_ctz(empty) / kWords)];
        entry.id = Id(id);
        return reinterpret_cast<int32_t*>(reinterpret_cast<char*>(&entry) + sizeof(Id));
      }
    }
#endif
    return at(id, home, true);
  }
  void put(int64_t id, uint64_t home, int32_t slot) const { std::memcpy(place_for(id, home), &slot, 4); }
  // The id's slot, or null; with `insert` the place for it.
  int32_t* at(int64_t id, uint64_t home, bool insert) const {
    for (uint64_t k = home;; k = k + 1 == capacity ? 0 : k + 1) {
      NarrowEntry<Id>& entry = entries[k];
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
  void put(int64_t id, uint64_t home, int32_t slot) const {
    if (home < capacity) slots[id] = slot;
  }
  int64_t find(int64_t id, uint64_t) const { return uint64_t(id) < capacity ? slots[id] : -1; }
  uint64_t behind(uint64_t home) const { return home; }
  bool look(int64_t id, uint64_t home, int64_t& slot) const {
    slot = find(id, home);
    return true;
  }
};

// A word for each id of a part: a negative one is the slot of its row, but for its sign; any other is what it is worth without one.
struct FollowedIds {
  int32_t* words;
  uint64_t capacity;
  int64_t of;
  static int64_t slot_of(int32_t word) { return word < 0 ? word & INT32_MAX : -1; }
  uint64_t number(int64_t id) const { return of == 1 ? uint64_t(id) : uint64_t(id) / uint64_t(of); }
  uint64_t home(int64_t id) const { return std::min(number(id), capacity); }
  void bring(uint64_t home) const { __builtin_prefetch(words + home); }
  void put(int64_t, uint64_t home, int32_t slot) const {
    if (home < capacity) words[home] = slot | INT32_MIN;
  }
  int64_t find(int64_t, uint64_t home) const { return home < capacity ? slot_of(words[home]) : -1; }
  uint64_t behind(uint64_t home) const { return home; }
  bool look(int64_t id, uint64_t home, int64_t& slot) const {
    slot = find(id, home);
    return true;
  }
};

// All rows are there, equally wide, in the order of their ids.
struct Numbered {
  int64_t class_bits, chunks, of;
  uint64_t capacity;
  uint64_t home(int64_t) const { return 0; }
  void bring(uint64_t) const {}
  void put(int64_t, uint64_t, int32_t) const {}
  int64_t find(int64_t id, uint64_t) const {
    return uint64_t(id) < capacity ? (of == 1 ? id : id / of) << class_bits | chunks : -1;
  }
  uint64_t behind(uint64_t home) const { return home; }
  bool look(int64_t id, uint64_t home, int64_t& slot) const {
    slot = find(id, home);
    return true;
  }
};

template <class Body>
inline void by_kind(int64_t kind, void* memory, int64_t capacity, Body&& body) {
  switch (kind & 255) {
    case kNumbered: return body(Numbered{kind >> 8 & 255, kind >> 16 & 0xFFFF, kind >> 32, uint64_t(capacity)});
    case kByArray: return body(Array{static_cast<int32_t*>(memory), uint64_t(capacity)});
    case kFollowed: return body(FollowedIds{static_cast<int32_t*>(memory), uint64_t(capacity), kind >> 32});
    case kShortIds: return body(Hashed<uint32_t>{static_cast<NarrowEntry<uint32_t>*>(memory), uint64_t(capacity)});
    default: return body(Hashed<int64_t>{static_cast<NarrowEntry<int64_t>*>(memory), uint64_t(capacity)});
  }
}

}  // namespace unequal
