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
      `<canvas data-boxes="${key}" data-most="${found.unit === "seconds" && shared ? shared : found.total}" role="img" style="height:${height}px" aria-label="${title}${bubble}"></canvas></div>`;
  }).join("");
  for (const canvas of box.querySelectorAll("canvas")) paintBoxes(canvas, run.timelines[canvas.dataset.boxes]);
  const kinds = new Set([planned, executed].flatMap((found) => found ? found.spans.flatMap((own) => own.map(([kind]) => kind)) : []));
  element("passes").innerHTML = Object.entries(FILLS).filter(([kind]) => kinds.has(kind)).map(([kind, name]) =>
    `<span><i class="chip" style="background:var(--${name})"></i>${PASSES[kind] ? `${kind} ${PASSES[kind]}` : kind}</span>`).join("") +
    (run.pp > 1 ? `<span>numbers: micro-batches${hasSeveralStages(run) ? "; paler: further stages of the rank" : ""}</span>` : "");
}

const hasSeveralStages = (run) => (run.timelines.planned?.spans ?? []).some((own) => own.some(([, stage]) => stage >= run.pp));
const labelWide = (found) => found.ranks.length > 1 ? 44 : 0;

function paintBoxes(canvas, found) {
  const row = ROW(found.ranks.length), most = Number(canvas.dataset.most), high = found.ranks.length * row;
  const {pen, width} = penOf(canvas, canvas.clientHeight), left = labelWide(found), scale = (width - left) / most;
  const pp = chosen().pp, [ink, paper, faint] = [css("forward-ink"), css("panel"), css("faint")];
  const colours = Object.fromEntries(Object.entries(FILLS).map(([kind, name]) => [kind, css(name)]));
  pen.fillStyle = css("idle");
  pen.fillRect(left, 0, found.total * scale, high);
  pen.textBaseline = "middle";
  found.spans.forEach((own, n) => {
    const y = n * row;
    if (left && row >= 10) {
      pen.fillStyle = faint;
      pen.textAlign = "left";
      pen.fillText(`rank ${found.ranks[n]}`, 0, y + row / 2);
    }
    pen.textAlign = "center";
    for (const [kind, stage, i, start, length] of own) {
      const x = left + start * scale, wide = length * scale, gap = wide > 3 ? 0.8 : 0;
      pen.globalAlpha = stage >= pp && pp > 1 ? 0.62 : 1;
      pen.fillStyle = colours[kind] ?? css("other");
      pen.fillRect(x, y + 1, Math.max(0.4, wide - gap), row - 2);
      pen.globalAlpha = 1;
      if (i >= 0 && row >= 12 && wide > 7 * String(i).length + 4) {
        pen.fillStyle = ink;
        pen.fillText(i, x + wide / 2, y + row / 2 + 0.5);
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

function boxWords(canvas, px, py) {
  const found = chosen().timelines[canvas.dataset.boxes], left = labelWide(found), n = Math.floor(py / ROW(found.ranks.length));
  const time = (px - left) / (canvas.clientWidth - left) * Number(canvas.dataset.most);
  if (time < 0 || time > found.total || !found.spans[n]) return "";
  const span = found.spans[n].find(([, , , start, length]) => start <= time && time < start + length);
  const many = (t) => found.unit === "seconds" ? duration(t) : `${Number(t.toPrecision(3))} passes`;
  if (!span) return `<b>waiting</b>rank ${found.ranks[n]}, at ${many(time)}`;
  const [kind, stage, i, start, length] = span;
  const which = i >= 0 ? `micro-batch ${i}, stage ${stage}, ` : "";
  return `<b>${PASSES[kind] ?? kind}</b>${which}rank ${found.ranks[n]}: ${many(length)}, from ${many(start)} on`;
}
