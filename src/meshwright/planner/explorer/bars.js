// Stacked memory bars, one for each pipeline rank, with the device's capacity; beside them the worst rank's kinds.

const capacity = DATA.cluster.usable_bytes; // null: not known
const worstOf = (ranks) => ranks.reduce((worst, rank, n) => rank.total > ranks[worst].total ? n : worst, 0);

// Round steps for an axis up to `most`.
function ticks(most, about = 5) {
  const rough = most / about, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  return [...Array(Math.floor(most / step) + 1).keys()].map((n) => n * step);
}

function drawBars(ranks, legal) {
  const svg = document.getElementById("bars");
  const width = Math.max(120, svg.clientWidth), height = Math.max(120, svg.clientHeight);
  const left = 44, right = 8, top = 14, bottom = 30;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.classList.toggle("illegal", !legal);
  if (!ranks) return;
  const most = 1.08 * Math.max(...ranks.map((rank) => rank.total), DATA.cluster.memory_bytes);
  const y = (bytes) => height - bottom - bytes / most * (height - top - bottom);
  const parts = ticks(most / GIB).map((n) =>
    `<line class="axis" x1="${left}" x2="${width - right}" y1="${y(n * GIB)}" y2="${y(n * GIB)}"/>` +
    `<text x="${left - 6}" y="${y(n * GIB) + 4}" text-anchor="end">${n}</text>`);
  parts.push(`<text x="4" y="10">GiB</text>`);
  const slot = (width - left - right) / ranks.length, wide = Math.min(90, slot * 0.82);
  const labels = Math.ceil(22 / slot);
  ranks.forEach((rank, n) => parts.push(barOf(rank, n, left + slot * (n + 0.5) - wide / 2, wide, y, n % labels === 0)));
  parts.push(`<text x="${width - right}" y="${height - 2}" text-anchor="end">pipeline rank</text>`);
  if (capacity) {
    const [line, end] = [y(capacity), width - right];
    parts.push(`<g data-explain="capacity"><line class="limit" x1="${left}" x2="${end}" y1="${line}" y2="${line}"/>` +
      `<text class="limit-words" x="${end}" y="${line - 4}" text-anchor="end">` +
      `${DATA.cluster.device}: ${gib(capacity)} usable</text></g>`);
  }
  svg.innerHTML = parts.join("");
  const worst = ranks[worstOf(ranks)];
  svg.setAttribute("aria-label", `Memory of ${ranks.length} pipeline ranks; the largest ${gib(worst.total)}`);
}

function barOf(rank, n, x, wide, y, labelled) {
  let sum = 0;
  const rects = KINDS.filter((kind) => rank.kinds[kind] > 0).map((kind) => {
    const low = sum;
    sum += rank.kinds[kind];
    return `<rect class="part" data-kind="${kind}" x="${x}" width="${wide}" y="${y(sum)}" ` +
      `height="${Math.max(0, y(low) - y(sum))}" fill="var(--${kind})"/>`;
  });
  const label = labelled ? `<text x="${x + wide / 2}" y="${y(0) + 14}" text-anchor="middle">${n}</text>` : "";
  return `<g class="rank" data-rank="${n}" tabindex="0" aria-label="pipeline rank ${n}: ${gib(sum)}">` +
    `${rects.join("")}${label}</g>`;
}

function drawKinds(ranks) {
  const table = document.getElementById("kinds");
  if (!ranks) {
    table.tBodies[0].innerHTML = "";
    table.caption.textContent = "";
    return;
  }
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
  const list = KINDS.filter((one) => rank.kinds[one] > 0).reverse()
    .map((one) => `<dt>${one === kind ? `&#9656; ${one}` : one}</dt><dd>${gib(rank.kinds[one])}</dd>`).join("");
  const more = kind ? `<br>${explanation(kind)}` : "";
  return `<b>Pipeline rank ${n}: ${gib(rank.total)}, ${rank.when}</b><dl>${list}</dl>${more}`;
}
