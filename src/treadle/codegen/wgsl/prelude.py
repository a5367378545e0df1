"""Functions of one or two numbers in WGSL, of which a module has those that it calls.

WGSL leaves much open: exponentials may be off by many ulps, NaN may be assumed away, a division
need not be rounded to nearest. Elementary functions are our own polynomials, as on the CPU
(docs/mathematics.md), and NaN and infinities are told by their bits. Compilers may take s − a for b
where s is a + b, x − a · b for one multiply-add, and x · 0 for 0: `kept` hides a number behind a
zero that they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from treadle.codegen.llvm import coefficients, mathematics


def _polynomial(numbers: Iterable[float], x: str) -> str:
    """Horner's scheme."""
    first, *rest = reversed(tuple(numbers))
    text = f"{first!r}f"
    for number in rest:
        text = f"fma({text}, {x}, {number!r}f)"
    return text


# A multiply-add need not be rounded once: parts of constants are short enough for exact products.
_LN2 = 0.693359375, -2.12194440e-4
_HALF_PI = coefficients.HALF_PI

_TEXT = f"""
fn number(b: u32) -> f32 {{ return bitcast<f32>(b); }}
fn kept(x: f32) -> f32 {{ return bitcast<f32>(bitcast<u32>(x) ^ zero); }}
fn runtime_f32(x: f32) -> f32 {{ return x; }}
fn runtime_i32(x: i32) -> i32 {{ return x; }}
fn runtime_u32(x: u32) -> u32 {{ return x; }}
fn runtime_bool(x: bool) -> bool {{ return x; }}
fn is_nan(x: f32) -> bool {{ return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }}
fn is_finite(x: f32) -> bool {{ return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u; }}
fn with_sign(x: f32, y: f32) -> f32 {{
  return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(y) & 0x80000000u)); }}
fn f_max(a: f32, b: f32) -> f32 {{
  let equal = bitcast<f32>(bitcast<u32>(a) & bitcast<u32>(b));
  let most = select(select(b, a, a > b), equal, a == b);
  return select(select(most, b, is_nan(b)), a, is_nan(a)); }}
fn f_min(a: f32, b: f32) -> f32 {{
  let equal = bitcast<f32>(bitcast<u32>(a) | bitcast<u32>(b));
  let least = select(select(b, a, a < b), equal, a == b);
  return select(select(least, b, is_nan(b)), a, is_nan(a)); }}
fn ordered(x: f32) -> u32 {{
  let b = bitcast<i32>(x);
  return bitcast<u32>(b ^ ((b >> 31u) & 0x7fffffff)) - 0x807fffffu; }}
fn unordered(k: u32) -> f32 {{
  let b = bitcast<i32>(k + 0x807fffffu); return bitcast<f32>(b ^ ((b >> 31u) & 0x7fffffff)); }}
fn ordered_down(x: f32) -> u32 {{
  return ordered(bitcast<f32>(bitcast<u32>(x) ^ 0x80000000u)); }}
fn unordered_down(k: u32) -> f32 {{
  return bitcast<f32>(bitcast<u32>(unordered(k)) ^ 0x80000000u); }}
fn f_sign(x: f32) -> f32 {{ return select(x, with_sign(1.0f, x), x < 0.0f || x > 0.0f); }}
fn f_div(x: f32, y: f32) -> f32 {{
  if (y == 0.0f) {{
    let endless = number(0x7f800000u | ((bitcast<u32>(x) ^ bitcast<u32>(y)) & 0x80000000u));
    return select(endless, number(0x7fc00000u), x == 0.0f || is_nan(x)); }}
  let down = to_middle(x); let up = to_middle(y); let a = x * down; let b = y * up;
  let q = kept(a / b); let back = two_mul(q, b); let better = q + ((a - back.x) - back.y) / b;
  return select(q, better, is_finite(better)) * (up * number(0x7f000000u - bitcast<u32>(down))); }}
fn f_sqrt(x: f32) -> f32 {{
  let is_small = x < 5.421010862427522e-20f;
  let a = x * select(1.0f, 1.8446744073709552e19f, is_small);
  let s = kept(sqrt(a)); let back = two_mul(s, s);
  let better = s + ((a - back.x) - back.y) * (0.5f / s);
  return select(s, better, is_finite(better)) * select(1.0f, 2.3283064365386963e-10f, is_small); }}
fn to_middle(x: f32) -> f32 {{ // a power of two: what is left of a quotient must not be denormal
  let m = abs(x); let up = select(1.0f, 1.8446744073709552e19f, m < 5.421010862427522e-20f);
  return select(up, 5.421010862427522e-20f, m > 1.8446744073709552e19f); }}
fn f_rsqrt(x: f32) -> f32 {{ return f_div(1.0f, f_sqrt(x)); }}
fn power_of_two(n: i32) -> f32 {{ return bitcast<f32>((n + 127) << 23u); }}
fn expm1_part(n: f32, x: f32) -> f32 {{
  let r = (x - n * {_LN2[0]!r}f) - n * {_LN2[1]!r}f;
  return fma(r * r, {_polynomial(coefficients.EXP, "r")}, r); }}
fn f_exp(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let held = clamp(x, {mathematics.EXP_RANGE[0]!r}f, {mathematics.EXP_RANGE[1]!r}f);
  let whole = round(held * 1.44269504f); let n = i32(whole); let half = n >> 1u;
  let scale = power_of_two(half);
  return fma(expm1_part(whole, held), scale, scale) * power_of_two(n - half); }}
fn expm1_near(x: f32) -> f32 {{
  let whole = round(x * 1.44269504f); let scale = power_of_two(i32(whole));
  return fma(expm1_part(whole, x), scale, scale - 1.0f); }}
fn f_tanh(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let e = expm1_near(2.0f * min(abs(x), {mathematics.TANH_END!r}f));
  return with_sign(f_div(e, e + 2.0f), x); }}
fn f_erf(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let m = min(abs(x), {mathematics.ERF_END!r}f);
  let t = fma(m, {coefficients.ERF_SLOPE!r}f, m * ({_polynomial(coefficients.ERF, "m")}));
  return with_sign(expm1_near(-t), x); }}
fn f_log(x: f32) -> f32 {{
  if (is_nan(x) || bitcast<u32>(x) == 0x7f800000u) {{ return x; }}
  if (x == 0.0f) {{ return number(0xff800000u); }}
  if (x < 0.0f) {{ return number(0x7fc00000u); }}
  let tiny = x < 1.17549435e-38f;
  let b = bitcast<i32>(select(x, x * 8388608.0f, tiny));
  let n = (b - {mathematics.SQRT_HALF}) >> 23u;
  let f = bitcast<f32>(b - (n << 23u)) - 1.0f; let e = f32(n + select(0, -23, tiny));
  let square = f * f; let cube = square * f * ({_polynomial(coefficients.LOG, "f")});
  let rest = fma(square, -0.5f, fma(e, {_LN2[1]!r}f, cube));
  return fma(e, {_LN2[0]!r}f, f + rest); }}
fn angle_part(x: f32) -> vec2<f32> {{
  let b = bitcast<u32>(x); let at = (b >> 23u) - 120u; let m = (b & 0x7fffffu) | 0x800000u;
  let digits = array<u32, 8>(0x00000000u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
    0xdb629599u, 0x3c439041u, 0xfe5163abu);
  var words = array<u32, 3>(); let shift = at % 32u;
  for (var i = 0u; i < 3u; i++) {{
    let first = digits[min(at / 32u + i, 7u)]; let second = digits[min(at / 32u + i + 1u, 7u)];
    words[i] = select((first << shift) | (second >> ((32u - shift) & 31u)), first, shift == 0u); }}
  let low = mulhi(words[2], m); let sum = words[1] * m + low;
  let high = words[0] * m + mulhi(words[1], m) + select(0u, 1u, sum < low);
  let turns = (high + 0x20000000u) >> 30u; let is_less = ((high >> 29u) & 1u) == 1u;
  var part = (high << 2u) | (sum >> 30u); var rest = sum << 2u;
  if (is_less) {{ part = ~part + select(0u, 1u, rest == 0u); rest = ~rest + 1u; }}
  let tail = f32(rest) * 5.421010862427522e-20f + f32(part & 0xffu) * 2.3283064365386963e-10f;
  let fraction = (f32(part >> 8u) * 5.9604644775390625e-8f + tail) * 1.57079633f;
  return vec2<f32>(select(fraction, -fraction, is_less), f32(turns)); }}
fn circle(x: f32, more: i32) -> f32 {{
  var reduced = vec2<f32>(abs(x), 0.0f);
  if (abs(x) > 0.785398185f) {{ reduced = angle_part(abs(x)); }}
  let r = reduced.x; let quarter = i32(reduced.y) + more; let square = r * r;
  let sine = fma(square * r, {_polynomial(coefficients.SIN, "square")}, r);
  let fourth = square * square * ({_polynomial(coefficients.COS, "square")});
  let found = select(sine, fma(square, -0.5f, fourth) + 1.0f, (quarter & 1) == 1);
  return select(found, -found, (quarter & 2) == 2); }}
fn f_sin(x: f32) -> f32 {{
  if (!is_finite(x)) {{ return number(0x7fc00000u); }}
  let found = circle(x, 0); return select(found, -found, (bitcast<u32>(x) >> 31u) == 1u); }}
fn f_cos(x: f32) -> f32 {{
  if (!is_finite(x)) {{ return number(0x7fc00000u); }} return circle(x, 1); }}
fn f_atan2(y: f32, x: f32) -> f32 {{
  if (is_nan(x) || is_nan(y)) {{ return number(0x7fc00000u); }}
  let steep = abs(y) > abs(x); let behind = (bitcast<u32>(x) >> 31u) == 1u;
  let small = select(abs(y), abs(x), steep); let large = select(abs(x), abs(y), steep);
  var ratio = f_div(small, large);
  if (large == 0.0f) {{ ratio = small; }}
  if (!is_finite(small)) {{ ratio = 1.0f; }}
  let square = ratio * ratio;
  let angle = fma(square * ratio, {_polynomial(coefficients.ATAN, "square")}, ratio);
  let quarters = select(select(0.0f, 2.0f, behind), 1.0f, steep);
  let turned = select(angle, -angle, steep != behind) + quarters * {_HALF_PI[1]!r}f;
  return with_sign(turned + quarters * {_HALF_PI[0]!r}f, y); }}
"""

_EXACT = """
fn two_sum(a: f32, b: f32) -> vec2<f32> {
  let s = kept(a + b); let v = kept(s - a); return vec2<f32>(s, (a - kept(s - v)) + (b - v)); }
fn two_mul(a: f32, b: f32) -> vec2<f32> {
  let ah = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u); let al = a - ah;
  let bh = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u); let bl = b - bh;
  let p = kept(a * b); return vec2<f32>(p, ((ah * bh - p) + ah * bl + al * bh) + al * bl); }
fn log2_pair(x: f32) -> vec2<f32> {
  let tiny = x < 1.17549435e-38f;
  let b = bitcast<i32>(select(x, x * 8388608.0f, tiny));
  let n = (b - 0x3f3504f3) >> 23u; let m = bitcast<f32>(b - (n << 23u));
  let e = f32(n + select(0, -23, tiny));
  let top = m - 1.0f; let under = two_sum(m, 1.0f); let s = kept(top / under.x);
  let back = two_mul(s, under.x);
  let low = (((top - back.x) - back.y) - s * under.y) / under.x;
  let square = s * s;
  let tail = s * square * fma(fma(fma(0.34072758f, square, 0.41167285f), square, 0.57708358f),
    square, 0.96179667f);
  let first = two_mul(s, 2.885390043f);
  let rest = first.y + s * 3.8519e-8f + low * 2.885390043f + tail;
  let sum = two_sum(e, first.x); let near = two_sum(sum.x, sum.y + rest);
  return near; }
fn f_pow(x: f32, y: f32) -> f32 {
  if (x == 1.0f || y == 0.0f) { return 1.0f; }
  if (is_nan(x) || is_nan(y)) { return number(0x7fc00000u); }
  let ends = !is_finite(y);
  if (ends && x == -1.0f) { return 1.0f; }
  let whole = ends || y == floor(y); let odd = whole && !ends && y * 0.5f != floor(y * 0.5f);
  if (x < 0.0f && is_finite(x) && !whole) { return number(0x7fc00000u); }
  let m = abs(x);
  var found = 0.0f;
  if (m == 0.0f || !is_finite(m) || ends) {
    let grows = (m > 1.0f) == (y > 0.0f);
    found = select(0.0f, number(0x7f800000u), grows);
  } else {
    let l = log2_pair(m); let high = two_mul(l.x, y); let low = high.y + l.y * y;
    let n = clamp(round(high.x), -300.0f, 300.0f);
    let r = clamp((high.x - n) + low, -2.0f, 2.0f);
    let far = fma(fma(fma(0.00015353431f, r, 0.0013398874f), r, 0.0096184371f), r, 0.055503325f);
    let scaled = 1.0f + r * fma(fma(far, r, 0.24022648f), r, 0.6931472f);
    if (high.x > 200.0f) { found = number(0x7f800000u); }
    else if (high.x > -200.0f) {
      let k = i32(n); let half = k >> 1u;
      found = scaled * power_of_two(half) * power_of_two(k - half); }
  }
  return select(found, -found, odd && (bitcast<u32>(x) >> 31u) == 1u); }
fn c_mod(x: f32, y: f32) -> f32 {
  if (is_nan(x) || is_nan(y) || !is_finite(x) || y == 0.0f) { return number(0x7fc00000u); }
  let b = bitcast<u32>(y) & 0x7fffffffu; var a = bitcast<u32>(x) & 0x7fffffffu;
  if (a < b) { return x; }
  let under = max(b >> 23u, 1u); let m = (b & 0x7fffffu) | select(0u, 0x800000u, b >= 0x800000u);
  var e = max(a >> 23u, 1u);
  var r = ((a & 0x7fffffu) | select(0u, 0x800000u, a >= 0x800000u)) % m;
  while (e > under && r != 0u) { let by = min(e - under, 8u); r = (r << by) % m; e -= by; }
  if (r == 0u) { return with_sign(0.0f, x); }
  while (r < 0x800000u && e > 1u) { r <<= 1u; e--; }
  let found = select(r, (e << 23u) | (r & 0x7fffffu), r >= 0x800000u);
  return with_sign(bitcast<f32>(found), x); }
fn f_mod(x: f32, y: f32) -> f32 {
  let exact = c_mod(x, y);
  if (is_nan(exact)) { return exact; }
  if (exact == 0.0f) { return with_sign(0.0f, y); }
  return select(exact, exact + y, (exact < 0.0f) != (y < 0.0f)); }
fn f_floordiv(x: f32, y: f32) -> f32 {
  if (y == 0.0f) { return f_div(x, y); }
  let exact = c_mod(x, y);
  var whole = f_div(x - exact, y);
  if (exact != 0.0f && (exact < 0.0f) != (y < 0.0f)) { whole -= 1.0f; }
  let down = floor(whole);
  return select(down, down + 1.0f, whole - down > 0.5f); }
fn i32_floordiv(x: i32, y: i32) -> i32 {
  if (y == 0) { return 0; } if (y == -1) { return 0 - x; }
  let q = x / y; let r = x - q * y;
  return select(q, q - 1, r != 0 && ((r < 0) != (y < 0))); }
fn i32_mod(x: i32, y: i32) -> i32 {
  if (y == 0 || y == -1) { return 0; }
  let r = x - x / y * y; return select(r, r + y, r != 0 && ((r < 0) != (y < 0))); }
fn u32_floordiv(x: u32, y: u32) -> u32 { if (y == 0u) { return 0u; } return x / y; }
fn u32_mod(x: u32, y: u32) -> u32 { if (y == 0u) { return 0u; } return x % y; }
fn i32_sign(x: i32) -> i32 { return select(0, 1, x > 0) - select(0, 1, x < 0); }
fn u32_sign(x: u32) -> u32 { return min(x, 1u); }
fn mulhi(a: u32, b: u32) -> u32 {
  let al = a & 0xffffu; let ah = a >> 16u; let bl = b & 0xffffu; let bh = b >> 16u;
  let low = al * bl; let middle = ah * bl + (low >> 16u);
  let other = al * bh + (middle & 0xffffu);
  return ah * bh + (middle >> 16u) + (other >> 16u); }
fn f_to_i32(x: f32) -> i32 {
  if (is_nan(x)) { return 0; } if (x >= 2147483648.0f) { return 2147483647; }
  return i32(max(x, -2147483648.0f)); }
fn f_to_u32(x: f32) -> u32 {
  if (is_nan(x) || x <= 0.0f) { return 0u; } if (x >= 4294967296.0f) { return 4294967295u; }
  return u32(x); }
fn wrap_int8(x: i32) -> i32 { return (x << 24u) >> 24u; }
fn wrap_uint8(x: u32) -> u32 { return x & 0xffu; }
fn round_bfloat16(x: f32) -> f32 {
  let b = bitcast<u32>(x);
  if (is_nan(x)) { return x; }
  return bitcast<f32>((b + 0x7fffu + ((b >> 16u) & 1u)) & 0xffff0000u); }
fn round_float16(x: f32) -> f32 {
  let b = bitcast<u32>(x); let m = abs(x);
  if (!is_finite(x)) { return x; }
  if (m < 6.103515625e-05f) { return with_sign(kept(m + 0.5f) - 0.5f, x); }
  let found = bitcast<f32>((b + 0xfffu + ((b >> 13u) & 1u)) & 0xffffe000u);
  return select(found, with_sign(number(0x7f800000u), x), abs(found) > 65504.0f); }
fn nearest_float16(x: f32) -> f16 {
  return f16(round_float16(x)); }
fn held_i32(x: i32, n: i32) -> i32 { return clamp(x, 0, n - 1); }
fn held_u32(x: u32, n: i32) -> i32 { return i32(min(x, u32(n - 1))); }
"""


def _functions() -> dict[str, str]:
    """Every function by its name."""
    parts = re.split(r"\n(?=fn )", (_TEXT + _EXACT).strip())
    return {re.match(r"fn (\w+)", part).group(1): part.strip() for part in parts}  # type: ignore[union-attr]


FUNCTIONS = _functions()
ROUNDED = "fn round_float16(x: f32) -> f32 {"
NEAREST = "fn nearest_float16(x: f32) -> f16 {"
_CALLED = re.compile(r"\b(\w+)\(")


def called(text: str) -> str:
    """The functions that a text calls, and what those call, in the order they are written."""
    wanted: set[str] = set()
    pending = [text]
    while pending:
        new = {n for n in _CALLED.findall(pending.pop()) if n in FUNCTIONS} - wanted
        wanted |= new
        pending += [FUNCTIONS[n] for n in new]
    return "\n".join(text for name, text in FUNCTIONS.items() if name in wanted)
