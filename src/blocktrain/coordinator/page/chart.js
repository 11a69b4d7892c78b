// Line charts in SVG, with a table of the same numbers and a cursor for pointer and keyboard.

import { h, say, svg } from "./dom.js";
import { duration } from "./format.js";

const HEIGHT = 220;
const MARGIN = { top: 10, right: 12, bottom: 24, left: 52 };
const COLOURS = 8;
const TABLE_ROWS = 24;

// Round steps for an axis of about `wanted` ticks.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
}

const TIME_STEPS = [5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2592000];

// Times and their labels, which differ from each other.
function timeTicks(from, to, wanted) {
  const step = TIME_STEPS.find((each) => (to - from) / each <= wanted) ?? (to - from) / wanted;
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) {
    const isFraction = step < 60 && value >= 60;
    found.push([value, isFraction ? `${+(value / 60).toFixed(2)}\u00a0min` : elapsed(value)]);
  }
  return found;
}

const elapsed = (seconds) => (seconds ? duration(seconds) : "0");

export class LineChart {
  // `format`: of a value. `zero`: the axis begins at 0.
  constructor({ title, note, format, zero = false }) {
    Object.assign(this, { format, zero, series: [], reference: null, start: 0, at: null });
    this.note = h("p", { class: "note" }, note ?? "");
    this.legend = h("ul", { class: "legend" });
    this.picture = svg("svg", { role: "img", tabindex: "0", class: "chart", height: HEIGHT });
    this.tip = h("output", { class: "tip", hidden: true, "aria-live": "polite" });
    this.rows = h("tbody");
    this.head = h("tr");
    this.details = h(
      "details", {}, h("summary", {}, "Numbers"),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, this.head), this.rows)),
    );
    this.empty = h("p", { class: "empty" });
    this.heading = h("h2", {}, title);
    this.element = h(
      "figure", { class: "card" }, h("figcaption", {}, this.heading, this.note),
      this.empty, h("div", { class: "plot" }, this.picture, this.tip), this.legend, this.details,
    );
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.mark(null));
    this.picture.addEventListener("keydown", (event) => this.step(event));
    this.picture.addEventListener("blur", () => this.mark(null));
    this.details.addEventListener("toggle", () => this.fillTable());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // series: [{name, points}]. Times are seconds since 1970; the axis counts them from `start`, and
  // begins with the first point.
  update({ series, start, end, reference = null, note, empty = "" }) {
    Object.assign(this, { series: series.filter((each) => each.points.length), start, end, reference });
    if (note !== undefined) say(this.note, note);
    say(this.empty, this.series.length ? "" : empty);
    this.empty.hidden = this.series.length > 0;
    this.picture.parentElement.hidden = this.details.hidden = this.legend.hidden = !this.series.length;
    this.draw();
    this.fillTable();
  }

  draw() {
    const width = this.picture.parentElement.clientWidth;
    if (!width || !this.series.length) return;
    const values = this.series.flatMap((each) => each.points.map((point) => point[1]));
    if (this.reference !== null) values.push(this.reference);
    let low = this.zero ? 0 : Math.min(...values);
    let high = Math.max(...values);
    if (low === high) [low, high] = this.zero ? [0, high || 1] : [low - 0.5, high + 0.5];
    const space = 0.06 * (high - low);
    if (!this.zero) low -= space;
    high += space;
    const first = Math.min(this.end - 1, ...this.series.map((each) => each.points[0][0]));
    const span = this.end - first;
    const decimals = Math.max(0, -Math.floor(Math.log10((high - low) / 4)));
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    this.x = (time) => MARGIN.left + (inner.width * (time - first)) / span;
    this.y = (value) => MARGIN.top + inner.height * (1 - (value - low) / (high - low));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("aria-label", this.summary());
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    const label = (value) => (this.zero ? this.format(value) : value.toFixed(decimals));
    this.picture.replaceChildren(
      ...ticks(low, high, 4).flatMap((value) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(value), y2: this.y(value) }),
        svg("text", { x: MARGIN.left - 6, y: this.y(value) + 4, "text-anchor": "end" }, label(value)),
      ]),
      ...timeTicks(first - this.start, this.end - this.start, inner.width / 90).map(([value, text]) => {
        const x = this.x(this.start + value);
        const anchor = x < MARGIN.left + 20 ? "start" : x > width - MARGIN.right - 20 ? "end" : "middle";
        return svg("text", { x, y: HEIGHT - 6, "text-anchor": anchor }, text);
      }),
      ...this.lines(width),
      this.cursor,
    );
    this.drawLegend();
    if (this.at !== null) this.mark(this.at);
  }

  lines(width) {
    const lines = this.series.map((each, index) => {
      const places = each.points.map(([time, value]) => `${this.x(time).toFixed(1)},${this.y(value).toFixed(1)}`);
      if (places.length === 1) {
        const [x, y] = places[0].split(",");
        return svg("circle", { class: `c${this.colour(each, index)} dot`, cx: x, cy: y, r: 3 });
      }
      return svg("polyline", { class: `c${this.colour(each, index)} line`, points: places.join(" ") });
    });
    if (this.reference !== null) {
      const y = this.y(this.reference);
      lines.push(svg("line", { class: "reference", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    }
    return lines;
  }

  colour(each, index) {
    return (each.colour ?? index) % COLOURS;
  }

  drawLegend() {
    const names = this.series.length > 1 ? this.series.map((each, index) => [each.name, `c${this.colour(each, index)}`]) : [];
    if (this.reference !== null) names.push([`reference ${this.format(this.reference)}`, "reference"]);
    const key = JSON.stringify(names);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...names.map(([name, kind]) => h("li", { class: kind }, name)));
  }

  summary() {
    const parts = this.series.slice(0, 8).map((each) => {
      const first = each.points[0][1];
      const last = each.points.at(-1)[1];
      return `${each.name}: from ${this.format(first)} to ${this.format(last)}`;
    });
    return `${this.heading.textContent}. ${parts.join("; ")}. Arrow keys move the cursor.`;
  }

  times() {
    return [...new Set(this.series.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  }

  point(event) {
    const place = event.clientX - this.picture.getBoundingClientRect().left;
    const times = this.times();
    this.mark(times.reduce((best, time) => (Math.abs(this.x(time) - place) < Math.abs(this.x(best) - place) ? time : best), times[0]));
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    const times = this.times();
    const here = this.at === null ? times.length : times.indexOf(this.at);
    this.mark(times[Math.max(0, Math.min(times.length - 1, here + by))]);
  }

  // Show the values at a time, or none.
  mark(time) {
    this.at = time;
    this.tip.hidden = time === null;
    this.cursor?.setAttribute("visibility", time === null ? "hidden" : "visible");
    if (time === null) return;
    const x = this.x(time);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    const values = this.series
      .map((each, index) => [each, index, each.points.findLast((point) => point[0] <= time)])
      .filter(([, , point]) => point)
      .slice(0, 12);
    this.tip.replaceChildren(
      h("b", {}, `after ${elapsed(time - this.start)}`),
      ...values.map(([each, index, point]) => h("span", { class: `c${this.colour(each, index)}` }, `${each.name} ${this.format(point[1])}`)),
    );
    const width = this.picture.parentElement.clientWidth;
    this.tip.style.left = `${Math.min(Math.max(4, x + 10), width - this.tip.offsetWidth - 4)}px`;
  }

  fillTable() {
    if (!this.details.open) return;
    const times = this.times();
    const every = Math.max(1, Math.ceil(times.length / TABLE_ROWS));
    const shown = times.filter((_, index) => (times.length - 1 - index) % every === 0);
    this.head.replaceChildren(h("th", { scope: "col" }, "after"), ...this.series.map((each) => h("th", { scope: "col", class: "number" }, each.name)));
    this.rows.replaceChildren(
      ...shown.map((time) =>
        h("tr", {}, h("th", { scope: "row" }, elapsed(time - this.start)), this.series.map((each) => {
          const point = each.points.findLast((candidate) => candidate[0] <= time);
          return h("td", { class: "number" }, point ? this.format(point[1]) : "");
        })),
      ),
    );
  }
}
