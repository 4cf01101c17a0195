"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const { x, y, label, series } = JSON.parse(plot.dataset.chart);
  const xs = [...new Set(series.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const rule = plot.appendChild(Object.assign(document.createElement("div"), { className: "rule" }));
  const tip = plot.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  let at = xs.length - 1;
  const text = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4, useGrouping: "min2" });
  const part = (value, [low, high]) => (100 * (value - low)) / (high - low || 1);
  const show = (index) => {
    at = Math.min(Math.max(index, 0), xs.length - 1);
    const left = part(xs[at], x);
    rule.style.left = `${left}%`;
    tip.style.cssText = left > 50 ? `right:${100 - left}%` : `left:${left}%`;
    tip.replaceChildren(document.createTextNode(`${label} ${text(xs[at])}`));
    for (const { name, style, points } of series) {
      const point = points.find((each) => each[0] === xs[at]);
      if (!point) continue;
      const line = tip.appendChild(document.createElement("div"));
      line.className = `s${style}`;
      line.append(`${name} `, Object.assign(document.createElement("b"), { textContent: text(point[1]) }));
    }
    plot.classList.add("on");
  };
  const hide = () => plot.classList.remove("on");
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const value = x[0] + ((event.clientX - box.left) / box.width) * (x[1] - x[0]);
    show(xs.reduce((best, each, index) => (Math.abs(each - value) < Math.abs(xs[best] - value) ? index : best), 0));
  };
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); show(plot.classList.contains("on") ? at + by : at); }
  });
}
