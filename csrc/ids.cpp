// Messages of ids and back. Python's side is kernels/cpu/ids.py.
#include "common.h"
#include "ids.h"

// blocks: [count, 3]: where a block's ids lie, how many there are, and the bytes of one in the message.
UNEQUAL_API void uq_narrow_ids(const int64_t* blocks, int64_t count, uint8_t* message) {
  using namespace unequal;
  for (const int64_t* block = blocks; block < blocks + 3 * count; block += 3) {
    const int64_t* ids = reinterpret_cast<const int64_t*>(block[0]);
    const int64_t n = block[1];
    with_bytes(block[2], [&](auto bytes) {
      constexpr int B = decltype(bytes)::value;
      for (int64_t i = 0; i < n; ++i) put_id<B>(message + i * B, ids[i]);
      message += n * B;
    });
  }
}

// runs: [count, 2]: how many ids a block has, and the bytes of one.
UNEQUAL_API void uq_widen_ids(const uint8_t* message, const int64_t* runs, int64_t count, int64_t* ids) {
  using namespace unequal;
  for (const int64_t* run = runs; run < runs + 2 * count; run += 2) {
    const int64_t n = run[0];
    with_bytes(run[1], [&](auto bytes) {
      constexpr int B = decltype(bytes)::value;
      for (int64_t i = 0; i < n; ++i) ids[i] = int64_t(get_id<B>(message + i * B));
      message += n * B;
      ids += n;
    });
  }
}
