// Checks of the runtime's parts that need no GPU; run by tests/test_web.py as
// node web_runtime.mjs STATIC_FOLDER WORK_FOLDER. Prints JSON; throws where something is wrong.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, work] = process.argv.slice(2);
const runtime = await import(pathToFileURL(`${folder}/treadle.js`));
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

// Without a GPU the error says so, and what to do.
await assert.rejects(runtime.openDevice(), /no WebGPU here\. Use a current Chrome/);

const draws = runtime.uniforms(7, 3);
console.log(JSON.stringify({
  key: [...runtime.makeKey([5, 6], 7, 8)],
  bits: Array.from({ length: 3 }, (_, block) => runtime.philox([block, 2, 7, (3 << 16) + 9], [123, 456])).flat(),
  order: [...runtime.permutation(10, runtime.uniforms(1))],
  uniforms: Array.from({ length: 5 }, () => draws.next().value),
}));
