// The page: headline, controls, sections of figures, trees, configs.

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

const section = (title, note, ...kids) => el("section", {}, el("h2", {}, title), note ? el("p", { class: "lead" }, note) : null, ...kids);
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
    ["Method", [h.rule && `branching ${h.rule}`, h.estimator && `advantages ${h.estimator}`, h.schedule && h.schedule.replaceAll("_", " ")].filter(Boolean).join(" · ")],
    ["Iterations", h.planned && h.planned !== h.iterations ? `${h.iterations} of ${h.planned}` : h.iterations],
    ["Generated", `${compact(h.generated_tokens)} tokens, ${compact(h.valid_tokens)} valid tokens trained on`],
    ["Training time", `${duration(h.seconds)}, without evaluation`],
    ["Seed", h.seed], ["Commit", env.commit ? `${String(env.commit).slice(0, 10)}${env.changed ? ", with changes" : ""}` : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("article", { class: "card head", css: { "--colour": colour(number) } }, el("div", {}, el("h2", {}, run.name), h.about ? el("p", { class: "about" }, h.about) : null, scoreView(run)),
    el("dl", { class: "facts num" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
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

const series = (key) => () => runs.map((run, i) => ({ run: i, name: run.name, x: run.x[view.axis], y: run.metrics[key] || [] }));
const logged = (key) => runs.some((run) => run.metrics[key]);
function panel(spec, domain) {
  return lineChart({ ...spec, series: series(spec.key), smooth: true, domain });
}
function sectionView(spec) {
  const present = spec.figures.filter((f) => logged(f.key));
  if (!present.length) return null;
  // one vertical scale where panels are there to be compared
  const domain = spec.shared_scale ? () => range(extent(runs.filter((_, i) => !view.hidden.has(i)).flatMap((run) => present.map((f) => run.metrics[f.key] || []))) || [0, 1], present[0].unit) : undefined;
  return section(spec.title, spec.note, el("div", { class: "grid" }, present.map((f) => panel(f, domain))), spec.title === "Step scores" ? positionView() : null);
}

function heldOutView() {
  const names = [...new Set(runs.flatMap((run) => run.held_out.map((h) => h.benchmark)))];
  if (!names.length) return null;
  const of = (name, value, more) => () => runs.flatMap((run, i) => run.held_out.filter((h) => h.benchmark === name).map((h) => ({ run: i, name: run.name, x: h.x[view.axis], y: h[value], ...(more ? { low: h.low, high: h.high } : {}) })));
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
  const phases = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((k) => k.startsWith("seconds/") && k !== "seconds/iteration");
  const order = ["generate", "verify", "score", "update"];
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const names = phases.map((k) => k.slice(8)).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  if (!names.length) return null;
  const top = () => 1.06 * Math.max(...runs.map((run) => Math.max(0, ...run.x.iteration.map((_, i) => names.reduce((sum, n) => sum + ((run.metrics[`seconds/${n}`] || [])[i] || 0), 0)))));
  const plots = runs.map((run) => {
    const sums = names.map((n) => (run.metrics[`seconds/${n}`] || []).reduce((a, b) => a + (b || 0), 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
    const layers = names.map((n, i) => ({ name: n, colour: `var(--p${i % 6})`, y: run.metrics[`seconds/${n}`] || run.x.iteration.map(() => null), share: sums[i] / total })).filter((l) => l.share > 0);
    return layers.length ? stackChart({ title: runs.length > 1 ? run.name : "Seconds per phase", note: "an iteration; shares of the whole run below", run, layers, top }) : null;
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

function forestsView() {
  const note = "The most telling forests of the first and the last iteration on record. Trunks run left to right; branches leave at the steps later text attends to most, or wherever the run's rule put them.";
  const words = el("dl", { class: "definition" }, [["V", "value of a node: mean reward of the leaves below it (Eq. 2)"], ["A", "advantage every token of the node is trained with (Eq. 3 for the tree estimator)"], ["FCI", "forward context influence of a step (Eq. 6)"]].map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]));
  const none = runs.filter((run) => !run.forest_files).map((run) => run.name);
  const missing = none.length ? `No forests on record${runs.length > 1 ? ` for ${none.join(", ")}` : ""}: run.save_rollouts_every was 0, or no iteration that saves them has finished.` : "";
  if (!DATA.forests.length) return section("Trees", "", el("p", { class: "card empty" }, missing || "The forest files on record hold no forest: every prompt was filtered."));
  return section("Trees", note, missing ? el("p", { class: "lead" }, missing) : null, viewer(DATA.forests, runs), words);
}

view.smooth = Math.max(...runs.map((run) => run.rows)) >= 40 ? 0.6 : 0;
controls();
const thin = runs.filter((run) => run.drawn < run.rows).map((run) => `${run.name}: ${run.drawn} of ${run.rows} iterations`);
main.append(...[
  el("h1", { class: "skip" }, `Report of ${runs.map((r) => r.name).join(", ")}`),
  el("div", { class: "heads" }, runs.map(headView)), heldOutView(), DATA.sections.map(sectionView), secondsView(), forestsView(), otherView(), configView(),
  el("footer", {}, `Written by attnrl ${DATA.version} from run directories alone. Faint lines are values as logged, strong ones their moving average.${thin.length ? ` Curves are thinned (${thin.join("; ")}); every evaluation is drawn.` : ""}`),
].flat().filter(Boolean));
