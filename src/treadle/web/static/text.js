// A tiny GPT: learns from pasted text, and writes letter by letter over a cache of keys and values.

import { uniforms } from "./draws.js";
import { $, Training, guarded, start } from "./page.js";

await start(async (model) => {
  const { letters, context } = model.bundle.page;
  const every = [...letters]; // by code points: some letters are two of JavaScript's characters
  const known = new Map(every.map((letter, i) => [letter, i]));
  const writer = model.programs.decode ? "decode" : "forward";
  const encode = (text) => Int32Array.from([...text.normalize("NFC")], (c) => known.get(c) ?? known.get(" ") ?? 0);
  const update = model.bundle.step?.programs.update;
  if (update) train();
  else $("text-card").hidden = document.querySelector(".training").hidden = true;

  function train() {
    const [rows, width] = model.program(update).inputs.find((i) => i.key === "x").shape;
    $("text").value = model.bundle.page.text;
    let [tokens, draws] = [null, uniforms(0)];
    const take = () => {
      tokens = encode($("text").value);
      $("text-facts").textContent = `${tokens.length.toLocaleString("en")} letters.`;
    };
    $("text").oninput = take;
    take();
    /** Pieces of the text, and the same one letter further. */
    const next = () => {
      if (tokens.length <= width) throw new Error(`The text has ${tokens.length} letters; more than ${width} are needed.`);
      const [x, y] = [new Int32Array(rows * width), new Int32Array(rows * width)];
      for (let row = 0; row < rows; row++) {
        const at = Math.floor(draws.next().value * (tokens.length - width));
        x.set(tokens.subarray(at, at + width), row * width);
        y.set(tokens.subarray(at + 1, at + width + 1), row * width);
      }
      return { x, y };
    };
    const again = () => { draws = uniforms(0); };
    globalThis.treadle = { training: new Training(model, { next, again, name: "gpt" }) };
  }

  /** The letter after a token at a position; its keys and values stay in the cache. */
  async function scores(token, at) {
    const out = await model.run(writer, { token: Int32Array.of(token), at: Int32Array.of(at) });
    return Object.values(out)[0];
  }

  function chosen(logits, temperature, draw) {
    const best = logits.indexOf(Math.max(...logits));
    if (best < 0) throw new Error("The scores are no numbers any more: training has diverged. Reset it, and lower the learning rate.");
    if (temperature === 0) return best;
    const chances = [...logits].map((l) => Math.exp((l - logits[best]) / temperature));
    let left = draw * chances.reduce((a, b) => a + b);
    return Math.max(0, chances.findIndex((c) => (left -= c) < 0));
  }

  /** Letters after a prompt. Where the cache is full, it is filled again with its newer half. */
  async function* write(prompt, count, temperature, seed = 0) {
    let tokens = encode(prompt).slice(-(context - 1));
    if (!tokens.length) tokens = encode("\n");
    const draws = uniforms(seed, 1);
    let [at, logits] = [0, null];
    for (const token of tokens) logits = await scores(token, at++);
    let all = [...tokens];
    for (let i = 0; i < count; i++) {
      const token = chosen(logits, temperature, draws.next().value);
      all.push(token);
      yield every[token];
      if (at === context) {
        all = all.slice(-(context >> 1));
        at = 0;
        for (const one of all) logits = await scores(one, at++);
      } else logits = await scores(token, at++);
    }
  }

  let writing = false;
  $("prompt").value = model.bundle.page.prompt ?? "";
  $("temperature").oninput = () => { $("temperature-shown").textContent = $("temperature").value; };
  $("write").onclick = guarded(async () => {
    if (writing) {
      writing = false;
      return;
    }
    writing = true;
    $("write").textContent = "Stop";
    const [prompt, temperature] = [$("prompt").value, Number($("temperature").value)];
    const told = document.createElement("b");
    told.textContent = prompt;
    $("written").replaceChildren(told, "");
    let [count, began] = [0, performance.now()];
    try {
      for await (const letter of write(prompt, 300, temperature, Math.floor(2 ** 32 * Math.random()))) {
        $("written").append(letter);
        $("write-facts").textContent = `${++count} letters, ${Math.round((1000 * count) / (performance.now() - began))} a second.`;
        if (!writing) break;
      }
    } finally {
      writing = false;
      $("write").textContent = "Write";
    }
  });
  $("write").disabled = false;
  globalThis.treadle = { ...globalThis.treadle, write, scores, encode };
});
