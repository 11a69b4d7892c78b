// The workers of a run, and one of them.

import { LineChart } from "./chart.js";
import { confirm, h, say, show, Table, tag } from "./dom.js";
import { ago, bytes, count, counted, dateOf, speed } from "./format.js";
import { get, operator, post } from "./api.js";

const PAGE = 50;
const RELOAD = 5000;
const ORDER = ["training", "checking", "waiting", "paused", "away", "lost", "excluded", "banned"];
const KIND = { training: "good", checking: "good", waiting: "warn", paused: "warn", lost: "bad", excluded: "bad", banned: "bad", away: "quiet" };
const STANDING = {
  unchecked: "not checked yet",
  newcomer: "newcomer: its updates count less until some are checked",
  trusted: "trusted: its checks have been good so far",
  suspected: "suspected: some of its updates looked wrong",
  excluded: "excluded: too many of its updates failed checks",
  banned: "banned by the operator",
};
const STATES = {
  training: "holds a lease and trains", checking: "checks the updates of others", waiting: "has nothing to do right now",
  paused: "waits for a while, because an update of it was refused", away: "has not been heard of for a while",
  lost: "vanished while it held a lease", excluded: "gets no leases any more", banned: "was banned by the operator",
};
const SORTS = {
  contribution: (a, b) => b.tokens - a.tokens,
  state: (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || b.tokens - a.tokens,
  name: (a, b) => a.name.localeCompare(b.name),
  newest: (a, b) => b.joined - a.joined,
};

// A worker's name, isolated so that letters of right-to-left scripts do not reorder the text around it.
export const nameOf = (name) => h("bdi", { class: "name" }, name);

export class WorkersView {
  constructor(app) {
    this.app = app;
    this.workers = [];
    this.most = PAGE;
    this.search = h("input", { type: "search", placeholder: "Name", "aria-label": "Find a worker by name", oninput: () => this.draw() });
    this.state = h("select", { "aria-label": "State", onchange: () => this.draw() }, h("option", { value: "" }, "all states"), ORDER.map((state) => h("option", { value: state }, state)));
    this.sort = h("select", { "aria-label": "Order", onchange: () => this.draw() }, Object.keys(SORTS).map((name) => h("option", { value: name }, name)));
    this.count = h("p", { class: "note", role: "status" });
    this.table = new Table("Workers", this.columns(), (worker) => worker.number);
    this.more = h("button", { type: "button", class: "plain", onclick: () => { this.most += PAGE; this.draw(); } }, "Show more");
    this.element = h(
      "div", { class: "view" },
      h("section", { class: "card", "aria-labelledby": "workers-title" },
        h("h2", { id: "workers-title" }, "Workers and what they have contributed"),
        h("div", { class: "filters" }, h("label", {}, "find ", this.search), h("label", {}, "show ", this.state), h("label", {}, "sort by ", this.sort)),
        this.count, h("div", { class: "scroll" }, this.table.element), this.more),
    );
  }

  columns() {
    return [
      { name: "worker", cell: (worker, cell) => this.link(worker, cell) },
      { name: "does", cell: (worker, cell) => (cell.textContent === worker.state ? null : tag(worker.state, KIND[worker.state])) },
      { name: "block", number: true, cell: (worker) => (worker.block === null ? "" : String(worker.block)) },
      { name: "tokens/s", number: true, cell: (worker) => speed(worker.tokens_per_second) },
      { name: "tokens merged", number: true, title: "tokens in updates that became part of the model", cell: (worker) => count(worker.tokens) },
      { name: "share", number: true, cell: (worker) => (this.total ? `${((100 * worker.tokens) / this.total).toFixed(1)}%` : "0%") },
      { name: "updates", number: true, cell: (worker) => String(worker.updates) },
      { name: "last seen", number: true, cell: (worker) => ago(this.time - worker.seen) },
    ];
  }

  link(worker, cell) {
    const link = cell.querySelector("a");
    if (!link) return h("a", { href: `#workers/${worker.number}` }, nameOf(worker.name));
    say(link.firstChild, worker.name);
    return null;
  }

  async enter() {
    await this.load();
    this.timer = setInterval(() => this.load().catch(() => {}), RELOAD);
  }

  leave() {
    clearInterval(this.timer);
  }

  async load() {
    ({ workers: this.workers, time: this.time } = await get("v1/page/workers"));
    this.total = this.workers.reduce((sum, worker) => sum + worker.tokens, 0);
    this.draw();
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const state = this.state.value;
    const found = this.workers.filter((worker) => (!state || worker.state === state) && worker.name.toLowerCase().includes(words));
    found.sort(SORTS[this.sort.value]);
    this.table.update(found.slice(0, this.most));
    say(this.count, this.workers.length ? `${found.length} of ${this.workers.length} workers` : "No worker has joined yet.");
    show(this.more, found.length > this.most);
  }
}

export class WorkerView {
  constructor(app) {
    this.app = app;
    this.name = h("h2", {});
    this.facts = h("dl", { class: "facts" });
    this.chart = new LineChart({ title: "Contribution over time", note: "tokens in merged updates, summed up", format: count, zero: true });
    this.events = h("div", {});
    this.ban = h("button", { type: "button", class: "danger", onclick: () => this.askToBan() }, "Ban this worker");
    this.unmerge = h("button", { type: "button", onclick: () => this.askToUnmerge() }, "Remove its merged updates");
    this.result = h("p", { class: "note", role: "status" });
    this.element = h(
      "div", { class: "view" },
      h("p", {}, h("a", { href: "#workers" }, "All workers")),
      h("section", { class: "card" }, this.name, this.facts, h("p", { class: "buttons" }, this.ban, this.unmerge), this.result),
      this.chart.element,
      h("section", { class: "card" }, h("h2", {}, "Its newest events"), this.events),
    );
  }

  async enter(number) {
    this.number = Number(number);
    this.worker = undefined;
    show(this.ban, false);
    show(this.unmerge, false);
    say(this.result, "");
    await this.load();
    this.timer = setInterval(() => this.load().catch(() => {}), RELOAD);
  }

  leave() {
    clearInterval(this.timer);
  }

  async load() {
    const [{ workers, time }, { points }, { events }] = await Promise.all([
      get("v1/page/workers"), get(`v1/page/workers/${this.number}`), get(`v1/page/events?worker=${this.number}`),
    ]);
    this.worker = workers.find((each) => each.number === this.number);
    if (!this.worker) return;
    const run = this.app.run;
    if (this.name.textContent !== this.worker.name) this.name.replaceChildren(nameOf(this.worker.name));
    this.facts.replaceChildren(...factsOf(this.worker, time).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    show(this.ban, operator.token && this.worker.state !== "banned");
    show(this.unmerge, operator.token && this.worker.updates > 0);
    this.chart.update({
      series: [{ name: "tokens", points }], start: run.started, end: Math.max(run.finished ?? time, run.started + 1),
      empty: "Nothing of it has been merged yet.",
    });
    this.events.replaceChildren(...this.app.events.lines(events.slice(0, 30)));
  }

  askToBan() {
    const { name, worker } = this.worker;
    confirm({
      title: "Ban this worker?", danger: true, verb: "Ban",
      text: [
        `${name} (${worker}) will be refused from now on. The batches of its leases and unmerged updates go to other workers.`,
        "Updates that were already merged remain in the model until you remove them.",
      ],
      action: async () => {
        await post("v1/operator/ban", { worker });
        await this.load();
      },
    });
  }

  askToUnmerge() {
    const { name, worker } = this.worker;
    confirm({
      title: "Remove its merged updates?", danger: true, verb: "Remove",
      text: [
        `Blocks are rebuilt without the merged updates of ${name} (${worker}), as their next versions. The batches are trained again.`,
        "Only the updates of the newest versions are kept for this (setting swarm.keep_updates); older ones stay in the model.",
        "A worker that is not banned goes on training.",
      ],
      action: async () => {
        const { updates, blocks } = await post("v1/operator/unmerge", { worker });
        await this.load();
        say(this.result, updates ? `Removed ${counted(updates, "update")} from blocks ${blocks.join(", ")}.` : "None of its merged updates is kept, so none can be removed.");
      },
    });
  }
}

function factsOf(worker, time) {
  const facts = [
    ["does", `${worker.state}: ${STATES[worker.state]}`],
    ["block", worker.block === null ? "none at the moment" : String(worker.block)],
    ["speed", `${speed(worker.tokens_per_second)} tokens/s in the last ten minutes`],
    ["contributed", `${count(worker.tokens)} tokens in ${counted(worker.updates, "merged update")}`],
    ["reputation", STANDING[worker.standing]],
    ["last seen", ago(time - worker.seen)],
    ["joined", dateOf(worker.joined)],
    ["moved", `${bytes(worker.moved_up)} up, ${bytes(worker.moved_down)} down`],
  ];
  if (worker.worker) facts.push(["id", worker.worker], ["device", worker.device]);
  if (worker.trust) {
    const { accepted, refused, replayed, suspicion } = worker.trust;
    facts.push(["checks", `${accepted} updates passed, ${refused} failed, ${replayed} were trained again with the same result; suspicion ${suspicion.toFixed(1)} of 10`]);
  }
  return facts;
}
