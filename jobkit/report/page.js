// Shows the values below the pointer. What a run has named reaches the page as text only (textContent).
"use strict";
const { charts, names, size } = JSON.parse(document.getElementById("data").textContent);
const rows = 16; // of the curves nearest to the pointer: a list of sixty covers the chart
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function made(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function place(low, high, at, atLow, atHigh) {
  return atLow + (high > low ? (at - low) / (high - low) : 0.5) * (atHigh - atLow);
}

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { frame, curves } = charts[Number(svg.dataset.chart)];
  const up = frame.log ? Math.log10 : (value) => value;
  const x = (step) => place(frame.first, frame.last, step, size.left, size.width - size.right);
  const y = (value) => place(up(frame.low), up(frame.high), up(value), size.height - size.bottom, size.top);
  const marks = made("g", { class: "marks" });
  svg.append(marks);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * size.width;
    const step = place(size.left, size.width - size.right, at, frame.first, frame.last);
    const found = curves.filter((curve) => curve.points.length)
      .map((curve) => ({ run: curve.run, point: nearest(curve.points, step) }));
    if (!found.length) return;
    const closest = found.reduce((a, b) => (Math.abs(a.point[0] - step) <= Math.abs(b.point[0] - step) ? a : b));
    const lineAt = x(closest.point[0]);
    marks.replaceChildren(
      made("line", { class: "pointer", x1: lineAt, x2: lineAt, y1: size.top, y2: size.height - size.bottom }),
      ...found.map(({ run, point }) =>
        made("circle", { class: `s${run % 10}`, cx: x(point[0]), cy: y(point[1]), r: 3.5 })));
    const high = ((event.clientY - box.top) / box.height) * size.height;
    const nearestFirst = [...found].sort((a, b) => Math.abs(y(a.point[1]) - high) - Math.abs(y(b.point[1]) - high));
    const told = found.length > rows ? nearestFirst.slice(0, rows) : found;
    const head = document.createElement("b");
    head.textContent = `step ${closest.point[0]}`;
    tip.replaceChildren(head, ...told.map(({ run, point }) => {
      const row = document.createElement("div");
      const key = document.createElement("i");
      key.className = `key s${run % 10}`;
      const other = point[0] === closest.point[0] ? "" : ` (step ${point[0]})`;
      row.append(key, `${point[1].toPrecision(6).replace(/\.?0+$/, "")}${other}${names.length > 1 ? `  ${names[run]}` : ""}`);
      return row;
    }));
    if (told.length < found.length) tip.append(`and ${found.length - told.length} more`);
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("pointerleave", () => {
    marks.replaceChildren();
    tip.hidden = true;
  });
}
document.documentElement.dataset.charts = String(charts.length);
