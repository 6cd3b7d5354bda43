// What every CPU kernel shares: the export macro, the counter-based generator, the descriptors Python fills in.
#pragma once
#include <cstdint>
#include <vector>

#define UNEQUAL_API extern "C" __attribute__((visibility("default")))

namespace unequal {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// A bijection of 64-bit words whose every output bit depends on every input bit (the finaliser of splitmix64).
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  x ^= x >> 31;
  return x;
}

enum DType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum Pooling : int64_t { kNone = 0, kSum = 1, kMean = 2 };

// How a row of one width lies in memory, in words of 4 bytes: first its values, then these.
struct Record {
  int64_t width;             // values
  int64_t state[2];          // where they begin
  int64_t utility;
  int64_t mask;
  int64_t words;             // of the whole
};

// Table, FeatureSpec, Request and Record hold 8-byte fields only and are mirrored in kernels/cpu/describe.py.
struct Table {
  void* const* weights;      // one pointer per slab
  float* const* state[2];    // likewise, or null
  int64_t slab_log2;         // -1: one slab holds all rows; else slab k holds 2^(slab_log2 + k) rows
  int64_t rows;              // slots are in [0, rows)
  int64_t dim;
  int64_t dtype;
  int64_t optimizer;
  int64_t strict;            // whether slots are the ids themselves, and those outside [0, rows) are wrong
  double lr, decay, beta1, beta2, eps, trust;
  uint64_t key;              // seed of the table

  // Tables whose rows differ in width: see narrow.h. All 0 for others.
  int64_t chunk;             // values
  int64_t class_bits;
  int64_t class_slabs;       // pointers in `weights` for each class
  const Record* records;     // [classes]
  int64_t utilities;         // numbers that are followed for each row: 1, or one per chunk
  int64_t utility_kind;
  int64_t masked;
  double gain;

  // What the update puts in for its step; lr is then multiplied by the step's factor.
  double correction1, correction2;
  uint64_t rounding_key;
};

struct FeatureSpec {
  int64_t table;
  int64_t pooling;
  int64_t place;             // pooled: its first column; otherwise its number among the sequences
};

struct Sequence {
  float* values;             // null: not given
  int64_t stride;
};

// One step's lookups. `pooled` and `sequences` are outputs of lookup, gradients of update.
struct Request {
  const int64_t* index;      // [features]: place of each in the batch
  int64_t size;              // samples
  const int64_t* ids;
  const int64_t* slots;      // like ids, read for tables that are not strict
  const int64_t* offsets;    // of the whole batch
  const float* weights;      // like ids, or null
  float* pooled;             // [size, stride], or null: not given
  int64_t pooled_stride;
  const Sequence* sequences;
};

// A feature's part of a request.
struct Feature {
  int64_t table;
  int64_t pooling;
  int64_t count;             // ids
  int64_t bags;              // samples
  const int64_t* slots;      // [count]; -1 reads as zeros and is never updated
  const int64_t* offsets;    // [bags + 1], counted from offsets[0]
  const float* weights;      // [count] or null
  float* values;             // pooled: [bags, stride]; otherwise [count, stride]; output of lookup, gradient of update
  int64_t stride;
};

// The features whose output or gradient is given.
inline std::vector<Feature> features_of(const Table* tables, const FeatureSpec* specs, int64_t count, const Request& request) {
  std::vector<Feature> features;
  for (int64_t f = 0; f < count; ++f) {
    const FeatureSpec& spec = specs[f];
    const Sequence values = spec.pooling == kNone ? request.sequences[spec.place]
                            : request.pooled     ? Sequence{request.pooled + spec.place, request.pooled_stride}
                                                 : Sequence{nullptr, 0};
    if (!values.values) continue;
    const int64_t* offsets = request.offsets + request.index[f] * request.size;
    features.push_back({spec.table, spec.pooling, offsets[request.size] - offsets[0], request.size,
                        (tables[spec.table].strict ? request.ids : request.slots) + offsets[0], offsets,
                        request.weights ? request.weights + offsets[0] : nullptr, values.values, values.stride});
  }
  return features;
}

}  // namespace unequal
