// Loss, gradient norm, throughput, MFU, rate of all runs, one above the other.

const CURVES = [
  {key: "loss", title: "Loss", unit: "nats per token; line: smoothed, dots: held out", smooth: true, evaluated: true},
  {key: "cross_entropy", title: "Cross entropy", unit: "nats per token of the text; dots: held out", evaluated: true},
  {key: "grad_norm", title: "Gradient norm", unit: "before clipping", log: true},
  {key: "tokens_per_second", title: "Throughput", unit: "tokens/s, all ranks", zero: true, format: shortNumber},
  {key: "mfu_causal", title: "MFU", unit: "attention counted by half", zero: true, format: percent},
  {key: "lr", title: "Learning rate", unit: "", zero: true, format: (n) => n ? n.toExponential(1) : "0"},
];
const WIDE = {left: 46, right: 10, top: 8, bottom: 22};

function drawCurves() {
  const box = byId("curves");
  if (RUNS.every((run) => !run.curves.step.length)) {
    box.innerHTML = absence("Nothing was trained here: the folder holds a profile only.");
    return;
  }
  const shownCurves = CURVES.filter(({key}) => RUNS.some((run) => run.curves[key]));
  box.innerHTML = shownCurves.map(({key, title, unit}) =>
    `<div><h3>${title}<small>${unit}</small></h3><svg data-curve="${key}" role="img" height="190" tabindex="0"></svg></div>`).join("") +
    (shownCurves.some(({key}) => key === "mfu_causal") ? "" :
      `<div><h3>MFU</h3>${absence("Not known: the peak of this device is not described, or the run is in fp32.")}</div>`);
  byId("coincide").innerHTML = RUNS.map((run, n) => [run, coincidingRun(n)]).filter(([, other]) => other !== null).map(([run, other]) =>
    `<b>${escaped(run.name)}</b> and <b>${escaped(RUNS[other].name)}</b> coincide: their losses differ by less than 0.1 % ` +
    `at every step both have. The later one is dashed.`).join("<br>");
  for (const curve of shownCurves) drawCurve(box.querySelector(`[data-curve="${curve.key}"]`), curve);
}

// An earlier run whose loss is this one's at every step that both have; null for none.
function coincidingRun(n) {
  const lossesOf = (run) => new Map(run.curves.step.map((step, k) => [step, run.curves.loss?.[k] ?? null]));
  const losses = lossesOf(RUNS[n]);
  for (let other = 0; other < n; other++) {
    const shared = [...lossesOf(RUNS[other])].filter(([step, loss]) => loss !== null && (losses.get(step) ?? null) !== null);
    if (shared.length && shared.every(([step, loss]) => Math.abs(losses.get(step) - loss) <= 1e-3 * Math.abs(loss))) return other;
  }
  return null;
}

// A distilled run's loss is a divergence from its teacher; held-out text is scored by cross entropy.
const evaluatedOn = (run) => run.curves.cross_entropy ? "cross_entropy" : "loss";

function positionsOf(run) {
  const known = run.curves[state.along];
  return known && known.length ? known : run.curves.step;
}

// Where an evaluation stands along the axis: at its step's place.
function positionOfStep(run, step) {
  const at = run.curves.step.findIndex((measured) => measured >= step);
  return at < 0 ? null : positionsOf(run)[at];
}

// The axis of a curve over all runs, so that switching the chosen run moves no line. null: no run has a number.
function rangeOf(curve) {
  let low = Infinity, high = -Infinity;
  for (const run of RUNS)
    for (const name of [curve.key, `${curve.key}_low`, `${curve.key}_high`])
      for (const number of run.curves[name] ?? [])
        if (number !== null && !(curve.log && number <= 0)) [low, high] = [Math.min(low, number), Math.max(high, number)];
  if (curve.evaluated)
    for (const run of RUNS.filter((candidate) => evaluatedOn(candidate) === curve.key))
      for (const number of run.evaluations.loss) if (number !== null) [low, high] = [Math.min(low, number), Math.max(high, number)];
  if (!(low <= high)) return null;
  if (curve.zero) low = 0;
  if (low === high) [low, high] = curve.log ? [low / 2, high * 2] : [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
  const room = 0.06 * (high - low);
  return curve.log ? [low / 1.15, high * 1.15] : [curve.zero ? 0 : low - room, high + room];
}

function drawCurve(svg, curve) {
  const width = Math.max(200, svg.clientWidth), height = 190, {left, right, top, bottom} = WIDE;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${curve.title} of ${RUNS.map((run) => run.name).join(", ")}`);
  const range = rangeOf(curve);
  if (!range) {
    svg.outerHTML = absence("No numbers.");
    return;
  }
  const lastPosition = Math.max(...RUNS.map((run) => positionsOf(run).at(-1) ?? 0)) || 1;
  const first = state.along === "step" ? Math.min(...RUNS.map((run) => positionsOf(run)[0] ?? 1)) : 0;
  const x = (position) => left + (position - first) / (lastPosition - first || 1) * (width - left - right);
  const level = curve.log ? Math.log10 : (n) => n;
  const y = (number) => height - bottom - (level(number) - level(range[0])) / (level(range[1]) - level(range[0])) * (height - top - bottom);
  const format = curve.format ?? ((n) => String(Number(n.toPrecision(3))));
  const parts = (curve.log ? logTicks(...range) : ticks(...range, 4)).map((n) =>
    `<line class="grid" x1="${left}" x2="${width - right}" y1="${y(n)}" y2="${y(n)}"/>` +
    `<text x="${left - 7}" y="${y(n) + 4}" text-anchor="end">${format(n)}</text>`);
  parts.push(...positionTicks(first, lastPosition, width).map(([n, words]) =>
    `<text x="${x(n)}" y="${height - 5}" text-anchor="middle">${words}</text>`));
  RUNS.forEach((run, n) => parts.push(linesOf(run, n, curve, x, y)));
  svg.innerHTML = parts.join("") + `<g class="pointer"></g>`;
  const read = (event) => pointCurve(svg, curve, event, {x, y, first, lastPosition, width, height, format});
  svg.onpointermove = svg.onpointerdown = read;
  svg.onpointerleave = () => (svg.querySelector(".pointer").innerHTML = "");
  svg.onkeydown = (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], box = svg.getBoundingClientRect(), positions = positionsOf(chosenRun());
    if (!move || !positions.length) return;
    event.preventDefault();
    svg.at = Math.max(0, Math.min(positions.length - 1, (svg.at ?? -1) + move));
    read({clientX: box.left + x(positions[svg.at]) / width * box.width});
  };
}

function positionTicks(first, lastPosition, width) {
  const about = width > 420 ? 6 : 4;
  if (state.along === "seconds") {
    const [marks, unit] = timeTicks(lastPosition, about);
    return marks.map(([n, words]) => [n, n ? `${words} ${unit}` : words]);
  }
  const marks = ticks(first, lastPosition, about).filter((n) => (n - first) / (lastPosition - first || 1) < 0.97);
  return marks.map((n) => [n, shortNumber(n)]);
}

// A missing number breaks the line; joining its neighbours would show a measurement that nobody made.
function pathOf(positions, values, x, y) {
  let commands = "", pen = "M";
  values.forEach((number, n) => {
    if (number === null || positions[n] === null) pen = "M";
    else {
      commands += `${pen}${x(positions[n]).toFixed(1)} ${y(number).toFixed(1)}`;
      pen = "L";
    }
  });
  return commands;
}

function linesOf(run, n, curve, x, y) {
  const positions = positionsOf(run), values = run.curves[curve.key], colour = colourOf(n), parts = [];
  if (!values) return "";
  const dashes = coincidingRun(n) === null ? "" : ` stroke-dasharray="6 5"`;
  const positive = (list) => curve.log ? list.map((v) => v > 0 ? v : null) : list;
  const low = run.curves[`${curve.key}_low`], high = run.curves[`${curve.key}_high`];
  if (low) {
    const drawnSteps = [...positions.keys()].filter((k) => low[k] !== null && !(curve.log && low[k] <= 0));
    const points = [...drawnSteps.map((k) => [positions[k], high[k]]), ...drawnSteps.reverse().map((k) => [positions[k], low[k]])];
    parts.push(`<polygon class="band" fill="${colour}" points="${points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ")}"/>`);
  }
  const faint = curve.smooth ? " faint" : "";
  parts.push(`<path class="line${faint}" stroke="${colour}"${dashes} d="${pathOf(positions, positive(values), x, y)}"/>`);
  if (curve.smooth) parts.push(`<path class="line" stroke="${colour}"${dashes} d="${pathOf(positions, run.curves.smooth, x, y)}"/>`);
  if (curve.evaluated && evaluatedOn(run) === curve.key)
    run.evaluations.step.forEach((step, k) => {
      const position = positionOfStep(run, step), loss = run.evaluations.loss[k];
      if (position !== null && loss !== null)
        parts.push(`<circle cx="${x(position)}" cy="${y(loss)}" r="3.5" fill="var(--panel)" stroke="${colour}" stroke-width="1.8"/>`);
    });
  return `<g data-run="${n}">${parts.join("")}</g>`;
}

// A line at the pointer, with every run's value there.
function pointCurve(svg, curve, event, {x, y, first, lastPosition, width, height, format}) {
  const box = svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width * width;
  const wanted = first + (share - WIDE.left) / (width - WIDE.left - WIDE.right) * (lastPosition - first);
  const rows = [], dots = [];
  let nearestStep = null;
  RUNS.forEach((run, n) => {
    const positions = positionsOf(run), values = run.curves[curve.key];
    if (!values || !positions.length) return;
    const k = positions.reduce((best, p, at) => Math.abs(p - wanted) < Math.abs(positions[best] - wanted) ? at : best, 0);
    if (values[k] === null) return;
    nearestStep = nearestStep ?? k;
    const exact = curve.format ? format(values[k]) : figure(values[k]);
    rows.push([`<i class="chip" style="background:${colourOf(n)}"></i>${escaped(run.name)}, step ${run.curves.step[k]}`, exact]);
    if (!curve.log || values[k] > 0) dots.push(`<line class="cross" x1="${x(positions[k])}" x2="${x(positions[k])}" y1="${WIDE.top}" y2="${height - WIDE.bottom}"/>` +
      `<circle cx="${x(positions[k])}" cy="${y(values[k])}" r="3" fill="${colourOf(n)}"/>`);
  });
  svg.querySelector(".pointer").innerHTML = dots.join("");
  if (rows.length) panel.show(`<b>${curve.title}</b>${pairs(rows)}`, svg);
}
