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
        f"body.hide-{i} svg .r{i}{{display:none}}"
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
.chart{margin:0;padding:12px 12px 6px;background:var(--card);border:1px solid var(--line);border-radius:10px}
figcaption{font-size:12.5px;overflow-wrap:anywhere;margin:0 0 4px 4px}
summary{cursor:pointer;font-weight:600;font-size:13.5px;margin:10px 0 8px}summary:hover{color:var(--link)}
svg{display:block;width:100%}svg text{font-size:10.5px;fill:var(--soft)}
text.y{text-anchor:end}text.x{text-anchor:middle}
svg path{fill:none}.grid{stroke:var(--line)}.raw{opacity:.22}.line{stroke-width:1.9;stroke-linejoin:round}
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
.sample>pre:first-child{color:var(--soft);padding-bottom:8px}
hr{border:0;border-top:1px solid var(--line);margin:10px 0}
.set{font-weight:600}
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
function pathOf(chart, box, steps, values) {
  let out = "", down = false;
  steps.forEach((step, i) => {
    const v = values[i];
    if (v !== null) {
      const x = box.left + (step - chart.x[0]) / (chart.x[1] - chart.x[0]) * box.width;
      const y = box.top + (1 - (v - chart.y[0]) / (chart.y[1] - chart.y[0])) * box.height;
      out += (down ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1);
    }
    down = v !== null;
  });
  return out;
}
function nearest(steps, at) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - at) < Math.abs(steps[best] - at)) best = i; });
  return best;
}
function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const box = data.box, figures = [...document.querySelectorAll(".chart")];
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => figures.forEach((figure, n) => {
    data.charts[n].curves.forEach((curve, i) => {
      const line = figure.querySelectorAll("path.line")[i];
      const weight = curve.steps.length <= data.few ? 0 : Number(slider.value);
      const values = smooth(curve.values, weight, curve.counts);
      line.setAttribute("d", pathOf(data.charts[n], box, curve.steps, values));
    });
  }));
  document.querySelectorAll("input[data-run]").forEach(input => input.addEventListener("change", () =>
    document.body.classList.toggle("hide-" + input.dataset.run, !input.checked)));
  document.querySelectorAll("input[data-filter]").forEach(input => input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(" ").filter(Boolean);
    document.querySelectorAll(input.dataset.filter).forEach(item => {
      item.hidden = !words.every(word => item.dataset.name.toLowerCase().includes(word));
    });
    if (words.length) document.querySelectorAll(".curves details").forEach(d => { d.open = true; });
  }));
  figures.forEach((figure, n) => hover(figure, data.charts[n], box, data.runs));
}
function hover(figure, chart, box, runs) {
  const svg = figure.querySelector("svg"), caption = figure.querySelector("figcaption");
  const name = caption.textContent;
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  svg.append(cursor);
  svg.addEventListener("mousemove", event => {
    const area = svg.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width * box.total;
    const at = chart.x[0] + (x - box.left) / box.width * (chart.x[1] - chart.x[0]);
    const shown = chart.curves.map(curve => {
      const i = nearest(curve.steps, at), v = curve.values[i];
      const label = runs.length > 1 ? runs[curve.run] + " " : "";
      const many = curve.counts && v !== null ? " (mean of " + curve.counts[i] + ")" : "";
      const value = v === null ? "not finite" : Number(v.toPrecision(5));
      return label + curve.steps[i] + ": " + value + many;
    });
    caption.textContent = name + " · " + shown.join(" · ");
    cursor.setAttribute("d", "M" + x.toFixed(1) + " " + box.top + "v" + box.height);
  });
  svg.addEventListener("mouseleave", () => {
    caption.textContent = name;
    cursor.setAttribute("d", "");
  });
}
if (typeof document !== "undefined") start();
"""
