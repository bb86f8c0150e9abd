// Puts the page together: the state's memory, verdict, map and timelines, drawn again at every change.

let ranks = null, before = null;
const past = [];
const byId = (id) => document.getElementById(id);
const sameRecipe = () => ["sequence", "global_batch"].every((name) => state.recipe[name] === DATA.recipe[name]);

// Seconds of a step of a legal state: as Python predicted where the layout is on the map, else about.
function timeOf(recipe, layout) {
  const same = ["sequence", "global_batch"].every((name) => recipe[name] === DATA.recipe[name]);
  const known = same ? byLayout.get(layoutOption(layout)) : null;
  const parts = known ? known.parts : stepParts(DATA, recipe, layout);
  return {seconds: parts.reduce((a, b) => a + b, 0), parts, about: !known};
}

// Model FLOP utilization of a step.
function mfuOf(recipe, seconds) {
  const perDevice = recipe.sequence * recipe.global_batch / seconds / devices;
  return DATA.token_flop[recipe.sequence] * perDevice / DATA.cluster.flop_per_s;
}

const verdictOf = (bytes) => !fitsRoom(bytes) ? ["no", "DOES NOT FIT"] :
  capacity && bytes > DATA.cluster.tight_bytes ? ["tight", "TIGHT"] : ["yes", capacity ? "FITS" : "COUNTED"];
const signed = (value, words) => `${value < 0 ? "\u2212" : "+"}${words(Math.abs(value))}`;

function verdictWords(now) {
  const n = worstOf(ranks), {total, when} = ranks[n], where = ranks.length > 1 ? `pipeline rank ${n}, ` : "";
  const [mark, word] = verdictOf(total), name = mark === "tight" ? explained("tight", word) : word;
  const room = !capacity ? "" : fitsRoom(total) ? ` of ${gib(capacity)} \u00b7 ${gib(capacity - total)} free` :
    ` of ${gib(capacity)} \u00b7 ${gib(total - capacity)} too much`;
  const {seconds, about} = now.time, rate = state.recipe.sequence * state.recipe.global_batch / seconds / devices;
  const change = before && now.key !== before.key ? before : null;
  return `<p class="first"><strong class="${mark}">${name}</strong> <b>${gib(total)}</b>${room}</p>` +
    `<p>${explained("step", about ? "about" : "predicted")} <b id="seconds">${duration(seconds)}</b> per step \u00b7 ` +
    `${explained("mfu", "MFU")} ${percent(mfuOf(state.recipe, seconds))} \u00b7 ` +
    `${Math.round(rate).toLocaleString("en")} tokens/s per GPU</p>` +
    `<p class="small">Peak: ${where}${when}. ` + (change ? `Last change: memory ${signed(total - change.total, gib)}, ` +
    `time ${signed(seconds - change.time.seconds, duration)}.` : "") + "</p>";
}

function commandWords() {
  if (!DATA.command) return "";
  return `${DATA.command} --recipe sequence=${state.recipe.sequence},global_batch=${state.recipe.global_batch} ` +
    `--layout ${layoutOption(state.layout)}`;
}

function mapWords() {
  const shown = POINTS.length < LAND.legal ?
    `${POINTS.length.toLocaleString("en")} of ${LAND.legal.toLocaleString("en")}: all that nothing beats, and a sample of the others` :
    `All ${LAND.legal.toLocaleString("en")}`;
  const none = FRONT.some((point) => fitsRoom(point.peak)) ? "" : " None of them fits.";
  const other = sameRecipe() ? "" : " The controls have another recipe, which is not on this map; the dashed line is its memory.";
  return `${shown}, at sequence ${DATA.recipe.sequence.toLocaleString("en")} and ${DATA.recipe.global_batch.toLocaleString("en")} ` +
    `sequences per step.${none} The line joins layouts that no other beats in both time and memory.${other}`;
}

// The state in the address, so that a link or a reload brings it back.
const FIELDS = [...LAND.fields];
function toFragment() {
  return new URLSearchParams({...state.recipe, ...Object.fromEntries(FIELDS.map((name) => [name, state.layout[name]]))}).toString();
}

function fromFragment(text) {
  const given = new URLSearchParams(text.replace(/^#/, "")), found = {recipe: {}, layout: {}};
  const whole = (name) => /^[1-9]\d{0,9}$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null;
  const one = (name, values) => values.find((value) => String(value) === given.get(name)) ?? null;
  for (const name of ["sequence", "global_batch"]) found.recipe[name] = one(name, CONTROLS[name]);
  const {layout} = found;
  for (const name of FIELDS)
    layout[name] = name.startsWith("dp_") ? whole(name) : name === "sp" || name === "vp" ? null : one(name, CONTROLS[name]);
  layout.sp = one("sp", layout.tp > 1 ? [false, true] : [false]);
  if (layout.pp && layout.schedule) layout.vp = one("vp", layout.pp > 1 || layout.schedule === "1f1b" ? stagesWith(layout) : []);
  const complete = [...Object.values(found.recipe), ...Object.values(layout)].every((value) => value !== null);
  return complete && layout.dp_replicate * layout.dp_shard === dpOf(layout) ? found : null;
}

const copyOf = ({recipe, layout}) => ({
  recipe: {sequence: recipe.sequence, global_batch: recipe.global_batch},
  layout: Object.fromEntries(FIELDS.map((name) => [name, layout[name]])),
});

const sameState = (one, other) => JSON.stringify(copyOf(one)) === JSON.stringify(copyOf(other));

// Another state; the one before can be had back.
function become(next) {
  if (state.layout.tp && sameState(state, next)) return;
  if (state.layout.tp) past.push(copyOf(state));
  Object.assign(state, copyOf(next));
  changed();
}

function changed() {
  const sentences = wrong(), legal = !sentences.length;
  byId("refused").hidden = legal;
  byId("verdict").hidden = byId("command").hidden = document.querySelector("#memory .split").hidden = !legal;
  byId("undo").disabled = !past.length;
  showControls();
  if (legal) {
    ranks = memoryOf(DATA, state.recipe, state.layout);
    const now = {key: toFragment(), total: ranks[worstOf(ranks)].total, time: timeOf(state.recipe, state.layout)};
    byId("verdict").innerHTML = verdictWords(now);
    byId("command").hidden = !DATA.command;
    byId("command").firstElementChild.textContent = commandWords();
    before = now;
    followLayout();
  } else byId("refused").innerHTML = `<p class="first"><strong class="no">NOT LEGAL</strong></p>` +
    `<ul>${sentences.map((one) => `<li>${escaped(one)}</li>`).join("")}</ul><p class="small">Change a control, or Undo.</p>`;
  showTries();
  try {
    history.replaceState(null, "", `#${toFragment()}`);
  } catch { /* an embedded page may have no address of its own */ }
  draw(legal);
  drawTimelinesSoon();
}

// At another size or in other colours.
function drawAll() {
  draw();
  drawTimelines();
}

function draw(legal = !wrong().length) {
  if (legal) {
    drawBars(ranks);
    drawKinds(ranks);
  }
  drawMap(legal ? ranks : null);
  byId("map-words").textContent = mapWords();
}

// A layout of the map, with the map's recipe.
function take(point) {
  become({recipe: {sequence: DATA.recipe.sequence, global_batch: DATA.recipe.global_batch}, layout: point.layout});
}

// Changes worth a look from here.
function tries() {
  const {layout, recipe} = state, found = [];
  if (dpOf(layout) > 1) found.push(["zero", layout.zero ? layout.zero - 1 : 3, `ZeRO ${layout.zero} \u2192 ${layout.zero ? layout.zero - 1 : 3}`]);
  if (CONTROLS.sequence.includes(2 * recipe.sequence))
    found.push(["sequence", 2 * recipe.sequence, `sequence ${(2 * recipe.sequence).toLocaleString("en")}`]);
  const again = layout.recompute === "full" ? "none" : "full";
  found.push(["recompute", again, again === "full" ? "recompute everything" : "no recomputation"]);
  const tp = layout.tp > 1 ? 1 : CONTROLS.tp.filter((one) => one <= DATA.cluster.per_node).at(-1);
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

function listen() {
  byId("best").addEventListener("click", () => take(POINTS[LAND.start]));
  byId("undo").addEventListener("click", () => {
    Object.assign(state, past.pop());
    changed();
  });
  byId("copy-link").addEventListener("click", (event) => copy(location.href, event.target));
  byId("copy-command").addEventListener("click", (event) => copy(commandWords(), event.target));
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-try]"), stage = event.target.closest("[data-stage]");
    if (button) change(button.dataset.try, /^\d/.test(button.dataset.value) ? Number(button.dataset.value) : button.dataset.value);
    if (stage) change("zero", Number(stage.dataset.stage));
  });
  document.addEventListener("keydown", (event) => {
    const stage = event.target.closest?.("[data-stage]");
    if (!stage || event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    change("zero", Number(stage.dataset.stage));
  });
  addEventListener("hashchange", () => {
    const given = fromFragment(location.hash);
    if (given && location.hash.slice(1) !== toFragment()) become(given);
  });
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  explainOnDemand((target, event) => {
    const stage = target.closest?.("[data-stage]"), rank = target.closest?.("g.rank"), name = target.closest?.("[data-explain]");
    if (stage) return stageWords(Number(stage.dataset.stage), target.dataset.kind);
    if (rank && ranks) return rankWords(ranks[rank.dataset.rank], rank.dataset.rank, target.dataset.kind);
    if (target.matches?.("[data-schedule] canvas")) return event.offsetX === undefined ? "" : spanWords(target, event.offsetX, event.offsetY);
    const label = target.id?.startsWith?.("knob-") ? document.querySelector(`label[for="${target.id}"]`) : name;
    return label?.dataset.explain ? explanation(label.dataset.explain) : "";
  });
}

function start() {
  const {model, cluster, recipe} = DATA;
  document.title = `${model.name} on ${cluster.devices} ${cluster.device}: layout explorer`;
  byId("title").textContent = `Layout explorer: ${model.name} on ${cluster.devices} ${cluster.device}`;
  byId("subject").textContent =
    `${(model.parameters / 1e9).toPrecision(3)} B parameters \u00b7 ${recipe.precision} \u00b7 ${cluster.per_node} GPUs per node`;
  byId("colour").innerHTML = COLOURED.map((name) => `<option>${name}</option>`).join("");
  byId("colour").addEventListener("input", () => draw());
  buildControls();
  buildTimelines();
  watchMap(take, () => drawMap(wrong().length ? null : ranks));
  listen();
  const given = fromFragment(location.hash);
  if (given) become(given);
  else take(POINTS[LAND.start]);
}

start();
