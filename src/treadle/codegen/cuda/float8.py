"""What a source that has floats of 8 bits starts with, behind the prelude.

Casts round to nearest even and saturate; NaN stays NaN. Chips from 8.9 on have instructions for two
at once; others, and those of other makers, go by the bits.
"""

from __future__ import annotations

FLOAT8 = r"""
struct e4m3 { u8 b; }; struct e5m2 { u8 b; };
#if __CUDA_ARCH__ >= 890
#define FLOAT8(T) \
DEV unsigned short two_##T(f32 high, f32 low) { unsigned short r; \
  asm("cvt.rn.satfinite." #T "x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low)); return r; } \
DEV u8 to_##T(f32 x) { return (u8)two_##T(0.0f, x); } \
DEV f32 of_##T(u8 b) { u32 r; \
  asm("cvt.rn.f16x2." #T "x2 %0, %1;" : "=r"(r) : "h"((unsigned short)b)); \
  return of_f16((unsigned short)r); }
FLOAT8(e4m3) FLOAT8(e5m2)
#else
// P bits of a fraction; denormals are multiples of 2^(1 - BIAS - P).
template <int P, int BIAS> DEV u8 to_float8(f32 x, f32 largest) {
  if (x != x) return 0x7f;
  u8 sign = (u8)((__float_as_uint(x) >> 24) & 0x80u);
  f32 size = fabsf(x) < largest ? fabsf(x) : largest;
  if (size < bits32((128u - BIAS) << 23))
    return sign | (u8)rintf(size * bits32((126u + BIAS + P) << 23));
  u32 b = __float_as_uint(size);
  b += ((b >> (23 - P)) & 1u) + (1u << (22 - P)) - 1u;
  return sign | (u8)((b >> (23 - P)) - ((127u - BIAS) << P)); }
template <int P, int BIAS> DEV f32 of_float8(u32 b, u32 endless) {
  u32 size = b & 0x7fu, sign = (b & 0x80u) << 24;
  if (size > endless) return bits32(0x7fc00000u);
  if (P == 2 && size == endless) return bits32(sign | 0x7f800000u);
  f32 small = (f32)size * bits32((128u - BIAS - P) << 23);
  f32 found = size < (1u << P) ? small : bits32((size << (23 - P)) + ((127u - BIAS) << 23));
  return sign ? -found : found; }
DEV u8 to_e4m3(f32 x) { return to_float8<3, 7>(x, 448.0f); }
DEV u8 to_e5m2(f32 x) { return to_float8<2, 15>(x, 57344.0f); }
DEV f32 of_e4m3(u8 b) { return of_float8<3, 7>(b, 0x7eu); }
DEV f32 of_e5m2(u8 b) { return of_float8<2, 15>(b, 0x7cu); }
DEV unsigned short two_e4m3(f32 high, f32 low) {
  return (unsigned short)(((u32)to_e4m3(high) << 8) | to_e4m3(low)); }
DEV unsigned short two_e5m2(f32 high, f32 low) {
  return (unsigned short)(((u32)to_e5m2(high) << 8) | to_e5m2(low)); }
#endif
#define FLOAT8_MEMORY(T) \
DEV f32 round_##T(f32 x) { return of_##T(to_##T(x)); } \
DEV f32 get(T x) { return of_##T(x.b); } \
DEV void put(T &m, f32 x) { m.b = to_##T(x); } \
DEV f32 fixed(const T *p) { return of_##T(__ldg(&p->b)); } \
template <int V, class R> DEV void packed(Pack<T, V> &m, const R (&r)[V]) { \
  _Pragma("unroll") \
  for (int u = 0; u + 1 < V; u += 2) { \
    unsigned short two = two_##T(r[u + 1], r[u]); \
    m.v[u].b = (u8)two; m.v[u + 1].b = (u8)(two >> 8); } \
  if (V % 2) put(m.v[V - 1], r[V - 1]); }
FLOAT8_MEMORY(e4m3) FLOAT8_MEMORY(e5m2)
"""
