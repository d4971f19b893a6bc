// Owns the small tools: making elements, formatting numbers, colours. Text from the data
// enters the page as text nodes only.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// fill sets attributes and appends children; strings become text nodes.
const fill = (el, attrs, children) => {
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [k, v] of Object.entries(value)) el.style.setProperty(k, v);
    else el.setAttribute(key, value === true ? "" : value);
  }
  el.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
};
const h = (tag, attrs, ...children) => fill(document.createElement(tag), attrs, children);
const s = (tag, attrs, ...children) => fill(document.createElementNS(SVG, tag), attrs, children);

const clamp = (x, lo, hi) => Math.min(Math.max(x, lo), hi);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const median = (values) => {
  if (!values.length) return NaN;
  const sorted = [...values].sort((a, b) => a - b), i = sorted.length >> 1;
  return sorted.length % 2 ? sorted[i] : (sorted[i - 1] + sorted[i]) / 2;
};
// after returns the first index of a sorted list whose value exceeds x.
const after = (values, x) => {
  let lo = 0, hi = values.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (values[mid] <= x) lo = mid + 1; else hi = mid;
  }
  return lo;
};
const list = (x) => x || [];

// Numbers have three digits, which are quick to compare.
const digits = (x) => {
  const a = Math.abs(x);
  return x.toFixed(a >= 99.95 || x === 0 ? 0 : a >= 9.995 ? 1 : 2);
};
const scaled = (units, base) => (x) => {
  if (x === undefined || x === null || !isFinite(x)) return "–";
  let i = 0, v = x;
  while (Math.abs(v) >= base * 0.9995 && i < units.length - 1) { v /= base; i++; }
  return (i === 0 ? String(Math.round(v)) : digits(v)) + " " + units[i];
};
const bytes = scaled(["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const rate = scaled(["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
const millis = (ms) => {
  if (ms === undefined || ms === null || !isFinite(ms)) return "–";
  const a = Math.abs(ms);
  if (a >= 59995) return digits(ms / 60000) + " min";
  if (a >= 999.5) return digits(ms / 1000) + " s";
  if (a >= 0.9995 || a === 0) return digits(ms) + " ms";
  return a >= 0.0009995 ? digits(ms * 1000) + " µs" : digits(ms * 1e6) + " ns";
};
const count = (n) => n === undefined || n === null || !isFinite(n) ? "–"
  : Math.abs(n) >= 1000 || Number.isInteger(n) ? Math.round(n).toLocaleString("en-GB") : digits(n);
const percent = (share) => digits(100 * share) + " %";
const signed = (share) => (share > 0 ? "+" : share < 0 ? "−" : "±") + digits(Math.abs(100 * share)) + " %";
const plural = (n, one, many) => count(n) + " " + (n === 1 ? one : many || one + "s");
const lossText = (x) => x === undefined || x === null || !isFinite(x) ? "–" : x.toFixed(4);

// figure formats a figure of a run, or another value of the same kind, such as its
// forecast.
const figure = (f, value = f.value) => {
  if (f.text) return f.text;
  switch (f.unit) {
    case "bytes": return bytes(value);
    case "ms": return millis(value);
    case "x": return "× " + value.toFixed(2);
    case "%": return digits(value) + " %";
    default: return Number.isInteger(value) ? count(value) : String(+value.toPrecision(6));
  }
};

// Colours come from the style sheet, so that the theme decides. Groups have hues in the
// order of their names over all runs, so that a group has the same colour everywhere.
// Owners, such as parameters, are grey. Storages that no group saved have a colour of
// their own, and unused room is pale.
const HUES = 12, GREYS = ["o0", "o2", "o3", "o4", "o5"];
const paint = {
  cache: new Map(), groups: new Map(), owners: new Map(),
  css(name) {
    if (!this.cache.has(name)) this.cache.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
    return this.cache.get(name);
  },
  forget() { this.cache.clear(); },
  variable(name, saved) {
    if (!saved && name === "unused in heap") return "unused";
    if (!saved && name === "not saved") return "o1";
    const map = saved ? this.groups : this.owners;
    if (!map.has(name)) map.set(name, map.size);
    return saved ? "g" + map.get(name) % HUES : GREYS[map.get(name) % GREYS.length];
  },
  of(name, saved) { return this.css(this.variable(name, saved)); },
  // learn fixes the order before anything is drawn.
  learn(series) {
    for (const name of series.filter((x) => x.saved).map((x) => x.name).sort()) this.variable(name, true);
    for (const x of series.filter((y) => !y.saved).map((y) => ({ name: y.name, top: most(y.bytes) })).sort((a, b) => b.top - a.top)) this.variable(x.name, false);
  },
};
const swatch = (variable, tier) => h("i", { class: "swatch" + (tier === "host" ? " host" : ""), style: { "--c": "var(--" + variable + ")" }, "aria-hidden": "true" });

// hatch returns a pattern for canvases. Waits and host memory are hatched.
const hatch = (ctx, color, background, gap = 6) => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = gap * 2;
  const c = tile.getContext("2d");
  if (background) { c.fillStyle = background; c.fillRect(0, 0, gap * 2, gap * 2); }
  c.strokeStyle = color;
  c.lineWidth = 1.5;
  c.beginPath();
  for (let i = -gap * 2; i <= gap * 4; i += gap) { c.moveTo(i, gap * 2); c.lineTo(i + gap * 2, 0); }
  c.stroke();
  return ctx.createPattern(tile, "repeat");
};

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const say = (text) => { $("said").textContent = text; };
// keep stores small settings, if the browser lets a file do so.
const keep = {
  get(store, key) { try { return store().getItem("stowage." + key); } catch { return null; } },
  set(store, key, value) { try { store().setItem("stowage." + key, value); } catch { /* a file may have no storage */ } },
};

// table makes a table from columns {name, n (a number), get, cell}.
const cells = (columns, rows) => rows.map((row, i) => h("tr", {}, columns.map((c, j) => {
  const attrs = { class: [c.n ? "n" : "", c.class || ""].join(" ").trim() || undefined, "data-name": c.name };
  return j === 0 && !c.n ? h("th", { scope: "row", ...attrs }, c.get(row, i)) : h("td", attrs, c.get(row, i));
})));
const table = (columns, rows, attrs = {}) => h("table", attrs,
  h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.n ? "n" : undefined }, c.name)))),
  h("tbody", {}, cells(columns, rows)));

// alternative shows the data of a chart as a table, which is made when it is opened.
const alternative = (name, make) => {
  const body = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name });
  const details = h("details", { class: "alternative" }, h("summary", {}, "Table: " + name), body);
  const draw = () => { if (details.open) body.replaceChildren(make()); };
  details.addEventListener("toggle", draw);
  return { element: details, draw };
};
