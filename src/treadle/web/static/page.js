// What every page does: open the model, train it while the visitor wishes, save and load weights.

import { permutation, uniforms } from "./draws.js";
import { open, readSafetensors } from "./treadle.js";
import { Chart, short } from "./chart.js";

export const $ = (id) => document.getElementById(id);
const SOON = 40; // milliseconds between pictures while training

/** The file that was chosen, or null where none was; the same one can be chosen again. */
export function chosenFile(input) {
  const [file = null] = input.files;
  if (file) input.value = "";
  return file;
}

/** An error in words, at the top of the page. */
export function tell(error) {
  $("message").textContent = error?.message ?? String(error);
  $("message").hidden = false;
}

/** Run what a visitor asked for; what goes wrong is told, and nothing else happens. */
export function guarded(action) {
  return async (...given) => {
    try {
      $("message").hidden = true;
      return await action(...given);
    } catch (error) {
      tell(error);
      return undefined;
    }
  };
}

/** The model of this folder, or the reason why there is none, told. */
export async function start(ready) {
  try {
    const model = await open(".", { lazy: true });
    const size = (v) => v.shape.reduce((a, b) => a * b, 1);
    const count = [...model.values.values()].filter((v) => v.kind === "parameter").reduce((sum, v) => sum + size(v), 0);
    const [main] = Object.values(model.bundle.programs);
    $("model-facts").textContent = `${count.toLocaleString("en")} parameters.`;
    const what = model.bundle.step ? "a whole training step, gradients and optimizer included," : "a run";
    $("kernel-facts").textContent = `: ${what} is ${main.launches.length} kernels in one command buffer`;
    await ready(model);
    document.querySelector("main").setAttribute("aria-busy", "false");
    globalThis.treadle = { ...globalThis.treadle, model, ready: performance.now() };
    // The page is there: now kernels are compiled, before anyone asks for them.
    setTimeout(() => Object.values(model.programs).forEach((program) => program.compiled));
  } catch (error) {
    tell(error);
    globalThis.treadle = { failed: error.message };
  }
}

/** Rows of the folder's data by split and leaf: { train: { x: [...] , y: ... }, test: ... }. */
export async function loadData(model) {
  const { data } = model.bundle;
  if (!data) return {};
  const { body } = await fetch(data.file);
  const rows = new Response(body.pipeThrough(new DecompressionStream("gzip")));
  const { tensors } = readSafetensors(await rows.arrayBuffer());
  const splits = {};
  for (const [split, leaves] of Object.entries(data.splits)) {
    splits[split] = Object.fromEntries(
      Object.entries(leaves).map(([key, { divisor }]) => [key, unpacked(tensors.get(`${split}/${key}`), divisor)]),
    );
  }
  return splits;
}

/** Small integers stand for numbers: divided in double precision and rounded, they are exact. */
function unpacked({ data, shape }, divisor) {
  const width = shape.slice(1).reduce((a, b) => a * b, 1);
  return { rows: shape[0], width, data: divisor ? Float32Array.from(data, (n) => n / divisor) : data };
}

/** Batches of rows: a new order each epoch; an incomplete batch at its end is left out. */
export class Batches {
  constructor(rows, size, seed = 0) {
    const [first] = Object.values(rows);
    Object.assign(this, { rows, size, count: first.rows, at: 0, epoch: 0, seed, order: null });
    if (this.count < size) throw new Error(`There are ${this.count} rows of data, and a batch has ${size}.`);
  }

  next() {
    if (!this.order || this.at + this.size > this.count) {
      this.order = permutation(this.count, uniforms(this.seed, this.epoch++));
      this.at = 0;
    }
    const chosen = this.order.subarray(this.at, this.at + this.size);
    this.at += this.size;
    return this.take(chosen);
  }

  take(chosen) {
    return Object.fromEntries(Object.entries(this.rows).map(([key, { data, width }]) => {
      const part = new data.constructor(chosen.length * width);
      chosen.forEach((row, i) => part.set(data.subarray(row * width, (row + 1) * width), i * width));
      return [key, part];
    }));
  }

  reset() {
    Object.assign(this, { at: 0, epoch: 0, order: null });
  }
}

/** The panel that trains: start and pause, reset, numbers, chart, save and load. */
export class Training {
  /** `next()` gives a batch; `score()` what is shown of held-out rows; `changed()` is called after steps. */
  constructor(model, { next, score = null, scoreEvery = 100, changed = () => {}, again = () => {}, name = "model" }) {
    Object.assign(this, { model, next, score, scoreEvery, changed, again, name, running: false, losses: [], frame: 1 });
    this.chart = new Chart($("chart"));
    this.scored = -1;
    $("score-box").hidden = $("held-key").hidden = !score;
    $("start").onclick = guarded(() => (this.running ? this.pause() : this.run()));
    $("reset").onclick = guarded(() => this.reset());
    $("save").onclick = guarded(() => this.save(`${name}.safetensors`, () => model.saveWeights()));
    $("save-state").onclick = guarded(() => this.save(`${name}-state.safetensors`, () => model.saveState()));
    $("load").onchange = guarded((event) => this.load(event.target));
    $("lr-scale").oninput = guarded(() => this.scaleRate());
    for (const id of ["start", "reset", "save", "save-state", "load", "lr-scale"]) $(id).disabled = false;
    $("lr-scale").disabled = !model.bundle.step?.scale;
    this.show();
  }

  /** Train until `pause`, or for a number of steps; what is training already is waited for. */
  run(most = Infinity) {
    if (!this.running) this.loop = this.#train(most);
    return this.loop;
  }

  async #train(most) {
    this.running = true;
    this.show();
    const end = this.losses.length + most;
    try {
      while (this.running && this.losses.length < end) await this.#several(end - this.losses.length);
      await this.#scoreNow();
    } finally {
      this.running = false;
      this.show();
    }
  }

  pause() {
    this.running = false;
  }

  /** As many steps at once as fit between two pictures; each is one command buffer. */
  async #several(left) {
    const began = performance.now();
    const count = Math.min(this.frame, left);
    const outs = await Promise.all(Array.from({ length: count }, () => this.model.step(this.next())));
    const took = performance.now() - began;
    this.frame = took < SOON ? Math.min(64, this.frame * 2) : took > 2 * SOON ? Math.max(1, this.frame >> 1) : this.frame;
    this.rate = this.rate ? 0.8 * this.rate + 0.2 * ((1000 * count) / took) : (1000 * count) / took;
    for (const out of outs) this.losses.push(out.loss);
    this.chart.values = this.losses;
    const due = Math.floor(this.losses.length / this.scoreEvery);
    if (this.score && due > this.scored) await this.#scoreNow(due);
    await this.changed(outs.at(-1));
    this.show();
    // The visitor's clicks and pictures come between two frames.
    await new Promise((resume) => setTimeout(resume));
  }

  async #scoreNow(due = this.scored) {
    if (!this.score) return;
    this.scored = due;
    const found = await this.score();
    if (found.loss !== undefined) this.chart.marks.push([this.losses.length, found.loss]);
    this.lastScore = found;
    $("score").textContent = found.text;
  }

  show() {
    const isFresh = this.losses.length === 0;
    $("start").textContent = this.running ? "Pause" : isFresh ? "Start training" : "Go on";
    $("steps").textContent = this.model.counters.steps.toLocaleString("en");
    $("loss").textContent = isFresh ? "–" : this.losses.at(-1).toFixed(3);
    $("rate").textContent = this.rate ? short(this.rate) : "–";
    this.chart.changed();
  }

  async reset() {
    this.pause();
    await this.loop?.catch(() => {}); // steps that are on their way belong to what was before
    this.model.reset();
    this.losses.length = 0;
    this.rate = 0;
    this.scored = -1;
    this.chart.clear();
    $("lr-scale").value = 0;
    $("lr-shown").textContent = "1";
    $("score").textContent = "–";
    this.again();
    await this.changed(null);
    this.show();
    $("status").textContent = "Back at the weights this page came with.";
  }

  async save(file, bytes) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([await bytes()], { type: "application/octet-stream" }));
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    $("status").textContent = `Saved as ${file}; it loads here and in Python.`;
  }

  async load(input) {
    const file = chosenFile(input);
    if (!file) return;
    this.model.load(await file.arrayBuffer());
    await this.changed(null);
    this.show();
    $("status").textContent = `${file.name} is loaded.`;
  }

  scaleRate() {
    const { name, value } = this.model.bundle.step.scale;
    const factor = 10 ** Number($("lr-scale").value);
    $("lr-shown").textContent = short(factor);
    this.model.write(name, Float32Array.of(value * factor));
  }
}

/** Σ w x / Σ w over pairs [x, w]; NaN where nothing had a weight. */
export function weightedMean(pairs) {
  const counted = pairs.filter(([, weight]) => weight);
  const total = counted.reduce((sum, [value, weight]) => sum + value * weight, 0);
  return total / counted.reduce((sum, [, weight]) => sum + weight, 0);
}

/** Mean loss and metrics over all held-out rows: in batches of the program `evaluate`, and what is left by `evaluate_rest`. */
export function evaluation(model, rows) {
  const size = model.programs.evaluate.inputs[0].shape[0];
  const batches = new Batches(rows, size);
  const parts = [];
  for (let start = 0; start < batches.count; start += size) {
    const chosen = Uint32Array.from({ length: Math.min(size, batches.count - start) }, (_, i) => start + i);
    parts.push([chosen.length === size ? "evaluate" : "evaluate_rest", chosen]);
  }
  return async () => {
    const outs = await Promise.all(parts.map(([name, chosen]) => model.run(name, batches.take(chosen))));
    const mean = (name, weight) => weightedMean(outs.map((out) => [out[name], out[weight]]));
    const names = Object.keys(outs[0]).filter((name) => name.startsWith("metric:")).map((name) => name.slice("metric:".length));
    return { loss: mean("loss", "weight"), metrics: Object.fromEntries(names.map((name) => [name, mean(`metric:${name}`, `weight:${name}`)])) };
  };
}
