// Plain loads and stores of a kernel, such as `*p`. The kernel's text is compiled with -fsanitize=thread, with which
// GCC and Clang call the functions below before each; the sanitizer itself, which would define them, is not linked.
#pragma once
#include "memory.h"

namespace engine {

inline void plain_access(const void* address, u32 size, bool writes, bool aligned) {
  const char* at = static_cast<const char*>(address);
  if (at >= cluster.stacks && at < cluster.stacks_end) return;
  const Launch& launch = *cluster.launch;
  if (!writes && at >= cluster.params && at + size <= cluster.params + launch.params_bytes) return;
  const char* name = writes ? "a plain store" : "a plain load";
  if (!shared.near(at)) return check_global(name, at, size, writes, aligned);
  const auto offset = at - shared.begin - shared.own_part();
  if (aligned && offset % size)
    fail_here(text("%s of %u bytes at shared byte %d, which is not aligned to them", name, size, (int)offset));
  if (offset < 0 || offset + size > shared.bytes)
    fail_here(text("%s of %u bytes at byte %d of a shared memory of %u bytes", name, size, (int)offset, shared.bytes));
  if (writes)
    note_write((u32)(at - shared.begin), size, name);
  else
    race.read((u32)(at - shared.begin), size, name);
}

}  // namespace engine

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* at, unsigned long size) { engine::plain_access(at, (u32)size, false, false); }
void __tsan_write_range(void* at, unsigned long size) { engine::plain_access(at, (u32)size, true, false); }
// Clang lets the sanitizer move memory, too.
void* __tsan_memcpy(void* to, const void* from, unsigned long size) {
  __tsan_read_range(const_cast<void*>(from), size);
  __tsan_write_range(to, size);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, unsigned long size) {
  __tsan_read_range(const_cast<void*>(from), size);
  __tsan_write_range(to, size);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int byte, unsigned long size) {
  __tsan_write_range(to, size);
  return memset(to, byte, size);
}
#define ACCESSES(size)                                                                         \
  void __tsan_read##size(void* at) { engine::plain_access(at, size, false, size <= 8); }       \
  void __tsan_write##size(void* at) { engine::plain_access(at, size, true, size <= 8); }       \
  void __tsan_unaligned_read##size(void* at) { engine::plain_access(at, size, false, false); } \
  void __tsan_unaligned_write##size(void* at) { engine::plain_access(at, size, true, false); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES
}
