// The score view: one response at a time, its steps shaded by FCI, the deciding head's attention beside it.

const responses = DATA.responses;
const main = document.getElementById("main");
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = (name) => root.setAttribute("data-theme", name);
let theme = dark.matches ? "dark" : "light";
paint(theme);
document.getElementById("theme").addEventListener("click", () => { theme = theme === "dark" ? "light" : "dark"; paint(theme); });
document.getElementById("controls").hidden = true;

function asTree(response) {
  const steps = response.steps.map(([start, stop, text, fci, entropy, mean, reason, point]) => ({ start, stop, text, fci, entropy, mean, reason: reason || (point ? "point" : ""), point }));
  return { steps, branches: steps.flatMap((s, i) => (s.point ? [{ place: i }] : [])), tokens: steps.length ? steps[steps.length - 1].stop : 0 };
}
/** Later steps (rows) attend to earlier ones (columns); darker is more. Pointing reads a cell, clicking goes to its step. */
function mapView(map, tree) {
  const n = map.rows.length, size = Math.max(240, Math.min(520, n * 14)), top = Math.max(...map.rows.map((row) => Math.max(0, ...row))) || 1;
  const canvas = el("canvas", { width: size, height: size, class: "attention", role: "img", "aria-label": `Attention of later steps to earlier ones, layer ${map.layer + 1}, head ${map.head + 1}` });
  const pen = canvas.getContext("2d"), cell = size / n;
  const draw = () => {
    pen.clearRect(0, 0, size, size);
    pen.fillStyle = getComputedStyle(root).getPropertyValue("--heat");
    map.rows.forEach((row, j) => row.forEach((value, k) => { pen.globalAlpha = Math.sqrt((value || 0) / top); pen.fillRect(k * cell, j * cell, Math.max(cell, 1), Math.max(cell, 1)); }));
  };
  draw();
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [Math.floor(((event.clientY - box.top) / box.height) * n), Math.floor(((event.clientX - box.left) / box.width) * n)]; };
  const span = (i) => (map.run === 1 ? `step ${i + 1}` : `steps ${i * map.run + 1} to ${Math.min((i + 1) * map.run, tree.steps.length)}`);
  canvas.addEventListener("pointermove", (event) => {
    const [j, k] = at(event);
    if (map.rows[j] === undefined || map.rows[j][k] === undefined) { hideTip(); return; }
    showTip(event.clientX, event.clientY, line(`${span(j)} attends to ${span(k)}: ${digits(map.rows[j][k], 3)}`, "when"), line(oneLine(tree.steps[Math.min(k * map.run, tree.steps.length - 1)].text), "clipped"));
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => main.querySelector(`[data-step="${at(event)[1] * map.run}"]`)?.scrollIntoView({ block: "center" }));
  return el("figure", { class: "card chart" }, el("figcaption", {}, el("h3", {}, `Step-to-step attention, layer ${map.layer + 1}, head ${map.head + 1}`),
    el("span", { class: "note" }, `the head that decides most steps; down: the step that attends, across: the step attended to${map.run > 1 ? `; a cell is ${map.run} × ${map.run} steps, its largest entry` : ""}`)), canvas);
}
/** The steps that later text attends to most for their place: of a thousand steps, the ones to read first. */
function peaksView(tree) {
  const known = tree.steps.map((step, i) => ({ i, step, times: step.fci && step.mean ? step.fci / step.mean : 0 })).filter((p) => p.times > 0);
  const peaks = known.sort((a, b) => b.times - a.times).slice(0, 8);
  if (known.length < 3) return null;
  return el("figure", { class: "card chart peaks" }, el("figcaption", {}, el("h3", {}, "Steps to read first"), el("span", { class: "note" }, "highest FCI against what uniform attention would give at their place")),
    el("ol", {}, peaks.map(({ i, step, times }) => el("li", {}, el("button", { type: "button", on: { click: () => main.querySelector(`[data-step="${i}"]`).scrollIntoView({ block: "center" }) } },
      el("b", {}, `Step ${i + 1}`), el("span", { class: "num" }, ` ${digits(times, 3)}× uniform`), step.point ? el("span", { css: { color: "var(--point)" } }, " ◆") : null, el("span", { class: "soft" }, ` ${short(oneLine(step.text), 90)}`))))));
}
function stepsView(tree) {
  const top = Math.max(...tree.steps.map((s) => s.fci || 0), 1e-12);
  return el("ol", { class: "steps" }, tree.steps.map((step, i) => el("li", {}, el("div", { class: `step ${step.point ? "branchy" : ""}`, "data-step": i },
    el("div", { class: "gauge", title: step.reason ? reasonWords("step", step.reason) : null, css: { "--shade": step.fci === null ? "var(--card)" : `color-mix(in srgb, var(--heat) ${Math.round((62 * step.fci) / top)}%, var(--card))` } },
      el("b", {}, `Step ${i + 1}`), step.fci === null ? null : el("span", {}, `FCI ${digits(step.fci, 3)}`), step.fci && step.mean ? el("span", {}, `${digits(step.fci / step.mean, 2)}× uniform`) : null,
      step.entropy === null ? null : el("span", {}, `entropy ${digits(step.entropy, 2)}`), STEP_REASON_NAMES[kindOf(step.reason)] ? el("span", { class: "reason" }, STEP_REASON_NAMES[kindOf(step.reason)]) : null),
    el("div", { class: "text" }, trimmed(step.text))))));
}
function show_(number) {
  const response = responses[number], tree = asTree(response);
  charts.length = 0;
  const by = (n) => { if (responses[number + n]) location.hash = `#response/${number + n}`; };
  const button = (n, text) => el("button", { type: "button", class: "plain", disabled: !responses[number + n], on: { click: () => by(n) } }, text);
  const bars = [stepBars(tree, "FCI by step", "black: what uniform attention would give at that place; violet: branch points", "FCI", (s) => s.fci, (s) => s.mean),
    stepBars(tree, "Entropy by step", "mean over the step's tokens; violet: branch points", "nats", (s) => s.entropy, null)];
  main.replaceChildren(el("h1", { class: "skip" }, `Response ${number + 1}`),
    el("nav", { class: "picker", "aria-label": "Responses" }, responses.length > 1 ? [button(-1, "Previous (p)"), button(1, "Next (n)")] : null, el("span", { class: "num" }, `${response.name} · ${number + 1} of ${responses.length} · ${counted(tree.steps.length, "step")}, ${tree.tokens.toLocaleString("en")} tokens · model ${DATA.model}`)),
    el("div", { class: "card forest" }, el("div", { class: "part" }, el("p", { class: "label" }, "Prompt"), el("p", { class: "problem" }, response.prompt),
      el("details", { class: "words" }, el("summary", {}, "What the numbers mean"), el("dl", { class: "definition" }, [["FCI", "how strongly later text attends to the step: the largest over layers and heads (Eq. 6)"], ["× uniform", "FCI against what uniform attention would give at that place: early steps get more, whatever they say"], ["entropy", "of the next-token distribution, mean over the step's tokens, nats"]].map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])))),
    el("div", { class: "part" }, el("div", { class: "grid wide" }, bars.filter(Boolean))),
    el("div", { class: "part" }, el("div", { class: "grid wide" }, response.map ? mapView(response.map, tree) : null, peaksView(tree))), el("div", { class: "part" }, stepsView(tree))));
  keys = { n: () => by(1), p: () => by(-1), d: () => document.getElementById("theme").click() };
}
let keys = {};
const route = () => { const n = Number(location.hash.split("/")[1]); show_(responses[n] ? n : 0); scrollTo(0, 0); };
addEventListener("hashchange", route);
addEventListener("keydown", (event) => { if (!event.ctrlKey && !event.metaKey && keys[event.key]) keys[event.key](); });
route();
