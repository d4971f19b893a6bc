// Owns the frame of a section: its heading, a line that explains it, and its controls. A
// section is drawn when it comes near the window.

const near = new IntersectionObserver((entries) => {
  for (const e of entries) {
    const x = state.sections.find((y) => y.element === e.target);
    if (x) x.near = e.isIntersecting;
  }
  drawSeen();
}, { rootMargin: "400px 0px" });

// section adds a panel. Its options are id, name (for the navigation), title, about,
// there() (whether it has anything to show), draw() and hover().
const section = (options) => {
  const about = h("p", { class: "soft about" }, options.about || "");
  const tools = h("div", { class: "tools" });
  const body = h("div", { class: "body" });
  const title = h("h2", { id: options.id + "-title", tabindex: "-1" }, options.title);
  const element = h("section", { class: "panel", id: options.id, "aria-labelledby": options.id + "-title" },
    h("div", { class: "head" }, h("div", {}, title, about), tools), body);
  const x = { ...options, element, body, tools, aboutLine: about, heading: title, near: false, stale: true };
  x.draw = () => {
    const there = !options.there || options.there();
    element.hidden = !there;
    if (there) options.draw(x);
  };
  state.sections.push(x);
  return x;
};

// place shows and hides sections before any is drawn, so that the page does not jump while
// the user scrolls.
const place = () => {
  for (const x of state.sections) {
    if (!x.element.isConnected) { $("sections").append(x.element); near.observe(x.element); }
    const hidden = !!x.there && !x.there();
    if (x.element.hidden !== hidden) x.element.hidden = hidden;
  }
};

// segments returns a row of buttons of which one is on. Options are {value, label, title}.
const segments = (label, options, value, choose) => h("div", { class: "segments", role: "radiogroup", "aria-label": label },
  options.map((o) => h("button", {
    type: "button", role: "radio", "aria-checked": String(o.value === value), tabindex: o.value === value ? "0" : "-1", title: o.title,
    onclick: () => choose(o.value),
    onkeydown: (e) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (!by) return;
      e.preventDefault();
      e.stopPropagation();
      const i = options.findIndex((p) => p.value === value), to = options[(i + by + options.length) % options.length];
      const group = e.currentTarget.parentElement, home = group.parentElement;
      choose(to.value);
      // The row may be new: move the focus to the button that is on.
      requestAnimationFrame(() => { const el = home.querySelector("[aria-label=\"" + label + "\"] [aria-checked=true]"); if (el) el.focus(); });
    },
  }, o.label)));

// detailPicker switches between the detailed steps.
const detailPicker = () => segments("Detailed step", list(state.data && state.data.details).map((d, i) => ({
  value: i, label: h("span", {}, "Step " + d.step, h("small", {}, " " + d.why)),
})), state.detail, chooseDetail);

const badge = (text, kind) => h("span", { class: "badge " + (kind || "") }, text);

// bar draws a value as a bar with marks: {value, top, mark (predicted), limit (budget)}.
const bar = ({ value, top, mark, limit, variable }) => {
  const at = (v) => clamp(100 * v / (top || 1), 0, 100);
  return s("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { x: 0, y: 1, width: 100, height: 8, class: "rail" }),
    s("rect", { x: 0, y: 1, width: at(value), height: 8, class: "value", style: variable ? { fill: "var(--" + variable + ")" } : undefined }),
    limit ? s("line", { x1: at(limit), x2: at(limit), y1: 0, y2: 10, class: "limit" }) : null,
    mark !== undefined && mark !== null ? s("line", { x1: at(mark), x2: at(mark), y1: 0, y2: 10, class: "mark" }) : null);
};

// spark draws a small line without axes. The figures beside it have the values.
const spark = (values) => {
  const good = values.filter(isFinite);
  if (good.length < 2) return null;
  const lo = Math.min(...good), hi = Math.max(...good), span = hi - lo;
  if (!span) return null;
  const every = Math.max(1, Math.floor(values.length / 160));
  const points = values.map((v, i) => [i, v]).filter(([i, v]) => isFinite(v) && (i % every === 0 || i === values.length - 1))
    .map(([i, v]) => (100 * i / (values.length - 1)).toFixed(1) + "," + (22 - 20 * (v - lo) / span).toFixed(1)).join(" ");
  return s("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, s("polyline", { points }));
};
