// Fixed-width names, shared by every architecture.
#pragma once

using i32 = int;
using i64 = long long;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Storage of the 16-bit formats. An architecture converts them; the algorithm only passes them on.
struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

// Registers that are loaded or stored at once.
struct Words2 {
  u32 word[2];
};
struct Words4 {
  u32 word[4];
};
