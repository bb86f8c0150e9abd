figure("pipelines", (data, view, {svg, number}) => {
  const name = view.select({label: "schedule", values: Object.keys(data.schedules), value: "1f1b"});
  const ranks = view.slider({label: "p, ranks", values: data.ranks, value: 4});
  const batches = view.slider({label: "m, micro-batches", values: data.micro_batches, value: 8});
  const stages = view.slider({label: "v, stages per rank (interleaved)", values: [2, 3], value: 2});
  const virtual = () => data.stages[name.value].includes(stages.value) ? stages.value : data.stages[name.value][0];
  const run = () => data.schedules[name.value][`${ranks.value} ${batches.value} ${virtual()}`];
  // Colours are those of the explorer and of the picture. Later stages of a rank are paler, so that a chunk is seen to come back.
  const PALE = 0.5;
  const colours = {F: "var(--c1)", B: "var(--c3)", BW: "var(--c3)", W: "var(--c5)"};

  view.draw(
    (width) => {
      const label = sentence();
      stages.enable(data.stages[name.value].length > 1);
      if (!run()) return svg("svg", {width, height: 24, role: "img", "aria-label": label}, svg("text", {x: 0, y: 14}, "refused"));
      const high = 30, left = 46, scale = (width - left - 4) / run().total;
      const drawing = svg("svg", {width, height: ranks.value * high + 4, role: "img", "aria-label": label});
      run().spans.forEach((spans, rank) => {
        drawing.append(svg("text", {x: 0, y: rank * high + 18}, `rank ${rank}`));
        for (const [kind, stage, micro, start, length] of spans) {
          const x = left + start * scale, wide = length * scale;
          drawing.append(svg("rect", {
            x, y: rank * high + 3, width: Math.max(0.5, wide - 0.8), height: high - 8, style: `fill: ${colours[kind]}`,
            "fill-opacity": stage >= ranks.value ? PALE : 1,
          }, svg("title", {}, `${kind} of stage ${stage}, micro-batch ${micro}`)));
          if (wide > 3 + 7 * String(micro).length) {
            const shade = stage >= ranks.value ? undefined : "on";
            drawing.append(svg("text", {x: x + wide / 2, y: rank * high + 18, class: shade, "text-anchor": "middle"}, micro));
          }
        }
      });
      return [drawing, view.legend(
        ["F", "B or BW", "W", "paler: a later stage of the rank"],
        [colours.F, colours.B, colours.W, "color-mix(in srgb, var(--ink) 30%, transparent)"],
      )];
    },
    () => sentence(),
  );

  function sentence() {
    const v = virtual(), what = `${name.value} with p = ${ranks.value}, m = ${batches.value}, v = ${v}`;
    if (!run()) return `${what} is refused: the schedule needs other numbers of micro-batches.`;
    const {bubble, kept} = run();
    return `${what}: bubble ${number(100 * bubble)} % of the work. A rank keeps at most ${number(Math.max(...kept))} `
      + `micro-batches.`;
  }
});
