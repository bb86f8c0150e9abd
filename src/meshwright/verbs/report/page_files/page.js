// Puts the page together, again for every chosen run, width and colour scheme.

function drawHead() {
  const run = chosenRun(), devices = run.world > 1 ? `${run.world} processes` : "one process";
  byId("title").textContent = RUNS.length > 1 ? `${RUNS.length} runs` : run.name;
  document.title = `${RUNS.map((run) => run.name).join(", ")} - report`;
  byId("subject").textContent = [`${run.model}, ${shortNumber(run.parameters)} parameters`, `${run.precision}`,
    `${run.batch[0]} x ${shortNumber(run.batch[1])} tokens per step`, run.layout, devices + (run.device ? `, ${run.device}` : "")].join("  \u00b7  ");
  byId("runs").innerHTML = RUNS.length < 2 ? "" : RUNS.map((run, n) =>
    `<button type="button" data-choose="${n}" aria-pressed="${n === state.run}"><i style="background:${colourOf(n)}"></i>${escaped(run.name)}</button>`).join("");
}

function medianOf(list) {
  const known = (list ?? []).filter((n) => n !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}

// The fullest rank's peak from the source that is nearest to the truth; null where none has it.
function peakOf(run) {
  const rows = run.comparison.rows.filter((row) => row.what === "peak");
  const source = ["measured", "dryrun", "planned"].find((name) => rows.some((row) => row[name] !== null));
  return source ? {source, bytes: Math.max(...rows.map((row) => row[source] ?? 0))} : null;
}

function drawTiles() {
  const run = chosenRun(), {last, curves} = run;
  const row = (name, section = "use") => run.comparison.rows.find((candidate) => candidate.what === name && candidate.section === section);
  const trained = [], profiled = [], add = (list, ...tile) => list.push(tile);
  if (last.steps) {
    add(trained, "loss", figure(curves.loss.at(-1) ?? null), `nats, step ${last.steps.toLocaleString("en")} of ${last.of.toLocaleString("en")}`);
    if (last.eval_loss !== null) add(trained, "held-out loss", figure(last.eval_loss), last.bits_per_byte === null ? "nats" : `nats; ${last.bits_per_byte.toFixed(3)} bits per byte`);
    add(trained, "tokens", shortNumber(last.tokens), `in ${duration(last.seconds)}`);
    if (run.goodput) add(trained, "goodput", percent(run.goodput.share), `of ${duration(run.goodput.wall_seconds)} in ${run.goodput.processes} process${run.goodput.processes === 1 ? "" : "es"}`);
    add(trained, "throughput", shortNumber(medianOf(curves.tokens_per_second)), "tokens/s, median step");
  }
  const step = row("step", "time"), mfu = row("MFU (causal)"), bubble = row("bubble");
  if (step.measured) add(profiled, "time of a step", duration(step.measured), step.planned ? `planned ${duration(step.planned)}` : "no plan for this device");
  if (mfu.measured) add(profiled, "MFU", percent(mfu.measured), "attention by half");
  const peak = peakOf(run);
  if (peak) add(profiled, "peak memory", bytesWords(peak.bytes), `${SOURCES.find(([source]) => source === peak.source)[1]}, fullest rank`);
  if (run.pp > 1 && (bubble.measured ?? bubble.planned) !== null) add(profiled, "bubble", percent(bubble.measured ?? bubble.planned), bubble.measured !== null ? "measured" : "planned");
  const about = run.comparison.columns.measured, source = about.there ? "From the measured run or profile" : "From plan and dry run";
  const title = (words, list) => list.length ? `<h2>${words}</h2>` + list.map(([name, figure, note]) =>
    `<div class="tile"><span>${name}</span><b>${figure}</b><small>${note}</small></div>`).join("") : "";
  byId("hours").textContent = run.goodput ? `Wall time, rank 0: ${run.goodput.words}. ${run.goodput.advice}` : "";
  byId("tiles").innerHTML = title(`Training: ${escaped(run.name)}`, trained) + title(`${source}: ${escaped(about.there ? about.about : run.name)}`, profiled);
}

// One row for each run, in one unit each column.
function drawSide() {
  byId("compared").hidden = RUNS.length < 2;
  if (RUNS.length < 2) return;
  const summaries = RUNS.map((run) => ({
    name: run.name, layout: run.layout, steps: run.last.steps || null, loss: run.curves.loss?.at(-1) ?? null,
    held: run.last.eval_loss ?? null, bits: run.last.bits_per_byte ?? null,
    rate: medianOf(run.curves.tokens_per_second), peak: peakOf(run)?.bytes ?? null,
  }));
  const number = (n) => n === null ? null : figure(n), bytes = formatterOf(summaries.map((summary) => summary.peak), "bytes");
  const columns = [["layout", "layout", (v) => escaped(v)], ["steps", "steps", (n) => n.toLocaleString("en")], ["loss", "loss, nats", number],
    ["held", "held out, nats", number], ["bits", "bits per byte", (n) => n.toFixed(3)], ["rate", "tokens/s", shortNumber], ["peak", "peak memory", bytes]]
    .filter(([key]) => summaries.some((summary) => summary[key] !== null));
  byId("side").innerHTML = `<thead><tr><th scope="col">run</th>${columns.map(([, title]) => `<th scope="col">${title}</th>`).join("")}</tr></thead><tbody>` +
    summaries.map((summary, n) => `<tr><th scope="row"><i class="chip" style="background:${colourOf(n)}"></i>${escaped(summary.name)}</th>` +
      columns.map(([key, , format]) => `<td>${summary[key] === null ? "" : format(summary[key])}</td>`).join("") + "</tr>").join("") + "</tbody>";
}

function drawPlan() {
  const run = chosenRun(), known = Object.entries(run.environment);
  byId("environment").innerHTML = known.length ? known.map(([name, words]) => `<dt>${escaped(name)}</dt><dd>${escaped(words)}</dd>`).join("") :
    "<dt>machine</dt><dd>The run left no ledger.json to say where it ran.</dd>";
  byId("yaml").textContent = run.plan;
}

function drawAll() {
  for (const draw of [drawHead, drawTiles, drawSide, drawCurves, drawSamples, drawBars, drawMoments, drawBoxes, drawTraffic, drawTable, drawPlan]) draw();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-choose]");
  if (!button) return;
  state.run = Number(button.dataset.choose);
  drawAll();
  document.querySelector(`[data-choose="${state.run}"]`).focus();
});
document.addEventListener("change", (event) => {
  if (event.target.id === "along") {
    state.along = event.target.value;
    drawCurves();
  }
  if (event.target.id === "sample-step") {
    state.sample = Number(event.target.value);
    drawSamples();
  }
  if (event.target.id === "rank") {
    state.rank = event.target.value;
    drawMoments();
  }
});

function wordsAt(target, event) {
  const {offsetX: x, offsetY: y} = event;
  if (target.dataset.boxes) return boxWords(target, x, y);
  if (target.dataset.moments) return momentWords(target, x);
  return target.dataset.bar ? barWords(target.dataset.bar) : "";
}

const ownWords = (target) => {
  const explainedElement = target.closest?.("[data-explain], [data-why]");
  if (!explainedElement) return "";
  return explainedElement.dataset.explain ? explanation(explainedElement.dataset.explain) : explainedElement.dataset.why && `<b>Not known</b>${escaped(explainedElement.dataset.why)}`;
};
explainOnDemand((target, event) => target.closest?.("[data-curve]") || event.type === "focusin" && target.matches("canvas") ?
  "" : wordsAt(target, event) || ownWords(target));

// Arrow keys walk along the parts of a chart.
document.addEventListener("keydown", (event) => {
  const {target, key} = event, along = {ArrowLeft: -1, ArrowRight: 1}[key] ?? 0, across = {ArrowUp: -1, ArrowDown: 1}[key] ?? 0;
  if (!target.matches?.("canvas") || !(along || across)) return;
  event.preventDefault();
  panel.show(target.dataset.boxes ? boxAt(target, along, across) : momentAt(target, along), target);
});

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 60);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
