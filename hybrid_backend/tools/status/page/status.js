// Polls status.json and shows it. What the numbers mean is decided by the server; this page draws. No library, nothing
// from elsewhere.
import { course, element, heat, known, percent, short } from "./status-plots.js";

const $ = (id) => document.getElementById(id);
const state = { status: null, columns: [], received: 0, silence: null };

const number = (value, digits = 0) =>
  known(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";
const rate = (value) => number(value, known(value) && value !== 0 && Math.abs(value) < 10 ? 1 : 0);
const millis = (share) => (known(share) ? number(1000 * share, share && share < 0.01 ? 2 : 0) : "–");
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const age = (seconds) =>
  seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
const sign = () => element("span", { class: "mark", "aria-hidden": "true" });

// Changes a text only when it differs, so that what is selected or read aloud stays.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// --- what is said first ---

// Seconds since the last reading if it is old: by the server's word, or because this page's server is silent itself.
function staleSeconds() {
  const { status, silence, received } = state;
  if (!status) return null;
  if (silence === null) return status.stale_seconds;
  return (status.read === null ? 0 : status.now - status.read) + (performance.now() - received) / 1000;
}

function drawHeadline(status) {
  const old = staleSeconds();
  const headline = state.silence === null ? status.headline : {
    level: "bad", title: `No answer for ${age(old)}`,
    detail: `This page's own server does not answer (${state.silence}); everything below is as old as the last reading.`,
  };
  $("headline").className = `wide ${headline.level}`;
  write($("title"), headline.title);
  write($("detail"), headline.detail);
  document.title = `${headline.title} · hybrid status`;
  document.body.classList.toggle("stale", old !== null);
  for (const tag of document.querySelectorAll(".age")) {
    write(tag, old === null || status.read === null ? "" : `${age(old)} old, of ${clock(status.read)}`);
  }
}

function drawGlance(status) {
  const cards = state.silence === null ? status.glance : [];
  if ($("glance").children.length !== cards.length) {
    $("glance").replaceChildren(...cards.map(() => element("article", {},
      element("h3"), element("p", { class: "verdict" }, sign(), element("span")), element("p"))));
  }
  $("glance").hidden = !cards.length;
  cards.forEach(({ question, verdict, text, level }, index) => {
    const card = $("glance").children[index];
    card.className = `answer ${level}`;
    write(card.children[0], question);
    write(card.children[1].lastChild, verdict);
    if (card.dataset.text !== text) card.children[2].replaceChildren(...withCode(text));
    card.dataset.text = text;
  });
}

// Keys with values, flags and commands stand out.
function withCode(text) {
  const commands = /[a-z_]+(?:\.[a-z_]+)*=[^\s,;)]+|--[a-z-]+ \d+|--[a-z-]+|hybrid (?:plan|profile|top|bench)(?: (?:--[a-z-]+|[A-Z]+|[\w.]+=\w+|throughput))*/g;
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(commands)) {
    pieces.push(text.slice(end, match.index), element("code", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...pieces, text.slice(end)];
}

function drawChange(status) {
  const changes = state.silence === null ? status.changes : [];
  const key = JSON.stringify(changes);
  if ($("change").dataset.key === key) return; // so that opened details stay open
  $("change").dataset.key = key;
  $("change").hidden = !changes.length;
  if (!changes.length) return;
  const [first, ...later] = changes;
  $("change-text").replaceChildren(element("b", {}, `${first.problem}: `), ...withCode(first.change));
  const others = [
    ...first.others.map((way) => element("li", {}, ...withCode(way))),
    ...later.map((next) => element("li", {}, element("b", {}, `${next.problem}, after that: `), ...withCode(next.change))),
  ];
  $("change-more").hidden = !others.length;
  $("change-more").querySelector("ul").replaceChildren(...others);
  write($("change-more").querySelector("summary"), `Other ways (${others.length})`);
}

// --- the numbers ---

function drawTiles(groups) {
  const list = $("tiles");
  const shape = groups.map((group) => group.tiles.length).join();
  if (list.dataset.shape !== shape) {
    list.dataset.shape = shape;
    list.replaceChildren(...groups.map((group) => element("div", { class: "group" }, element("h3"), element("dl", {},
      ...group.tiles.map(() => element("div", { class: "tile" }, element("dt"),
        element("dd", {}, element("span"), element("span", { class: "bar", "aria-hidden": "true" }, element("i")), element("small"))))))));
  }
  groups.forEach((group, index) => {
    const [title, tiles] = list.children[index].children;
    write(title, group.window);
    group.tiles.forEach(({ name, value, unit, share }, at) => {
      const [dt, dd] = tiles.children[at].children;
      const [text, bar, small] = dd.children;
      write(dt, name);
      write(text, value);
      write(small, unit);
      bar.hidden = !known(share);
      bar.firstChild.style.width = `${100 * Math.min(share || 0, 1)}%`;
    });
  });
}

function drawTable(layers) {
  const body = $("layers").tBodies[0];
  const heads = Array.from($("layers").tHead.rows[0].cells);
  if (body.rows.length !== layers.length) {
    body.replaceChildren(...layers.map((entry) => {
      const cells = heads.slice(1).map((head) => element("td", { class: head.className }));
      return element("tr", {}, element("th", { scope: "row" }, String(entry.layer)), ...cells);
    }));
  }
  layers.forEach((entry, index) => {
    const texts = [
      percent(entry.attended), percent(entry.residency), percent(entry.cpu_ratio),
      number(entry.attended_tokens_per_second), millis(entry.attention_share), rate(entry.recalled_per_second),
      millis(entry.wait_share), millis(entry.lead_share),
      number(entry.query_cosine, 3), number(entry.mass_recall, 3),
    ];
    texts.forEach((text, cell) => write(body.rows[index].cells[cell + 1], text));
  });
}

const asPercent = (share) => `${+(100 * share).toFixed(1)} %`;
const asSeconds = (seconds) => (seconds < 1 ? `${short(1000 * seconds)} ms` : `${+seconds.toFixed(1)} s`);
const single = (key, text) => [{ name: "", value: (column) => column.rates[key], text }];
const plots = [
  heat(state, $("attended"), "attended", "attended", ["--low-0", "--high-0"], "Nothing was decoded."),
  heat(state, $("residency"), "residency", "resident", ["--low-0", "--high-0"],
    "No page was selected by a budget: contexts fit, or the method has no frames."),
  heat(state, $("cpu"), "cpu_ratio", "on the CPU workers", ["--low-1", "--high-1"], "Nothing was decoded."),
  ...[
    ["Requests", [
      { name: "running ", value: (column) => column.running, text: short },
      { name: "waiting ", value: (column) => column.waiting, text: short },
    ]],
    ["Decoded tokens/s", single("generated_per_second", short)],
    ["Prompt tokens/s", single("prompt_per_second", short)],
    ["First token (TTFT)", single("first_token_seconds", asSeconds)],
    ["Between tokens (TPOT)", single("token_seconds", asSeconds)],
    ["Prefix cache hits", single("prefix_hit_ratio", asPercent)],
    ["Attention, share of time", single("attention_share", asPercent), "placed"],
    ["Waits, share of time", single("wait_share", asPercent), "moved"],
    ["Recalled pages/s", single("recalled_per_second", short), "moved"],
    ["Copied bytes/s", single("copied_bytes_per_second", short), "moved"],
    ["Host pool in use", [{ name: "", value: (column) => column.pool_fill, text: asPercent }]],
    ["Frames in use", [{ name: "", value: (column) => column.frames_in_use, text: short }], "moved"],
  ].map(([title, lines, where]) => course(state, $("courses"), title, lines, where)),
];

// --- polling ---

function draw() {
  const { status, columns } = state;
  if (!status) return;
  const engine = { vllm: "vLLM", sglang: "SGLang" }[status.engine] || "no engine yet";
  write($("about"), `${status.model || "model unknown"} on ${engine}, hybrid_backend ${status.version}`);
  write($("fresh"), status.read === null ? "" : `Read ${clock(status.read)} from ${status.source}`);
  document.body.classList.toggle("in-place", status.in_place);
  drawHeadline(status);
  drawGlance(status);
  drawChange(status);
  drawTiles(status.tiles);
  if (columns.length) write($("window"), String(Math.round(columns[columns.length - 1].rates.seconds)));
  for (const plot of plots) plot(staleSeconds());
  drawTable(status.layers);
  document.body.dataset.columns = String(columns.length);
}

function complain(text) {
  $("problem").hidden = !text;
  write($("problem"), text || "");
}

function accept(status) {
  if (state.status && state.status.started !== status.started) {
    state.columns = [];
    state.status = null;
    return false; // another history: ask for all of it
  }
  state.columns = state.columns.concat(status.columns).slice(-status.kept);
  Object.assign(state, { status, received: performance.now(), silence: null });
  return true;
}

async function refresh() {
  const last = state.columns.length ? state.columns[state.columns.length - 1].time : 0;
  try {
    const answer = await fetch(`status.json?after=${last}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`status.json: HTTP ${answer.status}`);
    if (!accept(await answer.json())) return refresh();
    complain(state.status.headline.state === "silent" ? null : state.status.problem);
  } catch (error) {
    state.silence = error.message;
    complain(state.status ? null : `This page's server does not answer: ${error.message}`);
  }
  draw();
}

let timer = null; // null while a question is under way
async function poll() {
  window.clearTimeout(timer);
  timer = null;
  if (!document.hidden) await refresh();
  timer = window.setTimeout(poll, 1000 * Math.max(state.status ? state.status.interval : 2, 0.2));
}

new ResizeObserver(draw).observe(document.body);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden && timer !== null) poll(); });
poll();
