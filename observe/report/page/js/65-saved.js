// Owns the exact memory of saved tensors inside of a step.

// stackOf returns what each group holds at each moment at which something changes.
const stackOf = (d) => {
  const changes = [];
  d.storages.forEach((x) => {
    for (const y of x.stays) {
      for (const tier of ["device", "host"]) {
        if (tier === "device" ? !onDevice(y.where) : y.where === "device") continue;
        changes.push([y.begin, x, tier, x.bytes], [y.end, x, tier, -x.bytes]);
      }
    }
  });
  changes.sort((a, b) => a[0] - b[0]);
  const times = [], bands = new Map();
  const band = (x, tier) => {
    const key = tier + groupName(x);
    if (!bands.has(key)) bands.set(key, { tier, name: groupName(x), saved: !!x.group, now: 0, bytes: [] });
    return bands.get(key);
  };
  for (const [, x, tier] of changes) band(x, tier);
  for (let i = 0; i < changes.length;) {
    const t = changes[i][0];
    for (; i < changes.length && changes[i][0] === t; i++) band(changes[i][1], changes[i][2]).now += changes[i][3];
    times.push(t);
    for (const b of bands.values()) b.bytes.push(b.now);
  }
  return new Stack(times, [...bands.values()].sort((a, b) => a.saved - b.saved || (a.name < b.name ? -1 : 1)));
};

const saved = { of: null, stack: null };
const useSaved = () => {
  const d = theDetail();
  if (saved.of !== d) Object.assign(saved, { of: d, stack: d ? stackOf(d) : null });
  return saved.stack;
};
const savedTip = (t) => {
  const { stack } = saved, i = stack.index(t), rows = stack.series.map((b) => ({ b, n: b.bytes[i] })).filter((r) => r.n > 0).sort((a, b) => b.n - a.n);
  return [h("p", { class: "tip-title" }, millis(t - theDetail().begin) + ": device " + bytes(stack.totals.device[i]) + (stack.tops.host ? ", host " + bytes(stack.totals.host[i]) : "")),
    ...rows.slice(0, 10).map((r) => h("div", {}, h("span", {}, swatch(paint.variable(r.b.name, r.b.saved), r.b.tier), r.b.name), h("b", {}, bytes(r.n))))];
};

const plotSaved = new Plot({
  view: state.views.step, label: "Saved tensors during the step, by group", height: () => innerWidth < 700 ? 170 : 210,
  origin: () => theDetail() ? theDetail().begin : 0,
  drawBase(plot, ctx) {
    const stack = useSaved();
    plot.timeAxis(ctx);
    if (stack) stack.draw(plot, ctx, { device: true, host: stack.tops.host > 0 }, 0, memory.only);
  },
  over(plot, ctx) {
    const d = theDetail();
    if (!d) return;
    plot.clip(ctx, () => {
      if (within(d, pinned())) plot.line(ctx, pinned(), paint.css("accent"));
      if (state.hover !== null && within(d, state.hover)) plot.line(ctx, state.hover, paint.css("ink"), [3, 3]);
    });
  },
  move(plot, x, y) {
    const box = plot.element.getBoundingClientRect(), t = plot.t(x);
    hover(t);
    if (saved.stack) tip.show(box.left + x, box.top + y, ...savedTip(t));
  },
  leave() { hover(null); tip.hide(); },
  pick(plot, x) { state.hover = null; pin(plot.t(x)); toTensors(false); },
  key: (e) => {
    const go = (by) => () => {
      const { times, totals } = useSaved(), [from, to] = state.views.step.range, at = columns(times, totals.device, from, to, plotSaved.width / 3).map((i) => times[i]).filter((t) => t >= from && t <= to);
      const t = at[clamp(after(at, moment()) - 1 + by, 0, at.length - 1)];
      if (t === undefined) return;
      hover(t);
      say(savedTip(t)[0].textContent);
    };
    return { ArrowLeft: go(-1), ArrowRight: go(1), Home: go(-1e9), End: go(1e9), Enter: () => { const t = moment(); state.hover = null; pin(t); toTensors(true); }, Escape: () => { state.hover = null; pin(null); } }[e.key];
  },
});
