"use strict";
// Line and stacked charts in SVG. Texts reach the page through text nodes alone: what a model wrote is never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const view = { axis: "iteration", smooth: 0, hidden: new Set() };
const charts = []; // functions that draw a chart anew
const AXES = { iteration: "iteration", tokens: "generated tokens", seconds: "training time" };

function put(node, props, kids) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "css") for (const [key, to] of Object.entries(value)) node.style.setProperty(key, to);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...kids.flat(Infinity).filter((kid) => kid !== null && kid !== undefined && kid !== false));
  return node;
}
const el = (tag, props, ...kids) => put(document.createElement(tag), props, kids);
const svg = (tag, props, ...kids) => put(document.createElementNS("http://www.w3.org/2000/svg", tag), props, kids);

const colour = (run) => `var(--c${run % 8})`;
const DASHES = [null, "6 4", "2 3"]; // lines of one run in one panel, and more runs than colours, are told apart by dashes
const dashes = (s) => DASHES[s.dash || (s.run < 8 ? 0 : 1)];

function digits(value, n) {
  const text = Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(n);
  return (Number(text) === 0 ? "0" : String(Number(text))).replace("-", "−");
}
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
function compact(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS)
    if (size >= unit * 0.9995) return `${digits(value / unit, 3)}${letter}`;
  return digits(value, 3);
}
function duration(seconds) {
  if (seconds < 60) return `${digits(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`.replace(/ 0 s$/, "");
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`.replace(/ 0 min$/, "");
}
const counted = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
function percent(value, places = 1) {
  return `${(100 * value).toFixed(places).replace("-", "−")} %`;
}
const between = ([low, high]) => `${(100 * low).toFixed(1)} to ${percent(high)}`;
function show(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return percent(value);
  if (unit === "tokens" || unit === "count") return compact(value);
  if (unit === "seconds") return duration(value);
  return digits(value, 4);
}

/** Round numbers that span [low, high], about n of them; durations step in minutes and hours. */
function ticks(low, high, n, unit) {
  const raw = (high - low) / n || 1;
  let step = 0;
  if (unit === "seconds" && raw >= 20) {
    const nice = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    step = nice.find((s) => s >= raw) || 86400 * Math.ceil(raw / 86400);
  } else {
    const power = 10 ** Math.floor(Math.log10(raw));
    step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  }
  if (["count", "iteration", "tokens"].includes(unit) && step < 1) step = 1;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { at: found, step };
}
/** A label with as many decimals as its step needs: neighbours never read the same. */
function tickLabel(value, step, unit) {
  if (unit === "seconds") return duration(value);
  if (Math.abs(value) < step / 2) return unit === "share" ? "0%" : "0";
  const [scale, letter] = unit === "share" ? [0.01, "%"] : UNITS.find(([size]) => Math.abs(value) >= size * 0.9995) || [1, ""];
  let places = 0;
  while (places < 12 && Math.abs((step / scale) * 10 ** places - Math.round((step / scale) * 10 ** places)) > 1e-6) places++;
  return `${(value / scale).toFixed(places)}${letter}`.replace("-", "−");
}

/** Exponential moving average without the bias of its start; gaps stay gaps. */
function ema(values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = weight * sum + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
  return low > high ? null : [low, high];
}
/** A vertical range with air; from zero where that wastes little. */
function range(found, unit) {
  let [low, high] = found;
  if (low === high) { const by = Math.abs(low) * 0.2 || (unit === "share" ? 0.05 : 1); low -= by; high += by; }
  const few = unit === "tokens" || unit === "count" ? Math.max(4 - (high - low), 0) / 2 : 0; // room for whole numbers
  [low, high] = [low - few, high + few];
  const air = (high - low) * 0.08;
  const zero = found[0] >= 0 && low - air < 0.4 * high;
  low = zero ? 0 : low - air;
  high = found[1] === 0 && found[0] < 0 ? 0 : high + air;
  return unit === "share" ? [Math.max(low, found[0] >= 0 ? 0 : low), found[1] <= 1 ? Math.min(high, 1) : high] : [low, high];
}

const tip = document.getElementById("tip");
function showTip(x, y, ...kids) {
  tip.replaceChildren(...kids);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - box.width - 14 : x + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y - 12, innerHeight - box.height - 6))}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

/** Axes, grid and scales of a plot; returns null where the element has no size yet. */
function frame(root, xs, ys, xUnit, yUnit, xTitle) {
  const width = root.clientWidth, height = root.clientHeight;
  if (!width || !height) return null;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.replaceChildren();
  const y = ticks(ys[0], ys[1], Math.max(2, Math.round(height / 48)), yUnit);
  const labels = y.at.map((v) => tickLabel(v, y.step, yUnit));
  const box = { left: 12 + 6.4 * Math.max(1, ...labels.map((l) => l.length)), right: width - 12, top: 8, bottom: height - 36 };
  const span = xs[1] - xs[0] || 1;
  const sx = (v) => box.left + ((v - xs[0]) / span) * (box.right - box.left);
  const sy = (v) => box.bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (box.bottom - box.top);
  y.at.forEach((v, i) => root.append(
    svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: sy(v), y2: sy(v) }),
    svg("text", { x: box.left - 6, y: sy(v) + 3.5, "text-anchor": "end" }, labels[i])));
  const x = ticks(xs[0], xs[1], Math.max(2, Math.min(6, Math.round(width / 90))), xUnit);
  for (const v of x.at) {
    const at = sx(v), anchor = at > box.right - 14 ? "end" : "middle";
    root.append(svg("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }),
      svg("text", { x: anchor === "end" ? Math.max(at, box.right) : at, y: box.bottom + 16, "text-anchor": anchor }, tickLabel(v, x.step, xUnit)));
  }
  root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, xTitle));
  return { sx, sy, box, unsx: (px) => xs[0] + ((px - box.left) / (box.right - box.left)) * span };
}

function path(xs, ys, at) {
  let d = "";
  xs.forEach((x, i) => { if (ys[i] !== null && ys[i] !== undefined && x !== null) d += `${d ? "L" : "M"}${at.sx(x).toFixed(1)} ${at.sy(ys[i]).toFixed(1)}`; });
  return d;
}
function nearest(series, x) {
  let best = -1;
  series.x.forEach((v, i) => { if (series.y[i] !== null && (best < 0 || Math.abs(v - x) < Math.abs(series.x[best] - x))) best = i; });
  return best;
}

/** Pointer and keyboard reading of a chart: `read(x)` answers the rows of the tooltip. */
function readable(root, state) {
  const at = (px, clientX, clientY) => {
    const plot = state.plot;
    if (!plot) return;
    const { rows, x, header } = state.read(plot.unsx(Math.min(Math.max(px, plot.box.left), plot.box.right)));
    if (!rows.length) return;
    root.querySelectorAll(".cross, .mark").forEach((old) => old.remove());
    root.append(svg("line", { class: "cross", x1: plot.sx(x), x2: plot.sx(x), y1: plot.box.top, y2: plot.box.bottom }));
    for (const row of rows) if (row.y !== undefined) root.append(svg("circle", { class: "mark", cx: plot.sx(row.x), cy: plot.sy(row.y), r: 3.5, css: { fill: row.colour, stroke: "var(--card)", "stroke-width": "1.5" } }));
    showTip(clientX, clientY, el("div", { class: "when" }, header),
      ...rows.map((row) => el("div", { class: "row" }, el("i", { class: "swatch", css: { "--colour": row.colour } }), row.name, el("b", {}, row.text))),
      state.pick && state.pick(x) ? el("div", { class: "when" }, "click: trees of this iteration") : "");
    state.cursor = x;
    state.at = rows[0];
  };
  const open = () => { const to = state.at && state.pick ? state.pick(state.cursor) : null; if (to) { hideTip(); location.hash = to; } };
  const leave = () => { hideTip(); root.querySelectorAll(".cross, .mark").forEach((old) => old.remove()); };
  root.addEventListener("pointermove", (event) => at(event.clientX - root.getBoundingClientRect().left, event.clientX, event.clientY));
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("click", (event) => { at(event.clientX - root.getBoundingClientRect().left, event.clientX, event.clientY); open(); });
  root.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { open(); return; }
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !state.plot) return;
    event.preventDefault();
    const all = state.positions();
    const now = state.cursor === undefined ? (by > 0 ? -1 : all.length) : all.findIndex((x) => x >= state.cursor);
    const x = all[Math.min(Math.max(now + by, 0), all.length - 1)];
    const box = root.getBoundingClientRect(), px = state.plot.sx(x);
    at(px, box.left + px, box.top + 30);
  });
}

const slug = (text) => text.toLowerCase().replace(/[^a-z0-9@]+/g, "-").replace(/^-|-$/g, "");
function figure(spec, root, ...more) {
  const id = slug(spec.title);
  return el("figure", { class: `card chart ${spec.tall ? "tall" : ""}`, "data-place": id },
    el("figcaption", {}, el("h3", {}, spec.title, spec.place === null ? null : el("a", { class: "anchor", href: `#curves/${id}`, "aria-label": `Link to ${spec.title}` }, "#")), el("span", { class: "note" }, spec.note)), root, ...more);
}
function mount(root, draw) {
  charts.push(draw);
  new ResizeObserver(draw).observe(root);
}

/**
 * Lines of several runs. spec: title, note, unit, series() -> [{run, name, x, y, low, high}], smooth, dots, domain,
 * xUnit, xTitle, xs (a fixed horizontal range).
 */
function lineChart(spec) {
  const root = svg("svg", { tabindex: 0, role: "img" });
  const state = {};
  const shown = () => spec.series().filter((s) => !view.hidden.has(s.run) && s.y.some((v) => v !== null));
  const xUnit = () => spec.xUnit || view.axis;
  state.positions = () => [...new Set(state.lines.flatMap((s) => s.x.filter((x, i) => s.y[i] !== null)))].sort((a, b) => a - b);
  state.read = (x) => {
    const rows = state.lines.map((s) => {
      const i = nearest(s, x);
      const interval = s.low && s.low[i] !== null && s.low[i] !== undefined ? ` (${between([s.low[i], s.high[i]])})` : "";
      return { name: s.name, colour: colour(s.run), run: s.run, iteration: s.iteration ? s.iteration[i] : null, x: s.x[i], y: s.even[i], text: show(s.y[i], spec.unit) + interval };
    });
    const at = rows.reduce((best, row) => (Math.abs(row.x - x) < Math.abs(best - x) ? row.x : best), Infinity);
    const value = spec.xUnit ? `position ${percent(at, 0)}` : view.axis === "iteration" ? `iteration ${digits(at, 6)}` : view.axis === "tokens" ? `${compact(at)} tokens` : duration(at);
    return { rows, x: at, header: value };
  };
  if (!spec.xUnit) state.pick = (x) => {
    const near = state.read(x).rows.filter((row) => row.iteration !== null).sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
    return near ? treesLink(near.run, near.iteration) : null;
  };
  const draw = () => {
    state.lines = shown().map((s) => ({ ...s, even: spec.smooth ? ema(s.y, view.smooth) : s.y }));
    root.replaceChildren();
    state.plot = null;
    const reach = extent(state.lines.map((s) => s.x.filter((x, i) => s.y[i] !== null)));
    const found = extent(state.lines.flatMap((s) => [s.y, s.low || [], s.high || []]));
    if (!reach || !found || !root.clientWidth) return;
    const xs = spec.xs || [view.axis === "iteration" ? Math.min(reach[0], 1) : 0, reach[1]];
    const plot = frame(root, xs, spec.domain ? spec.domain() : range(found, spec.unit), xUnit(), spec.unit, spec.xTitle || AXES[view.axis]);
    if (!plot) return;
    for (const s of state.lines) {
      if (s.low && s.low.some((v) => v !== null)) {
        const back = [...s.x.keys()].filter((i) => s.low[i] !== null && s.high[i] !== null);
        const d = [...back.map((i) => [s.x[i], s.high[i]]), ...back.reverse().map((i) => [s.x[i], s.low[i]])];
        root.append(svg("path", { d: `M${d.map(([x, y]) => `${plot.sx(x).toFixed(1)} ${plot.sy(y).toFixed(1)}`).join("L")}Z`, css: { fill: colour(s.run), opacity: "0.14" } }));
      }
      if (s.even !== s.y) root.append(svg("path", { d: path(s.x, s.y, plot), fill: "none", css: { stroke: colour(s.run), opacity: "0.25" } }));
      root.append(svg("path", { d: path(s.x, s.even, plot), fill: "none", "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": dashes(s), css: { stroke: colour(s.run) } }));
      const few = s.y.filter((v) => v !== null).length;
      if (spec.dots || few === 1) s.x.forEach((x, i) => { if (s.y[i] !== null) root.append(svg("circle", { cx: plot.sx(x), cy: plot.sy(s.y[i]), r: 3.2, css: { fill: colour(s.run) } })); });
    }
    state.plot = plot;
    const ends = state.lines.map((s) => { const y = s.even.filter((v) => v !== null); return `${s.name} from ${show(y[0], spec.unit)} to ${show(y[y.length - 1], spec.unit)}`; });
    root.setAttribute("aria-label", `${spec.title}, ${spec.note}: ${ends.join("; ")}. Arrow keys read values.`);
  };
  readable(root, state);
  mount(root, draw);
  const kinds = spec.legend ? el("div", { class: "legend" }, spec.legend.map((name, i) => el("span", {}, svg("svg", { class: "dash", viewBox: "0 0 26 4", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 2, y2: 2, "stroke-width": 2, "stroke-dasharray": DASHES[i], css: { stroke: "currentColor" } })), name))) : null;
  return figure(spec, root, kinds);
}

/**
 * Stacked layers of one run, each iteration as wide as it took on the axis. spec: title, note, unit, number (of the
 * run), x (its axes), layers, top(), axis (a fixed one).
 */
function stackChart(spec) {
  const root = svg("svg", { tabindex: 0, role: "img", "aria-label": `${spec.title}: ${spec.note}. Arrow keys read values.` });
  const state = {};
  const axis = () => spec.axis || view.axis;
  const x = () => spec.x[axis()];
  const rows = [...spec.x.iteration.keys()].filter((i) => spec.layers.some((l) => l.y[i] !== null));
  state.positions = () => rows.map((i) => x()[i]);
  state.read = (at) => {
    const i = rows.find((row) => x()[row] >= at) ?? rows[rows.length - 1];
    const total = spec.layers.reduce((sum, l) => sum + (l.y[i] || 0), 0);
    const parts = spec.layers.map((l) => ({ name: l.name, colour: l.colour, text: `${show(l.y[i] || 0, spec.unit)} · ${percent((l.y[i] || 0) / (total || 1), 0)}` }));
    return { rows: parts.reverse(), x: x()[i], header: `iteration ${spec.x.iteration[i]}: ${show(total, spec.unit)}` };
  };
  state.pick = (at) => treesLink(spec.number, spec.x.iteration[rows.find((row) => x()[row] >= at) ?? rows[rows.length - 1]]);
  const draw = () => {
    if (!rows.length || !root.clientWidth) return;
    const starts = rows.map((i) => (i > 0 ? x()[i - 1] : axis() === "iteration" ? x()[i] - 1 : 0));
    const plot = (state.plot = frame(root, [starts[0], x()[rows[rows.length - 1]]], [0, spec.top()], axis(), spec.unit, AXES[axis()]));
    if (!plot) return;
    const base = rows.map(() => 0);
    for (const layer of spec.layers) {
      let d = "", back = "";
      rows.forEach((i, n) => {
        const from = plot.sx(starts[n]).toFixed(1), to = plot.sx(x()[i]).toFixed(1), high = base[n] + (layer.y[i] || 0);
        d += `${n ? "L" : "M"}${from} ${plot.sy(high).toFixed(1)}L${to} ${plot.sy(high).toFixed(1)}`;
        back = `L${to} ${plot.sy(base[n]).toFixed(1)}L${from} ${plot.sy(base[n]).toFixed(1)}${back}`;
        base[n] = high;
      });
      root.append(svg("path", { d: `${d}${back}Z`, css: { fill: layer.colour } }));
    }
  };
  readable(root, state);
  mount(root, draw);
  return figure(spec, root, el("div", { class: "legend" }, spec.layers.map((l) => el("span", {}, el("i", { class: "swatch", css: { "--colour": l.colour } }), `${l.name} ${percent(l.share, 0)}`))));
}
