// Puts the page together: the state in the address, what every change shows again, buttons and keys.

const SOURCE = document.documentElement.outerHTML; // before anything is shown
const past = [];

// The state in the address, so that a link or a reload brings it back; of the second half with "b." in front.
const FIELDS = [...lead.land.fields];
const prefixOf = ({n}) => n ? "b." : "";
function toFragment() {
  const words = halves.flatMap((half) => Object.entries(copyOf(half.state)).flatMap(([, part]) =>
    Object.entries(part).map(([name, value]) => [prefixOf(half) + name, value])));
  return new URLSearchParams([...words, ...(both ? [["move", chosen]] : [])]).toString();
}

// The states of all halves; null where a value is missing or no control has it.
function fromFragment(text) {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  const found = halves.map((half) => stateIn(half, (name) => given.get(prefixOf(half) + name)));
  const move = given.get("move");
  if (found.includes(null)) return null;
  return Object.assign(found, {move: halves.some((half) => half.label === move) ? move : "both"});
}

function stateIn(half, given) {
  const found = {recipe: {}, layout: {}}, {layout} = found, {controls} = half;
  const number = (name) => /^[1-9]\d{0,9}$/.test(given(name) ?? "") ? Number(given(name)) : null;
  const one = (name, values) => values.find((value) => String(value) === given(name)) ?? null;
  for (const name of ["sequence", "global_batch"]) found.recipe[name] = one(name, controls[name]);
  for (const name of FIELDS)
    layout[name] = name.startsWith("dp_") ? number(name) : name === "sp" || name === "vp" ? null : one(name, controls[name]);
  layout.sp = one("sp", layout.tp > 1 ? [false, true] : [false]);
  if (layout.pp && layout.schedule) layout.vp = one("vp", layout.pp > 1 || layout.schedule === "1f1b" ? stagesWith(half, layout) : []);
  const complete = [...Object.values(found.recipe), ...Object.values(layout)].every((value) => value !== null);
  return complete && layout.dp_replicate * layout.dp_shard === dpOf(half, layout) ? found : null;
}

const copyOf = ({recipe, layout}) => ({
  recipe: {sequence: recipe.sequence, global_batch: recipe.global_batch},
  layout: Object.fromEntries(FIELDS.map((name) => [name, layout[name]])),
});

const sameState = (one, other) => JSON.stringify(copyOf(one)) === JSON.stringify(copyOf(other));

// Other states of the halves; those before can be had back.
function become(next) {
  const begun = lead.state.layout.tp;
  if (begun && halves.every((half, n) => sameState(half.state, next[n]))) return changed();
  if (begun) past.push(halves.map((half) => copyOf(half.state)));
  halves.forEach((half, n) => Object.assign(half.state, copyOf(next[n])));
  changed();
}

function changed() {
  byId("undo").disabled = !past.length;
  showControls();
  halves.forEach(showHalf);
  showDifferences();
  if (!wrong(moved()[0]).length) followLayout();
  showTries();
  try {
    history.replaceState(null, "", `#${toFragment()}`);
  } catch { /* an embedded page may have no address of its own */ }
  halves.forEach(drawHalf);
  drawTimelinesSoon();
}

// At another size or in other colours.
function drawAll() {
  halves.forEach(drawHalf);
  drawTimelines();
}

const recipeOf = ({data: {recipe}}) => ({sequence: recipe.sequence, global_batch: recipe.global_batch});

// A layout of a half's map, with the map's recipe; the other half takes that recipe, too, where its layout allows.
function take(half, point) {
  for (const one of halves) one.stays = "";
  become(halves.map((one) => {
    if (one === half) return {recipe: recipeOf(half), layout: point.layout};
    const next = {recipe: recipeOf(one), layout: one.state.layout};
    return wrong(one, next).length ? one.state : next;
  }));
}

// Of every half that the controls move the layout that it began with.
function takeBest() {
  for (const half of halves) half.stays = "";
  become(halves.map((half) => moved().includes(half) ? startOf(half) : half.state));
}

const startOf = (half) => ({recipe: recipeOf(half), layout: half.points[half.land.start].layout});

// Changes worth a look from here.
function tries() {
  const [half] = moved(), {state: {layout, recipe}, controls} = half, found = [];
  if (dpOf(half, layout) > 1) found.push(["zero", layout.zero ? layout.zero - 1 : 3, `ZeRO ${layout.zero} \u2192 ${layout.zero ? layout.zero - 1 : 3}`]);
  if (controls.sequence.includes(2 * recipe.sequence))
    found.push(["sequence", 2 * recipe.sequence, `sequence ${(2 * recipe.sequence).toLocaleString("en")}`]);
  const again = layout.recompute === "full" ? "none" : "full";
  found.push(["recompute", again, again === "full" ? "recompute everything" : "no recomputation"]);
  const tp = layout.tp > 1 ? 1 : controls.tp.filter((one) => one <= half.data.cluster.per_node).at(-1);
  if (tp !== layout.tp) found.push(["tp", tp, `tensor parallel ${tp}`]);
  return found;
}

function showTries() {
  byId("try").innerHTML = "Try: " + tries().map(([name, value, words]) =>
    `<button type="button" data-try="${name}" data-value="${value}">${words}</button>`).join(" ");
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), {value: text});
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
}

// This page as a file that opens with the present state.
const savedPage = () => "<!doctype html>\n" +
  SOURCE.replace(/^<html[^>]*>/, () => `<html lang="en" data-state="${escaped(toFragment())}">`);

function save() {
  const address = URL.createObjectURL(new Blob([savedPage()], {type: "text/html"}));
  const name = `${document.title.replace(/[^A-Za-z0-9.]+/g, "-")}.html`;
  const link = Object.assign(document.createElement("a"), {href: address, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// The half that something stands in.
const halfAt = (target) => halves.find((half) => ["memory", "map"].some((id) => half.el(id).contains(target))) ?? moved()[0];

// ZeRO stage of a bar: in its own half alone.
function takeStage(stage) {
  const before = chosen;
  chosen = both ? halfAt(stage).label : chosen;
  change("zero", Number(stage.dataset.stage));
  if (chosen !== before) {
    chosen = before;
    changed();
  }
}

function onClick(event) {
  const [button, stage, options] = ["[data-try]", "[data-stage]", "[data-copy]"].map((one) => event.target.closest(one));
  if (button) change(button.dataset.try, /^\d/.test(button.dataset.value) ? Number(button.dataset.value) : button.dataset.value);
  if (stage) takeStage(stage);
  if (options) copy(options.parentElement.querySelector("pre").textContent, options);
}

function onKey(event) {
  const stage = event.target.closest?.("[data-stage]");
  if (!stage || event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  takeStage(stage);
}

function listen() {
  byId("best").addEventListener("click", takeBest);
  byId("undo").addEventListener("click", () => {
    const before = past.pop();
    halves.forEach((half, n) => Object.assign(half, {stays: ""}).state && Object.assign(half.state, before[n]));
    changed();
  });
  byId("copy-link").addEventListener("click", (event) => copy(location.href, event.target));
  byId("save").addEventListener("click", save);
  for (const half of halves) {
    half.el("copy-command").addEventListener("click", (event) => copy(commandWords(half), event.target));
    half.el("colour").addEventListener("input", (event) => {
      for (const one of halves) one.el("colour").value = event.target.value;
      halves.forEach(drawHalf);
    });
    watchMap(half, take);
  }
  document.addEventListener("click", onClick);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", () => location.hash.slice(1) !== toFragment() && begin(fromFragment(location.hash)));
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  followTheme();
  explainOnDemand(explanationOf);
}

function explanationOf(target, event) {
  const stage = target.closest?.("[data-stage]"), rank = target.closest?.("g.rank"), name = target.closest?.("[data-explain]");
  if (stage) return stageWords(halfAt(stage), Number(stage.dataset.stage), target.dataset.kind);
  if (rank && halfAt(rank).ranks) return rankWords(halfAt(rank).ranks[rank.dataset.rank], rank.dataset.rank, target.dataset.kind);
  if (target.matches?.("[data-schedule] canvas")) return event.offsetX === undefined ? "" : spanWords(target, event.offsetX, event.offsetY);
  const label = target.id?.startsWith?.("knob-") ? document.querySelector(`label[for="${target.id}"]`) : name;
  return label?.dataset.explain ? explanation(label.dataset.explain) : "";
}

// The states of a link.
function begin(given) {
  if (!given) return;
  chosen = given.move;
  become(given);
}

function start() {
  const {model, recipe} = lead.data, titles = halves.map((half) => half.title).join(" beside ");
  document.title = `${model.name} on ${titles}: layout explorer`;
  document.body.classList.toggle("two", both);
  byId("title").textContent = `Layout explorer: ${model.name} on ${titles}`;
  byId("subject").textContent = `${(model.parameters / 1e9).toPrecision(3)} B parameters \u00b7 ${recipe.precision} \u00b7 ` +
    `${halves.map((half) => `${named(half)}${half.data.cluster.per_node} GPUs per node`).join(" \u00b7 ")}`;
  halves.forEach(buildHalf);
  buildControls();
  buildTimelines();
  listen();
  const given = fromFragment(location.hash) ?? fromFragment(document.documentElement.dataset.state ?? "");
  if (given) begin(given);
  else takeBest();
}

start();
