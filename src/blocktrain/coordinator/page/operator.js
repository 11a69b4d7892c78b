// The operator's view: pause, drain and resume the run; invites. Banning is in the view of a worker.

import { get, operator, post } from "./api.js";
import { command, confirm, h, say, show, Table } from "./dom.js";
import { counted, duration } from "./format.js";

const CONTROLS = {
  pause: {
    to: "paused", title: "Pause the run?", verb: "Pause",
    text: ["Workers stop at their next heartbeat, within about ten seconds. What they have trained of open leases is lost; the batches are handed out again.", "To lose nothing, drain the run instead."],
  },
  drain: {
    to: "draining", title: "Drain the run?", verb: "Drain",
    text: ["Workers finish the leases that they hold and get no new ones. Use this before you stop the coordinator for a while."],
  },
  resume: { to: "running", title: "Resume the run?", verb: "Resume", text: ["Waiting workers get leases again, within about ten seconds."] },
};
const ALLOWED = { running: ["pause", "drain"], draining: ["pause", "resume"], drained: ["resume"], paused: ["resume"], finished: [] };
const ROLES = { train: "", evaluate: " --evaluate", validate: " --validate" };

export class OperatorView {
  constructor(app) {
    this.app = app;
    this.signIn = this.signInCard();
    this.buttons = Object.fromEntries(Object.entries(CONTROLS).map(([name, control]) => [name, this.button(control)]));
    this.note = h("p", { class: "note", role: "status" });
    this.invites = new Table("Invites", this.columns(), (invite) => invite.id);
    this.made = h("div", { class: "made", "aria-live": "polite" });
    this.signedIn = h(
      "div", { class: "view" },
      h("section", { class: "card", "aria-labelledby": "control-title" }, h("h2", { id: "control-title" }, "Run"), this.note, h("p", { class: "buttons" }, Object.values(this.buttons))),
      h("section", { class: "card", "aria-labelledby": "invite-title" }, h("h2", { id: "invite-title" }, "New invite"), this.inviteForm(), this.made),
      h("section", { class: "card", "aria-labelledby": "invites-title" }, h("h2", { id: "invites-title" }, "Invites"), h("div", { class: "scroll" }, this.invites.element)),
      h("section", { class: "card" }, h("h2", {}, "Workers"), h("p", {}, "To ban a worker, choose it in ", h("a", { href: "#workers" }, "the list of workers"), ".")),
      h("p", { class: "buttons" }, h("button", { type: "button", class: "plain", onclick: () => this.signOut() }, "Sign out of this tab")),
    );
    this.element = h("div", { class: "view" }, this.signIn, this.signedIn);
  }

  signInCard() {
    this.field = h("input", { type: "password", autocomplete: "off", "aria-label": "Operator's token", required: true });
    this.problem = h("p", { class: "problem", role: "alert" });
    return h(
      "section", { class: "card", "aria-labelledby": "sign-title" }, h("h2", { id: "sign-title" }, "For the operator"),
      h("p", {}, "With the operator's token this page can pause the run, ban workers and make invites. On the coordinator's machine, this prints the address of the page with the token:"),
      command("blocktrain page --data-dir FOLDER"),
      h("form", { class: "filters", onsubmit: (event) => this.trySignIn(event) }, h("label", {}, "token ", this.field), h("button", { class: "primary" }, "Sign in")),
      this.problem,
    );
  }

  async trySignIn(event) {
    event.preventDefault();
    operator.token = this.field.value.trim().replace(/^.*#operator=/, "");
    this.field.value = "";
    await this.app.signedIn();
  }

  signOut() {
    operator.token = "";
    this.app.signedIn();
  }

  refused(reason) {
    say(this.problem, reason);
  }

  button({ to, title, verb, text }) {
    const action = async () => {
      await post("v1/operator/control", { control: to });
      await this.app.reload();
    };
    return h("button", { type: "button", class: "primary", onclick: () => confirm({ title, verb, text, action }) }, verb);
  }

  columns() {
    return [
      { name: "id", cell: (invite) => invite.id },
      { name: "role", cell: (invite) => invite.role },
      { name: "uses left", number: true, cell: (invite) => String(invite.uses_left) },
      { name: "valid for", number: true, cell: (invite) => (invite.revoked ? "revoked" : invite.seconds_left > 0 ? duration(invite.seconds_left) : "expired") },
      {
        name: "revoke",
        cell: (invite, cell) => {
          if (invite.revoked) return h("span", { class: "quiet" }, "revoked");
          return cell.querySelector("button") ? null : h("button", { type: "button", class: "small", "aria-label": `Revoke invite ${invite.id}`, onclick: () => this.revoke(invite.id) }, "Revoke");
        },
      },
    ];
  }

  revoke(id) {
    confirm({
      title: "Revoke this invite?", danger: true, verb: "Revoke",
      text: [`Nobody can join with invite ${id} any more. Workers that joined with it stay.`],
      action: async () => {
        await post(`v1/operator/invites/${id}/revoke`);
        await this.load();
      },
    });
  }

  inviteForm() {
    const role = h("select", {}, Object.keys(ROLES).map((name) => h("option", { value: name }, name)));
    const uses = h("input", { type: "number", min: 1, max: 1000000, value: 1, required: true });
    const days = h("input", { type: "number", min: 1, max: 3650, value: 30, required: true });
    const onsubmit = (event) => {
      event.preventDefault();
      const request = { role: role.value, uses: Number(uses.value), days: Number(days.value) };
      confirm({
        title: "Make an invite?", verb: "Make invite",
        text: [`Whoever has it can join the run (role ${request.role}) and read its text and weights: ${counted(request.uses, "worker")} within ${counted(request.days, "day")}.`],
        action: async () => {
          this.showInvite(await post("v1/operator/invites", request), request.role);
          await this.load();
        },
      });
    };
    return h("form", { class: "filters", onsubmit }, h("label", {}, "role ", role), h("label", {}, "workers ", uses), h("label", {}, "days ", days), h("button", { class: "primary" }, "Make invite"));
  }

  showInvite(made, role) {
    this.made.replaceChildren(
      h("p", {}, "Copy it now: it is not stored, and cannot be shown again."),
      command(made.command + ROLES[role]),
      h("img", { class: "qr", alt: `QR code of invite ${made.id}`, src: `data:image/svg+xml;base64,${btoa(made.qr)}` }),
    );
  }

  overview(run) {
    const allowed = ALLOWED[run.state];
    for (const [name, button] of Object.entries(this.buttons)) show(button, allowed.includes(name));
    say(this.note, `The run is ${run.state}. Training: ${counted(run.workers.training ?? 0, "worker")}.`);
  }

  async enter() {
    show(this.signIn, !operator.token);
    show(this.signedIn, operator.token);
    if (operator.token) {
      this.overview(this.app.run);
      await this.load();
    }
  }

  leave() {
    this.made.replaceChildren();
  }

  async load() {
    const { invites } = await get("v1/operator/invites");
    this.invites.update(invites);
  }
}
