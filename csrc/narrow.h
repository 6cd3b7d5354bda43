// Rows as wide as they deserve. A row has some of its vector's chunks: the first ones, or those that its mask names. All rows
// with as many chunks are a class and lie in slabs of that class, each with its optimizer state and its utility in one record.
//
//   slot = place in the class · 2^class_bits + chunks
//
// Class 0 are candidates: rows without any value, of which only the utility is kept. They lie in one piece.
#pragma once
#include <algorithm>
#include <type_traits>

#include "rows.h"

namespace unequal {

constexpr int64_t kMaxChunks = 64;

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

// The same for many rows of a table, without a branch: which class comes next cannot be foretold. A slot of -1 is taken for the
// first candidate, which has no values either. Values are read by vectors of W.
template <int W>
struct NarrowRows {
  static constexpr int kVectors = 128 / W;  // of 128 columns, which is as many as a row's values are asked for this way
  using Live = std::conditional_t<W == 16, uint16_t, uint8_t>;
  struct Class {
    char* const* slabs;
    int64_t shift, row_bytes;
    int64_t read_bytes;         // that vectors with some of its values reach over
    uint16_t at[kVectors];      // where the values [W · k, W · k + W) begin, in bytes; 0 where the row has none of them
    Live live[kVectors];        // which of them it has, as bits
  };
  struct Place {
    char* record;
    const Class* of;
  };
  int64_t class_bits;
  Class classes[kMaxChunks + 1];

  explicit NarrowRows(const Table& t) : class_bits(t.class_bits) {
    const int64_t item = t.dtype == kFloat32 ? 4 : 2;
    for (int64_t k = 0; k <= t.dim / t.chunk; ++k) {
      const Record& layout = t.records[k];
      char* const* slabs = reinterpret_cast<char* const*>(t.weights) + k * t.class_slabs;
      classes[k] = {slabs, k ? t.slab_log2 : 62, layout.words * 4, (layout.width + W - 1) / W * W * item, {}, {}};
      for (int64_t v = 0; v < kVectors && W * v < layout.width; ++v) {
        classes[k].at[v] = uint16_t(W * v * item);
        classes[k].live[v] = Live((1u << std::min<int64_t>(layout.width - W * v, W)) - 1);
      }
    }
  }
  Place at(int64_t slot) const {
    slot &= ~(slot >> 63);
    const Class& of = classes[slot & ((int64_t(1) << class_bits) - 1)];
    const int64_t place = slot >> class_bits, slab = place >> of.shift;
    return {of.slabs[slab] + (place - (slab << of.shift)) * of.row_bytes, &of};
  }
};

// Brings the first `bytes` of at most `Most` near: a line too often rather than a branch too many.
template <int64_t Most>
inline void prefetch_part(const char* first, int64_t bytes) {
  for (int64_t b = 0; b < Most; b += 64) __builtin_prefetch(first + (b < bytes ? b : bytes - 1));
  __builtin_prefetch(first + (bytes - 1));
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
