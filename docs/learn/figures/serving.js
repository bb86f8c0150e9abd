figure("serving", (data, view, {svg, html}) => {
  const step = view.steps({label: "step", count: () => data.steps.length - 1, value: 4, milliseconds: 500});
  // Five colours for ten requests: the second round is paler. The sixth colour is grey, which means something else here.
  const fill = (request) => `fill: var(--c${(request % 5) + 1})${request >= 5 ? "; opacity: .55" : ""}`;

  const grid = (count, width, cellOf, label) => {
    const size = 30, columns = Math.max(1, Math.floor(width / size));
    const drawing = svg("svg", {width, height: Math.ceil(count / columns) * size + 2, role: "img", "aria-label": label});
    for (let index = 0; index < count; index++) {
      const x = (index % columns) * size + 1, y = Math.floor(index / columns) * size + 1;
      drawing.append(svg("rect", {x, y, width: size - 3, height: size - 3, rx: 2, style: "fill: none; stroke: var(--faint)"}));
      for (const part of cellOf(index)) drawing.append(svg("rect", {
        x: x + part.from * (size - 3), y: y + (1 - part.high) * (size - 3), width: part.wide * (size - 3),
        height: part.high * (size - 3), style: part.style,
      }, svg("title", {}, part.title)));
      drawing.append(svg("text", {
        x: x + (size - 3) / 2, y: y + 18, "text-anchor": "middle",
        style: "paint-order: stroke; stroke: var(--paper, Canvas); stroke-width: 3px; stroke-linejoin: round",
      }, String(index)));
    }
    return drawing;
  };

  view.draw(
    (width) => {
      const {cells, rows, cached, host} = data.steps[step.value], known = new Set(cached), saved = new Set(host);
      const stale = {from: 0, wide: 1, high: 1, style: "fill: var(--faint); opacity: .35"};
      const blocks = grid(data.blocks, width, (index) => {
        const cell = cells[index];
        if (!cell) return known.has(index) ? [{...stale, title: "free, its content can still be found"}] : [];
        const colours = cell.requests.length === 1 && cell.holders > 1 ? [cell.requests[0], cell.requests[0]] : cell.requests;
        const gap = colours.length > 1 ? 0.05 : 0;
        return colours.map((request, part) => ({
          from: part / colours.length, wide: 1 / colours.length - gap, high: Math.max(0.1, cell.filled / data.block), style: fill(request),
          title: `held ${cell.holders} times, ${cell.filled} of ${data.block} positions`,
        }));
      }, `${Object.keys(cells).length} of ${data.blocks} blocks are held`);
      const slots = grid(data.host, width, (index) => saved.has(index) ? [{...stale, title: "content of a block"}] : [],
        `${host.length} of ${data.host} slots of host memory are used`);
      const named = ([request, number]) => `${request + 1}${number ? `, ${data.kinds[request] === "beams" ? "beam" : "answer"} ${number + 1}` : ""}`;
      const table = html("table", {class: "words"}, html("thead", {}, html("tr", {}, ["request", "state", "positions", "block table"].map(
        (cell) => html("th", {scope: "col"}, cell)))), html("tbody", {}, rows.map((row) => html("tr", {},
        html("td", {}, svg("svg", {width: 12, height: 11, style: "display: inline-block; margin-right: .3em"}, svg("rect", {width: 10, height: 10, style: fill(row[0])})), named(row)),
        html("td", {}, row[2]), html("td", {}, String(row[3] || "")), html("td", {style: "white-space: normal"}, row[4].join(" "))))));
      const title = (words) => html("p", {style: "margin: .5em 0 .2em"}, words);
      return [title("Blocks of the device"), blocks, title("Host memory"), slots, title("Tables"), table];
    },
    () => {
      const {cells, rows, moves, hits, preempted} = data.steps[step.value];
      const shared = Object.values(cells).filter((cell) => cell.holders > 1).length;
      const words = [`${Object.keys(cells).length} of ${data.blocks} blocks are held, ${shared} of them by more than one sequence; `
        + `${rows.filter((row) => row[2] === "waits" || row[2] === "preempted").length} waiting.`];
      if (hits) words.push(`${hits} tokens were in the cache.`);
      for (const request of preempted) words.push(`Request ${request + 1} is preempted: its blocks are needed.`);
      const count = (kind) => moves.filter((move) => move[0] === kind).length;
      for (const [kind, does] of [["copy", "copied before a write"], ["save", "saved in host memory"], ["load", "loaded from there"]])
        if (count(kind)) words.push(`${count(kind)} ${count(kind) === 1 ? "block" : "blocks"} ${does}.`);
      return words.join(" ");
    },
  );
});
