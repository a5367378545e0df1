// Random numbers of a page, for shuffles and draws: the generator that Python has.

/** Philox4x32-10: four random words of a counter of four and a key of two. */
export function philox([c0, c1, c2, c3], [k0, k1]) {
  const multiply = (a, b) => {
    const product = BigInt(a) * BigInt(b);
    return [Number(product >> 32n), Number(product & 0xffffffffn)];
  };
  for (let round = 0; round < 10; round++) {
    const [high0, low0] = multiply(c0, 0xd2511f53);
    const [high1, low1] = multiply(c2, 0xcd9e8d57);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    [k0, k1] = [(k0 + 0x9e3779b9) >>> 0, (k1 + 0xbb67ae85) >>> 0];
  }
  return [c0, c1, c2, c3];
}

/** Uniform numbers in [0, 1) of a seed and a stream, for shuffles and draws of a page. */
export function* uniforms(seed, stream = 0) {
  for (let block = 0; ; block++) {
    for (const word of philox([block >>> 0, stream >>> 0, 0, 0], [seed >>> 0, 0])) yield word / 2 ** 32;
  }
}

/** The numbers from 0 to n − 1 in a random order. */
export function permutation(n, draws) {
  const order = Uint32Array.from({ length: n }, (_, i) => i);
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(draws.next().value * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
