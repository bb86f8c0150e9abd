// One half of the page, in words: what its layout needs and takes, and the command that asks for it.

const prefixWords = (half) => isPair ? `${half.label} \u00b7 ${half.title}: ` : "";
const sameRecipe = ({state, data}) => ["sequence", "global_batch"].every((name) => state.recipe[name] === data.recipe[name]);

// Seconds of a step of a legal state, as Python predicted them; null: Python did not count this state.
function timeOf(half, recipe, layout) {
  const point = sameRecipe({state: {recipe}, data: half.data}) && half.byLayout.get(layoutOption(layout));
  if (point) return point.step;
  const {axes, values, seconds} = half.data.times, size = microBatchOf(half.data.model, layout, recipe);
  const digits = axes.map((axis) => values[axis].indexOf(axis === "micro_batch" ? size : layout[axis]));
  if (digits.includes(-1)) return null;
  const number = digits.reduce((sum, digit, n) => sum * values[axes[n]].length + digit, 0);
  return seconds[`${recipe.sequence},${recipe.global_batch}`]?.[number] ?? null;
}

// Model FLOP utilization of a step.
function mfuOf({data, devices}, recipe, seconds) {
  const perDevice = recipe.sequence * recipe.global_batch / seconds / devices;
  return data.token_flop[recipe.sequence] * perDevice / data.cluster.flop_per_s;
}

const verdictOf = (half, bytes) => !fitsRoom(half, bytes) ? ["no", "DOES NOT FIT"] :
  half.capacity && bytes > half.data.cluster.tight_bytes ? ["tight", "TIGHT"] : ["yes", half.capacity ? "FITS" : "COUNTED"];
const signed = (change, words) => `${change < 0 ? "\u2212" : "+"}${words(Math.abs(change))}`;

// What a legal half needs and takes, of all its devices; null: time not counted, or for dollars, no price known.
function figuresOf(half) {
  const {state: {recipe, layout}, ranks, devices, data: {price}} = half, seconds = timeOf(half, recipe, layout);
  const rate = seconds && recipe.sequence * recipe.global_batch / seconds, hours = rate && devices * 1e9 / rate / 3600;
  return {
    key: toFragment(), total: ranks[worstOf(ranks)].total, seconds, rate, hours,
    usd: price.usd_per_hour && hours ? price.usd_per_hour * hours : null,
  };
}

function verdictWords(half, figures) {
  const {ranks, capacity, state, devices, before, stays, data: {price}} = half;
  const n = worstOf(ranks), {total, when} = ranks[n], rankName = ranks.length > 1 ? `pipeline rank ${n}, ` : "";
  const [mark, word] = verdictOf(half, total), name = mark === "tight" ? explained("tight", word) : word;
  const room = !capacity ? "" : fitsRoom(half, total) ? ` of ${gib(capacity)} \u00b7 ${gib(capacity - total)} free` :
    ` of ${gib(capacity)} \u00b7 ${gib(total - capacity)} too much`;
  const {seconds} = figures, change = before && figures.key !== before.key ? before : null;
  const money = figures.usd === null ? "" : `${explained("money", "Money")}: about ${dollars(figures.usd)} per billion tokens, at ` +
    `${dollars(price.usd_per_hour)} per GPU-hour. `;
  return `<p class="first"><strong class="${mark}">${name}</strong> <b>${gib(total)}</b>${room}</p>` +
    (seconds === null ? `<p>${explained("step", "Time not counted")} this far from the first layout</p>` :
    `<p>${explained("step", "predicted")} <b${half.n ? "" : ` id="seconds"`}>${duration(seconds)}</b> per step \u00b7 ` +
    `${explained("mfu", "MFU")} ${percent(mfuOf(half, state.recipe, seconds))} \u00b7 ` +
    `${Math.round(figures.rate / devices).toLocaleString("en")} tokens/s per GPU</p>`) +
    (stays ? `<p class="small tight">Stays as it was, since that is not legal here: ${escaped(stays)}</p>` : "") +
    `<p class="small">${money}Peak: ${rankName}${when}. ` + (change ? `Last change: memory ${signed(total - change.total, gib)}` +
    `${seconds && change.seconds ? `, time ${signed(seconds - change.seconds, duration)}` : ""}.` : "") + "</p>";
}

function commandWords({data, state: {recipe, layout}}) {
  if (!data.command) return "";
  return `${data.command} --recipe sequence=${recipe.sequence},global_batch=${recipe.global_batch} ` +
    `--layout ${layoutOption(layout)}`;
}

// How many layouts the map has, and of which recipe: a sample must not pass for the whole.
function mapWords(half) {
  const {points, land, front, data: {recipe}} = half;
  const shown = points.length < land.legal ?
    `${points.length.toLocaleString("en")} of ${land.legal.toLocaleString("en")}: all that nothing beats, and a sample of the others` :
    `All ${land.legal.toLocaleString("en")}`;
  const none = front.some((point) => fitsRoom(half, point.peak)) ? "" : " None of them fits.";
  const recipeNote = sameRecipe(half) ? "" : " The controls have another recipe, which is not on this map; the dashed line is its memory.";
  return `${shown}, at sequence ${recipe.sequence.toLocaleString("en")} and ${recipe.global_batch.toLocaleString("en")} ` +
    `sequences per step.${none} The line joins layouts that no other beats in both time and memory.${recipeNote}`;
}

// The sections of the second half are those of the first, under other names.
function buildHalf(half) {
  if (half.n) for (const name of ["memory", "map"]) {
    const copy = byId(name).cloneNode(true);
    for (const element of [copy, ...copy.querySelectorAll("[id]")]) element.id += `-${half.n + 1}`;
    copy.setAttribute("aria-labelledby", `${copy.getAttribute("aria-labelledby")}-${half.n + 1}`);
    byId(name).after(copy);
  }
  if (isPair) half.el("map-title").textContent = `${prefixWords(half)}Map of legal layouts`;
  half.el("colour").innerHTML = COLOURED.map((name) => `<option>${name}</option>`).join("");
}

// After a change of its state.
function showHalf(half) {
  const sentences = violationsOf(half), legal = !sentences.length, {el, state, data} = half;
  el("refused").hidden = legal;
  el("verdict").hidden = el("command").hidden = el("memory").querySelector(".split").hidden = !legal;
  el("options").hidden = true;
  if (legal) {
    half.ranks = memoryOf(data, state.recipe, state.layout);
    const figures = figuresOf(half);
    el("verdict").innerHTML = verdictWords(half, figures);
    el("command").hidden = !data.command;
    el("command").firstElementChild.textContent = commandWords(half);
    showOptions(half);
    half.before = figures;
  } else el("refused").innerHTML = `<p class="first"><strong class="no">NOT LEGAL</strong></p>` +
    `<ul>${sentences.map((sentence) => `<li>${escaped(sentence)}</li>`).join("")}</ul><p class="small">Change a control, or Undo.</p>`;
}

// In a few words and one bar, for a screen that has no room for controls and bars together.
function stripOf(half) {
  const name = isPair ? `${half.label}: ` : "";
  if (violationsOf(half).length) return `<p>${name}<strong class="no">NOT LEGAL</strong>, see below</p>`;
  const {ranks, state, capacity} = half, {kinds, total} = ranks[worstOf(ranks)], [mark, word] = verdictOf(half, total);
  const {seconds} = half.before, most = Math.max(total, capacity || 0);
  const parts = KINDS.filter((kind) => kinds[kind] > 0)
    .map((kind) => `<i style="width:${100 * kinds[kind] / most}%;background:var(--${kind})"></i>`);
  return `<p>${name}<strong class="${mark}">${word}</strong> <b>${gib(total)}</b>${capacity ? ` of ${gib(capacity)}` : ""}` +
    (seconds === null ? "" : ` \u00b7 ${duration(seconds)} \u00b7 MFU ${Math.round(100 * mfuOf(half, state.recipe, seconds))}\u00a0%`) +
    `</p><div class="kinds">${parts.join("")}</div>`;
}

function drawHalf(half) {
  if (!violationsOf(half).length) {
    drawBars(half);
    drawKinds(half);
  }
  drawMap(half);
  half.el("map-words").textContent = mapWords(half);
}
