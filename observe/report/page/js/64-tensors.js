// Owns the list of tensors alive at the pinned moment, if their step has details.

const WHERE = { device: "on the device", host: "on the host", out: "offloading", in: "reloading" };
const onDevice = (where) => where !== "host";
const stayAt = (x, t) => x.stays.find((y) => t >= y.begin && t < y.end) || (x.stays.length && x.stays[x.stays.length - 1].end === t ? x.stays[x.stays.length - 1] : null);

// aliveAt returns the tensors alive at a moment, the largest first.
const aliveAt = (d, t) => d.storages.map((x) => ({ x, stay: stayAt(x, t) })).filter((y) => y.stay).sort((a, b) => b.x.bytes - a.x.bytes || a.x.layer - b.x.layer);
const groupName = (x) => x.group || "not saved";
const groupColor = (x) => paint.variable(x.group || "not saved", !!x.group);

// life draws where a storage was during its step: solid on the device, hatched elsewhere.
// A live page may see a step that has only begun and has no length yet.
const life = (x, d, t) => {
  const at = (v) => clamp(100 * (v - d.begin) / (d.end - d.begin || 1), 0, 100);
  return s("svg", { class: "life", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { x: 0, y: 3.5, width: 100, height: 1, class: "rail" }),
    x.stays.map((y) => s("rect", { x: at(y.begin), width: Math.max(at(y.end) - at(y.begin), 0.6), y: y.where === "host" ? 2.5 : 0.5, height: y.where === "host" ? 3 : 7, class: y.where, style: { fill: "var(--" + groupColor(x) + ")" } })),
    s("line", { x1: at(t), x2: at(t), y1: 0, y2: 8, class: "now" }));
};

const tensorColumns = (d, t) => [
  { name: "group", get: ({ x }) => [swatch(groupColor(x), "device"), groupName(x)] },
  { name: "size", n: true, get: ({ x }) => bytes(x.bytes) },
  { name: "layer", n: true, get: ({ x }) => x.layer >= 0 ? String(x.layer) : "–" },
  { name: "microbatch", n: true, get: ({ x }) => x.microbatch >= 0 ? String(x.microbatch) + (x.chunk > 0 ? ", chunk " + x.chunk : "") : "–" },
  { name: "where", get: ({ stay }) => badge(WHERE[stay.where] || stay.where, stay.where) },
  { name: "from", n: true, get: ({ x }) => millis(x.stays[0].begin - d.begin) },
  { name: "to", n: true, get: ({ x }) => millis(x.stays[x.stays.length - 1].end - d.begin) },
  { name: "during the step", class: "lifetime", get: ({ x }) => life(x, d, t) },
];

const tensors = { most: 12 };

// elsewhere describes a step without details: its groups.
const elsewhere = (t) => {
  const { stack } = memory, i = stack ? stack.index(t) : -1;
  const rows = i < 0 ? [] : stack.series.map((b) => ({ b, n: b.bytes[i] })).filter((r) => r.n > 0).sort((a, b) => b.n - a.n);
  const { details } = state.data;
  return [h("p", {}, details.length ? "Tensors are listed for " + details.map((d) => "step " + d.step + " (" + d.why + ")").join(", ") + ". For this moment there are sums by group:" : "This run has no detailed step. These are the sums by group:"),
    details.length ? h("p", { class: "buttons" }, details.map((d, k) => h("button", { type: "button", onclick: () => { state.detail = -1; chooseDetail(k); } }, "Go to step " + d.step))) : null,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Memory by group at this moment" }, table([
      { name: "group", get: (r) => [swatch(paint.variable(r.b.name, r.b.saved), r.b.tier), r.b.name] }, { name: "size", n: true, get: (r) => bytes(r.n) }, { name: "where", get: (r) => badge(WHERE[r.b.tier], r.b.tier) }], rows))];
};

section({
  id: "tensors", name: "Tensors", title: "Tensors alive at that moment",
  there: () => !!state.data && (state.data.details.length > 0 || state.data.memory.t.length > 0),
  draw(x) {
    const t = pinned(), { data } = state, d = data.details.find((y) => within(y, t)), step = borderAt(t);
    if (!memory.stack || memory.of !== data) { memory.of = data; memory.stack = new Stack(data.memory.t, foldSmall(data.memory.series)); }
    const when = (state.pin === null ? "The peak" : "The pinned moment") + (step ? ", in step " + step.step + ", " + millis(t - step.begin) + " after it began" : ", " + (outside(t) || millis(t)));
    x.heading.textContent = state.pin === null ? "Tensors alive at the peak" : step ? "Tensors alive in step " + step.step + " at " + millis(t - step.begin) : "Tensors alive " + (outside(t) || "at " + millis(t));
    x.tools.replaceChildren(state.pin !== null ? h("button", { type: "button", title: "Go back to the peak (p)", onclick: goToPeak }, "Back to the peak") : "");
    if (!d) { x.aboutLine.textContent = when + "."; x.heading.textContent = x.heading.textContent.replace("Tensors", "Groups"); x.body.replaceChildren(...elsewhere(t).filter(Boolean)); return; }
    const every = aliveAt(d, t), rows = memory.only ? every.filter((y) => groupName(y.x) === memory.only) : every;
    const on = rows.filter((y) => onDevice(y.stay.where)), off = rows.filter((y) => y.stay.where !== "device");
    x.aboutLine.textContent = when + ": " + plural(rows.length, "tensor") + (memory.only ? " of " + memory.only : "") + ", " + bytes(sum(on.map((y) => y.x.bytes))) + " on the device"
      + (off.length ? ", " + bytes(sum(off.map((y) => y.x.bytes))) + " on the host" : "") + ".";
    const shown = rows.slice(0, tensors.most), had = x.body.contains(document.activeElement);
    x.body.replaceChildren(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Tensors, the largest first" }, table(tensorColumns(d, t), shown, { class: "tensors" })),
      h("p", { class: "buttons" }, memory.only ? h("button", { type: "button", onclick: () => { memory.only = null; draw(); } }, "All groups") : null,
        rows.length > tensors.most ? h("button", { type: "button", class: "further", onclick: () => { tensors.most = tensors.most < 200 ? 200 : tensors.most * 5; x.draw(); } }, "Show more (" + count(rows.length - tensors.most) + ")") : null));
    if (had) x.heading.focus({ preventScroll: true });
  },
});
