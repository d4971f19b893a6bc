// Owns the stack: bands over time on a canvas, device memory upwards and host memory
// downwards, with one scale. Of the samples in one column of pixels it draws the one with
// the most device memory, so that no peak is lost.

// totals returns the sum of a tier at each sample.
const totals = (series, n) => {
  const out = new Float64Array(n);
  for (const x of series) for (let i = 0; i < n; i++) out[i] += x.bytes[i];
  return out;
};

// columns returns the samples to draw in a range: the highest for each pixel.
const columns = (times, weight, from, to, width) => {
  const begin = Math.max(after(times, from) - 1, 0), end = Math.min(after(times, to) + 1, times.length), out = [];
  let column = -1;
  for (let i = begin; i < end; i++) {
    const c = Math.floor((times[i] - from) / (to - from) * width);
    if (c !== column || !out.length) { out.push(i); column = c; }
    else if (weight[i] >= weight[out[out.length - 1]]) out[out.length - 1] = i;
  }
  return out;
};

class Stack {
  constructor(times, series) {
    Object.assign(this, { times, series });
    this.device = series.filter((x) => x.tier === "device");
    this.host = series.filter((x) => x.tier === "host");
    this.totals = { device: totals(this.device, times.length), host: totals(this.host, times.length) };
    this.tops = { device: most(this.totals.device), host: most(this.totals.host) };
  }
  // index gives the sample that holds at a moment: the last one not after it.
  index(t) { return clamp(after(this.times, t + 1e-9) - 1, 0, this.times.length - 1); }

  // scale fits what is shown, the budget too where it is not far away.
  scale(plot, tiers, budget) {
    const up = tiers.device ? Math.max(this.tops.device, budget && budget < this.tops.device * 2.2 ? budget : 0) * 1.06 : 0;
    const down = tiers.host ? this.tops.host * 1.06 : 0, whole = Math.max(up + down, 1);
    const room = plot.bottomAt - plot.top;
    const zero = plot.top + room * (up / whole || (tiers.device ? 1 : 0));
    return { zero, up, down, y: (bytes) => zero - bytes / whole * room };
  }
  draw(plot, ctx, tiers, budget, dim) {
    if (!this.times.length) return;
    const scale = this.scale(plot, tiers, budget), [from, to] = plot.view.range;
    this.grid(plot, ctx, scale);
    plot.clip(ctx, () => {
      for (const tier of ["device", "host"]) {
        if (!tiers[tier]) continue;
        const at = columns(this.times, this.totals[tier], from, to, plot.width);
        this.bands(plot, ctx, scale, tier, at, dim);
      }
    });
    ctx.strokeStyle = paint.css("soft");
    ctx.beginPath();
    ctx.moveTo(plot.left, Math.round(scale.zero) + 0.5);
    ctx.lineTo(plot.w - plot.right, Math.round(scale.zero) + 0.5);
    ctx.stroke();
    return scale;
  }
  bands(plot, ctx, scale, tier, at, dim) {
    const sign = tier === "device" ? 1 : -1, n = at.length, xs = at.map((i) => plot.x(this.times[i]));
    const end = Math.min(plot.x(plot.view.all[1]), plot.w - plot.right);
    let below = new Float64Array(n);
    for (const band of this[tier]) {
      const above = new Float64Array(n);
      for (let k = 0; k < n; k++) above[k] = below[k] + sign * band.bytes[at[k]];
      const color = paint.of(band.name, band.saved);
      ctx.globalAlpha = dim && dim !== band.name ? 0.28 : 1;
      ctx.fillStyle = tier === "host" ? hatch(ctx, color, mix(color), 5) : color;
      ctx.beginPath();
      ctx.moveTo(xs[0], scale.y(below[0]));
      for (let k = 0; k < n; k++) {
        ctx.lineTo(xs[k], scale.y(above[k]));
        ctx.lineTo(k + 1 < n ? xs[k + 1] : end, scale.y(above[k]));
      }
      for (let k = n - 1; k >= 0; k--) {
        ctx.lineTo(k + 1 < n ? xs[k + 1] : end, scale.y(below[k]));
        ctx.lineTo(xs[k], scale.y(below[k]));
      }
      ctx.fill();
      below = above;
    }
    ctx.globalAlpha = 1;
    this.edge(ctx, scale, below, xs, end);
  }
  // edge is a line along the top of the stack, which the eye follows.
  edge(ctx, scale, values, xs, end) {
    ctx.strokeStyle = paint.css("ink");
    ctx.globalAlpha = 0.55;
    ctx.lineWidth = 1;
    ctx.beginPath();
    for (let k = 0; k < xs.length; k++) {
      const y = scale.y(values[k]);
      if (k === 0) ctx.moveTo(xs[k], y); else ctx.lineTo(xs[k], y);
      ctx.lineTo(k + 1 < xs.length ? xs[k + 1] : end, y);
    }
    ctx.stroke();
    ctx.globalAlpha = 1;
  }
  grid(plot, ctx, scale) {
    ctx.textAlign = "right";
    ctx.lineWidth = 1;
    const each = (plot.bottomAt - plot.top) / 64;
    const ticks = byteTicks(Math.max(scale.up, scale.down), Math.max(each * Math.max(scale.up, scale.down) / (scale.up + scale.down || 1), 2));
    for (const v of [...ticks.filter((x) => x <= scale.up), ...ticks.slice(1).filter((x) => x <= scale.down).map((x) => -x)]) {
      const y = Math.round(scale.y(v)) + 0.5;
      ctx.strokeStyle = paint.css("grid");
      ctx.beginPath();
      ctx.moveTo(plot.left, y);
      ctx.lineTo(plot.w - plot.right, y);
      ctx.stroke();
      ctx.fillStyle = paint.css("soft");
      ctx.fillText(v === 0 ? "0" : bytes(Math.abs(v)).replace(/\.0+ /, " "), plot.left - 6, y);
    }
  }
}
// mix returns a colour mixed with that of the panel, for backgrounds.
const mix = (color) => {
  const m = /^#(..)(..)(..)$/.exec(color), p = /^#(..)(..)(..)$/.exec(paint.css("panel"));
  if (!m || !p) return color;
  return "rgb(" + [1, 2, 3].map((i) => Math.round(0.4 * parseInt(m[i], 16) + 0.6 * parseInt(p[i], 16))).join(",") + ")";
};
