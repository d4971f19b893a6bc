// Owns shortening pauses. A comparison trains its policies in turn, so a run waits longer
// than it works. Pauses between steps are shortened before anything is drawn; times
// inside of steps keep their lengths.

// cutsOf returns pieces of time: real time from..to is drawn from at on. Steps and short
// pauses keep their lengths. A pause of more than a tenth of the step before it is drawn
// as a fiftieth of that step. Only earlier steps matter, so that the times of a live page
// stay where they are.
const cutsOf = (steps, end) => {
  const cuts = [];
  let at = 0, from = 0, cut = 0;
  const piece = (to, drawn) => {
    if (to <= from) return;
    cuts.push({ from, to, at, scale: drawn / (to - from) });
    at += drawn;
    from = to;
  };
  steps.forEach((x, i) => {
    const beside = i ? steps[i - 1].end - steps[i - 1].begin : x.end - x.begin, pause = x.begin - from;
    if (pause > beside / 10) { cut += pause - beside / 50; piece(x.begin, beside / 50); } else piece(x.begin, Math.max(pause, 0));
    piece(x.end, Math.max(x.end - from, 0));
  });
  const last = steps.length ? steps[steps.length - 1] : null, rest = end - from;
  if (last && rest > (last.end - last.begin) / 10) { cut += rest - (last.end - last.begin) / 50; piece(end, (last.end - last.begin) / 50); } else piece(end, rest);
  return { cuts, cut };
};

const cutPauses = (r) => {
  const t = r.memory.t, end = Math.max(most(r.steps.map((x) => x.end)), most(r.details.map((x) => x.end)), t.length ? t[t.length - 1] : 0, r.rates.t.length ? r.rates.t[r.rates.t.length - 1] : 0, r.memory.peak.t);
  const { cuts, cut } = cutsOf(r.steps, end);
  r.cut = cut;
  if (!cut) return r;
  const begins = cuts.map((c) => c.from);
  const move = (x) => { const c = cuts[clamp(after(begins, x) - 1, 0, cuts.length - 1)]; return c.at + (x - c.from) * c.scale; };
  // Inside a step everything moves by the same, so that lengths stay exact.
  const by = (d) => move((d.begin + d.end) / 2) - (d.begin + d.end) / 2;
  for (const d of r.details) {
    const shift = by(d);
    d.begin += shift;
    d.end += shift;
    for (const x of d.storages) for (const y of x.stays) { y.begin += shift; y.end += shift; }
    for (const x of d.streams) x.begin = x.begin.map((v) => v + shift);
  }
  r.memory.t = t.map(move);
  r.rates.t = r.rates.t.map(move);
  r.memory.peak.t = move(r.memory.peak.t);
  for (const x of r.steps) { const shift = by(x); x.begin += shift; x.end += shift; }
  return r;
};
