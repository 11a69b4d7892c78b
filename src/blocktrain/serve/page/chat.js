// The chat page: sends prompts to the API of the server that it came from, and shows each answer as
// it arrives, with its cost. Keeps the conversation and the API key for this tab only.
"use strict";

const at = (id) => document.getElementById(id);
const hint = at("hint");
const KEY = "blocktrain-key", TALK = "blocktrain-talk";
const LIKELIEST = 5; // alternatives shown for a token
let entries = []; // prompts and answers, oldest first
let model = {}; // as the server describes it
let request = null; // the AbortController of the answer in progress

at("key").value = sessionStorage.getItem(KEY) ?? "";

function headers() {
  const key = at("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The server's state and its model.

async function look() {
  try {
    const health = await (await fetch("health", { headers: headers() })).json();
    at("model").textContent = health.model;
    const stages = health.engine?.stages?.length;
    const more = stages ? `, ${stages} ${stages === 1 ? "stage" : "stages"}` : "";
    at("health").textContent = (health.status === "ok" ? "ready" : "not available") + more;
    at("health").className = health.status === "ok" ? "ok" : "bad";
    if (!model.id && health.engine) await describe(); // a wrong key gets no details
  } catch {
    at("health").textContent = "no connection";
    at("health").className = "bad";
  }
}

async function describe() {
  model = (await (await fetch("v1/models", { headers: headers() })).json()).data[0];
  at("unit").textContent = model.vocabulary_size > 256 ? "tokens" : "bytes";
  if (model.chat_template) {
    at("purpose").textContent = "As chat it answers messages; as text it continues what you begin.";
    if (!entries.length) at("kind").value = "chat";
  }
  offer();
}

// The fields that make sense together, and a note on what to expect.
function offer() {
  const mode = at("mode").value, chosen = at("drafts").value;
  const first = mode === "sweep" && model.starts_from_nothing ? "nothing" : "default";
  const names = mode === "sweep" ? ["head"] : ["head", "ngram", "model"];
  const allowed = names.filter((name) => !model.drafts || model.drafts.includes(name));
  at("drafts").replaceChildren(new Option(first, ""), ...allowed.map((name) => new Option(name)));
  at("drafts").value = allowed.includes(chosen) ? chosen : "";
  at("drafts-label").hidden = mode === "ar";
  at("passes-label").hidden = mode !== "sweep";
  at("note").hidden = !(first === "nothing" && at("drafts").value === "");
  at("prompt").placeholder = at("kind").value === "chat" ? "Message" : "The beginning of a text";
}

// A request and its answer.

function body(entry) {
  const fields = {
    mode: at("mode").value,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("most").value),
    stream: true,
  };
  if (at("seed").value !== "") fields.seed = Number(at("seed").value);
  if (fields.mode === "sweep") fields.passes = Number(at("passes").value);
  if (fields.mode !== "ar" && at("drafts").value) fields.drafts = at("drafts").value;
  if (entry.kind === "text") return { ...fields, prompt: entry.prompt, logprobs: LIKELIEST };
  return { ...fields, messages: turns(entry), logprobs: true, top_logprobs: LIKELIEST };
}

// The conversation up to an entry. Messages without an answer are not part of it.
function turns(last) {
  const earlier = entries.filter((each) => each !== last && each.kind === "chat" && said(each));
  const pairs = earlier.flatMap((each) => [
    { role: "user", content: each.prompt },
    { role: "assistant", content: said(each) },
  ]);
  return [...pairs, { role: "user", content: last.prompt }];
}

const said = (entry) => entry.groups.flat().map(([text]) => text).join("");

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

async function answer(entry, shown) {
  const response = await fetch(entry.kind === "chat" ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body(entry)),
    signal: request.signal,
  });
  if (response.status === 401) return shown.unlock();
  if (!response.ok) throw new Error((await response.json()).error.message);
  const left = response.headers.get("x-truncated-prompt-tokens");
  if (left) shown.warn(`The first ${left} ${at("unit").textContent} of the prompt do not fit into the model's window and were left out.`);
  const tokens = entry.kind === "chat" ? chatTokens() : textTokens();
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    const group = choice ? tokens(choice) : [];
    if (group.length) shown.add(group);
    if (event.blocktrain) shown.cost(event.blocktrain);
  }
}

// The tokens of a chunk, which one traversal made, as pairs of text and tip. A token that ends
// inside a character has no text; the character belongs to the token that completes it.

function textTokens() {
  let before = 0; // characters of earlier chunks
  return ({ text, logprobs }) => {
    const characters = Array.from(text), names = logprobs?.tokens ?? [];
    const ends = names.map((_, i) => (logprobs.text_offset[i + 1] ?? Infinity) - before);
    before += characters.length;
    return cut(characters, ends, (i) =>
      tip(names[i], logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs?.[i] ?? {})));
  };
}

function chatTokens() {
  const decoder = new TextDecoder();
  return ({ delta, logprobs }) => {
    const tokens = logprobs?.content ?? [];
    let end = 0;
    const ends = tokens.map(({ bytes }) => {
      end += Array.from(decoder.decode(new Uint8Array(bytes), { stream: true })).length;
      return end;
    });
    return cut(Array.from(delta.content ?? ""), ends, (i) =>
      tip(tokens[i].token, tokens[i].logprob, tokens[i].top_logprobs.map((top) => [top.token, top.logprob])));
  };
}

function cut(characters, ends, tipOf) {
  if (!ends.length && characters.length) return [[characters.join(""), ""]];
  ends[ends.length - 1] = Infinity; // all that is left
  const texts = ends.map((end, i) => characters.slice(ends[i - 1] ?? 0, end).join(""));
  return texts.map((text, i) => [text, tipOf(i)]).filter(([text]) => text);
}

const visible = (name) => name.replaceAll("\n", "\u23ce").replaceAll(" ", "\u2423");
const percent = (logProb) => `${(100 * Math.exp(logProb)).toFixed(1).padStart(5)}%`;

function tip(name, logProb, top) {
  const line = ([each, value]) => `${percent(value)}  ${visible(each)}`;
  const others = top.filter(([each]) => each !== name).map(line);
  return [`${line([name, logProb])}  (log-probability ${logProb.toFixed(3)})`, ...others].join("\n");
}

async function ask(entry) {
  entries.push(entry);
  const shown = new Shown(entry);
  request = new AbortController();
  at("send").textContent = "Stop";
  try {
    await answer(entry, shown);
  } catch (error) {
    if (error.name !== "AbortError") shown.wrong(error.message);
  }
  shown.end();
  save();
  request = null;
  at("send").textContent = "Send";
}

// The conversation outlives a reload of the page, but not its tab.

function save() {
  while (entries.length) {
    try {
      return sessionStorage.setItem(TALK, JSON.stringify(entries));
    } catch {
      entries.shift(); // the storage is full: the oldest goes
    }
  }
  sessionStorage.removeItem(TALK);
}

function restore() {
  entries = JSON.parse(sessionStorage.getItem(TALK) ?? "[]");
  for (const entry of entries) new Shown(entry).end();
}

// An entry on the page.
class Shown {
  began = performance.now();

  constructor(entry) {
    this.entry = entry;
    hint.remove();
    if (entry.kind === "chat") put(element("div", "asked", element("p", "", entry.prompt)));
    const given = element("span", "given", entry.kind === "chat" ? "" : entry.prompt);
    this.words = element("p", "", given);
    this.whole = element("div", "said going", this.words);
    put(this.whole);
    for (const group of entry.groups) this.group(group);
    if (entry.warning) this.warn(entry.warning);
    if (entry.error) this.wrong(entry.error);
    if (entry.cost) this.facts(entry.cost, entry.seconds);
  }

  add(group) {
    this.entry.groups.push(group);
    this.group(group);
  }

  group(group) {
    const spans = group.map(([text, words]) => {
      const token = element("span", "", text);
      if (words) token.dataset.tip = words;
      return token;
    });
    following(() => this.words.append(element("span", "traversal", ...spans)));
  }

  warn(message) {
    this.entry.warning = message;
    following(() => this.whole.prepend(element("p", "cost", message)));
  }

  wrong(message) {
    this.entry.error = message;
    following(() => this.whole.append(element("p", "wrong", message)));
  }

  // A field for the API key; with a key, the same prompt is sent again.
  unlock() {
    this.wrong(
      at("key").value.trim()
        ? "The server does not accept this API key. Enter another one:"
        : "This server needs an API key. Its operator has one for you; enter it here:",
    );
    const field = element("input");
    Object.assign(field, { type: "password", autocomplete: "off", placeholder: "API key" });
    field.setAttribute("aria-label", "API key");
    const form = element("form", "unlock", field, element("button", "", "Use this key"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim() || request) return;
      useKey(field.value);
      this.remove();
      ask({ ...this.entry, groups: [], error: "" });
    });
    following(() => this.whole.append(form));
    field.focus();
  }

  remove() {
    entries = entries.filter((entry) => entry !== this.entry);
    if (this.entry.kind === "chat") this.whole.previousElementSibling.remove();
    this.whole.remove();
  }

  end() {
    this.whole.classList.remove("going");
    // What arrived at once may be longer than the page: show its beginning.
    const tall = this.whole.offsetHeight > at("scroll").clientHeight;
    if (tall && this.entry.groups.length === 1) this.whole.scrollIntoView({ block: "start" });
  }

  cost(cost) {
    this.entry.cost = cost;
    this.entry.seconds = (performance.now() - this.began) / 1000;
    this.facts(cost, this.entry.seconds);
  }

  facts(cost, seconds) {
    const tokens = cost.tokens_per_traversal * cost.traversals;
    const unit = at("unit").textContent;
    const facts = [
      [cost.tokens_per_traversal.toFixed(2), `${unit} per traversal`],
      [cost.traversals, cost.traversals === 1 ? "traversal" : "traversals"],
      [(tokens / seconds).toFixed(0), `${unit}/s`],
      [seconds.toFixed(2), "s"],
    ];
    if (cost.network_seconds) {
      facts.splice(3, 0, [(tokens / cost.network_seconds).toFixed(0), `${unit}/s if only the network took time`]);
    }
    if (cost.drafted) facts.push([`${cost.accepted} of ${cost.drafted}`, "drafts accepted"]);
    if (cost.replays) facts.push([cost.replays, "replayed"]);
    const stages = Object.entries(cost.stage_seconds);
    const shown = element("div", "cost", line(facts));
    if (stages.length) shown.append(bar(stages), line(stages.map(timed)));
    colour(shown);
    following(() => this.whole.append(shown));
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

// Changes the page, and keeps its end in view unless somebody has scrolled up to read.
function following(change) {
  const scroll = at("scroll");
  const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120;
  change();
  if (atEnd) scroll.scrollTop = scroll.scrollHeight;
}

function useKey(key) {
  at("key").value = key.trim();
  sessionStorage.setItem(KEY, key.trim());
  look();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (request) return request.abort();
  const prompt = at("prompt").value;
  if (!prompt.trim()) return;
  at("prompt").value = "";
  ask({ kind: at("kind").value, prompt, groups: [] });
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!request) at("form").requestSubmit();
});

for (const id of ["kind", "mode", "drafts"]) at(id).addEventListener("change", offer);

at("key").addEventListener("change", () => useKey(at("key").value));

at("clear").addEventListener("click", () => {
  request?.abort();
  entries = [];
  save();
  at("talk").replaceChildren(hint);
});

at("talk").addEventListener("mouseover", ({ target, clientX, clientY }) => {
  const words = target.dataset?.tip;
  at("tip").hidden = !words;
  if (!words) return;
  at("tip").textContent = words;
  const { offsetWidth, offsetHeight } = at("tip");
  at("tip").style.left = `${Math.min(clientX, innerWidth - offsetWidth - 8)}px`;
  at("tip").style.top = `${clientY - offsetHeight - 14 > 0 ? clientY - offsetHeight - 14 : clientY + 18}px`;
});
at("talk").addEventListener("mouseleave", () => (at("tip").hidden = true));

addEventListener("pagehide", save);
restore();
offer();
look();
setInterval(look, 15000);
