// How large the elements of each head are. Floats become operands whose exponents reach less far than theirs
// (arch/cuda/halves.h): they are multiplied by a power of two that brings the largest of their head near the upper end,
// and products by its inverse. What is 2^-29 of a head's largest element or more keeps its precision. 16-bit elements
// are operands as they are.
#pragma once
#include "base/math.h"
#include "tile.h"

namespace attn {

// A power of two.
struct Power {
  float in;  // what elements are multiplied by
  // What their products are: its inverse.
  METHOD float out() const { return ptx::real((254u << 23) - ptx::bits(in)); }
};

// Brings magnitudes up to `largest` below 2^15.
FN Power power_below(float largest) {
  const i32 exponent = (i32)(ptx::bits(largest) >> 23), power = base::most(1, base::least(268 - exponent, 253));
  return {ptx::real((u32)power << 23)};
}

// The first part of the workspace, where elements are floats: the largest finite magnitude of each of `parts` parts of
// every head of q, k, v and, in the backward pass, of dO and dLSE.
template <class C, class P, bool backward>
struct Magnitudes {
  static constexpr bool needed = sizeof(typename C::Element) == 4;
  static constexpr i32 parts = 32;

  // Heads are counted through the tensors.
  static METHOD i64 q(P const&) { return 0; }
  static METHOD i64 k(P const& p) { return p.batch * p.heads_q; }
  static METHOD i64 v(P const& p) { return k(p) + p.batch * p.heads_kv; }
  static METHOD i64 grad_out(P const& p) { return v(p) + p.batch * p.heads_kv; }
  static METHOD i64 grad_lse(P const& p) { return grad_out(p) + p.batch * p.heads_q; }
  static METHOD i64 end(P const& p) { return backward ? grad_lse(p) + p.batch * p.heads_q : grad_out(p); }

  static METHOD i64 floats(P const& p) { return needed ? end(p) * parts : 0; }

  // Of a head. Every lane of a warp asks.
  static METHOD float largest(i64 head, P const& p) {
    float x = p.workspace[head * parts + arch::lane()];
#pragma unroll
    for (i32 mask = 1; mask < parts; mask *= 2) x = arch::max(x, ptx::shuffle_xor(x, mask));
    return x;
  }
  static METHOD Power power(i64 head, P const& p) {
    if constexpr (needed)
      return power_below(largest(head, p));
    else
      return {1.0f};
  }
};

// What a backward pass multiplies: k and v of a key head, and what belongs to a query head. dS = P * (dP - delta) is at
// most twice what dO V^T can be, and dLSE.
template <class C, class P>
struct KeyPowers {
  using Heads = Magnitudes<C, P, true>;
  Power k, v;
  METHOD KeyPowers(i64 head, P const& p)
      : k(Heads::power(Heads::k(p) + head, p)), v(Heads::power(Heads::v(p) + head, p)) {}
};
template <class C, class P>
struct QueryPowers {
  using Heads = Magnitudes<C, P, true>;
  Power q, grad_out, gradients;
  METHOD QueryPowers(i64 head, i64 head_kv, P const& p)
      : q(Heads::power(Heads::q(p) + head, p)), grad_out(Heads::power(Heads::grad_out(p) + head, p)) {
    if constexpr (Heads::needed)
      gradients = power_below(2.0f * C::head_dim_v * Heads::largest(Heads::v(p) + head_kv, p) *
                                  Heads::largest(Heads::grad_out(p) + head, p) +
                              Heads::largest(Heads::grad_lse(p) + head, p));
    else
      gradients = {1.0f};
  }
};

}  // namespace attn
