// A record of serving, step by step: blocks, tables, the host tier, and when each request waited, ran and was preempted.

const DATA = JSON.parse(document.getElementById("data").textContent);
const {header: SIZES, requests: REQUESTS, steps: STEPS} = DATA;
const byId = (id) => document.getElementById(id);
const COLOURS = ["run0", "run1", "run2", "run3", "run4", "run5", "activations", "masters"];
const STATES = {queue: "other", prefill: "weight", decode: "both", preempted: "alarm", pause: "reserve"};
const STATE_WORDS = {queue: "waits", prefill: "prompt (prefill)", decode: "decode", preempted: "preempted", pause: "pauses"};
const APART = 64;  // steps between two snapshots: going back replays at most so many
const many = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// The request of each sequence: it has as many numbers in a row as answers or beams.
const starts = REQUESTS.map((request) => request.request);
function requestOf(number) {
  let low = 0, high = starts.length;
  while (low < high) { const middle = (low + high) >> 1; if (starts[middle] <= number) low = middle + 1; else high = middle; }
  return low - 1;
}
const colourOf = (number) => COLOURS[(requestOf(number) + COLOURS.length) % COLOURS.length];
const nameOf = (number) => {
  const request = REQUESTS[requestOf(number)];
  if (!request) return `sequence ${number}`;
  const order = starts.indexOf(request.request) + 1;
  return request.sequences > 1 ? `request ${order}, ${request.beams > 1 ? "beam" : "answer"} ${number - request.request + 1}` : `request ${order}`;
};

// Tables, cached blocks and host slots after a step, from the nearest state that was snapshots.
const snapshots = [{tables: new Map(), cached: new Set(), host: new Set()}];
const copied = (state) => ({tables: new Map(state.tables), cached: new Set(state.cached), host: new Set(state.host)});
function apply(state, step) {
  for (const [number, [same, ...blocks]] of Object.entries(step.tables))
    state.tables.set(+number, [...(state.tables.get(+number) ?? []).slice(0, same), ...blocks]);
  for (const name of ["cached", "host"]) {
    for (const member of step[name]?.[1] ?? []) state[name].delete(member);
    for (const member of step[name]?.[0] ?? []) state[name].add(member);
  }
}
function stateAt(index) {
  const base = Math.min(Math.floor(index / APART), snapshots.length - 1), state = copied(snapshots[base]);
  for (let at = base * APART; at <= index; at++) {
    if (at && at % APART === 0 && !snapshots[at / APART]) snapshots[at / APART] = copied(state);
    apply(state, STEPS[at]);
  }
  return state;
}

// Who holds each block, and how full it is.
function holdersAt(index, state) {
  const holders = new Map();
  for (const [number, computed] of STEPS[index].running)
    (state.tables.get(number) ?? []).forEach((block, order) => {
      if (block < 0) return;
      const entry = holders.get(block) ?? {numbers: [], filled: 0};
      entry.numbers.push(number);
      entry.filled = Math.max(entry.filled, Math.min(SIZES.block, computed - order * SIZES.block));
      holders.set(block, entry);
    });
  return holders;
}

// Spans of each sequence: [state, first step, last step].
const spans = new Map();
(() => {
  const seen = new Set(), furthest = new Map();
  STEPS.forEach((step, index) => {
    const mark = (number, name) => {
      const row = spans.get(number) ?? spans.set(number, []).get(number), last = row.at(-1);
      if (last && last[0] === name && last[2] === index - 1) last[2] = index; else row.push([name, index, index]);
    };
    for (const [number, computed, count] of step.running) {
      const prompt = REQUESTS[requestOf(number)]?.prompt ?? 0, before = computed - count;
      const again = before < (furthest.get(number) ?? 0);
      if (count || seen.has(number)) mark(number, !count ? "pause" : before < prompt || again ? "prefill" : "decode");
      seen.add(number);
      furthest.set(number, Math.max(furthest.get(number) ?? 0, computed));
    }
    for (const number of step.waiting ?? []) mark(number, seen.has(number) ? "preempted" : "queue");
  });
})();
const ROWS = [...spans.keys()].sort((a, b) => a - b);

let now = 0, chosen = null, timer = null;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A canvas as wide as its box, sharp on every screen.
function paper(canvas, height) {
  const width = canvas.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, width];
}

const cells = {size: 0, columns: 0};
function drawBlocks(canvas, count, holders, cached) {
  const room = canvas.parentElement.clientWidth, size = count <= 64 ? 30 : count <= 256 ? 20 : count <= 1024 ? 13 : 9;
  const columns = Math.max(1, Math.floor(room / size)), [pen] = paper(canvas, Math.ceil(count / columns) * size);
  Object.assign(cells, canvas.id === "blocks" ? {size, columns} : {});
  for (let block = 0; block < count; block++) {
    const x = (block % columns) * size + 1, y = Math.floor(block / columns) * size + 1, inner = size - 2, entry = holders.get(block);
    pen.globalAlpha = 1; pen.fillStyle = css("idle"); pen.fillRect(x, y, inner, inner);
    if (entry) {
      const kinds = [...new Set(entry.numbers.map(requestOf))], height = inner * Math.max(0.12, entry.filled / SIZES.block);
      const parts = entry.numbers.length > 1 ? (kinds.length > 1 ? kinds.slice(0, 4) : [kinds[0], kinds[0]]) : kinds;
      parts.forEach((kind, part) => {
        pen.fillStyle = css(COLOURS[(kind + COLOURS.length) % COLOURS.length]);
        pen.fillRect(x + part * inner / parts.length, y + inner - height, inner / parts.length - (parts.length > 1 && part < parts.length - 1 ? 1 : 0), height);
      });
      if (chosen !== null && entry.numbers.includes(chosen)) { pen.strokeStyle = css("ink"); pen.lineWidth = 2; pen.strokeRect(x, y, inner, inner); }
    } else if (cached.has(block)) { pen.fillStyle = css("counters"); pen.globalAlpha = 0.75; pen.fillRect(x, y, inner, inner); }
    if (size >= 20) {
      pen.globalAlpha = 1; pen.font = `${size >= 30 ? 11 : 8}px system-ui, sans-serif`; pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.lineWidth = 2.5; pen.strokeStyle = css("panel"); pen.strokeText(block, x + inner / 2, y + inner / 2);
      pen.fillStyle = css("ink"); pen.fillText(block, x + inner / 2, y + inner / 2);
    }
  }
}

const LINE = 14;
const labels = () => byId("timeline").parentElement.clientWidth < 520 ? 58 : 140;  // width of the names
function drawTimeline() {
  const [pen, width] = paper(byId("timeline"), ROWS.length * LINE + 6), left = labels(), wide = (width - left - 2) / STEPS.length;
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  ROWS.forEach((number, row) => {
    pen.fillStyle = css(colourOf(number)); pen.fillRect(0, row * LINE + 2, 8, LINE - 4);
    pen.fillStyle = css(number === chosen ? "ink" : "faint");
    pen.fillText(left < 100 ? nameOf(number).replace(/[^\d,]+/, "").replace(/, \D+/, ".") : nameOf(number), 12, row * LINE + LINE / 2 + 1);
    for (const [name, first, last] of spans.get(number)) {
      pen.fillStyle = css(STATES[name]);
      pen.fillRect(left + first * wide, row * LINE + 2, Math.max(1, (last - first + 1) * wide), LINE - 3);
    }
    if (number === chosen) { pen.strokeStyle = css("ink"); pen.lineWidth = 1; pen.strokeRect(left - 1.5, row * LINE + 0.5, width - left, LINE); }
  });
  pen.fillStyle = css("ink"); pen.fillRect(left + (now + 0.5) * wide, 0, 1.5, ROWS.length * LINE + 6);
}

function figures(step, holders, state) {
  const shared = [...holders.values()].filter((entry) => entry.numbers.length > 1);
  const prefix = shared.filter((entry) => new Set(entry.numbers.map(requestOf)).size > 1).length;
  const free = SIZES.blocks - holders.size, cached = [...state.cached].filter((block) => !holders.has(block)).length;
  const count = step.running.reduce((sum, entry) => sum + entry[2], 0), sum = (part) => Object.values(part ?? {}).reduce((a, b) => a + b, 0);
  const filled = [...holders.values()].reduce((total, entry) => total + Math.max(0, entry.filled), 0);
  const moves = (kind) => (step.moves ?? []).filter((move) => move[0] === kind).length;
  return [
    ["running", step.running.length], ["waiting", (step.waiting ?? []).length], ["tokens computed", count], ["new tokens", sum(step.made)],
    ["blocks held", holders.size], ["shared by prefix", prefix], ["by answers or beams", shared.length - prefix],
    ["free, content cached", cached], ["free, empty", free - cached],
    ["positions filled", holders.size ? `${(100 * filled / holders.size / SIZES.block).toFixed(1)} %` : "-"],
    ["from the cache", step.hits ?? 0], ["copied on write", moves("copy")], ["preempted", (step.preempted ?? []).length],
    ...(SIZES.host_slots ? [["out to the host", moves("save")], ["back from the host", moves("load")]] : []),
  ];
}

function show() {
  const step = STEPS[now], state = stateAt(now), holders = holdersAt(now, state);
  byId("step").value = now;
  byId("step").setAttribute("aria-valuetext", `step ${now + 1} of ${STEPS.length}`);
  byId("at").textContent = `step ${(now + 1).toLocaleString("en")} of ${STEPS.length.toLocaleString("en")}${step.seconds === undefined ? "" : `, ${step.seconds.toFixed(3)} s`}`;
  drawBlocks(byId("blocks"), SIZES.blocks, holders, state.cached);
  byId("blocks").setAttribute("aria-label", `${many(holders.size, "block")} of ${SIZES.blocks} held by ${many(step.running.length, "sequence")}`);
  if (SIZES.host_slots) drawBlocks(byId("host"), SIZES.host_slots, new Map(), state.host);
  byId("numbers").innerHTML = figures(step, holders, state).map(([name, count]) => `<div><dt>${name}</dt><dd>${count}</dd></div>`).join("");
  const rows = step.running.slice(0, 24).map(([number, computed, count]) =>
    `<li><button type="button" data-number="${number}" aria-pressed="${number === chosen}"><i class="chip" style="background:var(--${colourOf(number)})"></i>${nameOf(number)}</button>` +
    `<span>${many(computed, "position")}${count ? `, ${count} now` : ""}</span><code>${(state.tables.get(number) ?? []).map((block) => block < 0 ? "-" : block).join(" ")}</code></li>`);
  byId("tables").innerHTML = rows.join("") + (step.running.length > 24 ? `<li>${step.running.length - 24} more</li>` : "");
  const words = [];
  if (step.preempted) words.push(`Preempted: ${step.preempted.map(nameOf).join("; ")}.`);
  for (const [number, why] of Object.entries(step.ended ?? {})) words.push(`Ended: ${nameOf(+number)} (${why}).`);
  for (const [kind, from, to] of (step.moves ?? []).slice(0, 6))
    words.push(kind === "copy" ? `Block ${from} copied to ${to}.` : kind === "save" ? `Block ${from} to host slot ${to}.` : `Host slot ${from} to block ${to}.`);
  byId("events").textContent = words.join(" ") || "Nothing special in this step.";
  drawTimeline();
}

function go(index) { now = Math.max(0, Math.min(STEPS.length - 1, index)); show(); }
function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => now < STEPS.length - 1 ? go(now + 1) : play(false), 1000 / +byId("speed").value) : null;
  byId("play").textContent = on ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", String(on));
}
function choose(number) { chosen = chosen === number ? null : number; show(); }

byId("step").max = STEPS.length - 1;
byId("step").addEventListener("input", (event) => { play(false); go(+event.target.value); });
byId("before").addEventListener("click", () => { play(false); go(now - 1); });
byId("after").addEventListener("click", () => { play(false); go(now + 1); });
byId("play").addEventListener("click", () => { if (timer === null && now === STEPS.length - 1) go(0); play(timer === null); });
byId("speed").addEventListener("change", () => { if (timer !== null) play(true); });
document.addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT", "BUTTON", "SUMMARY"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: STEPS.length - 1};
  if (event.key in moves) { event.preventDefault(); play(false); go(moves[event.key]); }
  if (event.key === " ") { event.preventDefault(); byId("play").click(); }
});
byId("tables").addEventListener("click", (event) => {
  const number = event.target.closest("button")?.dataset.number;
  if (number === undefined) return;
  choose(+number);
  byId("tables").querySelector(`[data-number="${number}"]`)?.focus();
});
const placeIn = (canvas, event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, box.width]; };
byId("timeline").addEventListener("click", (event) => {
  const [x, y, width] = placeIn(event.target, event), number = ROWS[Math.floor(y / LINE)];
  play(false);
  if (number !== undefined && number !== chosen) chosen = number;
  go(Math.floor((x - labels()) / (width - labels()) * STEPS.length));
});
byId("blocks").addEventListener("pointermove", (event) => {
  const [x, y] = placeIn(event.target, event), block = Math.floor(y / cells.size) * cells.columns + Math.floor(x / cells.size);
  if (block >= SIZES.blocks || x >= cells.columns * cells.size) return;
  const state = stateAt(now), entry = holdersAt(now, state).get(block);
  byId("pointed").textContent = `Block ${block}: ` + (entry ? `${entry.filled} of ${SIZES.block} positions, held by ${entry.numbers.map(nameOf).join("; ")}`
    : state.cached.has(block) ? "free; its content can still be found by its key" : "free and empty");
});
byId("states").innerHTML = Object.keys(STATES).map((name) => `<span><i class="chip" style="background:var(--${STATES[name]})"></i>${STATE_WORDS[name]}</span>`).join("");
byId("host-part").hidden = !SIZES.host_slots;
byId("cut").hidden = !DATA.cut;
window.addEventListener("resize", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
