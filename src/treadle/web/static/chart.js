// A line chart on a canvas: values by step, as they come.

/** Round numbers that cover a range: 1, 2 or 5 times a power of ten apart. */
export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= rough) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Means of neighbours, so that at most `most` points remain; those that are not finite are left out. */
export function thinned(values, most) {
  const width = Math.max(1, Math.ceil(values.length / most));
  const found = [];
  for (let start = 0; start < values.length; start += width) {
    const part = values.slice(start, start + width).filter(Number.isFinite);
    if (part.length) found.push([start + (width - 1) / 2, part.reduce((a, b) => a + b) / part.length]);
  }
  return found;
}

/** A moving average over about a tenth of the values, corrected for its start. */
export function smoothed(values, keep = Math.min(0.98, Math.max(0.5, 1 - 16 / values.length))) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (Number.isFinite(value)) {
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
    }
    return weight ? sum / weight : NaN;
  });
}

/** A number in few characters. */
export function short(number) {
  if (!Number.isFinite(number)) return String(number);
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return number.toExponential(1);
  return String(Number(number.toPrecision(size >= 1000 ? 5 : 3)));
}

const MARGIN = { left: 44, right: 10, top: 10, bottom: 24 };

/** Draws losses, their moving average, and a held-out loss where there is one. */
export class Chart {
  constructor(canvas, label = "loss") {
    Object.assign(this, { canvas, label, values: [], marks: [], pending: false });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** New values: drawn before the next picture, once. */
  changed() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  clear() {
    this.values = [];
    this.marks = [];
    this.changed();
  }

  draw() {
    const { canvas } = this;
    const box = canvas.getBoundingClientRect();
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(box.width * scale);
    canvas.height = Math.round(box.height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    pen.font = `12px ${style.fontFamily}`;
    const width = box.width - MARGIN.left - MARGIN.right;
    const height = box.height - MARGIN.top - MARGIN.bottom;
    const raw = thinned(this.values, Math.max(2, width / 2));
    const every = [...raw.map(([, y]) => y), ...this.marks.map(([, y]) => y)].filter(Number.isFinite);
    const last = Math.max(10, this.values.length);
    const high = every.length ? Math.max(...every) : 1;
    const low = Math.min(0, ...every);
    const x = (i) => MARGIN.left + (width * i) / last;
    const y = (v) => MARGIN.top + height * (1 - (v - low) / (1.04 * (high - low) || 1));
    this.#axes(pen, color, x, y, low, high, last);
    this.#line(pen, raw, x, y, color("--faint"), 1.5);
    this.#line(pen, thinned(smoothed(this.values), width), x, y, color("--accent"), 2.25);
    this.#line(pen, this.marks, x, y, color("--other"), 2);
    const now = this.values.at(-1);
    const [first, count] = [this.values[0], this.values.length];
    const told = count ? `after ${count} steps is ${short(now)}; it began at ${short(first)}` : "step by step: no steps yet";
    canvas.setAttribute("aria-label", `The ${this.label}, ${told}`);
  }

  #axes(pen, color, x, y, low, high, last) {
    pen.strokeStyle = color("--line");
    pen.fillStyle = color("--soft");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const value of ticks(low, high, 4)) {
      pen.beginPath();
      pen.moveTo(x(0), Math.round(y(value)) + 0.5);
      pen.lineTo(x(last), Math.round(y(value)) + 0.5);
      pen.stroke();
      pen.fillText(short(value), MARGIN.left - 8, y(value));
    }
    pen.textBaseline = "alphabetic";
    const steps = ticks(0, last, Math.max(2, Math.floor((x(last) - x(0)) / 90)));
    for (const value of steps) {
      pen.textAlign = value === 0 ? "left" : x(value) > x(last) - 20 ? "right" : "center";
      pen.fillText(String(value), x(value), y(low) + 18);
    }
  }

  #line(pen, points, x, y, color, width) {
    if (!points.length) return;
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.beginPath();
    for (const [at, value] of points) pen.lineTo(x(at), y(value));
    pen.stroke();
  }
}
