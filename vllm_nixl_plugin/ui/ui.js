/* The live page of a server. It reads /status once a second, /history when a push has ended, /plan when asked to.

   The token lives in `token` and nowhere else. Everything that the server says is shown as text, never as markup. */
"use strict";

(() => {
  const EVERY_MS = 1000, PATIENCE_MS = 10000;
  const STAGES = [
    ["receive", "bytes arrive"], ["prepare", "made ready beside what serves"], ["pause", "pause"],
    ["install", "install"], ["resume", "resume"], ["other", "between"],
  ];
  const HOMES = {
    live: ["#15803d", "written where it serves (mode in_place)"], shadow: ["#2563eb", "in a shadow, then processed"],
    source: ["#b45309", "sent whole, loaded by vLLM"],
  };
  const base = location.pathname.replace(/\/ui\/?$/, "");
  const at = (id) => document.getElementById(id);
  let token = null, generation = 0, seen = null, map = null, workers = [];

  class Refused extends Error {}

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  async function read(path, patience = PATIENCE_MS) {
    const answer = await fetch(base + path, {
      headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", credentials: "omit",
      signal: AbortSignal.timeout(patience) });
    const body = await answer.json().catch(() => ({}));
    if (answer.ok) return body;
    const message = body.error ? body.error.message : `the server answered ${answer.status}`;
    if (answer.status === 401) throw new Refused("This is not the token of this server.");
    if (answer.status === 429) throw new Refused(message);
    throw new Error(message);
  }

  const seconds = (n) => n === undefined || n === null ? "-" : n >= 1 ? `${n.toFixed(2)} s` : `${(n * 1000).toFixed(1)} ms`;
  const clock = (at_s) => at_s ? new Date(at_s * 1000).toLocaleTimeString([], { hour12: false }) : "-";

  function card(name, value, className, small) {
    const made = element("dl", undefined, "card");
    made.append(element("dt", name), element("dd", value, className));
    if (small) made.append(element("dd", small, "small faint"));
    return made;
  }

  function showStatus(status) {
    const server = status.server || {};
    at("title").textContent = server.model ? String(server.model).split("/").pop() : "Weights";
    const lease = status.lease;
    const bad = status.torn ? "bad" : status.ready ? "good" : "warn";
    at("cards").replaceChildren(
      card("State", status.state, bad, status.ready ? "ready" : `not ready: ${status.reason}`),
      card("Weights", status.weight_version, "", `${status.epoch} updates begun`),
      card("Workers", String(status.workers.length), "", [server.dtype, server.device].filter(Boolean).join(", ")),
      card("Lease", lease ? (lease.expires_in_s > 0 ? "held" : "over") : "free", lease ? "warn" : "",
        lease ? `${lease.holder || "unnamed"}, ${seconds(Math.abs(lease.expires_in_s))} ${lease.expires_in_s > 0 ? "left" : "ago"}`
              : "anybody with the token may push"),
      card("Generation", status.held ? "paused by hand" : status.ready ? "running" : "waiting", status.held ? "warn" : "",
        `plugin ${status.plugin}, vLLM ${server.vllm || "?"}`),
    );
    const update = status.update;
    at("now").hidden = !update;
    if (update) {
      const share = update.nbytes ? Math.min(update.arrived_nbytes / update.nbytes, 1) : 0;
      at("now-version").textContent = update.version;
      at("now-step").textContent = update.step || (update.state === "open" ? "receiving" : update.state);
      at("now-bar").style.width = `${(100 * share).toFixed(1)}%`;
      at("now-bytes").textContent =
        `${nixlTreemap.bytes(update.arrived_nbytes)} of ${nixlTreemap.bytes(update.nbytes)} counted on the first worker`;
    }
  }

  function stagesOf(push) {
    const t = push.timings || {};
    const whole = push.begun_at && push.at ? Math.max(push.at - push.begun_at, 0) : t.total_s || 0;
    const parts = { prepare: t.wait_s || 0, pause: t.pause_s || 0, install: t.install_s || 0, resume: t.resume_s || 0 };
    const known = Object.values(parts).reduce((sum, part) => sum + part, 0);
    const commit = t.total_s || known;
    parts.receive = Math.max(whole - commit, 0);
    parts.other = Math.max(commit - known, 0);
    return { whole: Math.max(whole, commit), parts };
  }

  function showHistory(history) {
    const pushes = [...history.updates].reverse();
    at("none").hidden = pushes.length > 0;
    at("pushes").hidden = at("legend").hidden = !pushes.length;
    const rows = [];
    for (const push of pushes) {
      const { whole, parts } = stagesOf(push), row = element("tr");
      const bar = element("div", undefined, "stages");
      const told = [];
      for (const [name, what] of STAGES) {
        if (!(parts[name] > 0)) continue;
        const part = element("i", undefined, name);
        part.style.flexGrow = String(parts[name] / (whole || 1));
        told.push(`${what}: ${seconds(parts[name])}`);
        bar.append(part);
      }
      bar.title = told.join("\n");
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", told.join(", "));
      const wide = element("td", undefined, "wide");
      wide.append(bar);
      const fine = push.state === "done";
      row.append(
        element("td", clock(push.at)), element("td", push.version), element("td", push.state, fine ? "good" : "bad"),
        element("td", push.mode), element("td", nixlTreemap.bytes(push.nbytes)), wide, element("td", seconds(whole)),
        element("td", fine ? seconds(parts.pause + parts.install + parts.resume) : "-"));
      rows.push(row);
      if (push.error) {
        row.className = "explained";
        const why = element("tr"), cell = element("td", `${push.error.code}: ${push.error.message}`, "why");
        cell.colSpan = row.children.length;
        why.append(cell);
        rows.push(why);
      }
    }
    at("pushes").tBodies[0].replaceChildren(...rows);
  }

  function showVersions(status, history) {
    const names = history.updates.filter((push) => push.state === "done").map((push) => push.version);
    if (names[names.length - 1] !== status.weight_version) names.push(status.weight_version);
    at("versions").replaceChildren(...names.map((name, index) => {
      const item = element("li", name);
      if (index === names.length - 1) item.setAttribute("aria-current", "true");
      return item;
    }));
  }

  function legend(list, entries) {
    list.replaceChildren(...entries.map(([colour, className, text]) => {
      const item = element("li"), mark = element("i", undefined, className);
      if (colour) mark.style.background = colour;
      item.append(mark, text);
      return item;
    }));
  }

  function showPlan(index) {
    const plan = workers[index];
    const leaves = plan.destinations.map((d) => ({
      path: d.names[0], nbytes: d.received_nbytes || d.nbytes, home: d.home, reason: d.reason, names: d.names }));
    const options = {
      colour: (leaf) => (HOMES[leaf.home] || ["#667085"])[0],
      lines: (leaf) => [(HOMES[leaf.home] || ["", leaf.home])[1], leaf.reason, ...leaf.names.slice(1)].filter(Boolean),
    };
    at("map").hidden = false;
    if (map) map.update(leaves); else map = nixlTreemap(at("map"), leaves, options);
    legend(at("plan-legend"), Object.keys(plan.nbytes_by_home).map((home) =>
      [(HOMES[home] || ["#667085"])[0], "", `${home}: ${nixlTreemap.bytes(plan.nbytes_by_home[home])}`]));
    at("plan-numbers").textContent = `${nixlTreemap.bytes(plan.nbytes)} arrive at worker ${plan.worker} in ${plan.copies} ` +
      `copies to ${plan.destinations.length} destinations; ${plan.fallback.length} weights go by vLLM's own loader.`;
  }

  async function loadPlan() {
    const mine = generation;
    at("plan-show").disabled = true;
    at("plan-numbers").textContent = "Planning …";
    try {
      const found = (await read("/plan", 600000)).workers;
      if (mine !== generation) return;
      workers = found;
      at("plan-worker").replaceChildren(...workers.map((plan, index) => {
        const choice = element("option", `worker ${plan.worker}`);
        choice.value = String(index);
        return choice;
      }));
      at("plan-worker").hidden = workers.length < 2;
      at("plan-show").textContent = "Read it again";
      showPlan(0);
    } catch (error) {
      if (mine === generation) at("plan-numbers").textContent = `No plan: ${error.message}`;
    } finally {
      at("plan-show").disabled = false;
    }
  }

  function leave(why) {
    token = null;
    generation += 1;
    seen = null;
    map = null;
    workers = [];
    at("main").hidden = at("leave").hidden = true;
    at("map").hidden = at("plan-worker").hidden = true;
    at("map").replaceChildren();
    at("plan-legend").replaceChildren();
    at("plan-numbers").textContent = at("link").textContent = "";
    at("plan-show").textContent = "Show the plan";
    at("title").textContent = "Weights";
    at("login").hidden = false;
    at("refused").textContent = why || "";
    at("token").focus();
  }

  async function watch(mine) {
    while (mine === generation) {
      try {
        const status = await read("/status");
        if (mine !== generation) return;
        const key = JSON.stringify([status.last && status.last.update_id, status.incarnation, status.weight_version]);
        if (key !== seen) {
          const history = await read("/history");
          if (mine !== generation) return;
          seen = key;
          showHistory(history);
          showVersions(status, history);
        }
        showStatus(status);
        at("login").hidden = true;
        at("main").hidden = at("leave").hidden = false;
        at("link").className = "";
        at("link").textContent = `as of ${new Date().toLocaleTimeString([], { hour12: false })}`;
      } catch (error) {
        if (mine !== generation) return;
        if (error instanceof Refused) return leave(error.message);
        if (at("main").hidden) return leave(`The server does not answer: ${error.message}`);
        at("link").className = "lost";
        at("link").textContent = `no answer (${error.message}); trying again`;
      }
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  at("where").textContent = location.host;
  legend(at("legend"), STAGES.map(([name, text]) => [null, name, text]));
  at("login").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value.trim();
    at("token").value = "";
    at("refused").textContent = "";
    generation += 1;
    watch(generation);
  });
  at("leave").addEventListener("click", () => leave());
  at("plan-show").addEventListener("click", loadPlan);
  at("plan-worker").addEventListener("change", () => showPlan(Number(at("plan-worker").value)));
})();
