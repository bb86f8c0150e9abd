figure("flash_tiles", (data, view, {svg, html, bytes, number}) => {
  const mask = view.select({label: "a query sees", values: Object.keys(data.masks), value: "causal"});
  const tiles = view.slider({label: "tiles of the sequence", values: [2, 3, 4, 5, 6, 8], value: 4});
  const run = () => data.masks[mask.value][tiles.value];
  const step = view.steps({label: "step", count: () => run().steps.length, value: 5, milliseconds: 600});

  view.draw(
    (width) => {
      const LEFT = 60, side = Math.min(width - LEFT - 10, 260), cell = side / tiles.value;
      const drawing = svg("svg", {width, height: side + 24, role: "img", "aria-label": sentence()});
      const done = new Set(run().steps.slice(0, step.value).map(([query, key]) => `${query} ${key}`));
      const seen = new Set(run().steps.map(([query, key]) => `${query} ${key}`));
      const now = step.value ? run().steps[step.value - 1] : null;
      drawing.append(svg("text", {x: LEFT, y: 11, class: "faint"}, `keys, ${data.tile} in a tile`));
      for (let query = 0; query < tiles.value; query += 1) {
        drawing.append(svg("text", {x: 0, y: 24 + query * cell + cell / 2, class: "faint"}, `queries ${query}`));
        for (let key = 0; key < tiles.value; key += 1) {
          const name = `${query} ${key}`, current = now && now[0] === query && now[1] === key;
          const fill = current ? "var(--c2)" : done.has(name) ? "var(--c1)" : "none";
          drawing.append(svg("rect", {
            x: LEFT + key * cell, y: 18 + query * cell, width: cell - 2, height: cell - 2, rx: 2,
            style: `fill: ${fill}; stroke: var(--faint)`, "stroke-dasharray": seen.has(name) ? undefined : "2 3",
          }));
        }
      }
      const bars = view.bars([
        {name: "plain: S and P go to memory and back", parts: [run().plain], note: bytes(run().plain)},
        {name: "tiles, so far", parts: [now ? now[4] : 0], note: bytes(now ? now[4] : 0)},
      ], {names: ["bytes read and written"], width});
      return [drawing, bars].flat();
    },
    () => sentence(),
  );

  function sentence() {
    const {steps, plain, stored} = run();
    const skipped = tiles.value ** 2 - steps.length;
    if (!step.value) {
      return `${steps.length} steps; ${skipped} tiles are hidden and skipped. The plain form stores ${bytes(stored)} of scores, tiles store none.`;
    }
    const [query, key, read, written, , largest, total] = steps[step.value - 1];
    const end = step.value === steps.length ? ` In all ${number(100 * steps.at(-1)[4] / plain)} % of the plain form's bytes.` : "";
    return `Step ${step.value}: queries ${query} meet keys ${key}. Read ${bytes(read)}, written ${bytes(written)}. `
      + `Of the tile's last query the largest score so far is ${number(largest)}, and the sum of exponentials ${number(total)}.${end}`;
  }
});
