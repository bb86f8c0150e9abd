figure("hierarchy", (data, view, {number}) => {
  const device = view.select({label: "device", values: Object.keys(data), value: "h100", show: (name) => data[name].title});
  const unit = view.select({label: "show", values: ["bytes per second", "bytes", "time of 1 MB"]});

  const scaled = (value, units) => {
    let power = 0;
    while (value >= 1000 && power < units.length - 1) { value /= 1000; power += 1; }
    return number(value, units[power]);
  };
  const size = (level) => level.bytes === null ? "not fixed" : scaled(level.bytes, ["B", "kB", "MB", "GB"]);
  const rate = (level) => level.rate === null ? "not known" : scaled(level.rate, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
  const time = (level) => level.microseconds === null ? "not known" : number(level.microseconds, "µs");
  const shown = {
    "bytes per second": ["rate", rate], "bytes": ["bytes", size], "time of 1 MB": ["microseconds", time],
  };

  view.draw(
    (width) => {
      const [key, written] = shown[unit.value];
      const {levels} = data[device.value];
      const known = levels.map((level) => level[key]).filter((value) => value !== null);
      const low = Math.log10(Math.min(...known)) - 0.5;
      // Lengths are logarithms: a rate spans three powers of ten.
      const rows = levels.map((level) => ({
        name: level.name, parts: [level[key] === null ? 0 : Math.log10(level[key]) - low], note: written(level),
      }));
      return view.bars(rows, {names: [`${unit.value}, on a logarithmic scale`], width});
    },
    () => {
      const {title, levels} = data[device.value];
      const [sram, , hbm, , host, network] = levels;
      return `${title}: SRAM is ${number(sram.rate / hbm.rate)} times as fast as HBM, and HBM ${number(hbm.rate / host.rate)} `
        + `times as fast as the way to the host${network.rate === null ? "" : `, ${number(hbm.rate / network.rate)} times as fast as the network`}. `
        + `But HBM holds ${number(hbm.bytes / sram.bytes)} times as much as SRAM.`;
    },
  );
});
