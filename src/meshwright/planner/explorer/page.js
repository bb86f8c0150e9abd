// Puts the page together: the state in the address, what every change shows again, buttons and keys.

const SOURCE = document.documentElement.outerHTML; // before anything is shown
const undoStates = []; // what Undo goes back to, the last state last

// The state in the address, so that a link or a reload brings it back; of the second half with "b." in front.
const FIELDS = [...lead.land.fields];
const prefixOf = ({n}) => n ? "b." : "";
function toFragment() {
  const words = halves.flatMap((half) => Object.entries(copyOf(half.state)).flatMap(([, part]) =>
    Object.entries(part).map(([name, setting]) => [prefixOf(half) + name, setting])));
  return new URLSearchParams([...words, ...(isPair ? [["move", selection]] : [])]).toString();
}

// The states of all halves; null where a value is missing or no control has it.
function fromFragment(text) {
  const fields = new URLSearchParams(text.replace(/^#/, ""));
  const states = halves.map((half) => stateIn(half, (name) => fields.get(prefixOf(half) + name)));
  const move = fields.get("move");
  if (states.includes(null)) return null;
  return Object.assign(states, {move: halves.some((half) => half.label === move) ? move : "both"});
}

function stateIn(half, field) {
  const parsed = {recipe: {}, layout: {}}, {layout} = parsed, {controls} = half;
  const number = (name) => /^[1-9]\d{0,9}$/.test(field(name) ?? "") ? Number(field(name)) : null;
  const choice = (name, values) => values.find((option) => String(option) === field(name)) ?? null;
  for (const name of ["sequence", "global_batch"]) parsed.recipe[name] = choice(name, controls[name]);
  for (const name of FIELDS)
    layout[name] = name.startsWith("dp_") ? number(name) : name === "sp" || name === "vp" ? null : choice(name, controls[name]);
  layout.sp = choice("sp", layout.tp > 1 ? [false, true] : [false]);
  if (layout.pp && layout.schedule) layout.vp = choice("vp", layout.pp > 1 || layout.schedule === "1f1b" ? stagesWith(half, layout) : []);
  const complete = [...Object.values(parsed.recipe), ...Object.values(layout)].every((setting) => setting !== null);
  return complete && layout.dp_replicate * layout.dp_shard === dpOf(half, layout) ? parsed : null;
}

const copyOf = ({recipe, layout}) => ({
  recipe: {sequence: recipe.sequence, global_batch: recipe.global_batch},
  layout: Object.fromEntries(FIELDS.map((name) => [name, layout[name]])),
});

const sameState = (first, second) => JSON.stringify(copyOf(first)) === JSON.stringify(copyOf(second));

// Other states of the halves; those before can be had back.
function setStates(next) {
  const isStarted = lead.state.layout.tp;
  if (isStarted && halves.every((half, n) => sameState(half.state, next[n]))) return showChange();
  if (isStarted) undoStates.push(halves.map((half) => copyOf(half.state)));
  halves.forEach((half, n) => Object.assign(half.state, copyOf(next[n])));
  showChange();
}

function showChange() {
  byId("undo").disabled = !undoStates.length;
  showControls();
  halves.forEach(showHalf);
  byId("strip").innerHTML = halves.map(stripOf).join("");
  showDifferences();
  if (!violationsOf(movedHalves()[0]).length) followLayout();
  showSuggestions();
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
  for (const other of halves) other.stays = "";
  setStates(halves.map((other) => {
    if (other === half) return {recipe: recipeOf(half), layout: point.layout};
    const next = {recipe: recipeOf(other), layout: other.state.layout};
    return violationsOf(other, next).length ? other.state : next;
  }));
}

// Of every half that the controls move the layout that it began with.
function takeBest() {
  for (const half of halves) half.stays = "";
  setStates(halves.map((half) => movedHalves().includes(half) ? startOf(half) : half.state));
}

const startOf = (half) => ({recipe: recipeOf(half), layout: half.points[half.land.start].layout});

// Changes worth a look from here.
function suggestions() {
  const [half] = movedHalves(), {state: {layout, recipe}, controls} = half, ideas = [];
  if (dpOf(half, layout) > 1) ideas.push(["zero", layout.zero ? layout.zero - 1 : 3, `ZeRO ${layout.zero} \u2192 ${layout.zero ? layout.zero - 1 : 3}`]);
  if (controls.sequence.includes(2 * recipe.sequence))
    ideas.push(["sequence", 2 * recipe.sequence, `sequence ${(2 * recipe.sequence).toLocaleString("en")}`]);
  const recompute = layout.recompute === "full" ? "none" : "full";
  ideas.push(["recompute", recompute, recompute === "full" ? "recompute everything" : "no recomputation"]);
  const tp = layout.tp > 1 ? 1 : controls.tp.filter((degree) => degree <= half.data.cluster.per_node).at(-1);
  if (tp !== layout.tp) ideas.push(["tp", tp, `tensor parallel ${tp}`]);
  return ideas;
}

function showSuggestions() {
  byId("try").innerHTML = "Try: " + suggestions().map(([name, setting, words]) =>
    `<button type="button" data-try="${name}" data-value="${setting}">${words}</button>`).join(" ");
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
const halfAt = (target) => halves.find((half) => ["memory", "map"].some((id) => half.el(id).contains(target))) ?? movedHalves()[0];

// ZeRO stage of a bar: in its own half alone.
function takeStage(stage) {
  const before = selection;
  selection = isPair ? halfAt(stage).label : selection;
  change("zero", Number(stage.dataset.stage));
  if (selection !== before) {
    selection = before;
    showChange();
  }
}

function onClick(event) {
  const [button, stage, options] = ["[data-try]", "[data-stage]", "[data-copy]"].map((selector) => event.target.closest(selector));
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
    const before = undoStates.pop();
    halves.forEach((half, n) => Object.assign(half, {stays: ""}).state && Object.assign(half.state, before[n]));
    showChange();
  });
  byId("copy-link").addEventListener("click", (event) => copy(location.href, event.target));
  byId("save").addEventListener("click", save);
  for (const half of halves) {
    half.el("copy-command").addEventListener("click", (event) => copy(commandWords(half), event.target));
    half.el("colour").addEventListener("input", (event) => {
      for (const other of halves) other.el("colour").value = event.target.value;
      halves.forEach(drawHalf);
    });
    watchMap(half, take);
  }
  document.addEventListener("click", onClick);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", () => location.hash.slice(1) !== toFragment() && openStates(fromFragment(location.hash)));
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
function openStates(states) {
  if (!states) return;
  selection = states.move;
  setStates(states);
}

function start() {
  const {model, recipe} = lead.data, titles = halves.map((half) => half.title).join(" beside ");
  document.title = `${model.name} on ${titles}: layout explorer`;
  document.body.classList.toggle("two", isPair);
  byId("title").textContent = `Layout explorer: ${model.name} on ${titles}`;
  byId("subject").textContent = `${(model.parameters / 1e9).toPrecision(3)} B parameters \u00b7 ${recipe.precision} \u00b7 ` +
    `${halves.map((half) => `${prefixWords(half)}${half.data.cluster.per_node} GPUs per node`).join(" \u00b7 ")}`;
  halves.forEach(buildHalf);
  buildControls();
  buildTimelines();
  listen();
  const states = fromFragment(location.hash) ?? fromFragment(document.documentElement.dataset.state ?? "");
  if (states) openStates(states);
  else takeBest();
}

start();
