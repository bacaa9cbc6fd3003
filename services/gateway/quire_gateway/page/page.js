"use strict";
// Asks for the cluster once a second and draws it. Rates are differences of counters between two answers.

const EVERY_MS = 1000;
const HISTORY = 120;
const RUNNING = 12;
let before = null;
const history = [];

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

function drawRate(value) {
  history.push(value);
  if (history.length > HISTORY) history.shift();
  const most = Math.max(1, ...history);
  const points = history.map((each, at) => `${(600 * at) / (HISTORY - 1)},${88 - (84 * each) / most}`).join(" ");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points);
  document.getElementById("rate").replaceChildren(line);
  document.getElementById("now").textContent = `${size(value)}/s now, ${size(Math.max(...history))}/s at most`;
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
  drawRate(delivered);
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
  table("namespaces", ["namespace", "", "hit", "chunks asked for"], Object.entries(namespaces).map(([tag, { hit, miss }]) => [
    tag, bar(hit, hit + miss), percent(hit, hit + miss), count(hit + miss),
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
