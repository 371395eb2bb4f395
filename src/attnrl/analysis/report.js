// The page: overview, curves, trees, config; each place has a link of its own.

const runs = DATA.runs;
const main = document.getElementById("main");
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = dark.matches ? "dark" : "light";
const paint = (name) => root.setAttribute("data-theme", name);
paint(theme);
dark.addEventListener("change", (event) => { theme = event.matches ? "dark" : "light"; paint(theme); });
document.getElementById("theme").addEventListener("click", () => { theme = theme === "dark" ? "light" : "dark"; paint(theme); });
addEventListener("beforeprint", () => paint("light"));
addEventListener("afterprint", () => paint(theme));

const section = (title, note, ...kids) => el("section", { "data-place": slug(title) }, el("h2", {}, title, el("a", { class: "anchor", href: `#curves/${slug(title)}`, "aria-label": `Link to ${title}` }, "#")), note ? el("p", { class: "lead" }, note) : null, ...kids);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const evaluated = (run) => run.held_out.filter((h) => h.accuracy.some((a) => a !== null));

/** Accuracy before and after: of one benchmark, or of the logged average, with its intervals; else the mean of several. */
function change(all) {
  const average = all.find((h) => h.benchmark === "average"), held = average ? [average] : all;
  const ends = held.map((h) => ({ first: 0, last: h.accuracy.length - 1, h }));
  const one = held.length === 1 ? held[0] : null, n = one ? one.accuracy.length - 1 : 0;
  const interval = (i) => (one && one.low[i] !== null && one.high[i] !== null ? [one.low[i], one.high[i]] : null);
  return {
    before: mean(ends.map((e) => e.h.accuracy[e.first])), after: mean(ends.map((e) => e.h.accuracy[e.last])),
    several: ends.some((e) => e.last > e.first), low: interval(0), high: interval(n),
    at: [held[0].x.iteration[0], held[0].x.iteration[held[0].x.iteration.length - 1]],
  };
}
function delta(before, after) {
  const points = 100 * (after - before);
  return el("span", { class: `delta num ${Math.abs(points) < 0.05 ? "flat" : points > 0 ? "up" : "down"}` }, `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)} points`);
}

function scoreView(run) {
  const held = evaluated(run);
  if (!held.length) return [el("p", { class: "interval" }, "No held-out evaluation on record.")];
  const c = change(held), count = held.filter((h) => h.benchmark !== "average").length;
  const what = held.length === 1 ? `held-out accuracy on ${held[0].benchmark}` : `mean held-out accuracy of ${count} benchmarks`;
  if (!c.several) return [el("p", { class: "score num" }, el("span", { class: "big" }, percent(c.after))), el("p", { class: "interval" }, `${what}, one evaluation, after iteration ${c.at[1]}${c.high ? `; 95 % interval ${between(c.high)}` : ""}`)];
  const overlap = c.low && c.high ? (c.low[1] < c.high[0] || c.high[1] < c.low[0] ? "; they do not overlap" : "; they overlap") : "";
  return [
    el("p", { class: "score num" }, el("span", { class: "from" }, `${percent(c.before)} →`), el("span", { class: "big" }, percent(c.after)), delta(c.before, c.after)),
    el("p", { class: "interval" }, `${what}, iteration ${c.at[0]} → ${c.at[1]}`),
    c.low && c.high ? el("p", { class: "interval num" }, `95 % intervals ${between(c.low)} and ${between(c.high)}${overlap}`) : null,
  ];
}

function headView(run, number) {
  const h = run.headline, env = run.environment;
  const facts = [
    ["Preset", h.preset], ["Model", h.model],
    ["Method", [run.branches ? h.rule && `branching ${h.rule}` : "no branching", h.estimator && `advantages ${h.estimator}`, h.schedule && h.schedule.replaceAll("_", " ")].filter(Boolean).join(" · ")],
    ["Iterations", h.planned && h.planned !== h.iterations ? `${h.iterations} of ${h.planned}` : h.iterations],
    ["Generated", `${compact(h.generated_tokens)} tokens drawn`],
    ["Trained on", `${compact(h.valid_tokens)} tokens with signal${run.branches ? "; a prefix that several paths share counts in each of them" : ""}`],
    ["Training time", `${duration(h.seconds)}, without evaluation`],
    ["Seed", h.seed], ["Commit", env.commit ? `${String(env.commit).slice(0, 10)}${env.changed ? ", with changes" : ""}` : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("article", { class: "card head", css: { "--colour": colour(number) } }, el("div", {}, el("h2", {}, run.name), h.about ? el("p", { class: "about" }, h.about) : null, h.complaint ? el("p", { class: "complaint wrong" }, h.complaint) : null, scoreView(run)),
    el("dl", { class: "facts num" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
}

/** Runs side by side that did not cost the same: said before anyone compares their last numbers. */
function costView() {
  const spent = runs.map((run) => run.headline.generated_tokens).filter((tokens) => tokens > 0);
  if (spent.length < 2 || Math.max(...spent) < 1.05 * Math.min(...spent)) return null;
  return el("p", { class: "lead cost" }, `These runs drew ${compact(Math.min(...spent))} to ${compact(Math.max(...spent))} tokens: their last numbers are not at equal cost. Choose tokens as the horizontal axis, or run attnrl compare with --at tokens.`);
}

function controls() {
  const axis = el("fieldset", {}, el("legend", {}, "Horizontal axis"), el("span", { class: "segmented" }, Object.entries({ iteration: "iteration", tokens: "tokens", seconds: "time" }).map(([name, text]) =>
    el("label", {}, el("input", { type: "radio", name: "axis", value: name, checked: name === view.axis, on: { change: () => { view.axis = name; redraw(); } } }), text))));
  const figureOut = el("output", { class: "num" }, view.smooth.toFixed(2));
  const smooth = el("label", {}, el("span", { class: "soft" }, "Smoothing "), el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, on: { input: (e) => { view.smooth = Number(e.target.value); figureOut.textContent = view.smooth.toFixed(2); redraw(); } } }), " ", figureOut);
  const keys = runs.length < 2 ? null : el("fieldset", {}, el("legend", {}, "Runs"), runs.map((run, i) => el("label", { class: "runkey", css: { "--colour": colour(i) } },
    el("input", { type: "checkbox", checked: true, on: { change: (e) => { if (e.target.checked) view.hidden.delete(i); else view.hidden.add(i); redraw(); } } }), el("i", { class: "swatch" }), run.name)));
  document.getElementById("controls").append(el("div", { class: "wrap" }, keys, axis, smooth));
}
const redraw = () => charts.forEach((draw) => draw());

const line_ = (run, i, key, name, dash) => ({ run: i, name, dash, iteration: run.x.iteration, x: run.x[view.axis], y: run.metrics[key] || [] });
const series = (key) => () => runs.map((run, i) => line_(run, i, key, run.name));
const seriesOf = (lines) => () => runs.flatMap((run, i) => lines.map(([key, name], n) => line_(run, i, key, runs.length > 1 ? `${run.name}, ${name}` : name, n)));
const logged = (key) => runs.some((run) => run.metrics[key]);
function panel(spec, domain) {
  const several = (spec.lines || []).filter(([key]) => logged(key));
  return lineChart({ ...spec, series: several.length > 1 ? seriesOf(several) : series(spec.key), legend: several.length > 1 ? several.map(([, name]) => name) : null, smooth: true, domain });
}
function sectionView(spec) {
  const present = spec.figures.filter((f) => logged(f.key));
  if (!present.length) return null;
  // one vertical scale where panels are there to be compared
  const domain = spec.shared_scale ? () => range(extent(runs.filter((_, i) => !view.hidden.has(i)).flatMap((run) => present.flatMap((f) => [[f.key], ...f.lines].map(([key]) => run.metrics[key] || [])))) || [0, 1], present[0].unit) : undefined;
  return section(spec.title, spec.note, el("div", { class: "grid" }, present.map((f) => panel(f, domain))), spec.title === "Step scores" ? positionView() : null);
}

function heldOutView() {
  const names = [...new Set(runs.flatMap((run) => run.held_out.map((h) => h.benchmark)))];
  if (!names.length) return null;
  const of = (name, value, more) => () => runs.flatMap((run, i) => run.held_out.filter((h) => h.benchmark === name).map((h) => ({ run: i, name: run.name, iteration: h.x.iteration, x: h.x[view.axis], y: h[value], ...(more ? { low: h.low, high: h.high } : {}) })));
  const has = (name, value) => runs.some((run) => run.held_out.some((h) => h.benchmark === name && h[value].some((v) => v !== null)));
  const layout = names.length === 1 ? "grid wide" : "grid";
  const plots = names.flatMap((name) => [
    lineChart({ title: `${name}: accuracy`, note: "pass@1 with its 95 % interval", unit: "share", series: of(name, "accuracy", true), dots: true, tall: names.length === 1 }),
    names.length === 1 && has(name, "length") ? lineChart({ title: `${name}: response length`, note: "mean tokens, in evaluation", unit: "tokens", series: of(name, "length"), dots: true, tall: true }) : null,
  ]);
  const rows = runs.flatMap((run, i) => evaluated(run).map((h) => {
    const n = h.accuracy.length - 1, cell = (j) => (h.low[j] === null ? percent(h.accuracy[j]) : `${percent(h.accuracy[j])} (${between([h.low[j], h.high[j]])})`);
    const cut = h.truncated[n] === null ? "–" : percent(h.truncated[n]);
    return el("tr", {}, el("td", {}, el("span", { class: "runkey", css: { "--colour": colour(i) } }, el("i", { class: "swatch" }), run.name)), el("td", {}, h.benchmark), el("td", { class: "n" }, cell(0)), el("td", { class: "n" }, n ? cell(n) : "–"),
      el("td", { class: "n" }, n ? delta(h.accuracy[0], h.accuracy[n]) : "–"), el("td", { class: "n" }, h.length[n] === null ? "–" : compact(h.length[n])), el("td", { class: "n" }, cut));
  }));
  const table = el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Run"), el("th", {}, "Benchmark"), ["First", "Last", "Change", "Length", "Truncated"].map((t) => el("th", { class: "n" }, t)))), el("tbody", {}, rows)));
  return section("Held-out accuracy", "Problems never trained on, before, during and after training. Bands and brackets are 95 % intervals, by bootstrap over problems.",
    el("div", { class: layout }, plots), rows.length > 1 || names.length > 1 ? el("div", { css: { "margin-top": "14px" } }, table) : null);
}

function positionView() {
  const found = runs.map((run, i) => ({ run: i, name: run.name, data: run.fci })).filter((r) => r.data);
  if (!found.length) return null;
  const of = (value) => () => found.map((r) => ({ run: r.run, name: r.name, x: r.data.position, y: r.data[value] }));
  const shared = { unit: "number", xUnit: "share", xTitle: "position in the trunk", xs: [0, 1] };
  const scored = found.some((r) => r.data.fci.some((v) => v !== null));
  const branched = found.some((r) => r.data.branches.some((v) => v !== null));
  const words = found.filter((r) => r.data.correlation !== null).map((r) => `${r.name} ${signed(r.data.correlation)} over ${r.data.trunks.toLocaleString("en")} trunks`);
  return el("div", { css: { "margin-top": "14px" } }, el("div", { class: "grid wide" },
    scored ? lineChart({ ...shared, title: "FCI by position", note: "mean over steps, start to end of the trunk", series: of("fci") }) : null,
    branched ? lineChart({ ...shared, unit: "share", title: "Where branches start", note: "share of all branches, by position in the trunk", series: of("branches") }) : null),
  words.length ? el("p", { class: "lead", css: { "margin-top": "10px" } }, `Even uniform attention favours early steps, since more text follows them. Mean rank correlation of FCI with position: ${words.join("; ")}.`) : null);
}

function secondsView() {
  const phases = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((k) => k.startsWith("seconds/") && k !== "seconds/iteration" && !k.startsWith("seconds/reward_"));
  const order = ["generate", "verify", "score", "update"];
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const names = phases.map((k) => k.slice(8)).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  if (!names.length) return null;
  const top = () => 1.06 * Math.max(...runs.map((run) => Math.max(0, ...run.x.iteration.map((_, i) => names.reduce((sum, n) => sum + ((run.metrics[`seconds/${n}`] || [])[i] || 0), 0)))));
  const plots = runs.map((run) => {
    const sums = names.map((n) => (run.metrics[`seconds/${n}`] || []).reduce((a, b) => a + (b || 0), 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
    const layers = names.map((n, i) => ({ name: n, colour: `var(--p${i % 6})`, y: run.metrics[`seconds/${n}`] || run.x.iteration.map(() => null), share: sums[i] / total })).filter((l) => l.share > 0);
    return layers.length ? stackChart({ title: runs.length > 1 ? `Seconds: ${run.name}` : "Seconds per phase", note: "of an iteration; shares of the whole run below", unit: "seconds", number: runs.indexOf(run), x: run.x, layers, top }) : null;
  });
  return section("Time", "Where an iteration's seconds go.", el("div", { class: runs.length > 2 ? "grid" : "grid wide" }, plots));
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[prefix, value]];
  return Object.entries(value).flatMap(([k, v]) => flat(v, prefix ? `${prefix}.${k}` : k));
}
function configView() {
  const tables = runs.map((run) => new Map(flat(run.config)));
  const keys = [...new Set(tables.flatMap((t) => [...t.keys()]))].filter((k) => new Set(tables.map((t) => JSON.stringify(t.get(k)))).size > 1);
  const cell = (v) => (v === undefined ? "–" : typeof v === "string" ? v : JSON.stringify(v));
  const differ = runs.length < 2 ? null : keys.length ? el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Key"), runs.map((run, i) => el("th", {}, el("span", { class: "runkey", css: { "--colour": colour(i) } }, el("i", { class: "swatch" }), run.name))))),
    el("tbody", {}, keys.map((k) => el("tr", {}, el("td", {}, el("code", {}, k)), tables.map((t) => el("td", {}, el("code", {}, cell(t.get(k))))))))))
    : el("p", { class: "lead" }, "The configs of these runs are the same.");
  const whole = runs.map((run) => el("details", { class: "card more" }, el("summary", {}, `${run.name}: config and environment`),
    el("div", { class: "inside" }, el("pre", {}, JSON.stringify(run.config, null, 2)), el("pre", {}, JSON.stringify(run.environment, null, 2)))));
  return section("Config", runs.length > 1 ? "What differs between the runs, then each config in full." : "", differ, whole);
}

function otherView() {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((k) => !DATA.drawn.includes(k) && !k.startsWith("seconds/")).sort();
  if (!keys.length) return null;
  const inside = el("div", { class: "inside" });
  let done = false;
  return el("details", { class: "card more", on: { toggle: () => {
    if (done) return;
    done = true;
    inside.append(el("div", { class: "grid" }, keys.map((key) => panel({ key, title: key, note: "", unit: /share|accuracy|solve|valid$|fraction/.test(key) ? "share" : /tokens|count|leaves|prompts|rollouts/.test(key) ? "count" : "number" }))));
  } } }, el("summary", {}, `All other metrics (${keys.length})`), inside);
}

/** Why prompts taught or not, iteration by iteration, as far as the forests are read. */
function reasonsView() {
  const plots = runs.map((run, number) => {
    const map = INDEX.by[number], iterations = [...map.keys()].sort((a, b) => a - b);
    if (iterations.length < 2) return null;
    const all = iterations.map((i) => map.get(i)), count = (rows, kind) => rows.filter((row) => row.kind === kind).length;
    const total = all.reduce((n, rows) => n + rows.length, 0);
    const layers = Object.keys(REASON_NAMES).map((kind) => ({ name: reasonName(kind), colour: REASON_COLOURS[kind], y: all.map((rows) => count(rows, kind)), share: all.reduce((n, rows) => n + count(rows, kind), 0) / total })).filter((l) => l.share > 0);
    return stackChart({ title: runs.length > 1 ? `Why: ${run.name}` : "Why prompts taught, or did not", note: "prompts on record, an iteration; shares below", unit: "count", number, x: { iteration: iterations }, axis: "iteration", layers, top: () => 1.06 * Math.max(...all.map((rows) => rows.length)) });
  }).filter(Boolean);
  return plots.length ? section("Reasons", "Each prompt of an iteration by what came of it. Click an iteration to see its trees.", el("div", { class: runs.length > 2 ? "grid" : "grid wide" }, plots)) : null;
}
/** The most telling forests of the newest iteration on record. */
function tellingView() {
  const rows = runs.flatMap((_, i) => { const newest = Math.max(...INDEX.by[i].keys()); return newest > -Infinity ? [...INDEX.by[i].get(newest)].sort((a, b) => b.interest - a.interest).slice(0, Math.max(2, Math.floor(6 / runs.length))) : []; });
  const none = runs.filter((run) => !run.recorded.length).map((run) => run.name);
  const missing = none.length ? `No forests on record${runs.length > 1 ? ` for ${none.join(", ")}` : ""}: run.save_rollouts_every was 0, or no iteration that saves them has finished.` : "";
  if (!rows.length) return section("Trees to look at", "", el("p", { class: "card empty" }, missing || (online() ? "The forests are being read." : "The forest files on record hold no forest: every prompt was filtered.")));
  return section("Trees to look at", `The most telling forests of the newest iteration: outcomes that differ within a tree come first. ${missing}`, el("ul", { class: "telling" }, rows.map((row) =>
    el("li", { class: "card" }, el("a", { href: forestLink(row) }, excerpt(row, 120)), el("span", { class: "soft num" }, `${runs.length > 1 ? `${runs[row.run].name}, ` : ""}iteration ${row.iteration} · V(root) ${row.value.toFixed(2)} · ${runs[row.run].branches ? `${row.branched} of ${row.trees} trees branched` : `${row.trees} responses; this method does not branch`}`)))),
    el("p", {}, el("a", { href: "#trees" }, "All forests in a table →")));
}

const KEY_FIGURES = ["trunks/accuracy", "train/valid_token_share", "policy/kl", "generate/length"];
const figures = () => DATA.sections.flatMap((s) => s.figures);
const overview = () => [
  el("div", { class: "heads" }, runs.map(headView)), costView(), heldOutView(), tellingView(), reasonsView(),
  section("At a glance", "Four of the curves; all of them are under Curves. Click a point to see the trees of its iteration.", el("div", { class: "grid wide" }, figures().filter((f) => KEY_FIGURES.includes(f.key) && logged(f.key)).map((f) => panel(f)))),
];
const curvesPage = () => [heldOutView(), DATA.sections.map(sectionView), secondsView(), otherView()];
const thin = () => runs.filter((run) => run.drawn < run.rows).map((run) => `${run.name}: ${run.drawn} of ${run.rows} iterations`);
const footer = () => el("footer", {}, `Written by attnrl ${DATA.version} from run directories alone. Faint lines are values as logged, strong ones their moving average.${thin().length ? ` Curves are thinned (${thin().join("; ")}); every evaluation is drawn.` : ""} Keys: `, el("button", { type: "button", class: "linky", on: { click: help } }, "?"));

const PAGES = { overview: "Overview", curves: "Curves", trees: "Trees", config: "Config" };
let shown = { page: null, refresh: null, keys: {} };
function show_(page, kids, more = {}) {
  charts.length = 0;
  hideTip();
  shown = { page, refresh: null, keys: {}, ...more };
  document.getElementById("controls").hidden = page !== "overview" && page !== "curves";
  for (const a of document.querySelectorAll("#pages a")) a.setAttribute("aria-current", a.dataset.page === page || (page === "tree" && a.dataset.page === "trees") ? "page" : "false");
  main.replaceChildren(...[el("h1", { class: "skip" }, `${PAGES[page] || "Tree"} of ${runs.map((r) => r.name).join(", ")}`), kids, footer()].flat(Infinity).filter(Boolean));
}
async function treePage([run, iteration, number, tree, branch]) {
  const at = { run, iteration, number }, key = `${run}/${iteration}/${number}`;
  const asked = location.hash;
  let view;
  try { view = forestView(ready(await SOURCE.forest(run, iteration, number)), at, tree ?? null, branch ?? null); }
  catch (error) { view = { node: el("p", { class: "card empty" }, error.message), keys: {} }; }
  if (location.hash !== asked) return; // another place was chosen meanwhile
  if (!order.some((row) => row.key === key)) reorder({});
  const here = order.findIndex((row) => row.key === key);
  const by = (n) => { const row = order[here + n]; if (row) location.hash = forestLink(row); };
  const button = (n, text) => el("button", { type: "button", class: "plain", disabled: !order[here + n] || here < 0, on: { click: () => by(n) } }, text);
  const name = runs[run] ? runs[run].name : `run ${run}`;
  show_("tree", [el("nav", { class: "picker", "aria-label": "Forests" }, el("a", { href: table.hash || "#trees" }, "← Table"), button(-1, "Previous (p)"), button(1, "Next (n)"),
    el("span", { class: "num" }, `${runs.length > 1 ? `${name}, ` : ""}iteration ${iteration}, forest ${number + 1}${here >= 0 ? ` · ${here + 1} of ${order.length.toLocaleString("en")} in the table` : ""}`)), view.node],
  { keys: { ...view.keys, n: () => by(1), p: () => by(-1), Escape: () => { location.hash = table.hash || "#trees"; } } });
  if (tree === undefined) scrollTo(0, 0);
}
function route() {
  const [path, query] = location.hash.slice(1).split("?");
  const [page, ...rest] = path.split("/");
  if (page === "main") { main.focus(); return; }
  if (page === "tree" && rest.length >= 3) { treePage(rest.map(Number)); return; }
  if (page === "trees") {
    if (table.hash !== location.hash) table.cursor = 0;
    table.hash = location.hash;
    const { node, refresh } = tablePage(Object.fromEntries(new URLSearchParams(query || "")));
    show_("trees", [node], { refresh });
  } else if (page === "config") show_("config", [configView()]);
  else if (page === "curves") {
    show_("curves", curvesPage(), { rebuild: true });
    const place = rest[0] && [...main.querySelectorAll("[data-place]")].find((n) => n.dataset.place === rest[0]);
    if (place) { place.scrollIntoView(); return; }
  } else show_("overview", overview(), { rebuild: true });
  scrollTo(0, 0);
}
function help() {
  const rows = [["1 2 3 4", "overview, curves, trees, config"], ["/", "search in prompts and responses"], ["↑ ↓ or j k, Enter", "walk through the table, open a forest"], ["n p", "next, previous forest"], ["[ ]", "previous, next tree"], ["b", "open or close all branches"], ["Esc", "back to the table"], ["← →, Enter", "on a chart: read values, open that iteration's trees"], ["d", "light or dark"]];
  const box = el("dialog", { class: "card help", on: { close: () => box.remove(), click: () => box.close() } }, el("h2", {}, "Keys"), el("dl", { class: "definition" }, rows.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])));
  document.body.append(box);
  box.showModal();
}
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const names = Object.keys(PAGES), act = shown.keys[event.key];
  if (act) act();
  else if (names[Number(event.key) - 1]) location.hash = `#${names[Number(event.key) - 1]}`;
  else if (event.key === "/") { event.preventDefault(); const focus = () => main.querySelector('input[name="q"]')?.focus(); if (shown.page === "trees") focus(); else { location.hash = "#trees"; setTimeout(focus, 60); } }
  else if (event.key === "?") help();
  else if (event.key === "d") document.getElementById("theme").click();
});
addEventListener("hashchange", route);

document.getElementById("pages").append(...Object.entries(PAGES).map(([page, text]) => el("a", { href: `#${page}`, "data-page": page }, text)));
view.smooth = Math.max(0, ...runs.map((run) => run.rows)) >= 40 ? 0.6 : 0;
controls();
DATA.forests.forEach(([run, ...values], i) => { const [iteration] = values; INDEX.put(run, iteration, [...DATA.forests.filter((row) => row[0] === run && row[1] === iteration).map((row) => row.slice(1))]); });
route();
if (online()) {
  document.getElementById("live").hidden = false;
  served.watch((chunks, pages) => {
    chunks.forEach((list, run) => list.forEach((c) => INDEX.put(run, c.iteration, c.rows, c.error)));
    pages.forEach((page, run) => { if (page) Object.assign(runs[run], page); });
    if (!pages.some(Boolean) && !chunks.some((list) => list.length)) return;
    if (shown.refresh) shown.refresh();
    if (shown.rebuild && !document.querySelector("dialog")) {
      const y = scrollY, open = [...main.querySelectorAll("details")].map((d) => d.open);
      show_(shown.page, shown.page === "curves" ? curvesPage() : overview(), { rebuild: true });
      main.querySelectorAll("details").forEach((d, i) => { d.open = Boolean(open[i]); });
      scrollTo({ top: y, behavior: "instant" });
    }
  });
}
