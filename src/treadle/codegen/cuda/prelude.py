"""What every CUDA source starts with: types in memory, conversions, and functions of one number.

Nothing is included, so that NVRTC needs no header files. Narrow floats are held as float in
registers and rounded after every op, as on the CPU.
"""

from __future__ import annotations

# Scans: what threads before this one have, and what all have. `none` changes nothing.
SCANS = r"""
template <class T> DEV T from_before(T x, int m) {
  return (T)__shfl_up_sync(0xffffffffu, (int)x, m); }
DEV f32 from_before(f32 x, int m) { return __shfl_up_sync(0xffffffffu, x, m); }
DEV f64 from_before(f64 x, int m) { return __shfl_up_sync(0xffffffffu, x, m); }
DEV i64 from_before(i64 x, int m) { return __shfl_up_sync(0xffffffffu, x, m); }
template <class T> DEV T from_lane(T x, int at) {
  return (T)__shfl_sync(0xffffffffu, (int)x, at); }
DEV f32 from_lane(f32 x, int at) { return __shfl_sync(0xffffffffu, x, at); }
DEV f64 from_lane(f64 x, int at) { return __shfl_sync(0xffffffffu, x, at); }
DEV i64 from_lane(i64 x, int at) { return __shfl_sync(0xffffffffu, x, at); }
template <class Op, int N, class T> DEV T before_in_warp(T x, T none, T &whole) {
  const int lane = threadIdx.x & (N - 1);
#pragma unroll
  for (int m = 1; m < N; m <<= 1) {
    const T y = from_before(x, m);
    if (lane >= m) x = Op::of(y, x); }
  whole = from_lane(x, (threadIdx.x & 31 & ~(N - 1)) + N - 1);
  const T y = from_before(x, 1);
  return lane ? y : none; }
template <class Op, int WARPS, class T> DEV T before_in_block(T x, T none, T &whole) {
  __shared__ T parts[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  T all;
  const T own = before_in_warp<Op, 32, T>(x, none, all);
  __syncthreads();
  if (lane == 31) parts[warp] = all;
  __syncthreads();
  const T part = lane < WARPS ? parts[lane] : none;
  const T ahead = before_in_warp<Op, 32, T>(part, none, whole);
  return Op::of(from_lane(ahead, warp), own); }
"""

PRELUDE = r"""
typedef signed char i8; typedef unsigned char u8; typedef int i32; typedef unsigned int u32;
typedef long long i64; typedef unsigned long long u64; typedef float f32; typedef double f64;
struct b1 { u8 b; }; struct f16 { unsigned short b; }; struct bf16 { unsigned short b; };
#define DEV static __device__ __forceinline__
DEV f32 bits32(u32 b) { return __uint_as_float(b); }
DEV f64 bits64(u64 b) { return __longlong_as_double((i64)b); }

// Two at once, whatever the other is: the instruction for one runs at a quarter of the rate.
DEV u32 two_bf16(f32 high, f32 low) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV unsigned short to_bf16(f32 x) { return (unsigned short)two_bf16(0.0f, x); }
DEV unsigned short to_f16(f32 x) {
  unsigned short r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV f32 of_bf16(unsigned short b) { return __uint_as_float((u32)b << 16); }
DEV f32 of_f16(unsigned short b) {
  f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(b)); return r; }
DEV f32 round_bf16(f32 x) { return bits32(two_bf16(x, 0.0f)); }
DEV f32 round_f16(f32 x) { return of_f16(to_f16(x)); }

DEV f32 get(bf16 x) { return of_bf16(x.b); }
DEV f32 get(f16 x) { return of_f16(x.b); }
DEV bool get(b1 x) { return x.b != 0; }
template <class T> DEV T get(T x) { return x; }
DEV void put(bf16 &m, f32 x) { m.b = to_bf16(x); }
DEV void put(f16 &m, f32 x) { m.b = to_f16(x); }
DEV void put(b1 &m, bool x) { m.b = x; }
template <class T> DEV void put(T &m, T x) { m = x; }

template <class T, int V>
struct __align__(sizeof(T) * V > 16 ? 16 : sizeof(T) * V) Pack { T v[V]; };
// Packs go by value: members that are read one by one are loaded one by one.
template <int V, class T, class R> DEV void unpacked(Pack<T, V> m, R (&r)[V]) {
#pragma unroll
  for (int u = 0; u < V; ++u) r[u] = get(m.v[u]); }
template <int V, class T, class R> DEV void packed(Pack<T, V> &m, const R (&r)[V]) {
#pragma unroll
  for (int u = 0; u < V; ++u) put(m.v[u], r[u]); }
// Two bfloat16 are one word: taken apart and put together by an instruction each.
template <int V, class R> DEV void unpacked(Pack<bf16, V> m, R (&r)[V]) {
#pragma unroll
  for (int u = 0; u + 1 < V; u += 2) {
    const u32 two = ((const u32 *)&m)[u / 2];
    r[u] = bits32(two << 16); r[u + 1] = bits32(two & 0xffff0000u); }
  if (V % 2) r[V - 1] = get(m.v[V - 1]); }
template <int V, class R> DEV void packed(Pack<bf16, V> &m, const R (&r)[V]) {
#pragma unroll
  for (int u = 0; u + 1 < V; u += 2) ((u32 *)&m)[u / 2] = two_bf16(r[u + 1], r[u]);
  if (V % 2) put(m.v[V - 1], r[V - 1]); }
template <int V, class T, class R> DEV void load(const T *p, R (&r)[V]) {
  unpacked<V>(*(const Pack<T, V> *)p, r); }
// Of memory that the kernel does not write: such loads may be made before stores that come first,
// and once for all iterations of a loop.
template <class T> DEV T fixed(const T *p) { return __ldg(p); }
DEV f32 fixed(const bf16 *p) { return of_bf16(__ldg(&p->b)); }
DEV f32 fixed(const f16 *p) { return of_f16(__ldg(&p->b)); }
DEV bool fixed(const b1 *p) { return __ldg(&p->b) != 0; }
template <int V, class T> DEV Pack<T, V> fetched(const T *p) {
  Pack<T, V> m;
  if constexpr (sizeof(m) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < sizeof(m) / 16; ++i) ((uint4 *)&m)[i] = __ldg((const uint4 *)p + i);
  } else if constexpr (sizeof(m) == 8) *(uint2 *)&m = __ldg((const uint2 *)p);
  else if constexpr (sizeof(m) == 4) *(u32 *)&m = __ldg((const u32 *)p);
  else m = *(const Pack<T, V> *)p;
  return m; }
template <int V, class T, class R> DEV void fetch(const T *p, R (&r)[V]) {
  unpacked<V>(fetched<V>(p), r); }
template <int V, class T, class R> DEV void store(T *p, const R (&r)[V]) {
  Pack<T, V> m; packed<V>(m, r); *(Pack<T, V> *)p = m; }

DEV f32 t_max(f32 a, f32 b) {
  f32 r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV f32 t_min(f32 a, f32 b) {
  f32 r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV f64 t_max(f64 a, f64 b) {
  if (a != a) return a;
  if (b != b) return b;
  if (a == b) return bits64((u64)__double_as_longlong(a) & (u64)__double_as_longlong(b));
  return a > b ? a : b; }
DEV f64 t_min(f64 a, f64 b) {
  if (a != a) return a;
  if (b != b) return b;
  if (a == b) return bits64((u64)__double_as_longlong(a) | (u64)__double_as_longlong(b));
  return a < b ? a : b; }
template <class T> DEV T t_max(T a, T b) { return a > b ? a : b; }
template <class T> DEV T t_min(T a, T b) { return a < b ? a : b; }
DEV f32 t_abs(f32 x) { return fabsf(x); }
DEV f64 t_abs(f64 x) { return fabs(x); }
template <class T> DEV T t_abs(T x) { return x < (T)0 ? (T)-x : x; }
DEV i32 t_abs(i32 x) { return x < 0 ? (i32)(0u - (u32)x) : x; }
DEV i64 t_abs(i64 x) { return x < 0 ? (i64)(0ull - (u64)x) : x; }
DEV f32 t_sign(f32 x) { return x < 0 || x > 0 ? copysignf(1.0f, x) : x; }
DEV f64 t_sign(f64 x) { return x < 0 || x > 0 ? copysign(1.0, x) : x; }
template <class T> DEV T t_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }

DEV f32 t_floor(f32 x) { return floorf(x); }   DEV f64 t_floor(f64 x) { return floor(x); }
DEV f32 t_sqrt(f32 x) { return sqrtf(x); }     DEV f64 t_sqrt(f64 x) { return sqrt(x); }
DEV f32 t_rsqrt(f32 x) { return rsqrtf(x); }   DEV f64 t_rsqrt(f64 x) { return 1.0 / sqrt(x); }
DEV f32 t_exp(f32 x) { return expf(x); }       DEV f64 t_exp(f64 x) { return exp(x); }
DEV f32 t_log(f32 x) { return logf(x); }       DEV f64 t_log(f64 x) { return log(x); }
DEV f32 t_sin(f32 x) { return sinf(x); }       DEV f64 t_sin(f64 x) { return sin(x); }
DEV f32 t_cos(f32 x) { return cosf(x); }       DEV f64 t_cos(f64 x) { return cos(x); }
DEV f32 t_tanh(f32 x) { return tanhf(x); }     DEV f64 t_tanh(f64 x) { return tanh(x); }
DEV f32 t_erf(f32 x) { return erff(x); }       DEV f64 t_erf(f64 x) { return erf(x); }
DEV f32 t_pow(f32 x, f32 y) { return powf(x, y); }
DEV f64 t_pow(f64 x, f64 y) { return pow(x, y); }
DEV f32 t_atan2(f32 y, f32 x) { return atan2f(y, x); }
DEV f64 t_atan2(f64 y, f64 x) { return atan2(y, x); }
DEV f32 t_fma(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
DEV f64 t_fma(f64 a, f64 b, f64 c) { return fma(a, b, c); }
// Within an ulp, without the slow path that the compiler's division takes for tiny numbers.
DEV f32 t_div(f32 x, f32 y) {
  f32 r; asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(y));
  f32 q = x * r; q = fmaf(fmaf(-q, y, x), r, q);
  return fabsf(q) < bits32(0x7f800000u) ? q : x / y; }
// By a number of ordinary size: nothing is slow, so nothing has to be gone around.
DEV f32 c_div(f32 x, f32 y) {
  f32 r = 1.0f / y, q = x * r, better = fmaf(fmaf(-q, y, x), r, q);
  return fabsf(better) < bits32(0x7f800000u) ? better : q; }
// For narrow floats, far within what they can tell apart.
DEV f32 n_exp(f32 x) {
  f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.44269504f)); return r; }
DEV f32 n_exp(f32 x, f32 less) {
  f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r)
    : "f"(fmaf(x, 1.44269504f, less * -1.44269504f))); return r; }
DEV f32 n_tanh(f32 x) { f32 r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV f32 n_erf(f32 x) { return n_tanh(x * fmaf(x * x, 0.10140218f, 1.1283792f)); }
DEV f32 n_div(f32 x, f32 y) {
  f32 r; asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); return r; }
DEV void begin() {  // what the kernel before wrote is there; the next one may be made ready
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Blocks of a launch, all of which run at once, wait for each other: each counts itself, and all
// wait for the next multiple of their number, which is known from the start. What was written
// before is seen afterwards.
DEV u64 first_sync(const u64 *arrived) {
  u64 here = 0;
  if (threadIdx.x == 0)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(here) : "l"(arrived) : "memory");
  return (here / gridDim.x + 1) * gridDim.x; }
DEV void grid_sync(u64 *arrived, u64 &until) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" :: "l"(arrived) : "memory");
    u64 here;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(here) : "l"(arrived) : "memory");
    } while (here < until);
  }
  until += gridDim.x;
  __syncthreads(); }
// A pointer that is known from here on: nothing is read through it before the kernel has begun.
DEV void *now(void *p) {
  asm volatile("" : "+l"(p)::"memory"); __builtin_assume(__isGlobal(p)); return p; }
DEV f64 t_div(f64 x, f64 y) { return x / y; }
DEV f32 c_mod(f32 x, f32 y) { return fmodf(x, y); }
DEV f64 c_mod(f64 x, f64 y) { return fmod(x, y); }

// Rounded down, the rest of the divisor's sign; as NumPy's.
template <class T> DEV T f_mod(T x, T y) {
  T exact = c_mod(x, y);
  if (exact != exact) return exact;
  if (exact == (T)0) return (T)copysign((f64)0, (f64)y);
  return (exact < (T)0) != (y < (T)0) ? exact + y : exact; }
template <class T> DEV T f_div(T x, T y) {
  if (y == (T)0) return x / y;
  T exact = c_mod(x, y), whole = (x - exact) / y;
  if (exact != (T)0 && (exact < (T)0) != (y < (T)0)) whole -= (T)1;
  T down = t_floor(whole);
  return whole - down > (T)0.5 ? down + (T)1 : down; }
template <class T> DEV T i_div(T x, T y) {
  if (y == (T)0) return (T)0;
  if ((T)-1 < (T)0 && y == (T)-1) return (T)(0ull - (u64)x);
  T q = x / y, r = x % y;
  return r != (T)0 && ((r < (T)0) != (y < (T)0)) ? (T)(q - 1) : q; }
template <class T> DEV T i_mod(T x, T y) {
  if (y == (T)0 || ((T)-1 < (T)0 && y == (T)-1)) return (T)0;
  T r = x % y;
  return r != (T)0 && ((r < (T)0) != (y < (T)0)) ? (T)(r + y) : r; }

// Floats to integers: cut off, held inside the range, 0 for NaN.
DEV i64 to_i64(f64 x) { return x != x ? 0 : x >= 9.2233720368547758e18 ? 0x7fffffffffffffffll
  : x <= -9.2233720368547758e18 ? (i64)0x8000000000000000ull : (i64)x; }
DEV u64 cut(f64 x, i64 low, i64 high) {
  i64 v = to_i64(x); return (u64)(v < low ? low : v > high ? high : v); }
// Unsigned, and no minimum of a maximum: with those ptxas 13.0 (-O1 and up) took 0 and 1 for equal.
template <class I> DEV I held(i64 x, I extent) {
  u64 n = extent > 0 ? (u64)extent : 1ull;
  return (u64)x < n ? (I)x : x < 0 ? (I)0 : (I)(n - 1ull); }

template <class T> DEV T shuffled(T x, int m) { return (T)__shfl_xor_sync(0xffffffffu, (int)x, m); }
DEV f32 shuffled(f32 x, int m) { return __shfl_xor_sync(0xffffffffu, x, m); }
DEV f64 shuffled(f64 x, int m) { return __shfl_xor_sync(0xffffffffu, x, m); }
DEV i64 shuffled(i64 x, int m) { return __shfl_xor_sync(0xffffffffu, x, m); }
// Sums that other threads add to, in any order; packs in one step where the chip has it.
DEV void add_to(f32 *p, f32 x) { atomicAdd(p, x); }
DEV void add_to(f64 *p, f64 x) { atomicAdd(p, x); }
DEV void add_to(i32 *p, i32 x) { atomicAdd(p, x); }
DEV void add_to(u32 *p, u32 x) { atomicAdd(p, x); }
DEV void add_to(i64 *p, i64 x) { atomicAdd((u64 *)p, (u64)x); }
template <int V> DEV void add_pack(f32 *p, const f32 (&x)[V]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (V == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};"
      :: "l"(p), "f"(x[0]), "f"(x[1]) : "memory");
  } else if constexpr (V % 4 == 0) {
#pragma unroll
    for (int u = 0; u < V; u += 4)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "l"(p + u), "f"(x[u]), "f"(x[u + 1]), "f"(x[u + 2]), "f"(x[u + 3]) : "memory");
  } else
#endif
  {
#pragma unroll
    for (int u = 0; u < V; ++u) add_to(p + u, x[u]); } }
struct Add {
  template <class T> static __device__ __forceinline__ T of(T a, T b) { return a + b; } };
struct Mul {
  template <class T> static __device__ __forceinline__ T of(T a, T b) { return a * b; } };
struct Max {
  template <class T> static __device__ __forceinline__ T of(T a, T b) { return t_max(a, b); } };
struct Min {
  template <class T> static __device__ __forceinline__ T of(T a, T b) { return t_min(a, b); } };
// N neighbours in a warp: all of it, or a part that shares an iteration.
template <class Op, int N = 32, class T> DEV T in_warp(T x) {
#pragma unroll
  for (int m = N / 2; m; m >>= 1) x = Op::of(x, shuffled(x, m));
  return x; }
// All threads of a block get the same bits: warps first, then their results in the same order.
template <class Op, int WARPS, class T> DEV T in_block(T x, T none) {
  __shared__ T parts[32];
  x = in_warp<Op>(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  T y = (threadIdx.x & 31) < WARPS ? parts[threadIdx.x & 31] : none;
  return in_warp<Op>(y); }
"""
