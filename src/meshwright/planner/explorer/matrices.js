// Muon's matrices: planner/time/update_passes.py, ported. Elements of a layer of each kind come from Python in DATA.muon.

// [owned, gathered, scattered, updated, copies] of a rank with so many layers of each kind.
function elementsOf({moved}, layout, dense, routed) {
  const {tp, ep, cp, zero} = layout, ranks = degreeOfData(layout) * cp * tp;
  const [denseMoves, routedMoves] = moved[`${tp},${ep},${zero ? layout.dp_shard * cp : 1},${ranks}`];
  const elements = [0, 1, 2, 3].map((n) => dense * denseMoves[n] + routed * routedMoves[n]);
  return [...elements, Math.max(dense ? denseMoves[4] : 1, routed ? routedMoves[4] : 1)];
}

// Elements of matrices that a rank has in a round, at most.
const mostOf = ({largest, round}, copies) => Math.max(largest, Math.floor(round / roundHalfEven(copies)));

// Bytes of the most of a round.
function matrixBytes({muon}, layout, dense, routed) {
  if (!muon) return 0;
  const [owned, , , updated, copies] = elementsOf(muon, layout, dense, routed), {largest} = muon;
  if (!owned) return 0;
  const most = Math.min(mostOf(muon, copies), Math.max(largest, owned));
  const ranks = degreeOfData(layout) * layout.cp * layout.tp;
  const inside = Math.max(...muon.sizes.map(([numel, a, b, share]) =>
    Math.min(most, Math.max(numel, (dense * a + routed * b) / ranks)) * (1 + 2 * share)));
  const held = Math.max(most + inside, most * 2 * updated / owned);
  return Math.max(held * muon.width, Math.min(muon.at_once_bytes, 16 * Math.min(muon.widest, updated)));
}

// To the nearest number, of two the even one, as Python does.
function roundHalfEven(x) {
  const low = Math.floor(x), rest = x - low;
  return rest === 0.5 ? low + low % 2 : Math.round(x);
}
