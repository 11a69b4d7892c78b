// Elements of the page. Text from other machines only ever becomes text nodes.

// h("td", {class: "number"}, "12"): an element. Attributes that begin with "on" are listeners.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Set a text only if it differs, so that selections and screen readers are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

// Make the children of `parent` those of `items`: elements are kept by key, and updated in place.
export function sync(parent, items, keyOf, create, update) {
  const before = (parent.keyed ??= new Map());
  const after = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const element = before.get(key) ?? create(item);
    update(element, item);
    after.set(key, element);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of before) if (!after.has(key)) element.remove();
  parent.keyed = after;
}

// A table whose rows become cards on a phone. Columns: {name, title, number, cell(row) -> node}.
export class Table {
  constructor(label, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.body = h("tbody", { role: "rowgroup" });
    const heads = columns.map((column) =>
      h("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null, title: column.title }, column.name),
    );
    this.element = h(
      "table", { role: "table" },
      h("caption", { class: "hidden-text" }, label),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
      this.body,
    );
  }

  update(rows) {
    sync(this.body, rows, this.keyOf, () => this.row(), (row, item) => this.fill(row, item));
  }

  row() {
    const cells = this.columns.map((column, index) =>
      h(index ? "td" : "th", {
        role: index ? "cell" : "rowheader", scope: index ? null : "row",
        class: column.number ? "number" : null, "data-label": column.name,
      }),
    );
    return h("tr", { role: "row" }, cells);
  }

  fill(row, item) {
    this.columns.forEach((column, index) => {
      const cell = row.children[index];
      const content = column.cell(item, cell);
      if (typeof content === "string") say(cell, content);
      else if (content) cell.replaceChildren(content);
    });
  }
}

export function tag(text, kind) {
  return h("span", { class: `tag ${kind}` }, text);
}

// A command that can be copied.
export function command(text) {
  const button = h("button", { type: "button", class: "small", onclick: () => copy(text, button) }, "Copy");
  return h("div", { class: "command" }, h("code", {}, text), button);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    say(button, "Copied");
  } catch {
    // Without TLS, browsers have no clipboard for pages: select the text instead.
    const range = document.createRange();
    range.selectNodeContents(button.previousElementSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    say(button, "Selected; press Ctrl-C");
  }
  setTimeout(() => say(button, "Copy"), 3000);
}

// Ask for confirmation. `action` runs while the dialog is open; its error is shown there.
export function confirm({ title, text, verb, danger, action }) {
  const dialog = document.getElementById("dialog");
  const problem = h("p", { class: "problem", role: "alert" });
  const yes = h("button", { class: danger ? "danger" : "primary", type: "submit" }, verb);
  const no = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      yes.disabled = true;
      try {
        await action();
        dialog.close();
      } catch (error) {
        say(problem, error.message);
        yes.disabled = false;
      }
    },
  }, h("h2", { id: "dialog-title" }, title), ...text.map((each) => h("p", {}, each)), problem, h("p", { class: "buttons" }, no, yes));
  dialog.replaceChildren(form);
  dialog.showModal();
  no.focus();
}
