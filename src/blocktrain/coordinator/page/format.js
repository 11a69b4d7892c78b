// Numbers and times as people read them.

const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);

function scaled(value, base, units) {
  let index = 0;
  while (value >= base && index < units.length - 1) {
    value /= base;
    index += 1;
  }
  const text = index ? value.toFixed(digits(value)) : String(Math.round(value));
  return `${text}${units[index] ? `\u00a0${units[index]}` : ""}`;
}

export const count = (value) => scaled(value, 1000, ["", "k", "M", "B", "T"]);
export const bytes = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"]);
export const speed = (value) => (value > 0 && value < 10 ? value.toFixed(1) : count(value));
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
export const capital = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);
export const loss = (value) => value.toFixed(value < 10 ? 4 : 2);

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)}\u00a0s`;
  const minutes = seconds / 60;
  if (minutes < 90) return `${Math.round(minutes)}\u00a0min`;
  const hours = minutes / 60;
  if (hours < 36) return `${hours.toFixed(hours < 10 ? 1 : 0)}\u00a0h`;
  const days = hours / 24;
  return `${days.toFixed(days < 10 ? 1 : 0)}\u00a0days`;
}

export const ago = (seconds) => (seconds < 5 ? "now" : `${duration(seconds)} ago`);

export function clock(time) {
  const date = new Date(1000 * time);
  const sameDay = date.toDateString() === new Date().toDateString();
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit" };
  return date.toLocaleString([], sameDay ? options : { ...options, month: "short", day: "numeric" });
}

export const dateOf = (time) => new Date(1000 * time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

// "−0.0312 in 12 min"
export function trend(found) {
  if (!found) return "";
  const sign = found.change > 0 ? "+" : found.change < 0 ? "−" : "±";
  return `${sign}${Math.abs(found.change).toFixed(4)} in ${duration(found.seconds)}`;
}

export const SOURCES = {
  scores: "cross entropy on held-out text, in nats per byte",
  checks: "loss on hidden text, measured by validators, in nats per token",
  workers: "training loss as workers report it, in nats per token; not verified",
};
