// An entry of the hash directory, and how an id finds its own.
#pragma once
#include "common.h"

namespace unequal {

constexpr int64_t kAhead = 16;
constexpr int32_t kEmpty = -1;

struct __attribute__((packed)) Entry {
  int64_t id;
  int32_t slot;  // >= 0: live; -1: empty; -1 - n: seen n times, not admitted yet
};

inline uint64_t home(int64_t id, uint64_t mask) { return mix64(uint64_t(id) * kGolden + kGolden) & mask; }

// The entry of an id, or the empty entry where it belongs.
inline Entry* probe(Entry* entries, uint64_t mask, int64_t id) {
  for (uint64_t at = home(id, mask);; at = (at + 1) & mask)
    if (entries[at].slot == kEmpty || entries[at].id == id) return entries + at;
}

}  // namespace unequal
