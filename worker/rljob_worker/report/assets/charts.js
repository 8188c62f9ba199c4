"use strict";
// The charts of a report: one for each panel, all with the same steps, and the table of phases over the steps shown.
const report = (() => {
  const SYNC = "steps";
  // Ticks and lines at whole steps alone, and half a step beside the first and the last, so that their bars are whole.
  const STEP_AXIS = { label: "step", labelSize: 18, incrs: Array.from({ length: 30 }, (unused, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)) };
  const EDGE = 0.5;
  const DASHED = [6, 4];
  const DOTTED = [2, 3];
  const MOST_BARS = 400;
  const LEAST_WIDTH = 240;
  const byId = (id) => document.getElementById(id);
  let runs = [];
  let charts = [];
  let range = null;
  let extra = [];

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function short(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
  }

  const seconds = (value) => (value === null || value === undefined ? "-" : value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`);

  // Several runs have other steps: uPlot joins them, with null where one has none.
  function joined(columns) {
    return uPlot.join(runs.map((run, index) => [run.steps, ...columns[index]]));
  }

  function scaled(panel, values) {
    const given = values.flat().filter((value) => value !== null && value !== undefined);
    // Where all are 0, an axis to 1 says so; uPlot's own would go to 100, and one that fits noise to 1e-9.
    if (given.every((value) => value === 0)) return { range: () => [panel.unit === "share" ? 0 : -1, 1.06] };
    if (!panel.log) return panel.unit === "share" ? { range: (chart, low, high) => [0, high * 1.06] } : {};
    const magnitudes = given.filter((value) => value !== 0).map((value) => Math.floor(Math.log10(Math.abs(value))));
    return { distr: 4, asinh: 10 ** magnitudes.reduce((a, b) => Math.min(a, b)) };
  }

  // Ticks of a logarithmic axis: powers of ten, and 2 and 5 times those where there are few. uPlot's own never end for
  // some ranges: from 9.6e-8 on they come to a step that it takes for 0.
  function powers(least, low, high) {
    const first = Math.round(Math.log10(least));
    const last = Math.floor(Math.log10(Math.max(-low, high, least)));
    const every = Math.ceil((last - first + 1) / 7);
    const ticks = [];
    for (let power = first; power <= last; power += every) {
      for (const part of last - first < 3 ? [1, 2, 5] : [1]) ticks.push(part * 10 ** power);
    }
    return [...ticks.map((tick) => -tick).reverse(), 0, ...ticks].filter((tick) => tick >= low && tick <= high);
  }

  function valueAxis(scale) {
    const values = (chart, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
    if (!scale.asinh) return { size: 72, values };
    return { size: 72, values, filter: (chart, ticks) => ticks, splits: (chart, axis, low, high) => powers(scale.asinh, low, high) };
  }

  function named(label, index) {
    return runs.length > 1 ? `${label} (${index ? `${runs[index].name}, dashed` : "this"})` : label;
  }

  function curveSeries(panel) {
    const series = [{ label: "step" }];
    const columns = runs.map(() => []);
    runs.forEach((run, index) => {
      for (const curve of panel.curves) {
        const values = run.metrics[curve.metric];
        if (!values) continue;
        columns[index].push(values);
        series.push({
          label: named(curve.label, index),
          stroke: curve.color,
          width: curve.thin ? 0.5 : 1.5,
          dash: index ? DASHED : curve.sparse ? DOTTED : undefined,
          spanGaps: true,
          points: { show: Boolean(curve.sparse) || run.steps.length <= 40 },
          value: (chart, value) => short(value),
        });
      }
    });
    return { series, columns };
  }

  function onScale(chart, key) {
    if (key !== "x") return;
    const { min, max } = chart.scales.x;
    if (range && min === range[0] && max === range[1]) return;
    if (min === null || min === undefined) return;
    show([min, max]);
  }

  function restarts(chart) {
    const run = runs[0];
    const context = chart.ctx;
    context.save();
    context.strokeStyle = "#000";
    context.setLineDash([2, 4]);
    for (let index = 1; index < run.steps.length; index += 1) {
      if (run.attempts[index] === run.attempts[index - 1]) continue;
      const at = chart.valToPos(run.steps[index] - 0.5, "x", true);
      if (at < chart.bbox.left || at > chart.bbox.left + chart.bbox.width) continue;
      context.beginPath();
      context.moveTo(at, chart.bbox.top);
      context.lineTo(at, chart.bbox.top + chart.bbox.height);
      context.stroke();
    }
    context.restore();
  }

  function draw(place, title, unit, series, data, options) {
    const scale = options.scale || {};
    const box = element("div", undefined, options.wide ? "chart wide" : "chart");
    box.dataset.title = title;
    place.append(box);
    const chart = new uPlot({
      title,
      width: Math.max(LEAST_WIDTH, box.clientWidth),
      height: options.wide ? 320 : 240,
      series,
      cursor: { sync: { key: SYNC }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: scale },
      axes: [STEP_AXIS, valueAxis(scale)],
      hooks: { setScale: [onScale], draw: [restarts] },
      legend: { live: true, markers: { dash: (chart, index) => ({ [DASHED]: "dashed", [DOTTED]: "dotted" })[series[index].dash] || "solid" } },
    }, data, box);
    // Not along the axis, where a long one lies over the numbers.
    if (unit) chart.root.querySelector(".u-title").append(element("span", unit, "unit"));
    charts.push(chart);
    return chart;
  }

  function drawPanel(place, panel) {
    const { series, columns } = curveSeries(panel);
    if (series.length < 2) return;
    const data = joined(columns);
    draw(place, panel.title, panel.unit, series, data, { scale: scaled(panel, data.slice(1)), wide: panel.wide });
  }

  // A first step that compiles, or one that waited, must not make all others flat: it is cut, and its legend has the seconds.
  function tallest(values) {
    const sorted = [...values].sort((a, b) => a - b);
    const usual = 1.15 * quantile(sorted, 0.98);
    return sorted[sorted.length - 1] <= 1.5 * usual ? sorted[sorted.length - 1] : usual;
  }

  // Stacked: each area reaches from 0 to the sum so far, the tallest is drawn first, and the legend has the phase's own.
  function drawPhases(place, run, index) {
    const names = Object.keys(run.phases);
    const steps = [];
    const own = names.map(() => []);
    run.steps.forEach((step, at) => {
      if (!run.timed[at]) return;
      steps.push(step);
      names.forEach((name, row) => own[row].push(run.phases[name][at] || 0));
    });
    const sums = [];
    own.forEach((values, row) => sums.push(values.map((value, at) => value + (row ? sums[row - 1][at] : 0))));
    const paths = steps.length <= MOST_BARS ? uPlot.paths.bars({ size: [0.9], gap: 0 }) : uPlot.paths.stepped({ align: 1 });
    const series = [{ label: "step" }];
    const data = [steps];
    for (let row = names.length - 1; row >= 0; row -= 1) {
      const color = run.colors[names[row]] || "#525252";
      series.push({ label: names[row], stroke: color, fill: color, width: 0, paths, points: { show: false }, value: (chart, value, series, at) => (at === null || at === undefined ? "-" : seconds(own[row][at])) });
      data.push(sums[row]);
    }
    const title = runs.length > 1 ? `Where each step's time went: ${index ? run.name : "this run"}` : "Where each step's time went";
    const top = tallest(sums[sums.length - 1]);
    draw(place, title, "seconds", series, data, { wide: true, scale: { range: (chart, low, high) => [0, Math.min(high, top) * 1.05] } });
  }

  function quantile(sorted, share) {
    const position = (sorted.length - 1) * share;
    const low = Math.floor(position);
    const high = Math.min(low + 1, sorted.length - 1);
    return sorted[low] + (sorted[high] - sorted[low]) * (position - low);
  }

  function phaseRows(run) {
    const inside = run.steps.map((step, at) => run.timed[at] && step >= range[0] && step <= range[1]);
    const chosen = (values) => values.filter((value, at) => inside[at] && value !== null);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const whole = sum(chosen(run.seconds));
    return Object.entries(run.phases).map(([name, values]) => {
      const sorted = chosen(values).sort((a, b) => a - b);
      if (!sorted.length) return null;
      const total = sum(sorted);
      const ms = (value) => (1000 * value).toFixed(1);
      return [name, ms(quantile(sorted, 0.5)), ms(quantile(sorted, 0.95)), total.toFixed(2), whole ? `${(100 * total / whole).toFixed(1)} %` : "-", String(sorted.length)];
    }).filter(Boolean);
  }

  function fillTable(table, rows) {
    const body = table.tBodies[0];
    body.replaceChildren(...rows.map((row) => {
      const line = element("tr");
      line.append(...row.map((cell) => element("td", cell)));
      return line;
    }));
  }

  function showPhases() {
    const table = byId("phases");
    if (!table || Object.keys(runs[0].lanes).length) return;
    const other = runs.slice(1).flatMap((run) => phaseRows(run).map(([name, ...row]) => [`${name} (${run.name})`, ...row]));
    fillTable(table, [...phaseRows(runs[0]), ...other]);
  }

  function bounds() {
    const ends = runs.flatMap((run) => [run.steps[0], run.steps[run.steps.length - 1]]);
    return [Math.min(...ends) - EDGE, Math.max(...ends) + EDGE];
  }

  function show(wanted) {
    range = wanted;
    byId("first").value = Math.ceil(range[0]);
    byId("last").value = Math.floor(range[1]);
    for (const chart of charts) {
      const { min, max } = chart.scales.x;
      if (min !== range[0] || max !== range[1]) chart.setScale("x", { min: range[0], max: range[1] });
    }
    showPhases();
  }

  function drawAll() {
    const place = byId("charts");
    charts.forEach((chart) => chart.destroy());
    charts = [];
    place.replaceChildren();
    const [first, ...rest] = runs[0].panels;
    drawPanel(place, first);
    runs.forEach((run, index) => drawPhases(place, run, index));
    rest.forEach((panel) => drawPanel(place, panel));
    extra.forEach((metric) => drawPanel(place, { title: metric, unit: "", curves: [{ metric, label: metric, color: "#1f77b4" }] }));
  }

  function offerMetrics() {
    const select = byId("metrics");
    const offered = new Set([...select.options].map((option) => option.value));
    for (const name of Object.keys(runs[0].metrics).sort()) {
      if (offered.has(name)) continue;
      const option = element("option", name);
      option.value = name;
      select.append(option);
    }
  }

  function load(content) {
    const [low, high] = runs.length ? bounds() : [null, null];
    const followed = !range || (range[0] === low && range[1] === high);
    runs = content;
    drawAll();
    offerMetrics();
    show(followed ? bounds() : range);
  }

  function connect() {
    const asked = () => {
      const wanted = [Number(byId("first").value), Number(byId("last").value)];
      if (wanted[0] <= wanted[1]) show([wanted[0] - EDGE, wanted[1] + EDGE]);
    };
    byId("first").addEventListener("change", asked);
    byId("last").addEventListener("change", asked);
    byId("all").addEventListener("click", () => show(bounds()));
    byId("steps").addEventListener("submit", (event) => event.preventDefault());
    byId("metrics").addEventListener("change", (event) => {
      if (event.target.value && !extra.includes(event.target.value)) extra.push(event.target.value);
      event.target.value = "";
      load(runs);
      if (charts.length) charts[charts.length - 1].root.scrollIntoView({ block: "center" });
    });
    let asleep = 0;
    window.addEventListener("resize", () => {
      clearTimeout(asleep);
      asleep = setTimeout(() => charts.forEach((chart) => chart.setSize({ width: Math.max(LEAST_WIDTH, chart.root.parentElement.clientWidth), height: chart.height })), 100);
    });
    byId("steps").hidden = false;
  }

  return { connect, load, element, short, byId };
})();
