// Where a row lies, and one optimizer step of rows that are not plain float32 rows of the full width: of 16 bits, or with some of
// their chunks only.
#pragma once
#include <cmath>

#include "narrow.h"
#include "optimizers.h"

namespace unequal {

// Where a row and its state lie.
struct Row {
  void* weights;
  float* state[2];
};

template <int D, int O>
inline Row locate(const Table& t, int64_t slot) {
  int64_t place;
  const int slab = slab_of(t.slab_log2, slot, place);
  const int64_t dim = D ? D : t.dim, first = state_per_row<O>(0, dim), second = state_per_row<O>(1, dim);
  return {static_cast<char*>(t.weights[slab]) + place * dim * (t.dtype == kFloat32 ? 4 : 2),
          {first ? t.state[0][slab] + place * first : nullptr, second ? t.state[1][slab] + place * second : nullptr}};
}

template <int D, int O>
inline void prefetch_row(const Table& t, int64_t slot) {
  if (t.chunk) {
    const NarrowRow row = narrow_row(t, slot);
    return prefetch(row.record, row.layout->words * 4);
  }
  const Row row = locate<D, O>(t, slot);
  const int64_t dim = D ? D : t.dim;
  if (t.dtype == kFloat32) prefetch(row.weights, dim * 4);
  else prefetch(row.weights, dim * 2);
  if (state_per_row<O>(0, dim)) prefetch(row.state[0], state_per_row<O>(0, dim) * 4);
  if (state_per_row<O>(1, dim)) prefetch(row.state[1], state_per_row<O>(1, dim) * 4);
}

// Rows of 16 bits: in float32, and rounded back.
template <int D, int O>
__attribute__((noinline)) void apply_rounded(const Table& t, int64_t slot, void* stored, float* state0, float* state1,
                                             float* sum, int64_t dim) {
  alignas(64) float wide[kMaxDim];
  const uint64_t key = row_key(t.rounding_key, slot);
  const auto rounded = [&](auto* values) {
    for (int64_t j = 0; j < dim; ++j) wide[j] = to_float(values[j]);
    apply<D, O>(t, wide, state0, state1, sum, dim);
    store_rounded(values, wide, dim, key);
  };
  if (t.dtype == kFloat16) rounded(static_cast<Half*>(stored));
  else rounded(static_cast<BFloat*>(stored));
}

// A candidate's utility. What is negative is none, but says where a row is that it has got since; what is no number would, too.
inline float added_to_candidate(float utility, float gained) {
  const float sum = utility + gained;
  return !std::signbit(utility) && sum >= 0 ? sum : utility;
}

// A row of which only some chunks exist. How much it matters is told by the gradient of all of them.
template <int D, int O>
__attribute__((noinline)) void update_part(const Table& t, int64_t slot, float* sum, int64_t reads) {
  const NarrowRow row = narrow_row(t, slot);
  if (t.utility_kind) {
    const float gain = float(t.gain * (t.utility_kind & kByReads ? double(reads) : 1.0));
    const int64_t each = t.dim / t.utilities;
    for (int64_t k = 0; k < t.utilities; ++k) {
      const float norm = !(t.utility_kind & kByGradient) ? 1.0f
                         : t.utilities == 1             ? std::sqrt(sum_of_squares<D>(sum, t.dim))
                                                        : std::sqrt(sum_of_squares<0>(sum + k * each, each));
      float& utility = row.utility()[k];
      utility = row.chunks ? utility + gain * norm : added_to_candidate(utility, gain * norm);
    }
  }
  if (!row.chunks) return;
  if (t.masked)  // chunks move down only
    each_chunk(t, row, [&](int64_t place, int64_t column, int64_t count) {
      for (int64_t j = 0; j < count; ++j) sum[place + j] = sum[column + j];
    });
  const int64_t width = row.width();
  if (t.dtype == kFloat32) return apply<0, O>(t, row.record, row.state(0), row.state(1), sum, width);
  apply_rounded<0, O>(t, slot, row.record, row.state(0), row.state(1), sum, width);
}

// Rows of a table by class, the widest first and candidates last: numbers that follow one another without large gaps, so that
// rows are met class by class, and fewer bits are sorted than slots have.
struct RowNumbers {
  int64_t class_bits, widest, count;
  uint32_t first[kMaxChunks + 1];  // of every class

  explicit RowNumbers(const Table& t) : class_bits(t.class_bits), widest(t.dim / t.chunk), count(0) {
    for (int64_t k = widest; k > 0; --k) {
      first[k] = uint32_t(count);
      for (int64_t slab = 0; slab < t.class_slabs && t.weights[k * t.class_slabs + slab]; ++slab) count += int64_t(1) << t.slab_log2;
    }
    first[0] = uint32_t(count);
    count += (t.rows >> class_bits) + 1;
  }
  int64_t of(int64_t slot) const { return first[slot & ((int64_t(1) << class_bits) - 1)] + (slot >> class_bits); }
  int64_t slot(int64_t number) const {
    int64_t k = widest;
    while (k > 0 && number >= first[k - 1]) --k;
    return (number - first[k]) << class_bits | k;
  }
};

#if defined(UNEQUAL_LIVE_LANES)
// The class that rows are of which are met in the order of their numbers.
struct ClassOfRows {
  const Table& table;
  const RowNumbers& numbers;
  int64_t chunks = numbers.widest, last = 0;  // `last`: the first number that is of another class
  const Record* layout = nullptr;
  char* const* slabs = nullptr;
  int64_t shift = 0, row_bytes = 0, first = 0;

  ClassOfRows(const Table& t, const RowNumbers& n) : table(t), numbers(n) { enter(numbers.widest); }
  void enter(int64_t k) {
    chunks = k;
    first = numbers.first[k];
    last = k ? numbers.first[k - 1] : INT64_MAX;
    layout = table.records + k;
    slabs = reinterpret_cast<char* const*>(table.weights) + k * table.class_slabs;
    shift = k ? table.slab_log2 : 62;
    row_bytes = layout->words * 4;
  }
  char* record(int64_t number) {
    while (__builtin_expect(number >= last, 0)) enter(chunks - 1);
    const int64_t place = number - first, slab = place >> shift;
    return slabs[slab] + (place - (slab << shift)) * row_bytes;
  }
};

// update_part where the row has its first chunks, values are float32 and one utility is followed. Results are the same, to the
// bit.
template <int D, int O>
__attribute__((always_inline)) inline void update_first(const Table& t, const Record& layout, float* record, bool whole,
                                                        const float* sum, int64_t reads) {
  constexpr int W = UNEQUAL_LIVE_LANES, N = D / W, S = 16 / W;  // S: vectors of the 16 running sums
  const float lr = float(t.lr), decay = float(t.decay), eps = float(t.eps);
  Lanes<W> g[N], squares[S] = {};
  for (int j = 0; j < N; ++j) {
    g[j] = load<W>(sum + W * j);
    squares[j % S] += g[j] * g[j];
  }
  const float whole_square = add_running(squares);
  if (t.utility_kind) {
    const float norm = t.utility_kind & kByGradient ? std::sqrt(whole_square) : 1.0f;
    const float gained = float(t.gain * (t.utility_kind & kByReads ? double(reads) : 1.0)) * norm;
    float& utility = record[layout.utility];
    utility = layout.width ? utility + gained : added_to_candidate(utility, gained);
  }
  float* state = record + layout.state[0];
  if (whole) {
    Lanes<W> w[N];
    for (int j = 0; j < N; ++j) w[j] = load<W>(record + W * j);
    float step = lr, square = whole_square;
    if (O != kRowWiseAdagrad || decay != 0) {
      for (auto& part : squares) part = Lanes<W>{};
      for (int j = 0; j < N; ++j) {
        g[j] += decay * w[j];
        squares[j % S] += g[j] * g[j];
      }
      if (O == kRowWiseAdagrad) square = add_running(squares);
    }
    if constexpr (O == kRowWiseAdagrad) {
      *state += square / float(D);
      step = lr / (std::sqrt(*state) + eps);
    }
    for (int j = 0; j < N; ++j) store<W>(record + W * j, w[j] - step * g[j]);
    return;
  }
  const int64_t width = layout.width;
  if (!width) return;
  const auto gradient = [&](int64_t j) {
    Lanes<8> eight = load<8>(sum + j);
    if (O != kRowWiseAdagrad || decay != 0) eight += decay * load_first(record + j, width - j);
    return eight;
  };
  float step = lr;
  if constexpr (O == kRowWiseAdagrad) {
    Lanes<8> own[2] = {};
    for (int64_t j = 0; j < width; j += 16) {
      const Lanes<8> eight = gradient(j);
      own[0] = add_live(own[0], eight, eight, first_live(width - j));
      if (j + 8 >= width) break;
      const Lanes<8> next = gradient(j + 8);
      own[1] = add_live(own[1], next, next, first_live(width - j - 8));
    }
    *state += add_lanes(own[0], own[1]) / float(width);
    step = lr / (std::sqrt(*state) + eps);
  }
  for (int64_t j = 0; j < width; j += 8)
    store_first(record + j, load_first(record + j, width - j) - step * gradient(j), width - j);
}

inline bool goes_first(const Table& t) {
  return t.chunk && !t.masked && t.dtype == kFloat32 && t.utilities == 1 && t.dim / t.chunk <= kMaxChunks &&
         (t.optimizer == kRowWiseAdagrad || t.optimizer == kSGD) && (t.dim == 16 || t.dim == 32 || t.dim == 64 || t.dim == 128);
}
#endif

}  // namespace unequal
