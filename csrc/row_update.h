// One optimizer step of rows that are not plain float32 rows of the full width: of 16 bits, or with some of their chunks only.
#pragma once
#include <cmath>

#include "narrow.h"
#include "optimizers.h"

namespace unequal {

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
      row.utility()[k] += gain * norm;
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

#if defined(UNEQUAL_LIVE_LANES)
// The same where the row has its first chunks, values are float32 and one utility is followed: nothing branches on how wide it
// is. Results are those of update_part, to the bit.
template <int D, int O>
__attribute__((always_inline)) inline void update_first(const Table& t, const NarrowRows::Place& place, const float* sum,
                                                        int64_t reads) {
  constexpr int N = D / 8;
  const NarrowRows::Class& of = *place.of;
  float* record = reinterpret_cast<float*>(place.record);
  Lanes<8> all[2] = {};
  for (int j = 0; j < N; ++j) all[j % 2] += load<8>(sum + 8 * j) * load<8>(sum + 8 * j);
  const float norm = t.utility_kind & kByGradient ? std::sqrt(add_lanes(all[0], all[1])) : 1.0f;
  if (t.utility_kind) record[of.layout->utility] += float(t.gain * (t.utility_kind & kByReads ? double(reads) : 1.0)) * norm;
  if (!of.value_bytes) return;
  const float lr = float(t.lr), decay = float(t.decay), eps = float(t.eps);
  float* state = record + of.layout->state[0];
  Lanes<8> w[N], g[N], own[2] = {};
  for (int j = 0; j < N; ++j) {
    const uint8_t live = of.live[j];
    w[j] = load_live(reinterpret_cast<const float*>(place.record + of.at[j]), live);
    g[j] = load<8>(sum + 8 * j);
    if (O != kRowWiseAdagrad || decay != 0) g[j] += decay * w[j];
    if (O == kRowWiseAdagrad) own[j % 2] = add_live(own[j % 2], g[j], g[j], live);
  }
  float step = lr;
  if constexpr (O == kRowWiseAdagrad) {
    *state += add_lanes(own[0], own[1]) / float(of.layout->width);
    step = lr / (std::sqrt(*state) + eps);
  }
  for (int j = 0; j < N; ++j)
    store_live(reinterpret_cast<float*>(place.record + of.at[j]), w[j] - step * g[j], of.live[j]);
}

inline bool goes_first(const Table& t) {
  return t.chunk && !t.masked && t.dtype == kFloat32 && t.utilities == 1 && t.dim / t.chunk <= kMaxChunks;
}
#endif

}  // namespace unequal
