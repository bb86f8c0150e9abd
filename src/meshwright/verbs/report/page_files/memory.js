// Memory of the chosen run: bars by kind for every pipeline rank and column, and what was held over the program.

const kindColour = (kind) => `var(--${kind})`;

// Rank -> column -> {kinds, peak}, out of the table's rows.
function heldOf(run) {
  const found = new Map();
  for (const row of run.comparison.rows) {
    if (row.section !== "memory") continue;
    if (!found.has(row.rank)) found.set(row.rank, Object.fromEntries(SOURCES.map(([key]) => [key, {kinds: {}, peak: null}])));
    for (const [key] of SOURCES) {
      const one = found.get(row.rank)[key];
      if (row.what === "peak") one.peak = row[key];
      else if (row[key] && row.what !== "reserve") one.kinds[row.what] = row[key];
    }
  }
  return found;
}

const sumOf = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);

function drawBars() {
  const run = chosen(), held = heldOf(run), box = element("bars");
  const rows = [...held].sort(([a], [b]) => a - b).flatMap(([rank, of]) =>
    SOURCES.map(([key, title]) => ({rank, key, title, ...of[key]})).filter((one) => one.peak !== null || sumOf(one.kinds)));
  if (!rows.length) {
    box.innerHTML = none("Nothing is known of this run's memory.");
    return;
  }
  const wide = box.clientWidth, left = 74, right = 74, high = 17, step = 21, between = 14;
  const all = Math.max(...rows.map((one) => Math.max(one.peak ?? 0, sumOf(one.kinds))));
  const limit = run.capacity && run.capacity < 1.6 * all ? run.capacity : null, most = Math.max(all, limit ?? 0);
  const x = (bytes) => left + bytes / most * (wide - left - right);
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
  const [marks, unit] = memoryTicks(most, wide > 600 ? 6 : 3);
  const axis = marks.map(([n, words]) => `<line class="grid" x1="${x(n)}" x2="${x(n)}" y1="14" y2="${y}"/>` +
    `<text x="${x(n)}" y="${y + 14}" text-anchor="middle">${words}${n ? ` ${unit}` : ""}</text>`).join("");
  const edge = limit ? `<line class="limit" x1="${x(limit)}" x2="${x(limit)}" y1="10" y2="${y}"/>` +
    `<text class="limit-words" x="${x(limit)}" y="9" text-anchor="end">usable ${gib(limit)}</text>` : "";
  box.innerHTML = `<svg role="img" height="${y + 20}" viewBox="0 0 ${wide} ${y + 20}" aria-label="Memory by kind">${axis}${parts.join("")}${edge}</svg>`;
  const present = PAGE.kinds.filter((kind) => rows.some((row) => row.kinds[kind]));
  element("kinds").innerHTML = present.map((kind) =>
    `<span><i class="chip" style="background:${kindColour(kind)}"></i>${EXPLAIN[kind] ? explained(kind, kind) : kind}</span>`).join("");
}

function barOf(row, x, y, high, left) {
  let sum = 0;
  const rects = PAGE.kinds.filter((kind) => row.kinds[kind]).map((kind) => {
    const from = sum;
    sum += row.kinds[kind];
    return `<rect class="part gap" tabindex="0" role="img" aria-label="rank ${row.rank}, ${row.title}: ${kind} ${small(row.kinds[kind])}" data-bar="${row.rank} ${row.key} ${kind}" x="${x(from)}" width="${Math.max(0, x(sum) - x(from))}" y="${y}" height="${high}" fill="${kindColour(kind)}"/>`;
  });
  const whole = row.peak ?? sum, words = row.peak === null ? `${small(sum)} kept` : small(row.peak);
  const rest = row.peak !== null && row.peak > sum * 1.001 ? `<rect x="${x(sum)}" width="${x(row.peak) - x(sum)}" y="${y}" height="${high}" fill="var(--idle)"/>` : "";
  return `<g class="held" data-rank="${row.rank}" data-source="${row.key}"><text x="${left - 8}" y="${y + 12.5}" text-anchor="end">${row.title}</text>` +
    `${rects.join("")}${rest}<text class="name" x="${x(Math.max(whole, sum)) + 6}" y="${y + 12.5}">${words}</text></g>`;
}

function barWords(word) {
  const [rank, key, kind] = word.split(" "), row = heldOf(chosen()).get(Number(rank))[key];
  const title = SOURCES.find(([one]) => one === key)[1];
  const list = PAGE.kinds.filter((one) => row.kinds[one]).map((one) => [one === kind ? `&#9656; ${one}` : one, small(row.kinds[one])]);
  if (row.peak !== null) list.push(["peak", small(row.peak)]);
  return `<b>Rank ${rank}, ${title}</b>${pairs(list)}`;
}

// Stacked columns, one for each part of the program.
function drawMoments() {
  const run = chosen(), box = element("moments"), ranks = [...new Set(["dryrun", "measured"].flatMap((key) => Object.keys(run.moments[key])))];
  const rank = ranks.includes(state.rank) ? state.rank : ranks.includes(String(run.comparison.rank)) ? String(run.comparison.rank) : ranks[0];
  element("moments-rank").innerHTML = ranks.length > 1 ? `<label>Rank <select id="rank">${ranks.map((one) =>
    `<option${one === rank ? " selected" : ""}>${one}</option>`).join("")}</select></label>` : "";
  const both = [["dryrun", "Dry run"], ["measured", "Measured"]];
  const most = Math.max(1, ...both.flatMap(([key]) => (run.moments[key][rank] ?? []).map(([, , sizes]) => sizes.reduce((a, b) => a + b, 0))));
  const missing = {dryrun: `No dry run in this folder: meshwright compare ${run.place} makes it.`, measured: "Training keeps no timeline: meshwright profile measures it."};
  box.innerHTML = both.map(([key, title]) => {
    const moments = run.moments[key][rank];
    return `<div><h3>${title}<small>${moments ? momentsAbout(moments) : ""}</small></h3>${moments ? `<canvas data-moments="${key}" data-of="${rank}" height="190" style="height:190px" role="img" tabindex="0" aria-label="${title}: memory over the program; arrow keys walk along it"></canvas>` : none(missing[key])}</div>`;
  }).join("");
  const steps = Math.max(1, ...both.map(([key]) => stepsOf(run.moments[key][rank] ?? [])));
  for (const canvas of box.querySelectorAll("canvas")) {
    const moments = run.moments[canvas.dataset.moments][rank];
    canvas.dataset.share = stepsOf(moments) / steps || 1;
    paintMoments(canvas, moments, most);
  }
}

// Both charts have one scale of time: a dry run of two steps is half as wide as four measured ones.
const stepsOf = (moments) => new Set(moments.map(([, step]) => step).filter(Boolean)).size;
const columnOf = (canvas, moments) => (canvas.clientWidth - 52) * Number(canvas.dataset.share) / moments.length;

const momentsAbout = (moments) => `${moments.length} parts, each when it held most`;

function penOf(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  return {pen, width};
}

function paintMoments(canvas, moments, most) {
  const height = 190, {pen, width} = penOf(canvas, height), left = 52, bottom = 20, top = 6;
  const y = (bytes) => height - bottom - bytes / most * (height - bottom - top), column = columnOf(canvas, moments);
  const [marks, unit] = memoryTicks(most, 4), faint = css("faint");
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
  const moments = chosen().moments[canvas.dataset.moments][canvas.dataset.of];
  const at = Math.floor((px - 52) / columnOf(canvas, moments));
  if (!moments[at]) return "";
  canvas.at = at;
  const [name, step, sizes] = moments[at];
  const list = PAGE.kinds.map((kind, n) => [kind, sizes[n]]).filter(([, bytes]) => bytes).map(([kind, bytes]) => [kind, small(bytes)]);
  return `<b>${escaped(passWords(name))}${step ? `, step ${step}` : ""}: ${small(sizes.reduce((a, b) => a + b, 0))}</b>${pairs(list)}`;
}

function momentAt(canvas, along) {
  const moments = chosen().moments[canvas.dataset.moments][canvas.dataset.of];
  const at = Math.max(0, Math.min(moments.length - 1, (canvas.at ?? -1) + along));
  return momentWords(canvas, 52 + (at + 0.5) * columnOf(canvas, moments));
}

// `BW 0 3` in words.
function passWords(name) {
  const [kind, stage, i] = name.split(" ");
  return PASSES[kind] && i !== undefined ? `${PASSES[kind]}, micro-batch ${i}, stage ${stage}` : name;
}

const PASSES = {F: "forward pass", B: "gradient of the input", W: "gradients of the weights", BW: "backward pass"};
