// Owns the profile of kernels, which `stowage train --profile` writes: what each took, and how
// far that is from what the device can do.

const profileText = (p) => {
  const l = p.limits, flops = (t) => t < 2 ? digits(1000 * t) + " GFLOP/s" : digits(t) + " TFLOP/s";
  return plural(p.steps, "step") + " with each launch timed took " + millis(p.profiled_step_ms) + " each, and steps before them " + millis(p.step_ms) + "." +
    (l.product_tflops ? " A dense " + l.product_format + " product reaches " + flops(l.product_tflops) + " on this device, and a copy " + rate(1e9 * l.copy_gbps) + "." : "") +
    " The model's operations were done at " + flops(p.model_tflops) + (p.mfu_percent ? ", an MFU of " + digits(p.mfu_percent) + " % of the dense product." : ".");
};
const shareBar = (share, top) => s("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
  s("rect", { x: 0, y: 4.5, width: 100, height: 1, class: "rail" }), s("rect", { x: 0, y: 1, width: clamp(100 * share / (top || 1), 0.8, 100), height: 8, class: "value" }));

section({
  id: "kernels", name: "Kernels", title: "Time of each kernel",
  about: "The limit is the time that the work needs at the rates of a dense product and of a copy, whichever is longer, over the time that it took. Operations are those that the model needs.",
  there: () => !!theRun() && !!theRun().profile,
  draw(x) {
    const p = theRun().profile, small = p.limits.product_tflops < 2, top = most(p.kernels.map((k) => k.share_percent));
    const number = (v, scale = 1) => v ? digits(v * scale) : "–";
    x.body.replaceChildren(h("p", {}, profileText(p)), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Time of each kernel" }, table([
      { name: "kernel", get: (k) => k.name }, { name: "in a step", n: true, get: (k) => millis(k.ms) }, { name: "share", n: true, get: (k) => percent(k.share_percent / 100) },
      { name: "", class: "wide", get: (k) => shareBar(k.share_percent, top) }, { name: "launches", n: true, get: (k) => count(Math.round(k.launches)) },
      { name: small ? "GFLOP/s" : "TFLOP/s", n: true, get: (k) => number(k.tflops, small ? 1000 : 1) }, { name: "GB/s", n: true, get: (k) => number(k.gbps) },
      { name: "of the limit", n: true, get: (k) => k.limit_percent ? percent(k.limit_percent / 100) : "–" },
    ], p.kernels, { class: "kernels" })));
  },
});
