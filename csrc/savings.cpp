// What values save, of lines of a lookup's output: the products of values and gradients, summed by feature and by column, and
// the squares of these sums and products. In one pass: as tensors they are a dozen, each read from memory again.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "rows.h"

namespace unequal {
namespace {

constexpr int64_t kLines = 64;  // that are added up in float32 before they are added in double

// Adds a line's products to `sums` [columns] and their squares to `squares`. Returns the sum of the products.
template <int D>
inline float add_line(const float* values, const float* gradient, int64_t dim, float* sums, float* squares) {
  if constexpr (D != 0) {
    constexpr int W = kWidth<D>;
    Lanes<W> whole{};
    for (int j = 0; j < D; j += W) {
      const Lanes<W> product = load<W>(values + j) * load<W>(gradient + j);
      store<W>(sums + j, load<W>(sums + j) + product);
      store<W>(squares + j, load<W>(squares + j) + product * product);
      whole += product;
    }
    float total = 0;
    for (int j = 0; j < W; ++j) total += whole[j];
    return total;
  }
  float total = 0;
  for (int64_t j = 0; j < dim; ++j) {
    const float product = values[j] * gradient[j];
    sums[j] += product;
    squares[j] += product * product;
    total += product;
  }
  return total;
}

}  // namespace
}  // namespace unequal

// values: [lines, Σ dims], gradient: likewise, its lines `stride` apart; sums: [2, features + Σ dims], to which the sums and those
// of squares are added, times `factor` and `square_factor`, those that are finite. Returns 1 where memory was short.
UNEQUAL_API int uq_count_savings(const float* values, const float* gradient, int64_t stride, int64_t lines, const int64_t* dims,
                                 int64_t features, double factor, double square_factor, double* sums) try {
  using namespace unequal;
  int64_t columns = 0;
  for (int64_t f = 0; f < features; ++f) columns += dims[f];
  const int64_t width = features + columns;
  std::vector<float> part(size_t(2 * width));
  std::vector<double> total(size_t(2 * width), 0.0);
  for (int64_t first = 0; first < lines; first += kLines) {
    std::fill(part.begin(), part.end(), 0.0f);
    for (int64_t line = first; line < std::min(first + kLines, lines); ++line) {
      int64_t at = 0;
      for (int64_t f = 0; f < features; at += dims[f++])
        by_dim(dims[f], [&](auto dim) {
          const float whole = add_line<decltype(dim)::value>(values + line * columns + at, gradient + line * stride + at, dims[f],
                                                             &part[size_t(features + at)], &part[size_t(width + features + at)]);
          part[size_t(f)] += whole;
          part[size_t(width + f)] += whole * whole;
        });
    }
    for (size_t k = 0; k < part.size(); ++k) total[k] += part[k];
  }
  for (size_t k = 0; k < total.size(); ++k) {
    const double more = total[k] * (int64_t(k) < width ? factor : square_factor);
    if (std::isfinite(more)) sums[k] += more;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
