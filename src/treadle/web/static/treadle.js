// Treadle in the browser: runs, and trains, what `export_web` wrote. No dependencies.
//
//     import { open } from "./treadle.js";
//     const model = await open(".");
//     const { loss } = await model.step({ x, y });            // one training step
//     const out = await model.run("predict", { x });          // a forward program: results by name
//     const bytes = await model.saveWeights();                // safetensors, for Python

export const FORMAT = 1;
const MODEL = ["parameter", "state"]; // kinds of values that are the model's

/** An error that says what was asked, what is wrong and what to do. */
export class TreadleError extends Error {
  constructor(operation, cause, remedy = "") {
    super(`${operation}: ${cause}.${remedy ? ` ${remedy}` : ""}`);
    this.name = "TreadleError";
    Object.assign(this, { operation, cause, remedy });
  }
}

// ---- dtypes: how arrays are named in files, and which words hold them on a GPU ----

const sameBits = (a) => new Uint32Array(a.buffer, a.byteOffset, a.length);
const DTYPES = {
  float32: { tag: "F32", array: Float32Array, words: sameBits },
  bfloat16: { tag: "BF16", array: Uint16Array, words: (a) => Uint32Array.from(a, (n) => n << 16) },
  int32: { tag: "I32", array: Int32Array, words: sameBits },
  uint32: { tag: "U32", array: Uint32Array, words: sameBits },
  int8: { tag: "I8", array: Int8Array, words: (a) => sameBits(Int32Array.from(a)) },
  uint8: { tag: "U8", array: Uint8Array, words: (a) => Uint32Array.from(a) },
  bool: { tag: "BOOL", array: Uint8Array, words: (a) => Uint32Array.from(a, (n) => (n ? 1 : 0)) },
  int64: { tag: "I64", array: BigInt64Array, words: (a) => Uint32Array.from(a, (n) => Number(BigInt.asUintN(32, n))) }, // counters
  float64: { tag: "F64", array: Float64Array }, // in files only
};

/** A word of four bytes for each element, as programs hold them. */
export const toWords = (dtype, array) => DTYPES[dtype].words(array);

/** Elements of a dtype from the words that programs hold. */
export function fromWords(dtype, words) {
  const own = new Uint32Array(words); // a copy
  if (dtype === "bfloat16") return Uint16Array.from(own, (n) => n >>> 16);
  if (dtype === "int64") return BigInt64Array.from(new Int32Array(own.buffer), BigInt);
  const { array } = DTYPES[dtype];
  return array.BYTES_PER_ELEMENT === 4 ? new array(own.buffer) : array.from(own);
}

/** Bits of the bfloat16 nearest to a number, ties to even. */
function toBfloat16(number) {
  const [bits] = new Uint32Array(Float32Array.of(number).buffer);
  if (Number.isNaN(Number(number))) return 0x7fc0;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

// What integers hold on a GPU; those of 64 bits have 32 there.
const WHOLE = { int64: [-(2 ** 31), 2 ** 31 - 1], int32: [-(2 ** 31), 2 ** 31 - 1], uint32: [0, 2 ** 32 - 1], int8: [-128, 127], uint8: [0, 255], bool: [0, 1] };

const sizeOf = (shape) => shape.reduce((product, n) => product * n, 1);

// ---- safetensors: eight bytes of length, a JSON header, the arrays one after the other ----

/** Arrays by name of the bytes of a file, and its metadata. Nothing in it is trusted. */
export function readSafetensors(bytes) {
  const fail = (cause) => { throw new TreadleError("load", `the file ${cause}`, "Choose a safetensors file."); };
  const data = ArrayBuffer.isView(bytes) ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength) : new Uint8Array(bytes);
  if (data.length < 8) fail(`has ${data.length} bytes, too few for safetensors`);
  const length = Number(new DataView(data.buffer, data.byteOffset).getBigUint64(0, true));
  if (length > data.length - 8) fail(`says that its header has ${length} bytes, and has ${data.length}`);
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(data.subarray(8, 8 + length)));
  } catch {
    fail("has a header that is not JSON");
  }
  if (header === null || typeof header !== "object" || Array.isArray(header)) fail("has a header that is no object");
  const start = 8 + length;
  const tensors = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const { dtype: tag, shape, data_offsets: offsets } = entry ?? {};
    const dtype = Object.keys(DTYPES).find((d) => DTYPES[d].tag === tag);
    if (!dtype) fail(`has ${name} as ${tag}, which is not read here`);
    const isCount = (n) => Number.isSafeInteger(n) && n >= 0;
    if (!Array.isArray(shape) || !shape.every(isCount)) fail(`has no shape for ${name}`);
    if (!Array.isArray(offsets) || !offsets.every(isCount)) fail(`has no place for ${name}`);
    const { array } = DTYPES[dtype];
    const [from, to] = offsets;
    if (to - from !== sizeOf(shape) * array.BYTES_PER_ELEMENT) fail(`has ${to - from} bytes for ${name}, a ${tag} [${shape}]`);
    if (start + to > data.length) fail(`ends before ${name}`);
    tensors.set(name, { dtype, shape, data: new array(data.slice(start + from, start + to).buffer) });
  }
  return { tensors, metadata: header.__metadata__ ?? {} };
}

/** The bytes of a file with arrays by name: a Map, or an object, of { dtype, shape, data }. */
export function writeSafetensors(tensors, metadata = null) {
  const header = metadata ? { __metadata__: metadata } : {};
  // Large elements first, as the reference does: then all of them are aligned.
  const size = ([, t]) => DTYPES[t.dtype].array.BYTES_PER_ELEMENT;
  const order = [...(tensors instanceof Map ? tensors : Object.entries(tensors))];
  order.sort((a, b) => size(b) - size(a) || (a[0] < b[0] ? -1 : 1));
  let end = 0;
  for (const [name, { dtype, shape, data }] of order) {
    header[name] = { dtype: DTYPES[dtype].tag, shape, data_offsets: [end, end + data.byteLength] };
    end += data.byteLength;
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (new TextEncoder().encode(text).length % 8)) % 8);
  const head = new TextEncoder().encode(text);
  const bytes = new Uint8Array(8 + head.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(head.length), true);
  bytes.set(head, 8);
  for (const [name, { data }] of order) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), 8 + head.length + header[name].data_offsets[0]);
  }
  return bytes;
}

// ---- random numbers: the same Philox key and counters as Python's make_key ----

/** The value of a program's random state: seed (2 words), step, micro-step, scan index, sites. */
export function makeKey([low, high], step = 0, microStep = 0) {
  return Uint32Array.of(low, high, step, microStep, 0, 0);
}

// ---- the device ----

/** A GPU that has what a model needs, or an error in words. */
export async function openDevice(limits = {}) {
  const remedy = "Use a current Chrome, Edge, Safari or Firefox on a computer with a GPU.";
  if (!globalThis.navigator?.gpu) {
    const isOpen = globalThis.isSecureContext === false; // there WebGPU is kept away
    throw new TreadleError("open", "this browser has no WebGPU here", isOpen ? "Serve the page over https or from localhost." : remedy);
  }
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new TreadleError("open", "WebGPU found no GPU to use", remedy);
  const small = Object.entries(limits).filter(([name, least]) => adapter.limits[name] < least);
  if (small.length) {
    const told = small.map(([name, least]) => `${name} is ${adapter.limits[name]}, and ${least} is needed`).join("; ");
    throw new TreadleError("open", `the GPU is too small for this model: ${told}`, "Export a smaller model or batch.");
  }
  return adapter.requestDevice({ requiredLimits: limits });
}

async function fetched(base, name, as) {
  const address = `${base.replace(/\/$/, "")}/${name}`;
  let answer;
  try {
    answer = await fetch(address);
  } catch (error) {
    const remedy = globalThis.location?.protocol === "file:" ? "Serve the folder: python -m http.server." : "Is the server running?";
    throw new TreadleError("open", `${address} cannot be fetched (${error.message})`, remedy);
  }
  if (!answer.ok) throw new TreadleError("open", `${address} is not there (${answer.status})`, "Export the folder again.");
  return answer[as]();
}

/** A model of an exported folder, with its weights on the GPU.
 *  With `lazy` it does not wait for the browser to compile programs: the first run of each does. */
export async function open(base = ".", { device = null, lazy = false } = {}) {
  const bundle = await fetched(base, "bundle.json", "json");
  if (bundle.format !== FORMAT) {
    throw new TreadleError("open", `the folder has format ${bundle.format}, this runtime reads ${FORMAT}`, "Export it again.");
  }
  const [gpu, source, ...files] = await Promise.all([
    device ?? openDevice(bundle.limits),
    fetched(base, bundle.kernels, "text"),
    ...bundle.files.map(async (file) => readSafetensors(await fetched(base, file, "arrayBuffer"))),
  ]);
  const model = new Model(gpu, bundle, source, new Map(files.flatMap(({ tensors }) => [...tensors])));
  if (!lazy) await Promise.all(Object.values(model.programs).map((program) => program.compiled));
  return model;
}

// ---- the model: values by name, and the programs that act on them ----

/** Parameters and states on the GPU, and the programs of a folder. */
export class Model {
  constructor(device, bundle, source, shipped) {
    Object.assign(this, { device, bundle, shipped, lost: null });
    this.arenas = Object.fromEntries(bundle.arenas.map(({ name, bytes }) => [name, arena(device, bytes)]));
    const places = Object.entries(bundle.values);
    this.values = new Map(places.filter(([, place]) => place.kind)); // by name: what outlives a run
    for (const [name, place] of places) if (place.role === "constant") this.#put(place, shipped.get(name));
    const kernels = new Kernels(device, source);
    this.programs = {};
    for (const [name, facts] of Object.entries(bundle.programs)) this.programs[name] = new Program(this, name, facts, kernels);
    this.reset();
    device.lost.then((told) => {
      const why = told.message.trim() || told.reason;
      this.lost ??= new TreadleError("run", `the GPU was lost (${why})`, "Reload the page; save weights often.");
    });
    device.addEventListener("uncapturederror", ({ error }) => {
      this.lost ??= new TreadleError("run", `the GPU refused a command (${error.message.trim()})`, "Reload the page.");
    });
  }

  /** One training step, or one micro-step of an accumulation: loss, metrics and the rest by name. */
  async step(batch, options) {
    const { accumulate, programs } = this.bundle.step ?? {};
    if (!accumulate) throw new TreadleError("step", "this folder has forward programs only", "Export a TrainStep.");
    const { steps, micro } = this.counters;
    const isLast = micro === accumulate - 1;
    const program = this.program(isLast ? programs.update : programs.accumulate);
    return program.run(batch, () => {
      this.counters = isLast ? { steps: steps + 1, micro: 0 } : { steps, micro: micro + 1 };
      return makeKey(this.seed ?? program.seed, steps, micro);
    }, options);
  }

  /** Run a program by name; results by name, or in order where they have none. */
  async run(name, inputs, options) {
    const program = this.program(name);
    return program.run(inputs, () => makeKey(program.seed, program.calls++), options);
  }

  program(name) {
    const found = this.programs[name];
    if (found) return found;
    throw new TreadleError("run", `there is no program ${name}`, `There are: ${Object.keys(this.programs).join(", ")}.`);
  }

  check() {
    if (this.lost) throw this.lost;
  }

  /** Start again from what was exported: weights, optimizer and counters. */
  reset() {
    for (const [name, value] of this.values) {
      const found = this.shipped.get(value.file);
      this.write(name, found ? found.data : new DTYPES[value.dtype].array(sizeOf(value.shape)));
    }
    const { steps, micro } = this.bundle.counters;
    this.counters = { steps, micro };
    this.seed = null; // of a file that was loaded, where it has another than the bundle
    for (const program of Object.values(this.programs)) program.calls = 0;
  }

  /** Copy a value in. */
  write(name, data) {
    const value = this.#value(name);
    this.#put(value, { dtype: value.dtype, data: fitted("write", name, data, value) });
  }

  #put(place, { dtype, data }) {
    if (place.arena) this.device.queue.writeBuffer(this.arenas[place.arena], place.offset, toWords(dtype, data));
    else place.held = data; // no program has it: it is only saved again
  }

  /** Copies of values by name. */
  async read(names) {
    this.check();
    const values = names.map((name) => this.#value(name));
    const words = await readBack(this.device, this.arenas, values.filter((value) => value.arena));
    this.check();
    return new Map(names.map((name, i) => [name, values[i].arena ? fromWords(values[i].dtype, words.shift()) : values[i].held]));
  }

  #value(name) {
    const found = this.values.get(name);
    if (found) return found;
    throw new TreadleError("values", `there is no value ${name}`, `There are: ${[...this.values.keys()].join(", ")}.`);
  }

  /** Values as a safetensors file: `step.load_params` in Python takes them. */
  async saveWeights() {
    return this.#save(this.#ofKinds(MODEL), null);
  }

  /** Everything that the next step depends on: `step.load` in Python goes on from there. */
  async saveState() {
    const { seed, stream } = this.seed ? { seed: this.seed, stream: 0 } : this.bundle.counters;
    const words = [...seed, this.counters.steps, this.counters.micro, ...(stream ? [stream] : [])];
    const counters = { dtype: "int64", shape: [words.length], data: BigInt64Array.from(words, BigInt) };
    const metadata = { treadle: JSON.stringify({ schema: 1, kind: "step" }) };
    return this.#save(this.#ofKinds([...MODEL, "step"]), metadata, new Map([["step:counters", counters]]));
  }

  #ofKinds(kinds) {
    return [...this.values].filter(([, value]) => kinds.includes(value.kind));
  }

  async #save(values, metadata, tensors = new Map()) {
    const arrays = await this.read(values.map(([name]) => name));
    for (const [name, { dtype, shape, file }] of values) tensors.set(file, { dtype, shape, data: arrays.get(name) });
    return writeSafetensors(tensors, metadata);
  }

  /** Take values of a file by name, all or nothing: weights, or the state of a step too. */
  load(bytes) {
    const { tensors } = readSafetensors(bytes);
    const counters = tensors.get("step:counters");
    const at = counters && this.#position(counters.data);
    const wanted = this.#ofKinds(counters ? [...MODEL, "step"] : MODEL);
    const missing = wanted.filter(([, v]) => !tensors.has(v.file)).map(([, v]) => v.file);
    if (missing.length) throw new TreadleError("load", `the file lacks ${missing.join(", ")}`, "Choose a file of the same model.");
    const arrays = wanted.map(([name, value]) => {
      const given = tensors.get(value.file);
      return [name, fitted("load", value.file, given.data, value, given)];
    });
    for (const [name, array] of arrays) this.write(name, array);
    if (at) Object.assign(this, at);
  }

  /** Where the next step is, and its seed, of the counters of a file: two words of seed, steps, micro-steps, stream. */
  #position(data) {
    const fail = (cause) => { throw new TreadleError("load", `the file's counters ${cause}`, "Choose a file of the same step."); };
    const words = Array.from(data, Number);
    const [low, high, steps, micro, stream = 0] = words;
    const isWhole = words.every((n) => Number.isSafeInteger(n) && n >= 0) && low < 2 ** 32 && high < 2 ** 32;
    if (words.length < 4 || words.length > 5 || !isWhole) fail(`are ${words}`);
    if (micro >= (this.bundle.step?.accumulate ?? 1)) fail(`have ${micro} micro-steps, too many for this step`);
    const own = this.bundle.counters;
    const isOwn = low === own.seed[0] && high === own.seed[1] && stream === own.stream;
    if (!isOwn && stream) fail(`have the random stream ${stream} of another seed, which this page cannot go on with`);
    return { counters: { steps, micro }, seed: isOwn ? null : [low, high] };
  }

  /** Give the GPU's memory back. */
  close() {
    this.lost ??= new TreadleError("run", "the model was closed", "Open it again.");
    for (const buffer of Object.values(this.arenas)) buffer.destroy();
  }
}

/** Elements as a typed array of a value's dtype and size, or an error. */
function fitted(operation, name, data, { dtype, shape, allowed }, given = null) {
  const fail = (cause) => { throw new TreadleError(operation, `${name} ${cause}`, `It is ${dtype} [${shape}].`); };
  const { array } = DTYPES[dtype];
  const flat = ArrayBuffer.isView(data) ? data : Array.isArray(data) ? data.flat(Infinity) : [data];
  if (flat.length !== sizeOf(shape)) fail(`has ${flat.length} elements`);
  if (given && (given.dtype !== dtype || `${given.shape}` !== `${shape}`)) fail(`is ${given.dtype} [${given.shape}] in the file`);
  const wrong = allowed && flat.find((n) => !allowed.some(([low, high]) => n >= low && n <= high));
  if (wrong !== undefined) {
    const right = allowed.map(([low, high]) => (low === high ? low : `${low} to ${high}`));
    fail(`has ${wrong}, and ${right.join(", ")} are right`);
  }
  const range = WHOLE[dtype];
  const isBits = flat instanceof array && dtype !== "int64";
  const other = range && !isBits ? flat.findIndex((n) => !(Number.isInteger(Number(n)) && n >= range[0] && n <= range[1])) : -1;
  if (other >= 0) fail(`has ${flat[other]}, and whole numbers from ${range.join(" to ")} are right`);
  if (flat instanceof array) return flat;
  if (dtype === "bfloat16") return array.from(flat, toBfloat16);
  return dtype === "int64" ? array.from(flat, BigInt) : array.from(flat);
}

/** Memory of the GPU, all zeros. */
function arena(device, bytes) {
  return device.createBuffer({ size: bytes, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST });
}

/** The words at some places: one copy on the GPU after what the encoder has, one wait. */
async function readBack(device, arenas, places, encoder = device.createCommandEncoder()) {
  const sizes = places.map((place) => 4 * sizeOf(place.shape));
  const size = sizes.reduce((a, b) => a + b, 4);
  const staging = device.createBuffer({ size, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  let at = 0;
  places.forEach((place, i) => {
    encoder.copyBufferToBuffer(arenas[place.arena], place.offset, staging, at, sizes[i]);
    at += sizes[i];
  });
  device.queue.submit([encoder.finish()]);
  await staging.mapAsync(GPUMapMode.READ);
  const words = new Uint32Array(staging.getMappedRange().slice(0));
  staging.destroy();
  at = 0;
  return sizes.map((bytes) => words.subarray(at / 4, (at += bytes) / 4));
}

// ---- a program: kernels over arenas, recorded as one command buffer a run ----

class Program {
  constructor(model, name, facts, kernels) {
    const at = (value) => model.bundle.values[value];
    Object.assign(this, { model, name, seed: facts.seed, calls: 0, launches: null });
    this.random = facts.inputs["random:key"];
    const given = Object.entries(facts.inputs).filter(([leaf]) => leaf !== "random:key");
    this.inputs = given.map(([leaf, value]) => ({ key: leaf.replace("batch:", ""), ...at(value) }));
    this.outputs = facts.outputs.map(({ key, value }) => ({ name: key, ...at(value) }));
    this.#facts = [facts.launches, kernels];
  }

  #facts;
  #compiling = null;

  /** When the browser has compiled its kernels, which begins when this is first asked for. */
  get compiled() {
    this.#compiling ??= this.#compile(...this.#facts);
    this.#compiling.catch(() => {}); // whoever runs it is told
    return this.#compiling;
  }

  async #compile(launches, kernels) {
    const { device, arenas } = this.model;
    const pipelines = await Promise.all(launches.map(({ shader }) => kernels.pipeline(shader)));
    const starts = uniform(device, launches.map((launch) => launch.arguments));
    this.launches = launches.map((launch, i) => {
      const { pipeline, layout } = pipelines[i];
      const entries = launch.arenas.map((name, binding) => ({ binding, resource: { buffer: arenas[name] } }));
      const both = [entries, [{ binding: 0, resource: starts[i] }]];
      const groups = both.map((own, at) => device.createBindGroup({ layout: layout[at], entries: own }));
      return { pipeline, groups, workgroups: launch.workgroups };
    });
  }

  /** `count` gives the random state of this run, and is called once nothing can be wrong any more. */
  async run(inputs, count, { read = true } = {}) {
    this.model.check();
    const { device, arenas } = this.model;
    const put = (place, words) => device.queue.writeBuffer(arenas[place.arena], place.offset, words);
    const given = this.#checked(inputs); // before anything is written: bad input changes nothing
    const key = count();
    if (!this.launches) await this.compiled; // from then on a run is submitted before this returns
    for (const [place, array] of given) put(place, toWords(place.dtype, array));
    if (this.random) put(this.model.bundle.values[this.random], key);
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const { pipeline, groups, workgroups } of this.launches) {
      pass.setPipeline(pipeline);
      groups.forEach((group, i) => pass.setBindGroup(i, group));
      pass.dispatchWorkgroups(...workgroups);
    }
    pass.end();
    if (!read) {
      device.queue.submit([encoder.finish()]);
      return null;
    }
    const words = await readBack(device, arenas, this.outputs, encoder);
    this.model.check();
    return Object.fromEntries(this.outputs.map(({ name, dtype, shape }, i) => {
      const found = fromWords(dtype === "bfloat16" ? "float32" : dtype, words[i]); // as numbers: a word is the same in both
      return [name, shape.length ? found : Number(found[0])];
    }));
  }

  #checked(inputs) {
    const names = this.inputs.map((place) => place.key);
    const isAlone = names.length === 1 && (ArrayBuffer.isView(inputs) || Array.isArray(inputs));
    const given = isAlone ? { [names[0]]: inputs } : inputs ?? {};
    const wrong = [...names.filter((n) => !(n in given)), ...Object.keys(given).filter((n) => !names.includes(n))];
    if (wrong.length) throw new TreadleError(this.name, `${wrong.join(", ")} is missing or unknown`, `It takes: ${names.join(", ")}.`);
    return this.inputs.map((place) => [place, fitted(this.name, place.key || "the input", given[place.key], place)]);
  }
}

/** Kernels of a file of WGSL: each begins with a line `//// NAME ARENAS`, and is compiled once. */
class Kernels {
  constructor(device, source) {
    Object.assign(this, { device, texts: new Map(), made: new Map() });
    for (const part of source.split(/^\/\/\/\/ /m).slice(1)) {
      const end = part.indexOf("\n");
      const [name, arenas] = part.slice(0, end).split(" ");
      this.texts.set(name, [Number(arenas), part.slice(end + 1)]);
    }
  }

  pipeline(name) {
    if (!this.made.has(name)) this.made.set(name, this.#make(name, ...this.texts.get(name)));
    return this.made.get(name);
  }

  async #make(name, arenas, code) {
    const { device } = this;
    // Group 0 has the arenas that a kernel reads and writes, group 1 where its buffers start in them.
    const entry = (binding, type) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } });
    const own = Array.from({ length: arenas }, (_, i) => entry(i, "storage"));
    const layout = [own, [entry(0, "uniform")]].map((entries) => device.createBindGroupLayout({ entries }));
    const module = device.createShaderModule({ label: name, code });
    try {
      const whole = device.createPipelineLayout({ bindGroupLayouts: layout });
      const pipeline = await device.createComputePipelineAsync({ layout: whole, compute: { module, entryPoint: "main" } });
      return { pipeline, layout };
    } catch (error) {
      const told = (await module.getCompilationInfo()).messages.filter((m) => m.type === "error");
      const where = told.map((m) => `line ${m.lineNum}: ${m.message}`).join("; ");
      throw new TreadleError("open", `the browser refuses the kernel ${name}: ${where || error.message}`, "Please report it.");
    }
  }
}

/** Words of each launch in one uniform buffer, as parts that can be bound: each as long as the
 *  longest, since a kernel's declaration has room for more calls than a launch may have. */
function uniform(device, all) {
  const align = device.limits.minUniformBufferOffsetAlignment / 4;
  const longest = Math.max(4, ...all.map((words) => words.length));
  const starts = [];
  let end = 0;
  for (const words of all) {
    starts.push(end);
    end += Math.ceil(words.length / align) * align;
  }
  const data = new Uint32Array(end + longest);
  all.forEach((words, i) => data.set(words, starts[i]));
  const buffer = device.createBuffer({ size: data.byteLength, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
  device.queue.writeBuffer(buffer, 0, data);
  return starts.map((start) => ({ buffer, offset: 4 * start, size: 4 * longest }));
}
