"use strict";

// Polls status.json, keeps the columns that it returned, and draws them. No library, nothing from elsewhere.
(() => {
  const SHORTEST = 60; // seconds on the time axis, at least
  const LEFT = 42, RIGHT = 6, TOP = 4, BOTTOM = 20; // CSS pixels around a plot
  const WINDOW = 15; // seconds that a rate in a tile is the mean of, as in the table
  const $ = (id) => document.getElementById(id);
  const state = { status: null, columns: [], cursor: {} };

  // --- numbers as text ---

  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 0) =>
    known(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";
  const rate = (value) => number(value, known(value) && value !== 0 && Math.abs(value) < 10 ? 1 : 0);
  const percent = (value) => (known(value) ? `${number(100 * value, 1)} %` : "–");
  const millis = (share) => (known(share) ? number(1000 * share, share && share < 0.01 ? 2 : 0) : "–");
  const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
  const bytes = (value) => {
    if (!known(value)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let power = 0;
    while (value >= 1000 && power < units.length - 1) [value, power] = [value / 1000, power + 1];
    return `${number(value, power && value < 100 ? 1 : 0)} ${units[power]}`;
  };
  const mean = (values) => {
    const found = values.filter(known);
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
  };

  // Mean of a rate over the last WINDOW seconds: an engine's step may take longer than one interval.
  function recent(key) {
    const last = state.columns[state.columns.length - 1];
    const found = state.columns.filter((c) => known(c[key]) && last.time - c.time < WINDOW);
    const seconds = found.reduce((sum, c) => sum + c.seconds, 0);
    return seconds ? found.reduce((sum, c) => sum + c.seconds * c[key], 0) / seconds : null;
  }

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // --- the tiles ---

  function tiles(status, latest) {
    const of = (total) => (known(total) ? ` of ${number(total)}` : "");
    const pages = status.host_pool_pages;
    const used = latest && known(latest.pool_fill) && known(pages) ? Math.round(latest.pool_fill * pages) : null;
    const layers = (key) => percent(mean(status.layers.map((layer) => layer[key])));
    const moves = status.in_place ? [["Attention", millis(recent("attention_share")), " ms per s"]] : [
      ["Resident", layers("residency"), " mean of layers"],
      ["On CPU", layers("cpu_ratio"), " mean of layers"],
      ["Waits", millis(recent("wait_share")), " ms per s"],
      ["Recalls", rate(recent("recalled_per_second")), " pages/s"],
      ["Frames in use", number(latest?.frames_in_use), ` pages of ${number(latest?.resident_requests)} requests`],
    ];
    return [
      ["Running", number(latest?.running), " requests"],
      ["Waiting", number(latest?.waiting), " requests"],
      ["Decode", rate(recent("generated_per_second")), " tokens/s"],
      ["Host pool", percent(latest?.pool_fill), known(used) ? ` ${number(used)}${of(pages)} pages` : ""],
      ["Attended", layers("attended"), " of the contexts"],
      ...moves,
      status.in_place ? ["Digests", bytes(status.digest_bytes), ""]
        : ["Device tier", bytes(status.device_bytes), ` ${bytes(status.digest_bytes)} digests`],
      ["Preempted", number(status.preemptions), " since start"],
    ];
  }

  const LEVELS = { good: "Good.", fair: "Fair.", bad: "Bad." };

  function drawGlance(status) {
    $("glance").replaceChildren(
      ...status.glance.flatMap(({ question, text, level }) => {
        const said = LEVELS[level] ? [element("b", {}, LEVELS[level]), text] : [text];
        return [element("dt", {}, question), element("dd", { class: level }, ...said)];
      }),
    );
  }

  function drawTiles(status, latest) {
    const list = $("tiles");
    const entries = tiles(status, latest);
    if (list.children.length !== entries.length) {
      list.replaceChildren(...entries.map(() => element("div", {}, element("dt"), element("dd"))));
    }
    entries.forEach(([name, value, unit], index) => {
      const [dt, dd] = list.children[index].children;
      dt.textContent = name;
      dd.replaceChildren(value, element("small", {}, unit));
    });
  }

  // --- plots ---

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

  function ramp(low, high) {
    const [a, b] = [channels(colour(low)), channels(colour(high))];
    return (value) => `rgb(${a.map((from, i) => Math.round(from + value * (b[i] - from))).join(" ")})`;
  }

  function timeAxis() {
    const { columns, status } = state;
    const end = columns.length ? columns[columns.length - 1].time : status.now;
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

  function heat(figure, key, word, scaleOf, empty) {
    const canvas = element("canvas", { tabindex: "0", role: "img" });
    const output = element("output", {});
    const legend = element("div", { class: "scale", "aria-hidden": "true" },
      "0\u00a0%", element("i", { class: "ramp" }), "100\u00a0%",
      element("span", { class: "none" }, element("i"), "not\u00a0measured"));
    figure.replaceChildren(canvas, legend, output);

    const layerCount = () => state.columns.reduce((most, column) => Math.max(most, column[key].length), 0);
    const rowHeight = () => (canvas.clientHeight - TOP - BOTTOM) / Math.max(layerCount(), 1);

    function tell() {
      const cursor = state.cursor[key];
      const column = cursor && state.columns.find((c) => c.time >= cursor.time);
      output.textContent = column
        ? `Layer ${cursor.layer}, ${clock(column.time)}: ${percent(column[key][cursor.layer])} ${word}`
        : "Point at a cell, or focus the map and use the arrow keys.";
    }

    function draw() {
      if (!canvas.clientWidth) return; // not shown
      const axis = timeAxis();
      const place = surface(canvas, axis);
      const { pen, width, height, x } = place;
      const [layers, row, tint] = [layerCount(), rowHeight(), scaleOf()];
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
      const cursor = state.cursor[key];
      if (cursor) {
        const column = state.columns.find((c) => c.time >= cursor.time);
        if (column) {
          pen.strokeStyle = colour("--text");
          pen.lineWidth = 2;
          const from = x(column.time - column.seconds);
          pen.strokeRect(from, TOP + cursor.layer * row, x(column.time) - from, row);
        }
      }
      const latest = mean(state.status.layers.map((l) => l[key]));
      canvas.setAttribute("aria-label", measured
        ? `${layers} layers over ${Math.round(axis.end - axis.start)} seconds; latest mean ${percent(latest)} ${word}. The table below has each layer.`
        : empty);
      tell();
    }

    canvas.addEventListener("pointermove", (event) => {
      const axis = timeAxis();
      const inner = canvas.clientWidth - LEFT - RIGHT;
      const layer = Math.floor((event.offsetY - TOP) / rowHeight());
      const time = axis.start + ((event.offsetX - LEFT) / inner) * (axis.end - axis.start);
      state.cursor[key] = layer >= 0 && layer < layerCount() && event.offsetX >= LEFT ? { layer, time } : null;
      draw();
    });
    canvas.addEventListener("pointerleave", () => { state.cursor[key] = null; draw(); });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move || !state.columns.length) return;
      event.preventDefault();
      const last = state.columns.length - 1;
      const cursor = state.cursor[key];
      const found = cursor ? state.columns.findIndex((c) => c.time >= cursor.time) : last;
      const index = Math.min(Math.max((found < 0 ? last : found) + (cursor ? move[1] : 0), 0), last);
      const layer = Math.min(Math.max((cursor ? cursor.layer + move[0] : 0), 0), layerCount() - 1);
      state.cursor[key] = { layer, time: state.columns[index].time };
      draw();
    });
    return draw;
  }

  // Two lines at most: [key of the column, what it is, how it is written].
  function course(title, lines, where = "") {
    const canvas = element("canvas", { role: "img" });
    const keys = lines.map((_, i) => element("span", { class: `key ${i ? "two" : "one"}` }));
    $("courses").append(element("figure", { class: where }, element("figcaption", {}, element("b", {}, title), ...keys), canvas));
    return () => {
      if (!canvas.clientWidth) return; // not shown
      const axis = timeAxis();
      const place = surface(canvas, axis);
      const { pen, width, height, x } = place;
      const values = state.columns.flatMap((column) => lines.map(([key]) => column[key]).filter(known));
      const top = ceiling(Math.max(...values, 0));
      const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / top);
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
        pen.fillText(lines[0][2](part * top), LEFT - 5, Math.max(at, 8));
      }
      labelTime(place, axis);
      lines.forEach(([key, name, text], index) => {
        pen.strokeStyle = colour(index ? "--two" : "--one");
        pen.lineWidth = 2;
        pen.setLineDash(index ? [5, 3] : []);
        pen.beginPath();
        let end = null;
        for (const column of state.columns) {
          if (column.time < axis.start || !known(column[key])) { end = null; continue; }
          const joined = end !== null && column.time - column.seconds - end < state.status.interval;
          pen[joined ? "lineTo" : "moveTo"](x(column.time), y(column[key]));
          end = column.time;
        }
        pen.stroke();
        const latest = state.columns.length ? state.columns[state.columns.length - 1][key] : null;
        keys[index].textContent = `${name} ${known(latest) ? text(latest) : "–"}`;
      });
      pen.setLineDash([]);
      canvas.setAttribute("aria-label", `${title}: ${keys.map((k) => k.textContent).join(", ")}; highest ${lines[0][2](Math.max(...values, 0))}`);
    };
  }

  // The next round number: 1, 2, 4, 5 or 10 times a power of ten.
  function ceiling(value) {
    if (value <= 0) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 2, 4, 5, 10].find((step) => step * power >= value * 0.999);
  }

  const short = (value) =>
    value >= 1e9 ? `${+(value / 1e9).toFixed(1)}G` : value >= 1e6 ? `${+(value / 1e6).toFixed(1)}M`
      : value >= 1e4 ? `${+(value / 1e3).toFixed(1)}k` : `${+value.toFixed(value < 10 ? 1 : 0)}`;
  const ms = (share) => short(1000 * share);
  const asPercent = (share) => `${+(100 * share).toFixed(1)}%`;

  // --- the table ---

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
      texts.forEach((text, cell) => { body.rows[index].cells[cell + 1].textContent = text; });
    });
  }

  // --- polling ---

  const maps = [];
  const courses = [];

  function draw() {
    const { status, columns } = state;
    if (!status) return;
    const latest = columns[columns.length - 1];
    const engine = { vllm: "vLLM", sglang: "SGLang" }[status.engine] || "no engine yet";
    $("about").textContent = `${status.model || "model unknown"} on ${engine}, hybrid_backend ${status.version}`;
    $("fresh").textContent = latest ? `Read ${clock(latest.time)} from ${status.source}` : "The first interval is being measured…";
    document.body.classList.toggle("in-place", status.in_place);
    drawGlance(status);
    drawTiles(status, latest);
    maps.forEach((paint) => paint());
    courses.forEach((paint) => paint());
    drawTable(status.layers);
    document.body.dataset.columns = String(columns.length);
  }

  function complain(text) {
    $("problem").hidden = !text;
    if ($("problem").textContent !== (text || "")) $("problem").textContent = text || "";
  }

  function accept(status) {
    if (state.status && state.status.started !== status.started) {
      state.columns = [];
      state.status = null;
      return false; // another history: ask for all of it
    }
    state.columns = state.columns.concat(status.columns).slice(-status.kept);
    state.status = status;
    return true;
  }

  async function poll() {
    let pause = state.status ? state.status.interval : 2;
    if (!document.hidden) {
      const last = state.columns.length ? state.columns[state.columns.length - 1].time : 0;
      try {
        const answer = await fetch(`status.json?after=${last}`, { cache: "no-store" });
        if (!answer.ok) throw new Error(`status.json: HTTP ${answer.status}`);
        const status = await answer.json();
        if (accept(status)) {
          pause = status.interval;
          complain(status.problem);
          draw();
        } else {
          pause = 0;
        }
      } catch (error) {
        complain(`This page's server does not answer: ${error.message}`);
      }
    }
    window.setTimeout(poll, Math.max(1000 * pause, 200));
  }

  maps.push(heat($("attended"), "attended", "attended", () => ramp("--low-0", "--high-0"), "Nothing was decoded."));
  maps.push(heat($("residency"), "residency", "resident", () => ramp("--low-0", "--high-0"),
    "No page was selected by a budget: contexts fit, or the method has no frames."));
  maps.push(heat($("cpu"), "cpu_ratio", "on the CPU workers", () => ramp("--low-1", "--high-1"), "Nothing was decoded."));
  courses.push(course("Requests", [["running", "running", short], ["waiting", "waiting", short]]));
  courses.push(course("Decoded tokens/s", [["generated_per_second", "now", short]]));
  courses.push(course("Prompt tokens/s", [["prompt_per_second", "now", short]]));
  courses.push(course("Attention, ms per s", [["attention_share", "now", ms]], "placed"));
  courses.push(course("Waits, ms per s", [["wait_share", "now", ms]], "moved"));
  courses.push(course("Recalled pages/s", [["recalled_per_second", "now", short]], "moved"));
  courses.push(course("Copied bytes/s", [["copied_bytes_per_second", "now", short]], "moved"));
  courses.push(course("Host pool in use", [["pool_fill", "now", asPercent]]));
  courses.push(course("Frames in use", [["frames_in_use", "now", short]], "moved"));

  new ResizeObserver(draw).observe(document.body);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  poll();
})();
