// Memory of the chosen run: bars by kind for every pipeline rank and column, and what was held over the program.

const kindColour = (kind) => `var(--${kind})`;

// Rank -> column -> {kinds, peak}, out of the table's rows.
function memoryByRank(run) {
  const ranks = new Map();
  for (const row of run.comparison.rows) {
    if (row.section !== "memory") continue;
    if (!ranks.has(row.rank)) ranks.set(row.rank, Object.fromEntries(SOURCES.map(([key]) => [key, {kinds: {}, peak: null}])));
    for (const [key] of SOURCES) {
      const column = ranks.get(row.rank)[key];
      if (row.what === "peak") column.peak = row[key];
      else if (row[key] && row.what !== "reserve") column.kinds[row.what] = row[key];
    }
  }
  return ranks;
}

const sumOf = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);

function drawBars() {
  const run = chosenRun(), held = memoryByRank(run), box = byId("bars");
  const rows = [...held].sort(([a], [b]) => a - b).flatMap(([rank, columns]) =>
    SOURCES.map(([key, title]) => ({rank, key, title, ...columns[key]})).filter((row) => row.peak !== null || sumOf(row.kinds)));
  if (!rows.length) {
    box.innerHTML = absence("Nothing is known of this run's memory.");
    return;
  }
  const width = box.clientWidth, left = 74, right = 74, high = 17, step = 21, between = 14;
  const largest = Math.max(...rows.map((row) => Math.max(row.peak ?? 0, sumOf(row.kinds))));
  const limit = run.capacity && run.capacity < 1.6 * largest ? run.capacity : null, maximum = Math.max(largest, limit ?? 0);
  const x = (bytes) => left + bytes / maximum * (width - left - right);
  let y = 18, last = null;
  const parts = [];
  for (const row of rows) {
    if (row.rank !== last) {
      y += last === null ? 0 : between;
      if (run.pp > 1) {
        parts.push(`<text class="name" x="0" y="${y + 8}">rank ${row.rank}</text>`);
        y += 16;
      }
      last = row.rank;
    }
    parts.push(barOf(row, x, y, high, left));
    y += step;
  }
  const [marks, unit] = memoryTicks(maximum, width > 600 ? 6 : 3);
  const axis = marks.map(([n, words]) => `<line class="grid" x1="${x(n)}" x2="${x(n)}" y1="14" y2="${y}"/>` +
    `<text x="${x(n)}" y="${y + 14}" text-anchor="middle">${words}${n ? ` ${unit}` : ""}</text>`).join("");
  const edge = limit ? `<line class="limit" x1="${x(limit)}" x2="${x(limit)}" y1="10" y2="${y}"/>` +
    `<text class="limit-words" x="${x(limit)}" y="9" text-anchor="end">usable ${gib(limit)}</text>` : "";
  box.innerHTML = `<svg role="img" height="${y + 20}" viewBox="0 0 ${width} ${y + 20}" aria-label="Memory by kind">${axis}${parts.join("")}${edge}</svg>`;
  const present = PAGE.kinds.filter((kind) => rows.some((row) => row.kinds[kind]));
  byId("kinds").innerHTML = present.map((kind) =>
    `<span><i class="chip" style="background:${kindColour(kind)}"></i>${EXPLAIN[kind] ? explained(kind, kind) : kind}</span>`).join("");
}

// One bar: its kinds beside each other, then in grey what the peak has beyond the kinds that are known.
function barOf(row, x, y, high, left) {
  let sum = 0;
  const rects = PAGE.kinds.filter((kind) => row.kinds[kind]).map((kind) => {
    const from = sum;
    sum += row.kinds[kind];
    return `<rect class="part gap" tabindex="0" role="img" aria-label="rank ${row.rank}, ${row.title}: ${kind} ${bytesWords(row.kinds[kind])}" data-bar="${row.rank} ${row.key} ${kind}" x="${x(from)}" width="${Math.max(0, x(sum) - x(from))}" y="${y}" height="${high}" fill="${kindColour(kind)}"/>`;
  });
  const end = row.peak ?? sum, words = row.peak === null ? `${bytesWords(sum)} kept` : bytesWords(row.peak);
  const rest = row.peak !== null && row.peak > sum * 1.001 ? `<rect x="${x(sum)}" width="${x(row.peak) - x(sum)}" y="${y}" height="${high}" fill="var(--idle)"/>` : "";
  return `<g class="held" data-rank="${row.rank}" data-source="${row.key}"><text x="${left - 8}" y="${y + 12.5}" text-anchor="end">${row.title}</text>` +
    `${rects.join("")}${rest}<text class="name" x="${x(Math.max(end, sum)) + 6}" y="${y + 12.5}">${words}</text></g>`;
}

function barWords(word) {
  const [rank, key, kind] = word.split(" "), row = memoryByRank(chosenRun()).get(Number(rank))[key];
  const title = SOURCES.find(([source]) => source === key)[1];
  const list = PAGE.kinds.filter((kind) => row.kinds[kind]).map((name) => [name === kind ? `&#9656; ${name}` : name, bytesWords(row.kinds[name])]);
  if (row.peak !== null) list.push(["peak", bytesWords(row.peak)]);
  return `<b>Rank ${rank}, ${title}</b>${pairs(list)}`;
}

// Stacked columns, one for each part of the program.
function drawMoments() {
  const run = chosenRun(), box = byId("moments"), ranks = [...new Set(["dryrun", "measured"].flatMap((key) => Object.keys(run.moments[key])))];
  const rank = ranks.includes(state.rank) ? state.rank : ranks.includes(String(run.comparison.rank)) ? String(run.comparison.rank) : ranks[0];
  byId("moments-rank").innerHTML = ranks.length > 1 ? `<label>Rank <select id="rank">${ranks.map((option) =>
    `<option${option === rank ? " selected" : ""}>${option}</option>`).join("")}</select></label>` : "";
  const sources = [["dryrun", "Dry run"], ["measured", "Measured"]];
  const maximum = Math.max(1, ...sources.flatMap(([key]) => (run.moments[key][rank] ?? []).map(([, , sizes]) => sumOf(sizes))));
  const missing = {dryrun: `No dry run in this folder: meshwright compare ${run.place} makes it.`, measured: "Training keeps no timeline: meshwright profile measures it."};
  box.innerHTML = sources.map(([key, title]) => {
    const moments = run.moments[key][rank];
    return `<div><h3>${title}<small>${moments ? momentsAbout(moments) : ""}</small></h3>${moments ? `<canvas data-moments="${key}" data-of="${rank}" height="190" style="height:190px" role="img" tabindex="0" aria-label="${title}: memory over the program; arrow keys walk along it"></canvas>` : absence(missing[key])}</div>`;
  }).join("");
  const steps = Math.max(1, ...sources.map(([key]) => stepsOf(run.moments[key][rank] ?? [])));
  for (const canvas of box.querySelectorAll("canvas")) {
    const moments = run.moments[canvas.dataset.moments][rank];
    canvas.dataset.share = stepsOf(moments) / steps || 1;
    paintMoments(canvas, moments, maximum);
  }
}

// Both charts have one scale of time: a dry run of two steps is half as wide as four measured ones.
const stepsOf = (moments) => new Set(moments.map(([, step]) => step).filter(Boolean)).size;
const columnOf = (canvas, moments) => (canvas.clientWidth - 52) * Number(canvas.dataset.share) / moments.length;

const momentsAbout = (moments) => `${moments.length} parts, each when it held most`;

// Pixels are whole, since columns with blurred edges would show seams between equal neighbours.
function paintMoments(canvas, moments, maximum) {
  const {pen, width, height} = canvasOf(canvas), left = 52, bottom = 20, top = 6;
  const y = (bytes) => height - bottom - bytes / maximum * (height - bottom - top), column = columnOf(canvas, moments);
  const [marks, unit] = memoryTicks(maximum, 4), faint = css("faint");
  pen.textAlign = "right";
  for (const [n, words] of marks) {
    pen.strokeStyle = css("rule");
    pen.beginPath();
    pen.moveTo(left, Math.round(y(n)) + 0.5);
    pen.lineTo(width, Math.round(y(n)) + 0.5);
    pen.stroke();
    pen.fillStyle = faint;
    pen.fillText(n ? `${words} ${unit}` : words, left - 6, y(n) + 4);
  }
  const colours = PAGE.kinds.map((kind) => css(kind));
  let before = null;
  moments.forEach(([, step, sizes], n) => {
    let sum = 0;
    sizes.forEach((bytes, kind) => {
      if (!bytes) return;
      pen.fillStyle = colours[kind];
      const [x, end] = [Math.round(left + n * column), Math.round(left + (n + 1) * column)];
      pen.fillRect(x, y(sum + bytes), Math.max(1, end - x), y(sum) - y(sum + bytes));
      sum += bytes;
    });
    if (step !== before && step) {
      pen.fillStyle = css("faint");
      pen.textAlign = "left";
      pen.fillText(`step ${step}`, left + n * column + 2, height - 5);
      pen.fillRect(left + n * column, height - bottom, 1, 6);
    }
    before = step;
  });
}

function momentWords(canvas, px) {
  const moments = chosenRun().moments[canvas.dataset.moments][canvas.dataset.of];
  const at = Math.floor((px - 52) / columnOf(canvas, moments));
  if (!moments[at]) return "";
  canvas.at = at;
  const [name, step, sizes] = moments[at];
  const list = PAGE.kinds.map((kind, n) => [kind, sizes[n]]).filter(([, bytes]) => bytes).map(([kind, bytes]) => [kind, bytesWords(bytes)]);
  return `<b>${escaped(passWords(name))}${step ? `, step ${step}` : ""}: ${bytesWords(sumOf(sizes))}</b>${pairs(list)}`;
}

function momentAt(canvas, along) {
  const moments = chosenRun().moments[canvas.dataset.moments][canvas.dataset.of];
  const at = Math.max(0, Math.min(moments.length - 1, (canvas.at ?? -1) + along));
  return momentWords(canvas, 52 + (at + 0.5) * columnOf(canvas, moments));
}

// `BW 0 3` in words.
function passWords(name) {
  const [kind, stage, i] = name.split(" ");
  return PASSES[kind] && i !== undefined ? `${PASSES[kind]}, micro-batch ${i}, stage ${stage}` : name;
}
