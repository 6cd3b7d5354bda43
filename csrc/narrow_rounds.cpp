// Tables whose rows differ in width, in a round: what rows are worth, where they will lie, and how they get there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "draw.h"
#include "narrow.h"
#include "narrow_directory.h"
#include "optimizers.h"
#include "pairs.h"

namespace unequal {
namespace {

constexpr int64_t kRowsAhead = 16;
constexpr int64_t kTogether = 64;  // rows that are brought near before the first is read

// The largest state of a row's values.
float largest_state(const Table& t, const NarrowRow& row, int which) {
  const float* state = row.state(which);
  float largest = 0.0f;
  for (int64_t j = 0; j < row.chunks * t.chunk; ++j) largest = std::max(largest, state[j]);
  return largest;
}

// How large the largest of the row's values is.
template <class T>
float largest_value(const Table& t, const NarrowRow& row) {
  const T* values = reinterpret_cast<const T*>(row.record);
  float largest = 0.0f;
  for (int64_t j = 0; j < row.chunks * t.chunk; ++j) largest = std::max(largest, std::fabs(to_float(values[j])));
  return largest;
}

// Writes the row's values as they will be with `chunks` chunks (and a mask): those it had, and fresh ones for the rest, whose
// states begin as `first`. `inherits`: see uq_narrow_rebuild.
template <class T>
void rebuild(const Table& t, const NarrowRow* old, const NarrowRow& made, int64_t id, uint64_t mask, float std_width,
             bool inherits, const int64_t* per_value, const float* first) {
  const float width = inherits && old ? std::max(std_width, largest_value<T>(t, *old)) : std_width;
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
      else put(to + at, draw(key, chunk * t.chunk + j) * width);
      for (int which = 0; which < 2; ++which)
        if (per_value[which])
          made.state(which)[at] = source >= 0 ? old->state(which)[source * t.chunk + j] : first[which];
    }
  }
  if (t.masked) made.set_mask(mask);
}

}  // namespace
}  // namespace unequal

// Sorts both by id, in their own memory. Returns whether it did: not where an id or a slot has more than 32 bits.
UNEQUAL_API int uq_narrow_order(int64_t* ids, int64_t* slots, int64_t count) {
  using namespace unequal;
  uint64_t most_id = 0, most_slot = 0;
  bool sorted = true;
  for (int64_t i = 0; i < count; ++i) {
    most_id = std::max(most_id, uint64_t(ids[i]));
    most_slot = std::max(most_slot, uint64_t(slots[i]));
    sorted &= i == 0 || ids[i - 1] <= ids[i];
  }
  if (sorted) return 1;
  if (most_id >> 32 || most_slot >> 32) return 0;
  Pair* pairs = reinterpret_cast<Pair*>(ids);
  for (int64_t i = 0; i < count; ++i) pairs[i] = pair_of(ids[i], slots[i]);
  sort_pairs(pairs, count, bits_of(int64_t(most_id) + 1), reinterpret_cast<Pair*>(slots));
  for (int64_t i = 0; i < count; ++i) {
    const Pair pair = pairs[i];
    ids[i] = row_of(pair);
    slots[i] = number_of(pair);
  }
  return 1;
}

// New slots of rows that will have `chunks` chunks, -1 for none: the rows of a class lie without a gap, those that can stay where
// they are do, others follow in order. counts: rows of every class. Returns 1 where memory was short.
UNEQUAL_API int uq_narrow_lay_out(const int64_t* slots, const int16_t* chunks, int64_t count, const int64_t* counts,
                                  int64_t classes, int64_t class_bits, int64_t* out) try {
  std::vector<int64_t> begins(size_t(classes) + 1, 0), next(size_t(classes), 0);
  for (int64_t k = 1; k < classes; ++k) begins[size_t(k) + 1] = begins[size_t(k)] + counts[k];
  std::vector<uint8_t> taken(size_t(begins[size_t(classes)]) + 1);  // the last one stands for all that do not stay
  const int64_t low = (int64_t(1) << class_bits) - 1;
  for (int64_t i = 0; i < count; ++i) {
    // Without a branch: who stays cannot be foretold.
    const int64_t k = chunks[i], place = slots[i] >> class_bits;
    const bool stays = (k != 0) & ((slots[i] & low) == k) & (place < counts[k]);
    taken[size_t(stays ? begins[size_t(k)] + place : begins[size_t(classes)])] = 1;
    out[i] = stays ? slots[i] : -1;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t k = chunks[i];
    if (!k || out[i] >= 0) continue;
    int64_t& place = next[size_t(k)];
    while (taken[size_t(begins[size_t(k)] + place)]) ++place;
    out[i] = place++ << class_bits | k;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// out: which rows have a slot now and not the one they had, in order. Returns how many.
UNEQUAL_API int64_t uq_narrow_moved(const int64_t* old, const int64_t* slots, int64_t count, int64_t* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {  // without a branch: it cannot be foretold, and the next writes over what is not to stay
    out[found] = i;
    found += (slots[i] != old[i]) & (slots[i] >= 0);
  }
  return found;
}

// found[bucket · kWays + n]: of the ids that belong there the one that is worth the most, the second …, as far as there are; of
// those that are worth the same the first. It comes filled with -1. most: room for what they are worth.
UNEQUAL_API void uq_narrow_best(const int64_t* ids, const float* worth, int64_t count, int64_t buckets, float* most,
                                int64_t* found) {
  using namespace unequal;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bucket = int64_t(spread_over(ids[i], uint64_t(buckets))) * kWays;
    float* held = most + bucket;
    int64_t* of = found + bucket;
    int64_t n = kWays;
    if (of[n - 1] >= 0 && !(worth[i] > held[n - 1])) continue;
    for (--n; n > 0 && (of[n - 1] < 0 || worth[i] > held[n - 1]); --n) {
      held[n] = held[n - 1];
      of[n] = of[n - 1];
    }
    held[n] = worth[i];
    of[n] = i;
  }
}

// Makes the records that rows will have at new slots: `made` holds them one after the other, `starts` says where each begins.
// old[i]: the slot it has now, or -1: a fresh row. masks: of the new rows, or null. inherit: squares of gradients of new values
// begin as such a share of the largest of the row's others; an average over the row counts them with as much; and they are drawn
// from ± half of the row's largest value, where that is more than what new rows have.
UNEQUAL_API void uq_narrow_rebuild(const unequal::Table* table, const int64_t* ids, const int64_t* old, const int64_t* slots,
                                   const int64_t* masks, float inherit, int64_t count, float std_width, float* made,
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
        if (state_per_row<O>(which, 2) == 1) {
          *row.state(which) = had ? *had->state(which) : 0.0f;
          const int64_t more = had ? chunks - had->chunks : 0;
          if (which == squares_of<O>() && inherit > 0 && more > 0)
            *row.state(which) *= (float(had->chunks) + inherit * float(more)) / float(chunks);
        }
      for (int64_t u = 0; u < t.utilities; ++u)
        row.utility()[u] = old[i] >= 0 ? before.utility()[u] : 0.0f;
      float first[2] = {0.0f, 0.0f};
      if constexpr (constexpr int squares = squares_of<O>(); squares >= 0)
        if (inherit > 0 && had && per_value[squares]) first[squares] = inherit * largest_state(t, *had, squares);
      const uint64_t mask = masks ? uint64_t(masks[i]) : 0;
      switch (t.dtype) {
        case kFloat32: rebuild<float>(t, had, row, ids[i], mask, std_width, inherit > 0, per_value, first); break;
        case kFloat16: rebuild<Half>(t, had, row, ids[i], mask, std_width, inherit > 0, per_value, first); break;
        default: rebuild<BFloat>(t, had, row, ids[i], mask, std_width, inherit > 0, per_value, first); break;
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

// What rows are worth, [count · utilities], and where `masks` is given which chunks they have.
UNEQUAL_API void uq_narrow_worth(const unequal::Table* table, const int64_t* slots, int64_t count, float* utilities,
                                 int64_t* masks, int threads) {
  using namespace unequal;
  const Table& t = *table;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < count; first += kTogether) {
    NarrowRow rows[kTogether];
    const int64_t n = std::min(kTogether, count - first);
    for (int64_t i = 0; i < n; ++i) {
      rows[i] = narrow_row(t, slots[first + i]);
      __builtin_prefetch(rows[i].utility());
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t u = 0; u < t.utilities; ++u) utilities[(first + i) * t.utilities + u] = rows[i].utility()[u];
      if (masks) masks[first + i] = rows[i].chunks ? int64_t(rows[i].mask()) : 0;
    }
  }
}

// Divides the utilities of the first counts[k] rows of every class k above 0.
UNEQUAL_API void uq_narrow_fade(const unequal::Table* table, const int64_t* counts, float gain, int threads) {
  using namespace unequal;
  const Table& t = *table;
  for (int64_t k = 1; k <= t.dim / t.chunk; ++k)
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t place = 0; place < counts[k]; ++place) {
      float* utility = narrow_row(t, place << t.class_bits | k).utility();
      __builtin_prefetch(utility + kRowsAhead * t.records[k].words);
      for (int64_t u = 0; u < t.utilities; ++u) utility[u] /= gain;
    }
}
