// The state of each half of the page (a recipe and a layout) and the controls that change it. A page has one half, or two
// side by side: then the same controls move both, or the one that is chosen.

const halves = PAGE.halves.map(halfOf);
const [lead] = halves;
const both = halves.length > 1;
const divisorsOf = (number) => [...Array(number).keys()].map((n) => n + 1).filter((d) => number % d === 0);
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
let chosen = "both";

// The halves that the controls move, and the first of them, whose values they show.
const moved = () => chosen === "both" ? halves : halves.filter((half) => half.label === chosen);

function halfOf(data, n) {
  const found = {
    n, data, label: "AB"[n], title: data.title, controls: data.controls, devices: data.cluster.devices,
    capacity: data.cluster.usable_bytes, // null: not known
    state: {recipe: {}, layout: {}}, ranks: null, before: null, scale: null, pointed: null, stays: "",
    el: (id) => document.getElementById(n ? `${id}-${n + 1}` : id),
  };
  return Object.assign(found, mapOf(data));
}

// What tp, cp and pp leave of the devices; not whole where they do not divide them.
const dpOf = ({controls}, {tp, cp, pp}) => controls.dp[tp * cp * pp] ?? NaN;

// Every control: where its value lives, in words, what it may be in a half, when it means nothing.
const GROUPS = ["Model and batch", "Split the data", "Split the model", "Save memory"];
const KNOBS = [
  {name: "sequence", of: "recipe", group: 0, word: "Sequence"},
  {name: "global_batch", of: "recipe", group: 0, word: "Global batch"},
  {name: "micro_batch", of: "layout", group: 0, word: "Micro-batch"},
  {name: "dp_shard", of: "layout", group: 1, word: "Sharers",
    own: (half, layout) => Number.isInteger(dpOf(half, layout)) ? divisorsOf(dpOf(half, layout)) : [1]},
  {name: "zero", of: "layout", group: 1, word: "ZeRO stage"},
  {name: "ep", of: "layout", group: 1, word: "Experts", hidden: !lead.data.model.experts},
  {name: "tp", of: "layout", group: 2, word: "Tensor"},
  {name: "sp", of: "layout", group: 2, word: "Split norms", check: true, off: ({tp}) => tp === 1, own: () => [false, true]},
  {name: "cp", of: "layout", group: 2, word: "Context"},
  {name: "pp", of: "layout", group: 2, word: "Pipeline"},
  {name: "schedule", of: "layout", group: 2, word: "Schedule", options: lead.controls.schedule, off: ({pp}) => pp === 1},
  {name: "vp", of: "layout", group: 2, word: "Virtual stages", off: (layout) => !lead.data.schedules[layout.schedule].deeper || layout.pp === 1,
    own: (half, layout) => stagesWith(half, layout)},
  {name: "recompute", of: "layout", group: 3, word: "Recompute", options: lead.controls.recompute},
].filter((knob) => !knob.hidden);
const ownValues = (knob, half) => knob.own ? knob.own(half, half.state.layout) : half.controls[knob.name];
for (const knob of KNOBS) knob.values = () => ascending(moved().flatMap((half) => ownValues(knob, half)));

// The state of a half with one value set and what cannot but follow from it; everything else stays, and may become illegal.
function withValue(half, given, name, value) {
  const knob = KNOBS.find((one) => one.name === name), next = copyOf(given), {layout} = next;
  next[knob.of][name] = value;
  if (name === "tp") layout.sp = layout.tp > 1 && (given.layout.tp === 1 || given.layout.sp);
  if (["tp", "cp", "pp"].includes(name)) followDevices(half, given.layout, layout);
  if (name === "pp" || name === "schedule") followPipeline(half, given.layout, layout);
  if (name === "zero" && value && layout.dp_shard * layout.cp === 1) layout.dp_shard = Math.max(1, dpOf(half, layout));
  if (name === "zero" && !value) layout.dp_shard = 1;
  layout.dp_replicate = dpOf(half, layout) / layout.dp_shard;
  return next;
}

// A half takes a change that is legal there; one that is legal nowhere is taken by all, which then say why.
function change(name, value) {
  const knob = KNOBS.find((one) => one.name === name);
  const asked = moved().map((half) => {
    const known = ownValues(knob, half).includes(value);
    const next = known ? withValue(half, half.state, name, value) : null;
    return {half, next, said: known ? wrong(half, next) : [`${half.title} has no ${name}=${value} here`]};
  });
  const nowhere = asked.every(({said}) => said.length);
  for (const half of halves) half.stays = "";
  const states = halves.map((half) => {
    const one = asked.find((other) => other.half === half);
    if (!one) return half.state;
    if (one.next && (nowhere || !one.said.length || wrong(half).length)) return one.next;
    half.stays = one.said[0];
    return half.state;
  });
  become(states);
}

function followDevices(half, before, layout) {
  const dp = dpOf(half, layout);
  if (!Number.isInteger(dp)) return;
  const whole = before.dp_shard === dpOf(half, before) && layout.zero;
  layout.dp_shard = whole ? dp : divisorsOf(dp).filter((d) => d <= before.dp_shard).at(-1);
}

// Stages of a rank that a schedule can have, the usual number first.
const stagesWith = ({controls}, {pp, schedule}) => pp === 1 ? [1] : controls.vp[schedule][pp];

function followPipeline(half, before, layout) {
  if (layout.pp === 1) layout.schedule = "1f1b";
  const values = stagesWith(half, layout), kept = layout.schedule === before.schedule && values.length > 1;
  layout.vp = kept ? values.filter((vp) => vp <= before.vp).at(-1) ?? values[0] : values[0];
}

// What is wrong with a state of a half, in sentences; none: legal.
function wrong(half, {recipe, layout} = half.state) {
  const {tp, cp, pp} = layout;
  if (!Number.isInteger(dpOf(half, layout))) return [filled(half.controls.indivisible, {product: tp * cp * pp})];
  return violations(half.data.model, recipe, layout);
}

function knobElement({name, label, word, check, options}, change) {
  const box = document.createElement("div");
  box.className = `knob${check ? " check" : ""}`;
  const id = `knob-${name}`;
  const input = check ? `<input type="checkbox" id="${id}">` : options ?
    `<select id="${id}">${options.map((value) => `<option>${value}</option>`).join("")}</select>` :
    `<output for="${id}"></output><input type="range" min="0" step="1" id="${id}">`;
  const key = name.startsWith("timeline_") ? "" : ` <code>${name}</code>`;
  const other = both && (check || options) && key ? `<small class="other"></small>` : "";
  box.innerHTML = `<label for="${id}"><span data-explain="${label ?? name}">${word}</span>${key}</label>${input}${other}`;
  box.querySelector("label").dataset.explain = label ?? name;
  box.querySelector("input, select").addEventListener("input", (event) => change(event.target));
  return box;
}

function buildControls() {
  const form = document.getElementById("controls"), list = document.getElementById("knobs");
  form.addEventListener("submit", (event) => event.preventDefault());
  if (both) buildChoice(list);
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
    chosen = event.target.value;
    changed();
  });
  list.append(group);
}

function showControls() {
  for (const one of document.querySelectorAll("[name=chosen]")) one.checked = one.value === chosen;
  const [{state}, other] = moved();
  for (const knob of KNOBS) {
    const input = knob.box.querySelector("input, select"), value = state[knob.of][knob.name];
    const off = moved().every((half) => Boolean(knob.off?.(half.state.layout)));
    const theirs = other ? other.state[knob.of][knob.name] : value;
    knob.box.classList.toggle("off", off);
    input.disabled = off;
    if (knob.check) input.checked = value;
    else if (knob.options) input.value = value;
    else {
      const values = knob.values(), place = values.indexOf(value);
      input.max = values.length - 1;
      input.value = place >= 0 ? place : values.filter((one) => one < value).length;
      input.setAttribute("aria-valuetext", theirs === value ? value : `A ${value}, B ${theirs}`);
      knob.box.querySelector("output").textContent = theirs === value ? value : `${value} | ${theirs}`;
    }
    const note = knob.box.querySelector(".other");
    if (note) note.textContent = theirs === value ? "" : `B: ${theirs === true ? "on" : theirs === false ? "off" : theirs}`;
  }
  document.getElementById("dp").textContent = [...new Set(moved().map(dpWords))].join(" | ");
}

function dpWords(half) {
  const {layout} = half.state, dp = dpOf(half, layout), {dp_replicate: copies, dp_shard: shards} = layout;
  return Number.isInteger(dp) ? dp + (copies > 1 && shards > 1 ? ` = ${copies} x ${shards}` : "") : "-";
}
