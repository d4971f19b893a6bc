// The cursor of the timeline: it follows the pointer, and the arrow keys once the
// picture has the focus. Everything else works without this script.
"use strict";
(() => {
  const chart = document.getElementById("chart");
  if (!chart) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const cursor = chart.querySelector(".cursor");
  const readout = document.getElementById("readout");
  const last = data.passes.length - 1;
  const size = (mib) => mib >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(1) + " MiB";
  let at = data.peak;

  const show = (i) => {
    at = Math.min(Math.max(i, 0), last);
    const values = data.values[at];
    const head = "pass " + (at + 1) + " of " + (last + 1) + ", " + data.passes[at] + ": " +
      size(values.reduce((a, b) => a + b, 0)) + (at === data.peak ? ", the peak" : "");
    cursor.hidden = false;
    cursor.style.left = 100 * (at + 0.5) / (last + 1) + "%";
    chart.setAttribute("aria-valuenow", at + 1);
    chart.setAttribute("aria-valuetext", head);
    const strong = document.createElement("strong");
    strong.textContent = head;
    const parts = data.names.map((name, j) => {
      const span = document.createElement("span");
      span.textContent = name + " " + size(values[j]);
      return span;
    }).filter((_, j) => values[j] > 0);
    readout.replaceChildren(strong, ...parts);
  };

  const move = (e) => {
    const box = chart.getBoundingClientRect();
    show(Math.floor((e.clientX - box.left) / box.width * (last + 1)));
  };
  chart.addEventListener("pointermove", move);
  chart.addEventListener("pointerdown", move);
  chart.addEventListener("keydown", (e) => {
    const to = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1,
      PageDown: at - 16, PageUp: at + 16, Home: 0, End: last, p: data.peak,
    }[e.key];
    if (to === undefined || e.ctrlKey || e.altKey || e.metaKey) return;
    e.preventDefault();
    show(to);
  });
  show(at);
})();
