// The inspector: a map of a forest, and one tree of it in words, each branch beside its trunk.

const mark = (leaf) => (leaf.right ? "✓" : "✗");
const verdict = (leaf) => (leaf.right ? "right" : "wrong");
const signed = (value, places = 3) => (value === null ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(places)}`);
const valueColour = (value) => `color-mix(in oklab, var(${value < 0.5 ? "--bad" : "--good"}) ${Math.round(200 * Math.abs(value - 0.5))}%, var(--half))`;
const heat = (share) => `color-mix(in srgb, var(--heat) ${Math.round(6 + 94 * share)}%, var(--card))`;
const short = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);
const trimmed = (text) => text.trim(); // blank lines end most steps; they would only make gaps
const oneLine = (text) => text.replace(/\s+/g, " ").trim();

function spread(tree) {
  const rewards = [tree.reward, ...tree.branches.map((b) => b.reward)];
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  return rewards.reduce((sum, r) => sum + (r - mean) ** 2, 0) / rewards.length + (tree.branches.length ? 0.01 : 0);
}
function tellingTree(forest) {
  return forest.trees.reduce((best, tree, i) => (spread(tree) > spread(forest.trees[best]) ? i : best), 0);
}
/** The step a branch point lies in, and how many of its tokens the branch keeps. */
function stepOf(tree, point) {
  const found = tree.steps.findIndex((s) => point >= s.start && point < s.stop);
  return { step: found, inside: found < 0 ? 0 : point - tree.steps[found].start };
}
function hover(node, ...lines) {
  node.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, ...lines()));
  node.addEventListener("pointerleave", hideTip);
  return node;
}
const line = (text, cls) => el("div", { class: cls || null }, text);

/** Whether the run's method makes no branches at all: its trees are responses, each with an advantage of its own. */
const branchless = (forest) => forest.trees.every((t) => kindOf(t.reason) === "no_rule");
const treeName = (forest) => (branchless(forest) ? "Response" : "Tree");

function forestMap(forest, chosen, choose) {
  const phone = innerWidth < 560, width = phone ? 360 : 1100, left = branchless(forest) ? 96 : 64, right = width - 90, high = 24, low = 17, gap = branchless(forest) ? 2 : 10;
  const longest = Math.max(...forest.trees.flatMap((t) => [t.tokens, ...t.branches.map((b) => b.point + b.tokens)]), 1);
  const top = Math.max(...forest.trees.flatMap((t) => t.steps.map((s) => s.fci || 0)), 1e-12);
  const sx = (token) => left + (token / longest) * (right - left);
  const root = svg("svg", { role: "group", "aria-label": "Map of the forest: one row a rollout, left to right in tokens" });
  let y = 20;
  for (const t of ticks(0, longest, phone ? 3 : 8, "count").at) {
    if (t > longest) continue;
    root.append(svg("text", { x: sx(t), y: 10, "text-anchor": "middle" }, t === 0 ? "0 tokens" : compact(t)), svg("line", { class: "gridline", x1: sx(t), x2: sx(t), y1: 15, y2: 9999 }));
  }
  const end = (group, leaf, x, middle, value) => group.append(
    svg("text", { x: x + 7, y: middle + 4.5, class: verdict(leaf) }, mark(leaf)),
    svg("text", { x: width - 4, y: middle + 4, "text-anchor": "end" }, value));
  forest.trees.forEach((tree, number) => {
    const group = svg("g", { class: `rollout ${number === chosen ? "chosen" : ""}`, tabindex: 0, role: "button", "aria-label": `${treeName(forest)} ${number + 1}, trunk ${verdict(tree)}, ${counted(tree.branches.length, "branch", "branches")}` },
      svg("rect", { class: "hit", x: 0, y: y - 2, width, height: high + 2, rx: 5 }),
      svg("text", { class: "name", x: 6, y: y + high / 2 + 3.5 }, `${treeName(forest)} ${number + 1}`));
    for (const step of tree.steps)
      group.append(hover(svg("rect", { x: sx(step.start), y: y + 2, width: Math.max(sx(step.stop) - sx(step.start), 0.8), height: high - 11, css: { fill: step.fci === null ? "var(--grid)" : heat(step.fci / top), stroke: "var(--line)", "stroke-width": sx(step.stop) - sx(step.start) > 4 ? "0.6" : "0" } }),
        () => [line(`tree ${number + 1}, step ${tree.steps.indexOf(step) + 1}${step.fci === null ? "" : ` · FCI ${digits(step.fci, 3)}`}`, "when"), line(oneLine(step.text), "clipped")]));
    for (const node of tree.nodes)
      group.append(hover(svg("rect", { x: sx(node.start), y: y + high - 8, width: Math.max(sx(node.stop) - sx(node.start) - 1, 1), height: 5, rx: 1.5, css: { fill: valueColour(node.value) } }),
        () => [line(`tree ${number + 1}, tokens ${node.start} to ${node.stop}`, "when"), line(`V ${node.value.toFixed(2)} · A ${signed(node.advantage)} · leaves below: ${node.leaves}`)]));
    end(group, tree, sx(tree.tokens), y + high / 2, branchless(forest) ? `A ${signed(tree.nodes[0].advantage)}` : `V ${tree.nodes[0].value.toFixed(2)}`);
    const pick = (branch) => () => choose(number, branch);
    put(group, { on: { click: pick(null), keydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(number, null); } } } }, []);
    root.append(group);
    const under = y + high - 3;
    y += high + 2;
    if (!tree.branches.length && !branchless(forest)) {
      root.append(svg("text", { x: left, y: y + 9 }, `not branched: ${treeReasonName(tree.reason)}`));
      y += 13;
    }
    tree.branches.forEach((branch, n) => {
      const middle = y + low / 2, from = sx(branch.point), to = Math.max(sx(branch.point + branch.tokens), from + 14);
      const row = svg("g", { class: "rollout", on: { click: pick(n) } }, svg("rect", { class: "hit", x: 0, y, width, height: low, rx: 4 }),
        svg("path", { d: `M${from} ${under}V${middle - 4}q0 4 4 4H${from + 12}`, fill: "none", "stroke-width": 1.4, css: { stroke: "var(--point)" } }),
        svg("rect", { x: from + 11, y: middle - 3.5, width: Math.max(to - from - 11, 2), height: 7, rx: 2, css: { fill: valueColour(branch.value), opacity: "0.85" } }));
      end(row, branch, to, middle, `A ${signed(branch.advantage)}`);
      root.append(hover(row, () => [line(`tree ${number + 1}, branch ${n + 1} at token ${branch.point} · ${verdict(branch)}${branch.answer ? ` (${short(branch.answer, 40)})` : ""}`, "when"), line(oneLine(branch.steps.join("")), "clipped")]));
      y += low;
    });
    for (const point of new Set(tree.branches.map((b) => b.point)))
      root.append(svg("path", { d: `M${sx(point)} ${under - 15}l4.5 4.5l-4.5 4.5l-4.5 -4.5z`, css: { fill: "var(--point)", stroke: "var(--card)", "stroke-width": "1", "pointer-events": "none" } }));
    y += gap;
  });
  root.style.setProperty("min-width", phone ? "0" : "900px");
  root.setAttribute("viewBox", `0 0 ${width} ${y}`);
  root.querySelectorAll(".gridline").forEach((l) => l.setAttribute("y2", y - gap));
  const scored = forest.trees.some((t) => t.steps.some((s) => s.fci !== null));
  return el("div", {}, el("div", { class: "map" }, root), el("div", { class: "keys" },
    scored ? el("span", {}, "FCI of a step, low to high ", el("i", { class: "ramp heat" })) : el("span", {}, "steps were not scored in this run"),
    el("span", {}, "value V of a node, 0 to 1 ", el("i", { class: "ramp value" })),
    branchless(forest) ? null : el("span", {}, el("b", { css: { color: "var(--point)" } }, "◆"), " branch point"),
    el("span", {}, el("b", { class: "right" }, "✓"), " right  ", el("b", { class: "wrong" }, "✗"), " wrong"),
    el("span", {}, branchless(forest) ? "at the edge: A of the response; this method does not branch" : "at the edge: V of the whole tree, A of a branch"), el("span", {}, "Click a row to read it.")));
}

const TREE_REASON_NAMES = { branched: "branched", filtered: "prompt filtered out", budget: "tree number used up", no_candidate: "no candidate step", rule: "rule found no place", no_rule: "the rule makes no branches", error: "errors" };
const treeReasonName = (reason) => TREE_REASON_NAMES[kindOf(reason)] || kindOf(reason);
const STEP_REASON_NAMES = { point: "◆ branch point", first: "first step", answer: "after </think>", near_end: "too near the end", low: "under the quantile", gap: "too near a point", later: "high, but later", unscored: "not scored", rule: "not chosen", not_branched: "" };

/** What a step at this place gets on average in this run: the position null. */
function placeMean(run, tree, step) {
  const found = DATA.runs[run].fci;
  if (!found || !tree.tokens) return null;
  return found.fci[Math.min(Math.floor((found.fci.length * step.start) / tree.tokens), found.fci.length - 1)];
}
const against = (run, tree, step) => { const mean = placeMean(run, tree, step); return step.fci && mean ? `${digits(step.fci / mean, 2)}× its place` : null; };

/** Bars by step: FCI with the position null beside it, or mean entropy. */
function stepBars(tree, title, note, unit, value, mean) {
  if (!tree.steps.some(value)) return null; // not scored, or all steps nearer than Delta to the end
  const root = svg("svg", { role: "img", "aria-label": `${title} of each step of the trunk` });
  const branched = new Set(tree.branches.map((b) => b.place));
  const top = Math.max(...tree.steps.map((s) => Math.max(value(s) || 0, mean ? mean(s) || 0 : 0))) || 1;
  const draw = () => {
    const plot = frame(root, [0.5, tree.steps.length + 0.5], [0, top * 1.18], "count", "number", `step · vertical: ${unit}`);
    if (!plot) return;
    const wide = Math.min(((plot.box.right - plot.box.left) / tree.steps.length) * 0.76, 46);
    tree.steps.forEach((step, i) => {
      const x = plot.sx(i + 1), y = plot.sy(value(step) || 0);
      root.append(hover(svg("rect", { x: x - wide / 2, y, width: wide, height: Math.max(plot.box.bottom - y, 0.6), rx: Math.min(2, wide / 4), css: { fill: branched.has(i) ? "var(--point)" : mean ? "var(--heat)" : "var(--half)" } }),
        () => [line(`step ${i + 1} · ${unit} ${value(step) === null ? "–" : digits(value(step), 3)}${mean && mean(step) ? ` · at this place on average ${digits(mean(step), 3)}` : ""}`, "when"), line(reasonWords("step", step.reason), "when"), line(oneLine(step.text), "clipped")]));
      if (branched.has(i)) root.append(svg("text", { x, y: y - 4, "text-anchor": "middle", css: { fill: "var(--point)" } }, "◆"));
      if (mean && mean(step)) root.append(svg("line", { x1: x - wide / 2 - 1, x2: x + wide / 2 + 1, y1: plot.sy(mean(step)), y2: plot.sy(mean(step)), "stroke-width": 2, css: { stroke: "var(--ink)" } }));
    });
  };
  new ResizeObserver(draw).observe(root);
  return el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), el("span", { class: "note" }, note)), root);
}

function ending(leaf) {
  return [el("b", { class: verdict(leaf) }, `${mark(leaf)} ${verdict(leaf)}`),
    leaf.answer !== null && leaf.answer !== "" ? el("span", {}, "answer ", el("code", {}, short(leaf.answer, 60))) : null,
    el("span", { class: "soft" }, `${leaf.tokens.toLocaleString("en")} tokens${leaf.finish === "length" ? ", cut off" : ""}`)];
}

/** A branch step by step beside what the trunk says there; the first step that differs is marked. */
function besideTrunk(tree, branch, number) {
  const own = tree.steps.slice(branch.place).map((s) => s.text), differs = branch.differs === null ? Infinity : Math.min(branch.differs, branch.steps.length - 1);
  const rows = Array.from({ length: Math.max(own.length, branch.steps.length) }, (_, i) => [
    el("div", { class: `text ${i < differs ? "same" : ""}`, "data-of": "trunk" }, own[i] === undefined ? "" : trimmed(own[i])),
    el("div", { class: `text ${i < differs ? "same" : i === differs ? "differs" : ""}`, "data-of": "branch" },
      i === differs ? el("span", { class: "first" }, "≠ first difference") : null, branch.steps[i] === undefined ? "" : trimmed(branch.steps[i]))]);
  return el("div", { class: "beside" }, el("h4", {}, `Trunk from step ${branch.place + 1} on`), el("h4", {}, `Branch ${number + 1}${differs === Infinity ? ": word for word the trunk" : ""}`), rows);
}
function branchView(tree, branch, number, link) {
  const inside = el("div", {});
  return el("details", { class: "branch", "data-branch": number, css: { "--value": valueColour(branch.value) }, on: { toggle: (e) => { if (e.target.open && !inside.firstChild) inside.append(besideTrunk(tree, branch, number)); } } },
    el("summary", {}, el("span", { class: "pieces num" }, el("b", {}, `Branch ${number + 1}`), ending(branch),
      el("span", { title: "value: its own reward" }, `V ${branch.value.toFixed(2)}`), el("span", { title: "advantage its tokens are trained with" }, `A ${signed(branch.advantage)}`),
      el("span", { class: "soft" }, `policy ${branch.version}, rule ${branch.rule}`), el("a", { class: "anchor", href: link(number), "aria-label": `Link to branch ${number + 1}` }, "#"))),
    inside);
}
function nodeView(node, number) {
  return el("li", {}, el("div", { class: "node num", css: { "--value": valueColour(node.value) } }, el("b", {}, `Segment ${number + 1}`),
    el("span", { class: "soft" }, `tokens ${node.start} to ${node.stop}`), el("span", {}, `leaves below: ${node.leaves}`),
    el("span", {}, `V ${node.value.toFixed(2)}`), el("span", {}, `A ${signed(node.advantage)}`)));
}
function changeView(node) {
  const c = node.change, bounds = c.low === null ? "" : `, 95 % ${signed(c.low, 2)} to ${signed(c.high, 2)}`;
  return el("span", { class: "change num", title: "V of all leaves below, before the point and after it on the trunk's side; the interval is Newcombe's, of a handful of leaves" },
    `V before ${c.before.toFixed(2)} → after ${c.after.toFixed(2)} (redrawn ${c.redrawn.toFixed(2)}) · ΔV ${signed(c.delta, 2)}${bounds}`);
}

/** One tree in words: the trunk's steps in order, each branch point with the branches that leave there. */
function treeView(tree, run, link) {
  const top = Math.max(...tree.steps.map((s) => s.fci || 0), 1e-12);
  const list = el("ol", { class: "steps" });
  const fork = (node, i) => {
    const at = tree.branches.map((b, n) => [b, n]).filter(([b]) => b.point === node.start);
    const { step, inside } = stepOf(tree, node.start);
    const where = inside ? `${inside} tokens into step ${step + 1}, above` : `before step ${step + 1}`;
    list.append(el("li", {}, el("div", { class: "fork" }, el("p", {}, `◆ Branch point at token ${node.start}: ${where}`), node.change ? changeView(node) : null, at.map(([b, n]) => branchView(tree, b, n, link)))));
    list.append(nodeView(node, i));
  };
  list.append(nodeView(tree.nodes[0], 0));
  let next = 1;
  const points = new Set(tree.nodes.slice(1).map((n) => stepOf(tree, n.start).step));
  tree.steps.forEach((step, i) => {
    while (next < tree.nodes.length && tree.nodes[next].start <= step.start) fork(tree.nodes[next], next++);
    const name = STEP_REASON_NAMES[kindOf(step.reason)], near = against(run, tree, step);
    list.append(el("li", {}, el("div", { class: `step ${points.has(i) ? "branchy" : ""}`, "data-step": i },
      el("div", { class: "gauge", title: reasonWords("step", step.reason), css: { "--shade": step.fci === null ? "var(--card)" : `color-mix(in srgb, var(--heat) ${Math.round((55 * step.fci) / top)}%, var(--card))` } },
        el("b", {}, `Step ${i + 1}`), step.fci === null ? null : el("span", {}, `FCI ${digits(step.fci, 3)}`), near ? el("span", {}, near) : null,
        step.entropy === null ? null : el("span", {}, `entropy ${digits(step.entropy, 2)}`), name ? el("span", { class: "reason" }, name) : null),
      el("div", { class: "text" }, trimmed(step.text)))));
    while (next < tree.nodes.length && tree.nodes[next].start < step.stop) fork(tree.nodes[next], next++);
  });
  list.append(el("li", {}, el("p", { class: "ending num" }, "The trunk ends: ", ending(tree).map((part) => [part, " "]), el("span", { class: "soft" }, ` · policy ${tree.version}, rule ${tree.rule}`))));
  return list;
}

const WORDS = [
  ["V", "value of a node: mean reward of the leaves below it (Eq. 2)"], ["A", "advantage every token of the node is trained with (Eq. 3 for the tree estimator)"],
  ["ΔV", "how the value changes where the trunk goes on as it did instead of being drawn anew; its interval is wide, since a point has few leaves"],
  ["FCI", "forward context influence of a step: how strongly later text attends to it (Eq. 6)"],
  ["× its place", "FCI against what steps at that place of the response get on average in this run: early steps get more, whatever they say"],
  ["entropy", "of the next-token distribution, mean over the step's tokens, nats"],
];
const definitions = () => el("details", { class: "words" }, el("summary", {}, "What the numbers mean"), el("dl", { class: "definition" }, WORDS.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])));

function ready(forest) {
  for (const tree of forest.trees)
    tree.steps = tree.steps.map(([start, fci, text, entropy, reason], i, all) => ({ start, fci, text, entropy, reason, stop: i + 1 < all.length ? all[i + 1][0] : tree.tokens }));
  return forest;
}

/** The inspector of one forest. `at`: {run, iteration, number}; answers {node, keys} with the keys it understands. */
function forestView(forest, at, first, firstBranch) {
  let chosen = first !== null && first < forest.trees.length ? first : tellingTree(forest);
  const map = el("div", { class: "part" }), tree = el("div", { class: "part" });
  const link = (branch) => forestLink(at, chosen, branch);
  const allBranches = () => { const folded = [...tree.querySelectorAll("details.branch")], open = folded.some((d) => !d.open); folded.forEach((d) => { d.open = open; }); };
  const draw = (focus) => {
    map.replaceChildren(forestMap(forest, chosen, choose));
    const current = forest.trees[chosen];
    const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Trees of this forest" }, forest.trees.map((t, i) =>
      el("button", { type: "button", role: "tab", "aria-selected": String(i === chosen), tabindex: i === chosen ? 0 : -1, on: { click: () => choose(i, null, true), keydown: (e) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
        if (by) { e.preventDefault(); e.stopPropagation(); choose((i + by + forest.trees.length) % forest.trees.length, null, true); }
      } } }, `${treeName(forest)} ${i + 1} `, el("span", { class: verdict(t) }, mark(t)), t.branches.length ? ` + ${t.branches.length}` : "")));
    const bars = [stepBars(current, "FCI by step", "black: what a step at that place gets on average; violet: branched", "FCI", (s) => s.fci, (s) => placeMean(at.run, current, s)),
      stepBars(current, "Entropy by step", "mean over the step's tokens; violet: branched", "nats", (s) => s.entropy, null)];
    tree.replaceChildren(tabs, el("div", { class: "grid wide" }, bars.filter(Boolean)),
      el("p", { class: "soft treewhy" }, current.branches.length ? `This trunk has ${counted(current.branches.length, "branch", "branches")}.` : `This trunk was not branched: ${reasonWords("tree", current.reason)}.`, forest.recorded ? "" : " (derived, not on record)"),
      current.branches.length ? el("button", { type: "button", class: "plain", on: { click: allBranches } }, "Open or close all branches (b)") : "", treeView(current, at.run, link));
    if (focus) tabs.children[chosen].focus({ preventScroll: true });
  };
  const choose = (number, branch, focus, quiet) => {
    chosen = number;
    draw(focus);
    if (!quiet) history.replaceState(null, "", forestLink(at, number, branch));
    if (focus) return;
    const target = branch === null ? tree : tree.querySelector(`[data-branch="${branch}"]`);
    if (branch !== null && target) target.open = true;
    (target || tree).scrollIntoView({ block: branch === null ? "start" : "center" });
  };
  draw();
  if (first !== null && firstBranch !== null) setTimeout(() => choose(chosen, firstBranch, false, true));
  const of = forest.own_estimator ? `A: ${forest.estimator} estimator` : "A: Eq. 3 (the run's own estimator is not part of attnrl)";
  const node = el("div", { class: "card forest" },
    el("div", { class: "part" }, el("p", { class: "label" }, "Prompt"), el("p", { class: "problem" }, forest.problem || "(the problem's words are not on record)"),
      el("div", { class: "pills" }, el("span", { class: "pill" }, `reference: ${forest.answers.map((a) => short(a, 80)).join(" or ")}`),
        el("span", { class: "pill" }, `V(root) ${forest.root.toFixed(3)}`), el("span", { class: "pill" }, branchless(forest) ? counted(forest.leaves, "response") : `${counted(forest.trees.length, "tree")}, ${counted(forest.leaves, "leaf", "leaves")}`), el("span", { class: "pill" }, of),
        el("span", { class: "pill whypill" }, `${reasonName(kindOf(forest.reason))}: ${reasonWords("prompt", forest.reason)}`)), definitions()),
    map, tree);
  const by = (n) => choose((chosen + n + forest.trees.length) % forest.trees.length, null, true);
  return { node, keys: { "[": () => by(-1), "]": () => by(1), b: allBranches } };
}
