"use strict";
// What `attnrl view` adds: the page asks its own server, and nothing else, for what is new.

const served = {
  async ask(path, query) {
    const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`);
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error || `the server answered ${answer.status}`);
    return value;
  },
  forest: (run, iteration, number) => served.ask("forest", { run, iteration, number }),
  /** Keys of the forests that hold the words, handed to `found` as they come; `going()` false stops the search. */
  async search(words, found, going) {
    for (let run = 0; run < DATA.runs.length; run++)
      for (let before = ""; before !== null && going(); ) {
        const answer = await served.ask("search", { run, q: words, ...(before === "" ? {} : { before }) });
        found(answer.hits.map(([iteration, number]) => `${run}/${iteration}/${number}`));
        before = answer.next;
      }
  },
  /** Ask on and on: index chunks and changed runs go to `changed(chunks, pages, progress)`. */
  async watch(changed) {
    const have = DATA.runs.map(() => 0);
    for (;;) {
      let wait = 1000;
      try {
        const { runs } = await served.ask("changes", { have: have.join(","), stamps: DATA.runs.map((run) => run.stamp).join(",") });
        changed(runs.map((run) => run.chunks), runs.map((run) => run.page), runs);
        runs.forEach((run, i) => { have[i] = run.have; if (run.have < run.of) wait = 0; });
        served.lost(false);
      } catch (error) {
        served.lost(true);
        wait = 3000;
      }
      await new Promise((done) => setTimeout(done, wait));
    }
  },
  lost(yes) {
    const sign = document.getElementById("live");
    sign.textContent = yes ? "○ server gone" : "● live";
    sign.classList.toggle("gone", yes);
  },
};
