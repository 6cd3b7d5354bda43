// Rows in memory: where a slot lies, how a row of any dtype is read as float32, how it is rounded when written back.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif
#include "common.h"

namespace unequal {

constexpr int kMaxDim = 4096;

// Spelt out per width: the compiler ignores a vector size that depends on a template parameter.
template <int W>
struct LanesOf;
template <>
struct LanesOf<8> { typedef float type __attribute__((vector_size(32))); };
template <>
struct LanesOf<16> { typedef float type __attribute__((vector_size(64))); };
template <int W>
using Lanes = typename LanesOf<W>::type;
static_assert(sizeof(Lanes<8>) == 32 && sizeof(Lanes<16>) == 64);

// The widest vector that divides a row of D values; rows of other sizes (D = 0: known at run time only) go by scalars.
template <int D>
constexpr int kWidth = D % 16 == 0 ? 16 : 8;

// Calls body with the row width as a compile-time constant where it is a common one, so that a row stays in registers.
template <class Body>
inline void by_dim(int64_t dim, Body&& body) {
  switch (dim) {
    case 8: return body(std::integral_constant<int, 8>{});
    case 16: return body(std::integral_constant<int, 16>{});
    case 32: return body(std::integral_constant<int, 32>{});
    case 64: return body(std::integral_constant<int, 64>{});
    case 128: return body(std::integral_constant<int, 128>{});
    default: return body(std::integral_constant<int, 0>{});
  }
}

struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(BFloat x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

template <int W>
inline Lanes<W> load(const float* p) {
  Lanes<W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <int W>
inline Lanes<W> load(const BFloat* p) {
  uint32_t wide[W];
  for (int j = 0; j < W; ++j) wide[j] = uint32_t(p[j].bits) << 16;
  Lanes<W> v;
  std::memcpy(&v, wide, sizeof v);
  return v;
}
template <int W>
inline Lanes<W> load(const Half* p) {
  Lanes<W> v;
#if defined(__F16C__)
  for (int j = 0; j < W; j += 8) {
    const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + j)));
    std::memcpy(reinterpret_cast<float*>(&v) + j, &eight, sizeof eight);
  }
#else
  for (int j = 0; j < W; ++j) v[j] = to_float(p[j]);
#endif
  return v;
}
// The values of 8 whose bits are set, and zeros. Even where no bit is set the processor waits for the memory: the caller then
// gives the start of the row in place of what lies beyond it. A vector may reach into a line that the row has no part of, which
// is waited for, too.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define UNEQUAL_LIVE_LANES 16
inline Lanes<16> load_live(const float* values, uint16_t live) { return _mm512_maskz_loadu_ps(live, values); }
inline Lanes<16> load_live(const BFloat* values, uint16_t live) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, values)), 16));
}
inline Lanes<16> load_live(const Half* values, uint16_t live) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(live, values)); }
inline Lanes<16> add_live(Lanes<16> sum, Lanes<16> a, Lanes<16> b, uint16_t live) {
  return _mm512_mask3_fmadd_ps(a, b, sum, live);
}
inline Lanes<8> load_live(const float* values, uint8_t live) { return _mm256_maskz_loadu_ps(live, values); }
inline Lanes<8> load_live(const BFloat* values, uint8_t live) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(live, values)), 16));
}
inline Lanes<8> load_live(const Half* values, uint8_t live) { return _mm256_cvtph_ps(_mm_maskz_loadu_epi16(live, values)); }
inline void store_live(float* values, Lanes<8> v, uint8_t live) { _mm256_mask_storeu_ps(values, live, v); }
// sum + a · b where bits are set, elsewhere sum.
inline Lanes<8> add_live(Lanes<8> sum, Lanes<8> a, Lanes<8> b, uint8_t live) {
  return _mm256_mask3_fmadd_ps(a, b, sum, live);
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define UNEQUAL_LIVE_LANES 8
inline __m256i all_bits_of(uint8_t live) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(live)), each), each);
}
inline Lanes<8> load_live(const float* values, uint8_t live) { return _mm256_maskload_ps(values, all_bits_of(live)); }
inline __m128i load_live_halves(const uint16_t* values, uint8_t live) {
  if (live == 0xFF) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  uint16_t part[8] = {};
  for (int j = 0; j < 8; ++j)
    if (live >> j & 1) part[j] = values[j];
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(part));
}
inline Lanes<8> load_live(const BFloat* values, uint8_t live) {
  const __m128i bits = load_live_halves(reinterpret_cast<const uint16_t*>(values), live);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes<8> load_live(const Half* values, uint8_t live) {
  return _mm256_cvtph_ps(load_live_halves(reinterpret_cast<const uint16_t*>(values), live));
}
inline void store_live(float* values, Lanes<8> v, uint8_t live) { _mm256_maskstore_ps(values, all_bits_of(live), v); }
inline Lanes<8> add_live(Lanes<8> sum, Lanes<8> a, Lanes<8> b, uint8_t live) {
  return _mm256_blendv_ps(sum, _mm256_fmadd_ps(a, b, sum), _mm256_castsi256_ps(all_bits_of(live)));
}
#endif
#if defined(UNEQUAL_LIVE_LANES)
// The first `count` values of 8, or all of them. 4 and 8 are read and written as they are: a write with a mask that another row's
// values lie behind would hold up whoever reads these next.
inline uint8_t first_live(int64_t count) { return count >= 8 ? 0xFF : uint8_t((1u << count) - 1); }
inline Lanes<8> load_first(const float* values, int64_t count) {
  Lanes<8> all;
  if (count >= 8) return std::memcpy(&all, values, sizeof all), all;
  if (count == 4) return _mm256_zextps128_ps256(_mm_loadu_ps(values));
  return load_live(values, first_live(count));
}
inline void store_first(float* values, Lanes<8> v, int64_t count) {
  if (count >= 8) std::memcpy(values, &v, sizeof v);
  else if (count == 4) _mm_storeu_ps(values, _mm256_castps256_ps128(v));
  else store_live(values, v, first_live(count));
}
#endif
template <int W>
inline void store(float* p, Lanes<W> v) {
  std::memcpy(p, &v, sizeof v);
}

// Whether rows may be written past the caches: `stream` needs whole, aligned vectors.
template <int W>
inline bool can_stream(const float* first, int64_t stride) {
#if defined(__AVX__)
  return reinterpret_cast<uintptr_t>(first) % sizeof(Lanes<W>) == 0 && stride % W == 0;
#else
  return (void)first, (void)stride, false;
#endif
}
// Writes past the caches: memory is not read first, which halves what a write costs. finish_stream() ends a series.
template <int W>
inline void stream(float* p, Lanes<W> v) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return _mm512_stream_ps(p, v);
#endif
#if defined(__AVX__)
  __m256 parts[W / 8];
  std::memcpy(parts, &v, sizeof v);
  for (int j = 0; j < W / 8; ++j) _mm256_stream_ps(p + 8 * j, parts[j]);
#else
  store<W>(p, v);
#endif
}
inline void finish_stream() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

inline uint64_t row_key(uint64_t rounding_key, int64_t slot) { return mix64(rounding_key + uint64_t(slot) * kGolden); }
inline uint64_t four_words(uint64_t key, int64_t group) { return mix64(key + uint64_t(group + 1) * kGolden); }

// Rounds down or up in proportion to the distance, decided by 16 random bits. Infinity and NaN stay; float16 saturates.
inline BFloat round_to(float x, uint32_t random, BFloat) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7F800000u) != 0x7F800000u) bits += random & 0xFFFFu;
  else if (bits & 0x007FFFFFu) bits |= 0x00400000u;
  return {uint16_t(bits >> 16)};
}
inline Half round_to(float x, uint32_t random, Half) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size >= 0x7F800000u) return {uint16_t(sign | 0x7C00u | (size > 0x7F800000u ? 0x200u : 0u))};
  if (size < 0x38800000u) {  // below 2^-14 the spacing is 2^-24
    float magnitude;
    std::memcpy(&magnitude, &size, 4);
    return {uint16_t(sign | uint16_t(magnitude * 0x1p24f + float(random & 0x1FFFu) * 0x1p-13f))};
  }
  const uint32_t rounded = (size + (random & 0x1FFFu)) >> 13;
  return {uint16_t(sign | (rounded > 0x23BFFu ? 0x7BFFu : rounded - 0x1C000u))};
}

template <class T>
inline void store_rounded(T* row, const float* values, int64_t dim, uint64_t key) {
  for (int64_t j = 0; j < dim; j += 4) {
    const uint64_t words = four_words(key, j / 4);
    for (int64_t k = 0; k < 4 && j + k < dim; ++k) row[j + k] = round_to(values[j + k], uint32_t(words >> (16 * k)), T{});
  }
}

// Which slab a slot lies in and its place there; see Table::slab_log2.
inline int slab_of(int64_t slab_log2, int64_t slot, int64_t& place) {
  if (slab_log2 < 0) {
    place = slot;
    return 0;
  }
  const int64_t shifted = slot + (int64_t(1) << slab_log2);
  const int top = 63 - __builtin_clzll(uint64_t(shifted));
  place = shifted - (int64_t(1) << top);
  return top - int(slab_log2);
}

template <class T>
inline T* row_at(const Table& table, int64_t slot) {
  int64_t place;
  const int slab = slab_of(table.slab_log2, slot, place);
  return static_cast<T*>(table.weights[slab]) + place * table.dim;
}

inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(p) + b, 0, 3);
  // Without this, gcc takes a function that only prefetches for one without effect and drops the calls to it.
  asm volatile("");
}

}  // namespace unequal
