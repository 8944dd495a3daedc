// The page's own script: charts by uPlot, and tables that sort. Everything else on the page works without it.
"use strict";

const charts = JSON.parse(document.getElementById("charts").textContent);
const redraws = [];

const shade = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const digits = value => value === 0 ? "0" : Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3
  ? value.toExponential(2) : String(+value.toPrecision(4));

function element(tag, fields, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
}

function nearest(values, i) {  // the place next to i that has a value: curves share an axis, but not its places
  for (let step = 0; step < values.length; step++) {
    if (values[i - step] != null) return i - step;
    if (values[i + step] != null) return i + step;
  }
  return i;
}

function options(chart, x, logs, width, tables) {
  const ink = shade("ink"), grid = {stroke: shade("grid"), width: 1};
  const series = [{label: charts.labels[x], value: (u, v) => v == null ? "" : digits(v)}];
  const bands = [];
  for (const curve of chart.curves) {
    const stroke = shade(`hue-${curve.hue}`), i = series.length;
    series.push({
      label: curve.label || chart.label, stroke, width: 2, dash: curve.dash, spanGaps: true,
      points: {show: curve.y.length <= 25, size: 5},
      value: (u, v, s, at) => v == null ? "" : digits(v) + (curve.sd ? ` ± ${digits(u.data[s + 1][at] - v)}` : ""),
    });
    if (curve.sd) {
      const edge = {stroke: "transparent", width: 0, spanGaps: true, points: {show: false}, class: "edge"};
      series.push({...edge}, {...edge});
      bands.push({series: [i + 1, i + 2], fill: stroke + "2e"});
    }
    if (curve.mark != null)
      series.push({
        label: chart.mark, stroke, width: 0, class: "mark", paths: () => null,
        points: {show: true, size: 11, fill: stroke, stroke: shade("paper")}, value: (u, v) => v == null ? "" : digits(v),
      });
  }
  const marks = series.map(one => one.stroke);
  const axis = (label, of) => ({label, stroke: ink, grid, ticks: grid, labelFont: `${Math.max(9, Math.min(13, 340 / label.length))}px sans-serif`, font: "12px sans-serif", ...of});
  return {
    width, height: Math.round(Math.min(340, Math.max(230, 0.62 * width))), series, bands,
    scales: {x: {time: false, distr: logs.x ? 3 : 1, range: (u, low, high) => low < high ? [low, high] : [low / 2, 2 * high + 1]}, y: {distr: logs.y ? 3 : 1}},
    axes: [axis(charts.labels[x], {size: 40}), axis(chart.label, {size: 56})],
    legend: {markers: {width: 0, fill: (u, i) => marks[i]}},
    cursor: {dataIdx: (u, s, i) => s && u.data[s] ? nearest(u.data[s], i) : i, y: false},
    hooks: {
      setSeries: [(u, i, change) => {  // a curve takes its band and its mark with it
        if (i == null || change.show == null) return;
        for (let j = i + 1; j < u.series.length && u.series[j].class; j++)
          if (u.series[j].show !== change.show) u.setSeries(j, {show: change.show});
      }],
      draw: chart.zero ? [u => {
        const y = u.valToPos(0, "y", true), {left, top, width, height} = u.bbox;
        if (y < top || y > top + height) return;
        Object.assign(u.ctx, {strokeStyle: ink, lineWidth: 1});
        u.ctx.beginPath(); u.ctx.moveTo(left, y); u.ctx.lineTo(left + width, y); u.ctx.stroke();
      }] : [],
    },
  };
}

function columns(chart, x) {  // one column of x for all curves
  const tables = chart.curves.map(curve => {
    const at = curve.x[x], table = [at, curve.y];
    if (curve.sd) table.push(curve.y.map((y, i) => y + curve.sd[i]), curve.y.map((y, i) => y - curve.sd[i]));
    if (curve.mark != null) table.push(curve.y.map((y, i) => i === curve.mark ? y : null));
    return table;
  });
  return uPlot.join(tables);
}

function show(place) {
  const chart = charts.of[place.dataset.chart];
  const x = element("select", {ariaLabel: "horizontal axis"},
    ...charts.axes.map(value => element("option", {value, textContent: charts.labels[value]})));
  const log = {x: element("input", {type: "checkbox"}), y: element("input", {type: "checkbox", checked: chart.log})};
  const canvas = element("div", {className: "canvas"});
  let drawn = null;
  function draw() {
    drawn?.destroy();
    const table = columns(chart, x.value);
    drawn = new uPlot(options(chart, x.value, {x: log.x.checked, y: log.y.checked}, place.clientWidth, table), table, canvas);
  }
  place.append(element("div", {className: "controls"}, x, element("label", {}, log.x, " log x"), element("label", {}, log.y, " log y")), canvas);
  for (const control of [x, log.x, log.y]) control.addEventListener("change", draw);
  let width = place.clientWidth;
  new ResizeObserver(() => { if (place.clientWidth !== width) { width = place.clientWidth; draw(); } }).observe(place);
  redraws.push(draw);
  draw();
}

function sortable(table) {
  const body = table.tBodies[0], value = (row, i) => row.cells[i].textContent.replaceAll("−", "-");
  [...table.tHead.rows[0].cells].forEach((heading, i) => {
    const button = element("button", {type: "button", title: "sort"});
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      heading.ariaSort = down ? "descending" : "ascending";
      const order = (a, b) => isNaN(parseFloat(a)) || isNaN(parseFloat(b)) ? a.localeCompare(b) : parseFloat(a) - parseFloat(b);
      const rows = [...body.rows].sort((a, b) => {
        const [first, second] = [value(a, i), value(b, i)];
        if ((first === "-") !== (second === "-")) return first === "-" ? 1 : -1;  // nothing stays at the end
        return down ? order(second, first) : order(first, second);
      });
      body.append(...rows);
    });
  });
}

document.querySelectorAll("[data-chart]").forEach(show);
document.querySelectorAll("table.sort").forEach(sortable);
for (const query of ["(prefers-color-scheme: dark)", "print"])  // the ink is another
  matchMedia(query).addEventListener("change", () => redraws.forEach(draw => draw()));
