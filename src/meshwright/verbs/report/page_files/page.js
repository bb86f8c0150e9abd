// Puts the page together, again for every chosen run, width and colour scheme.

function drawHead() {
  const run = chosen(), devices = run.world > 1 ? `${run.world} processes` : "one process";
  element("title").textContent = RUNS.length > 1 ? `${RUNS.length} runs` : run.name;
  document.title = `${RUNS.map((one) => one.name).join(", ")} - report`;
  element("subject").textContent = [`${run.model}, ${counted(run.parameters)} parameters`, `${run.precision}`,
    `${run.batch[0]} x ${counted(run.batch[1])} tokens per step`, run.layout, devices + (run.device ? `, ${run.device}` : "")].join("  \u00b7  ");
  element("runs").innerHTML = RUNS.length < 2 ? "" : RUNS.map((one, n) =>
    `<button type="button" data-choose="${n}" aria-pressed="${n === state.run}"><i style="background:${colourOf(n)}"></i>${escaped(one.name)}</button>`).join("");
}

function middle(list) {
  const known = (list ?? []).filter((n) => n !== null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}

function drawTiles() {
  const run = chosen(), {last, curves} = run;
  const row = (what, section = "use") => run.comparison.rows.find((one) => one.what === what && one.section === section);
  const trained = [], profiled = [], add = (list, ...tile) => list.push(tile);
  if (last.steps) {
    add(trained, "loss", figure(curves.loss.at(-1) ?? null), `nats, step ${last.steps.toLocaleString("en")} of ${last.of.toLocaleString("en")}`);
    if (last.eval_loss !== null) add(trained, "held-out loss", figure(last.eval_loss), last.bits_per_byte === null ? "nats" : `nats; ${last.bits_per_byte.toFixed(3)} bits per byte`);
    add(trained, "tokens", counted(last.tokens), `in ${duration(last.seconds)}`);
    add(trained, "throughput", counted(middle(curves.tokens_per_second)), "tokens/s, median step");
  }
  const step = row("step", "time"), mfu = row("MFU (causal)"), bubble = row("bubble");
  if (step.measured) add(profiled, "time of a step", duration(step.measured), step.planned ? `planned ${duration(step.planned)}` : "no plan for this device");
  if (mfu.measured) add(profiled, "MFU", percent(mfu.measured), "attention by half");
  const peaks = run.comparison.rows.filter((one) => one.what === "peak"), key = ["measured", "dryrun", "planned"].find((one) => peaks.some((row) => row[one] !== null));
  if (key) add(profiled, "peak memory", small(Math.max(...peaks.map((one) => one[key] ?? 0))), `${SOURCES.find(([one]) => one === key)[1]}, fullest rank`);
  if (run.pp > 1 && (bubble.measured ?? bubble.planned) !== null) add(profiled, "bubble", percent(bubble.measured ?? bubble.planned), bubble.measured !== null ? "measured" : "planned");
  const about = run.comparison.columns.measured, source = about.there ? "From the measured run or profile" : "From plan and dry run";
  const title = (words, list) => list.length ? `<h2>${words}</h2>` + list.map(([name, value, more]) =>
    `<div class="tile"><span>${name}</span><b>${value}</b><small>${more}</small></div>`).join("") : "";
  element("tiles").innerHTML = title(`Training: ${escaped(run.name)}`, trained) + title(`${source}: ${escaped(about.there ? about.about : run.name)}`, profiled);
}

// One row for each run, in one unit each column.
function drawSide() {
  element("compared").hidden = RUNS.length < 2;
  if (RUNS.length < 2) return;
  const peak = (run) => {
    const rows = run.comparison.rows.filter((one) => one.what === "peak");
    const key = ["measured", "dryrun", "planned"].find((one) => rows.some((row) => row[one] !== null));
    return key ? Math.max(...rows.map((one) => one[key] ?? 0)) : null;
  };
  const of = RUNS.map((run) => ({
    name: run.name, layout: run.layout, steps: run.last.steps || null, loss: run.curves.loss?.at(-1) ?? null,
    held: run.last.eval_loss ?? null, bits: run.last.bits_per_byte ?? null,
    rate: middle(run.curves.tokens_per_second), peak: peak(run),
  }));
  const number = (n) => n === null ? null : figure(n), bytes = sayer(of.map((one) => one.peak), "bytes");
  const columns = [["layout", "layout", (v) => escaped(v)], ["steps", "steps", (n) => n.toLocaleString("en")], ["loss", "loss, nats", number],
    ["held", "held out, nats", number], ["bits", "bits per byte", (n) => n.toFixed(3)], ["rate", "tokens/s", counted], ["peak", "peak memory", bytes]]
    .filter(([key]) => of.some((one) => one[key] !== null));
  element("side").innerHTML = `<thead><tr><th scope="col">run</th>${columns.map(([, title]) => `<th scope="col">${title}</th>`).join("")}</tr></thead><tbody>` +
    of.map((one, n) => `<tr><th scope="row"><i class="chip" style="background:${colourOf(n)}"></i>${escaped(one.name)}</th>` +
      columns.map(([key, , say]) => `<td>${one[key] === null ? "" : say(one[key])}</td>`).join("") + "</tr>").join("") + "</tbody>";
}

function drawPlan() {
  const run = chosen(), known = Object.entries(run.environment);
  element("environment").innerHTML = known.length ? known.map(([name, value]) => `<dt>${escaped(name)}</dt><dd>${escaped(value)}</dd>`).join("") :
    "<dt>machine</dt><dd>The run left no ledger.json to say where it ran.</dd>";
  element("yaml").textContent = run.plan;
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
  const found = target.closest?.("[data-explain], [data-why]");
  if (!found) return "";
  return found.dataset.explain ? explanation(found.dataset.explain) : found.dataset.why && `<b>Not known</b>${escaped(found.dataset.why)}`;
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
