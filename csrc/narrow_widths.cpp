// How wide rows will be at a threshold, and what that comes to: what a round asks again and again of all rows of all tables.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"

namespace unequal {
namespace {

constexpr int64_t kRows = 4096;   // that a thread takes at a time
constexpr int64_t kTogether = 64;  // that are compared with a limit at once
constexpr int64_t kPiece = int64_t(1) << 20;  // see storage/by_class.py

// Of at most kTogether rows: how many of the limits, which ascend, each is not below.
inline void reached(const float* worth, int64_t n, const float* limits, int64_t chunks, int32_t* out) {
  float most = worth[0];
  for (int64_t i = 1; i < n; ++i) most = std::max(most, worth[i]);
  std::fill(out, out + kTogether, 0);
  for (int64_t k = 0; k < chunks && limits[k] <= most; ++k) {
    const float limit = limits[k];
    for (int64_t i = 0; i < kTogether; ++i) out[i] += limit <= worth[i];
  }
}

// Rows [first, last) of one table. Gives how many chunks they will have together, and of each how many, where `out` is given.
inline int64_t between(const float* utilities, const int16_t* old, int64_t first, int64_t last, const float* grow,
                       const float* shrink, int64_t chunks, int16_t* out) {
  int64_t sum = 0;
  float worth[kTogether] = {};
  int32_t grown[kTogether], shrunk[kTogether];
  for (; first < last; first += kTogether) {
    const int64_t n = std::min(kTogether, last - first);
    std::copy(utilities + first, utilities + first + n, worth);
    reached(worth, n, grow, chunks, grown);
    reached(worth, n, shrink, chunks, shrunk);
    int32_t part = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t now = std::min(std::max(int32_t(old[first + i]), grown[i]), shrunk[i]);
      if (out) out[first + i] = int16_t(now);
      part += now;
    }
    sum += part;
  }
  return sum;
}

}  // namespace
}  // namespace unequal

// Rows of tables that lie one after the other: those of table t end before ends[t]. A row has as many chunks as it has, but at
// least as many as there are limits in grow [tables, chunks] that it is worth, and at most as many as in shrink. sums: of every
// table how many chunks that are together; out: of every row, or null. What is above the last limit of a table counts as that.
UNEQUAL_API void uq_narrow_between(const float* utilities, const int16_t* old, const int64_t* ends, int64_t tables,
                                   const float* grow, const float* shrink, int64_t chunks, int64_t* sums, int16_t* out,
                                   int threads) {
  using namespace unequal;
  struct Block {
    int64_t table, first, last;
  };
  std::vector<Block> blocks;
  for (int64_t t = 0, first = 0; t < tables; first = ends[t++])
    for (int64_t at = first; at < ends[t]; at += kRows) blocks.push_back({t, at, std::min(at + kRows, ends[t])});
  std::vector<int64_t> found(blocks.size());
#pragma omp parallel for schedule(static) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); ++b) {
    const Block& block = blocks[b];
    found[b] = between(utilities, old, block.first, block.last, grow + block.table * chunks, shrink + block.table * chunks,
                       chunks, out);
  }
  std::fill(sums, sums + tables, int64_t(0));
  for (size_t b = 0; b < blocks.size(); ++b) sums[blocks[b].table] += found[b];
}

// Of rows that had `old` chunks and will have `chunks`: out[0] by how many they shrink together, out[1] by how many they grow,
// out[2 + k] how many will have k.
UNEQUAL_API void uq_narrow_tally(const int16_t* old, const int16_t* chunks, int64_t count, int64_t classes, int64_t* out) {
  using namespace unequal;
  std::fill(out, out + 2 + classes, int64_t(0));
  // Rows that follow one another are counted apart: often they are of one class, and one count would wait for the other.
  std::vector<int64_t> counts(size_t(4 * classes), 0);
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t n = std::min(kRows, count - first);
    int32_t shrinks = 0, grows = 0;
    for (int64_t i = first; i < first + n; ++i) {
      const int32_t more = int32_t(chunks[i]) - int32_t(old[i]);
      shrinks += std::max(-more, 0);
      grows += std::max(more, 0);
    }
    out[0] += shrinks;
    out[1] += grows;
    for (int64_t i = first; i < first + n; ++i) ++counts[size_t((i & 3) * classes + chunks[i])];
  }
  for (int64_t k = 0; k < 4 * classes; ++k) out[2 + k % classes] += counts[size_t(k)];
}

// out[k]: what rows of k chunks are worth together, added up one after the other within a piece, and piece by piece.
UNEQUAL_API void uq_narrow_class_sums(const int16_t* chunks, const float* worth, int64_t each, int64_t count, int64_t classes,
                                      double* out) {
  using namespace unequal;
  std::fill(out, out + classes, 0.0);
  std::vector<double> piece(static_cast<size_t>(classes));
  for (int64_t first = 0; first < count; first += kPiece) {
    std::fill(piece.begin(), piece.end(), 0.0);
    for (int64_t i = first; i < std::min(first + kPiece, count); ++i) piece[size_t(chunks[i])] += double(worth[i * each]);
    for (int64_t k = 0; k < classes; ++k) out[k] += piece[size_t(k)];
  }
}
