"use strict";
// Asks for the cluster once a second and draws it. Rates are differences of counters between two answers.

const EVERY_MS = 1000;
const HISTORY_MS = 5000;
const MINUTE = 60000;
const RANGES = [["10 minutes", 10 * MINUTE, "hour"], ["1 hour", 60 * MINUTE, "hour"], ["1 day", 1440 * MINUTE, "day"]];
const RUNNING = 12;
const NAMESPACES = 12;
const SPAN_HEIGHT = 18;
let before = null;
let range = RANGES[0];

// Without the credentials that the page's own URL may have: fetch() takes none.
const at = (path) => `${location.origin}${location.pathname}${path}`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function size(value) {
  let at = 0;
  while (value >= 1000 && at < UNITS.length - 1) { value /= 1024; at += 1; }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[at]}`;
}
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const count = (value) => Math.round(value || 0).toLocaleString("en");

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text instanceof Node) made.append(text);
  else if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function bar(part, whole) {
  const made = element("progress");
  made.max = whole || 1;
  made.value = Math.min(part, made.max);
  return made;
}

function table(id, head, rows) {
  const line = (cells, name) => {
    const made = element("tr");
    for (const cell of cells) made.append(element(name, cell));
    return made;
  };
  document.getElementById(id).replaceChildren(line(head, "th"), ...rows.map((row) => line(row, "td")));
}

function rates(nodes, seconds) {
  const found = {};
  for (const node of nodes) {
    const old = before && before.nodes.find((each) => each.node === node.node && each.incarnation === node.incarnation);
    found[node.node] = (name) => (old ? Math.max(0, (node.stats[name] || 0) - (old.stats[name] || 0)) / seconds : 0);
  }
  return found;
}

// Of what runs, by tenant; the largest first.
function shares(deliveries) {
  const by = {};
  for (const each of deliveries) by[each.tenant] = (by[each.tenant] || 0) + each.rate_bytes_per_s;
  const all = Object.values(by).reduce((total, rate) => total + rate, 0);
  const sorted = Object.entries(by).filter(([, rate]) => rate).sort(([, one], [, other]) => other - one);
  return sorted.map(([tenant, rate]) => `${tenant || "no name"} ${percent(rate, all)}`).join(", ") || "–";
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The next of 1, 2, 5, 10, ... that is not less, in units that are `base` times larger each.
function rounded(value, base) {
  if (!(value > 0)) return 1;
  const unit = base ** Math.max(0, Math.floor(Math.log(value) / Math.log(base)));
  const power = 10 ** Math.floor(Math.log10(value / unit));
  return unit * power * [1, 2, 5, 10].find((step) => step * power * unit >= value * 0.999);
}

// Lines over time with axes; values that are null leave a gap. `show`: a value for people.
function chart(id, lines, times, { top, base = 10, show }) {
  const svg = document.getElementById(id);
  const [width, height, left, bottom] = [svg.clientWidth || 600, 130, 70, 18];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const end = times.length ? times[times.length - 1] : Date.now();
  const begin = end - range[1];
  const values = lines.flatMap(([, series]) => series.filter((value, at) => value !== null && times[at] >= begin));
  const most = top || rounded(Math.max(0, ...values), base);
  const x = (time) => left + ((width - left - 4) * (time - begin)) / range[1];
  const y = (value) => 6 + (height - bottom - 6) * (1 - value / most);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(drawn("line", { x1: left, x2: width - 4, y1: y(share * most), y2: y(share * most) }));
    parts.push(drawn("text", { x: left - 6, y: y(share * most) + 4, "text-anchor": "end" }, show(share * most)));
  }
  for (const share of width < 500 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const time = new Date(begin + share * range[1]).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    parts.push(drawn("text", { x: x(begin + share * range[1]), y: height - 4, "text-anchor": anchor }, time));
  }
  for (const [name, series] of lines) {
    let points = [];
    const close = () => { if (points.length) parts.push(drawn("polyline", { class: name, points: points.join(" ") })); points = []; };
    series.forEach((value, at) => {
      if (times[at] < begin) return;
      if (value === null) close();
      else points.push(`${x(times[at]).toFixed(1)},${y(value).toFixed(1)}`);
    });
    close();
  }
  svg.replaceChildren(...parts);
}

function showRanges() {
  document.getElementById("ranges").replaceChildren(...RANGES.map((each) => {
    const button = element("button", each[0]);
    button.setAttribute("aria-pressed", each === range);
    button.onclick = () => { range = each; showRanges(); showHistory(); };
    return button;
  }));
}

async function showHistory() {
  const answer = await fetch(at(`history.json?range=${range[2]}`));
  if (!answer.ok) return;
  const { times_ms: times, series } = await answer.json();
  chart("rate", [["delivered", series.delivered], ["stored", series.stored]], times, { base: 1024, show: (value) => `${size(value)}/s` });
  chart("hits", [["hits", series.hit_rate]], times, { top: 1, show: (value) => percent(value, 1) });
  chart("images", [["images", series.images]], times, { show: (value) => `${+value.toPrecision(2)}/s` });
}

async function showRequests() {
  const answer = await fetch(at("requests.json"));
  if (!answer.ok) return;
  const requests = await answer.json();
  table("requests", ["began", "request", "took"], requests.map(({ trace, name, start_ms, ms, ok }) => {
    const link = element("a", name.replace("GatewayService/", ""), ok ? "" : "warn");
    link.href = `#${trace}`;
    return [new Date(start_ms).toLocaleTimeString(), link, `${ms.toFixed(1)} ms`];
  }));
  if (!requests.length) {
    document.getElementById("requests").textContent =
      "none yet, or none are kept: QUIRE_TRACE_RECENT=2000 at each service keeps some (quire up --trace)";
  }
}

// Spans with their depths, parents before children.
function walked(spans) {
  const ids = new Set(spans.map((span) => span.span_id));
  const found = [];
  const walk = (parent, depth) => {
    for (const span of spans) {
      if (parent === null ? ids.has(span.parent_id) : span.parent_id !== parent) continue;
      found.push([depth, span]);
      walk(span.span_id, depth + 1);
    }
  };
  walk(null, 0);
  return found;
}

// The parts of a layer's time, as `quire trace` writes them.
function about({ name, service, attributes, ok }) {
  const spent = Object.entries(attributes).filter(([key, value]) => key.endsWith("_us") && value);
  const parts = spent.map(([key, value]) => `${key.slice("quire.".length, -"_us".length)} ${(value / 1000).toFixed(1)} ms`);
  const layer = attributes["quire.layer"];
  return [`${service}: ${name}`, layer === undefined ? "" : `layer ${layer}`, ...parts, ok ? "" : "failed"].filter(Boolean).join(", ");
}

// A bar for each span over the time of the whole request; a tick where an event was, as a layer that arrived.
function waterfall(spans) {
  const rows = walked(spans);
  const services = [...new Set(spans.map((span) => span.service))].sort();
  const start = Math.min(...spans.map((span) => span.start_ns));
  const whole = Math.max(1, Math.max(...spans.map((span) => span.end_ns)) - start);
  const width = document.getElementById("trace").clientWidth || 600;
  const left = Math.min(300, 0.45 * width);
  const right = width - 70;
  const x = (time) => left + ((right - left) * (time - start)) / whole;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${rows.length * SPAN_HEIGHT + 4}`, role: "img", "aria-label": "spans of the request" });
  rows.forEach(([depth, span], row) => {
    const y = row * SPAN_HEIGHT;
    const letters = Math.max(4, Math.floor((left - 10 * depth) / 6.4));
    const layer = span.attributes["quire.layer"];
    const name = span.name.replace(/^quire\.(v1\.)?/, "") + (layer === undefined ? "" : ` ${layer}`);
    svg.append(drawn("text", { x: 10 * depth, y: y + 13 }, name.length > letters ? `${name.slice(0, letters - 1)}…` : name));
    const bar = drawn("rect", {
      x: x(span.start_ns), y: y + 3, height: SPAN_HEIGHT - 6, width: Math.max(1, x(span.end_ns) - x(span.start_ns)),
      class: `service${services.indexOf(span.service)}${span.ok ? "" : " failed"}`,
    });
    bar.append(drawn("title", {}, about(span)));
    svg.append(bar);
    for (const time of span.events_ns) {
      svg.append(drawn("line", { class: "event", x1: x(time), x2: x(time), y1: y + 3, y2: y + SPAN_HEIGHT - 3 }));
    }
    svg.append(drawn("text", { x: width, y: y + 13, "text-anchor": "end" }, `${((span.end_ns - span.start_ns) / 1e6).toFixed(2)} ms`));
  });
  const legend = element("p");
  services.forEach((service, index) => {
    legend.append(element("span", "", `key service${index}`), `${service} `);
  });
  return [legend, svg];
}

// The request that the address names: a link to it can be passed on.
async function showTrace() {
  const place = document.getElementById("trace");
  const id = location.hash.slice(1);
  if (!/^[0-9a-f]{32}$/.test(id)) return place.replaceChildren();
  const answer = await fetch(at(`traces/${id}`));
  const told = answer.ok ? await answer.json() : await answer.text();
  if (location.hash.slice(1) !== id) return;  // another was opened meanwhile
  if (!answer.ok) return place.replaceChildren(element("p", told, "warn"));
  const { spans, cut, missing } = told;
  const said = missing.map((each) => element("p", `spans are missing: ${each}`, "warn"));
  if (cut) said.push(element("p", "it has more spans; quire trace shows all", "warn"));
  if (!spans.length) return place.replaceChildren(element("p", `the members keep no spans of ${id} any longer`), ...said);
  place.replaceChildren(element("h2", `Request ${id.slice(0, 8)}`), ...waterfall(spans), ...said);
}

// The same verdict as that of `quire health`, and what to do.
function drawHealth({ verdict, checks }) {
  const shown = document.getElementById("verdict");
  shown.textContent = { OK: "healthy", WARN: "degraded", ERR: "does not serve" }[verdict];
  shown.className = verdict;
  document.getElementById("checks").replaceChildren(...checks.map((check) => {
    const line = element("li");
    const node = check.node ? `${check.node}: ` : "";
    line.append(element("code", check.code), `${node}${check.problem}; ${check.advice}`);
    return line;
  }));
}

function drawFigures(figures) {
  document.getElementById("figures").replaceChildren(...figures.map(([name, value]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value));
    return tile;
  }));
}

function draw(cluster, seconds) {
  const { nodes, namespaces } = cluster;
  drawHealth(cluster.health);
  const rate = rates(nodes, seconds);
  const of = (role) => nodes.filter((node) => node.role === role);
  const sum = (list, name) => list.reduce((total, node) => total + (node.stats[name] || 0), 0);
  const storage = of("storage");
  const used = storage.reduce((total, node) => total + node.used_bytes, 0);
  const all = storage.reduce((total, node) => total + node.capacity_bytes, 0);
  document.getElementById("whole").textContent =
    `version ${cluster.version}, ${nodes.filter((node) => !node.is_away).length} members, ${count(sum(storage, "chunks"))} chunks, ${size(used)} of ${size(all)}, ` +
    `${count(sum(storage, "deliveries"))} deliveries and ${count(sum(storage, "ingests"))} stores run`;
  const delivered = storage.reduce((total, node) => total + rate[node.node]("delivered bytes"), 0);
  const asked = Object.values(namespaces).reduce((all, { hit, miss }) => ({ hit: all.hit + hit, miss: all.miss + miss }), { hit: 0, miss: 0 });
  drawFigures([
    ["hit rate, at this gateway", percent(asked.hit, asked.hit + asked.miss)],
    ["delivered", `${size(delivered)}/s`],
    ["storage filled", percent(used, all)],
    ["images a second", of("decoder").reduce((total, node) => total + rate[node.node]("requests"), 0).toFixed(1)],
  ]);
  table("storage", ["node", "filled", "", "chunks", "runs", "out", "in", ""], storage.map((node) => [
    node.node, bar(node.used_bytes, node.capacity_bytes), percent(node.used_bytes, node.capacity_bytes),
    count(node.stats.chunks), count(node.stats.deliveries), `${size(rate[node.node]("delivered bytes"))}/s`,
    `${size(rate[node.node]("ingested bytes"))}/s`,
    element("span", [
      node.is_away ? "away" : "",
      node.state === "active" ? "" : node.state,
      node.stats.corrupt ? `${count(node.stats.corrupt)} corrupt` : "",
      node.stats.alone ? `${count(node.stats.alone)} without a second copy` : "",
      node.stats["rate.fallback"] ? "no scheduler" : "",
    ].filter(Boolean).join(", "), "warn"),
  ]));
  const running = storage.flatMap((node) => node.running.map((each) => ({ ...each, node: node.node, link: node.link })));
  running.sort((one, other) => other.running_ms - one.running_ms);
  table("running", ["delivery", "node", "layers", "", "a layer", "granted", "for"], running.slice(0, RUNNING).map((each) => [
    each.delivery, each.node, bar(each.layers_sent, each.layers), `${each.layers_sent} of ${each.layers}`,
    size(each.bytes_per_layer), each.rate_bytes_per_s ? `${size(each.rate_bytes_per_s)}/s` : "–",
    `${(each.running_ms / 1000).toFixed(1)} s`,
  ]));
  if (!running.length) document.getElementById("running").textContent = "none that takes longer than a tenth of a second";
  const tiers = ["memory", "disk", "object"].map((tier) => [tier, sum(storage, `hits ${tier}`)]);
  const hits = tiers.reduce((total, [, value]) => total + value, 0);
  table("tiers", ["tier", "", "chunks", ""], tiers.map(([tier, value]) => [tier, bar(value, hits), count(value), percent(value, hits)]));
  const leader = of("scheduler").find((node) => node.stats.leads);
  const links = Object.keys((leader || { stats: {} }).stats).filter((name) => /^link\..*\.budget$/.test(name));
  table("links", ["link", "", "granted", "budget", "who has it"], links.sort().map((name) => {
    const link = name.slice(5, -7);
    const granted = leader.stats[`link.${link}.granted`] || 0;
    return [link, bar(granted, leader.stats[name]), `${size(granted)}/s`, `${size(leader.stats[name])}/s`,
      shares(running.filter((each) => each.link === link))];
  }));
  const busiest = Object.entries(namespaces).sort(([, one], [, other]) => other.hit + other.miss - one.hit - one.miss);
  table("namespaces", ["model", "version", "tenant", "", "hit", "chunks asked for"], busiest.slice(0, NAMESPACES).map(
    ([tag, { model, version, adapter, tenant, hit, miss }]) => [
      [model || tag, adapter].filter(Boolean).join(" + "), version || "–", tenant || "–",
      bar(hit, hit + miss), percent(hit, hit + miss), count(hit + miss),
    ]));
  table("others", ["node", "role", "transfers", "sessions", "cache", "images/s"], [...of("gateway"), ...of("decoder")].map((node) => [
    node.node, node.role, node.role === "gateway" ? count(node.stats.transfers) : "",
    node.role === "gateway" ? count(node.stats.sessions) : "",
    node.role === "decoder" ? bar(node.used_bytes, node.capacity_bytes) : "",
    node.role === "decoder" ? rate[node.node]("requests").toFixed(1) : "",
  ]));
}

async function look() {
  try {
    const answer = await fetch(at("cluster.json"));
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
    const cluster = await answer.json();
    const now = performance.now();
    draw(cluster, before ? Math.max(0.1, (now - before.at) / 1000) : 1);
    before = { nodes: cluster.nodes, at: now };
  } catch (error) {
    drawHealth({ verdict: "ERR", checks: [] });
    document.getElementById("whole").replaceChildren(element("span", `the gateway does not answer: ${error.message}`, "warn"));
  }
  setTimeout(look, EVERY_MS);
}

async function showGallery() {
  const answer = await fetch(at("images.json"));
  const images = answer.ok ? await answer.json() : [];
  document.getElementById("gallery").replaceChildren(...images.map(({ id, record_bytes }) => {
    const figure = element("figure");
    const picture = element("img");
    picture.loading = "lazy";
    picture.alt = id;
    picture.src = at(`images/${id.split("/").map(encodeURIComponent).join("/")}`);
    figure.append(picture, element("figcaption", `${id}, latent of ${size(record_bytes)}`));
    return figure;
  }));
  if (!images.length) document.getElementById("gallery").textContent = "none of the tenant without a name";
}

look();
showGallery();
showRanges();
const quietly = (work) => work.catch(() => {});  // look() says that the gateway does not answer
quietly(showHistory());
quietly(showRequests());
quietly(showTrace());
addEventListener("hashchange", () => quietly(showTrace().then(() => document.getElementById("trace").scrollIntoView())));
setInterval(() => quietly(Promise.all([showHistory(), showRequests()])), HISTORY_MS);
