// The state of the page (a recipe and a layout) and the controls that change it.

const state = {recipe: {}, layout: {}};
const divisorsOf = (number) => [...Array(number).keys()].map((n) => n + 1).filter((d) => number % d === 0);
const powers = (from, to) => [...Array(to - from + 1).keys()].map((n) => 2 ** (from + n));
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
const {devices} = DATA.cluster;
const legalTp = ascending(Object.keys(DATA.memory.kept).map((key) => parseInt(key, 10)));

// What tp, cp and pp leave of the devices; not whole where they do not divide them.
const dpOf = ({tp, cp, pp}) => devices / (tp * cp * pp);

// Every control: where its value lives, what it may be, when it means nothing.
const KNOBS = [
  {name: "sequence", of: "recipe", values: () => ascending([...powers(9, 17), DATA.recipe.sequence])},
  {name: "global_batch", of: "recipe", values: () => ascending(
    [...powers(-6, 4).map((f) => f * DATA.recipe.global_batch).filter(Number.isInteger), ...powers(0, 3).map((f) => f * devices)])},
  {name: "micro_batch", of: "layout", values: () => [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]},
  {name: "tp", of: "layout", values: () => legalTp},
  {name: "sp", of: "layout", check: true, off: ({tp}) => tp === 1},
  {name: "cp", of: "layout", values: () => divisorsOf(devices).slice(0, 12)},
  {name: "pp", of: "layout", values: () => divisorsOf(devices).filter((d) => d <= DATA.model.layers)},
  {name: "schedule", of: "layout", options: SCHEDULES, off: ({pp}) => pp === 1},
  {name: "vp", of: "layout", off: ({pp, schedule}) => pp === 1 || schedule !== "interleaved" && schedule !== "zb-h1",
    values: ({pp}) => [...Array(Math.max(1, Math.floor(DATA.model.layers / pp))).keys()].map((n) => n + 1)},
  {name: "ep", of: "layout", hidden: !DATA.model.experts, values: () => divisorsOf(Math.max(1, DATA.model.experts))},
  {name: "dp_shard", of: "layout", values: (layout) => Number.isInteger(dpOf(layout)) ? divisorsOf(dpOf(layout)) : [1]},
  {name: "zero", of: "layout", values: () => [0, 1, 2, 3]},
  {name: "recompute", of: "layout", options: ["none", "selective", "full"]},
].filter((knob) => !knob.hidden);

// Set one value and what cannot but follow from it; everything else stays, and may become illegal.
function setValue(knob, value) {
  const before = {...state.layout};
  state[knob.of][knob.name] = value;
  const {layout} = state;
  if (knob.name === "tp") layout.sp = layout.tp > 1 && (before.tp === 1 || before.sp);
  if (["tp", "cp", "pp"].includes(knob.name)) followDevices(before);
  if (knob.name === "pp" || knob.name === "schedule") followPipeline(before);
  if (knob.name === "zero" && value && layout.dp_shard * layout.cp === 1) layout.dp_shard = Math.max(1, dpOf(layout));
  if (knob.name === "zero" && !value) layout.dp_shard = 1;
  layout.dp_replicate = dpOf(layout) / layout.dp_shard;
}

function followDevices(before) {
  const {layout} = state, dp = dpOf(layout);
  if (!Number.isInteger(dp)) return;
  const whole = before.dp_shard === dpOf(before) && layout.zero;
  layout.dp_shard = whole ? dp : divisorsOf(dp).filter((d) => d <= before.dp_shard).at(-1);
}

function followPipeline(before) {
  const {layout} = state;
  if (layout.pp === 1) layout.schedule = "1f1b";
  if (layout.pp === 1 || SINGLE.includes(layout.schedule)) layout.vp = 1;
  else if (V_PLACED.includes(layout.schedule)) layout.vp = 2;
  else if (layout.schedule === "interleaved") layout.vp = Math.max(2, before.vp);
  else layout.vp = 1;
}

// What is wrong with the state, in sentences; none: legal.
function wrong() {
  const {tp, cp, pp} = state.layout;
  if (!Number.isInteger(dpOf(state.layout)))
    return [`tp x cp x pp = ${tp * cp * pp} does not divide the ${devices} devices: take degrees whose product does`];
  return violations(DATA.model, state.recipe, state.layout);
}

function knobElement({name, label, check, options}, change) {
  const box = document.createElement("div");
  box.className = `knob${check ? " check" : ""}`;
  const id = `knob-${name}`;
  const input = check ? `<input type="checkbox" id="${id}">` : options ?
    `<select id="${id}">${options.map((value) => `<option>${value}</option>`).join("")}</select>` :
    `<output for="${id}"></output><input type="range" min="0" step="1" id="${id}">`;
  box.innerHTML = `<label for="${id}" data-explain="${label ?? name}">${(name).replace("timeline_", "")}</label>${input}`;
  box.querySelector("input, select").addEventListener("input", (event) => change(event.target));
  return box;
}

function buildControls(changed) {
  const form = document.getElementById("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const knob of KNOBS) {
    knob.box = knobElement(knob, (input) => {
      const value = knob.check ? input.checked : knob.options ? input.value : knob.values(state.layout)[Number(input.value)];
      setValue(knob, value);
      changed();
    });
    form.append(knob.box);
  }
  const dp = document.createElement("div");
  dp.className = "knob";
  dp.innerHTML = `${explained("dp", "dp")}<output id="dp"></output>`;
  KNOBS.find((knob) => knob.name === "dp_shard").box.before(dp);
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
