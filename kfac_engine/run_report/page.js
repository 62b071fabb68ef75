"use strict";
// Draws the charts of a run report from the JSON in #run-data. Texts are set as text, never as HTML.
(() => {
const data = JSON.parse(document.getElementById("run-data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDE = 640, COLOURS = 8, MARKS = 80, ROOM = { left: 58, right: 12, top: 10, bottom: 34 };
const AXES = { step: "step", seconds: "seconds", part: "% of the eigenvalues, from the largest" };
let axis = "step";

function shape(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function element(parent, tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function show(value) {
  if (value === null) return "undefined";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

// Scales map values to pixels; a logarithmic scale has ticks at powers of ten, or at 1, 2 and 5 times these.
function linearTicks(low, high, most) {
  const rough = high / most - low / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough) ?? rough;
  const ticks = [], first = Math.ceil(low / step), last = Math.floor(high / step * (1 + 1e-12));
  for (let k = first; k <= last; k += 1) ticks.push(Number((k * step).toPrecision(12)));
  return ticks.filter(Number.isFinite);
}
function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const stride = Math.max(1, Math.ceil((last - first) / most)), factors = last - first < 3 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += stride)
    for (const factor of factors) {
      const tick = Number(`${factor}e${power}`);
      if (tick >= low * 0.999 && tick <= high * 1.001 && Number.isFinite(tick)) ticks.push(tick);
    }
  return ticks;
}
function scale(low, high, from, to, log, count) {
  const f = log ? Math.log10 : (x => x), size = Math.max(Math.abs(low), Math.abs(high));
  // Values that are equal to 10 digits are drawn as one value: their ticks would be equal.
  if (!(f(high) - f(low) > (log ? 1e-12 : Math.max(size * 1e-10, 1e-300)))) {
    const pad = size > 1e-300 ? size : 1, most = Number.MAX_VALUE;
    [low, high] = log ? [Math.max(low / 2, Number.MIN_VALUE), Math.min(low * 2, most)] : [Math.max(low - pad / 2, -most), Math.min(low + pad / 2, most)];
  }
  // The unit avoids that a difference overflows.
  const unit = Math.max(Math.abs(f(low)), Math.abs(f(high))) || 1, a = f(low) / unit, b = f(high) / unit;
  const at = value => from + (f(value) / unit - a) / (b - a) * (to - from);
  at.ticks = (log ? logTicks : linearTicks)(low, high, count);
  return at;
}

// A chart: lines {name, style, colour, x, y}; horizontal references; bars are stacked over [x0, x1].
class Chart {
  constructor(figure, options) {
    Object.assign(this, { figure, references: [], bars: null, unit: "", height: 240, moving: true }, options);
    this.cursor = null;
    const values = this.lines.flatMap(line => line.value.filter(v => v !== null));
    const tools = element(figure, "div", "tools");
    this.keys(tools);
    if (!this.bars && values.length && values.every(v => v > 0) && this.toggle !== false) {
      const label = element(tools, "label"), box = element(label, "input");
      box.type = "checkbox"; box.checked = this.log;
      label.append(" logarithmic");
      box.addEventListener("change", () => { this.log = box.checked; this.draw(); });
    }
    this.plot = element(figure, "div", "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "slider");
    this.plot.setAttribute("aria-label", `${this.title}: position of the cursor`);
    this.readout = element(figure, "p", "readout");
    this.table();
    this.plot.addEventListener("pointermove", event => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.select(null));
    this.plot.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => requestAnimationFrame(() => { if (this.plot.clientWidth !== this.width) this.draw(); })).observe(this.plot);
    this.draw();
  }
  x(line) { return this.moving ? line[axis] : line.x; }
  keys(tools) {
    if (this.lines.length < 2 && !this.bars) return;
    for (const line of this.lines) {
      const key = element(tools, "span", "key"), icon = shape(key, "svg", { viewBox: "0 0 24 12", "aria-hidden": "true" });
      if (this.bars || line.style === "stems") shape(icon, "rect", { x: 4, y: 1, width: this.bars ? 16 : 3, height: 10, class: `f${line.colour}` });
      else shape(icon, "path", { d: "M1 6H23", class: `${line.style === "faint" ? "faint" : line.style === "dashed" ? "dashed" : "line"} s${line.colour}` });
      if (line.style === "marks") shape(icon, "circle", { cx: 12, cy: 6, r: 3, class: `f${line.colour}` });
      key.append(line.name);
    }
  }
  table() {
    const details = element(this.figure, "details");
    element(details, "summary", "", "Table of the points");
    details.addEventListener("toggle", () => {
      if (!details.open) return;
      details.querySelector(".scroll")?.remove();
      const region = element(details, "div", "scroll"), table = element(region, "table"), head = element(element(table, "thead"), "tr");
      region.tabIndex = 0; region.setAttribute("role", "region"); region.setAttribute("aria-label", `Points of ${this.title}`);
      const columns = this.moving ? ["step", "seconds"] : ["x"], body = element(table, "tbody");
      for (const name of ["line", ...columns.map(name => name === "x" ? "part, %" : name), this.unit ? `value, ${this.unit}` : "value"]) element(head, "th", name === "line" ? "" : "number", name).scope = "col";
      for (const line of this.lines) line.value.forEach((value, i) => {
        const row = element(body, "tr");
        element(row, "th", "", line.name).scope = "row";
        for (const name of columns) element(row, "td", "number", line[name][i] === null ? "" : String(line[name][i]));
        element(row, "td", "number", value === null ? "" : String(value));
      });
    });
  }
  draw() {
    this.width = this.plot.clientWidth;
    const width = Math.max(240, this.width || WIDE), height = this.height;
    this.plot.replaceChildren();
    const svg = this.svg = shape(this.plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.title });
    const xs = this.lines.flatMap(line => this.x(line)).filter(v => v !== null);
    let ys = this.lines.flatMap(line => line.value).filter(v => v !== null && (!this.log || v > 0));
    if (!xs.length || !ys.length) { shape(svg, "text", { x: 20, y: 30 }, "no values"); return; }
    const edges = this.bars ? this.bars[axis].flat() : xs;
    const least = values => values.reduce((a, b) => Math.min(a, b)), most = values => values.reduce((a, b) => Math.max(a, b));
    if (this.bars) ys = [0, ...this.bars.total];
    if (this.lines.every(line => line.style === "stems") && !this.log) ys = [0, ...ys];
    let low = least(ys), high = most(ys);
    for (const [value] of this.references) { low = Math.min(low, value); high = Math.max(high, value); }
    const bottom = height - ROOM.bottom, right = width - ROOM.right;
    const px = this.px = scale(least(edges), most(edges), ROOM.left, right, false, Math.max(3, width / 110));
    const py = this.py = scale(low, high, bottom, ROOM.top, this.log, Math.max(3, height / (this.log ? 34 : 48)));
    for (const tick of py.ticks) {
      shape(svg, "line", { x1: ROOM.left, x2: right, y1: py(tick), y2: py(tick), class: "grid" });
      shape(svg, "text", { x: ROOM.left - 6, y: py(tick) + 4, "text-anchor": "end" }, show(tick));
    }
    for (const tick of px.ticks) shape(svg, "text", { x: px(tick), y: bottom + 15, "text-anchor": "middle" }, show(tick));
    shape(svg, "line", { x1: ROOM.left, x2: right, y1: bottom, y2: bottom, class: "frame" });
    shape(svg, "text", { x: right, y: height - 3, "text-anchor": "end" }, this.moving ? AXES[axis] : AXES.part);
    if (this.unit) shape(svg, "text", { x: 4, y: height - 3 }, this.unit);
    for (const [value, name] of this.references) {
      shape(svg, "line", { x1: ROOM.left, x2: right, y1: py(value), y2: py(value), class: "reference" });
      shape(svg, "text", { x: right, y: py(value) - 4, "text-anchor": "end" }, name);
    }
    if (this.bars) this.stack(svg); else for (const line of this.lines) this.line(svg, line, bottom);
    this.mark = shape(svg, "line", { y1: ROOM.top, y2: bottom, class: "cursor", visibility: "hidden" });
    this.select(this.cursor);
  }
  line(svg, line, bottom) {
    const x = this.x(line), kind = { faint: "faint", dashed: "dashed" }[line.style] || "line";
    let path = "", open = false;
    line.value.forEach((value, i) => {
      if (value === null || (this.log && value <= 0)) { open = false; return; }
      const at = `${this.px(x[i]).toFixed(1)} ${this.py(value).toFixed(1)}`;
      if (line.style === "stems") { path += `M${this.px(x[i]).toFixed(1)} ${bottom}V${this.py(value).toFixed(1)}`; return; }
      if (line.style === "ticks") { path += `M${at}m0 -3v6`; return; }
      path += (open ? "L" : "M") + at;
      open = true;
      if (line.style === "marks" && line.value.length <= MARKS) shape(svg, "circle", { cx: at.split(" ")[0], cy: at.split(" ")[1], r: 3, class: `f${line.colour}` });
    });
    shape(svg, "path", { d: path, class: `${line.style === "stems" || line.style === "ticks" ? "stem" : kind} s${line.colour}` });
  }
  stack(svg) {
    this.bars[axis].forEach(([from, to], i) => {
      let base = 0;
      for (const line of this.lines) {
        const value = line.value[i] ?? 0, left = this.px(from), width = this.px(to) - left;
        shape(svg, "rect", { x: left.toFixed(2), width: Math.max(0.4, width - Math.min(1, width / 5)).toFixed(2), y: this.py(base + value).toFixed(2), height: Math.max(0, this.py(base) - this.py(base + value)).toFixed(2), class: `f${line.colour}` });
        base += value;
      }
    });
  }
  positions() { return [...new Set(this.lines.flatMap(line => this.x(line)))].filter(v => v !== null).sort((a, b) => a - b); }
  point(event) {
    if (!this.px) return;
    const box = this.svg.getBoundingClientRect(), at = (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
    const all = this.positions();
    this.select(all.reduce((best, x) => Math.abs(this.px(x) - at) < Math.abs(this.px(best) - at) ? x : best, all[0]));
  }
  key(event) {
    const all = this.positions(), here = this.cursor === null ? -1 : all.indexOf(this.cursor);
    const to = { ArrowRight: here + 1, ArrowUp: here + 1, ArrowLeft: here < 0 ? all.length - 1 : here - 1, ArrowDown: here - 1, PageUp: here + 10, PageDown: here - 10, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all.length) return;
    event.preventDefault();
    this.select(all[Math.min(all.length - 1, Math.max(0, to))]);
  }
  select(position) {
    if (!this.mark) return;
    this.cursor = position;
    this.mark.setAttribute("visibility", position === null ? "hidden" : "visible");
    const words = [];
    if (position !== null) { for (const name of ["x1", "x2"]) this.mark.setAttribute(name, this.px(position)); words.push(`${this.moving ? `${axis} ${show(position)}` : `${show(position)} %`}`); }
    for (const line of this.lines) {
      // At the cursor: the last point up to it. Without a cursor: the last point.
      const x = this.x(line);
      let i = line.value.length - 1;
      while (i > 0 && position !== null && x[i] > position) i -= 1;
      if (i >= 0 && (position === null || x[i] <= position)) words.push(`${this.lines.length > 1 || position === null ? `${line.name} ` : ""}${show(line.value[i])}${this.unit ? ` ${this.unit}` : ""}`);
    }
    this.readout.textContent = `${position === null && this.moving ? "last: " : ""}${words.join(" · ")}`;
    const all = this.positions(), now = position ?? all[all.length - 1] ?? 0;
    for (const [name, value] of Object.entries({ valuemin: all[0] ?? 0, valuemax: all[all.length - 1] ?? 0, valuenow: now, valuetext: this.readout.textContent })) this.plot.setAttribute(`aria-${name}`, value);
  }
}

const drawn = [];
function place(key, options) { drawn.push(new Chart(document.getElementById(key), options)); }
data.charts.forEach((chart, i) => place(`chart-${i}`, {
  title: chart.title, unit: chart.unit, log: chart.logarithmic, references: chart.references, height: i ? 220 : 320,
  lines: chart.series.map((line, k) => ({ ...line, colour: k % COLOURS })),
}));
if (data.stages) {
  const { names, first, last, seconds, means } = data.stages;
  place("chart-stages", {
    title: "Time of a step by stage", unit: "ms", log: false, height: 260,
    lines: names.map((name, k) => ({ name, style: "line", colour: k % COLOURS, step: last, seconds, value: means[k] })),
    bars: {
      step: last.map((to, i) => [first[i] - 0.5, to + 0.5]), seconds: seconds.map((to, i) => [i ? seconds[i - 1] : 0, to]),
      total: last.map((_, i) => means.reduce((sum, mean) => sum + (mean[i] ?? 0), 0)),
    },
  });
}
data.spectra.forEach((layer, i) => place(`spectrum-${i}`, {
  title: layer.title, log: true, moving: false, toggle: false, height: 190,
  lines: layer.factors.flatMap((factor, k) => [
    { name: factor.name, style: "line", colour: k % COLOURS, x: factor.parts, value: factor.eigenvalues },
    ...(factor.damping > 0 ? [{ name: `damping of ${factor.name}`, style: "dashed", colour: k % COLOURS, x: [0, 100], value: [factor.damping, factor.damping] }] : []),
  ]),
}));

const hasSeconds = data.charts.some(chart => chart.series.some(line => line.seconds.some(v => v !== null)));
const choice = document.getElementById("axis");
choice.hidden = !hasSeconds;
choice.addEventListener("change", event => {
  axis = event.target.value;
  for (const chart of drawn) if (chart.moving) { chart.cursor = null; chart.draw(); }
});
})();
