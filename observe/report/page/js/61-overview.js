// Owns the top: the key figures of the selected run, what could not be read, and a line
// that describes the report.

const named = (run, ...names) => {
  for (const name of names) {
    const f = run.figures.find((x) => x.name === name);
    if (f) return f;
  }
  return null;
};
const budgetOf = (run) => {
  const f = named(run, "budget_bytes", "budget");
  return f ? f.value : most(run.ranks.map((r) => r.budget || 0)) || null;
};
const devicePeak = (run) => named(run, "peak_device_bytes", "device_peak")
  || (run.ranks.length ? { label: "device peak", unit: "bytes", value: most(run.ranks.map((r) => r.memory.peak.bytes)) } : null);
const hostPeak = (run) => named(run, "peak_host_bytes", "host_peak")
  || (run.ranks.length ? { label: "host peak", unit: "bytes", value: most(run.ranks.map((r) => r.memory.peak.host)) } : null);
// The first steps warm up; the median ignores them.
const stepTime = (run) => named(run, "step_ms", "median_step_ms")
  || (run.steps.ms.length ? { label: "step time", unit: "ms", value: median(run.steps.ms) } : null);
// The ratio in the run's own summary comes first: it was measured round by round.
const timeRatio = (run, first) => {
  if (run.apart) return null; // another model, length or machine than the first one's
  const said = named(run, "step_ratio"), a = stepTime(run), b = first && stepTime(first);
  return said ? said.value : a && b && b.value ? a.value / b.value : null;
};
const speedOf = (run) => named(run, "tokens_per_second", "tokens_per_s")
  || (run.steps.tokens_per_s.length ? { value: median(run.steps.tokens_per_s), unit: "n" } : null);
const lossOf = (run) => named(run, "final_loss", "loss")
  || (run.steps.loss.length ? { value: run.steps.loss[run.steps.loss.length - 1], unit: "n" } : null);
const checksum = (run) => { const f = named(run, "params_sha256", "parameters"); return f && f.text ? f.text : null; };

const said = (f) => f && f.predicted !== undefined && f.predicted !== null;
const beside = (f) => said(f)
  ? [h("span", {}, "predicted ", h("b", {}, figure(f, f.predicted))), f.predicted ? h("span", { class: f.value === f.predicted ? "good" : "diff" }, f.value === f.predicted ? "✓ exactly" : signed((f.value - f.predicted) / f.predicted)) : null]
  : [];

const card = (id, name, value, below, picture) => h("div", { class: "card", id: "card-" + id },
  h("dt", {}, name), h("dd", { class: "value" }, value), picture ? h("dd", { class: "picture" }, picture) : null, below && below.length ? h("dd", { class: "below" }, below) : null);

const drawCards = () => {
  const run = theRun(), runs = state.report.runs, out = [], budget = budgetOf(run);
  const device = devicePeak(run), host = hostPeak(run), time = stepTime(run), loss = lossOf(run), speed = speedOf(run), hex = checksum(run);
  if (device) {
    const top = Math.max(device.value, device.predicted || 0, budget && budget < device.value * 4 ? budget : 0) * 1.02;
    out.push(card("device", "Device peak", bytes(device.value), [beside(device), budget ? h("span", {}, "budget " + bytes(budget)) : null],
      bar({ value: device.value, top, mark: device.predicted, limit: budget })));
  }
  if (host) out.push(card("host", "Host peak", bytes(host.value), beside(host), spark(run.steps.host_peak)));
  if (time) {
    const ratio = runs.length > 1 && state.run > 0 ? timeRatio(run, runs[0]) : null;
    out.push(card("time", "Step time", millis(time.value), [beside(time), ratio
      ? h("span", {}, "× " + ratio.toFixed(2) + " of ", h("b", {}, runs[0].name)) : null, speed ? h("span", {}, count(Math.round(speed.value)) + " tokens/s") : null], spark(run.steps.ms)));
  }
  if (loss) {
    const held = run.steps.held.length ? run.steps.held[run.steps.held.length - 1] : null;
    out.push(card("loss", "Loss", lossText(loss.value), [held !== null ? h("span", {}, "held-out " + lossText(held)) : null,
      run.steps.loss.length ? h("span", {}, "from " + lossText(run.steps.loss[0])) : null], spark(run.steps.loss)));
  }
  if (hex) {
    const all = (run.apart ? [run] : runs.filter((r) => !r.apart)).map(checksum).filter(Boolean), same = all.every((x) => x === hex);
    out.push(card("sum", "Parameters", h("code", { title: hex }, hex.slice(0, 10)), [all.length > 1
      ? h("span", { class: same ? "good" : "bad" }, same ? "✓ equal bit for bit in " + plural(all.length, "run") : "✗ differ between runs")
      : h("span", {}, "SHA-256 of all parameters")]));
  }
  $("cards").replaceChildren(runs.length > 1 ? h("p", { class: "which soft" }, "Showing ", h("b", {}, run.name), ". Choose another run above, or in the table below.") : "", h("dl", {}, out), loss ? "" : otherFigures(run));
};
// A benchmark has other figures and no loss.
const otherFigures = (run) => {
  const shown = new Set([devicePeak(run), hostPeak(run), stepTime(run), speedOf(run)]), rest = run.figures.filter((f) => !shown.has(f));
  return rest.length ? h("dl", { class: "counts more", "aria-label": "Further figures" }, rest.map((f) => h("div", {}, h("dt", {}, f.label || f.name), h("dd", { class: "break" }, figure(f), said(f) ? " (predicted " + figure(f, f.predicted) + ")" : "")))) : "";
};

const drawNotes = () => {
  const { report } = state, run = theRun();
  const missing = [...report.missing, ...list(run && run.missing)];
  const dropped = run ? sum(run.ranks.map((r) => r.dropped || 0)) : 0;
  if (dropped) missing.push(plural(dropped, "event") + " did not fit into the trace.");
  const notes = $("notes"), open = !notes.querySelector("details") || notes.querySelector("details").open;
  notes.replaceChildren(...(missing.length ? [h("details", { class: "note", open },
    h("summary", {}, missing.length === 1 ? "1 note" : missing.length + " notes"), h("ul", {}, missing.map((x) => h("li", {}, x))))] : []));
};

const drawAbout = () => {
  const { report } = state, run = theRun();
  document.title = report.title;
  $("title").textContent = report.title;
  if (!run) { $("about").textContent = "There is no run in this report."; return; }
  const env = run.environment, n = run.steps.step.length;
  const parts = [env.model && !report.title.includes(env.model) ? env.model : null, report.runs.length > 1 ? plural(report.runs.length, "run") : null, run.ranks.length ? plural(run.ranks.length, "rank") : null, n ? plural(n, "step") : null,
    env.device || env.cpu || null, report.version ? /^stowage/.test(report.version) ? report.version : "stowage " + report.version : null, report.made ? report.made.replace("T", " ").replace(/(\.\d+)?Z$/, " UTC") : null];
  $("about").textContent = parts.filter(Boolean).join(" · ");
};

const drawTop = () => { drawAbout(); drawNotes(); if (theRun()) drawCards(); };
