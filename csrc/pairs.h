// (row, gradient) pairs of the update: the buckets that rows fall into, and the sort by row.
#pragma once
#include <algorithm>
#include <utility>

#include "common.h"

namespace unequal {

using Pair = uint64_t;  // row in the high half, number of the gradient among its table's in the low half
inline Pair pair_of(int64_t row, int64_t number) { return Pair(row) << 32 | Pair(number); }
inline int64_t row_of(Pair pair) { return int64_t(pair >> 32); }
inline uint32_t number_of(Pair pair) { return uint32_t(pair); }

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

// The passes of a radix sort, `width` bits each. The result is in `pairs` after an even number of them, otherwise in `scratch`.
template <int Passes>
void radix_passes(Pair* pairs, int64_t n, int width, Pair* scratch) {
  uint32_t counts[Passes][2048];
  const int64_t digits = int64_t(1) << width;
  for (auto& count : counts) std::fill(count, count + digits, 0u);
  const auto digit = [&](Pair pair, int pass) { return (pair >> (32 + pass * width)) & Pair(digits - 1); };
  for (int64_t i = 0; i < n; ++i)
    for (int pass = 0; pass < Passes; ++pass) ++counts[pass][digit(pairs[i], pass)];
  for (int pass = 0; pass < Passes; ++pass) {
    uint32_t* place = counts[pass];
    for (int64_t d = 0, sum = 0; d < digits; ++d) sum += std::exchange(place[d], uint32_t(sum));
    for (int64_t i = 0; i < n; ++i) scratch[place[digit(pairs[i], pass)]++] = pairs[i];
    std::swap(pairs, scratch);
  }
}

// Sorts by row pairs whose rows differ in their low `bits` only, keeping equal rows in order.
inline void sort_pairs(Pair* pairs, int64_t n, int bits, Pair* scratch) {
  if (bits == 0 || n < 2) return;
  if (n < 48) {  // numbers ascend: sorting whole pairs does
    for (int64_t i = 1; i < n; ++i) {
      const Pair pair = pairs[i];
      int64_t j = i;
      for (; j > 0 && pairs[j - 1] > pair; --j) pairs[j] = pairs[j - 1];
      pairs[j] = pair;
    }
    return;
  }
  const int widest = n < 1024 ? 8 : 11, passes = (bits + widest - 1) / widest, width = (bits + passes - 1) / passes;
  switch (passes) {
    case 1: radix_passes<1>(pairs, n, width, scratch); break;
    case 2: radix_passes<2>(pairs, n, width, scratch); break;
    case 3: radix_passes<3>(pairs, n, width, scratch); break;
    default: radix_passes<4>(pairs, n, width, scratch); break;
  }
  if (passes % 2) std::copy(scratch, scratch + n, pairs);
}

inline int bits_of(int64_t n) {  // the smallest b with 2^b >= n
  int bits = 0;
  while ((int64_t(1) << bits) < n) ++bits;
  return bits;
}

}  // namespace unequal
