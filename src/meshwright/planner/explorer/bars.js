// Stacked memory bars, one for each pipeline rank, with the device's capacity; beside them the worst rank's kinds.

const worstOf = (ranks) => ranks.reduce((worst, rank, n) => rank.total > ranks[worst].total ? n : worst, 0);

// Round steps for an axis up to `most`.
function ticks(maximum, about = 5) {
  const rough = maximum / about, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  return [...Array(Math.floor(maximum / step) + 1).keys()].map((n) => n * step);
}

// The four ZeRO stages of the state: {zero, ranks} where legal.
function zeroStages(half) {
  const {state, data} = half;
  return [0, 1, 2, 3].map((zero) => {
    const next = zero === state.layout.zero ? state : withValue(half, state, "zero", zero);
    const legal = !violations(data.model, next.recipe, next.layout).length;
    return {zero, next, rank: legal ? memoryOf(data, next.recipe, next.layout)[0] : null};
  });
}

// {rank, stage}: of a half that is legal.
function barsIn(half) {
  const {ranks, state} = half;
  if (!ranks || violationsOf(half).length) return [];
  if (ranks.length > 1 || dpOf(half, state.layout) === 1) return ranks.map((rank) => ({rank}));
  return zeroStages(half).map(({zero, rank}) => ({rank, stage: zero}));
}

// Without a pipeline all GPUs hold as much: what the ZeRO stages would make of it is shown instead.
function drawBars(half) {
  const {ranks, state, capacity, data: {cluster}} = half;
  const svg = half.el("bars"), width = Math.max(120, svg.clientWidth), height = Math.max(120, svg.clientHeight);
  const bars = barsIn(half), stages = bars.filter(({stage}) => stage !== undefined);
  const left = 44, right = 8, top = 30, bottom = 34;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const maximum = 1.06 * Math.max(...halves.flatMap((half) => [half.data.cluster.memory_bytes,
    ...barsIn(half).map(({rank}) => rank?.total ?? 0)])); // the same axis in both halves
  const y = (bytes) => height - bottom - bytes / maximum * (height - top - bottom);
  const parts = ticks(maximum / GIB).map((n) =>
    `<line class="axis" x1="${left}" x2="${width - right}" y1="${y(n * GIB)}" y2="${y(n * GIB)}"/>` +
    `<text x="${left - 6}" y="${y(n * GIB) + 4}" text-anchor="end">${n}</text>`);
  parts.push(`<text x="4" y="12">GiB</text>`);
  const slot = (width - left - right) / bars.length, barWidth = Math.min(90, slot * 0.78), labels = Math.ceil(22 / slot);
  const leftOf = (n) => left + slot * (n + 0.5) - barWidth / 2;
  bars.forEach(({rank, stage}, n) => {
    if (rank) parts.push(barOf(rank, stage === undefined ? n : 0, leftOf(n), barWidth, y, stage, stage === state.layout.zero));
    if (stage !== undefined) parts.push(stageLabel(stage, rank, leftOf(n) + barWidth / 2, y, slot, stage === state.layout.zero));
    else if (n % labels === 0) parts.push(`<text x="${leftOf(n) + barWidth / 2}" y="${y(0) + 14}" text-anchor="middle">${n}</text>`);
  });
  if (!stages.length) parts.push(`<text x="${width - right}" y="${height - 3}" text-anchor="end">pipeline rank</text>`);
  if (capacity) {
    const [line, end] = [y(capacity), width - right];
    parts.push(`<line class="limit" x1="${left}" x2="${end}" y1="${line}" y2="${line}"/>` +
      `<g data-explain="capacity" tabindex="0"><line class="limit" x1="${left}" x2="${left + 22}" y1="8" y2="8"/>` +
      `<text class="limit-words" x="${left + 28}" y="12">${gib(capacity)} usable of ${cluster.device}</text></g>`);
  }
  svg.innerHTML = parts.join("");
  const worst = ranks[worstOf(ranks)];
  svg.setAttribute("aria-label", stages.length ? `Memory under the four ZeRO stages; this one ${gib(worst.total)}` :
    `Memory of ${ranks.length} pipeline ranks; the largest ${gib(worst.total)}`);
  half.el("memory-title").textContent = prefixWords(half) +
    (stages.length ? "Memory of one GPU, by ZeRO stage" : "Memory of one GPU of each pipeline rank");
}

function stageLabel(stage, rank, x, y, slot, isCurrent) {
  const words = rank ? (rank.total / GIB).toFixed(1) : "not legal";
  return `<text class="${isCurrent ? "own" : ""}" x="${x}" y="${rank ? y(rank.total) - 5 : y(0) - 5}" text-anchor="middle">${words}</text>` +
    `<text class="${isCurrent ? "own" : ""}" x="${x}" y="${y(0) + 14}" text-anchor="middle">ZeRO ${stage}</text>` +
    (isCurrent ? `<text class="own" x="${x}" y="${y(0) + 27}" text-anchor="middle">${slot > 60 ? "\u25b2 chosen" : "\u25b2"}</text>` : "");
}

function barOf(rank, n, x, width, y, stage, isCurrent) {
  let sum = 0;
  const rects = KINDS.filter((kind) => rank.kinds[kind] > 0).map((kind) => {
    const low = sum;
    sum += rank.kinds[kind];
    return `<rect class="part" data-kind="${kind}" x="${x}" width="${width}" y="${y(sum)}" ` +
      `height="${Math.max(0, y(low) - y(sum))}" fill="var(--${kind})"/>`;
  });
  if (stage === undefined)
    return `<g class="rank" data-rank="${n}" tabindex="0" role="img" aria-label="pipeline rank ${n}: ${gib(sum)}">${rects.join("")}</g>`;
  const choice = isCurrent ? ` class="rank" data-rank="0"` : ` class="stage"`;
  return `<g${choice} data-stage="${stage}" tabindex="0" role="button" aria-pressed="${isCurrent}" aria-label="ZeRO ${stage}: ${gib(sum)}">` +
    `${rects.join("")}</g>`;
}

// What a ZeRO stage's bar says.
function stageWords(half, stage, kind) {
  const {rank, next} = zeroStages(half)[stage];
  if (!rank) return "";
  const seconds = timeOf(half, next.recipe, next.layout), time = seconds ? `, ${duration(seconds)} per step` : "";
  return `<b>ZeRO ${stage}: ${gib(rank.total)}${time}.</b> ` +
    (stage === half.state.layout.zero ? "" : "Click or press Enter to take it. ") + (kind ? explanation(kind) : EXPLAIN.zero[1]);
}

// All kinds have a row, those of zero bytes too, so that the table does not jump while a slider moves.
function drawKinds({el, ranks}) {
  const table = el("kinds");
  const n = worstOf(ranks), worst = ranks[n];
  table.caption.textContent = `Pipeline rank ${n}${ranks.length > 1 ? " (worst)" : ""}, ${worst.when}`;
  const rows = KINDS.map((kind) => [kind, worst.kinds[kind] ?? 0]).reverse();
  table.tBodies[0].innerHTML = rows.map(([kind, bytes]) =>
    `<tr class="${bytes ? "" : "none"}"><th data-explain="${kind}" tabindex="0" scope="row">` +
    `<i class="chip" style="background:var(--${kind})"></i>${kind}</th><td>${bytes ? gib(bytes) : "-"}</td></tr>`).join("") +
    `<tr class="total"><th data-explain="total" tabindex="0" scope="row">total</th><td>${gib(worst.total)}</td></tr>`;
}

// What a rank's bar says when pointed at.
function rankWords(rank, n, kind) {
  const list = KINDS.filter((kind) => rank.kinds[kind] > 0).reverse()
    .map((name) => `<dt>${name === kind ? `&#9656; ${name}` : name}</dt><dd>${gib(rank.kinds[name])}</dd>`).join("");
  const meaning = kind ? explanation(kind) : "";
  return `<b>Pipeline rank ${n}: ${gib(rank.total)}, ${rank.when}</b><dl>${list}</dl>${meaning}`;
}
