// Dot products of all pairs of a sample's feature vectors, and their gradient: two small matrix products per sample, half of
// X·Xᵀ, and G·X with the symmetric matrix G of the pairs' gradients. The order of a sample's sums is fixed, so results depend
// neither on threads nor on other samples.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <omp.h>

#include "buffer.h"
#include "rows.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define UNEQUAL_SHUFFLES 1
#endif
#endif

namespace unequal {

template <>
struct LanesOf<4> { typedef float type __attribute__((vector_size(16))); };

namespace {

// Vectors of W values, those of the machine: the compiler takes wider ones apart in memory. A tile of a product is up to
// kVectors of them wide and has at most kSums, so that all of its sums stay in registers.
#if defined(__AVX512F__)
constexpr int W = 16, kVectors = 4, kSums = 24;
#elif defined(__AVX__)
constexpr int W = 8, kVectors = 2, kSums = 12;
#elif defined(__aarch64__)
constexpr int W = 4, kVectors = 4, kSums = 24;
#else
constexpr int W = 4, kVectors = 2, kSums = 12;
#endif
template <int V>
constexpr int kHeight = kSums / (V == 1 ? 2 : V);
constexpr int64_t kLargeOutput = 4 << 20;  // bytes; larger outputs are written past the caches, which they would flush
constexpr int64_t kLine = 16;  // floats

constexpr int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

struct Matrix {
  const float* values;
  int64_t stride;
};

// Memory that is needed next. A line of it is fetched now and then: more at once than a core can wait for would stop it.
struct Ahead {
  const float *next, *end;
};

// out[r, c] = Σ_k left[k, r] · right[k, c] for R rows and V vectors of columns.
template <int R, int V>
void multiply_tile(Matrix left, Matrix right, int64_t depth, float* out, int64_t out_stride, bool streams, Ahead& ahead) {
  const float* fetched = ahead.next;
  const int64_t step = fetched < ahead.end ? kLine : 0;
  Lanes<W> sums[R][V] = {};
  const float *a = left.values, *b = right.values;
  for (int64_t k = 0; k < depth; ++k, a += left.stride, b += right.stride, fetched += step) {
    __builtin_prefetch(fetched);
    Lanes<W> columns[V];
    for (int v = 0; v < V; ++v) columns[v] = load<W>(b + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] += a[r] * columns[v];
  }
  ahead.next = fetched;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* const to = out + r * out_stride + v * W;
      if (streams) stream<W>(to, sums[r][v]);
      else store<W>(to, sums[r][v]);
    }
}

using Tile = decltype(&multiply_tile<1, 1>);
template <int V, int... R>
Tile tile_of_height(int64_t height, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {&multiply_tile<R + 1, V>...};
  return tiles[height - 1];
}
template <int V>
Tile tile_of(int64_t height) {
  return tile_of_height<V>(height, std::make_integer_sequence<int, kHeight<V>>{});
}

// leftᵀ · right → out [rows, columns]; where `half` is set, of row r only what is needed of the columns after r. `columns`
// are whole vectors.
void multiply(Matrix left, Matrix right, int64_t depth, float* out, int64_t rows, int64_t columns, bool half, bool streams,
              Ahead ahead) {
  const int64_t highest = columns < kVectors * W ? kHeight<2> : kHeight<kVectors>, tiles = (rows + highest - 1) / highest;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = rows * t / tiles, height = rows * (t + 1) / tiles - row;
    for (int64_t column = half ? (row + 1) / W * W : 0; column < columns;) {
      const int64_t there = (columns - column) / W, vectors = there >= kVectors ? kVectors : there >= 2 ? 2 : 1;
      const Tile tile = vectors == 1 ? tile_of<1>(height) : vectors == 2 ? tile_of<2>(height) : tile_of<kVectors>(height);
      tile({left.values + row, left.stride}, {right.values + column, right.stride}, depth, out + row * columns + column, columns,
           streams, ahead);
      column += W * vectors;
    }
  }
}

// A block of 4 × 4, given by its rows.
inline void transpose_block(const float* const from[4], float* to, int64_t stride) {
#if UNEQUAL_SHUFFLES
  Lanes<4> a[4], b[4];
  for (int r = 0; r < 4; ++r) a[r] = load<4>(from[r]);
  b[0] = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5), b[1] = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
  b[2] = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7), b[3] = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
  for (int r = 0; r < 4; r += 2) {
    store<4>(to + r * stride, __builtin_shufflevector(b[r], b[r + 1], 0, 1, 4, 5));
    store<4>(to + (r + 1) * stride, __builtin_shufflevector(b[r], b[r + 1], 2, 3, 6, 7));
  }
#else
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 4; ++r) to[c * stride + r] = from[r][c];
#endif
}

// x [features, dim] → turned [dim, stride]. Columns from `features` on hold anything: their products are not read.
void transpose(const float* x, int64_t features, int64_t dim, float* turned, int64_t stride) {
  for (int64_t i = 0; i < features; i += 4) {
    const float* from[4];
    for (int64_t r = 0; r < 4; ++r) from[r] = x + std::min(i + r, features - 1) * dim;
    float* to = turned + i;
    int64_t k = 0;
    for (; k + 4 <= dim; k += 4, to += 4 * stride) {
      transpose_block(from, to, stride);
      for (int r = 0; r < 4; ++r) from[r] += 4;
    }
    for (; k < dim; ++k, to += stride)
      for (int r = 0; r < 4; ++r) to[r] = *from[r]++;
  }
}

// What stands right of the diagonal, row by row → the symmetric matrix [features, stride] with zeros on its diagonal. Needs
// room for 3 rows and a vector more. Rows are written in whole vectors: what is too much lies left of the diagonal of the next
// row, which comes last.
void make_symmetric(const float* upper, int64_t features, float* both, int64_t stride) {
  const float* const end = upper + features * (features - 1) / 2;
  for (int64_t i = 0; i < features; ++i) {
    float* const row = both + i * (stride + 1);
    const int64_t count = features - 1 - i;
    int64_t c = 0;
    row[0] = 0.0f;
    for (; c < count && end - upper >= c + W; c += W) store<W>(row + 1 + c, load<W>(upper + c));
    for (; c < count; ++c) row[1 + c] = upper[c];
    upper += count;
  }
  for (int64_t i = 0; i < features; i += 4) {
    float* const block = both + i * (stride + 1);
    for (int64_t r = 1; r < 4; ++r)
      for (int64_t c = 0; c < r; ++c) block[r * stride + c] = block[c * stride + r];
    for (int64_t j = 4; i + j < features; j += 4) {
      const float* const from[4] = {block + j, block + stride + j, block + 2 * stride + j, block + 3 * stride + j};
      transpose_block(from, block + j * stride, stride);
    }
  }
}

// Writes a row of what is written from front to back and ends at `end`, in whole vectors where they fit: what is too much is
// written over by the next row. Returns where that begins.
inline float* append(float* to, const float* from, int64_t count, const float* end) {
  int64_t c = 0;
  for (; c < count && end - to >= c + W; c += W) store<W>(to + c, load<W>(from + c));
  for (; c < count; ++c) to[c] = from[c];
  return to + count;
}

}  // namespace
}  // namespace unequal

// x [samples, features, dim] → products [samples, features · (features − 1) / 2]: x_i · x_j for i < j, ordered by i, then j.
// Returns -1 where memory ran out.
UNEQUAL_API int64_t uq_pair_dots(const float* x, int64_t samples, int64_t features, int64_t dim, float* products,
                                 int threads) try {
  using namespace unequal;
  const int64_t stride = whole_vectors(features), pairs = features * (features - 1) / 2;
  const int64_t values = features * dim, room = (dim + features) * stride;
  Buffer<float> buffer;
  float* const scratch = buffer.get(size_t(room * threads));
  std::fill(scratch, scratch + room * threads, 0.0f);
#pragma omp parallel num_threads(threads)
  {
    float *const turned = scratch + room * omp_get_thread_num(), *const all = turned + dim * stride;
#pragma omp for schedule(static)
    for (int64_t s = 0; s < samples; ++s) {
      const float *const sample = x + s * values, *const next = sample + values;
      transpose(sample, features, dim, turned, stride);
      multiply({turned, stride}, {turned, stride}, dim, all, features - 1, stride, true, false, {next, next + values});
      float *to = products + s * pairs, *const end = to + pairs;
      for (int64_t i = 0; i + 1 < features; ++i) to = append(to, all + i * (stride + 1) + 1, features - 1 - i, end);
    }
  }
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// The gradient with regard to x: that of x_i is the sum of gradient_ij · x_j over j ≠ i, j ascending. Returns the same.
UNEQUAL_API int64_t uq_pair_dots_gradient(const float* x, const float* gradient, int64_t gradient_stride, int64_t samples,
                                          int64_t features, int64_t dim, float* out, int threads) try {
  using namespace unequal;
  const int64_t values = features * dim, width = whole_vectors(dim);
  const int64_t stride = whole_vectors(features), square = (features + 3) * stride + W;
  const bool padded = width != dim, large = samples * values * int64_t(sizeof(float)) >= kLargeOutput;
  const bool streams = large && !padded && can_stream<W>(out, dim);
  const int64_t room = square + (padded ? features * width + whole_vectors(values) + W : 0);
  Buffer<float> buffer;
  float* const scratch = buffer.get(size_t(room * threads));
  std::fill(scratch, scratch + room * threads, 0.0f);
#pragma omp parallel num_threads(threads)
  {
    float* const both = scratch + room * omp_get_thread_num();
    float *const wide = both + square, *const copy = wide + features * width;
#pragma omp for schedule(static)
    for (int64_t s = 0; s < samples; ++s) {
      const float *rows = x + s * values, *const next = rows + values;
      make_symmetric(gradient + s * gradient_stride, features, both, stride);
      if (!padded) {
        multiply({both, stride}, {rows, dim}, features, out + s * values, features, dim, false, streams, {next, next + values});
        continue;
      }
      // The last vector of a row is read beyond the row's end, but not beyond that of x.
      if ((samples - 1 - s) * values < W) rows = std::copy(rows, next, copy) - values;
      multiply({both, stride}, {rows, dim}, features, wide, features, width, false, false, {next, next + values});
      float *to = out + s * values, *const end = to + values;
      for (int64_t i = 0; i < features; ++i) to = append(to, wide + i * width, dim, end);
    }
    if (streams) finish_stream();
  }
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
