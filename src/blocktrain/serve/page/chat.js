// The chat page: asks the API of the server it came from, shows answers as they come, and what
// each of them cost. Keeps the API key for this tab alone.
"use strict";

const at = (id) => document.getElementById(id);
const turns = []; // of the conversation so far, as the API wants them
let asking = null; // the AbortController of the answer under way

at("key").value = sessionStorage.getItem("blocktrain-key") ?? "";

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function look() {
  try {
    const health = await (await fetch("health", { headers: headers() })).json();
    at("model").textContent = health.model;
    const stages = health.engine?.stages?.length;
    const more = stages ? `, ${stages} ${stages === 1 ? "stage" : "stages"}` : "";
    at("health").textContent = (health.status === "ok" ? "ready" : "not available") + more;
    at("health").className = health.status === "ok" ? "ok" : "bad";
  } catch {
    at("health").textContent = "no connection";
    at("health").className = "bad";
  }
}

function body(kind, prompt) {
  const asked = {
    mode: at("mode").value,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("most").value),
    stream: true,
  };
  if (at("seed").value !== "") asked.seed = Number(at("seed").value);
  if (asked.mode === "sweep") asked.passes = Number(at("passes").value);
  return kind === "chat" ? { ...asked, messages: turns } : { ...asked, prompt };
}

// Server-sent events of a response, parsed, until [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(kind, prompt, show) {
  const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await fetch(path, {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body(kind, prompt)),
    signal: asking.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    show.text((kind === "chat" ? choice?.delta.content : choice?.text) ?? "");
    if (event.blocktrain) show.cost(event.blocktrain);
  }
}

async function ask(prompt) {
  const kind = at("kind").value;
  at("hint")?.remove();
  if (kind === "chat") {
    put(element("div", "asked", element("p", "", prompt)));
    turns.push({ role: "user", content: prompt });
  }
  const shown = new Shown(kind === "chat" ? "" : prompt);
  asking = new AbortController();
  at("send").textContent = "Stop";
  try {
    await answer(kind, prompt, shown);
  } catch (error) {
    if (error.name !== "AbortError") shown.wrong(error.message);
  }
  shown.end();
  if (kind === "chat") {
    if (shown.said) turns.push({ role: "assistant", content: shown.said });
    else turns.pop(); // what was not answered is not part of the conversation
  }
  asking = null;
  at("send").textContent = "Send";
}

// An answer on the page.
class Shown {
  said = "";
  began = performance.now();

  constructor(given) {
    this.words = element("p", "", element("span", "given", given));
    this.whole = element("div", "said going", this.words);
    put(this.whole);
  }

  text(more) {
    this.said += more;
    this.words.append(more);
    stayAtEnd();
  }

  wrong(message) {
    this.whole.append(element("p", "wrong", message));
    stayAtEnd();
  }

  end() {
    this.whole.classList.remove("going");
  }

  cost(cost) {
    const seconds = (performance.now() - this.began) / 1000;
    const bytes = cost.bytes_per_traversal * cost.traversals;
    const facts = [
      [cost.bytes_per_traversal.toFixed(2), "bytes per traversal"],
      [cost.traversals, cost.traversals === 1 ? "traversal" : "traversals"],
      [(bytes / seconds).toFixed(0), "bytes/s"],
      [seconds.toFixed(2), "s"],
    ];
    if (cost.drafted) facts.push([`${cost.accepted} of ${cost.drafted}`, "drafts accepted"]);
    if (cost.replays) facts.push([cost.replays, "replayed"]);
    const stages = Object.entries(cost.stage_seconds);
    const shown = element("div", "cost", line(facts));
    if (stages.length) shown.append(bar(stages), line(stages.map(timed)));
    colour(shown);
    this.whole.append(shown);
    stayAtEnd();
  }
}

const timed = ([name, seconds]) => [`${(seconds * 1000).toFixed(0)} ms`, name];

function line(facts) {
  const spans = facts.map(([value, what]) => element("span", "", element("b", "", value), ` ${what}`));
  return element("div", "facts", ...spans);
}

function bar(stages) {
  const whole = stages.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const parts = stages.map(([name, seconds]) => {
    const part = element("i");
    part.style.flexGrow = seconds / whole;
    part.title = name;
    return part;
  });
  return element("div", "bar", ...parts);
}

// A stage has the same colour in the bar and in the words below it.
function colour(shown) {
  shown.querySelectorAll(".bar i").forEach((part, index) => {
    part.style.background = `var(--stage-${index % 6})`;
  });
  shown.querySelectorAll(".bar + .facts span").forEach((part, index) => {
    part.style.setProperty("--stage", `var(--stage-${index % 6})`);
  });
}

function element(tag, name = "", ...inside) {
  const made = document.createElement(tag);
  made.className = name;
  made.append(...inside);
  return made;
}

function put(what) {
  at("talk").append(what);
  at("scroll").scrollTop = at("scroll").scrollHeight;
}

// Follows the text, unless somebody has scrolled up to read.
function stayAtEnd() {
  const scroll = at("scroll");
  if (scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120) {
    scroll.scrollTop = scroll.scrollHeight;
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) return asking.abort();
  const prompt = at("prompt").value;
  if (!prompt.trim()) return;
  at("prompt").value = "";
  ask(prompt);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!asking) at("form").requestSubmit();
});

at("kind").addEventListener("change", () => {
  at("prompt").placeholder = at("kind").value === "chat" ? "Message" : "The beginning of a text";
});

at("mode").addEventListener("change", () => {
  at("passes-label").hidden = at("mode").value !== "sweep";
});

at("key").addEventListener("change", () => {
  sessionStorage.setItem("blocktrain-key", at("key").value.trim());
  look();
});

at("clear").addEventListener("click", () => {
  asking?.abort();
  turns.length = 0;
  at("talk").replaceChildren();
});

look();
setInterval(look, 15000);
