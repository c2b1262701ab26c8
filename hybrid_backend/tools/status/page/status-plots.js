// The page's plots on canvases: heat maps of layers over time, and courses of numbers.

const SHORTEST = 60; // seconds on the time axis, at least
const LEFT = 46, RIGHT = 6, TOP = 4, BOTTOM = 20; // CSS pixels around a plot

export const known = (value) => value !== null && value !== undefined;
export const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "–");
export const short = (value) =>
  value >= 1e9 ? `${+(value / 1e9).toFixed(1)}G` : value >= 1e6 ? `${+(value / 1e6).toFixed(1)}M`
    : value >= 1e4 ? `${+(value / 1e3).toFixed(1)}k` : `${+value.toFixed(value < 100 ? 1 : 0)}`;

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Of the body, which has other colours where the numbers are old.
const colour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function ramp([low, high]) {
  const [a, b] = [channels(colour(low)), channels(colour(high))];
  return (value) => `rgb(${a.map((from, i) => Math.round(from + value * (b[i] - from))).join(" ")})`;
}

// Ends now, so that a server that fell silent leaves a gap that grows.
function timeAxis({ columns, status }, stale) {
  const last = columns.length ? columns[columns.length - 1].time : status.now;
  const end = stale === null ? last : Math.max(last, (status.read || last) + stale);
  const first = columns.length ? columns[0].time - columns[0].seconds : end;
  const span = Math.min(Math.max(end - first, SHORTEST), status.kept * status.interval);
  return { start: end - span, end };
}

// A canvas in device pixels, cleared; `x` maps time to CSS pixels.
function surface(canvas, axis) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  const inner = width - LEFT - RIGHT;
  const x = (time) => LEFT + (inner * (time - axis.start)) / (axis.end - axis.start);
  return { pen, width, height, x };
}

function labelTime({ pen, width, height, x }, axis) {
  pen.fillStyle = colour("--soft");
  pen.textBaseline = "alphabetic";
  const seconds = axis.end - axis.start;
  const step = [10, 20, 30, 60, 120, 300, 600].find((s) => seconds / s <= width / 90) || 1800;
  for (let back = 0; back <= seconds; back += step) {
    const at = x(axis.end - back);
    const text = back === 0 ? "now" : step < 60 ? `−${back} s` : `−${back / 60} min`;
    pen.textAlign = back === 0 ? "right" : "center";
    if (at - LEFT > 18) pen.fillText(text, at, height - 5);
  }
}

// A map of `key` (layers by columns) in a figure. Returns the function that draws it, given the age of old numbers.
export function heat(state, figure, key, word, colours, empty) {
  const canvas = element("canvas", { tabindex: "0", role: "img" });
  const output = element("output", {});
  const legend = element("div", { class: "scale", "aria-hidden": "true" },
    "0\u00a0%", element("i", { class: "ramp" }), "100\u00a0%",
    element("span", { class: "none" }, element("i"), "not\u00a0measured"));
  figure.replaceChildren(canvas, legend, output);
  let cursor = null;
  let stale = null;

  const layerCount = () => state.columns.reduce((most, column) => Math.max(most, column[key].length), 0);
  const rowHeight = () => (canvas.clientHeight - TOP - BOTTOM) / Math.max(layerCount(), 1);
  const columnAt = (time) => state.columns.findIndex((column) => column.time >= time);

  function tell() {
    const column = cursor && state.columns[columnAt(cursor.time)];
    const time = column && new Date(1000 * column.time).toLocaleTimeString("en-GB");
    output.textContent = column
      ? `Layer ${cursor.layer}, ${time}: ${percent(column[key][cursor.layer])} ${word}`
      : "Point at a cell, or focus the map and use the arrow keys.";
    return column;
  }

  function cells({ pen, x }, layers, row) {
    const tint = ramp(colours);
    let measured = 0;
    for (const column of state.columns) {
      const from = Math.max(x(column.time - column.seconds), LEFT);
      const to = x(column.time);
      if (to <= LEFT) continue;
      for (let layer = 0; layer < layers; layer += 1) {
        const value = column[key][layer];
        if (!known(value)) continue;
        measured += 1;
        pen.fillStyle = tint(value);
        const y = Math.round(TOP + layer * row);
        pen.fillRect(Math.floor(from), y, Math.ceil(to) - Math.floor(from), Math.round(TOP + (layer + 1) * row) - y - (row > 6 ? 1 : 0));
      }
    }
    return measured;
  }

  function draw() {
    if (!canvas.clientWidth || !state.status) return; // not shown
    const axis = timeAxis(state, stale);
    const place = surface(canvas, axis);
    const { pen, width, height, x } = place;
    const [layers, row] = [layerCount(), rowHeight()];
    const measured = cells(place, layers, row);
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    pen.strokeRect(LEFT + 0.5, TOP + 0.5, width - LEFT - RIGHT - 1, height - TOP - BOTTOM - 1);
    pen.fillStyle = colour("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const step = [1, 2, 5, 10, 20, 50].find((s) => s * row >= 16) || 100;
    for (let layer = 0; layer < layers; layer += step) pen.fillText(String(layer), LEFT - 6, TOP + (layer + 0.5) * row);
    labelTime(place, axis);
    if (!measured) {
      pen.fillStyle = colour("--text");
      pen.textAlign = "center";
      pen.fillText(state.columns.length ? empty : "The first interval is being measured.", (LEFT + width) / 2, height / 2, width - LEFT - RIGHT);
    }
    const column = tell();
    if (column) {
      pen.strokeStyle = colour("--text");
      pen.lineWidth = 2;
      const from = x(column.time - column.seconds);
      pen.strokeRect(from, TOP + cursor.layer * row, x(column.time) - from, row);
    }
    canvas.setAttribute("aria-label", measured
      ? `${layers} layers over ${Math.round(axis.end - axis.start)} seconds: share ${word}. The table below has each layer.`
      : empty);
  }

  canvas.addEventListener("pointermove", (event) => {
    const axis = timeAxis(state, stale);
    const inner = canvas.clientWidth - LEFT - RIGHT;
    const layer = Math.floor((event.offsetY - TOP) / rowHeight());
    const time = axis.start + ((event.offsetX - LEFT) / inner) * (axis.end - axis.start);
    cursor = layer >= 0 && layer < layerCount() && event.offsetX >= LEFT ? { layer, time } : null;
    draw();
  });
  canvas.addEventListener("pointerleave", () => { cursor = null; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !state.columns.length) return;
    event.preventDefault();
    const last = state.columns.length - 1;
    const found = cursor ? columnAt(cursor.time) : last;
    const index = Math.min(Math.max((found < 0 ? last : found) + (cursor ? move[1] : 0), 0), last);
    const layer = Math.min(Math.max(cursor ? cursor.layer + move[0] : 0, 0), layerCount() - 1);
    cursor = { layer, time: state.columns[index].time };
    draw();
  });
  return (seconds) => { stale = seconds; draw(); };
}

// A plot of two lines at most, each with its name, its value in a column, and how that is written.
export function course(state, parent, title, lines, where = "") {
  const canvas = element("canvas", { role: "img" });
  const keys = lines.map((_, index) => element("span", { class: `key ${index ? "two" : "one"}` }));
  parent.append(element("figure", { class: where }, element("figcaption", {}, element("b", {}, title), ...keys), canvas));

  function grid({ pen, width }, top, y) {
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    pen.fillStyle = colour("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(y(part * top)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, at);
      pen.lineTo(width - RIGHT, at);
      pen.stroke();
      pen.fillText(lines[0].text(part * top), LEFT - 5, Math.max(at, 8), LEFT - 6);
    }
  }

  // The line in pieces: it is broken where nothing was measured.
  function pieces({ value }, axis) {
    const runs = [];
    let end = null;
    for (const column of state.columns) {
      if (column.time < axis.start || !known(value(column))) { end = null; continue; }
      if (end === null || column.time - column.seconds - end >= state.status.interval) runs.push([]);
      runs[runs.length - 1].push(column);
      end = column.time;
    }
    return runs;
  }

  return (stale) => {
    if (!canvas.clientWidth) return; // not shown
    const axis = timeAxis(state, stale);
    const place = surface(canvas, axis);
    const { pen, height, x } = place;
    const values = state.columns.flatMap((column) => lines.map(({ value }) => value(column)).filter(known));
    const top = ceiling(Math.max(...values, 0));
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
    grid(place, top, y);
    labelTime(place, axis);
    lines.forEach((line, index) => {
      pen.strokeStyle = pen.fillStyle = colour(index ? "--two" : "--one");
      pen.lineWidth = 2;
      pen.setLineDash(index ? [5, 3] : []);
      for (const run of pieces(line, axis)) {
        const [first, last] = [run[0], run[run.length - 1]];
        pen.beginPath();
        pen.moveTo(x(first.time) - (run.length > 1 ? 0 : 2), y(line.value(first)));
        for (const column of run) pen.lineTo(x(column.time), y(line.value(column)));
        pen.stroke();
        if (index || run.length < 2) continue;
        pen.lineTo(x(last.time), y(0));
        pen.lineTo(x(first.time), y(0));
        pen.globalAlpha = 0.12;
        pen.fill();
        pen.globalAlpha = 1;
      }
      const column = state.columns[state.columns.length - 1];
      const latest = column ? line.value(column) : null;
      keys[index].textContent = `${line.name}${known(latest) ? line.text(latest) : "–"}`;
    });
    pen.setLineDash([]);
    canvas.setAttribute("aria-label", `${title}: ${keys.map((k) => k.textContent).join(", ")}; highest ${lines[0].text(Math.max(...values, 0))}`);
  };
}

// The next round number: 1, 2, 4, 5 or 10 times a power of ten.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 10].find((step) => step * power >= value * 0.999);
}
