// The page of `rent`: offers as dots of money against time, the front as a table, one chosen offer in full. Python counted
// every figure; here they are only drawn and printed. The same script shows offers for training and for serving.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SERVES = DATA.kind === "rent serving";
const $ = (selector) => document.querySelector(selector);
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, text = "", parent = null) {
  const element = parent instanceof SVGElement || name === "svg"
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, setting] of Object.entries(attributes)) element.setAttribute(key, setting);
  if (text !== "") element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function short(number, digits = 2) {
  const rounded = Number(number.toPrecision(digits));
  return rounded.toLocaleString("en-US", { maximumFractionDigits: 6 });
}
const dollars = (usd) => usd >= 1e6 ? `$${short(usd / 1e6)}M` : "$" + short(usd);
function time(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (seconds >= size) return `${short(seconds / size)} ${unit}`;
  }
  return `${short(seconds * 1e3, 3)} ms`;
}
const size = (bytes) => `${short(bytes / 2 ** 30, 3)} GiB`;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 || (share > 0.95 && share < 0.9995) ? 1 : 0)} %`;
const perHour = (usd) => "$" + short(usd, 3);
function count(number) {
  for (const [unit, size] of [["trillion", 1e12], ["billion", 1e9], ["million", 1e6]]) {
    if (number >= size) return `${short(number / size, 4)} ${unit}`;
  }
  return short(number, 6);
}
const energy = (kwh) => kwh === null ? "unknown" : kwh >= 1e3 ? `${short(kwh / 1e3)} MWh` : `${short(kwh)} kWh`;
const clusterWords = (row) => `${row.nodes} × ${row.devices / row.nodes} ${row.device}` + (row.spare_nodes ? ` + ${row.spare_nodes} spare` : "");

const MONEY = SERVES ? "usd_per_hour" : "usd";
const TIME = SERVES ? "per_token_seconds" : "wall_seconds";
const ROWS = [...DATA.front, ...(DATA.dominated || [])];
const isSameOffer = (a, b) => a && b && a.cluster === b.cluster && a.nodes === b.nodes && a.layout === b.layout;
let chosenNumber = Math.max(0, DATA.front.findIndex((row) => isSameOffer(row, DATA.cheapest)));

const FACTS = SERVES ? [
  ["cluster", clusterWords], ["layout", (row) => `${row.engines} × ${row.layout}`],
  ["price", (row) => `${perHour(row.usd_per_hour)} per hour, ${dollars(row.usd_per_million_tokens)} per million tokens`],
  ["per token", (row) => time(row.per_token_seconds)], ["first token", (row) => time(row.first_token_seconds)],
  ["tokens per second", (row) => short(row.tokens_per_second, 3)],
  ["requests within the latency", (row) => row.users_within_latency === null ? "no latency asked" : short(row.users_within_latency, 6)],
  ["power", (row) => row.kilowatts === null ? "unknown" : `${short(row.kilowatts)} kW, datasheet`],
  ["price from", (row) => row.price_source],
] : [
  ["cluster", clusterWords], ["layout", (row) => row.layout],
  ["bill", (row) => `${dollars(row.usd)} (90 % range ${dollars(row.usd_90[0])} to ${dollars(row.usd_90[1])})`],
  ["time", (row) => `${time(row.wall_seconds)} (90 % range ${time(row.wall_seconds_90[0])} to ${time(row.wall_seconds_90[1])})`],
  ["in time, in budget", (row) => [row.deadline_probability, row.budget_probability]
    .map((share) => share === null ? "not asked" : percent(share)).join(", ")],
  ["goodput", (row) => `${percent(row.goodput)}, simulated ${percent(row.goodput_90[0])} to ${percent(row.goodput_90[1])}`],
  ["failures", (row) => `${short(row.failures)} expected, one every ${time(row.mtbf_seconds)}`],
  ["checkpoints", (row) => `every ${time(row.save_every_seconds)}, ${size(row.checkpoint_bytes)}, `
    + `training waits ${time(row.save_stall_seconds)}, written after ${time(row.save_write_seconds)}`],
  ["a step", (row) => `${time(row.step_seconds)}, MFU ${percent(row.mfu_full)}, ${short(row.tokens_per_second, 3)} tokens/s`],
  ["memory", (row) => `${size(row.peak_bytes)} per device, fits with a probability of ${percent(row.fits_probability)}`],
  ["energy", (row) => energy(row.kwh)],
  ["stops going further", (row) => row.limits.join("; ") || "nothing yet"],
  ["price from", (row) => `$${row.usd_per_gpu_hour} per device-hour: ${row.price_source}`],
];
const COLUMNS = SERVES ? [
  ["$ per hour", (row) => perHour(row.usd_per_hour)], ["$ per M tokens", (row) => dollars(row.usd_per_million_tokens)],
  ["cluster", clusterWords, "words"], ["layout", (row) => row.layout, "words wraps"], ["per token", (row) => time(row.per_token_seconds)],
  ["first token", (row) => time(row.first_token_seconds)], ["tokens/s", (row) => short(row.tokens_per_second, 3)],
] : [
  ["bill", (row) => dollars(row.usd)], ["time", (row) => time(row.wall_seconds)], ["cluster", clusterWords, "words"],
  ["goodput", (row) => percent(row.goodput)], ["energy", (row) => energy(row.kwh)],
  ["fits", (row) => percent(row.fits_probability)], ["stops going further", (row) => row.limits.join(", "), "words wraps"],
  ["layout", (row) => row.layout, "words wraps"],
];

function head() {
  const parts = SERVES
    ? [`${DATA.model} served by ${DATA.framework}`, `${DATA.quantization} weights`,
      `${short(DATA.input_length, 6)} tokens in, ${short(DATA.output_length, 6)} out`, `${short(DATA.concurrency, 6)} requests at once`]
    : [DATA.model, `${count(DATA.tokens)} tokens`,
      `${short(DATA.global_batch, 6)} × ${short(DATA.sequence, 6)} tokens per step on every cluster`];
  $("#subject").textContent = parts.join(" · ");
  document.title = `What to rent: ${DATA.model}`;
  $("#map-title").textContent = SERVES ? "Dollars per hour against time per token" : "Money against time";
}

function verdict(title, row, none, chance) {
  const box = node("div", row ? {} : { class: "none" }, "", $("#verdict"));
  node("span", {}, title, box);
  node("b", {}, row ? `${clusterWords(row)}: ${SERVES ? `${perHour(row.usd_per_hour)} per hour` : `${dollars(row.usd)}, ${time(row.wall_seconds)}`}` : none, box);
  if (!row) return;
  node("span", {}, SERVES ? `${time(row.per_token_seconds)} per token, ${short(row.tokens_per_second, 3)} tokens/s`
    : `goodput ${percent(row.goodput)}` + (chance === null ? "" : `, ${chance}`), box);
}

const chance = (share, words) => share === null || share === undefined ? null
  : `${words} with a probability ${share > 0.99 ? "above 99 %" : share < 0.01 ? "below 1 %" : `of ${percent(share)}`}`;

// The run that likely keeps a limit, where the best on average is another one.
function likely(title, row, best, key, words) {
  if (row && row.command !== best?.command) verdict(title, row, "", chance(row[key], words));
}

function verdicts() {
  const limit = SERVES ? DATA.latency_seconds : DATA.deadline_seconds;
  verdict("Cheapest" + (limit ? ` within ${time(limit)}${SERVES ? " per token" : ""}` : ""), DATA.cheapest,
    "nothing is fast enough", chance(DATA.cheapest?.deadline_probability, "in time"));
  if (SERVES) return;
  likely("Likely in time", DATA.likely_in_time, DATA.cheapest, "deadline_probability", "in time");
  verdict("Fastest" + (DATA.budget_usd ? ` within ${dollars(DATA.budget_usd)}` : ""), DATA.fastest, "nothing is cheap enough",
    chance(DATA.fastest?.budget_probability, "in budget"));
  likely("Likely in budget", DATA.likely_in_budget, DATA.fastest, "budget_probability", "in budget");
}

// 1, 2 and 5 times each power of ten: both axes are logarithms.
function ticks(low, high) {
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of [1, 2, 5]) {
      const mark = step * 10 ** power;
      if (mark >= low && mark <= high) marks.push(mark);
    }
  }
  return marks;
}
// Seconds at which people read a clock or a calendar; powers of ten are no times that anybody knows.
const CLOCK = [1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 2 * 86400, 4 * 86400, 7 * 86400, 14 * 86400, 30 * 86400,
  60 * 86400, 120 * 86400, 240 * 86400, 365 * 86400];

function draw() {
  const svg = $("#map"), width = svg.clientWidth, height = svg.clientHeight;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const limits = SERVES ? [DATA.latency_seconds, null] : [DATA.deadline_seconds, DATA.budget_usd];
  const money = [...ROWS.map((row) => row[MONEY]), ...(limits[1] ? [limits[1]] : [])];
  const times = [...ROWS.map((row) => row[TIME]), ...(limits[0] ? [limits[0]] : [])];
  const box = { left: 62, right: width - 14, top: 10, bottom: height - 34 };
  const scale = (values, from, to) => {
    const low = Math.log(Math.min(...values) / 1.25), high = Math.log(Math.max(...values) * 1.25);
    const at = (amount) => from + (to - from) * (Math.log(amount) - low) / (high - low);
    return Object.assign(at, { low: Math.exp(low), high: Math.exp(high) });
  };
  const x = scale(times, box.left, box.right), y = scale(money, box.bottom, box.top);
  const line = (x1, y1, x2, y2, kind) => node("line", { x1, y1, x2, y2, class: kind }, "", svg);
  let last = -Infinity;
  const along = SERVES ? ticks(x.low, x.high) : CLOCK.filter((seconds) => seconds >= x.low && seconds <= x.high);
  for (const mark of along) {
    if (x(mark) - last < 46) continue;
    last = x(mark);
    line(last, box.top, last, box.bottom, "axis");
    node("text", { x: last, y: box.bottom + 14, "text-anchor": "middle" }, time(mark), svg);
  }
  last = Infinity;
  for (const mark of ticks(y.low, y.high)) {
    if (last - y(mark) < 20) continue;
    last = y(mark);
    line(box.left, last, box.right, last, "axis");
    node("text", { x: box.left - 6, y: last + 4, "text-anchor": "end" }, dollars(mark), svg);
  }
  node("text", { x: box.right, y: height - 4, "text-anchor": "end" }, SERVES ? "time per token" : "from start to end", svg);
  if (limits[0]) {
    line(x(limits[0]), box.top, x(limits[0]), box.bottom, "limit");
    node("text", { x: x(limits[0]) - 4, y: box.top + 10, "text-anchor": "end", class: "limit-words" }, time(limits[0]), svg);
  }
  if (limits[1]) {
    line(box.left, y(limits[1]), box.right, y(limits[1]), "limit");
    node("text", { x: box.left + 4, y: y(limits[1]) - 4, class: "limit-words" }, dollars(limits[1]), svg);
  }
  const path = DATA.front.map((row, number) => `${number ? "L" : "M"}${x(row[TIME])} ${y(row[MONEY])}`).join("");
  node("path", { d: path, class: "front" }, "", svg);
  if (!SERVES) ranges(svg, x, y, box);
  const boxes = ROWS.map((row, number) => {  // of the dots: a name covers none
    const [across, down] = [x(row[TIME]), y(row[MONEY])];
    return { number, left: across - 5, right: across + 5, low: down - 5, high: down + 5 };
  });
  const order = ROWS.map((row, number) => number).filter((number) => number !== chosenNumber).reverse();
  dot(svg, ROWS[chosenNumber], chosenNumber, x, y, box, boxes);
  order.forEach((number) => dot(svg, ROWS[number], number, x, y, box, boxes));
  svg.append(svg.querySelector("g.chosen")); // drawn last, so that nothing lies over it
}

// The chosen offer's 90 % ranges as a cross, cut at the edges of the map.
function ranges(svg, x, y, box) {
  const row = ROWS[chosenNumber], inside = (position, low, high) => Math.max(low, Math.min(high, position));
  const [start, end] = row.wall_seconds_90.map((seconds) => inside(x(seconds), box.left, box.right));
  const [low, high] = row.usd_90.map((usd) => inside(y(usd), box.top, box.bottom));
  node("line", { x1: start, x2: end, y1: y(row[MONEY]), y2: y(row[MONEY]), class: "range" }, "", svg);
  node("line", { x1: x(row[TIME]), x2: x(row[TIME]), y1: low, y2: high, class: "range" }, "", svg);
}

// A dot's name stands above or below it, where it covers neither a dot nor another name; with room nowhere, only the
// chosen dot has a name. `boxes` holds what is taken, and grows with each name.
function dot(svg, row, number, x, y, box, boxes) {
  const front = number < DATA.front.length, at = [x(row[TIME]), y(row[MONEY])];
  const kind = `dot${front ? " on-front" : ""}${number === chosenNumber ? " chosen" : ""}`;
  const label = `${clusterWords(row)}: ${dollars(row[MONEY])}, ${time(row[TIME])}`;
  const group = node("g", { class: kind, tabindex: 0, role: "button", "aria-label": label }, "", svg);
  node("title", {}, label, group);
  node("circle", { cx: at[0], cy: at[1], r: front ? 6 : 4 }, "", group);
  const text = clusterWords(row), labelWidth = 6.4 * text.length + 12, end = at[0] + labelWidth > box.right;
  const sides = [-8, 18].map((down) => ({ down, left: end ? at[0] - labelWidth : at[0], right: end ? at[0] : at[0] + labelWidth,
    low: at[1] + down - 12, high: at[1] + down + 4 }));
  const free = sides.find((side) => !boxes.some((taken) => taken.number !== number
    && taken.left < side.right && side.left < taken.right && taken.low < side.high && side.low < taken.high));
  if (number === chosenNumber || (front && free)) {
    const { down, ...corners } = free ?? sides[0];
    boxes.push(corners);
    node("text", { x: at[0] + (end ? -9 : 9), y: at[1] + down, "text-anchor": end ? "end" : "start" }, text, group);
  }
  group.addEventListener("click", () => choose(number));
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(number); } });
}

function choose(number) {
  chosenNumber = number;
  const row = ROWS[number];
  $("#chosen-title").textContent = clusterWords(row);
  $("#facts").replaceChildren();
  for (const [name, words] of FACTS) {
    node("dt", {}, name, $("#facts"));
    node("dd", {}, words(row), $("#facts"));
  }
  $("#command code").textContent = row.command;
  document.querySelectorAll("#front tbody tr").forEach((line, index) => line.classList.toggle("chosen", index === number));
  draw();
}

function table() {
  const top = node("tr", {}, "", $("#front thead"));
  for (const [name, , style] of COLUMNS) node("th", style ? { class: style } : {}, name, top);
  DATA.front.forEach((row, number) => {
    const line = node("tr", { tabindex: 0 }, "", $("#front tbody"));
    for (const [, cell, style] of COLUMNS) node("td", style ? { class: style } : {}, cell(row), line);
    line.addEventListener("click", () => choose(number));
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(number); });
  });
}

function notes() {
  const sentences = [], clusters = DATA.clusters, conditions = DATA.conditions;
  if (SERVES) {
    sentences.push(`${clusters.tried} clusters tried; ${clusters.unfit.length} do not hold all requests at once.`);
    sentences.push("Nodes stand alone: no engine reaches beyond one. Spare nodes and idle hours are not counted.");
  } else {
    sentences.push(`${clusters.tried} clusters tried: ${clusters.searched} searched to the end, ${clusters.dominated} cannot beat these, ${clusters.too_long} take longer than ${time(DATA.longest_seconds)}, ${clusters.unfit.length} do not fit.`);
    sentences.push(`A failure every ${short(conditions.mtbf_device_hours, 3)} hours of a device; ${percent(conditions.hardware)} of them take a node for ${time(conditions.repair_s)}. A restart takes ${time(conditions.restart_s)} and reading the checkpoint.`);
    sentences.push(`Evaluation takes ${percent(conditions.evaluation)} of the steps' time. Checkpoints move at ${short(conditions.storage_bytes_per_s / 1e9)} GB/s per node.`);
    sentences.push("Ranges: the planner's error on published runs, and the simulated chance of failures.");
    sentences.push("Energy: datasheet watts of all devices all the time, without hosts, network and cooling.");
  }
  sentences.push(`Prices: ${DATA.prices}, on demand, without storage, traffic, tax and discounts.`);
  const missing = Object.entries(DATA.left_out).map(([device, figures]) => `${device} (no ${figures})`);
  if (missing.length) sentences.push(`Priced and not tried, since a figure is not known: ${missing.join(", ")}.`);
  if (DATA.unpriced.length) sentences.push(`No price, so not tried: ${DATA.unpriced.join(", ")}.`);
  for (const words of sentences) node("li", {}, words, $("#notes"));
  $("#map-words").textContent = "Each dot is a cluster; blue ones are the front. Click one for its layout and its command."
    + (SERVES ? "" : " The cross is its 90 % range.");
}

async function copy() {
  const button = $("#command button");
  try { await navigator.clipboard.writeText($("#command code").textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren($("#command code")); button.textContent = "Selected"; }
  setTimeout(() => { button.textContent = "Copy command"; }, 1500);
}

head();
verdicts();
table();
notes();
choose(chosenNumber);
$("#command button").addEventListener("click", copy);
addEventListener("resize", draw);
