// How two halves differ in tokens per second, memory and money, in sentences.

// "1.84 times as many", or how close.
function timesWords(share) {
  if (Math.abs(share - 1) < 0.005) return "as many";
  if (share < 1) return `${(100 * (1 - share)).toPrecision(2)} % fewer`;
  return share < 2 ? `${(100 * (share - 1)).toPrecision(2)} % more` : `${share.toPrecision(3)} times as many`;
}

const roundedWords = (number) => Math.round(number).toLocaleString("en");

function speedWords(a, b) {
  if (!a.rate || !b.rate) return "The time of one of these states is not counted: choose layouts nearer to the first, or on the map.";
  const share = b.rate / a.rate;
  const than = Math.abs(share - 1) < 0.005 || share >= 2 ? "as" : "than";
  return `B makes ${timesWords(share)} tokens per second ${than} A: ${roundedWords(b.rate)} against ${roundedWords(a.rate)}.`;
}

function memoryWords(a, b) {
  const less = a.total - b.total, fit = halves.map((half, n) => verdictOf(half, [a, b][n].total)[1].toLowerCase());
  const comparison = Math.abs(less) < GIB / 20 ? "A GPU of B holds as much as one of A" :
    `A GPU of B holds ${gib(Math.abs(less))} ${less > 0 ? "less" : "more"} than one of A`;
  const rooms = [a, b].map(({total}, n) => gib(total) + (halves[n].capacity ? ` of ${gib(halves[n].capacity)}` : ""));
  return `${comparison}: ${rooms[1]} against ${rooms[0]}. ` + (fit[0] === fit[1] ? `Both: ${fit[0]}.` : `A: ${fit[0]}; B: ${fit[1]}.`);
}

function moneyWords(a, b) {
  if (!a.hours || !b.hours) return "";
  const hours = `${roundedWords(b.hours)} GPU-hours on B and ${roundedWords(a.hours)} on A`;
  if (a.usd === null || b.usd === null) {
    const unknown = halves.filter((half) => !half.data.price.usd_per_hour).map((half) => half.label).join(" and ");
    return `A billion tokens take ${hours}. No list price is known for ${unknown}: give --price or --beside price=.`;
  }
  const less = a.usd - b.usd, share = Math.abs(less) / a.usd;
  const difference = share < 0.005 ? "as much on B as on A" :
    `${dollars(Math.abs(less))} ${less > 0 ? "less" : "more"} on B than on A (${(100 * share).toPrecision(2)} %)`;
  return `A billion tokens cost about ${difference}: ${dollars(b.usd)} against ${dollars(a.usd)}; they take ${hours}.`;
}

// Fields in which the states differ.
function layoutDifferences() {
  const [first, second] = halves.map(({state}) => ({...state.recipe, ...state.layout}));
  const differ = Object.keys(first).filter((name) => first[name] !== second[name]);
  if (!differ.length) return "Both have the same layout.";
  return `The halves differ in ${differ.map((name) => `${name} (A ${first[name]}, B ${second[name]})`).join(", ")}.`;
}

const priceWords = ({label, data: {price}}) => price.usd_per_hour ?
  `${label}: ${dollars(price.usd_per_hour)} per GPU-hour${price.words ? ` (${price.words})` : ""}.` : `${label}: no price.`;

function showDifferences() {
  const box = byId("differences");
  box.hidden = !isPair;
  if (!isPair) return;
  const illegal = halves.filter((half) => violationsOf(half).length).map((half) => half.label);
  const [a, b] = illegal.length ? [] : halves.map(figuresOf);
  const sentences = illegal.length ?
    [`${illegal.join(" and ")} ${illegal.length > 1 ? "are" : "is"} not legal: there is nothing to compare.`] :
    [speedWords(a, b), memoryWords(a, b), moneyWords(a, b)];
  byId("differences-words").innerHTML = sentences.filter(Boolean).map((sentence) => `<p>${escaped(sentence)}</p>`).join("") +
    `<p class="small">${escaped(layoutDifferences())}</p><p class="small">${escaped(halves.map(priceWords).join(" "))}</p>`;
}
