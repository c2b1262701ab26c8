// Polls status.json and draws it. The server computes and judges all numbers. No library, nothing from elsewhere.
const SHORTEST = 60; // seconds on a time axis, at least
const MAP_WIDTH = 1200; // columns of pixels in a heat map, which the style sheet scales to the page

const state = { status: null, columns: [], received: 0, silence: null, cursor: null };
const page = document.getElementById("page");
const known = (value) => value !== null && value !== undefined;
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const percent = (share) => (known(share) ? `${+(100 * share).toFixed(1)} %` : "–");
const duration = (seconds) => (seconds < 1 ? `${short(1000 * seconds)} ms` : `${+seconds.toFixed(1)} s`);
const age = (seconds) =>
  seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;

function short(value) {
  const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => value >= Math.max(size, 1e4)) || [1, ""];
  return `${+(value / unit).toFixed(value < 100 || letter ? 1 : 0)}${letter}`;
}

// --- building the page ---

// The page's Content-Security-Policy forbids style attributes, but not styles that a script sets.
function set(node, name, value) {
  if (name === "style") node.style.cssText = value;
  else node.setAttribute(name, value);
}

function element(tag, attributes = {}, ...children) {
  const isDrawing = tag === "svg" || tag === "path";
  const node = isDrawing ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (known(value)) set(node, name, value);
  node.append(...children);
  return node;
}

// Changes `node` into `fresh` piece by piece, so that the selection, the focus and open details stay.
function update(node, fresh) {
  if (node.isEqualNode(fresh)) return;
  if (node.nodeName !== fresh.nodeName || !(node instanceof Element)) { node.replaceWith(fresh); return; }
  for (const { name, value } of fresh.attributes) set(node, name, value);
  for (const name of node.getAttributeNames()) if (name !== "open" && !fresh.hasAttribute(name)) node.removeAttribute(name);
  const [before, after] = [[...node.childNodes], [...fresh.childNodes]];
  before.forEach((child, index) => (index < after.length ? update(child, after[index]) : child.remove()));
  node.append(...after.slice(before.length));
}

// Keys with values, flags and commands stand out.
function withCode(text) {
  const commands = /([a-z_]+(?:\.[a-z_]+)*=[^\s,;)]+|--[a-z-]+ \d+|--[a-z-]+|hybrid (?:plan|profile|top|bench)(?: (?:--[a-z-]+|[A-Z]+|[\w.]+=\w+|throughput))*)/;
  return text.split(commands).map((piece, index) => (index % 2 ? element("code", {}, piece) : piece));
}

// --- what is said first ---

// Seconds since the last reading if it is old: by the server's word, or because this page's own server is silent.
function staleSeconds() {
  const { status, silence, received } = state;
  if (silence === null) return status.stale_seconds;
  return (status.read === null ? 0 : status.now - status.read) + (performance.now() - received) / 1000;
}

const sign = () => element("span", { class: "mark", "aria-hidden": "true" });

function headline({ level, title, detail }) {
  return element("section", { id: "headline", class: `wide ${level}`, "aria-labelledby": "title" }, sign(),
    element("div", {}, element("h2", { id: "title", "aria-live": "polite" }, title), element("p", { id: "detail" }, detail)));
}

function glance(answers) {
  return element("section", { id: "glance", class: "wide", "aria-label": "At a glance", hidden: answers.length ? null : "" },
    ...answers.map(({ question, verdict, text, level }) => element("article", { class: `answer ${level}` },
      element("h3", {}, question), element("p", { class: "verdict" }, sign(), verdict), element("p", {}, ...withCode(text)))));
}

function change(answers) {
  const [first, ...later] = answers.filter((answer) => answer.change);
  if (!first) return element("section", { id: "change", hidden: "" });
  const line = ({ verdict, change: text }) => [element("b", {}, `${verdict}: `), ...withCode(text)];
  return element("section", { id: "change", class: "wide" }, element("h2", {}, "Recommended change"),
    element("p", { id: "change-text" }, ...line(first)),
    ...later.map((next) => element("p", {}, "After that, ", ...line(next))));
}

// --- the numbers ---

function section(id, title, note, ...content) {
  const [{ status }, old] = [state, staleSeconds()];
  const mark = old === null || status.read === null ? "" : `${age(old)} old, of ${clock(status.read)}`;
  return element("section", { id, class: "wide data" },
    element("h2", {}, `${title} `, element("span", { class: "age" }, mark)), element("p", { class: "what" }, note), ...content);
}

const number = (value, digits = 0) => (known(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–");
const rate = (value) => number(value, value && value < 100 ? 1 : 0);
const fixed = (share) => (known(share) ? `${number(100 * share, 1)} %` : "–"); // in columns of numbers
const millis = (share) => (known(share) ? number(1000 * share, share > 0 && share < 0.01 ? 2 : 0) : "–");
const bytes = (value) => (known(value) ? `${short(value).replace(/(?=[kMG]$)|$/, "\u00a0")}B` : "–"); // "1.5 GB"
const optional = (text, value) => (known(value) ? text(value) : "–");

// Tiles are triples of a name, a value and a unit, and a share for a number that is drawn as a bar.
function tiles() {
  const { figures: now, layers, in_place: inPlace, read } = state.status;
  const column = state.columns.at(-1);
  const mean = (key) => {
    const values = layers.map((layer) => layer[key]).filter(known);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const ratio = (name, share, unit) => [name, fixed(share), unit, share];
  const groups = [["at the last reading", [
    ["Running", number(now.running), known(now.max_requests) ? `of ${number(now.max_requests)} requests` : "requests"],
    ["Waiting", number(now.waiting), "requests"],
    ratio("Host pool", now.pool_fill, known(now.host_pool_pages) ? `of ${number(now.host_pool_pages)} pages` : ""),
    ...(inPlace ? [["Digests", bytes(now.digest_bytes), "of host memory"]] : [
      ["Frames in use", number(now.frames_in_use), known(now.resident_requests) ? `pages of ${number(now.resident_requests)} requests` : "pages"],
      ["Device tier", bytes(now.device_bytes), known(now.digest_bytes) ? `${bytes(now.digest_bytes)} digests` : ""]])]]];
  if (column && column.time === read) {
    const rates = column.rates;
    // As Rates.request_speed: while prompts are read, some running requests have no token yet.
    const shared = rates.generated_per_second && rates.running ? rates.generated_per_second / Math.max(rates.running, 1) : null;
    const perRequest = rates.generated_per_second && rates.prompt_per_second && rates.token_seconds ? 1 / rates.token_seconds : shared;
    groups.push([`mean of the last ${Math.round(rates.seconds)} s`, [
      ["Decode", rate(rates.generated_per_second), "tokens/s"], ["Each request", rate(perRequest), "tokens/s"],
      ["First token", optional(duration, rates.first_token_seconds), "TTFT"],
      ["Between tokens", optional(duration, rates.token_seconds), "TPOT"], ["Prompts", rate(rates.prompt_per_second), "tokens/s"],
      ratio("Prefix cache hits", rates.prefix_hit_ratio, "of prompt tokens"), ratio("Attended", mean("attended"), "of the contexts"),
      ...(inPlace ? [ratio("Attention", rates.attention_share, "of the time")] : [
        ratio("Resident", mean("residency"), "of selected pages"), ratio("On CPU", mean("cpu_ratio"), "of attended tokens"),
        ratio("Waits", rates.wait_share, "of the time"), ["Recalls", rate(rates.recalled_per_second), "pages/s"]])]]);
  }
  groups.push(["since the server's start", [["Generated", number(now.generated_tokens), "tokens"], ["Preempted", number(now.preemptions), "requests"]]]);
  return element("div", { id: "tiles" }, ...groups.map(([title, list]) => element("div", { class: "group" }, element("h3", {}, title),
    element("dl", {}, ...list.map(([name, value, unit, share]) => element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, value,
      element("span", { class: "bar", "aria-hidden": "true", hidden: known(share) ? null : "" }, element("i", { style: `width: ${100 * (share || 0)}%` })),
      element("small", {}, unit))))))));
}

// The columns of the table of layers: a title, a key, a format, and whether servers in place (true) or others (false) have it alone.
const LAYER_COLUMNS = [
  ["Layer", "layer", String], ["Attended", "attended", fixed], ["Resident", "residency", fixed, false], ["On CPU", "cpu_ratio", fixed, false],
  ["Attended tokens/s", "attended_tokens_per_second", number], ["Attention, ms per s", "attention_share", millis, true],
  ["Recalled pages/s", "recalled_per_second", rate, false], ["Waits, ms per s", "wait_share", millis, false],
  ["Query cosine", "query_cosine", (value) => number(value, 3), false], ["Mass recall", "mass_recall", (value) => number(value, 3)],
  ["Mass samples", "mass_samples", number],
];

function table({ layers, in_place: inPlace }) {
  const columns = LAYER_COLUMNS.filter(([, , , place]) => place === undefined || place === inPlace);
  const cell = (layer) => ([, key, text], index) => element(index ? "td" : "th", { scope: index ? null : "row" }, text(layer[key]));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers" }, element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map(([title]) => element("th", { scope: "col" }, title)))),
    element("tbody", {}, ...layers.map((layer) => element("tr", {}, ...columns.map(cell(layer)))))));
}

// --- plots ---

// The axis ends at the current time, so that a server that fell silent leaves a gap that grows.
function timeAxis() {
  const { columns, status } = state;
  const last = columns.length ? columns.at(-1).time : status.now;
  const end = Math.max(last, (status.read || last) + (staleSeconds() || 0));
  const first = columns.length ? columns[0].time - columns[0].seconds : end;
  const span = Math.min(Math.max(end - first, SHORTEST), status.kept * status.interval);
  return { start: end - span, span };
}

// The area of a plot with labels at its left and below: `rows` are pairs of a share of the height and a text.
function plot(area, rows, { span }) {
  const times = [0, 0.5, 1].map((share) => [share, share === 1 ? "now" : `−${age(span * (1 - share))}`]);
  const labels = (pairs, side) => element("div", { class: side, "aria-hidden": "true" },
    ...pairs.map(([share, text]) => element("span", { style: `${side}: ${100 * share}%` }, text)));
  return element("div", { class: "plot" }, labels(rows, "top"), area, labels(times, "left"));
}

const MAPS = {
  attended: { title: "Attended", word: "attended", empty: "Nothing was decoded.",
    note: "Share of the contexts' tokens that decode steps attended, per layer and interval; the rest was left out." },
  residency: { title: "Residency", word: "resident", empty: "No page was selected by a budget: contexts fit, or the method has no frames.",
    note: "Share of the selected pages that were in frames, per layer and interval." },
  cpu_ratio: { title: "CPU ratio", word: "on the CPU workers", empty: "Nothing was decoded.",
    note: "Share of the attended tokens that CPU workers attended, per layer and interval." },
};
const IN_PLACE = " The CPU attends them where they lie, in the host pool: there are no frames to fill, nothing is copied, and nobody waits for CPU workers.";

const layerCount = (key) => state.columns.reduce((most, column) => Math.max(most, column[key].length), 0);
const columnAt = (time) => state.columns.findIndex((column) => column.time >= time);

function heat(key) {
  const { columns, cursor } = state;
  const { title, note, word, empty } = MAPS[key];
  const [axis, layers] = [timeAxis(), layerCount(key)];
  const isMeasured = columns.some((column) => column[key].some(known));
  const label = isMeasured ? `${layers} layers over ${Math.round(axis.span)} seconds: share ${word}. The table below has each layer.` : empty;
  const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label, "data-key": key, width: MAP_WIDTH, height: Math.max(layers, 1) });
  const area = element("div", { class: "area" }, canvas);
  if (!isMeasured) area.append(element("p", {}, columns.length ? empty : "The first interval is being measured."));
  const column = cursor && cursor.key === key ? columns[columnAt(cursor.time)] : null;
  if (column) {
    const place = { left: (column.time - column.seconds - axis.start) / axis.span, width: column.seconds / axis.span, top: cursor.layer / layers, height: 1 / layers };
    area.append(element("i", { class: "cursor", style: Object.entries(place).map(([side, share]) => `${side}: ${100 * share}%`).join("; ") }));
  }
  const numbers = Array.from({ length: layers }, (_, layer) => layer).filter((layer) => layer % Math.ceil(layers / 15) === 0);
  const rows = numbers.map((layer) => [(layer + 0.5) / layers, String(layer)]);
  return section(key, title, note + (state.status.in_place ? IN_PLACE : ""), element("figure", { class: "heat" }, plot(area, rows, axis),
    element("div", { class: "scale", "aria-hidden": "true" }, "0\u00a0%", element("i", { class: "ramp" }), "100\u00a0%",
      element("span", {}, element("i"), "not\u00a0measured")),
    element("output", {}, column
      ? `Layer ${cursor.layer}, ${clock(column.time)}: ${percent(column[key][cursor.layer])} ${word}`
      : "Point at a cell, or focus the map and use the arrow keys.")));
}

// Paints the cells of a map, one row of pixels per layer: the high colour over the low one, as opaque as its share.
function paint(canvas) {
  const [pen, axis, style] = [canvas.getContext("2d"), timeAxis(), getComputedStyle(canvas)];
  const x = (time) => (MAP_WIDTH * (time - axis.start)) / axis.span;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  for (const colour of ["--low", "--high"]) {
    pen.fillStyle = style.getPropertyValue(colour);
    for (const column of state.columns) {
      const from = Math.round(x(column.time - column.seconds));
      column[canvas.dataset.key].forEach((share, layer) => {
        if (!known(share)) return;
        pen.globalAlpha = colour === "--low" ? 1 : share;
        pen.fillRect(from, layer, Math.round(x(column.time)) - from, 1);
      });
    }
  }
}

// The next round number: 1, 2, 4, 5 or 10 times a power of ten.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 10].find((step) => step * power >= value * 0.999);
}

// The drawn lines of a plot, broken where nothing was measured. The round end of a line makes a single point visible.
function paths(value, { start, span }, top, kind) {
  const runs = [];
  let end = null;
  for (const column of state.columns) {
    if (column.time < start || !known(value(column))) continue;
    if (end === null || column.time - column.seconds - end > 0.001) runs.push([]);
    runs.at(-1).push([(100 * (column.time - start)) / span, 100 - (100 * value(column)) / top].map((x) => x.toFixed(2)));
    end = column.time;
  }
  return runs.flatMap((run) => [
    element("path", { class: kind, d: `M${run.map((point) => point.join(" ")).join("L")}h0` }),
    element("path", { class: `${kind} fill`, d: `M${run.map((point) => point.join(" ")).join("L")}V100H${run[0][0]}Z` }),
  ]);
}

// A plot of one or two lines, each with its name and its value in a column.
function course(title, text, ...lines) {
  const axis = timeAxis();
  const highest = Math.max(...state.columns.flatMap((column) => lines.map(([, value]) => value(column) || 0)), 0);
  const top = ceiling(highest);
  const kinds = ["one", "two"];
  const keys = lines.map(([name, value]) => {
    const latest = state.columns.length ? value(state.columns.at(-1)) : null;
    return `${name}${known(latest) ? text(latest) : "–"}`;
  });
  const drawing = element("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: ${keys.join(", ")}; highest ${text(highest)}` },
    element("path", { class: "grid", d: "M0 0H100M0 50H100M0 100H100" }),
    ...lines.flatMap(([, value], index) => paths(value, axis, top, kinds[index])));
  return element("figure", {}, element("figcaption", {}, element("b", {}, title),
    ...keys.map((key, index) => element("span", { class: `key ${kinds[index]}` }, key))),
  plot(drawing, [0, 0.5, 1].map((share) => [share, text(top * (1 - share))]), axis));
}

function courses(isInPlace) {
  const of = (title, key, text = short) => course(title, text, ["", (column) => column.rates[key]]);
  return element("div", { id: "courses" },
    course("Requests", short, ["running ", (column) => column.running], ["waiting ", (column) => column.waiting]),
    of("Decoded tokens/s", "generated_per_second"), of("Prompt tokens/s", "prompt_per_second"),
    of("First token (TTFT)", "first_token_seconds", duration), of("Between tokens (TPOT)", "token_seconds", duration),
    of("Prefix cache hits", "prefix_hit_ratio", percent),
    ...(isInPlace ? [of("Attention, share of time", "attention_share", percent)] : [
      of("Waits, share of time", "wait_share", percent), of("Recalled pages/s", "recalled_per_second"),
      of("Copied bytes/s", "copied_bytes_per_second"), course("Frames in use", short, ["", (column) => column.frames_in_use])]),
    course("Host pool in use", percent, ["", (column) => column.pool_fill]));
}

// --- the whole page ---

function view() {
  const { status, columns, silence } = state;
  if (!status) return [element("p", { class: "problem", role: "alert" }, silence ? `This page's server does not answer: ${silence}` : "Waiting for the first reading…")];
  const engine = { vllm: "vLLM", sglang: "SGLang" }[status.engine] || "no engine yet";
  const problem = silence === null && status.headline.state !== "silent" ? status.problem : null;
  const ours = { level: "bad", title: `No answer for ${age(staleSeconds())}`,
    detail: `This page's own server does not answer (${silence}); everything below is as old as the last reading.` };
  const shown = silence === null ? status : { headline: ours, glance: [] };
  document.title = `${shown.headline.title} · hybrid status`;
  const seconds = columns.length ? Math.round(columns.at(-1).rates.seconds) : 15;
  const header = element("header", {}, element("h1", {}, "hybrid status"),
    element("p", {}, `${status.model || "model unknown"} on ${engine}, hybrid_backend ${status.version}`),
    element("p", { id: "fresh" }, status.read === null ? "" : `Read ${clock(status.read)} from ${status.source}`));
  const maps = status.in_place ? ["attended"] : ["attended", "residency", "cpu_ratio"];
  return [header, element("p", { id: "problem", class: "problem", role: "alert", hidden: problem ? null : "" }, problem || ""), element("main", {},
    headline(shown.headline), glance(shown.glance), change(shown.glance), section("numbers", "Numbers", "", tiles()),
    section("course", "Course", `Rates and durations are means of the ${seconds} s before each point; requests, host pool and frames are as read.`, courses(status.in_place)),
    ...maps.map(heat),
    section("layers", "Layers", `The last ${seconds} seconds; cosine and mass are means since start; – is not measured.`, table(status)))];
}

function draw() {
  const { status, columns } = state;
  update(page, element("div", { id: "page", class: status && staleSeconds() !== null ? "stale" : "", "data-columns": columns.length }, ...view()));
  page.querySelectorAll("canvas").forEach(paint);
}

// --- reading a map by pointing and by the keyboard ---

function moveCursor(cursor) {
  if (JSON.stringify(cursor) === JSON.stringify(state.cursor)) return;
  state.cursor = cursor;
  draw();
}

page.addEventListener("pointermove", ({ target, offsetX, offsetY }) => {
  const { key } = target.dataset;
  if (!key) { moveCursor(null); return; }
  const axis = timeAxis();
  const column = state.columns[columnAt(axis.start + (axis.span * offsetX) / target.clientWidth)];
  moveCursor(column ? { key, layer: Math.floor((layerCount(key) * offsetY) / target.clientHeight), time: column.time } : null);
});
page.addEventListener("keydown", (event) => {
  const { columns, cursor } = state;
  const { key } = event.target.dataset;
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!key || !move || !columns.length) return;
  event.preventDefault();
  const old = cursor && cursor.key === key ? cursor : null;
  const limit = (value, most) => Math.min(Math.max(value, 0), most);
  const index = old ? limit(columnAt(old.time) + move[1], columns.length - 1) : columns.length - 1;
  moveCursor({ key, layer: old ? limit(old.layer + move[0], layerCount(key) - 1) : 0, time: columns[index].time });
});

// --- polling ---

async function refresh() {
  try {
    const last = state.columns.length ? state.columns.at(-1).time : 0;
    const answer = await fetch(`status.json?after=${last}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`status.json: HTTP ${answer.status}`);
    const status = await answer.json();
    if (state.status && state.status.started !== status.started) { // another history: all of its columns are needed
      Object.assign(state, { columns: [], status: null });
      return refresh();
    }
    const columns = state.columns.concat(status.columns).slice(-status.kept);
    Object.assign(state, { status, columns, received: performance.now(), silence: null });
  } catch (error) {
    state.silence = error.message;
  }
  draw();
}

let timer = null; // null while a request is under way
async function poll() {
  window.clearTimeout(timer);
  timer = null;
  if (!document.hidden) await refresh();
  timer = window.setTimeout(poll, 1000 * Math.max(state.status ? state.status.interval : 2, 0.2));
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden && timer !== null) poll(); });
draw();
poll();
