// Puts the page together: the state's memory, verdict, map and timelines, drawn again at every change.

let ranks = null;

function verdictWords(sentences) {
  if (sentences.length)
    return `<strong class="no">Not legal.</strong> ${sentences.map(escaped).join("; ")}`;
  const n = worstOf(ranks), {total, when} = ranks[n], where = ranks.length > 1 ? `pipeline rank ${n}, ` : "";
  const fits = fitsRoom(total), of = capacity ? ` of ${gib(capacity)}` : "";
  const beyond = fits ? "" : `, ${gib(total - capacity)} too much`;
  const known = sameRecipe() ? byLayout.get(layoutOption(state.layout)) : null;
  const time = known ? ` ${duration(known.step)} a step, ${explained("mfu", "MFU")} ${percent(mfuOf(known))}.` : "";
  const recipe = `--recipe sequence=${state.recipe.sequence} --recipe global_batch=${state.recipe.global_batch} ` +
    `--recipe precision=${DATA.recipe.precision}`;
  return `<strong class="${fits ? "yes" : "no"}">${fits ? "Fits" : "Does not fit"}:</strong> ${gib(total)}${of}${beyond} ` +
    `(worst: ${where}${when}).${time} <code>meshwright plan ... ${escaped(`${recipe} --layout ${layoutOption(state.layout)}`)}</code>`;
}

function mapWords() {
  const shown = POINTS.length < LAND.legal ? `${POINTS.length} of ${LAND.legal.toLocaleString("en")}` : LAND.legal;
  const none = FRONT.some((point) => fitsRoom(point.peak)) ? "" : " None of them fits.";
  const other = sameRecipe() ? "" : " The sliders have another recipe: its time is not on this map, the line is its memory.";
  const drawn = !other && !wrong().length && !byLayout.has(layoutOption(state.layout)) ?
    " The dashed line is the memory of the sliders' layout, whose time is not among these." : "";
  return `${shown} legal layouts at sequence ${DATA.recipe.sequence}, ${DATA.recipe.global_batch} sequences a step.${none} ` +
    `The line joins those that no other beats in both time and memory.${other}${drawn}`;
}

function changed() {
  const sentences = wrong();
  if (!sentences.length) ranks = memoryOf(DATA, state.recipe, state.layout);
  showControls();
  document.getElementById("verdict").innerHTML = verdictWords(sentences);
  if (!sentences.length) followLayout();
  draw(!sentences.length);
  drawTimelinesSoon();
}

// At another size or in other colours.
function drawAll() {
  draw();
  drawTimelines();
}

function draw(legal = !wrong().length) {
  drawBars(ranks, legal);
  drawKinds(ranks);
  drawMap(legal ? ranks : null);
  document.getElementById("map-words").textContent = mapWords();
}

// A layout of the map, with the map's recipe.
function take(point) {
  Object.assign(state.recipe, {sequence: DATA.recipe.sequence, global_batch: DATA.recipe.global_batch});
  state.layout = {...point.layout};
  changed();
}

function explainOnHover() {
  const show = (target, x, y) => {
    const rank = target.closest?.("g.rank"), name = target.closest?.("[data-explain]");
    if (rank && ranks) tip.show(rankWords(ranks[rank.dataset.rank], rank.dataset.rank, target.dataset.kind), x, y);
    else if (name) tip.show(explanation(name.dataset.explain), x, y);
    else return false;
    return true;
  };
  document.addEventListener("pointermove", (event) => {
    if (!show(event.target, event.clientX, event.clientY) && !event.target.matches?.("canvas")) tip.hide();
  });
  document.addEventListener("focusin", (event) => {
    const target = event.target, box = target.getBoundingClientRect();
    if (!target.matches(":focus-visible")) return;
    const label = target.id?.startsWith("knob-") ? document.querySelector(`label[for="${target.id}"]`) : target;
    show(label, box.left, box.bottom - 12);
  });
  document.addEventListener("focusout", () => tip.hide());
  document.addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());
  addEventListener("scroll", () => tip.hide(), {passive: true});
}

function start() {
  const {model, cluster, recipe} = DATA;
  document.title = `${model.name} on ${cluster.devices} ${cluster.device}: layout explorer`;
  document.getElementById("subject").textContent =
    `${model.name}, ${(model.parameters / 1e9).toPrecision(3)} B parameters, ${recipe.precision}, on ` +
    `${cluster.devices} ${cluster.device} (${cluster.per_node} a node)`;
  document.getElementById("colour").innerHTML = COLOURED.map((name) => `<option>${name}</option>`).join("");
  document.getElementById("colour").addEventListener("input", () => draw());
  buildControls(changed);
  buildTimelines();
  watchMap(take, () => drawMap(wrong().length ? null : ranks));
  watchTimelines();
  explainOnHover();
  take(POINTS[LAND.best]);
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

start();
