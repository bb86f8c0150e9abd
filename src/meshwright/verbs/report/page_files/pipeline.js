// One step as boxes: as planned and as executed, on one scale where both are in seconds.

const FILLS = {...FILL, gradients: "gradients", norm: "masters", optimizer: "moments"};
const ROW = (ranks) => ranks <= 8 ? 26 : ranks <= 16 ? 16 : Math.max(4, Math.floor(260 / ranks));

function drawBoxes() {
  const run = chosenRun(), box = byId("boxes"), {planned, executed} = run.timelines;
  const shared = planned && executed && planned.unit === "seconds" ? Math.max(planned.total, executed.total) : 0;
  const words = {executed: "Training keeps no spans: meshwright profile measures them."};
  box.innerHTML = [["planned", "As planned", planned], ["executed", "As executed", executed]].map(([key, title, timeline]) => {
    if (!timeline) return `<div><h3>${title}</h3>${absence(words[key] ?? "Not known.")}</div>`;
    const unit = timeline.unit === "seconds" ? duration(timeline.total) : "every pass equally long, for want of the device's speed";
    const bubble = run.pp > 1 && timeline.bubble !== null ? `, bubble ${percent(timeline.bubble)}` : "", cut = timeline.cut ? ", from its beginning" : "";
    const height = timeline.ranks.length * ROW(timeline.ranks.length) + (timeline.unit === "seconds" ? 20 : 2);
    return `<div><h3>${title}<small>${run.pp > 1 ? `${run.schedule}: ` : ""}${unit}${bubble}${cut}</small></h3>` +
      `<canvas data-boxes="${key}" data-most="${timeline.unit === "seconds" && shared ? shared : timeline.total}" role="img" tabindex="0" style="height:${height}px" aria-label="${title}${bubble}"></canvas></div>`;
  }).join("");
  for (const canvas of box.querySelectorAll("canvas")) paintBoxes(canvas, run.timelines[canvas.dataset.boxes]);
  const kinds = new Set([planned, executed].flatMap((timeline) => timeline ? timeline.spans.flatMap((rankSpans) => rankSpans.map(([kind]) => kind)) : []));
  byId("passes").innerHTML = Object.entries(FILLS).filter(([kind]) => kinds.has(kind)).map(([kind, name]) =>
    `<span><i class="chip" style="background:var(--${name})"></i>${PASSES[kind] ? `${kind} ${PASSES[kind]}` : kind}</span>`).join("") +
    `<span><i class="chip" style="background:repeating-linear-gradient(45deg,var(--faint) 0 2px,var(--idle) 2px 5px)"></i>waiting</span>` +
    (run.pp > 1 ? `<span>numbers: micro-batches${hasSeveralStages(run) ? "; paler: further stages of the rank" : ""}</span>` : "");
}

const hasSeveralStages = (run) => (run.timelines.planned?.spans ?? []).some((rankSpans) => rankSpans.some(([, stage]) => stage >= run.pp));
const labelWidth = (timeline) => timeline.ranks.length > 1 ? 44 : 0;

// A pass may be narrower than a pixel where a run is long, so it is drawn at least 0.4 wide and without its gap.
function paintBoxes(canvas, timeline) {
  const row = ROW(timeline.ranks.length), maximum = Number(canvas.dataset.most), high = timeline.ranks.length * row;
  const {pen, width} = canvasOf(canvas), left = labelWidth(timeline), scale = (width - left) / maximum;
  const pp = chosenRun().pp, [ink, paper, faint] = [css("forward-ink"), css("panel"), css("faint")];
  const colours = Object.fromEntries(Object.entries(FILLS).map(([kind, name]) => [kind, css(name)]));
  const hatch = hatchOf(pen);
  pen.fillStyle = css("idle");
  pen.fillRect(left, 0, timeline.total * scale, high);
  if (timeline.ranks.length > 1) {
    pen.fillStyle = hatch;
    pen.fillRect(left, 0, timeline.total * scale, high);
  }
  pen.textBaseline = "middle";
  timeline.spans.forEach((rankSpans, n) => {
    const y = n * row;
    if (left && row >= 10) {
      pen.fillStyle = faint;
      pen.textAlign = "left";
      pen.fillText(`rank ${timeline.ranks[n]}`, 0, y + row / 2);
    }
    pen.textAlign = "center";
    for (const [kind, stage, i, start, length, wait = 0] of rankSpans) {
      const x = left + start * scale, spanWidth = length * scale, gap = spanWidth > 3 ? 0.8 : 0;
      pen.globalAlpha = stage >= pp && pp > 1 ? 0.62 : 1;
      pen.fillStyle = colours[kind] ?? css("other");
      pen.fillRect(x, y + 1, Math.max(0.4, spanWidth - gap), row - 2);
      pen.globalAlpha = 1;
      if (wait) {
        pen.fillStyle = css("idle");
        pen.fillRect(x, y + 1, wait * scale, row - 2);
        pen.fillStyle = hatch;
        pen.fillRect(x, y + 1, wait * scale, row - 2);
      }
      if (i >= 0 && row >= 12 && spanWidth - wait * scale > 7 * String(i).length + 4) {
        pen.fillStyle = ink;
        pen.fillText(i, x + (spanWidth + wait * scale) / 2, y + row / 2 + 0.5);
      }
    }
  });
  if (timeline.unit !== "seconds") return;
  const [marks, unit] = timeTicks(maximum, width > 420 ? 6 : 4);
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
  const tilePen = tile.getContext("2d");
  tilePen.strokeStyle = css("faint");
  tilePen.globalAlpha = 0.55;
  tilePen.beginPath();
  for (const from of [-6, 0, 6]) {
    tilePen.moveTo(from, 6);
    tilePen.lineTo(from + 6, 0);
  }
  tilePen.stroke();
  return pen.createPattern(tile, "repeat");
}

// The box beside the one shown last, as words.
function boxAt(canvas, along, across) {
  const timeline = chosenRun().timelines[canvas.dataset.boxes], [row, index] = canvas.at ?? [0, -1];
  const rank = Math.max(0, Math.min(timeline.spans.length - 1, row + across));
  const n = Math.max(0, Math.min(timeline.spans[rank].length - 1, index + along));
  canvas.at = [rank, n];
  return spanWords(timeline, rank, timeline.spans[rank][n]);
}

function boxWords(canvas, px, py) {
  const timeline = chosenRun().timelines[canvas.dataset.boxes], left = labelWidth(timeline), n = Math.floor(py / ROW(timeline.ranks.length));
  const time = (px - left) / (canvas.clientWidth - left) * Number(canvas.dataset.most);
  if (time < 0 || time > timeline.total || !timeline.spans[n]) return "";
  const span = timeline.spans[n].find(([, , , start, length]) => start <= time && time < start + length);
  return span ? spanWords(timeline, n, span) : `<b>waiting</b> rank ${timeline.ranks[n]}, at ${lengthWords(timeline, time)}`;
}

const lengthWords = (timeline, t) => timeline.unit === "seconds" ? duration(t) : `${Number(t.toPrecision(3))} passes`;

function spanWords(timeline, n, [kind, stage, i, start, length, wait = 0]) {
  const which = i >= 0 ? `micro-batch ${i}, stage ${stage}, ` : "";
  const waits = wait ? `; ${lengthWords(timeline, wait)} of it waiting for the stage before` : "";
  return `<b>${PASSES[kind] ?? kind}</b> ${which}rank ${timeline.ranks[n]}: ${lengthWords(timeline, length)}, ` +
    `from ${lengthWords(timeline, start)} on${waits}`;
}
