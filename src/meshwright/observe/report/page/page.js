// Puts the page together, again for every chosen run, width and colour scheme.

function drawHead() {
  const run = chosen(), devices = run.world > 1 ? `${run.world} processes` : "one process";
  element("title").textContent = RUNS.length > 1 ? `${RUNS.length} runs` : run.name;
  document.title = `${RUNS.map((one) => one.name).join(", ")} - report`;
  element("subject").textContent = [`${run.model}, ${counted(run.parameters)} parameters`, `${run.precision}`,
    `${run.batch[0]} x ${counted(run.batch[1])} tokens a step`, run.layout, devices + (run.device ? `, ${run.device}` : "")].join("  \u00b7  ");
  element("runs").innerHTML = RUNS.length < 2 ? "" : RUNS.map((one, n) =>
    `<button type="button" data-choose="${n}" aria-pressed="${n === state.run}"><i style="background:${colourOf(n)}"></i>${escaped(one.name)}</button>`).join("");
}

function drawTiles() {
  const run = chosen(), {last, curves} = run, tiles = [];
  const middle = (list) => {
    const known = (list ?? []).filter((n) => n !== null).sort((a, b) => a - b);
    return known.length ? known[known.length >> 1] : null;
  };
  const row = (what, section = "use") => run.comparison.rows.find((one) => one.what === what && one.section === section);
  if (last.steps) {
    tiles.push(["loss", figure(curves.smooth.at(-1)), `after ${last.steps.toLocaleString("en")} of ${last.of.toLocaleString("en")} steps`]);
    if (last.bits_per_byte !== null) tiles.push(["held out", `${last.bits_per_byte.toFixed(3)}`, `bits a byte, loss ${figure(last.eval_loss)}`]);
    tiles.push(["tokens", counted(last.tokens), `in ${duration(last.seconds)}`]);
    tiles.push(["throughput", counted(middle(curves.tokens_per_second)), "tokens/s, all ranks"]);
  }
  const step = row("step", "time"), mfu = row("MFU (causal)"), bubble = row("bubble");
  if (step.measured) tiles.push(["a step", duration(step.measured), step.planned ? `planned ${duration(step.planned)}` : "planned: not known"]);
  if (mfu.measured) tiles.push(["MFU", percent(mfu.measured), "attention by half"]);
  const peaks = run.comparison.rows.filter((one) => one.what === "peak"), key = ["measured", "dryrun", "planned"].find((one) => peaks.some((row) => row[one] !== null));
  if (key) tiles.push(["peak memory", small(Math.max(...peaks.map((one) => one[key] ?? 0))), `${SOURCES.find(([one]) => one === key)[1]}, a rank`]);
  if (run.pp > 1 && (bubble.measured ?? bubble.planned) !== null) tiles.push(["bubble", percent(bubble.measured ?? bubble.planned), bubble.measured !== null ? "measured" : "planned"]);
  element("tiles").innerHTML = tiles.map(([name, value, more]) => `<div class="tile"><span>${name}</span><b>${value}</b><small>${more}</small></div>`).join("");
}

function drawPlan() {
  const run = chosen(), known = Object.entries(run.environment);
  element("environment").innerHTML = known.length ? known.map(([name, value]) => `<dt>${escaped(name)}</dt><dd>${escaped(value)}</dd>`).join("") :
    "<dt>machine</dt><dd>The run left no ledger.json to say where it ran.</dd>";
  element("yaml").textContent = run.plan;
}

function drawAll() {
  for (const draw of [drawHead, drawTiles, drawCurves, drawBars, drawMoments, drawBoxes, drawTraffic, drawTable, drawPlan]) draw();
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
document.addEventListener("pointermove", (event) => {
  if (event.target.closest?.("[data-curve]")) return;
  const words = wordsAt(event.target, event) || ownWords(event.target);
  if (words) tip.show(words, event.clientX, event.clientY);
  else tip.hide();
});
document.addEventListener("focusin", (event) => {
  const words = ownWords(event.target), box = event.target.getBoundingClientRect();
  if (words) tip.show(words, box.left, box.bottom - 14);
});
document.addEventListener("focusout", () => tip.hide());
document.addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 60);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
