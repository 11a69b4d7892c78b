// Requests to the coordinator, and the live stream. The operator's token is a header and never a
// cookie. It lives in this tab only.

const KEY = "blocktrain-operator";
const FIRST_WAIT = 1000;
const LONGEST_WAIT = 15000;
const SILENCE = 15000; // without a byte for so long, a connection counts as broken

export const operator = {
  get token() {
    return sessionStorage.getItem(KEY) ?? "";
  },
  set token(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
};

function headers(more = {}) {
  return operator.token ? { ...more, authorization: `Operator ${operator.token}` } : more;
}

export class Refused extends Error {
  constructor(code, reason) {
    super(reason);
    this.code = code;
  }
}

async function answered(response) {
  if (response.ok) return response;
  let code = "unavailable";
  let reason = `the coordinator answered ${response.status}`;
  try {
    ({ error: code, reason } = await response.json());
  } catch {
    // not from a coordinator, for example from a proxy
  }
  throw new Refused(code, reason);
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  return (await answered(response)).json();
}

export async function post(path, message) {
  const body = message === undefined ? undefined : JSON.stringify(message);
  const response = await answered(
    await fetch(path, { method: "POST", headers: headers({ "content-type": "application/json" }), body }),
  );
  return response.status === 204 ? null : response.json();
}

// Follows the run until the page is left. Calls on.open, on.lost(seconds, reason) and on[event](data).
export class Live {
  constructor(on) {
    this.on = on;
    this.last = null;
    this.wait = FIRST_WAIT;
    this.retry = null;
    this.controller = null;
    addEventListener("online", () => this.now());
    document.addEventListener("visibilitychange", () => this.changed());
    this.connect();
  }

  // Connect at once instead of waiting longer, or again after the token has changed.
  now() {
    clearTimeout(this.retry);
    this.controller?.abort();
    this.wait = FIRST_WAIT;
    this.connect();
  }

  // A hidden page needs no stream.
  changed() {
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        clearTimeout(this.retry);
        this.controller?.abort();
        this.controller = null;
      }, 60000);
    } else {
      clearTimeout(this.hiding);
      if (!this.controller) this.now();
    }
  }

  async connect() {
    const controller = (this.controller = new AbortController());
    let reason = "the connection ended";
    try {
      const after = this.last === null ? "" : `?after=${this.last}`;
      const response = await answered(
        await fetch(`v1/page/live${after}`, { headers: headers(), signal: controller.signal }),
      );
      await this.on.open();
      this.wait = FIRST_WAIT;
      await this.read(response.body, controller);
    } catch (error) {
      if (controller.signal.aborted && !controller.silent) return;
      if (error instanceof Refused) reason = error.message;
      if (error.code === "unauthorized") return this.on.refused(error.message);
    }
    if (this.controller !== controller) return;
    const wait = this.wait * (0.75 + 0.5 * Math.random());
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT);
    this.on.lost(wait / 1000, reason);
    this.retry = setTimeout(() => this.connect(), wait);
  }

  async read(body, controller) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const silence = setTimeout(() => {
        controller.silent = true;
        controller.abort();
      }, SILENCE);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) this.receive(part);
    }
  }

  receive(part) {
    const fields = Object.fromEntries(
      part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]),
    );
    if (fields.id) this.last = Number(fields.id);
    if (fields.event) this.on[fields.event](JSON.parse(fields.data));
  }
}
