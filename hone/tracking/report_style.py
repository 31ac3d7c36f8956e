"""The report's style sheet and its script, as text that goes into the page.

The script only redraws lines, filters and shows values; it builds no HTML from data.
"""

from __future__ import annotations

RUN_COLOURS = (
    "#2f6f9f",
    "#c2553a",
    "#3f8f6b",
    "#db2777",
    "#7c3aed",
    "#0891b2",
    "#65a30d",
    "#dc2626",
)
PART_COLOURS = (*RUN_COLOURS, "#a16207", "#94a3b8")
GOLDEN_ANGLE = 137.508
"""Degrees of hue from one run's colour to the next, when the chosen ones are used up."""


def run_colour(number: int) -> str:
    if number < len(RUN_COLOURS):
        return RUN_COLOURS[number]
    return f"hsl({number * GOLDEN_ANGLE % 360:.0f} 55% 45%)"


def style(run_count: int) -> str:
    runs = "".join(
        f"path.r{i}{{stroke:{c}}}circle.r{i}{{fill:{c}}}.key.r{i}{{background:{c}}}"
        f"body.hide-{i} svg .r{i},body.hide-{i} .of{i}{{display:none}}"
        for i, c in enumerate(map(run_colour, range(run_count)))
    )
    parts = "".join(
        f"rect.t{i}{{fill:{c}}}.key.t{i}{{background:{c}}}" for i, c in enumerate(PART_COLOURS)
    )
    return _STYLE + runs + parts


_STYLE = """
:root{--ink:#1c2433;--soft:#6b7688;--line:#e6e9ef;--back:#fbfbfc;--card:#fff;--mark:#fdf6dc;--link:#2456b3}
@media (prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#93a0b4;--line:#2c3648;
--back:#10151f;--card:#171e2b;--mark:#3a3416;--link:#8fb4f5}}
*{box-sizing:border-box}
html{scroll-padding-top:64px}
body{margin:0 auto;max-width:1240px;padding:28px 28px 80px;color:var(--ink);background:var(--back);
font:15px/1.55 Inter,"Segoe UI",Roboto,"Helvetica Neue",system-ui,sans-serif}
h1{font-size:26px;font-weight:650;letter-spacing:-.01em;margin:0 0 6px}
h2{font-size:18px;font-weight:650;margin:44px 0 12px}h3{font-size:14.5px;margin:20px 0 8px}
.soft,figcaption,summary{color:var(--soft)}
.note{color:var(--soft);font-size:13px;border-left:3px solid var(--line);padding:1px 10px;margin:10px 0}
nav{position:sticky;top:0;background:var(--back);padding:10px 0;border-bottom:1px solid var(--line);
display:flex;gap:8px 18px;flex-wrap:wrap;align-items:center;z-index:1;font-size:13.5px}
nav a{color:var(--soft);text-decoration:none}nav a:hover{color:var(--link)}
.break{flex-basis:100%}
label{white-space:nowrap;display:inline-flex;align-items:center;gap:6px}
input[type=search]{padding:4px 10px;border:1px solid var(--line);border-radius:7px;background:var(--card);
color:inherit;font:inherit}
input[type=range]{width:110px;accent-color:var(--soft)}input[type=checkbox]{accent-color:var(--soft)}
.key{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:6px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:14px;margin:0 0 18px}
.tile{padding:14px 18px;background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile p{margin:0;font-size:13.5px;overflow-wrap:anywhere}
.tile b{display:block;font-size:32px;line-height:1.25;font-weight:650;letter-spacing:-.02em}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:14px}
.chart{position:relative;margin:0;padding:12px 12px 6px;background:var(--card);border:1px solid var(--line);
border-radius:10px}
figcaption{font-size:12.5px;overflow-wrap:anywhere;margin:0 0 4px 4px}
summary{cursor:pointer;font-weight:600;font-size:13.5px;margin:10px 0 8px}summary:hover{color:var(--link)}
svg{display:block;width:100%}svg text{font-size:10.5px;fill:var(--soft)}
text.y{text-anchor:end}text.x{text-anchor:middle}
svg path{fill:none}.grid{stroke:var(--line)}.raw{opacity:.22}.line{stroke-width:1.9;stroke-linejoin:round}
.raw,.line{vector-effect:non-scaling-stroke}
.readout{position:absolute;top:34px;right:20px;padding:3px 8px;white-space:pre;pointer-events:none;
background:var(--card);border:1px solid var(--line);border-radius:6px;font-size:11.5px;
font-variant-numeric:tabular-nums;max-width:85%;overflow:hidden;text-overflow:ellipsis}
[hidden]{display:none!important}
.cursor{stroke:var(--soft);stroke-dasharray:3 3}
.stack{height:22px;border-radius:6px;margin:6px 0 10px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{font-weight:600;color:var(--soft)}
th,td{text-align:left;vertical-align:top;padding:5px 10px;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
section{overflow-x:auto}section>:last-child{margin-bottom:0}
#config td{min-width:72px}
#summary td:first-child,#config td:first-child{min-width:180px}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.sample td.n{width:64px}tr.differs td{background:var(--mark)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;
font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
max-height:320px;overflow:auto}
td pre{max-height:150px}
.sample{padding:12px 16px;margin:0 0 14px;background:var(--card);border:1px solid var(--line);
border-radius:10px}
.sample>p,.turns>p{margin:0 0 8px;font-size:13px}.turns>p{margin:2px 0 0}
.sample>pre:first-child{color:var(--soft);padding-bottom:8px}
.turns{display:grid;gap:8px}
.turn{border-left:3px solid var(--line);padding:2px 0 2px 12px;margin-left:18px}
.turn.assistant{border-color:var(--link);margin-left:0}
.turn p{margin:0;font-size:12.5px}.who{color:var(--soft);font-weight:600}
.call{color:var(--soft);overflow-wrap:anywhere}
.turn:not(.assistant) pre{color:var(--soft)}
hr{border:0;border-top:1px solid var(--line);margin:10px 0}
.set{font-weight:600}
@media (max-width:600px){nav{position:static}html{scroll-padding-top:0}body{padding:20px 16px 60px}}
@media print{nav{display:none}}
"""

SCRIPT = """
"use strict";
function smooth(values, weight, counts) {
  let total = 0, mass = 0;
  return values.map((v, i) => {
    if (v === null) return null;
    const kept = Math.pow(weight, counts ? counts[i] : 1);
    total = kept * total + (1 - kept) * v;
    mass = kept * mass + (1 - kept);
    return total / mass;
  });
}
function scaleOf(curves, box) {
  const low = i => Math.min(...curves.map(c => c.range[i]));
  const high = i => Math.max(...curves.map(c => c.range[i]));
  const spread = (a, b) => {
    if (b - a > Math.max(1e-300, 1e-12 * Math.max(Math.abs(a), Math.abs(b)))) return [a, b];
    const half = 0.1 * Math.abs(a) > 1e-300 ? 0.1 * Math.abs(a) : 0.5;
    return [a - half, a + half];
  };
  const [x0, x1] = spread(low(0), high(1)), [y0, y1] = spread(low(2), high(3));
  const air = 0.05 * (y1 - y0);
  return {
    x0, x1, y0: y0 - air, y1: y1 + air,
    x(step) { return box.left + (step - x0) / (x1 - x0) * box.width; },
    y(value) { return box.top + (1 - (value - this.y0) / (this.y1 - this.y0)) * box.height; },
  };
}
function pathOf(scale, steps, values) {
  let out = "", down = false;
  steps.forEach((step, i) => {
    const v = values[i];
    if (v !== null) {
      out += (down ? "L" : "M") + scale.x(step).toFixed(1) + " " + scale.y(v).toFixed(1);
    }
    down = v !== null;
  });
  return out;
}
function ticks(low, high) {
  const rough = (high - low) / 4, power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
  const out = [];
  for (let n = Math.ceil(low / step); n <= Math.floor(high / step); n++) out.push(n * step);
  return out;
}
function tickText(value) {
  for (const [least, unit, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (Math.abs(value) >= least) return Number((value / unit).toPrecision(4)) + letter;
  }
  return String(Number(value.toPrecision(4)));
}
function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}
function drawAxes(group, scale, box) {
  const right = box.left + box.width;
  group.replaceChildren();
  for (const value of ticks(scale.y0, scale.y1)) {
    const y = scale.y(value);
    group.append(element("path", {class: "grid", d: "M" + box.left + " " + y.toFixed(1) + "H" + right}));
    group.append(element("text", {class: "y", x: box.left - 6, y: (y + 3).toFixed(1)}, tickText(value)));
  }
  for (const step of ticks(scale.x0, scale.x1)) {
    const at = {class: "x", x: scale.x(step).toFixed(1), y: box.top + box.height + 16};
    group.append(element("text", at, String(Number(step.toPrecision(6)))));
  }
}
function nearest(steps, at) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - at) < Math.abs(steps[best] - at)) best = i; });
  return best;
}
function start() {
  const data = JSON.parse(document.getElementById("data").textContent), box = data.box;
  const slider = document.getElementById("smoothing"), hidden = new Set();
  const charts = [...document.querySelectorAll(".chart")].map((figure, n) => {
    const chart = {figure, box, ...data.charts[n], matches: true};
    chart.drawn = scaleOf(chart.curves, box);
    chart.scale = chart.drawn;
    return chart;
  });
  const visible = chart => chart.curves.filter(curve => !hidden.has(curve.run));
  const refresh = () => {
    charts.forEach(chart => {
      const curves = visible(chart);
      chart.figure.hidden = !chart.matches || !curves.length;
      if (!chart.figure.hidden) redraw(chart, scaleOf(curves, box), Number(slider.value));
    });
    countCharts();
  };
  slider.addEventListener("input", refresh);
  document.querySelectorAll("input[data-run]").forEach(input => input.addEventListener("change", () => {
    hidden[input.checked ? "delete" : "add"](Number(input.dataset.run));
    document.body.classList.toggle("hide-" + input.dataset.run, !input.checked);
    refresh();
  }));
  document.querySelectorAll("input[data-filter]").forEach(input => input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(" ").filter(Boolean);
    const fits = item => words.every(word => item.dataset.name.toLowerCase().includes(word));
    if (input.dataset.filter !== ".chart") {
      const items = [...document.querySelectorAll(input.dataset.filter)];
      items.forEach(item => { item.hidden = !fits(item); });
      document.getElementById("no-settings").hidden = items.some(fits);
      return;
    }
    charts.forEach(chart => { chart.matches = fits(chart.figure); });
    if (words.length) document.querySelectorAll(".curves details").forEach(d => { d.open = true; });
    refresh();
  }));
  charts.forEach(chart => hover(chart, () => visible(chart), data.runs));
}
function redraw(chart, scale, weight) {
  const lines = chart.figure.querySelectorAll("path.line"), raws = chart.figure.querySelectorAll("path.raw");
  const was = chart.drawn, sx = (was.x1 - was.x0) / (scale.x1 - scale.x0);
  const sy = (was.y1 - was.y0) / (scale.y1 - scale.y0);
  const move = [sx, 0, 0, sy, scale.x(was.x0) - sx * was.x(was.x0), scale.y(was.y0) - sy * was.y(was.y0)];
  chart.scale = scale;
  chart.curves.forEach((curve, i) => {
    const values = smooth(curve.values, curve.as_is ? 0 : weight, curve.counts);
    lines[i].setAttribute("d", pathOf(scale, curve.steps, values));
    raws[i].setAttribute("transform", "matrix(" + move.join(" ") + ")");
  });
  chart.figure.querySelectorAll("circle").forEach(circle => {
    circle.setAttribute("cx", scale.x(Number(circle.dataset.step)).toFixed(1));
    circle.setAttribute("cy", scale.y(Number(circle.dataset.value)).toFixed(1));
  });
  drawAxes(chart.figure.querySelector(".axes"), scale, chart.box);
}
function countCharts() {
  let all = 0;
  document.querySelectorAll(".curves details").forEach(group => {
    const count = group.querySelectorAll(".chart:not([hidden])").length;
    group.querySelector(".count").textContent = "(" + count + ")";
    group.hidden = count === 0;
    all += count;
  });
  document.getElementById("no-curves").hidden = all > 0;
}
function hover(chart, visible, runs) {
  const svg = chart.figure.querySelector("svg"), readout = chart.figure.querySelector(".readout");
  const box = chart.box, cursor = element("path", {class: "cursor"});
  svg.append(cursor);
  svg.addEventListener("mousemove", event => {
    const area = svg.getBoundingClientRect(), scale = chart.scale;
    const x = (event.clientX - area.left) / area.width * box.total;
    const at = scale.x0 + (x - box.left) / box.width * (scale.x1 - scale.x0);
    readout.textContent = visible().map(curve => {
      const i = nearest(curve.steps, at), v = curve.values[i];
      const label = runs.length > 1 ? runs[curve.run] + " " : "";
      const many = curve.counts && v !== null ? " (mean of " + curve.counts[i] + ")" : "";
      const value = v === null ? "not finite" : Number(v.toPrecision(5));
      return label + curve.steps[i] + ": " + value + many;
    }).join("\\n");
    readout.hidden = false;
    cursor.setAttribute("d", "M" + x.toFixed(1) + " " + box.top + "v" + box.height);
  });
  svg.addEventListener("mouseleave", () => {
    readout.hidden = true;
    cursor.setAttribute("d", "");
  });
}
if (typeof document !== "undefined") start();
"""
