// The state of each half of the page (a recipe and a layout) and the controls that change it. A page has one half, or two
// side by side: then the same controls move both, or the one that is chosen.

const halves = PAGE.halves.map(halfOf);
const [lead] = halves;
const isPair = halves.length > 1;
const divisorsOf = (number) => [...Array(number).keys()].map((n) => n + 1).filter((d) => number % d === 0);
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
let selection = "both";

// The halves that the controls move, and the first of them, whose values they show.
const movedHalves = () => selection === "both" ? halves : halves.filter((half) => half.label === selection);

function halfOf(data, n) {
  const half = {
    n, data, label: "AB"[n], title: data.title, controls: data.controls, devices: data.cluster.devices,
    capacity: data.cluster.usable_bytes, // null: not known
    state: {recipe: {}, layout: {}}, ranks: null, before: null, scale: null, pointed: null, stays: "",
    el: (id) => byId(n ? `${id}-${n + 1}` : id),
  };
  return Object.assign(half, mapOf(data));
}

// What tp, cp and pp leave of the devices; not whole where they do not divide them.
const dpOf = ({controls}, {tp, cp, pp}) => controls.dp[tp * cp * pp] ?? NaN;

// Every control: where its value lives, in words, what it may be in a half, when it means nothing.
const GROUPS = ["Model and batch", "Split the data", "Split the model", "Save memory"];
const KNOBS = [
  {name: "sequence", part: "recipe", group: 0, word: "Sequence"},
  {name: "global_batch", part: "recipe", group: 0, word: "Global batch"},
  {name: "micro_batch", part: "layout", group: 0, word: "Micro-batch"},
  {name: "dp_shard", part: "layout", group: 1, word: "Sharers",
    choices: (half, layout) => Number.isInteger(dpOf(half, layout)) ? divisorsOf(dpOf(half, layout)) : [1]},
  {name: "zero", part: "layout", group: 1, word: "ZeRO stage"},
  {name: "ep", part: "layout", group: 1, word: "Experts", hidden: !lead.data.model.experts},
  {name: "tp", part: "layout", group: 2, word: "Tensor"},
  {name: "sp", part: "layout", group: 2, word: "Split norms", check: true, off: ({tp}) => tp === 1, choices: () => [false, true]},
  {name: "cp", part: "layout", group: 2, word: "Context"},
  {name: "pp", part: "layout", group: 2, word: "Pipeline"},
  {name: "schedule", part: "layout", group: 2, word: "Schedule", options: lead.controls.schedule, off: ({pp}) => pp === 1},
  {name: "vp", part: "layout", group: 2, word: "Virtual stages", off: (layout) => !lead.data.schedules[layout.schedule].deeper || layout.pp === 1,
    choices: (half, layout) => stagesWith(half, layout)},
  {name: "recompute", part: "layout", group: 3, word: "Recompute", options: lead.controls.recompute},
].filter((knob) => !knob.hidden);
const ownValues = (knob, half) => knob.choices ? knob.choices(half, half.state.layout) : half.controls[knob.name];
for (const knob of KNOBS) knob.values = () => ascending(movedHalves().flatMap((half) => ownValues(knob, half)));

// The state of a half with one value set and what cannot but follow from it; everything else stays, and may become illegal.
function withValue(half, before, name, setting) {
  const knob = KNOBS.find((knob) => knob.name === name), next = copyOf(before), {layout} = next;
  next[knob.part][name] = setting;
  if (name === "tp") layout.sp = layout.tp > 1 && (before.layout.tp === 1 || before.layout.sp);
  if (["tp", "cp", "pp"].includes(name)) followDevices(half, before.layout, layout);
  if (name === "pp" || name === "schedule") followPipeline(half, before.layout, layout);
  if (name === "zero" && setting && layout.dp_shard * layout.cp === 1) layout.dp_shard = Math.max(1, dpOf(half, layout));
  if (name === "zero" && !setting) layout.dp_shard = 1;
  layout.dp_replicate = dpOf(half, layout) / layout.dp_shard;
  return next;
}

// A half takes a change that is legal there; one that is legal nowhere is taken by all, which then say why.
function change(name, setting) {
  const knob = KNOBS.find((knob) => knob.name === name);
  const changes = movedHalves().map((half) => {
    const known = ownValues(knob, half).includes(setting);
    const next = known ? withValue(half, half.state, name, setting) : null;
    return {half, next, problems: known ? violationsOf(half, next) : [`${half.title} has no ${name}=${setting} here`]};
  });
  const nowhere = changes.every(({problems}) => problems.length);
  for (const half of halves) half.stays = "";
  const states = halves.map((half) => {
    const outcome = changes.find((outcome) => outcome.half === half);
    if (!outcome) return half.state;
    if (outcome.next && (nowhere || !outcome.problems.length || violationsOf(half).length)) return outcome.next;
    half.stays = outcome.problems[0];
    return half.state;
  });
  setStates(states);
}

// Where ZeRO had all of dp as sharers it keeps all; else the largest divisor that is no more than before.
function followDevices(half, before, layout) {
  const dp = dpOf(half, layout);
  if (!Number.isInteger(dp)) return;
  const wasWhole = before.dp_shard === dpOf(half, before) && layout.zero;
  layout.dp_shard = wasWhole ? dp : divisorsOf(dp).filter((d) => d <= before.dp_shard).at(-1);
}

// Stages of a rank that a schedule can have, the usual number first.
const stagesWith = ({controls}, {pp, schedule}) => pp === 1 ? [1] : controls.vp[schedule][pp];

function followPipeline(half, before, layout) {
  if (layout.pp === 1) layout.schedule = "1f1b";
  const values = stagesWith(half, layout), keeps = layout.schedule === before.schedule && values.length > 1;
  layout.vp = keeps ? values.filter((vp) => vp <= before.vp).at(-1) ?? values[0] : values[0];
}

// What is wrong with a state of a half, in sentences; none: legal.
function violationsOf(half, {recipe, layout} = half.state) {
  const {tp, cp, pp} = layout;
  if (!Number.isInteger(dpOf(half, layout))) return [fillIn(half.controls.indivisible, {product: tp * cp * pp})];
  return violations(half.data.model, recipe, layout);
}

// A slider, a list or a box to tick, with its name, its explanation, and room for the other half's setting.
function knobElement({name, label, word, check, options}, change) {
  const box = document.createElement("div");
  box.className = `knob${check ? " check" : ""}`;
  const id = `knob-${name}`;
  const input = check ? `<input type="checkbox" id="${id}">` : options ?
    `<select id="${id}">${options.map((option) => `<option>${option}</option>`).join("")}</select>` :
    `<output for="${id}"></output><input type="range" min="0" step="1" id="${id}">`;
  const key = name.startsWith("timeline_") ? "" : ` <code>${name}</code>`;
  const theirs = isPair && (check || options) && key ? `<small class="other"></small>` : "";
  box.innerHTML = `<label for="${id}"><span data-explain="${label ?? name}">${word}</span>${key}</label>${input}${theirs}`;
  box.querySelector("label").dataset.explain = label ?? name;
  box.querySelector("input, select").addEventListener("input", (event) => change(event.target));
  return box;
}

function buildControls() {
  const form = byId("controls"), list = byId("knobs");
  form.addEventListener("submit", (event) => event.preventDefault());
  if (isPair) buildChoice(list);
  const groups = GROUPS.map((title) => {
    const group = document.createElement("fieldset");
    group.innerHTML = `<legend>${title}</legend>`;
    list.append(group);
    return group;
  });
  const dp = document.createElement("div");
  dp.className = "knob";
  dp.innerHTML = `${explained("dp", "Data")}<output id="dp"></output>`;
  groups[1].append(dp);
  for (const knob of KNOBS) {
    knob.box = knobElement(knob, (input) => change(knob.name,
      knob.check ? input.checked : knob.options ? input.value : knob.values()[Number(input.value)]));
    groups[knob.group].append(knob.box);
  }
}

// Which halves the controls move.
function buildChoice(list) {
  const group = document.createElement("fieldset");
  group.className = "choice";
  group.innerHTML = `<legend>The controls move</legend>` + ["both", ...halves.map((half) => half.label)].map((name) =>
    `<label><input type="radio" name="chosen" value="${name}"> ${name}</label>`).join("");
  group.addEventListener("input", (event) => {
    selection = event.target.value;
    showChange();
  });
  list.append(group);
}

function showControls() {
  for (const button of document.querySelectorAll("[name=chosen]")) button.checked = button.value === selection;
  const [{state}, second] = movedHalves();
  for (const knob of KNOBS) {
    const input = knob.box.querySelector("input, select"), setting = state[knob.part][knob.name];
    const off = movedHalves().every((half) => Boolean(knob.off?.(half.state.layout)));
    const theirs = second ? second.state[knob.part][knob.name] : setting;
    knob.box.classList.toggle("off", off);
    input.disabled = off;
    if (knob.check) input.checked = setting;
    else if (knob.options) input.value = setting;
    else {
      const values = knob.values(), index = values.indexOf(setting);
      input.max = values.length - 1;
      input.value = index >= 0 ? index : values.filter((option) => option < setting).length;
      input.setAttribute("aria-valuetext", theirs === setting ? setting : `A ${setting}, B ${theirs}`);
      knob.box.querySelector("output").textContent = theirs === setting ? setting : `${setting} | ${theirs}`;
    }
    const note = knob.box.querySelector(".other");
    if (note) note.textContent = theirs === setting ? "" : `B: ${theirs === true ? "on" : theirs === false ? "off" : theirs}`;
  }
  byId("dp").textContent = [...new Set(movedHalves().map(dpWords))].join(" | ");
}

function dpWords(half) {
  const {layout} = half.state, dp = dpOf(half, layout), {dp_replicate: copies, dp_shard: shards} = layout;
  return Number.isInteger(dp) ? dp + (copies > 1 && shards > 1 ? ` = ${copies} x ${shards}` : "") : "-";
}
