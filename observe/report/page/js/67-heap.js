// Owns the map of the heap in a step: time to the right, addresses upwards, and a rectangle
// for each stay of a storage.

const placed = (d) => d ? d.storages.filter((x) => x.offset >= 0 && x.bytes > 0) : [];
const heap = { of: null, list: [], top: 1 };
const useHeap = () => {
  const d = theDetail();
  if (heap.of === d) return;
  Object.assign(heap, { of: d, list: placed(d), top: most(placed(d).map((x) => x.offset + x.bytes)) || 1 });
};
// A storage holds its place from the first to the last moment of each stay on the device.
const held = (x) => {
  const out = [];
  for (const y of x.stays) {
    if (!onDevice(y.where)) continue;
    const last = out[out.length - 1];
    if (last && Math.abs(last[1] - y.begin) < 1e-9) last[1] = y.end; else out.push([y.begin, y.end]);
  }
  return out;
};
const heapY = (plot, offset) => plot.bottomAt - offset / heap.top * (plot.bottomAt - plot.top);

const drawHeap = (plot, ctx) => {
  useHeap();
  plot.timeAxis(ctx);
  ctx.textAlign = "right";
  ctx.fillStyle = paint.css("rail");
  ctx.fillRect(plot.left, plot.top, plot.width, plot.bottomAt - plot.top);
  for (const v of byteTicks(heap.top, 4)) {
    const y = Math.round(heapY(plot, v)) + 0.5;
    ctx.strokeStyle = paint.css("grid");
    ctx.beginPath();
    ctx.moveTo(plot.left - 4, y);
    ctx.lineTo(plot.w - plot.right, y);
    ctx.stroke();
    ctx.fillStyle = paint.css("soft");
    ctx.fillText(v ? bytes(v).replace(/\.0+ /, " ") : "0", plot.left - 6, y);
  }
  plot.clip(ctx, () => {
    for (const x of heap.list) {
      const dim = memory.only && memory.only !== groupName(x);
      ctx.globalAlpha = dim ? 0.25 : 1;
      ctx.fillStyle = paint.css(groupColor(x));
      for (const [begin, end] of held(x)) {
        const a = plot.x(begin), b = plot.x(end);
        if (b < plot.left || a > plot.w) continue;
        const top = heapY(plot, x.offset + x.bytes), height = heapY(plot, x.offset) - top;
        ctx.fillRect(a, top, Math.max(b - a - 0.5, 0.75), Math.max(height - (height > 3 ? 0.75 : 0), 0.75));
      }
    }
    ctx.globalAlpha = 1;
  });
};
const storageAt = (plot, x, y) => {
  const t = plot.t(x), offset = (plot.bottomAt - y) / (plot.bottomAt - plot.top) * heap.top;
  return heap.list.find((o) => offset >= o.offset && offset < o.offset + o.bytes && held(o).some(([a, b]) => t >= a && t <= b));
};

const plotHeap = new Plot({
  view: state.views.step, label: "Map of the heap: places in memory over the time of a step", top: 8, origin: () => theDetail() ? theDetail().begin : 0,
  height: () => innerWidth < 700 ? 220 : 300,
  drawBase: drawHeap,
  over(plot, ctx) {
    const d = theDetail();
    if (!d) return;
    plot.clip(ctx, () => {
      if (within(d, pinned())) plot.line(ctx, pinned(), paint.css("accent"));
      if (state.hover !== null && within(d, state.hover)) plot.line(ctx, state.hover, paint.css("ink"), [3, 3]);
    });
  },
  move(plot, x, y) {
    hover(plot.t(x));
    const at = storageAt(plot, x, y), box = plot.element.getBoundingClientRect();
    if (at) tip.show(box.left + x, box.top + y, h("p", { class: "tip-title" }, swatch(groupColor(at)), groupName(at)), row("size", bytes(at.bytes)), row("layer", at.layer >= 0 ? String(at.layer) : ""), row("microbatch", at.microbatch >= 0 ? String(at.microbatch) : ""), row("place", at.offset ? "at " + bytes(at.offset) : "at the start"));
    else tip.hide();
  },
  leave() { hover(null); tip.hide(); },
  pick(plot, x) { state.hover = null; pin(plot.t(x)); },
  key: (e) => ({
    ArrowLeft: () => state.views.step.pan(-0.1), ArrowRight: () => state.views.step.pan(0.1),
    Enter: () => { const v = state.views.step.range; state.hover = null; pin((v[0] + v[1]) / 2); toTensors(true); },
  })[e.key],
});

section({
  id: "heap", name: "Heap map", title: "Places in the heap",
  about: "Each rectangle is a tensor: its height is its place in the heap, its width the time it was there. Gaps are free. The time axis is that of the streams above and zooms with them.",
  there: () => placed(theDetail()).length > 0,
  draw(x) {
    if (!x.made) {
      x.made = { legend: h("div"), table: alternative("places in the heap", heapTable) };
      x.body.append(x.made.legend, plotHeap.element, x.made.table.element);
    }
    useHeap();
    const names = [...new Map(heap.list.map((o) => [groupName(o), groupColor(o)]))];
    x.made.legend.replaceChildren(h("ul", { class: "legend" }, names.map(([name, variable]) => h("li", {}, swatch(variable), name))));
    plotHeap.draw(true);
    x.made.table.draw();
  },
  hover() { plotHeap.follow(); },
});
const heapTable = () => table([
  { name: "group", get: (x) => groupName(x) }, { name: "place", n: true, get: (x) => bytes(x.offset) }, { name: "size", n: true, get: (x) => bytes(x.bytes) },
  { name: "from", n: true, get: (x) => millis(x.stays[0].begin - theDetail().begin) }, { name: "to", n: true, get: (x) => millis(x.stays[x.stays.length - 1].end - theDetail().begin) }],
[...heap.list].sort((a, b) => b.bytes - a.bytes).slice(0, 200));
