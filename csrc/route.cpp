// Which rank answers for an id: rows that are copied to every rank or to every node lie nearer than their owner.
#include <algorithm>
#include <new>
#include <numeric>
#include <vector>

#include "directory.h"
#include "ids.h"

namespace unequal {
namespace {

struct Dealer {
  uint64_t parts;
  bool hashed;
  // Dense ids in turn, others by their mixed bits.
  int64_t operator()(int64_t id) const {
    const uint64_t number = hashed ? mix64(uint64_t(id)) & ~(uint64_t(1) << 63) : uint64_t(id);
    if (!(parts & (parts - 1))) return int64_t(number & (parts - 1));
    // A division of 32 bits takes a fraction of the time.
    return number >> 32 ? int64_t(number % parts) : int64_t(uint32_t(number) % uint32_t(parts));
  }
};

// A piece of a table and its distinct ids. All fields have 8 bytes; filled in by kernels/cpu/dealing.py.
struct Piece {
  const int64_t* ids;
  int64_t count;
  int64_t parts, divisor;
  int64_t places;            // 0: the ids go to all ranks; 1: to targets[0]
  const int64_t* targets;    // [places]: the rank for part / divisor % places
  int64_t hashed;
  int64_t group;             // pieces whose rows lie in one matrix; -1: no row of it travels
  int64_t bytes;             // of an id in the message
};

}  // namespace
}  // namespace unequal

// Sorts ids by tier and, within it, by the rank that answers, keeping the order of those that have both in common.
// An id that the directory (null: none) knows by a number below cuts[0] is in the first tier, below cuts[1] in the second, and so
// on; all others are in the last. Its place is part_of(id) / divisor % places. order[k]: the position of the k-th;
// sizes: [cuts + 1, places]; numbers: what the directory gave for every id, -1 where it knows none. Returns -1 without memory.
UNEQUAL_API int uq_route(const int64_t* ids, int64_t count, const void* directory, int64_t capacity, const int64_t* cuts,
                         int64_t cut_count, int64_t parts, int64_t divisor, int64_t places, int hashed, int64_t* order,
                         int64_t* sizes, int64_t* numbers) try {
  using namespace unequal;
  const Dealer part_of{uint64_t(parts), hashed != 0};
  Entry* entries = static_cast<Entry*>(const_cast<void*>(directory));
  const uint64_t mask = uint64_t(capacity) - 1;
  std::vector<int32_t> group(static_cast<size_t>(count));
  std::fill(sizes, sizes + (cut_count + 1) * places, 0);
  for (int64_t i = 0; i < count; ++i) {
    int64_t tier = cut_count, number = -1;
    if (entries) {
      if (i + kAhead < count) __builtin_prefetch(entries + home(ids[i + kAhead], mask));
      const Entry* entry = probe(entries, mask, ids[i]);
      if (entry->slot >= 0) number = entry->slot;
    }
    numbers[i] = number;
    for (int64_t c = cut_count - 1; c >= 0 && number >= 0 && number < cuts[c]; --c) tier = c;
    const int64_t at = tier * places + part_of(ids[i]) / divisor % places;
    group[size_t(i)] = int32_t(at);
    ++sizes[at];
  }
  std::vector<int64_t> next(size_t((cut_count + 1) * places), 0);
  for (size_t g = 1; g < next.size(); ++g) next[g] = next[g - 1] + sizes[g - 1];
  for (int64_t i = 0; i < count; ++i) order[next[size_t(group[size_t(i)])]++] = i;
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// Ids of bags dealt out: the ids themselves, part by part, and of each part the lengths of its share of every bag, [parts, bags].
UNEQUAL_API void uq_deal_bags(const int64_t* ids, const int64_t* lengths, int64_t bags, int64_t parts, int hashed,
                              int64_t* dealt, int64_t* dealt_lengths, int64_t* sizes) {
  const unequal::Dealer part_of{uint64_t(parts), hashed != 0};
  std::fill(dealt_lengths, dealt_lengths + parts * bags, 0);
  const int64_t* id = ids;
  for (int64_t b = 0; b < bags; ++b)
    for (int64_t i = 0; i < lengths[b]; ++i) ++dealt_lengths[part_of(*id++) * bags + b];
  std::vector<int64_t> next(size_t(parts), 0);
  int64_t total = 0;
  for (int64_t p = 0; p < parts; ++p) {
    next[size_t(p)] = total;
    sizes[p] = 0;
    for (int64_t b = 0; b < bags; ++b) sizes[p] += dealt_lengths[p * bags + b];
    total += sizes[p];
  }
  for (int64_t i = 0; i < total; ++i) dealt[next[size_t(part_of(ids[i]))]++] = ids[i];
}

// A step's message: the ids of all pieces, by the rank they go to, then by piece in the given order, each in the bytes of its
// piece. sent: [ranks, pieces] how many each has; first: [ranks, pieces] where their rows will begin in the matrix of their group;
// places: piece after piece, where the row of each id will lie there, or for ids that go to all, its number. Returns -1 without
// memory.
UNEQUAL_API int uq_deal_rows(const void* described, int64_t count, const int64_t* order, int64_t ranks, int64_t groups,
                             int64_t* sent, int64_t* first, uint8_t* message, int64_t* places) try {
  using namespace unequal;
  const Piece* pieces = static_cast<const Piece*>(described);
  std::fill(sent, sent + ranks * count, 0);
  std::fill(first, first + ranks * count, 0);
  int64_t spread = 0;
  for (int64_t p = 0; p < count; ++p) spread += pieces[p].places > 1 ? pieces[p].count : 0;
  std::vector<int32_t> targets(static_cast<size_t>(spread));
  int32_t* target = targets.data();
  std::vector<int64_t> counted(static_cast<size_t>(ranks));
  for (int64_t p = 0; p < count; ++p) {
    const Piece& piece = pieces[p];
    if (!piece.count) continue;
    if (piece.places <= 1) {
      for (int64_t k = 0; k < ranks; ++k)
        if (!piece.places || k == piece.targets[0]) sent[k * count + p] = piece.count;
      continue;
    }
    std::fill(counted.begin(), counted.end(), 0);
    const Dealer part_of{uint64_t(piece.parts), piece.hashed != 0};
    const bool plain = piece.divisor == 1 && piece.places == piece.parts;
    for (int64_t i = 0; i < piece.count; ++i) {
      const int64_t part = part_of(piece.ids[i]);
      const int64_t k = piece.targets[plain ? part : part / piece.divisor % piece.places];
      *target++ = int32_t(k);
      ++counted[size_t(k)];
    }
    for (int64_t k = 0; k < ranks; ++k) sent[k * count + p] = counted[size_t(k)];
  }

  std::vector<int64_t> at(static_cast<size_t>(ranks * count)), next(static_cast<size_t>(groups));
  int64_t total = 0;
  for (int64_t k = 0; k < ranks; ++k)
    for (int64_t o = 0; o < count; ++o) {
      const int64_t b = k * count + order[o], group = pieces[order[o]].group;
      at[size_t(b)] = total;
      total += sent[b] * pieces[order[o]].bytes;
      if (!sent[b] || group < 0) continue;
      first[b] = next[size_t(group)];
      next[size_t(group)] += sent[b];
    }

  target = targets.data();
  std::vector<uint8_t*> out(static_cast<size_t>(ranks));
  std::vector<int64_t> row(static_cast<size_t>(ranks));
  for (int64_t p = 0; p < count; ++p) {
    const Piece& piece = pieces[p];
    with_bytes(piece.bytes, [&](auto bytes) {
      constexpr int B = decltype(bytes)::value;
      for (int64_t k = 0; k < ranks; ++k) {
        out[size_t(k)] = message + at[size_t(k * count + p)];
        row[size_t(k)] = first[k * count + p];
      }
      if (piece.places <= 1) {
        for (int64_t k = 0; k < ranks; ++k)
          for (int64_t i = 0; i < sent[k * count + p]; ++i) put_id<B>(out[size_t(k)] + i * B, piece.ids[i]);
        std::iota(places, places + piece.count, piece.places && piece.count ? row[size_t(piece.targets[0])] : 0);
        places += piece.count;
        return;
      }
      for (int64_t i = 0; i < piece.count; ++i) {
        const size_t k = size_t(*target++);
        put_id<B>(out[k], piece.ids[i]);
        out[k] += B;
        *places++ = row[k]++;
      }
    });
  }
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// Of every lookup the place of its row. spans: [count, 3]: where a feature's lookups begin and end, and the address of its places,
// which its numbers (like the lookups) index; 0: they are the places themselves.
UNEQUAL_API void uq_follow_places(const int64_t* numbers, const int64_t* spans, int64_t count, int64_t* out) {
  for (const int64_t* span = spans; span < spans + 3 * count; span += 3) {
    const int64_t* places = reinterpret_cast<const int64_t*>(span[2]);
    for (int64_t i = span[0]; i < span[1]; ++i) out[i] = places ? places[numbers[i]] : numbers[i];
  }
}
