// Draws the charts of diloco/report/charts.py. Each is an SVG as wide as its
// place; a pointer shows values, a drag zooms (all charts over time together),
// a double click goes back, a name in the legend hides its line.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SYMBOLS = {
    "injected fault": "M-5-5 5 5M-5 5 5-5", "other death": "M-5-4H5L0 5Z",
    evaluation: "M0-10a2.5 2.5 0 1 0 .01 0Z", checkpoint: "M0 8v5",
  };
  const charts = [];
  let zoomed = null;  // of all charts over time

  function add(parent, name, attributes = {}, text = "") {
    const made = name === "button" || name === "div" || name === "i"
      ? document.createElement(name) : document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) {
      made.setAttribute(key, value);
    }
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  }

  function shown(value, unit) {
    if (value === null || value === undefined) return "–";
    if (!unit) return String(Number(value.toPrecision(4)));
    const units = unit === "bytes"
      ? [" B", " kB", " MB", " GB", " TB"] : ["", " k", " M", " G", " T"];
    let power = 0;
    while (Math.abs(value) >= 999.5 && power < 4) { value /= 1000; power++; }
    return Number(value.toPrecision(3)) + units[power];
  }

  function ticks(low, high, most) {
    const rough = (high - low) / Math.max(most, 1);
    const ten = 10 ** Math.floor(Math.log10(rough));
    const step = ten * [1, 2, 5, 10].find((n) => n * ten >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high * 1.000001; n++) {
      found.push(n * step);
    }
    return found;
  }

  // Averages neighbours of what is in view until there are few enough to see.
  function thin(line, [left, right], most) {
    if (line.high || line.dots || line.x.length > line.y.length) return line;
    const kept = line.x.map((_, i) => i).filter(
      (i) => left <= (line.x[i + 1] ?? line.x[i]) && (line.x[i - 1] ?? line.x[i]) <= right);
    const size = Math.ceil(kept.length / most), x = [], y = [];
    for (let i = 0; i < kept.length; i += size) {
      const group = kept.slice(i, i + size);
      for (const [list, out] of [[line.x, x], [line.y, y]]) {
        out.push(group.reduce((sum, n) => sum + list[n], 0) / group.length);
      }
    }
    return {...line, x, y};
  }

  // Stacks what is to be stacked, of the lines that are not hidden.
  function visible(chart, view, most) {
    const lines = chart.spec.lines.filter((line) => !chart.hidden.has(line.name))
      .map((line) => thin(line, view, most));
    if (!chart.spec.y.stack) return lines;
    let floor = null;
    return lines.map((line) => {
      const low = floor || line.y.map(() => 0);
      floor = line.y.map((value, i) => low[i] + (value || 0));
      return {...line, low, high: floor, top: floor};
    });
  }

  function range(chart, lines, [left, right]) {
    const {min, max, clip} = chart.spec.y;
    const values = [];
    for (const {x, y, low, high, top} of lines) {
      for (let i = 0; i < y.length; i++) {
        const end = x.length > y.length ? x[i + 1] : x[i];
        if (end < left || x[i] > right) continue;
        for (const list of [top || y, low, high]) {
          if (list && list[i] !== null) values.push(list[i]);
        }
      }
    }
    values.sort((a, b) => a - b);
    if (!values.length) values.push(0, 1);
    let bottom = min ?? values[0];
    // The first steps must not flatten all others.
    let up = max ?? values[Math.floor((values.length - 1) * (clip || 1))];
    const margin = 0.06 * (Math.max(up - bottom, 0.02 * Math.abs(up)) || 1);
    if (min === undefined) bottom -= margin;
    if (max === undefined) up += margin;
    return [bottom, up];
  }

  function path(line, at, up, values) {
    const stairs = line.x.length > values.length;
    let text = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      text += `${pen}${at(line.x[i]).toFixed(1)} ${up(value).toFixed(1)}`;
      if (stairs) text += `H${at(line.x[i + 1]).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }

  function band(line, at, up) {
    const stairs = line.x.length > line.high.length;
    const points = [], back = [];
    line.high.forEach((value, i) => {
      for (const x of stairs ? [line.x[i], line.x[i + 1]] : [line.x[i]]) {
        points.push(`${at(x).toFixed(1)} ${up(value).toFixed(1)}`);
        back.unshift(`${at(x).toFixed(1)} ${up(line.low[i]).toFixed(1)}`);
      }
    });
    return points.length ? `M${[...points, ...back].join("L")}Z` : "";
  }

  function draw(chart) {
    const {spec, place, width} = chart, rows = spec.rows;
    const narrow = width < 560;
    const step = narrow ? 40 : rows && rows.length > 16 ? 20 : 30;
    const left = !rows ? 54 : narrow ? 6
      : Math.min(0.4 * width, 12 + 6.3 * Math.max(...rows.map((r) => r.length)));
    const plot = {left, top: 8, right: width - 12};
    plot.bottom = plot.top + (rows ? rows.length * step + 6 : narrow ? 190 : 230);
    place.replaceChildren();
    const svg = add(place, "svg", {
      viewBox: `0 0 ${width} ${plot.bottom + 40}`, "aria-hidden": "true"});
    const last = spec.x.max
      ?? Math.max(1e-9, ...spec.lines.map(({x}) => x[x.length - 1] || 0));
    const whole = [0, last], view = (spec.x.time ? zoomed : chart.zoom) || whole;
    const at = (x) => plot.left
      + (plot.right - plot.left) * (x - view[0]) / (view[1] - view[0]);
    const name = `clip${charts.indexOf(chart)}`;
    add(add(svg, "clipPath", {id: name}), "rect", {
      x: plot.left, y: 0, width: plot.right - plot.left, height: plot.bottom});
    for (const x of ticks(...view, Math.min(8, (plot.right - plot.left) / 70))) {
      add(svg, "path", {class: "grid", d: `M${at(x)} ${plot.top}V${plot.bottom}`});
      add(svg, "text", {x: at(x), y: plot.bottom + 15, "text-anchor": "middle"},
        shown(x, spec.x.unit));
    }
    add(svg, "text", {x: (plot.left + plot.right) / 2, y: plot.bottom + 33,
      "text-anchor": "middle", class: "title"}, spec.x.label);
    chart.back = add(svg, "g");
    const inner = add(svg, "g", {"clip-path": `url(#${name})`});
    for (const x of spec.seams) {
      add(inner, "path", {class: "seam", d: `M${at(x)} ${plot.top}V${plot.bottom}`});
    }
    Object.assign(chart, {svg, plot, view, at, whole, step});
    if (rows) drawRows(chart, inner, narrow); else drawLines(chart, inner);
    chart.cursor = add(svg, "path", {class: "cursor"});
    chart.box = add(svg, "rect", {class: "box", y: plot.top, width: 0,
      height: plot.bottom - plot.top});
    chart.tip = add(place, "div", {class: "tip", hidden: ""});
    legend(chart);
    listen(chart);
  }

  function drawLines(chart, inner) {
    const {spec, plot, at, back, view} = chart;
    const lines = chart.lines = visible(chart, view, (plot.right - plot.left) / 2.5);
    const [bottom, top] = range(chart, lines, view);
    const up = (y) => plot.bottom
      - (plot.bottom - plot.top) * (y - bottom) / (top - bottom);
    for (const y of ticks(bottom, top, 5)) {
      add(back, "path", {class: "grid", d: `M${plot.left} ${up(y)}H${plot.right}`});
      add(back, "text", {x: plot.left - 6, y: up(y) + 4, "text-anchor": "end"},
        shown(y, spec.y.unit));
    }
    for (const line of lines) {
      const fill = spec.y.stack ? 0.75 : 0.18;
      if (line.high) {
        add(inner, "path", {d: band(line, at, up),
          style: `fill:${line.colour};fill-opacity:${fill}`});
      }
      const stroke = `stroke:${line.colour};stroke-dasharray:${line.dash || "none"}`;
      if (!spec.y.stack) {
        add(inner, "path", {class: "line", d: path(line, at, up, line.y),
          style: stroke});
      }
      if (line.dots) {
        line.x.forEach((x, i) => add(inner, "circle", {
          cx: at(x), cy: up(line.y[i]), r: 2.6, style: `fill:${line.colour}`}));
      }
    }
  }

  function drawRows(chart, inner, narrow) {
    const {spec, plot, at, svg, step} = chart;
    const middle = chart.middle = (row) => plot.top + row * step
      + (narrow ? 28 : step / 2);
    spec.rows.forEach((label, row) => add(svg, "text", narrow
      ? {x: plot.left, y: middle(row) - 12}
      : {x: plot.left - 8, y: middle(row) + 4, "text-anchor": "end"}, label));
    for (const [row, from, to, colour] of spec.bars) {
      add(inner, "rect", {x: at(from), y: middle(row) - 7, height: 14,
        width: Math.max(at(to) - at(from), 0.5), style: `fill:${colour}`});
    }
    for (const [row, x, kind] of spec.marks) {
      add(inner, "path", {class: "mark", d: SYMBOLS[kind],
        transform: `translate(${at(x)} ${middle(row)})`});
    }
  }

  function legend(chart) {
    const {spec, hidden, place} = chart, bar = add(place, "div", {class: "legend"});
    if (spec.rows) {
      const kinds = new Map(spec.bars.map(([, , , colour, kind]) => [kind, colour]));
      for (const [kind, colour] of kinds) {
        const item = add(bar, "div", {}, kind === "training"
          ? "training (island's colour)" : kind);
        item.prepend(add(item, "i", {style: `background:${colour}`}));
      }
      for (const kind of new Set(spec.marks.map((mark) => mark[2]))) {
        const item = add(bar, "div", {}, kind);
        const icon = add(item, "svg", {viewBox: "-7 -7 14 14", class: "icon"});
        const shift = {evaluation: 7.5, checkpoint: -10.5}[kind] || 0;
        add(icon, "path", {class: "mark", d: SYMBOLS[kind],
          transform: `translate(0 ${shift})`});
        item.prepend(icon);
      }
    }
    for (const {name, colour, dash} of spec.lines.length > 1 ? spec.lines : []) {
      const item = add(bar, "button", {type: "button",
        "aria-pressed": String(!hidden.has(name))}, name);
      item.prepend(add(item, "i", {style: dash
        ? `border-top:3px dashed ${colour}` : `background:${colour}`}));
      item.onclick = () => {
        if (!hidden.delete(name)) hidden.add(name);
        draw(chart);
      };
    }
    if (chart.view !== chart.whole) {
      add(bar, "button", {type: "button", class: "whole"}, "whole range")
        .onclick = () => zoom(chart, null);
    }
  }

  function zoom(chart, found) {
    if (!chart.spec.x.time) chart.zoom = found; else zoomed = found;
    for (const one of chart.spec.x.time ? charts : [chart]) {
      if (one.spec.x.time === chart.spec.x.time) draw(one);
    }
  }

  // What is known at a place: lines of text.
  function told(chart, x, y) {
    const {spec, at, middle, step} = chart;
    const found = [`${shown(x, spec.x.unit)} (${spec.x.label})`];
    if (spec.rows) {
      const row = spec.rows.findIndex((_, i) => Math.abs(y - middle(i)) <= step / 2);
      if (row < 0) return [];
      found.push(spec.rows[row]);
      for (const [where, from, to, , kind] of spec.bars) {
        if (where === row && from <= x && x <= to) found.push(kind);
      }
      for (const [where, moment, kind] of spec.marks) {
        if (where === row && Math.abs(at(moment) - at(x)) < 6) found.push(kind);
      }
      return found;
    }
    for (const line of chart.lines) {
      let i = line.x.findIndex((value) => value > x);
      if (i < 0) i = line.x.length;
      const stairs = line.x.length > line.y.length;
      if (stairs || (i && (i === line.x.length
          || x - line.x[i - 1] < line.x[i] - x))) i--;
      if (i < 0 || i >= line.y.length) continue;
      let text = `${line.name}: ${shown(line.y[i], spec.y.unit)}`;
      if (line.high && !spec.y.stack) text += ` (${line.low[i]} to ${line.high[i]})`;
      found.push(text);
    }
    return found.length > 14 ? [...found.slice(0, 13), "…"] : found;
  }

  function listen(chart) {
    const {svg, plot, tip, cursor, box, place} = chart;
    const where = (event) => {
      const size = svg.getBoundingClientRect(), scale = place.clientWidth / size.width;
      const px = Math.min(Math.max((event.clientX - size.left) * scale, plot.left),
        plot.right);
      return [px, (event.clientY - size.top) * scale];
    };
    const value = (px) => chart.view[0] + (chart.view[1] - chart.view[0])
      * (px - plot.left) / (plot.right - plot.left);
    let begun = null;
    svg.onpointerdown = (event) => {
      begun = where(event)[0];
      if (event.pointerType === "mouse") svg.setPointerCapture(event.pointerId);
    };
    svg.onpointermove = (event) => {
      const [px, py] = where(event), lines = told(chart, value(px), py);
      cursor.setAttribute("d", `M${px} ${plot.top}V${plot.bottom}`);
      tip.hidden = !lines.length;
      tip.replaceChildren();
      lines.forEach((line) => add(tip, "div", {}, line));
      tip.style.left = `${Math.min(px + 12, place.clientWidth - tip.offsetWidth)}px`;
      if (px + 12 + tip.offsetWidth > place.clientWidth) {
        tip.style.left = `${Math.max(px - 12 - tip.offsetWidth, 0)}px`;
      }
      if (begun !== null) {
        box.setAttribute("x", Math.min(begun, px));
        box.setAttribute("width", Math.abs(px - begun));
      }
    };
    svg.onpointerup = (event) => {
      const px = where(event)[0], from = begun;
      begun = null;
      if (from === null || Math.abs(px - from) < 8) box.setAttribute("width", 0);
      else zoom(chart, [value(Math.min(from, px)), value(Math.max(from, px))]);
    };
    svg.onpointerleave = svg.onpointercancel = () => {
      tip.hidden = true;
      cursor.setAttribute("d", "");
      begun = null;
      box.setAttribute("width", 0);
    };
    svg.ondblclick = () => zoom(chart, null);
  }

  function fit() {
    const changed = charts.filter(({place, width}) =>
      place.clientWidth && place.clientWidth !== width);
    for (const chart of changed) chart.width = chart.place.clientWidth;
    changed.forEach(draw);
  }

  // As wide as paper, or words would be as small as charts become there.
  addEventListener("beforeprint", () => {
    for (const chart of charts) chart.width = 680;
    charts.forEach(draw);
  });
  addEventListener("afterprint", fit);
  const observer = new ResizeObserver(fit);
  for (const figure of document.querySelectorAll("figure.chart")) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const place = add(figure, "div", {class: "place"});
    charts.push({spec, place, hidden: new Set(), zoom: null, width: 0});
    observer.observe(place);
  }
  fit();
})();
