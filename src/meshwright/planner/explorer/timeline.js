// Every schedule as in the lectures: a row for each rank, boxes F, B and W of equal length, BW of two.

const MOST_BOXES = lead.data.timelines.micro_batches.at(-1); // micro-batches drawn; more are only slower to look at
const shape = {p: 4, m: 8, v: 2, wide: false};
const WIDE = 11; // pixels of a pass, where boxes are to be read
const TIMELINE_KNOBS = [
  {name: "timeline_p", word: "Ranks", key: "p", values: () => ascending([...drawnRanks, shape.p])},
  {name: "timeline_m", word: "Micro-batches", key: "m", values: () => ascending([...drawnMicroBatches, shape.m])},
  {name: "timeline_v", word: "Virtual stages", key: "v", values: () => ascending([...drawnStages, shape.v])},
  {name: "timeline_wide", word: "Wide boxes", key: "wide", check: true},
];
const drawnSpans = new Map();
let drawnShape = "", waitingTimelines = 0; // timelines are drawn again only where shape, width or theme changed

const {ranks: drawnRanks, micro_batches: drawnMicroBatches, stages: drawnStages} = lead.data.timelines;

// Stages of a rank: of those that have more by their nature as many as the control says.
function virtualOf({stages, deeper}) {
  return deeper && stages > 1 ? Math.max(stages, shape.v) : stages;
}

function buildTimelines() {
  const bar = byId("pipeline-controls"), list = byId("timelines");
  for (const knob of TIMELINE_KNOBS) {
    knob.box = knobElement(knob, (input) => {
      shape[knob.key] = knob.check ? input.checked : knob.values()[Number(input.value)];
      drawTimelines();
    });
    bar.append(knob.box);
  }
  const legend = document.createElement("span");
  legend.className = "ramp";
  legend.innerHTML = [["F", "forward"], ["B", "gradient of the input"], ["W", "of the weights"], ["BW", "both"]].map(
    ([kind, words]) => `<span><i class="chip" style="background:var(--${FILL[kind]})"></i>${kind} ${words}</span>`).join("") +
    "<span>paler: further stages of the rank</span>";
  bar.append(legend);
  for (const name of Object.keys(lead.data.schedules)) {
    const box = document.createElement("div");
    box.dataset.schedule = name;
    list.append(box);
  }
}

// The layout's own pipeline, as far as it can be drawn.
function followLayout() {
  const [{data, state: {layout, recipe}}] = movedHalves();
  if (layout.pp === 1) return;
  shape.p = layout.pp;
  shape.m = Math.max(1, Math.min(MOST_BOXES, microBatches(data.model, layout, recipe)));
  shape.v = Math.max(2, layout.vp);
}

// Soon, and once for many changes of a slider: six schedules take longer to draw than all the rest.
function drawTimelinesSoon() {
  clearTimeout(waitingTimelines);
  waitingTimelines = setTimeout(drawTimelines, 60);
}

function drawTimelines() {
  const [half] = movedHalves(), {layout, recipe} = half.state;
  const microBatchCount = violationsOf(half).length || layout.pp === 1 ? 0 : microBatches(half.data.model, layout, recipe);
  byId("pipelines-title").textContent = `${prefixWords(half)}Pipeline schedules: who computes when`;
  byId("pipeline-words").textContent = microBatchCount <= MOST_BOXES ? "" :
    `The layout has ${microBatchCount} micro-batches; ${MOST_BOXES} at most are drawn, and the bubbles are theirs.`;
  for (const knob of TIMELINE_KNOBS) {
    if (knob.check) continue;
    const input = knob.box.querySelector("input"), values = knob.values();
    input.max = values.length - 1;
    input.value = values.indexOf(shape[knob.key]);
    input.setAttribute("aria-valuetext", shape[knob.key]);
    knob.box.querySelector("output").textContent = shape[knob.key];
  }
  const list = byId("timelines"), currentState = JSON.stringify([shape, list.clientWidth, css("paper")]);
  for (const box of list.children) {
    const name = box.dataset.schedule;
    box.classList.toggle("chosen", layout.pp > 1 && layout.schedule === name);
    if (currentState !== drawnShape) drawTimeline(box, name);
  }
  drawnShape = currentState;
}

function drawTimeline(box, name) {
  const {p, m} = shape, [{data}] = movedHalves(), kind = data.schedules[name], v = virtualOf(kind);
  const values = {schedule: name, pp: p, count: m, vp: v}, refusal = lookUp(data.timelines, data.timelines.refused, values);
  drawnSpans.delete(name);
  const title = `<b>${explained(name, name)}</b>`;
  if (refusal) {
    box.innerHTML = `<h3>${title}</h3><p class="refused">${escaped(fillIn(refusal, values))}</p>`;
    return;
  }
  const played = replay(schedule(kind, p, m, v));
  box.innerHTML = `<h3>${title}${explained("bubble", "bubble")} ${percent(played.bubble)}, ` +
    `${explained("in_flight", "in flight")} ${Number((Math.max(...played.inFlight) / v).toFixed(2))}</h3>` +
    `<div class="scroll"><canvas role="img" aria-label="${name}: bubble ${percent(played.bubble)}"></canvas></div>`;
  const canvas = box.querySelector("canvas");
  canvas.style.height = `${p * rowHeight(p)}px`;
  if (shape.wide) canvas.style.width = `max(100%, ${Math.min(WIDE * played.total, 8000)}px)`;
  drawSpans(canvas, played, p);
  drawnSpans.set(name, played);
}

const rowHeight = (p) => p <= 8 ? 18 : p <= 16 ? 12 : Math.max(3, Math.floor(200 / p));

function drawSpans(canvas, played, p) {
  const {pen, width} = canvasOf(canvas), row = rowHeight(p), unit = width / played.total;
  pen.fillStyle = css("idle");
  pen.fillRect(0, 0, width, p * row);
  const colours = Object.fromEntries(Object.entries(FILL).map(([kind, name]) => [kind, css(name)]));
  const [ink, paper] = [css("forward-ink"), css("panel")];
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = "10px system-ui, sans-serif";
  played.spans.forEach((rankSpans, rank) => {
    for (const {kind, stage, i, start, end} of rankSpans) {
      const x = start * unit, spanWidth = (end - start) * unit;
      pen.fillStyle = colours[kind];
      pen.globalAlpha = stage >= p ? 0.62 : 1; // further stages of the rank
      pen.fillRect(x, rank * row, spanWidth, row);
      pen.globalAlpha = 1;
      if (unit > 2.5) line(pen, x, rank * row, x, (rank + 1) * row, paper);
      pen.fillStyle = ink;
      if (row >= 12 && spanWidth > 6 * String(i).length + 3) pen.fillText(i, x + spanWidth / 2, (rank + 0.5) * row + 0.5);
    }
    line(pen, 0, rank * row, width, rank * row, paper);
  });
}

// What is under the pointer.
function spanWords(canvas, px, py) {
  const name = canvas.closest("[data-schedule]").dataset.schedule, played = drawnSpans.get(name);
  const rank = Math.floor(py / rowHeight(shape.p)), time = px / canvas.clientWidth * played.total;
  const span = played.spans[rank]?.find(({start, end}) => start <= time && time < end);
  if (!span) return `<b>waiting</b> rank ${rank}, time ${time.toFixed(1)}`;
  return `<b>${span.kind}: ${PASSES[span.kind]}</b> micro-batch ${span.i}, stage ${span.stage}, rank ${rank}, ` +
    `time ${span.start} to ${span.end}`;
}
