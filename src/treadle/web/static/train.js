// Any training step: batches are drawn from the folder's data, or from a file of the visitor's.

import { readSafetensors } from "./treadle.js";
import { short } from "./chart.js";
import { $, Batches, Training, chosenFile, evaluation, guarded, loadData, start } from "./page.js";

await start(async (model) => {
  const { inputs } = model.program(model.bundle.step.programs.update);
  let { train = null, test = null } = await loadData(model);
  let batches = train && new Batches(train, inputs[0].shape[0]);
  const next = () => {
    if (!batches) throw new Error("There is no data yet: choose a file of rows.");
    return batches.next();
  };
  const score = test && (async () => {
    const { loss, metrics } = await evaluate();
    const [name, value] = Object.entries(metrics)[0] ?? ["loss", loss];
    return { loss, text: name === "accuracy" ? `${(100 * value).toFixed(1)} %` : `${name} ${short(value)}` };
  });
  const evaluate = test && evaluation(model, test);
  const training = new Training(model, { next, score, again: () => batches?.reset(), name: "weights" });

  const described = inputs.map((i) => `${i.key || "one array"}: ${i.dtype} [${i.shape.join(" × ")}]`);
  $("batch-facts").textContent = described.join(", ");
  $("data-facts").append(batches ? ` There are ${batches.count.toLocaleString("en")} rows.` : " Choose a file of rows to train on.");
  const arrays = inputs.map((i) => `"${i.key}": ${i.key || "rows"}`).join(", ");
  $("data-code").textContent = `from safetensors.numpy import save_file\nsave_file({${arrays}}, "data.safetensors")`;
  $("data-file").onchange = guarded(async ({ target }) => {
    const file = chosenFile(target);
    if (!file) return;
    const { tensors } = readSafetensors(await file.arrayBuffer());
    batches = new Batches(rowsOf(tensors, inputs), inputs[0].shape[0]);
    $("status").textContent = `${batches.count.toLocaleString("en")} rows of ${file.name}.`;
  });
  globalThis.treadle = { training };
});

/** Arrays of a file as rows of each input, or an error that names what does not fit. */
function rowsOf(tensors, inputs) {
  const found = {};
  for (const { key, shape } of inputs) {
    const given = tensors.get(key);
    if (!given) throw new Error(`The file has no array named "${key}".`);
    const [row, wanted] = [given.shape.slice(1), shape.slice(1)];
    if (!given.shape.length) throw new Error(`${key} is one number, and rows are needed.`);
    if (`${row}` !== `${wanted}`) throw new Error(`${key} has rows [${row}], and [${wanted}] are needed.`);
    found[key] = { rows: given.shape[0], width: wanted.reduce((a, b) => a * b, 1), data: given.data };
  }
  const counts = new Set(Object.values(found).map((f) => f.rows));
  if (counts.size > 1) throw new Error(`The arrays have different numbers of rows: ${[...counts].join(", ")}.`);
  return found;
}
