// Rows of different width as they travel between ranks: of each its live values alone. kernels/reference/pack.py says what a message
// is made of.
#include <algorithm>
#include <new>
#include <vector>

#include "narrow.h"

namespace unequal {
namespace {

enum Codec : int64_t { kWire32 = 0, kWireHalf = 1, kWireBFloat = 2, kWire8 = 3 };
constexpr int64_t kScale = 4, kBlock = 512;
constexpr float kLargestHalf = 65504.0f;

// Rows of one table that lie one after the other. Mirrored in kernels/cpu/pack.py.
struct Run {
  int64_t rows, width, chunk;
};

// Some rows of a run, and where they begin: among all rows, among the values of all rows at full width, in the message.
struct Block {
  const Run* run;
  int64_t rows, row, value, byte;
};

// Which chunks rows have: how many of the first ones, or a bit for each.
struct Live {
  const uint8_t* numbers;
  const uint64_t* masks;
  int64_t chunks(int64_t row) const { return masks ? __builtin_popcountll(masks[row]) : numbers[row]; }
  // Calls visit(place among the live values, column, values), in order.
  template <class Visit>
  void each(int64_t row, int64_t chunk, Visit&& visit) const {
    if (!masks) {
      if (numbers[row]) visit(int64_t(0), int64_t(0), numbers[row] * chunk);
      return;
    }
    int64_t place = 0;
    for (uint64_t mask = masks[row]; mask; mask &= mask - 1, place += chunk)
      visit(place, int64_t(__builtin_ctzll(mask)) * chunk, chunk);
  }
};

struct Wire {
  int64_t codec;
  bool norms;
  int64_t item() const { return codec == kWire32 ? 4 : codec == kWire8 ? 1 : 2; }
  int64_t norm() const { return codec == kWire32 ? 4 : 2; }
  int64_t bytes(int64_t chunks, const Run& run) const {
    const int64_t own = chunks ? chunks * run.chunk * item() + (codec == kWire8 ? kScale : 0) : 0;
    return own + (norms && chunks * run.chunk < run.width ? norm() : 0);
  }
};

// Cuts runs into blocks that threads can take, and finds where each begins.
std::vector<Block> blocks_of(const Run* runs, int64_t count, const Live& live, const Wire& wire) {
  std::vector<Block> blocks;
  int64_t row = 0, value = 0, byte = 0;
  for (int64_t r = 0; r < count; ++r)
    for (int64_t done = 0; done < runs[r].rows; done += kBlock) {
      const int64_t rows = std::min(kBlock, runs[r].rows - done);
      blocks.push_back({runs + r, rows, row, value, byte});
      for (int64_t i = row; i < row + rows; ++i) byte += wire.bytes(live.chunks(i), runs[r]);
      row += rows;
      value += rows * runs[r].width;
    }
  return blocks;
}

inline BFloat nearest(float x, BFloat) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {uint16_t((bits >> 16) | 0x40u)};
  return {uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16)};
}
inline Half nearest(float x, Half) {
  x = x > kLargestHalf ? kLargestHalf : x < -kLargestHalf ? -kLargestHalf : x;
#if defined(__F16C__)
  return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return {uint16_t(sign | 0x7E00u)};
  if (size < 0x38800000u) {  // below 2^-14 the spacing is 2^-24
    float magnitude;
    std::memcpy(&magnitude, &size, 4);
    return {uint16_t(sign | uint16_t(std::nearbyint(magnitude * 0x1p24f)))};
  }
  return {uint16_t(sign | uint16_t(((size + 0xFFFu + ((size >> 13) & 1)) >> 13) - 0x1C000u))};
#endif
}

template <class T>
inline void put(char* out, const float* values, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(out, values, size_t(count) * 4);
  } else {
    int64_t j = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Half>)
      for (const __m256 most = _mm256_set1_ps(kLargestHalf), least = _mm256_set1_ps(-kLargestHalf); j + 8 <= count; j += 8) {
        // The second operand is what comes out where one is not a number.
        const __m256 x = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_loadu_ps(values + j)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * j), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
      }
#endif
    for (; j < count; ++j) {
      const T rounded = nearest(values[j], T{});
      std::memcpy(out + 2 * j, &rounded, 2);
    }
  }
}

template <class T>
inline void take(float* values, const char* in, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(values, in, size_t(count) * 4);
  } else {
    int64_t j = 0;
#if defined(__F16C__)
    if constexpr (std::is_same_v<T, Half>)
      for (; j + 8 <= count; j += 8)
        _mm256_storeu_ps(values + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * j))));
#endif
    for (; j < count; ++j) {
      T one;
      std::memcpy(&one, in + 2 * j, 2);
      values[j] = to_float(one);
    }
  }
}

// The largest size of some values, or NaN where one is not a number.
inline float largest(const float* values, int64_t count, float so_far) {
  for (int64_t j = 0; j < count; ++j) {
    const float size = std::fabs(values[j]);
    so_far = size <= so_far || so_far != so_far ? so_far : size;
  }
  return so_far;
}

inline void put_steps(char* out, const float* values, int64_t count, float scale) {
  const bool finite = scale > 0 && scale <= 3.4028235e38f;  // otherwise the scale alone says that something is wrong
  for (int64_t j = 0; j < count; ++j) {
    const float step = finite ? std::nearbyint(values[j] / scale) : 0.0f;
    out[j] = char(int8_t(step > 127.0f ? 127.0f : step < -127.0f ? -127.0f : step));
  }
}

// In double precision, so that a norm that is folded again stays what it is, however small.
inline float norm_of(const float* values, int64_t count) {
  double sums[8] = {};
  int64_t j = 0;
  for (; j + 8 <= count; j += 8)
    for (int k = 0; k < 8; ++k) sums[k] += double(values[j + k]) * double(values[j + k]);
  for (int k = 0; j < count; ++j, ++k) sums[k] += double(values[j]) * double(values[j]);
  return float(std::sqrt(((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))));
}

template <class T>
void pack_block(const Block& block, const float* rows, const Live& live, const Wire& wire, char* message) {
  const Run& run = *block.run;
  const float* row = rows + block.value;
  char* out = message + block.byte;
  for (int64_t i = block.row; i < block.row + block.rows; ++i, row += run.width) {
    const int64_t width = live.chunks(i) * run.chunk;
    if constexpr (std::is_same_v<T, int8_t>) {
      if (width) {
        float scale = 0;
        live.each(i, run.chunk, [&](int64_t, int64_t column, int64_t n) { scale = largest(row + column, n, scale); });
        scale /= 127;
        std::memcpy(out, &scale, 4);
        out += kScale;
        live.each(i, run.chunk, [&](int64_t place, int64_t column, int64_t n) {
          put_steps(out + place, row + column, n, scale);
        });
        out += width;
      }
    } else {
      live.each(i, run.chunk, [&](int64_t place, int64_t column, int64_t n) {
        put<T>(out + place * int64_t(sizeof(T)), row + column, n);
      });
      out += width * int64_t(sizeof(T));
    }
    if (wire.norms && width < run.width) {
      const float norm = norm_of(row + width, run.width - width);
      if (wire.codec == kWire32) put<float>(out, &norm, 1);
      else put<BFloat>(out, &norm, 1);
      out += wire.norm();
    }
  }
}

template <class T>
void unpack_block(const Block& block, const char* message, const Live& live, const Wire& wire, float* rows) {
  const Run& run = *block.run;
  float* row = rows + block.value;
  const char* in = message + block.byte;
  for (int64_t i = block.row; i < block.row + block.rows; ++i, row += run.width) {
    const int64_t width = live.chunks(i) * run.chunk;
    if (live.masks) std::memset(row, 0, size_t(run.width) * 4);
    else std::memset(row + width, 0, size_t(run.width - width) * 4);
    if constexpr (std::is_same_v<T, int8_t>) {
      if (width) {
        float scale;
        std::memcpy(&scale, in, 4);
        in += kScale;
        live.each(i, run.chunk, [&](int64_t place, int64_t column, int64_t n) {
          for (int64_t j = 0; j < n; ++j) row[column + j] = float(int8_t(in[place + j])) * scale;
        });
        in += width;
      }
    } else {
      live.each(i, run.chunk, [&](int64_t place, int64_t column, int64_t n) {
        take<T>(row + column, in + place * int64_t(sizeof(T)), n);
      });
      in += width * int64_t(sizeof(T));
    }
    if (wire.norms && width < run.width) {
      if (wire.codec == kWire32) take<float>(row + width, in, 1);
      else take<BFloat>(row + width, in, 1);
      in += wire.norm();
    }
  }
}

template <class Body>
void by_codec(int64_t codec, Body&& body) {
  switch (codec) {
    case kWire32: return body(float{});
    case kWireHalf: return body(Half{});
    case kWireBFloat: return body(BFloat{});
    default: return body(int8_t{});
  }
}

// Calls work(a value of the codec's type, block) for all blocks. Returns -1 without memory.
template <class Work>
int over_blocks(const Run* runs, int64_t count, const Live& live, const Wire& wire, int threads, Work&& work) try {
  const std::vector<Block> blocks = blocks_of(runs, count, live, wire);
  by_codec(wire.codec, [&](auto kind) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (size_t b = 0; b < blocks.size(); ++b) work(kind, blocks[b]);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

}  // namespace
}  // namespace unequal

// Elements of the wire's dtype that each run takes. One of `numbers` and `masks` is null, here and below.
UNEQUAL_API void uq_packed_sizes(const uint8_t* numbers, const uint64_t* masks, const unequal::Run* runs, int64_t count,
                                 int64_t codec, int norms, int64_t* sizes) {
  using namespace unequal;
  const Live live{numbers, masks};
  const Wire wire{codec, norms != 0};
  for (int64_t r = 0, row = 0; r < count; ++r) {
    int64_t bytes = 0;
    for (const int64_t end = row + runs[r].rows; row < end; ++row) bytes += wire.bytes(live.chunks(row), runs[r]);
    sizes[r] = bytes / wire.item();
  }
}

// Rows at full width into a message of that size. Returns -1 without memory.
UNEQUAL_API int uq_pack(const float* rows, const uint8_t* numbers, const uint64_t* masks, const unequal::Run* runs, int64_t count,
                        int64_t codec, int norms, char* message, int threads) {
  using namespace unequal;
  const Live live{numbers, masks};
  const Wire wire{codec, norms != 0};
  return over_blocks(runs, count, live, wire, threads, [&](auto kind, const Block& block) {
    pack_block<decltype(kind)>(block, rows, live, wire, message);
  });
}

// And back.
UNEQUAL_API int uq_unpack(const char* message, const uint8_t* numbers, const uint64_t* masks, const unequal::Run* runs,
                          int64_t count, int64_t codec, int norms, float* rows, int threads) {
  using namespace unequal;
  const Live live{numbers, masks};
  const Wire wire{codec, norms != 0};
  return over_blocks(runs, count, live, wire, threads, [&](auto kind, const Block& block) {
    unpack_block<decltype(kind)>(block, message, live, wire, rows);
  });
}

// Bits of the chunks of each row that are not all zero.
UNEQUAL_API void uq_used_chunks(const float* rows, const unequal::Run* runs, int64_t count, uint64_t* masks) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t i = 0; i < runs[r].rows; ++i) {
      uint64_t mask = 0;
      for (int64_t k = 0; k < runs[r].width / runs[r].chunk; ++k) {
        bool used = false;
        for (int64_t j = 0; j < runs[r].chunk; ++j) used |= *rows++ != 0.0f;
        mask |= uint64_t(used) << k;
      }
      *masks++ = mask;
    }
}

// Values at full width into the records of slots that are not negative; of those that a record has. `masks` (null: the first ones):
// which chunks these are. Nothing else in the records is kept.
UNEQUAL_API void uq_write_rows(const unequal::Table* table, const int64_t* slots, int64_t count, const float* values,
                               const uint64_t* masks) {
  using namespace unequal;
  const Table& t = *table;
  for (int64_t i = 0; i < count; ++i, values += t.dim) {
    if (slots[i] < 0) continue;
    const NarrowRow row = narrow_row(t, slots[i]);
    std::memset(row.record, 0, size_t(row.layout->words) * 4);
    if (masks) row.set_mask(masks[i]);
    each_chunk(t, row, [&](int64_t place, int64_t column, int64_t n) {
      char* out = reinterpret_cast<char*>(row.record) + place * (t.dtype == kFloat32 ? 4 : 2);
      if (t.dtype == kFloat32) put<float>(out, values + column, n);
      else if (t.dtype == kFloat16) put<Half>(out, values + column, n);
      else put<BFloat>(out, values + column, n);
    });
  }
}
