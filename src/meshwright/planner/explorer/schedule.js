// Pipeline schedules as lists of actions, and what playing them shows. What a schedule is comes from Python
// (spec/layout/schedule.py): words and how often each repeats, or rounds; here they are written out.
// p ranks, m micro-batches, v stages of a rank. An action is {kind: F, B, W or BW, stage, i}.

// The actions of each rank.
function schedule(kind, p, m, v) {
  const write = kind.order.phrases ? actionsOfPhrases : actionsOfRounds;
  return [...Array(p).keys()].map((rank) => write(kind.order, stagesOf(kind, p, v, rank), rank, p, m, v));
}

// The stages of a rank, ascending: round and round, or down and up again.
function stagesOf(kind, p, v, rank) {
  if (kind.in_v) return [rank, 2 * p - 1 - rank];
  return [...Array(v).keys()].map((chunk) => chunk * p + rank);
}

function actionsOfRounds({hop, late}, stages, rank, p, m, v) {
  const width = Math.floor(m / Math.max(1, Math.floor(m / p)));
  const order = [...Array(v * m).keys()].map(
    (n) => [Math.floor(n / width) % v, Math.floor(n / (width * v)) * width + n % width]);
  const forward = order.map(([chunk, i]) => ({kind: "F", stage: stages[chunk], i}));
  const backward = order.map(([chunk, i]) => ({stage: stages[v - 1 - chunk], i}));
  const ahead = Math.min((v - 1) * width + hop * (p - 1 - rank), v * m);
  const actions = forward.slice(0, ahead);
  backward.forEach((pass, n) => {
    if (ahead + n < forward.length) actions.push(forward[ahead + n]);
    actions.push({kind: late ? "B" : "BW", ...pass});
    if (late && n >= rank) actions.push({kind: "W", ...backward[n - rank]});
  });
  if (late) actions.push(...backward.slice(Math.max(0, v * m - rank)).map((pass) => ({kind: "W", ...pass})));
  return actions;
}

// How often: base + p * ranks + m * micro-batches + r * rank.
const timesOf = ([base, ofRanks, ofMicroBatches, ofRank], p, m, rank) =>
  base + ofRanks * p + ofMicroBatches * m + ofRank * rank;

// A digit is the place in `stages`, ~ the places 1, 0, 1, ...; the micro-batch is the next one; W alone is the oldest left.
function actionsOfPhrases({phrases, fewest}, stages, rank, p, m) {
  const seen = {}, waiting = [], actions = [], enough = Math.max(m, timesOf(fewest, p, m, rank));
  let oldest = 0, turn = 1;
  for (const [word, times] of phrases)
    for (let repeats = timesOf(times, p, enough, rank); repeats > 0; repeats--)
      for (const letter of word.split(" ")) {
        if (letter === "W") {
          actions.push({kind: "W", ...waiting[oldest++]});
          continue;
        }
        const kind = letter.slice(0, -1), digit = letter.at(-1);
        const stage = stages[digit === "~" ? turn : Number(digit)];
        if (digit === "~") turn = 1 - turn;
        const counted = (kind === "BW" ? "B" : kind) + stage;
        const pass = {stage, i: seen[counted] ?? 0};
        seen[counted] = pass.i + 1;
        if (kind === "B") waiting.push(pass);
        actions.push({kind, ...pass});
      }
  return actions.filter((action) => action.i < m);
}

// When each action runs, and the bubble: (total - work of the busiest rank) / that work.
function replay(actions, times = {F: 1, B: 1, W: 1}) {
  const lengths = {...times, BW: times.B + times.W};
  const stages = 1 + Math.max(...actions.map((list) => Math.max(...list.map((action) => action.stage))));
  const m = 1 + Math.max(...actions[0].map((action) => action.i));
  const ends = {F: new Float64Array(stages * m).fill(NaN), B: new Float64Array(stages * m).fill(NaN)};
  const spans = actions.map(() => []), free = actions.map(() => 0);
  // When what an action reads has been made; NaN: not yet.
  const ready = ({kind, stage, i}) => {
    if (kind === "F") return stage ? ends.F[(stage - 1) * m + i] : 0;
    if (kind === "W") return ends.B[stage * m + i];
    const forward = ends.F[stage * m + i];
    return stage + 1 < stages ? Math.max(forward, ends.B[(stage + 1) * m + i]) : forward;
  };
  for (let hasMoved = true; hasMoved;) {
    hasMoved = false;
    actions.forEach((list, rank) => {
      for (let next = spans[rank].length; next < list.length; next++) {
        const action = list[next], readyAt = ready(action);
        if (Number.isNaN(readyAt)) break;
        const start = Math.max(free[rank], readyAt), end = free[rank] = start + lengths[action.kind];
        spans[rank].push({...action, start, end});
        if (action.kind !== "W") ends[action.kind === "F" ? "F" : "B"][action.stage * m + action.i] = end;
        hasMoved = true;
      }
    });
  }
  const total = Math.max(...free);
  const ideal = Math.max(...spans.map((list) => list.reduce((sum, span) => sum + span.end - span.start, 0)));
  return {spans, total, bubble: (total - ideal) / ideal, inFlight: actions.map(peak)};
}

// Most micro-batches of one stage each whose forward pass began and whose W or BW did not end.
function peak(actions) {
  let alive = 0, highest = 0;
  for (const {kind} of actions) {
    highest = Math.max(highest, alive += kind === "F");
    alive -= kind === "W" || kind === "BW";
  }
  return highest;
}

// The layers of each stage, from Python's table: runs of stages with as many layers each.
function stageLayers({stages}, number) {
  let end = 0;
  return stages[number].flatMap(([times, layers]) =>
    [...Array(times)].map(() => ({start: end, end: end += layers})));
}
