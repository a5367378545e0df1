// Any forward programs: numbers in, numbers out.

import { short } from "./chart.js";
import { $, chosenFile, guarded, start } from "./page.js";

const SHOWN = 64; // elements of an output

await start(async (model) => {
  $("program").append(...Object.keys(model.programs).map((name) => new Option(name)));
  const fields = () => {
    $("inputs").replaceChildren(...model.program($("program").value).inputs.map(({ key, dtype, shape }) => {
      const field = document.createElement("div");
      field.className = "field";
      const label = document.createElement("label");
      label.textContent = `${key || "input"}: ${dtype} [${shape.join(" × ")}]`;
      label.htmlFor = `input-${key}`;
      const text = document.createElement("textarea");
      Object.assign(text, { id: `input-${key}`, value: "0", spellcheck: false });
      text.style.minHeight = "4rem";
      field.append(label, text);
      return field;
    }));
    const told = document.createElement("p");
    Object.assign(told, { className: "hint", textContent: "Numbers with spaces or commas between them; one number fills the whole array." });
    $("inputs").append(told);
  };
  $("program").onchange = fields;
  fields();

  const given = () => Object.fromEntries(model.program($("program").value).inputs.map(({ key, shape }) => {
    const numbers = $(`input-${key}`).value.split(/[\s,;[\]()]+/).filter(Boolean).map(Number);
    const wrong = numbers.findIndex(Number.isNaN);
    if (wrong >= 0) throw new Error(`Number ${wrong + 1} of ${key || "the input"} is none.`);
    const size = shape.reduce((a, b) => a * b, 1);
    return [key, numbers.length === 1 ? Array(size).fill(numbers[0]) : numbers];
  }));
  const run = async () => {
    const began = performance.now();
    const out = await model.run($("program").value, given());
    $("status").textContent = `${short(performance.now() - began)} ms.`;
    $("outputs").replaceChildren(...Object.entries(out).map(([name, value]) => {
      const flat = typeof value === "number" ? [value] : [...value];
      const text = document.createElement("pre");
      const more = flat.length > SHOWN ? ` … ${flat.length} elements` : "";
      text.textContent = `${name}: ${flat.slice(0, SHOWN).map((n) => short(Number(n))).join(" ")}${more}`;
      return text;
    }));
    return out;
  };
  $("run").onclick = guarded(run);
  $("inputs").onsubmit = (event) => event.preventDefault();
  $("load").onchange = guarded(async ({ target }) => {
    const file = chosenFile(target);
    if (!file) return;
    model.load(await file.arrayBuffer());
    $("status").textContent = `${file.name} is loaded.`;
  });
  $("run").disabled = false;
  globalThis.treadle = { run };
});
