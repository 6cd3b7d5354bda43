// Ids as they travel: in as many bytes as the largest of their block can need, the low ones first, as x86 and ARM keep them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace unequal {

// One id in B bytes. The compiler knows B: a store or two.
template <int B>
inline void put_id(uint8_t* to, int64_t id) {
  std::memcpy(to, &id, B);
}

// Put together from loads of 1, 2, 4 or 8 bytes: others would go through memory.
template <int B>
inline uint64_t get_id(const uint8_t* from) {
  if constexpr ((B & (B - 1)) == 0) {
    std::conditional_t<B == 8, uint64_t, std::conditional_t<B == 4, uint32_t, std::conditional_t<B == 2, uint16_t, uint8_t>>> id;
    std::memcpy(&id, from, B);
    return id;
  } else {
    constexpr int low = B > 4 ? 4 : 2;
    return get_id<low>(from) | get_id<B - low>(from + low) << (8 * low);
  }
}

// Calls `work` with the number of bytes, 1 to 8, as a constant.
template <class Work>
inline void with_bytes(int64_t bytes, Work&& work) {
  switch (bytes) {
    case 1: work(std::integral_constant<int, 1>()); break;
    case 2: work(std::integral_constant<int, 2>()); break;
    case 3: work(std::integral_constant<int, 3>()); break;
    case 4: work(std::integral_constant<int, 4>()); break;
    case 5: work(std::integral_constant<int, 5>()); break;
    case 6: work(std::integral_constant<int, 6>()); break;
    case 7: work(std::integral_constant<int, 7>()); break;
    default: work(std::integral_constant<int, 8>()); break;
  }
}

}  // namespace unequal
