// The hash directory of tables with unbounded ids: id → slot, open addressing, no collisions between ids. It holds, beside
// live ids, the ids that were seen too rarely so far to get a row (admission).
#include "directory.h"

namespace unequal {
namespace {

constexpr int64_t kMissing = -1;

}  // namespace
}  // namespace unequal

// slots[i] ← the slot of ids[i], or `otherwise` where it has none. Returns how many had none.
UNEQUAL_API int64_t uq_hash_find(const void* directory, int64_t capacity, const int64_t* ids, int64_t count,
                                 int64_t otherwise, int64_t* slots, int threads) {
  using namespace unequal;
  Entry* entries = static_cast<Entry*>(const_cast<void*>(directory));
  const uint64_t mask = uint64_t(capacity) - 1;
  int64_t missing = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : missing)
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(entries + home(ids[i + kAhead], mask));
    const Entry* entry = probe(entries, mask, ids[i]);
    slots[i] = entry->slot >= 0 ? entry->slot : otherwise;
    missing += entry->slot < 0;
  }
  return missing;
}

// Takes slots as uq_hash_find left them, -1 for the ids without one, and resolves those too, admitting what has now been seen
// `admit_after` times; rarer ones resolve to `rare`. New slots are given out from `next_slot` in the order in which ids appear;
// the ids that got them are written to `admitted`.
// used: entries in use, raised by the ids met for the first time. The caller sees to it that there is room for all ids.
// Returns the number of ids admitted.
UNEQUAL_API int64_t uq_hash_insert(void* directory, int64_t capacity, const int64_t* ids, int64_t count, int64_t next_slot,
                                   int64_t admit_after, int64_t rare, int64_t* slots, int64_t* admitted, int64_t* used) {
  using namespace unequal;
  Entry* entries = static_cast<Entry*>(directory);
  const uint64_t mask = uint64_t(capacity) - 1;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] != kMissing) continue;
    Entry* entry = probe(entries, mask, ids[i]);
    if (entry->slot == kEmpty) {
      entry->id = ids[i];
      ++*used;
    }
    if (-1 - int64_t(entry->slot) < admit_after) --entry->slot;
  }
  int64_t fresh = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] != kMissing) continue;
    Entry* entry = probe(entries, mask, ids[i]);
    if (entry->slot < 0 && -1 - int64_t(entry->slot) >= admit_after) {
      entry->slot = int32_t(next_slot + fresh);
      admitted[fresh++] = ids[i];
    }
    slots[i] = entry->slot >= 0 ? entry->slot : rare;
  }
  return fresh;
}

// Moves every entry into a larger, empty directory.
UNEQUAL_API void uq_hash_rehash(const void* from, int64_t from_capacity, void* to, int64_t to_capacity) {
  using namespace unequal;
  const Entry* source = static_cast<const Entry*>(from);
  Entry* target = static_cast<Entry*>(to);
  const uint64_t mask = uint64_t(to_capacity) - 1;
  for (int64_t i = 0; i < from_capacity; ++i)
    if (source[i].slot != kEmpty) *probe(target, mask, source[i].id) = source[i];
}

// Puts (id, slot) pairs as they are, negative slots (counts of ids not admitted) included.
UNEQUAL_API void uq_hash_put(void* directory, int64_t capacity, const int64_t* ids, const int64_t* slots, int64_t count) {
  using namespace unequal;
  Entry* entries = static_cast<Entry*>(directory);
  for (int64_t i = 0; i < count; ++i) {
    Entry* entry = probe(entries, uint64_t(capacity) - 1, ids[i]);
    entry->id = ids[i];
    entry->slot = int32_t(slots[i]);
  }
}

// Lists all entries in use: their ids and slots. Returns how many there are.
UNEQUAL_API int64_t uq_hash_entries(const void* directory, int64_t capacity, int64_t* ids, int64_t* slots) {
  using namespace unequal;
  const Entry* entries = static_cast<const Entry*>(directory);
  int64_t n = 0;
  for (int64_t i = 0; i < capacity; ++i)
    if (entries[i].slot != kEmpty) {
      ids[n] = entries[i].id;
      slots[n++] = entries[i].slot;
    }
  return n;
}
