// One step as boxes: as planned and as executed, on one scale where both are in seconds.

const FILLS = {F: "forward", B: "input", W: "weight", BW: "both", gradients: "gradients", norm: "masters", optimizer: "moments"};
const ROW = (ranks) => ranks <= 8 ? 26 : ranks <= 16 ? 16 : Math.max(4, Math.floor(260 / ranks));

function drawBoxes() {
  const run = chosen(), box = element("boxes"), {planned, executed} = run.timelines;
  const shared = planned && executed && planned.unit === "seconds" ? Math.max(planned.total, executed.total) : 0;
  const words = {executed: "Training keeps no spans: meshwright profile measures them."};
  box.innerHTML = [["planned", "As planned", planned], ["executed", "As executed", executed]].map(([key, title, found]) => {
    if (!found) return `<div><h3>${title}</h3>${none(words[key] ?? "Not known.")}</div>`;
    const unit = found.unit === "seconds" ? duration(found.total) : "every pass equally long, for want of the device's speed";
    const bubble = run.pp > 1 && found.bubble !== null ? `, bubble ${percent(found.bubble)}` : "", cut = found.cut ? ", from its beginning" : "";
    const height = found.ranks.length * ROW(found.ranks.length) + (found.unit === "seconds" ? 20 : 2);
    return `<div><h3>${title}<small>${run.pp > 1 ? `${run.schedule}: ` : ""}${unit}${bubble}${cut}</small></h3>` +
      `<canvas data-boxes="${key}" data-most="${found.unit === "seconds" && shared ? shared : found.total}" role="img" tabindex="0" style="height:${height}px" aria-label="${title}${bubble}"></canvas></div>`;
  }).join("");
  for (const canvas of box.querySelectorAll("canvas")) paintBoxes(canvas, run.timelines[canvas.dataset.boxes]);
  const kinds = new Set([planned, executed].flatMap((found) => found ? found.spans.flatMap((own) => own.map(([kind]) => kind)) : []));
  element("passes").innerHTML = Object.entries(FILLS).filter(([kind]) => kinds.has(kind)).map(([kind, name]) =>
    `<span><i class="chip" style="background:var(--${name})"></i>${PASSES[kind] ? `${kind} ${PASSES[kind]}` : kind}</span>`).join("") +
    `<span><i class="chip" style="background:repeating-linear-gradient(45deg,var(--faint) 0 2px,var(--idle) 2px 5px)"></i>waiting</span>` +
    (run.pp > 1 ? `<span>numbers: micro-batches${hasSeveralStages(run) ? "; paler: further stages of the rank" : ""}</span>` : "");
}

const hasSeveralStages = (run) => (run.timelines.planned?.spans ?? []).some((own) => own.some(([, stage]) => stage >= run.pp));
const labelWide = (found) => found.ranks.length > 1 ? 44 : 0;

function paintBoxes(canvas, found) {
  const row = ROW(found.ranks.length), most = Number(canvas.dataset.most), high = found.ranks.length * row;
  const {pen, width} = penOf(canvas, canvas.clientHeight), left = labelWide(found), scale = (width - left) / most;
  const pp = chosen().pp, [ink, paper, faint] = [css("forward-ink"), css("panel"), css("faint")];
  const colours = Object.fromEntries(Object.entries(FILLS).map(([kind, name]) => [kind, css(name)]));
  const hatch = hatchOf(pen);
  pen.fillStyle = css("idle");
  pen.fillRect(left, 0, found.total * scale, high);
  if (found.ranks.length > 1) {
    pen.fillStyle = hatch;
    pen.fillRect(left, 0, found.total * scale, high);
  }
  pen.textBaseline = "middle";
  found.spans.forEach((own, n) => {
    const y = n * row;
    if (left && row >= 10) {
      pen.fillStyle = faint;
      pen.textAlign = "left";
      pen.fillText(`rank ${found.ranks[n]}`, 0, y + row / 2);
    }
    pen.textAlign = "center";
    for (const [kind, stage, i, start, length, wait = 0] of own) {
      const x = left + start * scale, wide = length * scale, gap = wide > 3 ? 0.8 : 0;
      pen.globalAlpha = stage >= pp && pp > 1 ? 0.62 : 1;
      pen.fillStyle = colours[kind] ?? css("other");
      pen.fillRect(x, y + 1, Math.max(0.4, wide - gap), row - 2);
      pen.globalAlpha = 1;
      if (wait) {
        pen.fillStyle = css("idle");
        pen.fillRect(x, y + 1, wait * scale, row - 2);
        pen.fillStyle = hatch;
        pen.fillRect(x, y + 1, wait * scale, row - 2);
      }
      if (i >= 0 && row >= 12 && wide - wait * scale > 7 * String(i).length + 4) {
        pen.fillStyle = ink;
        pen.fillText(i, x + (wide + wait * scale) / 2, y + row / 2 + 0.5);
      }
    }
  });
  if (found.unit !== "seconds") return;
  const [marks, unit] = timeTicks(most, width > 420 ? 6 : 4);
  pen.fillStyle = faint;
  for (const [n, text] of marks) {
    pen.textAlign = n ? "center" : "left";
    if (left + n * scale < width - 20) pen.fillText(n ? `${text} ${unit}` : text, left + n * scale, high + 11);
    pen.fillRect(left + n * scale, high, 1, 3);
  }
}

// Diagonal lines for what is not computed.
function hatchOf(pen) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const own = tile.getContext("2d");
  own.strokeStyle = css("faint");
  own.globalAlpha = 0.55;
  own.beginPath();
  for (const from of [-6, 0, 6]) {
    own.moveTo(from, 6);
    own.lineTo(from + 6, 0);
  }
  own.stroke();
  return pen.createPattern(tile, "repeat");
}

// The box beside the one shown last, as words.
function boxAt(canvas, along, across) {
  const found = chosen().timelines[canvas.dataset.boxes], [row, place] = canvas.at ?? [0, -1];
  const rank = Math.max(0, Math.min(found.spans.length - 1, row + across));
  const n = Math.max(0, Math.min(found.spans[rank].length - 1, place + along));
  canvas.at = [rank, n];
  return spanWords(found, rank, found.spans[rank][n]);
}

function boxWords(canvas, px, py) {
  const found = chosen().timelines[canvas.dataset.boxes], left = labelWide(found), n = Math.floor(py / ROW(found.ranks.length));
  const time = (px - left) / (canvas.clientWidth - left) * Number(canvas.dataset.most);
  if (time < 0 || time > found.total || !found.spans[n]) return "";
  const span = found.spans[n].find(([, , , start, length]) => start <= time && time < start + length);
  return span ? spanWords(found, n, span) : `<b>waiting</b> rank ${found.ranks[n]}, at ${lengthWords(found, time)}`;
}

const lengthWords = (found, t) => found.unit === "seconds" ? duration(t) : `${Number(t.toPrecision(3))} passes`;

function spanWords(found, n, [kind, stage, i, start, length, wait = 0]) {
  const which = i >= 0 ? `micro-batch ${i}, stage ${stage}, ` : "";
  const waits = wait ? `; ${lengthWords(found, wait)} of it waiting for the stage before` : "";
  return `<b>${PASSES[kind] ?? kind}</b> ${which}rank ${found.ranks[n]}: ${lengthWords(found, length)}, ` +
    `from ${lengthWords(found, start)} on${waits}`;
}
