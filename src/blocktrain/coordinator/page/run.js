// The run: how far it is, whether it learns, who does what, and what it costs to move.

import { LineChart } from "./chart.js";
import { h, say, show, Table, tag } from "./dom.js";
import { bytes, capital, clock, count, counted, duration, loss, percent, SOURCES, speed, trend } from "./format.js";

const STATES = {
  running: ["training", "good"],
  paused: ["paused", "warn"],
  draining: ["draining", "warn"],
  drained: ["drained", "warn"],
  finished: ["finished", "good"],
};

const EXPLAINED = {
  paused: "The operator has paused the run. Workers wait, and go on when it is resumed.",
  draining: "The operator lets the open leases end. No new ones are handed out.",
  drained: "All open leases have ended and all updates are merged. The run waits to be resumed.",
};

class Tile {
  constructor(name, title) {
    this.value = h("dd", { class: "value" });
    this.more = h("dd", { class: "more" });
    this.element = h("div", { class: "tile", title }, h("dt", {}, name), this.value, this.more);
  }

  set(value, more = "") {
    say(this.value, value);
    say(this.more, more);
  }
}

function progressCell(block, cell) {
  const bar = cell.querySelector("progress") ?? h("progress", { max: 1 });
  const text = cell.querySelector("span") ?? h("span", {});
  bar.value = block.progress;
  bar.setAttribute("aria-label", `block ${block.index}`);
  say(text, percent(block.progress));
  return bar.parentElement ? null : h("div", { class: "progress" }, bar, text);
}

function versionsBehind(block) {
  return block.staleness === null ? "no update yet" : block.staleness.toFixed(1);
}

export class RunView {
  constructor(app) {
    this.app = app;
    this.state = h("p", { class: "state" });
    this.bar = h("progress", { max: 1, "aria-label": "progress of the run" });
    this.explained = h("p", { class: "note" });
    this.tiles = {
      left: new Tile("Time left", "from the speed of the last ten minutes"),
      speed: new Tile("Speed", "tokens in merged updates, over the last ten minutes"),
      workers: new Tile("Workers", "present now"),
      score: new Tile("Score", SOURCES.scores),
      moved: new Tile("Moved", "updates sent and versions downloaded"),
    };
    this.scores = new LineChart({ title: "Score over time", note: SOURCES.scores, format: loss });
    this.losses = new LineChart({ title: "Loss of each block over time", format: loss });
    this.speeds = new LineChart({ title: "Tokens per second over time", note: "in merged updates, by the time they arrived", format: speed, zero: true });
    this.place = h("div", { class: "scroll" }); // of the table of blocks
    this.traffic = new Table("Bytes moved", TRAFFIC, (row) => row.name);
    this.checks = h("p", { class: "note" });
    this.model = h("p", { class: "note" });
    this.element = h(
      "div", { class: "view" },
      h("section", { class: "card hero", "aria-label": "Progress" }, this.state, this.bar, this.explained, this.model),
      h("dl", { class: "tiles" }, Object.values(this.tiles).map((tile) => tile.element)),
      h("div", { class: "charts" }, this.scores.element, this.losses.element, this.speeds.element),
      h("section", { class: "card", "aria-labelledby": "blocks-title" }, h("h2", { id: "blocks-title" }, "Blocks"), this.place, this.checks),
      h("section", { class: "card", "aria-labelledby": "traffic-title" }, h("h2", { id: "traffic-title" }, "Bytes moved"),
        h("p", { class: "note" }, "Beside each number: what the same updates and versions would take as whole blocks in fp32."),
        h("div", { class: "scroll" }, this.traffic.element)),
    );
  }

  // Only blocks of a cascade build on each other.
  blockColumns(isCascade) {
    const lead = { name: "lead", number: true, title: "by how much of the run it is behind the block that it builds on", cell: (block) => (block.lead === null ? "first block" : percent(block.lead)) };
    return [
      { name: "block", cell: (block) => String(block.index) },
      { name: "done", cell: progressCell },
      { name: "version", number: true, title: "how often its updates were merged", cell: (block) => String(block.version) },
      { name: "loss", number: true, cell: (block) => this.lossOf(block) },
      { name: "trend", number: true, cell: (block) => trend(block.loss?.trend) || "too early" },
      { name: "workers", number: true, title: "that train it, or whose update waits to be merged", cell: (block) => String(block.replicas) },
      { name: "tokens/s", number: true, cell: (block) => speed(block.tokens_per_second) },
      { name: "updates waiting", number: true, title: "to be merged", cell: (block) => String(block.pending_updates) },
      { name: "versions behind", number: true, title: "staleness: by how many versions the last updates were late, on average", cell: versionsBehind },
      ...(isCascade ? [lead] : []),
      { name: "in time", number: true, title: "share of leases that ended before their deadline", cell: (block) => (block.participation === null ? "none ended" : percent(block.participation)) },
    ];
  }

  lossOf(block) {
    return block.loss ? loss(block.loss.value) : "no update yet";
  }

  overview(run) {
    const [word, kind] = STATES[run.state];
    if (this.state.dataset.state !== run.state) {
      this.state.dataset.state = run.state;
      this.headline = h("strong", {});
      this.state.replaceChildren(tag(word, kind), this.headline);
    }
    say(this.headline, `${percent(run.progress)} done`);
    this.bar.value = run.progress;
    say(this.explained, EXPLAINED[run.state] ?? "");
    show(this.explained, run.state in EXPLAINED);
    say(this.model, `${count(run.parameters)} parameters in ${run.blocks.length} blocks (${run.kind.replaceAll("_", " ")}), codec ${run.codec}. ${count(run.tokens_trained)} of ${count(run.tokens_total)} tokens trained. Started ${clock(run.started)}.`);
    this.setTiles(run);
    if (!this.blocks) {
      const isCascade = run.blocks.some((block) => block.lead !== null);
      this.blocks = new Table("Blocks", this.blockColumns(isCascade), (block) => block.index);
      this.place.append(this.blocks.element);
    }
    this.blocks.update(run.blocks);
    this.traffic.update(trafficOf(run));
    const checking = run.checking;
    say(this.checks, checking
      ? `Updates are checked by ${counted(checking.validators, "validator")}; ${checking.waiting} wait. ${checking.share === null ? "" : `Checks cost ${(100 * checking.share).toFixed(1)}% of the training time.`} ${checking.note}`
      : "Updates are not checked by validators in this run, so a harmful update counts like any other.");
    this.run = run;
  }

  setTiles(run) {
    const { left, speed: fast, workers, score, moved } = this.tiles;
    if (run.state === "finished") left.set("done", `after ${duration(run.finished - run.started)}`);
    else if (run.state !== "running") left.set("stopped", "until the run is resumed");
    else if (run.seconds_left === null) left.set("unknown", "nothing was merged in the last minutes");
    else left.set(duration(run.seconds_left), `running for ${duration(run.time - run.started)}`);
    if (run.state === "finished") fast.set(`${speed(run.tokens_trained / (run.finished - run.started))} tokens/s`, "mean of the run");
    else fast.set(`${speed(run.tokens_per_second)} tokens/s`, "mean of ten minutes");
    const share = run.present ? percent(run.waiting / run.present) : "0%";
    const all = Object.values(run.workers).reduce((sum, each) => sum + each, 0);
    if (run.state === "finished") workers.set(String(all), "took part");
    else workers.set(String(run.present), `${run.workers.training ?? 0} train, ${run.waiting} wait (${share}), ${all} took part`);
    if (run.score) {
      const reference = run.reference === null ? "" : `reference ${loss(run.reference)}`;
      score.set(loss(run.score.value), [`nats per byte, ${duration(run.time - run.score.time)} ago`, trend(run.score.trend), reference].filter(Boolean).join(", "));
    } else score.set("not scored", lossNote(run.blocks));
    const total = sumOf(run.moved);
    moved.set(bytes(total), total ? `fp32 would be ${bytes(run.moved.up_raw + run.moved.down_raw)}: ${((run.moved.up_raw + run.moved.down_raw) / total).toFixed(1)}x` : "nothing yet");
  }

  curves(charts) {
    const run = this.run;
    const scored = charts.scores.at(-1)?.[0] ?? 0; // the last score comes after the end of the run
    const axis = { start: run.started, end: Math.max(run.finished ?? charts.time, scored, run.started + 1) };
    this.scores.update({
      ...axis, reference: run.reference, series: [{ name: "model", points: charts.scores }],
      empty: `${capital(run.score_note)}.`,
    });
    const sources = [...new Set(charts.losses.filter((each) => each.points.length).map((each) => each.source))];
    this.losses.update({
      ...axis, note: sources.map((source) => SOURCES[source]).join("; "),
      series: charts.losses.map((each) => ({ name: `block ${each.block}`, colour: each.block, points: each.points })),
      empty: "No update has been merged yet. The first curve appears with the first update.",
    });
    this.scores.element.classList.toggle("wide", !charts.scores.length);
    this.speeds.element.classList.toggle("wide", charts.scores.length > 0);
    this.speeds.update({ ...axis, series: [{ name: "tokens/s", points: charts.tokens }], empty: "No update has been merged yet." });
  }
}

// What there is instead of a score of the assembled model.
function lossNote(blocks) {
  const losses = blocks.map((block) => block.loss).filter(Boolean);
  if (!losses.length) return "no update yet";
  const mean = losses.reduce((sum, each) => sum + each.value, 0) / losses.length;
  return `blocks: ${loss(mean)} on average, ${WHENCE[losses.at(-1).source]}`;
}

const WHENCE = { scores: "scored", checks: "from checks", workers: "as workers report it" };

const sumOf = (moved) => moved.up + moved.down_whole + moved.down_differences;

const TRAFFIC = [
  { name: "what", cell: (row) => row.name },
  { name: "codec", cell: (row) => row.codec },
  { name: "moved", number: true, cell: (row) => bytes(row.moved) },
  { name: "in fp32", number: true, cell: (row) => bytes(row.raw) },
  { name: "smaller by", number: true, cell: (row) => (row.moved && row.raw ? `${(row.raw / row.moved).toFixed(1)}x` : "nothing moved") },
];

function trafficOf(run) {
  const { up, up_raw, down_whole, down_differences, down_raw } = run.moved;
  return [
    { name: "updates up", codec: run.codec, moved: up, raw: up_raw },
    { name: "versions down", codec: `whole ${bytes(down_whole)}, as deltas (${run.codec}) ${bytes(down_differences)}`, moved: down_whole + down_differences, raw: down_raw },
  ];
}
