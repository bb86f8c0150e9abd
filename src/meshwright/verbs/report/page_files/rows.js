// Traffic as bars, and the table of three columns.

// The largest exchange stands first: it is what a reader would change. Calls stand beside bytes, since many small ones cost time.
function drawTraffic() {
  const run = chosenRun(), box = byId("sent");
  const rows = run.comparison.rows.filter((row) => row.section === "traffic" && row.rank === run.comparison.rank);
  const bytes = rows.filter((row) => row.unit === "bytes");
  if (!bytes.length) {
    box.innerHTML = absence(run.world > 1 ? "No traffic is known." : "One process: it sends nothing.");
    return;
  }
  const calls = new Map(rows.filter((row) => row.unit === "calls").map((row) => [row.what, row]));
  const width = box.clientWidth, narrow = width < 480, left = narrow ? 0 : 150, right = 150, high = 9, step = 11;
  const shownSources = SOURCES.filter(([key]) => bytes.some((row) => row[key] !== null));
  const maximum = Math.max(1, ...bytes.flatMap((row) => SOURCES.map(([key]) => row[key] ?? 0)));
  const x = (size) => left + size / maximum * (width - left - right), parts = [];
  let y = 4;
  for (const row of [...bytes].sort((a, b) => Math.max(...SOURCES.map(([k]) => b[k] ?? 0)) - Math.max(...SOURCES.map(([k]) => a[k] ?? 0)))) {
    const middle = y + shownSources.length * step / 2 + 3, count = calls.get(row.what);
    if (narrow) {
      parts.push(`<text class="name" x="0" y="${y + 9}">${escaped(row.what)}</text>`);
      y += 14;
    } else parts.push(`<text class="name" x="${left - 12}" y="${middle}" text-anchor="end">${escaped(row.what)}</text>`);
    const from = y;
    for (const [key] of shownSources) {
      if (row[key] !== null) parts.push(`<rect data-sent="${escaped(row.what)}" x="${left}" y="${y}" height="${high}" rx="1.5" width="${Math.max(row[key] ? 1.5 : 0, x(row[key]) - left)}" fill="var(--${key})"/>`);
      y += step;
    }
    const best = row.measured ?? row.dryrun ?? row.planned, times = count.measured ?? count.dryrun ?? count.planned;
    const end = Math.max(...SOURCES.map(([key]) => x(row[key] ?? 0)));
    parts.push(`<text x="${end + 8}" y="${(from + y) / 2 + 3}">${bytesWords(best)}, ${times.toLocaleString("en")} call${times === 1 ? "" : "s"}</text>`);
    y += 10;
  }
  box.innerHTML = `<svg role="img" height="${y}" viewBox="0 0 ${width} ${y}" aria-label="Bytes sent by axis and collective">${parts.join("")}</svg>` +
    `<div class="legend">${shownSources.map(([key, title]) => `<span><i class="chip" style="background:var(--${key})"></i>${title}</span>`).join("")}` +
    `<span>rank ${run.comparison.rank}; axis and collective</span></div>`;
}

const SECTIONS = {memory: "Memory", traffic: "Traffic of a step", time: "Time of a step", use: "Use"};
const NAMES = {data: "waiting for text"};

// Rows of other ranks are left out while they agree; a difference is shown wherever it is.
function drawTable() {
  const run = chosenRun(), {rows, rank} = run.comparison;
  const near = rows.filter((row) => row.rank === null || row.rank === rank || row.what === "peak" || !row.agrees);
  const shown = near.filter((row) => SOURCES.some(([key]) => row[key] !== null));
  const shownSources = SOURCES.filter(([key]) => shown.some((row) => row[key] !== null));
  const head = `<thead><tr><th></th>${shownSources.map(([, title]) => `<th scope="col">${title}</th>`).join("")}</tr></thead>`;
  const groups = Object.entries(SECTIONS).map(([section, title]) => {
    const sectionRows = shown.filter((row) => row.section === section);
    if (!sectionRows.length) return "";
    const rankNote = section === "memory" || section === "traffic" ? run.pp > 1 ? ` of rank ${rank}` : "" : "";
    return `<tbody class="group"><tr><th class="head" colspan="${1 + shownSources.length}">${title}${rankNote}</th></tr>${sectionRows.map((row) => rowOf(row, run, shownSources)).join("")}</tbody>`;
  });
  byId("rows").innerHTML = head + groups.join("");
  const verdict = byId("verdict");
  verdict.className = run.comparison.agrees === false ? "bad" : "";
  verdict.innerHTML = run.verdict.map((line) => `<p>${escaped(line.trim())}</p>`).join("");
  byId("about").innerHTML = SOURCES.map(([key, title]) => `<div><b>${title}</b>: ${escaped(run.comparison.columns[key].about)}.</div>`).join("") +
    unknownWords(near.filter((row) => !shown.includes(row))) +
    `<div>Percentages: against the measured figure, or against the dry run where nothing was measured.</div>`;
}

// Rows of which nothing is known, in sentences: one for each reason.
function unknownWords(rows) {
  const reasons = new Map();
  for (const row of rows) {
    const why = [...new Set(Object.values(row.missing))].join("; ") || "not measured";
    reasons.set(why, [...(reasons.get(why) ?? []), NAMES[row.what] ?? row.what]);
  }
  return [...reasons].map(([why, names]) => `<div><b>Not known</b>: ${escaped([...new Set(names)].join(", "))} (${escaped(why)}).</div>`).join("");
}

function rowOf(row, run, shownSources) {
  const isOtherRank = row.rank !== null && row.rank !== run.comparison.rank, namesRank = run.pp > 1 && row.rank !== null && (row.what === "peak" || isOtherRank);
  const calls = row.unit === "calls" && !isOtherRank, name = calls ? "calls" : (NAMES[row.what] ?? row.what) + (namesRank ? `, rank ${row.rank}` : "");
  const total = row.what === "peak" || row.what === "step";
  const note = row.note ? ` <span class="small" data-why="${escaped(row.note)}" tabindex="0">*</span>` : "";
  const label = EXPLAIN[row.what] && row.section !== "traffic" ? explained(row.what, name) : escaped(name);
  const format = formatterOf(SOURCES.map(([key]) => row[key]), row.unit);
  const cells = shownSources.map(([key]) => {
    if (row[key] === null) return `<td class="unknown" data-why="${escaped(row.missing[key] ?? "")}" tabindex="0">-${key === "measured" ? "" : "<small></small>"}</td>`;
    return `<td>${format(row[key])}${key === "measured" ? "" : errorOf(row, key)}</td>`;
  });
  return `<tr class="${[row.agrees ? "" : "bad", calls ? "sub" : "", total ? "total" : ""].join(" ").trim()}"><th scope="row">${label}${note}</th>${cells.join("")}</tr>`;
}

function errorOf(row, key) {
  const error = row[`${key}_error`];
  if (row.reference === key || row.reference === null || row.aside.includes(key)) return "<small></small>";
  if (error === null) return "<small>new</small>";
  if (error === 0) return `<small class="same">=</small>`;
  const shown = 100 * error;
  return `<small${row.beyond.includes(key) ? ' class="beyond"' : ""}>${error > 0 ? "+" : "-"}${Math.abs(shown) < 9.95 ? Math.abs(shown).toFixed(1) : Math.round(Math.abs(shown)).toLocaleString("en")} %</small>`;
}
