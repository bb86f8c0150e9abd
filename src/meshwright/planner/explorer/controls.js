// The state of the page (a recipe and a layout) and the controls that change it.

const state = {recipe: {}, layout: {}};
const divisorsOf = (number) => [...Array(number).keys()].map((n) => n + 1).filter((d) => number % d === 0);
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
const {devices} = DATA.cluster;
const {controls: CONTROLS} = DATA;

// What tp, cp and pp leave of the devices; not whole where they do not divide them.
const dpOf = ({tp, cp, pp}) => CONTROLS.dp[tp * cp * pp] ?? NaN;

// Every control: where its value lives, in words, what it may be, when it means nothing.
const GROUPS = ["Model and batch", "Split the data", "Split the model", "Save memory"];
const KNOBS = [
  {name: "sequence", of: "recipe", group: 0, word: "Sequence", values: () => CONTROLS.sequence},
  {name: "global_batch", of: "recipe", group: 0, word: "Global batch", values: () => CONTROLS.global_batch},
  {name: "micro_batch", of: "layout", group: 0, word: "Micro-batch", values: () => CONTROLS.micro_batch},
  {name: "dp_shard", of: "layout", group: 1, word: "Sharers", values: (layout) => Number.isInteger(dpOf(layout)) ? divisorsOf(dpOf(layout)) : [1]},
  {name: "zero", of: "layout", group: 1, word: "ZeRO stage", values: () => CONTROLS.zero},
  {name: "ep", of: "layout", group: 1, word: "Experts", hidden: !DATA.model.experts, values: () => CONTROLS.ep},
  {name: "tp", of: "layout", group: 2, word: "Tensor", values: () => CONTROLS.tp},
  {name: "sp", of: "layout", group: 2, word: "Split norms", check: true, off: ({tp}) => tp === 1},
  {name: "cp", of: "layout", group: 2, word: "Context", values: () => CONTROLS.cp},
  {name: "pp", of: "layout", group: 2, word: "Pipeline", values: () => CONTROLS.pp},
  {name: "schedule", of: "layout", group: 2, word: "Schedule", options: CONTROLS.schedule, off: ({pp}) => pp === 1},
  {name: "vp", of: "layout", group: 2, word: "Virtual stages", off: (layout) => !DATA.schedules[layout.schedule].deeper || layout.pp === 1,
    values: (layout) => ascending(stagesWith(layout))},
  {name: "recompute", of: "layout", group: 3, word: "Recompute", options: CONTROLS.recompute},
].filter((knob) => !knob.hidden);

// The state with one value set and what cannot but follow from it; everything else stays, and may become illegal.
function withValue(given, name, value) {
  const knob = KNOBS.find((one) => one.name === name), next = copyOf(given), {layout} = next;
  next[knob.of][name] = value;
  if (name === "tp") layout.sp = layout.tp > 1 && (given.layout.tp === 1 || given.layout.sp);
  if (["tp", "cp", "pp"].includes(name)) followDevices(given.layout, layout);
  if (name === "pp" || name === "schedule") followPipeline(given.layout, layout);
  if (name === "zero" && value && layout.dp_shard * layout.cp === 1) layout.dp_shard = Math.max(1, dpOf(layout));
  if (name === "zero" && !value) layout.dp_shard = 1;
  layout.dp_replicate = dpOf(layout) / layout.dp_shard;
  return next;
}

const change = (name, value) => become(withValue(state, name, value));

function followDevices(before, layout) {
  const dp = dpOf(layout);
  if (!Number.isInteger(dp)) return;
  const whole = before.dp_shard === dpOf(before) && layout.zero;
  layout.dp_shard = whole ? dp : divisorsOf(dp).filter((d) => d <= before.dp_shard).at(-1);
}

// Stages of a rank that a schedule can have, the usual number first.
const stagesWith = ({pp, schedule}) => pp === 1 ? [1] : CONTROLS.vp[schedule][pp];

function followPipeline(before, layout) {
  if (layout.pp === 1) layout.schedule = "1f1b";
  const values = stagesWith(layout), kept = layout.schedule === before.schedule && values.length > 1;
  layout.vp = kept ? values.filter((vp) => vp <= before.vp).at(-1) ?? values[0] : values[0];
}

// What is wrong with the state, in sentences; none: legal.
function wrong() {
  const {tp, cp, pp} = state.layout;
  if (!Number.isInteger(dpOf(state.layout))) return [filled(CONTROLS.indivisible, {product: tp * cp * pp})];
  return violations(DATA.model, state.recipe, state.layout);
}

function knobElement({name, label, word, check, options}, change) {
  const box = document.createElement("div");
  box.className = `knob${check ? " check" : ""}`;
  const id = `knob-${name}`;
  const input = check ? `<input type="checkbox" id="${id}">` : options ?
    `<select id="${id}">${options.map((value) => `<option>${value}</option>`).join("")}</select>` :
    `<output for="${id}"></output><input type="range" min="0" step="1" id="${id}">`;
  const key = name.startsWith("timeline_") ? "" : ` <code>${name}</code>`;
  box.innerHTML = `<label for="${id}"><span data-explain="${label ?? name}">${word}</span>${key}</label>${input}`;
  box.querySelector("label").dataset.explain = label ?? name;
  box.querySelector("input, select").addEventListener("input", (event) => change(event.target));
  return box;
}

function buildControls() {
  const form = document.getElementById("controls"), list = document.getElementById("knobs");
  form.addEventListener("submit", (event) => event.preventDefault());
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
      knob.check ? input.checked : knob.options ? input.value : knob.values(state.layout)[Number(input.value)]));
    groups[knob.group].append(knob.box);
  }
}

function showControls() {
  for (const knob of KNOBS) {
    const input = knob.box.querySelector("input, select"), value = state[knob.of][knob.name];
    const off = Boolean(knob.off?.(state.layout));
    knob.box.classList.toggle("off", off);
    input.disabled = off;
    if (knob.check) input.checked = value;
    else if (knob.options) input.value = value;
    else {
      const values = knob.values(state.layout), place = values.indexOf(value);
      input.max = values.length - 1;
      input.value = place >= 0 ? place : values.filter((one) => one < value).length;
      input.setAttribute("aria-valuetext", value);
      knob.box.querySelector("output").textContent = value;
    }
  }
  const dp = dpOf(state.layout), {dp_replicate: copies, dp_shard: shards} = state.layout;
  document.getElementById("dp").textContent =
    Number.isInteger(dp) ? dp + (copies > 1 && shards > 1 ? ` = ${copies} x ${shards}` : "") : "-";
}
