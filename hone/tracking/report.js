"use strict";
const POLL_MS = 2000;
const plotArea = {left: 52, top: 10, width: 318, height: 176, total: 380};
function smooth(values, weight, counts) {
  let total = 0, mass = 0;
  return values.map((value, i) => {
    if (value === null) return null;
    const decay = Math.pow(weight, counts ? counts[i] : 1);
    total = decay * total + (1 - decay) * value;
    mass = decay * mass + (1 - decay);
    return total / mass;
  });
}
function dataRange(numbers) {  // a constant curve is drawn through the middle
  const low = numbers.reduce((a, b) => Math.min(a, b)), high = numbers.reduce((a, b) => Math.max(a, b));
  if (high - low > Math.max(1e-300, 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) return [low, high];
  const half = 0.1 * Math.abs(low) > 1e-300 ? 0.1 * Math.abs(low) : 0.5;
  return [low - half, low + half];
}
function scaleOf(curves) {
  const raw = curves.map(curve => curve.raw || curve);
  const values = raw.flatMap(points => points.values.filter(value => value !== null));
  const [x0, x1] = dataRange(raw.flatMap(points => points.steps));
  const [low, high] = dataRange(values.length ? values : [0]), padding = 0.05 * (high - low);
  const y0 = low - padding, y1 = high + padding;
  return {
    x0, x1, y0, y1,
    x: step => (plotArea.left + (step - x0) / (x1 - x0) * plotArea.width).toFixed(1),
    y: value => (plotArea.top + (1 - (value - y0) / (y1 - y0)) * plotArea.height).toFixed(1),
  };
}
function pathOf(scale, steps, values) {  // null leaves a gap
  const move = i => i && values[i - 1] !== null ? "L" : "M";
  const point = (step, i) => values[i] === null ? "" : move(i) + scale.x(step) + " " + scale.y(values[i]);
  return steps.map(point).join("");
}
function ticks(low, high) {  // multiples of 1, 2 or 5 times a power of ten
  const rough = (high - low) / 4, power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
  const values = [];
  for (let n = Math.ceil(low / step); n <= Math.floor(high / step); n++) values.push(n * step);
  return values;
}
function tickText(value) {
  for (const [least, unit, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (Math.abs(value) >= least) return Number((value / unit).toPrecision(4)) + letter;
  }
  return String(Number(value.toPrecision(4)));
}
function element(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  node.textContent = text;
  return node;
}
function axes(scale) {
  const y = ticks(scale.y0, scale.y1).flatMap(value => [
    element("path", {class: "grid", d: "M" + plotArea.left + " " + scale.y(value) + "h" + plotArea.width}),
    element("text", {class: "y", x: plotArea.left - 6, y: scale.y(value), dy: 3}, tickText(value)),
  ]);
  const x = ticks(scale.x0, scale.x1).map(step => element(
    "text", {class: "x", x: scale.x(step), y: plotArea.top + plotArea.height + 16}, Number(step.toPrecision(6))));
  return [...y, ...x];
}
function lines(scale, curve, weight) {
  const raw = curve.raw || curve, smoothed = smooth(curve.values, curve.as_is ? 0 : weight, curve.counts);
  const points = raw.steps.map((step, i) => [step, raw.values[i]]).filter(([, value]) => value !== null);
  return [
    element("path", {class: "raw r" + curve.run, d: pathOf(scale, raw.steps, raw.values)}),
    element("path", {class: "line r" + curve.run, d: pathOf(scale, curve.steps, smoothed)}),
    ...(curve.as_is ? points : []).map(([step, value]) => element(
      "circle", {class: "r" + curve.run, cx: scale.x(step), cy: scale.y(value), r: 2.5})),
  ];
}
function nearestIndex(steps, target) {
  return steps.reduce((best, step, i) => Math.abs(step - target) < Math.abs(steps[best] - target) ? i : best, 0);
}
function showValuesUnderMouse(chart, runs) {
  const svg = chart.figure.querySelector("svg"), readout = chart.figure.querySelector("output");
  svg.addEventListener("mousemove", event => {
    const area = svg.getBoundingClientRect(), {x0, x1} = chart.scale;
    const x = (event.clientX - area.left) / area.width * plotArea.total;
    const step = x0 + (x - plotArea.left) / plotArea.width * (x1 - x0);
    readout.textContent = chart.visible.map(curve => {
      const i = nearestIndex(curve.steps, step), value = curve.values[i];
      const label = runs.length > 1 ? runs[curve.run] + " " : "";
      const meanNote = curve.counts && value !== null ? " (mean of " + curve.counts[i] + ")" : "";
      return label + curve.steps[i] + ": " + (value === null ? "not finite" : Number(value.toPrecision(5))) + meanNote;
    }).join("\n");
    readout.hidden = false;
    chart.cursor.setAttribute("d", "M" + x.toFixed(1) + " " + plotArea.top + "v" + plotArea.height);
  });
  svg.addEventListener("mouseleave", () => {
    readout.hidden = true;
    chart.cursor.setAttribute("d", "");
  });
}
function start() {
  const slider = document.getElementById("smoothing"), hidden = new Set(), words = {curves: [], settings: []};
  let charts = [];
  const matchesWords = (item, kind) => words[kind].every(word => item.dataset.name.toLowerCase().includes(word));
  const draw = chart => {
    chart.visible = chart.curves.filter(curve => !hidden.has(curve.run));
    chart.figure.hidden = !matchesWords(chart.figure, "curves") || !chart.visible.length;
    if (chart.figure.hidden) return;
    chart.scale = scaleOf(chart.visible);
    const curves = chart.visible.flatMap(curve => lines(chart.scale, curve, Number(slider.value)));
    chart.figure.querySelector("svg").replaceChildren(...axes(chart.scale), ...curves, chart.cursor);
  };
  const refresh = () => {
    charts.forEach(draw);
    document.querySelectorAll(".curves details").forEach(group => {
      const count = group.querySelectorAll(".chart:not([hidden])").length;
      group.querySelector(".count").textContent = "(" + count + ")";
      group.hidden = count === 0;
    });
    document.getElementById("no-curves").hidden = charts.some(chart => !chart.figure.hidden);
    const settings = [...document.querySelectorAll(".setting")];
    settings.forEach(item => { item.hidden = !matchesWords(item, "settings"); });
    document.getElementById("no-settings").hidden = settings.some(item => !item.hidden) || !settings.length;
  };
  const load = () => {
    const data = JSON.parse(document.getElementById("data").textContent);
    charts = [...document.querySelectorAll(".chart")].map((figure, n) => (
      {figure, curves: data.charts[n], cursor: element("path", {class: "cursor"})}));
    charts.forEach(chart => showValuesUnderMouse(chart, data.runs));
    refresh();
  };
  slider.addEventListener("input", refresh);
  document.querySelectorAll("input[data-run]").forEach(input => input.addEventListener("change", () => {
    hidden[input.checked ? "delete" : "add"](Number(input.dataset.run));
    document.body.classList.toggle("hide-" + input.dataset.run, !input.checked);
    refresh();
  }));
  document.querySelectorAll("input[data-filter]").forEach(input => input.addEventListener("input", () => {
    words[input.dataset.filter] = input.value.toLowerCase().split(" ").filter(Boolean);
    if (words.curves.length) document.querySelectorAll(".curves details").forEach(d => { d.open = true; });
    refresh();
  }));
  load();
  if (document.getElementById("live")) follow(load);
}
function follow(load) {  // what the reader set stays: open groups, filters, smoothing, hidden runs
  const status = document.getElementById("live"), groupName = group => group.querySelector("summary").firstChild.data;
  let previous = "";
  const update = async () => {
    try {
      const text = await (await fetch(location.pathname)).text();
      if (text !== previous) show(new DOMParser().parseFromString(text, "text/html"));
      previous = text;
      status.textContent = "live, as of " + new Date().toLocaleTimeString();
    } catch {
      status.textContent = "the server of this page has ended; this is what it sent last";
    }
    setTimeout(update, POLL_MS);
  };
  const show = page => {
    const open = new Map([...document.querySelectorAll("details")].map(group => [groupName(group), group.open]));
    for (const id of ["summary", "curves", "time", "validation-samples", "best-and-worst-responses", "data"]) {
      document.getElementById(id).replaceWith(page.getElementById(id));
    }
    document.querySelectorAll("details").forEach(group => { group.open = open.get(groupName(group)) ?? group.open; });
    load();
  };
  update();
}
if (typeof document !== "undefined") start();
