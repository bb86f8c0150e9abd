// What all charts share: the chosen run, axes, ticks, numbers.

const RUNS = PAGE.runs;
const SOURCES = [["planned", "planned"], ["dryrun", "dry run"], ["measured", "measured"]];
const state = {run: 0, along: "step", rank: null, sample: null};
const chosenRun = () => RUNS[state.run];
const colourOf = (n) => `var(--run${n % 6})`;

function shortNumber(n) {
  if (n === null || n === undefined) return "-";
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (Math.abs(n) >= size * 0.9995) return `${Number((n / size).toPrecision(3))}${letter}`;
  return String(Number(n.toPrecision(3)));
}

const figure = (n) => n === null || n === undefined ? "-" : Number(n.toPrecision(4)).toString();
const bytesWords = (bytes) => bytes >= 2 ** 20 ? gib(bytes) : bytes >= 1024 ? `${(bytes / 1024).toFixed(1)} KiB` : `${bytes} B`;

const BYTE_UNITS = [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const SECOND_UNITS = [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3], ["us", 1e-6]];
const digits = (n) => !n ? "0" : Math.abs(n) >= 999.5 ? Math.round(n).toLocaleString("en") : String(Number(n.toPrecision(3)));

// How the values of one row are said, in one unit: that of the largest.
function formatterOf(values, unit) {
  const units = {bytes: BYTE_UNITS, seconds: SECOND_UNITS}[unit], maximum = Math.max(...values.filter((number) => number !== null));
  if (!units) return (number) => unit === "share" ? percent(number) : unit === "calls" ? number.toLocaleString("en") : shortNumber(number);
  const [name, size] = units.find(([, unitSize]) => maximum >= (unit === "seconds" && unitSize > 1 ? 1.5 : 0.995) * unitSize) ?? units.at(-1);
  return (number) => `${digits(number / size)} ${name}`;
}

// Round steps between two values.
function ticks(low, high, about = 5) {
  const rough = (high - low) / about || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= rough * 0.999);
  const marks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) marks.push(Number((n * step).toPrecision(12)));
  return marks;
}

// One to three marks for each power of ten.
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.9) return ticks(low, high, 4).filter((n) => n > 0);
  const marks = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  const labels = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const mark of marks) if (mark * 10 ** power >= low && mark * 10 ** power <= high) labels.push(mark * 10 ** power);
  return labels.length > 1 ? labels : ticks(low, high, 4).filter((n) => n > 0);
}

// Memory and seconds in one unit along an axis.
function memoryTicks(maximum, about) {
  const unit = maximum >= GIB / 2 ? GIB : maximum >= 2 ** 19 ? 2 ** 20 : 2 ** 10;
  const name = {[GIB]: "GiB", [2 ** 20]: "MiB", [2 ** 10]: "KiB"}[unit];
  return [ticks(0, maximum / unit, about).map((n) => [n * unit, String(n)]), name];
}

function timeTicks(maximum, about) {
  const [unit, name] = maximum < 0.5 ? [1e-3, "ms"] : maximum < 300 ? [1, "s"] : maximum < 18000 ? [60, "min"] : [3600, "h"];
  return [ticks(0, maximum / unit, about).map((n) => [n * unit, String(n)]), name];
}

const absence = (words) => `<p class="none">${escaped(words)}</p>`;
const pairs = (list) => `<dl>${list.map(([name, words]) => `<dt>${name}</dt><dd>${words}</dd>`).join("")}</dl>`;
