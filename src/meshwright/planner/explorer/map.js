// The map of layouts: peak memory across, step time up, both in logarithms. Points come from Python.

// A half's points: {land, points, front, byLayout}.
function mapOf({landscape: land}) {
  const points = land.points.map(([fields, parts, peak], n) => {
    const layout = Object.fromEntries(land.fields.map((name, index) => [name, fields[index]]));
    layout.sp = Boolean(layout.sp);
    return {layout, parts, peak, step: parts.reduce((a, b) => a + b, 0), front: n < land.front};
  });
  return {
    land, points, front: points.slice(0, land.front),
    byLayout: new Map(points.map((point) => [layoutOption(point.layout), point])),
  };
}

const COLOURED = ["tp", "pp", "cp", "ep", "dp_shard", "zero", "micro_batch", "vp"].filter(
  (name) => name !== "ep" || lead.data.model.experts);
const fitsRoom = ({capacity}, bytes) => capacity === null || bytes <= capacity;

// Step 0 .. 6 of a colour ramp: degrees by powers of two, ZeRO stages as they are.
const shade = (name, degree) => Math.min(6, name === "zero" ? degree * 2 : Math.floor(Math.log2(degree)));

// The same axes in both halves.
function scaleOf(width, height) {
  const margin = {left: 52, right: 12, top: 24, bottom: 34};
  const range = (values) => {
    const low = Math.min(...values), high = Math.max(...values), room = Math.max(1.08, (high / low) ** 0.03);
    return [low / room, high * room];
  };
  const points = halves.flatMap((half) => half.points), rooms = halves.map((half) => half.capacity).filter(Boolean);
  const xs = range([...points.map((point) => point.peak), ...rooms]);
  const ys = range(points.map((point) => point.step));
  const position = (amount, [low, high], from, to) => from + Math.log(amount / low) / Math.log(high / low) * (to - from);
  return {
    margin, xs, ys, width, height,
    x: (bytes) => position(bytes, xs, margin.left, width - margin.right),
    y: (seconds) => position(seconds, ys, height - margin.bottom, margin.top),
  };
}

// 1, 2, 5, 10, ... inside a range; powers of ten alone where those are more than `most`.
function logTicks([low, high], maximum = 9) {
  const ticks = [];
  for (let unit = 10 ** Math.floor(Math.log10(low)); unit <= high; unit *= 10)
    ticks.push(...[1, 2, 5].map((n) => n * unit).filter((n) => n >= low && n <= high));
  return ticks.length > maximum ? ticks.filter((n) => /^[1]/.test(n.toExponential())) : ticks;
}

function drawMap(half) {
  const element = half.el("points"), {pen, width, height} = canvasOf(element), {points} = half;
  const scale = half.scale = scaleOf(width, height);
  drawAxes(pen, half);
  const name = half.el("colour").value;
  const colours = [...Array(7).keys()].map((n) => css(`deg${n}`));
  for (const point of [...points].reverse()) {
    pen.globalAlpha = fitsRoom(half, point.peak) ? 1 : 0.55;
    pen.fillStyle = colours[shade(name, point.layout[name])];
    pen.beginPath();
    pen.arc(scale.x(point.peak), scale.y(point.step), point.front ? 3.4 : 2, 0, 7);
    pen.fill();
  }
  pen.globalAlpha = 1;
  drawFront(pen, half);
  for (const point of half.front) ring(pen, scale, point, css("ink"), 3.4, 1);
  drawHere(pen, half);
  drawRamp(half, name, colours);
  const fitting = points.filter((point) => fitsRoom(half, point.peak)).length;
  element.setAttribute("aria-label", `${prefixWords(half)}${points.length} layouts by memory and step time, ${fitting} of them fit. ` +
    "Arrow keys walk along the fastest for their memory, Enter takes a layout.");
}

function drawAxes(pen, {scale, capacity}) {
  const {margin, width, height, x, y, xs, ys} = scale, floor = height - margin.bottom;
  if (capacity) {
    pen.fillStyle = css("zone");
    pen.fillRect(x(capacity), margin.top, width - margin.right - x(capacity), floor - margin.top);
    pen.fillStyle = css("alarm");
    const room = width - margin.right - x(capacity) > 120;
    pen.textAlign = room ? "left" : "right";
    pen.fillText("out of memory", x(capacity) + (room ? 6 : -6), margin.top + 12);
    line(pen, x(capacity), margin.top, x(capacity), floor, css("alarm"));
  }
  pen.fillStyle = css("faint");
  pen.textAlign = "center";
  for (const n of logTicks(xs.map((bytes) => bytes / GIB), Math.min(9, width / 40))) {
    line(pen, x(n * GIB), margin.top, x(n * GIB), floor, css("rule"));
    pen.fillText(n, x(n * GIB), floor + 14);
  }
  pen.fillText("GiB at the peak of the worst rank", (margin.left + width) / 2, height - 4);
  pen.textAlign = "right";
  for (const n of logTicks(ys)) {
    line(pen, margin.left, y(n), width - margin.right, y(n), css("rule"));
    pen.fillText(`${n < 1 ? Number(n.toPrecision(1)) : Math.round(n)} s`, margin.left - 5, y(n) + 4);
  }
  pen.textAlign = "left";
  pen.fillText("seconds per step \u2193 faster", 2, 12);
}

function line(pen, x0, y0, x1, y1, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

// Steps: what is above and right of them is beaten.
function drawFront(pen, {scale, front}) {
  pen.strokeStyle = css("ink");
  pen.lineWidth = 1.2;
  pen.beginPath();
  front.forEach((point, n) => {
    const [x, y] = [scale.x(point.peak), scale.y(point.step)];
    if (n === 0) return pen.moveTo(x, y);
    pen.lineTo(scale.x(front[n - 1].peak), y);
    pen.lineTo(x, y);
  });
  pen.stroke();
}

// The layout of the controls: a ring at its memory and time; where these are not on the map, a line at its memory.
function drawHere(pen, half) {
  const {scale, state, ranks, pointed} = half, legal = !violationsOf(half).length;
  const seconds = legal && sameRecipe(half) ? timeOf(half, state.recipe, state.layout) : null;
  if (seconds) {
    const peak = ranks[worstOf(ranks)].total;
    const inside = (amount, [low, high]) => Math.min(high, Math.max(low, amount));
    ring(pen, scale, {peak: inside(peak, scale.xs), step: inside(seconds, scale.ys)}, css("accent"), 7);
  } else if (legal) {
    const x = scale.x(ranks[worstOf(ranks)].total);
    pen.setLineDash([4, 3]);
    line(pen, x, scale.margin.top, x, scale.height - scale.margin.bottom, css("accent"));
    pen.setLineDash([]);
  }
  if (pointed) ring(pen, scale, pointed, css("ink"), 6);
}

function ring(pen, scale, point, colour, radius, width = 2.5) {
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.beginPath();
  pen.arc(scale.x(point.peak), scale.y(point.step), radius, 0, 7);
  pen.stroke();
}

function drawRamp({el, points}, name, colours) {
  const values = ascending(points.map((point) => point.layout[name]));
  const shades = ascending(values.map((degree) => shade(name, degree)));
  el("ramp").innerHTML = shades.map((n) => {
    const degrees = values.filter((degree) => shade(name, degree) === n), [low, high] = [degrees[0], degrees.at(-1)];
    return `<span><i class="chip" style="background:${colours[n]}"></i>${low === high ? low : `${low}-${high}`}</span>`;
  }).join("");
}

// The point within 14 pixels of the pointer; one on the front wins a near tie, since it is what a reader aims at.
function nearest({points, scale}, px, py) {
  let best = null, least = 14 ** 2;
  for (const point of points) {
    const away = (scale.x(point.peak) - px) ** 2 + (scale.y(point.step) - py) ** 2 - (point.front ? 6 : 0);
    if (away < least) [best, least] = [point, away];
  }
  return best;
}

function pointWords(half, point) {
  const {data: {recipe}, devices, land} = half;
  const parts = land.parts.map((name, n) => [name.replace(/_s$/, ""), point.parts[n]]).filter(([, s]) => s > 0)
    .map(([name, s]) => `${name} ${duration(s)} (${percent(s / point.step)})`).join(" \u00b7 ");
  const rate = recipe.sequence * recipe.global_batch / point.step / devices;
  return `<b>${escaped(layoutWords(point.layout))}</b> <button type="button" data-take>Use this layout</button><br>` +
    `${duration(point.step)} per step, MFU ${percent(mfuOf(half, recipe, point.step))}, ${Math.round(rate)} tokens/s per GPU; ` +
    `${gib(point.peak)}${fitsRoom(half, point.peak) ? "" : ", out of memory"}${point.front ? "; none beats it in both" : ""}<br>` +
    `<small>${parts}</small>`;
}

// A pointer shows a layout and a mouse click takes it; a tap shows it, and the button in the panel takes it.
function watchMap(half, take) {
  const element = half.el("points"), help = panel.boxOf(element), {front, land} = half;
  const point = (hit) => {
    if (!hit || hit === half.pointed) return;
    half.pointed = hit;
    drawMap(half);
    panel.show(pointWords(half, hit), element);
  };
  element.addEventListener("pointermove", (event) => point(nearest(half, event.offsetX, event.offsetY)));
  element.addEventListener("click", (event) => {
    const hit = nearest(half, event.offsetX, event.offsetY);
    point(hit);
    if (hit && event.pointerType !== "touch") take(half, hit);
  });
  help.addEventListener("click", (event) => event.target.matches("[data-take]") && half.pointed && take(half, half.pointed));
  element.addEventListener("keydown", (event) => {
    const step = {ArrowRight: -1, ArrowUp: -1, ArrowLeft: 1, ArrowDown: 1}[event.key];
    if (step) {
      event.preventDefault();
      const index = front.includes(half.pointed) ? front.indexOf(half.pointed) : land.start - step;
      point(front[Math.max(0, Math.min(front.length - 1, index + step))]);
    } else if (event.key === "Enter" && half.pointed) take(half, half.pointed);
  });
}
