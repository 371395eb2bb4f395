// The index of forests, where they come from, and the table of them: filter, sort, search, keyboard.

const FIELDS = ["iteration", "number", "uid", "problem", "reason", "value", "leaves", "right", "trees", "branched", "tokens", "cut", "fci", "interest"];
const asRow = (run, values) => { const row = { run }; FIELDS.forEach((name, i) => { row[name] = values[i]; }); row.kind = kindOf(row.reason); row.key = `${run}/${row.iteration}/${row.number}`; return row; };
const kindOf = (reason) => (reason || "").split(":")[0];
const REASON_NAMES = { taught: "taught", filtered: "filtered out", all_right: "all right", all_wrong: "all wrong", all_cut_off: "all cut off", error: "errors", no_signal: "no signal" };
const REASON_COLOURS = { taught: "var(--p2)", all_right: "var(--p0)", all_wrong: "var(--p1)", all_cut_off: "var(--p5)", filtered: "var(--p3)", no_signal: "var(--half)", error: "var(--ink)" };
const reasonName = (kind) => REASON_NAMES[kind] || kind;
/** A reason in words: what its kind means, and its detail. */
function reasonWords(group, reason) {
  const kind = kindOf(reason), detail = reason.slice(kind.length + 1).trim();
  return `${DATA.reasons[group][kind] || kind}${detail ? ` (${detail})` : ""}`;
}

/** Forests by run and iteration; `all()` is the flat list, `lead()` where the words of prompts begin to differ. */
const INDEX = {
  by: DATA.runs.map(() => new Map()), flat: null, leads: null, errors: new Map(), indexed: [],
  put(run, iteration, rows, error) {
    const list = rows.map((values) => asRow(run, values));
    if (list.length) INDEX.by[run].set(iteration, list); else INDEX.by[run].delete(iteration);
    if (error) INDEX.errors.set(`${run}/${iteration}`, error); else INDEX.errors.delete(`${run}/${iteration}`);
    INDEX.flat = INDEX.leads = null;
  },
  all() {
    INDEX.flat ||= INDEX.by.flatMap((map) => [...map.keys()].sort((a, b) => b - a).flatMap((i) => map.get(i)));
    return INDEX.flat;
  },
  find: (key) => { const [run, iteration] = key.split("/").map(Number); return (INDEX.by[run]?.get(iteration) || []).find((row) => row.key === key); },
  /** Prompts of one data set often begin alike: the words they share are left out. */
  lead(problem) {
    if (!INDEX.leads) {
      INDEX.leads = new Map();
      const ends = new Map();
      for (const { problem: text } of INDEX.all()) {
        const head = text.slice(0, 12), seen = ends.get(head);
        if (!seen) ends.set(head, [text, text]);
        else { if (text < seen[0]) seen[0] = text; if (text > seen[1]) seen[1] = text; }
      }
      for (const [head, [low, high]] of ends) {
        let n = 0;
        while (n < low.length && n < high.length && low[n] === high[n]) n++;
        const word = low.slice(0, n).search(/\S*$/);
        INDEX.leads.set(head, low === high ? 0 : word);
      }
    }
    return INDEX.leads.get(problem.slice(0, 12)) || 0;
  },
};
function excerpt(row, n = 110) {
  const at = INDEX.lead(row.problem), text = oneLine(row.problem.slice(at));
  return `${at ? "… " : ""}${short(text || "(no words on record)", n)}`;
}

const SOURCE = typeof served !== "undefined" ? served : {
  async forest(run, iteration, number) {
    const at = DATA.forests.findIndex((row) => row[0] === run && row[1] === iteration && row[2] === number);
    if (at < 0) throw new Error("This forest is not in this file; `attnrl view` on the run directory shows every recorded one.");
    return structuredClone(DATA.pages[at]);
  },
  async search(words, found) {
    const small = words.toLowerCase(), holds = (text) => text.toLowerCase().includes(small);
    DATA.pages.forEach((page, i) => {
      const texts = page.trees.flatMap((t) => [t.steps.map((s) => s[2]).join(""), ...t.branches.map((b) => b.steps.join(""))]);
      if ([page.problem, ...texts].some(holds)) found([DATA.forests[i].slice(0, 3).join("/")]);
    });
  },
};

const treesLink = (run, iteration) => {
  const recorded = online() ? DATA.runs[run].recorded : [...INDEX.by[run].keys()];
  if (!recorded.length) return null;
  const near = recorded.reduce((best, i) => (Math.abs(i - iteration) < Math.abs(best - iteration) ? i : best));
  return `#trees?run=${run}&iteration=${near}`;
};
const forestLink = (row, tree, branch) => `#tree/${row.run}/${row.iteration}/${row.number}${tree === undefined ? "" : `/${tree}`}${branch === undefined || branch === null ? "" : `/${branch}`}`;

const OUTCOMES = { mixed: "mixed", right: "all right", wrong: "all wrong", cut: "some cut off" };
const RANGES = { value: "V(root)", tokens: "tokens", fci: "mean FCI" };
const TABLE_COLUMNS = [
  ["run", "Run", "the run directory"], ["iteration", "Iteration", "in which the forest was grown"], ["problem", "Prompt", "its words, without the beginning it shares with others"],
  ["kind", "Why", "why the prompt taught, or did not"], ["value", "V(root)", "mean reward of all leaves"], ["right", "Right", "right responses of all"],
  ["branched", "Branched", "trees with branches, of all trees; – where the method does not branch"], ["tokens", "Tokens", "mean of a rollout"], ["cut", "Cut off", "responses stopped by the length limit"],
  ["fci", "FCI", "mean over the steps of the trunks, without the first"], ["interest", "Telling", "how much there is to see: outcomes that differ within a tree count most"],
];
let order = []; // the rows of the table as filtered and sorted; the inspector walks along it
const table = { hits: null, words: "", searching: false, cursor: 0 };

const NUMBERS = { iteration: "Iteration", ...Object.fromEntries(Object.entries(RANGES).flatMap(([name, label]) => [[`${name}_min`, label], [`${name}_max`, label]])) };
const isNumber = (name, text) => (name === "iteration" ? /^\s*\d+\s*(-\s*\d+\s*)?$/.test(text) : Number.isFinite(Number(text)));
const unread = (q) => Object.keys(NUMBERS).filter((name) => q[name] && !isNumber(name, q[name])); // filters that say nothing one could filter by

function matches(row, q) {
  if (q.run !== undefined && row.run !== Number(q.run)) return false;
  if (q.iteration) {
    const [low, high] = q.iteration.split("-").map(Number);
    if (row.iteration < low || row.iteration > (high || low)) return false;
  }
  if (q.reason && row.kind !== q.reason) return false;
  if (q.outcome === "mixed" && (row.right === 0 || row.right === row.leaves)) return false;
  if (q.outcome === "right" && row.right !== row.leaves) return false;
  if (q.outcome === "wrong" && row.right !== 0) return false;
  if (q.outcome === "cut" && !row.cut) return false;
  for (const name of Object.keys(RANGES)) {
    if (q[`${name}_min`] && !(row[name] >= Number(q[`${name}_min`]))) return false;
    if (q[`${name}_max`] && !(row[name] <= Number(q[`${name}_max`]))) return false;
  }
  return !q.q || (table.hits !== null && table.hits.has(row.key));
}
function sorted(rows, q) {
  const by = q.sort || "iteration", down = (q.dir || (by === "problem" || by === "kind" ? "up" : "down")) === "down" ? -1 : 1;
  const value = (row) => (row[by] === null ? -Infinity : row[by]);
  const compare = (a, b) => { const x = value(a), y = value(b); return x < y ? -down : x > y ? down : a.run - b.run || b.iteration - a.iteration || b.interest - a.interest; };
  return rows.sort(compare);
}
function reorder(asked) {
  const q = { ...asked };
  unread(q).forEach((name) => delete q[name]);
  order = sorted(INDEX.all().filter((row) => matches(row, q)), q);
  return order;
}
async function searchTexts(q, changed) {
  const words = q.q || "";
  if (words === table.words) return;
  table.words = words;
  table.hits = words ? new Set() : null;
  table.searching = Boolean(words);
  changed();
  if (!words) return;
  await SOURCE.search(words, (keys) => { if (table.words !== words) return; keys.forEach((key) => table.hits.add(key)); changed(); }, () => table.words === words);
  if (table.words === words) { table.searching = false; changed(); }
}

const ROW = 34; // pixels
function tablePage(q) {
  const several = DATA.runs.length > 1;
  const columns = TABLE_COLUMNS.filter(([name]) => several || name !== "run");
  const write = (change) => { Object.assign(q, change); for (const k of Object.keys(q)) if (q[k] === "" || q[k] === undefined) delete q[k]; history.replaceState(null, "", `#trees${Object.keys(q).length ? `?${new URLSearchParams(q)}` : ""}`); table.hash = location.hash; table.cursor = 0; scroller.scrollTop = 0; refresh(); };
  const select = (name, label, options) => el("label", {}, el("span", { class: "soft" }, `${label} `), el("select", { name, on: { change: (e) => write({ [name]: e.target.value }) } },
    el("option", { value: "" }, "any"), options.map(([value, text]) => el("option", { value, selected: String(q[name]) === String(value) }, text))));
  const input = (name, label, props) => el("label", {}, el("span", { class: "soft" }, `${label} `), el("input", { name, value: q[name] || "", ...props, on: { change: (e) => write({ [name]: e.target.value.trim() }) } }));
  const count = el("p", { class: "soft num", id: "count", role: "status" }), body = el("tbody", {}), above = el("tr", { class: "spacer", "aria-hidden": "true" }, el("td", { colspan: columns.length })), below = above.cloneNode(true);
  const headers = columns.map(([name, text, words]) => el("th", { "data-column": name, title: words, class: ["problem", "kind", "run"].includes(name) ? null : "n" },
    el("button", { type: "button", on: { click: () => write({ sort: name, dir: (q.sort || "iteration") === name && q.dir !== "up" ? "up" : "down" }) } }, text)));
  const scroller = el("div", { class: "card scroller", tabindex: 0, role: "region", "aria-label": "Forests", on: { scroll: () => draw(true), keydown: keys } },
    el("table", { class: "forests" }, el("thead", {}, el("tr", {}, headers)), body));
  const cell = (row, name) => {
    if (name === "run") return el("td", {}, el("span", { class: "runkey", css: { "--colour": colour(row.run) } }, el("i", { class: "swatch" }), DATA.runs[row.run].name));
    if (name === "problem") return el("td", { class: "words" }, el("a", { href: forestLink(row), tabindex: -1 }, excerpt(row)));
    if (name === "kind") return el("td", {}, el("span", { class: "why", title: reasonWords("prompt", row.reason), css: { "--colour": REASON_COLOURS[row.kind] || "var(--half)" } }, reasonName(row.kind)));
    const text = { iteration: row.iteration, value: row.value.toFixed(3), right: `${row.right}/${row.leaves}`, branched: DATA.runs[row.run].branches ? `${row.branched}/${row.trees}` : "–", tokens: compact(row.tokens), cut: row.cut || "", fci: row.fci === null ? "–" : digits(row.fci, 3), interest: row.interest.toFixed(2) }[name];
    return el("td", { class: "n" }, String(text));
  };
  let at = -1;
  const draw = (scrolled) => {
    const shown = Math.ceil((scroller.clientHeight || 600) / ROW) + 12, first = Math.max(0, Math.min(Math.floor(scroller.scrollTop / ROW) - 6, order.length - shown));
    if (scrolled && Math.abs(first - at) < 4 && at >= 0) return; // the rows drawn beyond the edges are still enough
    at = first;
    above.firstChild.style.height = `${first * ROW}px`;
    below.firstChild.style.height = `${Math.max(0, order.length - first - shown) * ROW}px`;
    body.replaceChildren(above, ...order.slice(first, first + shown).map((row, i) => el("tr", { class: first + i === table.cursor ? "cursor" : null, "data-key": row.key, "aria-rowindex": first + i + 1,
      on: { click: (e) => { table.cursor = first + i; if (!e.target.closest("a")) location.hash = forestLink(row); } } }, columns.map(([name]) => cell(row, name)))), below);
  };
  const refresh = () => {
    reorder(q);
    table.cursor = Math.min(table.cursor, Math.max(order.length - 1, 0));
    const all = INDEX.all().length, recorded = DATA.runs.reduce((n, run) => n + run.recorded.length, 0), ready = INDEX.by.reduce((n, map) => n + map.size, 0);
    const broken = [...INDEX.errors.values()];
    count.replaceChildren(`${order.length.toLocaleString("en")} of ${all.toLocaleString("en")} forests${table.searching ? ", searching…" : ""}`,
      SOURCE !== online() ? ` in this file (${counted(recorded, "iteration")} on record; attnrl view shows all)` : ready < recorded - broken.length ? `, ${ready} of ${recorded} iterations read` : ` of ${counted(ready, "iteration")}`,
      ...unread(q).map((name) => el("span", { class: "wrong" }, ` · ${NUMBERS[name]} “${q[name]}” is not read: give ${name === "iteration" ? "14 or 10-20" : "a number"}`)),
      broken.length ? el("span", { class: "wrong" }, ` · ${broken[0]}${broken.length > 1 ? ` and ${broken.length - 1} more` : ""}`) : "");
    headers.forEach((th) => th.setAttribute("aria-sort", (q.sort || "iteration") === th.dataset.column ? (q.dir === "up" ? "ascending" : "descending") : "none"));
    draw();
  };
  function keys(event) {
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" && order[table.cursor]) { location.hash = forestLink(order[table.cursor]); return; }
    if (!by || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    table.cursor = Math.min(Math.max(table.cursor + by, 0), order.length - 1);
    const top = table.cursor * ROW, view = scroller.clientHeight - ROW * 2;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (top > scroller.scrollTop + view) scroller.scrollTop = top - view;
    draw();
  }
  const kinds = Object.keys(REASON_NAMES);
  const filters = el("form", { class: "filters", on: { submit: (e) => e.preventDefault() } },
    el("label", { class: "grow" }, el("span", { class: "soft" }, "Search "), el("input", { name: "q", type: "search", value: q.q || "", placeholder: "words of prompts and responses ( / )", on: { change: (e) => { write({ q: e.target.value.trim() }); searchTexts(q, refresh); }, search: (e) => { write({ q: e.target.value.trim() }); searchTexts(q, refresh); } } })),
    several ? select("run", "Run", DATA.runs.map((run, i) => [i, run.name])) : null,
    input("iteration", "Iteration", { size: 7, placeholder: "14 or 10-20" }),
    select("reason", "Why", kinds.map((k) => [k, reasonName(k)])), select("outcome", "Outcome", Object.entries(OUTCOMES)),
    el("details", { class: "more-filters", open: Object.keys(RANGES).some((n) => q[`${n}_min`] || q[`${n}_max`]) }, el("summary", {}, "Ranges"), Object.entries(RANGES).map(([name, label]) => el("span", {}, input(`${name}_min`, label, { size: 5, placeholder: "from" }), input(`${name}_max`, "", { size: 5, placeholder: "to", "aria-label": `${label} to` })))),
    el("button", { type: "button", class: "plain", on: { click: () => { location.hash = "#trees"; } } }, "Clear"));
  scroller.addEventListener("focus", () => draw());
  setTimeout(() => { const at = table.cursor; refresh(); scroller.scrollTop = Math.max(0, at * ROW - 200); scroller.focus({ preventScroll: true }); });
  searchTexts(q, refresh);
  return { node: el("section", {}, el("h2", {}, "Trees"), el("p", { class: "lead" }, "Every recorded forest: one row a prompt and iteration. Choose a row to see its trees; point at a column's name to see what it says."), filters, count, scroller), refresh };
}
const online = () => (typeof served !== "undefined" ? served : null);
