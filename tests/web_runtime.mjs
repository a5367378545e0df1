// Checks of the runtime's parts that need no GPU; run by tests/test_web.py as
// node web_runtime.mjs STATIC_FOLDER WORK_FOLDER. Prints JSON; throws where something is wrong.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, work] = process.argv.slice(2);
const runtime = await import(pathToFileURL(`${folder}/treadle.js`));
const { permutation, philox, uniforms } = await import(pathToFileURL(`${folder}/draws.js`));
const { ticks, thinned, smoothed, short } = await import(pathToFileURL(`${folder}/chart.js`));
const { readSafetensors, writeSafetensors, TreadleError } = runtime;

// A file that Python wrote, read and written again: every array, bit by bit.
const bytes = readFileSync(`${work}/python.safetensors`);
const { tensors, metadata } = readSafetensors(bytes);
assert.equal(metadata.made, "here");
writeFileSync(`${work}/node.safetensors`, writeSafetensors(tensors, { made: "there" }));

// Files that are none are refused, and say why.
const bad = (given, told) => assert.throws(() => readSafetensors(given), (error) => error instanceof TreadleError && told.test(error.message));
bad(new Uint8Array(3), /3 bytes/);
const header = (text, rest = 0) => {
  const head = new TextEncoder().encode(text);
  const all = new Uint8Array(8 + head.length + rest);
  new DataView(all.buffer).setBigUint64(0, BigInt(head.length), true);
  all.set(head, 8);
  return all;
};
const huge = new Uint8Array(16).fill(255);
bad(huge, /header has/);
bad(header("{"), /not JSON/);
bad(header("[]"), /no object/);
bad(header('{"a": null}'), /a as undefined/);
bad(header('{"a": {"dtype": "C64", "shape": [], "data_offsets": [0, 8]}}', 8), /a as C64/);
bad(header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', 4), /no shape/);
bad(header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": "x"}}', 4), /no place/);
bad(header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 4), /4 bytes for a/);
bad(header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', 4), /ends before a/);
for (let end = 0; end < bytes.length; end += 7) assert.throws(() => readSafetensors(bytes.subarray(0, end)), TreadleError);

// Words and back, for every dtype that programs hold.
for (const [name, { dtype, data }] of tensors) {
  const again = runtime.fromWords(dtype, runtime.toWords(dtype, data));
  assert.deepEqual(Buffer.from(again.buffer), Buffer.from(data.buffer, data.byteOffset, data.byteLength), name);
}

// The chart's arithmetic.
assert.deepEqual(ticks(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]);
assert.deepEqual(ticks(0, 437, 4), [0, 200, 400]);
assert.deepEqual(ticks(3, 3), [3]);
assert.deepEqual(thinned([1, 3, NaN, 5, 7, 9], 3), [[0.5, 2], [2.5, 5], [4.5, 8]]);
assert.deepEqual(smoothed([2, 2, 2], 0.9).map((v) => Number(v.toFixed(12))), [2, 2, 2]);
assert.deepEqual([0.00012, 1234567, 12.345, 0, NaN].map(short), ["1.2e-4", "1.2e+6", "12.3", "0", "NaN"]);

// A model on a GPU that runs nothing: what is written to a place is read from it.
const range = (bytes) => new Uint8Array(bytes.buffer ?? bytes, bytes.byteOffset ?? 0, bytes.byteLength);
const fakeDevice = () => ({
  limits: { minUniformBufferOffsetAlignment: 256 },
  lost: new Promise(() => {}),
  addEventListener() {},
  createBuffer: ({ size }) => {
    const data = new ArrayBuffer(size);
    return { data, mapAsync: async () => {}, getMappedRange: () => data, destroy() {} };
  },
  queue: { submit() {}, writeBuffer: (buffer, offset, given) => new Uint8Array(buffer.data).set(range(given), offset) },
  createCommandEncoder: () => ({
    beginComputePass: () => ({ end() {} }),
    finish() {},
    copyBufferToBuffer: (from, start, to, at, size) => new Uint8Array(to.data).set(new Uint8Array(from.data, start, size), at),
  }),
});
Object.assign(globalThis, { GPUBufferUsage: {}, GPUMapMode: {} });
const place = (dtype, shape, offset, more = {}) => ({ dtype, shape, offset, arena: "all", ...more });
const run = (inputs, outputs) => ({ seed: [5, 0], inputs, outputs: outputs.map((value) => ({ key: value, value })), launches: [] });
const values = {
  narrow: place("bfloat16", [4], 0),
  bytes: place("uint8", [2], 32),
  wide: place("int64", [2], 48),
  key: place("uint32", [6], 64),
  label: place("int32", [2], 96, { allowed: [[0, 9]] }),
  weight: place("float32", [2], 128, { kind: "parameter", file: "weight" }),
  rate: place("float32", [1], 144, { kind: "step", file: "step:rate" }),
};
const bundle = (counters) => structuredClone({
  values,
  counters,
  arenas: [{ name: "all", bytes: 256 }],
  step: { accumulate: 2, programs: { update: "step", accumulate: "step" } },
  programs: {
    step: run({ "random:key": "key" }, ["key"]),
    same: run({ "batch:narrow": "narrow", "batch:bytes": "bytes", "batch:wide": "wide", "batch:label": "label" }, ["narrow", "bytes", "wide", "label"]),
  },
});
const fresh = (counters) => new runtime.Model(fakeDevice(), bundle(counters), "", new Map());
const model = fresh({ seed: [5, 0], stream: 0, steps: 3, micro: 0 });

// Numbers are rounded to bfloat16 and come back as numbers; integers that do not fit are refused.
const fits = { narrow: [1.5, -2, 1.00390625, 3e38], bytes: [0, 255], wide: [-1, 7], label: [0, 9] };
const { narrow, bytes: small, wide } = await model.run("same", fits);
assert.deepEqual([...narrow], [1.5, -2, 1, Math.fround(3.0040553616405855e38)]);
assert.deepEqual([...small, ...wide], [0, 255, -1n, 7n]);
assert.deepEqual([...(await model.run("same", { ...fits, narrow: Uint16Array.of(0x3fc0, 0, 0, 0) })).narrow], [1.5, 0, 0, 0]);
for (const [name, data, told] of [
  ["bytes", [0, 256], /bytes has 256, and whole numbers from 0 to 255/],
  ["bytes", [0.5, 1], /bytes has 0.5/],
  ["bytes", ["x", 1], /bytes has x/],
  ["bytes", [undefined, 1], /bytes has undefined/],
  ["wide", [0, 2 ** 31], /wide has 2147483648/],
  ["wide", BigInt64Array.of(0n, 1n << 40n), /wide has 1099511627776/],
  ["label", [1, 10], /label has 10, and 0 to 9 are right/],
  ["label", [1, 1.5], /label has 1.5, and whole numbers/],
]) await assert.rejects(model.run("same", { ...fits, [name]: data }), told);

// A state goes on with its own seed and counters; one that makes no sense changes nothing.
const state = (words, weight = [1, 2]) => writeSafetensors({
  weight: { dtype: "float32", shape: [2], data: Float32Array.from(weight) },
  "step:rate": { dtype: "float32", shape: [1], data: Float32Array.of(9) },
  "step:counters": { dtype: "int64", shape: [words.length], data: BigInt64Array.from(words, BigInt) },
});
const key = async () => [...(await model.step({})).key];
assert.deepEqual(await key(), [5, 0, 3, 0, 0, 0]);
model.load(state([8, 9, 40, 1]));
const again = readSafetensors(await model.saveState()).tensors.get("step:counters").data;
assert.deepEqual([...again], [8n, 9n, 40n, 1n]);
assert.deepEqual(await key(), [8, 9, 40, 1, 0, 0]);
assert.deepEqual(model.counters, { steps: 41, micro: 0 });
for (const [words, told] of [
  [[5, 0, 3], /counters are 5,0,3/],
  [[5, 0, -3, 0], /counters are/],
  [[5, 0, 3, 2], /2 micro-steps, too many/],
  [[6, 0, 3, 0, 4], /the random stream 4 of another seed/],
]) assert.throws(() => model.load(state(words, [7, 7])), told);
assert.deepEqual([...(await model.read(["weight"])).get("weight")], [1, 2]);
assert.deepEqual(model.counters, { steps: 41, micro: 0 });
model.reset();
assert.deepEqual(await key(), [5, 0, 3, 0, 0, 0]);
const streamed = fresh({ seed: [6, 0], stream: 4, steps: 0, micro: 0 });
streamed.load(state([6, 0, 3, 0, 4]));
assert.deepEqual([...(await streamed.step({})).key], [5, 0, 3, 0, 0, 0]); // the words of its stream, from the bundle

// Every held-out row counts, by its weight.
const { evaluation, weightedMean } = await import(pathToFileURL(`${folder}/page.js`));
assert.equal(weightedMean([[1, 3], [NaN, 0], [5, 1]]), 2);
assert.ok(Number.isNaN(weightedMean([[1, 0]])));
const seen = [];
const evaluated = {
  programs: { evaluate: { inputs: [{ shape: [4, 1] }] } },
  run: async (name, { x }) => {
    seen.push([name, ...x]);
    const weight = x.reduce((a, b) => a + b, 0); // as of a loss that returns its own
    return { loss: x.length, weight, "metric:rows": x.length, "weight:rows": x.length };
  },
};
const held = { x: { rows: 6, width: 1, data: Float32Array.of(1, 2, 3, 4, 5, 6) } };
assert.deepEqual(await evaluation(evaluated, held)(), { loss: (4 * 10 + 2 * 11) / 21, metrics: { rows: (16 + 4) / 6 } });
assert.deepEqual(seen, [["evaluate", 1, 2, 3, 4], ["evaluate_rest", 5, 6]]);

// Without a GPU the error says so, and what to do.
await assert.rejects(runtime.openDevice(), /no WebGPU here\. Use a current Chrome/);

const draws = uniforms(7, 3);
console.log(JSON.stringify({
  key: [...runtime.makeKey([5, 6], 7, 8)],
  bits: Array.from({ length: 3 }, (_, block) => philox([block, 2, 7, (3 << 16) + 9], [123, 456])).flat(),
  order: [...permutation(10, uniforms(1))],
  uniforms: Array.from({ length: 5 }, () => draws.next().value),
}));
