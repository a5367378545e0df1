// Draw a digit: the network learns from shipped digits, and from what the visitor draws and names.

import { $, Batches, Training, evaluation, guarded, loadData, start } from "./page.js";

const SIDE = 8; // pixels of an image, each the share of dark ones among 4 × 4
const FINE = 32;
const INK = 3.2; // width of a stroke, in fine pixels
const OWN = 8; // rows of a batch that the visitor's digits take, at most

/** Strokes in the unit square as 8 × 8 shares of ink, filling the square as the shipped digits do. */
function image(strokes, { angle = 0, dx = 0, dy = 0 } = {}) {
  const points = strokes.flat();
  const [left, right] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
  const [top, bottom] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
  const scale = (FINE - INK - 1) / Math.max(bottom - top, 1.25 * (right - left), 1e-3);
  const canvas = new OffscreenCanvas(FINE, FINE);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.translate(FINE / 2 + dx, FINE / 2 + dy);
  pen.rotate(angle);
  Object.assign(pen, { lineWidth: INK, lineCap: "round", lineJoin: "round" });
  for (const stroke of strokes) {
    pen.beginPath();
    const at = ([x, y]) => [scale * (x - (left + right) / 2), scale * (y - (top + bottom) / 2)];
    pen.moveTo(...at(stroke[0]));
    for (const point of stroke) pen.lineTo(...at(point));
    pen.stroke();
  }
  const { data } = pen.getImageData(0, 0, FINE, FINE);
  const found = new Float32Array(SIDE * SIDE);
  const block = FINE / SIDE;
  for (let y = 0; y < FINE; y++) {
    for (let x = 0; x < FINE; x++) {
      if (data[4 * (y * FINE + x) + 3] > 127) found[Math.floor(y / block) * SIDE + Math.floor(x / block)] += 1 / block ** 2;
    }
  }
  return found;
}

/** Where the visitor draws. `changed` is called as strokes grow. */
class Pad {
  constructor(canvas, changed) {
    Object.assign(this, { canvas, changed, strokes: [], shown: null, drawing: new Map() }); // strokes by pointer
    canvas.onpointerdown = (event) => {
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      if (this.shown) this.clear();
      const stroke = [this.#at(event)];
      this.strokes.push(stroke);
      this.drawing.set(event.pointerId, stroke);
      this.#redraw();
    };
    canvas.onpointermove = (event) => {
      const stroke = this.drawing.get(event.pointerId);
      if (!stroke) return;
      for (const one of event.getCoalescedEvents?.() ?? [event]) stroke.push(this.#at(one));
      this.#redraw();
    };
    canvas.onlostpointercapture = (event) => this.drawing.delete(event.pointerId);
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #redraw() {
    this.draw();
    this.changed();
  }

  clear() {
    this.drawing.clear();
    Object.assign(this, { strokes: [], shown: null });
    this.#redraw();
  }

  show(pixels) {
    this.drawing.clear();
    Object.assign(this, { strokes: [], shown: pixels });
    this.#redraw();
  }

  /** 64 shares of ink, or null where nothing is drawn. */
  get pixels() {
    return this.strokes.length ? image(this.strokes) : this.shown;
  }

  draw() {
    const { canvas } = this;
    const side = Math.round(canvas.getBoundingClientRect().width * devicePixelRatio);
    canvas.width = canvas.height = side;
    const pen = canvas.getContext("2d");
    const ink = getComputedStyle(canvas).getPropertyValue("--ink");
    if (this.shown) return paint(pen, this.shown, side / SIDE, ink);
    if (!this.strokes.length) {
      const soft = getComputedStyle(canvas).getPropertyValue("--soft");
      Object.assign(pen, { fillStyle: soft, font: `${side / 16}px system-ui, sans-serif`, textAlign: "center" });
      pen.fillText("draw a digit here", side / 2, side / 2);
    }
    Object.assign(pen, { strokeStyle: ink, lineWidth: side / 13, lineCap: "round", lineJoin: "round" });
    for (const stroke of this.strokes) {
      pen.beginPath();
      pen.moveTo(side * stroke[0][0], side * stroke[0][1]);
      for (const [x, y] of stroke) pen.lineTo(side * x, side * y);
      pen.stroke();
    }
    return undefined;
  }
}

function paint(pen, pixels, size, ink) {
  pen.clearRect(0, 0, SIDE * size, SIDE * size);
  pen.fillStyle = ink;
  pixels.forEach((share, i) => {
    pen.globalAlpha = share;
    pen.fillRect((i % SIDE) * size, Math.floor(i / SIDE) * size, size, size);
  });
  pen.globalAlpha = 1;
}

await start(async (model) => {
  const { train, test } = await loadData(model);
  const size = model.program(model.bundle.step.programs.update).inputs[0].shape[0];
  const batches = new Batches(train, size);
  const taught = []; // { strokes or pixels, digit }

  const jitter = () => ({ angle: 0.3 * (Math.random() - 0.5), dx: 3 * (Math.random() - 0.5), dy: 3 * (Math.random() - 0.5) });
  function next() {
    const batch = batches.next();
    for (let row = 0; row < Math.min(OWN, 2 * taught.length); row++) {
      const one = taught[Math.floor(Math.random() * taught.length)];
      batch.x.set(one.strokes ? image(one.strokes, jitter()) : one.pixels, row * SIDE * SIDE);
      batch.y[row] = one.digit;
    }
    return batch;
  }

  const bars = Array.from({ length: 10 }, (_, digit) => {
    const item = document.createElement("li");
    item.innerHTML = `<i></i><span>${digit}</span>`;
    $("bars").append(item);
    return item;
  });
  let asked = 0;
  async function read() {
    const { pixels } = pad;
    $("untrained").hidden = model.counters.steps > 0;
    const ink = getComputedStyle(document.body).getPropertyValue("--ink");
    paint($("seen").getContext("2d"), pixels ?? new Float32Array(SIDE * SIDE), 1, ink);
    const number = ++asked;
    const chances = pixels ? [...Object.values(await model.run("predict", { x: pixels }))[0]] : Array(10).fill(0);
    if (number !== asked) return; // the drawing went on meanwhile
    const best = chances.indexOf(Math.max(...chances));
    $("answer").textContent = pixels ? best : "?";
    bars.forEach((item, digit) => {
      item.firstChild.style.height = `${Math.round(84 * chances[digit])}%`;
      item.classList.toggle("best", Boolean(pixels) && digit === best);
      item.title = `${digit}: ${(100 * chances[digit]).toFixed(1)} %`;
    });
  }
  const pad = new Pad($("drawing"), guarded(read));

  const evaluate = evaluation(model, test);
  const score = async () => {
    const { loss, metrics } = await evaluate();
    return { loss, accuracy: metrics.accuracy, text: `${(100 * metrics.accuracy).toFixed(1)} %` };
  };
  const again = () => batches.reset();
  const training = new Training(model, { next, score, scoreEvery: 50, changed: read, again, name: "digits" });

  $("start-too").onclick = () => $("start").click();
  $("clear").onclick = () => pad.clear();
  $("example").onclick = () => {
    const row = Math.floor(Math.random() * test.x.rows);
    pad.show(test.x.data.slice(row * SIDE * SIDE, (row + 1) * SIDE * SIDE));
  };
  const teach = guarded(async (digit) => {
    if (!pad.pixels) {
      $("taught").textContent = "Draw a digit first.";
      return;
    }
    // A copy: what is drawn on top of it later was not taught.
    taught.push({ strokes: pad.strokes.length ? structuredClone(pad.strokes) : null, pixels: pad.pixels, digit });
    $("taught").textContent = `You taught it ${taught.length} ${taught.length === 1 ? "digit" : "digits"}; this one is a ${digit}.`;
    if (!training.running) guarded(() => training.run(60))();
  });
  for (let digit = 0; digit < 10; digit++) {
    const button = document.createElement("button");
    Object.assign(button, { textContent: digit, onclick: () => teach(digit) });
    button.setAttribute("aria-label", `This is a ${digit}`);
    $("teach").append(button);
  }
  $("clear").disabled = $("example").disabled = $("start-too").disabled = false;
  await read();
  globalThis.treadle = { training, pad, teach, batches, read };
});
