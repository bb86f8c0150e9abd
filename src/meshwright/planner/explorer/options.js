// How another software's files state the layout of a half, from tables that Python made (planner/explorer/option_tables.py).

// File -> the lines by which another software states the layout of a half.
function optionLines({data: {software, model}, state: {recipe, layout}}) {
  const size = microBatchOf(model, layout, recipe), count = microBatches(model, layout, recipe);
  const values = {...valuesOf(recipe, layout), micro_batch: size, count, local_batch: size * count};
  return Object.entries(software.files).map(([file, options]) => [file, options
    .map(([, root]) => lookUp(software, root, values)).filter((text) => text !== null).map((text) => fillIn(text, values))]);
}

function showOptions(half) {
  const {software} = half.data, box = half.el("options");
  box.hidden = !software;
  if (!software) return;
  const errors = software.known_errors.map((error) => `<li>${escaped(error)}</li>`).join("");
  const opened = [...box.querySelectorAll("details")].map((details) => details.open);
  box.innerHTML = optionLines(half).map(([file, lines], n) =>
    `<details${opened[n] ?? n === 0 ? " open" : ""}><summary>${escaped(software.title)}: <b>${escaped(file)}</b> ` +
    `<span class="small">what this layout sets</span></summary>` +
    `<pre>${escaped(lines.join("\n"))}</pre><button type="button" data-copy>Copy options</button></details>`).join("") +
    `<ul class="small">${errors}</ul>`;
}
