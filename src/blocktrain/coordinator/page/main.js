// The run page: chooses the view by the part of the address after the #, and keeps it up to date.

import { get, Live, operator, Refused } from "./api.js";
import { h, say } from "./dom.js";
import { clock } from "./format.js";
import { EventsView } from "./events.js";
import { OperatorView } from "./operator.js";
import { RunView } from "./run.js";
import { WorkersView, WorkerView } from "./workers.js";

const CHARTS = 5000;
const at = (id) => document.getElementById(id);

class App {
  constructor() {
    this.run = null;
    this.view = null;
    this.events = new EventsView(this);
    this.views = { run: new RunView(this), workers: new WorkersView(this), worker: new WorkerView(this), events: this.events, operator: new OperatorView(this) };
    addEventListener("hashchange", () => this.route());
    setInterval(() => this.loadCharts().catch(() => {}), CHARTS);
  }

  async start() {
    this.takeToken();
    this.live = new Live({
      open: () => this.opened(),
      lost: (seconds, reason) => this.lost(seconds, reason),
      refused: (reason) => this.refused(reason),
      overview: (run) => this.overview(run),
      event: (event) => this.events.add(event),
      behind: () => this.events.element.isConnected && this.events.load(),
    });
  }

  // The token from the address, which then disappears from the address.
  takeToken() {
    const [, token] = location.hash.match(/^#operator=(.+)$/) ?? [];
    if (!token) return;
    operator.token = decodeURIComponent(token);
    history.replaceState(null, "", "#operator");
  }

  async opened() {
    await this.reload();
    this.connection("live", "good");
    if (!this.view) await this.route();
    else await this.view.enter?.(this.argument);
  }

  lost(seconds, reason) {
    const since = this.run ? `; these numbers are of ${clock(this.run.time)}` : "";
    this.connection(`no connection (${reason}); trying again in ${Math.max(1, Math.round(seconds))} s${since}`, "bad");
  }

  // The token is wrong, or the page is private.
  async refused(reason) {
    const had = operator.token;
    operator.token = "";
    const view = this.views.operator;
    view.signIn.hidden = false;
    view.signedIn.hidden = true;
    view.refused(had ? reason : "This run page is private: sign in as its operator.");
    if (had) return this.live.now(); // perhaps the page is public
    this.connection("not signed in", "warn");
    at("main").replaceChildren(view.element);
    this.view = null;
  }

  // After signing in or out.
  async signedIn() {
    this.views.operator.refused("");
    try {
      if (this.view) await this.view.enter?.(this.argument);
    } catch (error) {
      if (error.code === "unauthorized") return this.refused(error.message);
    }
    this.live.now();
  }

  connection(text, kind) {
    const element = at("connection");
    say(element, text);
    element.className = kind;
  }

  async reload() {
    this.overview(await get("v1/page/overview"));
    await this.loadCharts();
  }

  overview(run) {
    this.run = run;
    const title = run.title ?? `run ${run.run}`;
    say(at("title"), title);
    document.title = `${Math.floor(100 * run.progress)}% ${title}`;
    say(at("who"), run.public ? "Everybody who can reach this address sees the names and contributions of workers." : "Only the operator sees this page.");
    this.views.run.overview(run);
    this.views.operator.overview(run);
  }

  async loadCharts() {
    if (!this.run || document.hidden || (this.view && this.view !== this.views.run)) return;
    this.views.run.curves(await get("v1/page/charts"));
  }

  async route() {
    if (!this.run) return;
    this.takeToken();
    const [name, argument] = location.hash.slice(1).split("/");
    const view = (name === "workers" && argument ? this.views.worker : this.views[name]) ?? this.views.run;
    const isFirst = !this.view;
    this.view?.leave?.();
    this.view = view;
    this.argument = argument;
    for (const link of document.querySelectorAll("nav a")) {
      const isHere = link.hash === `#${name || "run"}`;
      if (isHere) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    at("main").replaceChildren(view.element);
    if (!isFirst) {
      at("main").focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    try {
      await view.enter?.(argument);
      if (view === this.views.run) await this.loadCharts();
    } catch (error) {
      if (error.code === "unauthorized") return this.refused(error.message);
      if (error instanceof Refused) at("main").prepend(h("p", { class: "card problem", role: "alert" }, error.message));
    }
  }
}

new App().start();
