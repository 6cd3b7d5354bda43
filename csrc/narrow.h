// Rows as wide as they deserve. A row has some of its vector's chunks: the first ones, or those that its mask names. All rows
// with as many chunks are a class and lie in slabs of that class, each with its optimizer state and its utility in one record.
//
//   slot = place in the class · 2^class_bits + chunks
//
// Class 0 are candidates: rows without any value, of which only the utility is kept. They lie in one piece.
#pragma once
#include "rows.h"

namespace unequal {

enum UtilityKind : int64_t { kByGradient = 1, kByReads = 2 };

struct NarrowRow {
  float* record;
  int64_t chunks;
  const Record* layout;

  int64_t width() const { return layout->width; }
  float* state(int which) const { return record + layout->state[which]; }
  float* utility() const { return record + layout->utility; }
  uint64_t mask() const {
    uint64_t bits;
    std::memcpy(&bits, record + layout->mask, 8);
    return bits;
  }
  void set_mask(uint64_t bits) const { std::memcpy(record + layout->mask, &bits, 8); }
};

inline NarrowRow narrow_row(const Table& t, int64_t slot) {
  const int64_t chunks = slot & ((int64_t(1) << t.class_bits) - 1), place = slot >> t.class_bits;
  const Record* layout = t.records + chunks;
  const int64_t slab = chunks ? place >> t.slab_log2 : 0;
  const int64_t within = chunks ? place & ((int64_t(1) << t.slab_log2) - 1) : place;
  return {static_cast<float*>(t.weights[chunks * t.class_slabs + slab]) + within * layout->words, chunks, layout};
}

// Calls visit(place in the row's values, column in the vector, values) for its live chunks, in order.
template <class Visit>
inline void each_chunk(const Table& t, const NarrowRow& row, Visit&& visit) {
  if (!row.chunks) return;
  if (!t.masked) return visit(int64_t(0), int64_t(0), row.width());
  int64_t place = 0;
  for (uint64_t mask = row.mask(); mask; mask &= mask - 1, place += t.chunk)
    visit(place, int64_t(__builtin_ctzll(mask)) * t.chunk, t.chunk);
}

}  // namespace unequal
