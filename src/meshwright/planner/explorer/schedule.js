// Pipeline schedules as lists of actions, and what playing them shows: spec/schedule.py and spec/replay.py, ported.
// p ranks, m micro-batches, v stages of a rank. An action is {kind: F, B, W or BW, stage, i}.

const SCHEDULES = ["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"];
const V_PLACED = ["zb-v", "dualpipe-v"];
const SINGLE = ["afab", "1f1b"];

// Why there is no such schedule, in the words of spec/schedule.py; null where there is.
function refusal(name, p, m, v) {
  if (SINGLE.includes(name) && v !== 1)
    return `layout.schedule=${name} has one stage a rank, not vp=${v}: take vp=1 or schedule=interleaved`;
  if (V_PLACED.includes(name) && v !== 2)
    return `layout.schedule=${name} has two stages a rank, not vp=${v}: take vp=2`;
  if (name === "dualpipe-v" && m < 2 * p)
    return `layout.schedule=dualpipe-v wants 2 x pp = ${2 * p} micro-batches or more, not ${m}: ` +
      "make them smaller (layout.micro_batch), or take schedule=zb-v";
  const rounds = Math.max(1, Math.floor(m / p));
  if (v > 1 && !V_PLACED.includes(name) && m % rounds) {
    const lower = m - m % p;
    return `layout.schedule=${name} with vp=${v} runs ${m} micro-batches in ${rounds} rounds (one for ` +
      `each pp=${p}), which must be equal: take ${lower} or ${lower + p} micro-batches`;
  }
  return null;
}

// The actions of each rank.
function schedule(name, p, m, v) {
  const ranks = [...Array(p).keys()];
  if (name === "afab") return ranks.map((rank) => allForwardAllBackward(rank, m));
  if (name === "zb-v") return ranks.map((rank) => zeroBubbleV(rank, p, m));
  if (name === "dualpipe-v") return ranks.map((rank) => dualPipeV(rank, p, m));
  const hop = name === "interleaved" ? 2 : 1;
  return ranks.map((rank) => oneForwardOneBackward(rank, p, m, v, hop, name === "zb-h1"));
}

// The stages of a rank, ascending: round and round, or down and up again.
function stagesOf(name, p, v, rank) {
  if (V_PLACED.includes(name)) return [rank, 2 * p - 1 - rank];
  return [...Array(v).keys()].map((chunk) => chunk * p + rank);
}

function allForwardAllBackward(rank, m) {
  return ["F", "BW"].flatMap((kind) => [...Array(m).keys()].map((i) => ({kind, stage: rank, i})));
}

function oneForwardOneBackward(rank, p, m, v, hop, split) {
  const width = Math.floor(m / Math.max(1, Math.floor(m / p)));
  const order = [...Array(v * m).keys()].map(
    (n) => [Math.floor(n / width) % v, Math.floor(n / (width * v)) * width + n % width]);
  const forward = order.map(([chunk, i]) => ({kind: "F", stage: chunk * p + rank, i}));
  const backward = order.map(([chunk, i]) => ({stage: (v - 1 - chunk) * p + rank, i}));
  const ahead = Math.min((v - 1) * width + hop * (p - 1 - rank), v * m);
  const found = forward.slice(0, ahead);
  backward.forEach((place, n) => {
    if (ahead + n < forward.length) found.push(forward[ahead + n]);
    found.push({kind: split ? "B" : "BW", ...place});
    if (split && n >= rank) found.push({kind: "W", ...backward[n - rank]});
  });
  if (split) found.push(...backward.slice(Math.max(0, v * m - rank)).map((place) => ({kind: "W", ...place})));
  return found;
}

function zeroBubbleV(rank, p, m) {
  const n = Math.max(2 * p - 1, m);
  return spell([rank, 2 * p - 1 - rank], m, [
    ["F0", 2 * (p - rank) - 1], ["F1 F0", rank], ["F1 B1 W1", p - rank],
    ["F0 B0 W0 F1 B1 W1", n - 2 * p + rank + 1], ["B0 W0 F1 B1 W1", p - rank - 1],
    ["B0 B1", rank], ["B0 W0", p - rank], ["W1", rank], ["W0", rank],
  ]);
}

function dualPipeV(rank, p, m) {
  const tail = [...Array(2 * (rank + 1)).keys()].map((n) => `${n <= rank ? "BW" : "B"}${n % 2 ^ 1}`);
  return spell([rank, 2 * p - 1 - rank], m, [
    ["F0", 2 * (p - rank - 1)], ["F0 F1", rank + 1], ["B1 W F1", p - rank - 1],
    ["F0 BW1 F1 BW0", m - 2 * p + rank + 1], ["BW1 F1 BW0", p - rank - 1],
    [tail.join(" "), 1], ["W B0", p - rank - 1], ["W", rank + 1],
  ]);
}

// Words, each so many times: a digit is the place in `stages`, the micro-batch the next one; W alone is the oldest left.
function spell(stages, m, words) {
  const seen = {}, left = [], found = [];
  let oldest = 0;
  for (const [word, times] of words)
    for (let turn = 0; turn < times; turn++)
      for (const letter of word.split(" ")) {
        if (letter === "W") {
          found.push({kind: "W", ...left[oldest++]});
          continue;
        }
        const kind = letter.slice(0, -1), stage = stages[Number(letter.at(-1))];
        const counted = (kind === "BW" ? "B" : kind) + stage;
        const place = {stage, i: seen[counted] ?? 0};
        seen[counted] = place.i + 1;
        if (kind === "B") left.push(place);
        found.push({kind, ...place});
      }
  return found.filter((action) => action.i < m);
}

// When each action runs, and the bubble: (total - work of the busiest rank) / that work.
function replay(actions, times = {F: 1, B: 1, W: 1}) {
  const lengths = {...times, BW: times.B + times.W};
  const stages = 1 + Math.max(...actions.map((own) => Math.max(...own.map((action) => action.stage))));
  const m = 1 + Math.max(...actions[0].map((action) => action.i));
  const ends = {F: new Float64Array(stages * m).fill(NaN), B: new Float64Array(stages * m).fill(NaN)};
  const spans = actions.map(() => []), free = actions.map(() => 0);
  // When what an action reads has been made; NaN: not yet.
  const ready = ({kind, stage, i}) => {
    if (kind === "F") return stage ? ends.F[(stage - 1) * m + i] : 0;
    if (kind === "W") return ends.B[stage * m + i];
    const own = ends.F[stage * m + i];
    return stage + 1 < stages ? Math.max(own, ends.B[(stage + 1) * m + i]) : own;
  };
  for (let moved = true; moved;) {
    moved = false;
    actions.forEach((own, rank) => {
      for (let next = spans[rank].length; next < own.length; next++) {
        const action = own[next], made = ready(action);
        if (Number.isNaN(made)) break;
        const start = Math.max(free[rank], made), end = free[rank] = start + lengths[action.kind];
        spans[rank].push({...action, start, end});
        if (action.kind !== "W") ends[action.kind === "F" ? "F" : "B"][action.stage * m + action.i] = end;
        moved = true;
      }
    });
  }
  const total = Math.max(...free);
  const ideal = Math.max(...spans.map((own) => own.reduce((sum, span) => sum + span.end - span.start, 0)));
  return {spans, total, bubble: (total - ideal) / ideal, inFlight: actions.map(peak)};
}

// Most micro-batches of one stage each whose forward pass began and whose W or BW did not end.
function peak(own) {
  let alive = 0, most = 0;
  for (const {kind} of own) {
    most = Math.max(most, alive += kind === "F");
    alive -= kind === "W" || kind === "BW";
  }
  return most;
}

// The layers of each stage: as even as can be when embedding and head count as one layer each.
function stageLayers(layers, stages) {
  const share = Math.floor((layers + 2) / stages), left = (layers + 2) % stages;
  const ends = [0, stages - 1].filter((stage, n, all) => all.indexOf(stage) === n);
  const middle = [...Array(stages).keys()].filter((stage) => !ends.includes(stage));
  const sizes = Array(stages).fill(share);
  for (const stage of [...ends, ...middle].slice(0, left)) sizes[stage]++;
  sizes[0]--;
  sizes[stages - 1]--;
  let end = 0;
  return sizes.map((size) => ({start: end, end: end += size}));
}
