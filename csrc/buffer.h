// Memory that a kernel keeps from step to step.
#pragma once
#include <cstdlib>
#include <new>

#include <sys/mman.h>

namespace unequal {

// Buffers kept between steps: fresh pages cost more than the work done in them. Large ones lie on 2 MiB pages.
template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;
  T* get(size_t n) {
    if (n > size) {
      constexpr size_t kHuge = 2 << 20;
      std::free(data);
      size = n + n / 4;
      const size_t page = size * sizeof(T) < kHuge ? 64 : kHuge, bytes = (size * sizeof(T) + page - 1) / page * page;
      data = static_cast<T*>(std::aligned_alloc(page, bytes));
      if (!data) {
        size = 0;
        throw std::bad_alloc();
      }
#if defined(MADV_HUGEPAGE)
      if (page == kHuge) madvise(data, bytes, MADV_HUGEPAGE);
#endif
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};

}  // namespace unequal
