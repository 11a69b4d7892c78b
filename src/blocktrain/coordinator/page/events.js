// What has happened in the run, newest first, by kind, block, worker and text.

import { get } from "./api.js";
import { h, say, show } from "./dom.js";
import { clock, counted } from "./format.js";
import { nameOf } from "./workers.js";

const MOST_LINES = 400;
const GROUPS = {
  results: ["merged", "scored", "finished"],
  problems: ["lost", "returned", "refused", "late", "clipped", "excluded", "unmerged", "checked"],
  members: ["joined", "banned", "invited", "revoked"],
  operator: ["paused", "resumed", "draining", "extended", "banned", "unmerged", "invited", "revoked"],
  routine: ["leased", "uploaded"],
};
const WORDS = {
  joined: "joined", leased: "got a lease", returned: "gave a lease back", uploaded: "sent an update",
  late: "sent a late update", merged: "new version", refused: "update refused", lost: "lease lost",
  scored: "scored", banned: "was banned", finished: "the run is finished", checked: "check",
  clipped: "update clipped", excluded: "was excluded", unmerged: "updates taken back", paused: "the operator paused the run",
  resumed: "the operator resumed the run", draining: "the operator drains the run", extended: "the operator extended the run", invited: "new invite", revoked: "invite revoked",
};
const BAD = ["lost", "refused", "banned", "excluded", "unmerged"];

// The detail of some events repeats the worker's name.
function detailOf({ name, detail }) {
  return name && detail.startsWith(`${name}, `) ? detail.slice(name.length + 2) : detail;
}

export class EventsView {
  constructor(app) {
    this.app = app;
    this.events = [];
    this.before = null;
    this.boxes = Object.keys(GROUPS).map((group) =>
      h("label", { class: "chip" }, h("input", { type: "checkbox", value: group, checked: group !== "routine", onchange: () => this.load() }), group),
    );
    this.block = h("select", { "aria-label": "Block", onchange: () => this.load() }, h("option", { value: "" }, "all blocks"));
    this.search = h("input", { type: "search", placeholder: "Worker or text", "aria-label": "Find in these events", oninput: () => this.draw() });
    this.count = h("p", { class: "note", role: "status" });
    this.list = h("ol", { class: "events" });
    this.more = h("button", { type: "button", class: "plain", onclick: () => this.older() }, "Search older events");
    this.element = h(
      "div", { class: "view" },
      h("section", { class: "card", "aria-labelledby": "events-title" },
        h("h2", { id: "events-title" }, "Events"),
        h("fieldset", { class: "filters" }, h("legend", { class: "hidden-text" }, "Which events"), this.boxes, h("label", {}, "block ", this.block), h("label", {}, "find ", this.search)),
        this.count, this.list, this.more),
    );
  }

  async enter() {
    const { blocks } = this.app.run;
    if (this.block.options.length === 1) this.block.append(...blocks.map((block) => h("option", { value: block.index }, `block ${block.index}`)));
    await this.load();
  }

  kinds() {
    const groups = this.boxes.map((box) => box.firstChild).filter((box) => box.checked).map((box) => box.value);
    return new Set(groups.flatMap((group) => GROUPS[group]));
  }

  query(before) {
    const parameters = new URLSearchParams({ kinds: [...this.kinds()].join(",") });
    if (before) parameters.set("before", before);
    if (this.block.value) parameters.set("block", this.block.value);
    return `v1/page/events?${parameters}`;
  }

  async load() {
    if (!this.kinds().size) {
      this.events = [];
      this.before = 1;
      return this.draw();
    }
    const { events, searched_to } = await get(this.query(null));
    this.events = events;
    this.before = searched_to;
    this.draw();
  }

  async older() {
    const { events, searched_to } = await get(this.query(this.before));
    this.events.push(...events);
    this.before = searched_to;
    this.draw();
  }

  // A new event from the stream.
  add(event) {
    if (!this.element.isConnected || !this.kinds().has(event.kind)) return;
    if (this.block.value && event.block !== Number(this.block.value)) return;
    if (this.events[0]?.number >= event.number) return;
    this.events.unshift(event);
    this.events.length = Math.min(this.events.length, 10 * MOST_LINES);
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = null;
      this.draw();
    });
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const matches = ({ name, detail, kind }) => `${name} ${detail} ${WORDS[kind]}`.toLowerCase().includes(words);
    const found = words ? this.events.filter(matches) : this.events;
    this.put(found.slice(0, MOST_LINES));
    const limit = found.length > MOST_LINES ? `, the newest ${MOST_LINES} are shown` : "";
    say(this.count, `${counted(found.length, "event")}${limit}`);
    show(this.more, this.before > 1 && found.length <= MOST_LINES);
  }

  // Adds and removes lines at the ends, and keeps the others.
  put(events) {
    const lines = this.list.children;
    const newest = Number(lines[0]?.dataset.number ?? 0);
    const fresh = events.filter((event) => event.number > newest);
    const kept = events.slice(fresh.length, fresh.length + lines.length);
    const isSame = kept.length && kept.every((event, index) => event.number === Number(lines[index].dataset.number));
    if (!isSame) return this.list.replaceChildren(...this.lines(events));
    this.list.prepend(...this.lines(fresh));
    while (lines.length > events.length) this.list.lastChild.remove();
    if (lines.length < events.length) this.list.append(...this.lines(events.slice(lines.length)));
  }

  lines(events) {
    return events.map((event) => {
      const who = event.worker && h("a", { href: `#workers/${event.worker}` }, nameOf(event.name));
      const block = event.block === null ? null : h("span", { class: "quiet" }, `block ${event.block}`);
      return h(
        "li", { class: BAD.includes(event.kind) ? "bad" : event.kind, "data-number": event.number },
        h("time", { datetime: new Date(1000 * event.time).toISOString() }, clock(event.time)),
        h("span", {}, h("b", {}, WORDS[event.kind] ?? event.kind), " ", who, " ", block, " ", h("bdi", { class: "quiet" }, detailOf(event))),
      );
    });
  }
}
