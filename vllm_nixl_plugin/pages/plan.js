/* The page of `vllm-nixl plan --html`. `plan`: {server, leaves, reasons}; see trainer_client/commands/plan_page.py. */
"use strict";
(() => {
  const HOMES = { live: ["live", "#1b7f5c"], shadow: ["shadow", "#3566b8"], source: ["fallback", "#b3541e"] };
  const SERIES = ["#3566b8", "#b3541e", "#1b7f5c", "#8b4fa8", "#9a7b16", "#a8324a", "#2a8a9a", "#6b6f76"];
  const workers = [...new Set(plan.leaves.map((leaf) => leaf.worker))].sort((a, b) => a - b);
  const tell = (selector, text) => { document.querySelector(selector).textContent = text; };
  const sum = (leaves, of = (leaf) => leaf.nbytes) => leaves.reduce((total, leaf) => total + of(leaf), 0);

  const ways = {
    home: { key: (leaf) => leaf.home, name: (key) => HOMES[key][0], colour: (key) => HOMES[key][1] },
    worker: {
      key: (leaf) => leaf.worker, name: (key) => `worker ${key}`,
      colour: (key) => SERIES[workers.indexOf(key) % SERIES.length] },
  };

  function select(label, choices, changed) {
    const box = document.createElement("label"), made = document.createElement("select");
    for (const [value, text] of choices) made.append(new Option(text, value));
    made.onchange = changed;
    box.append(`${label} `, made);
    document.querySelector("form").append(box);
    return made;
  }

  const by = select("colour by", [["home", "home"], ["worker", "rank"]], draw);
  const of = select("rank", [["", "all"], ...workers.map((worker) => [worker, `worker ${worker}`])], draw);
  let map = null;

  function draw() {
    const way = ways[by.value];
    const leaves = of.value === "" ? plan.leaves : plan.leaves.filter((leaf) => String(leaf.worker) === of.value);
    const keys = [...new Set(leaves.map(way.key))].sort();
    document.querySelector("ul").replaceChildren(...keys.map((key) => {
      const line = document.createElement("li"), mark = document.createElement("i");
      mark.style.background = way.colour(key);
      line.append(mark, `${way.name(key)} ${nixlTreemap.bytes(sum(leaves.filter((leaf) => way.key(leaf) === key)))}`);
      return line;
    }));
    tell("p", `${workers.length} worker${workers.length > 1 ? "s" : ""}, ${leaves.length} destinations, ` +
      `${nixlTreemap.bytes(sum(leaves))}; a push brings ${nixlTreemap.bytes(sum(leaves, (leaf) => leaf.received))}`);
    const options = {
      colour: (leaf) => way.colour(way.key(leaf)),
      lines: (leaf) => [
        `${HOMES[leaf.home][0]}, worker ${leaf.worker}, receives ${nixlTreemap.bytes(leaf.received)}`,
        ...(leaf.also.length ? [`also ${leaf.also.join(", ")}`] : []),
        ...(plan.reasons[leaf.reason] ? [`not live: ${plan.reasons[leaf.reason]}`] : []),
      ],
    };
    if (map) { map.redraw(options); map.update(leaves); }
    else map = nixlTreemap(document.getElementById("map"), leaves, options);
  }

  tell("h1", document.title);
  draw();
})();
