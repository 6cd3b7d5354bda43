// Tables whose rows differ in width, in a step: the directory of live rows, and the candidates that are followed without a row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "narrow_directory.h"

namespace unequal {
namespace {

constexpr int64_t kFindAhead = 16;
constexpr int64_t kBlock = 4096;   // ids that a thread takes at a time
constexpr int64_t kTogether = 64;  // ids whose homes are brought near before the first is looked up

// Which of at most 64 slots are -1, as bits: most ids have a row.
inline uint64_t without_row(const int64_t* slots, int64_t count) {
  uint64_t bits = 0;
  int64_t i = 0;
#if defined(__AVX512DQ__)
  for (; i + 8 <= count; i += 8) bits |= uint64_t(_mm512_movepi64_mask(_mm512_loadu_si512(slots + i))) << i;
#endif
  for (; i < count; ++i) bits |= uint64_t(slots[i] < 0) << i;
  return bits;
}

// An id without a row.
struct Missing {
  int64_t id;
  int64_t place;  // among the ids
};

// slots[i] ← the slot of ids[i], or -1. Returns how many have none, and lists them where `missing` is given. While some ids are
// looked up, the homes of the next ones come near. Those that their home does not tell are looked up once more, when what lies
// behind it has come near, too: so no branch depends on which ids have a row.
template <class Directory>
int64_t find_all(const Directory& directory, const int64_t* ids, int64_t count, int64_t* slots, Missing* missing) {
  int64_t found = 0;
  uint64_t homes[3][kTogether], *before = homes[0], *now = homes[1], *next = homes[2];
  uint64_t unsure_before = 0;  // as bits
  const auto prepare = [&](uint64_t* homes, int64_t first) {
    const int64_t n = std::min(kTogether, count - first);
    for (int64_t i = 0; i < n; ++i) homes[i] = directory.home(ids[first + i]);  // alone, so that it is done in vectors
  };
  const auto settle = [&](int64_t first) {
    for (; unsure_before; unsure_before &= unsure_before - 1) {
      const int64_t i = __builtin_ctzll(unsure_before), slot = directory.find(ids[first + i], directory.behind(before[i]));
      slots[first + i] = slot;
    }
  };
  const auto list = [&](int64_t first) {  // what is settled
    uint64_t left = without_row(slots + first, std::min(kTogether, count - first));
    if (!missing) found += __builtin_popcountll(left);
    else
      for (; left; left &= left - 1) {
        const int64_t i = first + __builtin_ctzll(left);
        missing[found++] = {ids[i], i};
      }
  };
  prepare(now, 0);
  for (int64_t i = 0; i < std::min(kTogether, count); ++i) directory.bring(now[i]);
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t n = std::min(kTogether, count - first), more = std::min(kTogether, count - first - n);
    if (more > 0) prepare(next, first + n);
    uint64_t unsure = 0;
    for (int64_t i = 0; i < more; ++i) directory.bring(next[i]);
    for (int64_t i = 0; i < n; ++i) {
      int64_t slot = -1;
      const bool sure = directory.look(ids[first + i], now[i], slot);
      slots[first + i] = slot;
      unsure |= uint64_t(!sure) << i;
    }
    for (uint64_t left = unsure; left; left &= left - 1) directory.bring(directory.behind(now[__builtin_ctzll(left)]));
    if (first) {
      settle(first - kTogether);
      list(first - kTogether);
    }
    unsure_before = unsure;
    std::swap(before, now);
    std::swap(now, next);
  }
  if (count) {
    settle((count - 1) / kTogether * kTogether);
    list((count - 1) / kTogether * kTogether);
  }
  return found;
}

// Candidates of a table.
struct Followed {
  int64_t* keys;
  float* utilities;
  int32_t* stamps;
  int64_t buckets, each;

  // Which of the bucket's candidates it is, or -1.
  int64_t find(int64_t bucket, int64_t id) const {
    const int64_t first = bucket * kWays;
#if defined(__AVX512F__)
    for (uint32_t same = _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(keys + first), _mm512_set1_epi64(id)); same; same &= same - 1)
      if (utilities[(first + __builtin_ctz(same)) * each] >= 0) return first + __builtin_ctz(same);
#else
    for (int64_t k = first; k < first + kWays; ++k)
      if (keys[k] == id && utilities[k * each] >= 0) return k;
#endif
    return -1;
  }
};

// Which of a bucket's candidates makes room: the least useful one that was not read now, or -1.
inline int64_t least_useful(const Followed& followed, int64_t bucket, int32_t step) {
  const int64_t first = bucket * kWays;
#if defined(__AVX512VL__) && defined(__AVX512DQ__)
  const __m256 all = followed.each == 1 ? _mm256_loadu_ps(followed.utilities + first) : _mm256_set1_ps(NAN);
  if (!_mm256_cmp_ps_mask(all, all, _CMP_UNORD_Q)) {  // what has diverged goes by the order of its comparisons
    const __m256i stamps = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(followed.stamps + first));
    const uint32_t free = _mm256_cmpneq_epi32_mask(stamps, _mm256_set1_epi32(step));
    __m256 least = _mm256_mask_mov_ps(_mm256_set1_ps(INFINITY), uint8_t(free), all);
    least = _mm256_min_ps(least, _mm256_permute2f128_ps(least, least, 1));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0x4E));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0xB1));
    const uint32_t same = _mm256_cmp_ps_mask(all, least, _CMP_EQ_OQ) & free;
    return same ? first + __builtin_ctz(same) : -1;
  }
#endif
  float least = 0;
  int64_t way = -1;
  for (int64_t k = first; k < first + kWays; ++k) {
    float utility = 0;
    for (int64_t u = 0; u < followed.each; ++u) utility += followed.utilities[k * followed.each + u];
    const bool takes = (followed.stamps[k] != step) & ((way < 0) | (utility < least));
    way = takes ? k : way;
    least = takes ? utility : least;
  }
  return way;
}

// Follows ids that have no row (slot -1) and gives them the slot of their candidate. Buckets have kWays candidates; in one step
// each takes up at most one newcomer, the smallest id, in place of its least useful candidate that was not read now.
// `missing`: the ids; it is used up.
void follow(const Followed& followed, int32_t step, int64_t class_bits, std::vector<Missing>& missing, int64_t* slots) {
  // Kept between steps: of each bucket the newcomer's place among `newcomers`, or -1.
  struct Newcomer {
    int64_t bucket, id, way;
  };
  static thread_local std::vector<int32_t> newcomer_of;
  static thread_local std::vector<Newcomer> newcomers;
  static thread_local std::vector<int64_t> buckets;
  if (!newcomers.empty()) std::fill(newcomer_of.begin(), newcomer_of.end(), -1);  // memory was short the last time
  newcomers.clear();
  if (int64_t(newcomer_of.size()) < followed.buckets) newcomer_of.resize(size_t(followed.buckets), -1);
  if (buckets.size() < missing.size()) buckets.resize(missing.size());
  newcomers.resize(missing.size() + 1);
  size_t unknown = 0, new_count = 0;
  for (size_t m = 0; m < missing.size(); ++m) buckets[m] = int64_t(spread_over(missing[m].id, uint64_t(followed.buckets)));
  for (size_t m = 0; m < missing.size(); ++m) {
    if (m + kFindAhead < missing.size()) {
      const int64_t next = buckets[m + kFindAhead] * kWays;
      __builtin_prefetch(followed.keys + next);
      __builtin_prefetch(followed.utilities + next * followed.each);
      __builtin_prefetch(followed.stamps + next);
    }
    const Missing now = missing[m];
    const int64_t bucket = buckets[m], way = followed.find(bucket, now.id);
    if (way >= 0) {
      slots[now.place] = way << class_bits;
      followed.stamps[way] = step;
      continue;
    }
    missing[unknown] = now;
    buckets[unknown++] = bucket;
    // Whether it is the bucket's first one cannot be foretold.
    int32_t& newcomer = newcomer_of[size_t(bucket)];
    const bool first = newcomer < 0;
    const size_t n = first ? new_count : size_t(newcomer);
    newcomers[n] = {bucket, first ? now.id : std::min(newcomers[n].id, now.id), -1};
    newcomer = int32_t(n);
    new_count += first;
  }
  newcomers.resize(new_count);
  for (Newcomer& newcomer : newcomers) {
    newcomer.way = least_useful(followed, newcomer.bucket, step);
    if (newcomer.way < 0) continue;
    followed.keys[newcomer.way] = newcomer.id;
    followed.stamps[newcomer.way] = step;
    std::fill(followed.utilities + newcomer.way * followed.each, followed.utilities + (newcomer.way + 1) * followed.each, 0.0f);
  }
  for (size_t m = 0; m < unknown; ++m) {
    const Newcomer& newcomer = newcomers[size_t(newcomer_of[size_t(buckets[m])])];
    if (newcomer.id == missing[m].id && newcomer.way >= 0) slots[missing[m].place] = newcomer.way << class_bits;
  }
  for (const Newcomer& newcomer : newcomers) newcomer_of[size_t(newcomer.bucket)] = -1;
  newcomers.clear();
}

}  // namespace
}  // namespace unequal

// slots[i] ← the slot of ids[i], or -1. Returns how many have none.
UNEQUAL_API int64_t uq_narrow_find(int64_t kind, void* memory, int64_t capacity, const int64_t* ids, int64_t count,
                                   int64_t* slots, int threads) {
  using namespace unequal;
  int64_t missing = 0;
  by_kind(kind, memory, capacity, [&](auto directory) {
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : missing)
    for (int64_t first = 0; first < count; first += kBlock)
      missing += find_all(directory, ids + first, std::min(kBlock, count - first), slots + first, nullptr);
  });
  return missing;
}

// Puts (id, slot) pairs, but for slots of -1; the caller sees to it that there is room.
UNEQUAL_API void uq_narrow_put(int64_t kind, void* memory, int64_t capacity, const int64_t* ids, const int64_t* slots,
                               int64_t count) {
  using namespace unequal;
  by_kind(kind, memory, capacity, [&](auto directory) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kFindAhead < count) directory.bring(directory.home(ids[i + kFindAhead]));
      const int32_t slot = int32_t(slots[i]);
      if (slot < 0) continue;
      directory.put(ids[i], directory.home(ids[i]), slot);
    }
  });
}

// Lists what the directory holds, of which there is so much. Returns that. Without a branch: which entries are empty cannot be
// foretold, and what is written of those is written over by the next.
UNEQUAL_API int64_t uq_narrow_entries(int64_t kind, void* memory, int64_t capacity, int64_t used, int64_t* ids, int64_t* slots) {
  using namespace unequal;
  int64_t n = 0;
  const auto list = [&](auto&& entry) {
    for (int64_t k = 0; k < capacity && n < used; ++k) {
      const std::pair<int64_t, int64_t> id_and_slot = entry(k);
      ids[n] = id_and_slot.first;
      slots[n] = id_and_slot.second;
      n += id_and_slot.second >= 0;
    }
  };
  using One = std::pair<int64_t, int64_t>;
  if (kind == kByArray) list([&](int64_t k) { return One(k, static_cast<int32_t*>(memory)[k]); });
  else if ((kind & 255) == kFollowed) {
    const int64_t of = kind >> 32;
    const int32_t* words = static_cast<int32_t*>(memory);
    for (int64_t k = 0, id = kind >> 8 & 0xFFFFFF; k < capacity && n < used; ++k, id += of) {
      ids[n] = id;
      slots[n] = words[k] & INT32_MAX;
      n += words[k] < 0;
    }
  } else if (kind == kShortIds)
    list([&](int64_t k) {
      const NarrowEntry<uint32_t> entry = static_cast<NarrowEntry<uint32_t>*>(memory)[k];
      return One(entry.id, entry.slot);
    });
  else
    list([&](int64_t k) {
      const NarrowEntry<int64_t> entry = static_cast<NarrowEntry<int64_t>*>(memory)[k];
      return One(entry.id, entry.slot);
    });
  return n;
}

UNEQUAL_API void uq_narrow_buckets(const int64_t* ids, int64_t count, int64_t buckets, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = int64_t(unequal::spread_over(ids[i], uint64_t(buckets)));
}

// See `follow`. keys, stamps: [buckets · kWays]; utilities: likewise · `each`; a negative one: nobody. Returns 1 where memory was
// short.
UNEQUAL_API int uq_narrow_follow(int64_t* keys, float* utilities, int32_t* stamps, int64_t buckets, int64_t each, int32_t step,
                                 int64_t class_bits, const int64_t* ids, int64_t count, int64_t* slots) try {
  using namespace unequal;
  std::vector<Missing> missing;
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0) missing.push_back({ids[i], i});
  follow({keys, utilities, stamps, buckets, each}, step, class_bits, missing, slots);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Of all tables of a module at once. `Found` and `FoundIn` hold 8-byte fields only and are mirrored in kernels/cpu/narrow.py.
struct FoundIn {
  int64_t kind;
  void* memory;
  int64_t capacity;
  int64_t rows;      // ids are below it; -1: any are right
  int64_t first, last;  // its features
  int64_t* keys;
  float* utilities;
  int32_t* stamps;
  int64_t buckets;   // 0: every id has the candidate of its own number
  int64_t each, class_bits, step;
};
struct Found {
  int64_t table;
  int64_t first, count;  // of the ids
  int64_t missing;       // filled in: how many have no row
  int64_t wrong;         // the first that is no id of the table, or -1
};

// Finds the slots of all ids. Features of a table lie together. missing: room for an id and its place for each of them; those
// without a row are listed there, of every block where its ids begin, for uq_narrow_follow_all.
UNEQUAL_API void uq_narrow_find_all(const FoundIn* tables, Found* features, int64_t feature_count, const int64_t* ids,
                                    int64_t* slots, void* missing, int threads) {
  using namespace unequal;
  struct Block {
    int64_t feature, first, last;
  };
  Missing* listed = static_cast<Missing*>(missing);
  std::vector<Block> blocks;
  for (int64_t f = 0; f < feature_count; ++f) {
    features[f].missing = 0;
    features[f].wrong = -1;
    for (int64_t i = 0; i < features[f].count; i += kBlock)
      blocks.push_back({f, i, std::min(i + kBlock, features[f].count)});
  }
  std::vector<std::pair<int64_t, int64_t>> found(blocks.size());  // what is missing, the first wrong one
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); ++b) {
    const Found& feature = features[blocks[b].feature];
    const FoundIn& table = tables[feature.table];
    const int64_t first = feature.first + blocks[b].first, count = blocks[b].last - blocks[b].first;
    found[b] = {0, -1};
    if (table.rows >= 0) {
      uint64_t most = 0;  // negative ones are the largest
      for (int64_t i = 0; i < count; ++i) most = std::max(most, uint64_t(ids[first + i]));
      for (int64_t i = 0; most >= uint64_t(table.rows) && found[b].second < 0; ++i)
        if (uint64_t(ids[first + i]) >= uint64_t(table.rows)) found[b].second = blocks[b].first + i;
    }
    by_kind(table.kind, table.memory, table.capacity,
            [&](auto directory) { found[b].first = find_all(directory, ids + first, count, slots + first, listed + first); });
    if (found[b].first < count) listed[first + found[b].first].place = -1;  // the end of the list
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    Found& feature = features[blocks[b].feature];
    feature.missing += found[b].first;
    if (feature.wrong < 0) feature.wrong = found[b].second;
  }
}

// Follows the ids of all tables that have no row, as uq_narrow_find_all has listed them, but for those that were given one since.
// Returns 1 where memory was short.
UNEQUAL_API int uq_narrow_follow_all(const FoundIn* tables, int64_t table_count, const Found* features, const void* missing,
                                     int64_t* slots, int threads) {
  using namespace unequal;
  const Missing* listed = static_cast<const Missing*>(missing);
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(max : failed)
  for (int64_t t = 0; t < table_count; ++t) try {
      const FoundIn& table = tables[t];
      static thread_local std::vector<Missing> left;
      left.clear();
      for (int64_t f = table.first; f < table.last; ++f)
        for (int64_t i = 0; features[f].missing && i < features[f].count; i += kBlock) {
          const int64_t first = features[f].first + i;
          const Missing* end = listed + first + std::min(kBlock, features[f].count - i);
          for (const Missing* one = listed + first; one < end && one->place >= 0; ++one)
            if (slots[first + one->place] < 0) left.push_back({one->id, first + one->place});
        }
      if (table.buckets) {
        follow({table.keys, table.utilities, table.stamps, table.buckets, table.each}, int32_t(table.step), table.class_bits, left,
               slots);
      } else {
        for (const Missing& one : left) slots[one.place] = one.id << table.class_bits;  // no part of a table comes here
      }
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  return failed;
}
