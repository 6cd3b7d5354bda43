// What each optimizer does to one row, given the sum of the row's gradients. The formulas are those of optim.py.
#pragma once
#include "rows.h"

namespace unequal {

enum Optimizer : int64_t { kSGD = 0, kAdagrad, kRowWiseAdagrad, kAdam, kRowWiseAdam, kLAMB, kLARS };

// How many floats of state a row has at `which` (0 or 1): none, one per row, or one per value.
template <int O>
constexpr int64_t state_per_row(int which, int64_t dim) {
  switch (O) {
    case kAdagrad: case kLARS: return which == 0 ? dim : 0;
    case kRowWiseAdagrad: return which == 0 ? 1 : 0;
    case kAdam: case kLAMB: return dim;
    case kRowWiseAdam: return which == 0 ? dim : 1;
    default: return 0;
  }
}

// Which state has squares of gradients, of every value or of the row on average, or -1.
template <int O>
constexpr int squares_of() {
  return O == kAdagrad || O == kRowWiseAdagrad ? 0 : O == kAdam || O == kRowWiseAdam || O == kLAMB ? 1 : -1;
}

// Calls body with the optimizer as a compile-time constant: a row's update is short, deciding per row would show.
template <class Body>
inline void by_optimizer(int64_t optimizer, Body&& body) {
  switch (optimizer) {
    case kAdagrad: return body(std::integral_constant<int, kAdagrad>{});
    case kRowWiseAdagrad: return body(std::integral_constant<int, kRowWiseAdagrad>{});
    case kAdam: return body(std::integral_constant<int, kAdam>{});
    case kRowWiseAdam: return body(std::integral_constant<int, kRowWiseAdam>{});
    case kLAMB: return body(std::integral_constant<int, kLAMB>{});
    case kLARS: return body(std::integral_constant<int, kLARS>{});
    default: return body(std::integral_constant<int, kSGD>{});
  }
}

// 16 running sums, the first and the last 8: halves added to halves, as sum_of_squares does it, in registers.
inline float add_lanes(Lanes<8> first, Lanes<8> last) {
  const Lanes<8> eight = first + last;
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float add_running(const Lanes<8>* sums) { return add_lanes(sums[0], sums[1]); }
inline float add_running(const Lanes<16>* sums) {
  return add_lanes(__builtin_shufflevector(*sums, *sums, 0, 1, 2, 3, 4, 5, 6, 7),
                   __builtin_shufflevector(*sums, *sums, 8, 9, 10, 11, 12, 13, 14, 15));
}

// Σ x², always in the same order: 16 running sums, then halves added to halves.
template <int D>
__attribute__((always_inline)) inline float sum_of_squares(const float* x, int64_t run_time_dim) {
  const int64_t dim = D ? D : run_time_dim;
  Lanes<16> sums{};
  int64_t j = 0;
  for (; j + 16 <= dim; j += 16) sums += load<16>(x + j) * load<16>(x + j);
  alignas(64) float lanes[16];
  store<16>(lanes, sums);
  for (int k = 0; k < 16 && j + k < dim; ++k) lanes[k] += x[j + k] * x[j + k];
  for (int half = 8; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  return lanes[0];
}

// w: the row as float32; s0, s1: its state; g: the summed gradient, overwritten where that saves a buffer. D = 0: all have
// as many values as the last argument says.
template <int D, int O>
__attribute__((always_inline)) inline void apply(const Table& t, float* __restrict w, float* __restrict s0, float* __restrict s1, float* __restrict g, int64_t run_time_dim) {
  const int64_t dim = D ? D : run_time_dim;
  const float lr = float(t.lr), decay = float(t.decay), eps = float(t.eps);
  const float beta1 = float(t.beta1), beta2 = float(t.beta2);
  // In double: 1 - 0.999f is off by 5e-5.
  const float rest1 = float(1 - t.beta1), rest2 = float(1 - t.beta2);
  const float correct1 = float(1.0 / t.correction1), correct2 = float(1.0 / t.correction2);
  switch (O) {
    case kSGD:
      for (int64_t j = 0; j < dim; ++j) w[j] -= lr * (g[j] + decay * w[j]);
      break;
    case kAdagrad:
      for (int64_t j = 0; j < dim; ++j) {
        const float gradient = g[j] + decay * w[j];
        s0[j] += gradient * gradient;
        w[j] -= lr * gradient / (std::sqrt(s0[j]) + eps);
      }
      break;
    case kRowWiseAdagrad: {
      if (decay != 0)
        for (int64_t j = 0; j < dim; ++j) g[j] += decay * w[j];
      *s0 += sum_of_squares<D>(g, dim) / float(dim);
      const float step = lr / (std::sqrt(*s0) + eps);
      for (int64_t j = 0; j < dim; ++j) w[j] -= step * g[j];
      break;
    }
    case kAdam:
      for (int64_t j = 0; j < dim; ++j) {
        s0[j] = beta1 * s0[j] + rest1 * g[j];
        s1[j] = beta2 * s1[j] + rest2 * g[j] * g[j];
        w[j] -= lr * (s0[j] * correct1 / (std::sqrt(s1[j] * correct2) + eps) + decay * w[j]);
      }
      break;
    case kRowWiseAdam: {
      *s1 = beta2 * *s1 + rest2 * (sum_of_squares<D>(g, dim) / float(dim));
      const float scale = correct1 / (std::sqrt(*s1 * correct2) + eps);
      for (int64_t j = 0; j < dim; ++j) {
        s0[j] = beta1 * s0[j] + rest1 * g[j];
        w[j] -= lr * (s0[j] * scale + decay * w[j]);
      }
      break;
    }
    case kLAMB: {
      for (int64_t j = 0; j < dim; ++j) {
        s0[j] = beta1 * s0[j] + rest1 * g[j];
        s1[j] = beta2 * s1[j] + rest2 * g[j] * g[j];
        g[j] = s0[j] * correct1 / (std::sqrt(s1[j] * correct2) + eps) + decay * w[j];
      }
      const float size = std::sqrt(sum_of_squares<D>(w, dim)), length = std::sqrt(sum_of_squares<D>(g, dim));
      const float step = lr * (size > 0 && length > 0 ? size / length : 1.0f);
      for (int64_t j = 0; j < dim; ++j) w[j] -= step * g[j];
      break;
    }
    case kLARS: {
      const float size = std::sqrt(sum_of_squares<D>(w, dim)), length = std::sqrt(sum_of_squares<D>(g, dim));
      const float step = size > 0 && length > 0 ? lr * float(t.trust) * size / (length + decay * size) : lr;
      for (int64_t j = 0; j < dim; ++j) {
        s0[j] = beta1 * s0[j] + step * (g[j] + decay * w[j]);
        w[j] -= s0[j];
      }
      break;
    }
  }
}

}  // namespace unequal
