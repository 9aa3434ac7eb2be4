// Draws the page from the JSON block: texts of records are only ever set as text, and every position was computed before.
"use strict";
(async () => {
const page = await unpacked(document.getElementById("data").textContent);
const HEIGHTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const ROWS_SHOWN = 200;
const READABLE = 84, VISIBLE = 34, LARGE = 45000; // pixels: widths of a layer whose name, and whose colour can be seen; the area of a module that is open anyway
const state = { run: 0, layer: -1, metric: "", refresh: [] };
for (const run of page.runs) for (const key of ["cards", "steps", "layers", "tables", "notes"]) run[key] ??= [];

function unpacked(text) { // base64 of deflated JSON
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

// --- elements

function make(name, space, attributes, children) {
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(2)) if (child !== null && child !== undefined && child !== "") made.append(child);
  return made;
}
const el = (name, attributes, ...children) => make(name, false, attributes, children);
const svg = (name, attributes, ...children) => make(name, true, attributes, children);
const say = text => { document.getElementById("said").textContent = text; };
const onKeys = action => event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); action(event); } };

// --- numbers

const short = value => value === undefined || value === null ? "" : typeof value !== "number" ? value :
  Number.isInteger(value) && Math.abs(value) < 1e6 ? value.toLocaleString("en") :
  Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
function quantity(value, units) {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power++; }
  return `${+value.toPrecision(3)} ${units[power]}`.trim();
}
const bytes = value => quantity(value, ["B", "kB", "MB", "GB"]);
const count = value => quantity(value, ["", "k", "M", "G", "T"]);
const ms = value => value >= 0.1 || !value ? `${+value.toPrecision(3)} ms` : `${+(1000 * value).toPrecision(3)} µs`;
const many = count => count === 1 ? "1 row" : `${count} rows`;
const db = value => value >= 900 ? "exact" : `${value.toFixed(1)} dB`;
const percent = value => `${+(100 * value).toPrecision(3)} %`;
const sum = values => values.reduce((total, value) => total + value, 0);

// --- metrics: what colours the graph; `level` is 0 (unremarkable) to 6 (worst), of a layer or of a folded module

const byShare = (value, total) => total ? [0.001, 0.005, 0.02, 0.05, 0.1, 0.25].filter(edge => value / total >= edge).length : 0;
const shares = ["< 0.1 %", "0.1 %", "0.5 %", "2 %", "5 %", "10 %", "≥ 25 %"];
const added = { fold: sum, level: byShare, legend: shares, note: "share of the whole model" };
const METRICS = {
  error: { label: "Error", of: layer => layer.sqnr_db, text: db, fold: values => Math.min(...values),
    level: value => [35, 30, 25, 20, 15, 10].filter(edge => value < edge).length,
    legend: ["≥ 35 dB", "30", "25", "20", "15", "10", "< 10 dB"], note: "SQNR of the output; of a module, its worst" },
  kept: { label: "What stays", of: layer => layer.kept, text: percent, fold: values => sum(values) / values.length,
    level: value => [0.95, 0.8, 0.65, 0.5, 0.35, 0.2].filter(edge => value < edge).length,
    legend: ["≥ 95 %", "95", "80", "65", "50", "35", "< 20 %"], note: "share of the weight that pruning left; of a module, the mean of its layers" },
  time: { label: "Time", of: layer => layer.ms, text: ms, ...added },
  bits: { label: "Bits", of: layer => layer.bits ?? (layer.arithmetic === "float" ? 32 : undefined), text: value => `${+value.toFixed(1)} bits`,
    fold: values => sum(values) / values.length, level: value => value >= 16 ? 6 : value > 8 ? 4 : value > 6 ? 3 : value > 4 ? 2 : value > 3 ? 1 : 0,
    legend: ["≤ 3", "4", "5–6", "7–8", "> 8", "", "float"], note: "of the weight, else of the activation; of a module, the mean" },
  bytes: { label: "Bytes", of: layer => layer.bytes, text: bytes, ...added },
  integers: { label: "Integer or float", of: layer => layer.arithmetic, text: value => value, note: "of a module: the share in integers",
    fold: values => values.filter(value => value === "integer" || value === "weight-only").length / values.length },
};
const available = run => Object.keys(METRICS).filter(key => run.layers.some(layer => METRICS[key].of(layer) !== undefined));
function look(run, key, layers) {
  const metric = METRICS[key], values = layers.map(metric.of).filter(value => value !== undefined);
  if (!values.length) return { kind: "none", text: "", level: -1 };
  if (key === "integers") {
    const one = layers.length === 1, share = metric.fold(values);
    const kind = one ? values[0] : share === 1 ? "integer" : share === 0 ? "float" : "weight-only";
    return { kind, text: one ? values[0] : share === 1 ? "integer" : `${percent(share)} integer`, level: -1 };
  }
  const value = values.length === 1 ? values[0] : metric.fold(values);
  run.totals ??= {};
  const total = run.totals[key] ??= sum(run.layers.map(metric.of).filter(item => item !== undefined));
  const level = metric.level(value, total);
  return { kind: `l${level}`, text: metric.text(value), level };
}

// --- tables: `cells` returns texts or numbers; `show` how a number is written

function table({ title, columns, rows, onRow, note, rowOf, isInside }) {
  const kept = { sort: -1, down: false, text: "", all: false, shown: rows };
  const body = el("tbody"), counted = el("span", { class: "soft" }), more = el("button", { class: "more", onclick: () => { kept.all = true; fill(); } });
  const heads = columns.map((column, place) => el("th", { scope: "col", class: column.number ? "number" : undefined },
    el("button", { onclick: () => { kept.down = kept.sort === place ? !kept.down : !!column.number; kept.sort = place; fill(); } }, column.name)));
  const written = (column, value) => value === undefined || value === null ? "" : column.show && typeof value === "number" ? column.show(value) : short(value);
  const order = (one, two) => (one === undefined || one === null) - (two === undefined || two === null) ||
    (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true }));
  function fill() {
    const wanted = kept.text.toLowerCase();
    kept.shown = rows.filter(row => !wanted || row.some((value, place) => String(value ?? "").toLowerCase().includes(wanted) || written(columns[place], value).toLowerCase().includes(wanted)));
    if (kept.sort >= 0) {
      const missing = row => row[kept.sort] === undefined || row[kept.sort] === null;
      kept.shown = [...kept.shown].sort((one, two) => missing(one) - missing(two) || (kept.down ? -1 : 1) * order(one[kept.sort], two[kept.sort]));
    }
    heads.forEach((head, place) => head.setAttribute("aria-sort", place !== kept.sort ? "none" : kept.down ? "descending" : "ascending"));
    const visible = kept.all ? kept.shown : kept.shown.slice(0, ROWS_SHOWN);
    body.replaceChildren(...visible.map(row => {
      const cells = columns.map((column, place) => el("td", { class: [column.number && "number", String(row[place] ?? "").length > 40 && "long", column.mark && column.mark(row) && "differs"].filter(Boolean).join(" ") || undefined }, written(column, row[place])));
      const act = onRow && (() => onRow(row));
      const made = el("tr", act ? { tabindex: 0, onclick: act, onkeydown: onKeys(act) } : {}, cells);
      if (rowOf && rowOf(row)) made.classList.add("chosen");
      return made;
    }));
    more.hidden = visible.length === kept.shown.length;
    more.textContent = `Show all ${kept.shown.length} rows`;
    counted.textContent = kept.shown.length === rows.length ? many(rows.length) : `${kept.shown.length} of ${rows.length} rows`;
  }
  const quoted = value => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  const csv = () => [columns.map(column => column.name), ...kept.shown.map(row => row.map(value => value === undefined || value === null ? "" : String(value)))]
    .map(row => row.map(quoted).join(",")).join("\n") + "\n";
  const copied = async event => { await copy(csv()); say(`${kept.shown.length} rows copied`); const button = event.target; button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy CSV"; }, 1500); };
  fill();
  return el("div", {}, el("div", { class: "bar" }, isInside ? null : el("h2", {}, title), counted, el("span", { class: "grow" }),
    rows.length > 5 ? el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${title}`, oninput: event => { kept.text = event.target.value; fill(); } }) : null,
    el("button", { onclick: copied }, "Copy CSV")), note ? el("p", { class: "soft" }, note) : null,
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), more);
}
async function copy(text) {
  try { await navigator.clipboard.writeText(text); } catch {
    const area = el("textarea", {}); area.value = text; document.body.append(area); area.select();
    document.execCommand("copy"); area.remove();
  }
}

// --- the top: a card per number

function heads() {
  return el("section", { "aria-label": "Summary" }, page.runs.map(run => el("div", { class: "run" },
    el("div", { class: "run-head" }, page.runs.length > 1 ? el("h2", {}, run.name) : null, el("span", { class: "soft" }, run.kind),
      run.met === undefined ? null : el("span", { class: `badge ${run.met ? "good" : "bad"}` }, run.met ? "✓ goal met" : "✗ goal not met")),
    run.goal ? el("p", {}, el("strong", {}, "Goal: "), run.goal) : null, run.reason ? el("p", {}, run.reason) : null,
    el("dl", { class: "cards" }, run.cards.map(card => {
      const bar = el("i", { class: card.before && card.share > 1 && "over" }); if (card.share !== undefined) bar.style.width = `${Math.min(100, 100 * card.share)}%`;
      const mark = card.is_good === undefined ? null : el("span", { class: card.is_good ? "good" : "bad" }, card.is_good ? " ✓" : " ✗");
      return el("div", { class: "card" }, el("dt", {}, card.label), el("dd", {}, el("div", { class: "value" }, card.value, mark),
        card.share === undefined ? null : el("div", { class: "share", "aria-hidden": "true" }, bar),
        card.before ? el("div", { class: "soft" }, `${card.before} before`) : null,
        card.share === undefined ? null : el("div", { class: "soft" }, card.before ? `now ${percent(card.share)} of it` : percent(card.share)),
        card.note ? el("div", { class: "soft" }, card.note) : null));
    })),
    run.reproduce ? el("div", { class: "reproduce" }, el("h4", {}, "To make it again without a search"), el("pre", { tabindex: 0 }, run.reproduce)) : null)));
}

// --- several runs: layers by name, the largest differences first

function comparison() {
  if (page.runs.length < 2) return null;
  const names = [...new Set(page.runs.flatMap(run => run.layers.map(layer => layer.name)))];
  const known = page.runs.map(run => new Map(run.layers.map(layer => [layer.name, layer])));
  const keys = Object.keys(METRICS).filter(key => page.runs.filter(run => available(run).includes(key)).length > 1);
  const parts = [], cards = [...new Set(page.runs.flatMap(run => run.cards.map(card => card.label)))];
  parts.push(table({ title: "Side by side", columns: [{ name: "what" }, ...page.runs.map(run => ({ name: run.name, number: true }))],
    rows: cards.map(label => [label, ...page.runs.map(run => run.cards.find(card => card.label === label)?.value)]) }));
  const holder = el("div", {}), buttons = el("div", { class: "switch", role: "group", "aria-label": "Compare by" });
  const choose = key => {
    [...buttons.children].forEach(button => button.setAttribute("aria-pressed", String(button.dataset.key === key)));
    const of = METRICS[key].of, plain = key === "integers";
    const rows = names.map(name => {
      const values = known.map(layers => layers.has(name) ? of(layers.get(name)) : undefined), numbers = values.filter(value => typeof value === "number");
      const far = plain ? new Set(values.filter(value => value !== undefined)).size - 1 : numbers.length > 1 ? +(Math.max(...numbers) - Math.min(...numbers)).toPrecision(4) : undefined;
      return [name, ...values, far];
    }).filter(row => row.slice(1, -1).some(value => value !== undefined)).sort((one, two) => (two.at(-1) ?? -1) - (one.at(-1) ?? -1));
    const last = plain ? { name: "differs", number: true } : { name: "difference", number: true, show: METRICS[key].text };
    holder.replaceChildren(table({ title: "Layers, differences first", rows, onRow: row => choose_by_name(row[0]),
      columns: [{ name: "layer" }, ...page.runs.map(run => ({ name: run.name, number: true, show: METRICS[key].text, mark: row => row.at(-1) > 0 })), last] }));
  };
  keys.forEach(key => buttons.append(el("button", { "data-key": key, onclick: () => choose(key) }, METRICS[key].label)));
  if (keys.length) { choose(keys[0]); parts.push(el("div", { class: "bar more" }, buttons), holder); }
  return el("section", { id: "comparison" }, parts);
}

// --- the ladder and its plot

function ladder(run) {
  if (!run.steps.length) return null;
  const detail = el("div", { class: "step", id: "step", "aria-live": "polite" }), cost = run.cost_name || "bytes";
  const names = { latency: "time", bytes: "bytes", macs: "multiplications", bits: "bits of a weight" };
  const show = step => {
    detail.replaceChildren(...[el("h3", {}, step.name), el("p", {}, step.why), step.fault ? el("p", { class: "bad" }, step.fault) : null,
      step.parity ? el("p", { class: "soft" }, step.parity) : null,
      ...Object.entries(step.recipe || {}).flatMap(([file, text]) => [el("h4", {}, file), el("pre", { tabindex: 0 }, text)])].filter(Boolean));
    for (const point of document.querySelectorAll(".point")) point.setAttribute("aria-pressed", String(point.dataset.step === step.name));
  };
  const columns = [{ name: "mark" }, { name: "step" }, { name: "why" }, { name: "result" }, { name: `loss${run.steps.some(step => step.unit) ? `, ${run.steps.find(step => step.unit).unit}` : ""}`, number: true, show: value => value.toFixed(2) },
    { name: "±", number: true, show: value => value.toFixed(2) }, { name: "time", number: true, show: percent }, { name: "bytes", number: true, show: percent },
    { name: "MACs", number: true, show: percent }, { name: "bits", number: true, show: value => value.toFixed(2) }, { name: "took", number: true, show: value => `${Math.round(value)} s` }];
  const rows = run.steps.map(step => [step.is_best ? "★ best" : step.is_pareto ? "◆" : "", step.name, step.why, step.verdict, step.loss, step.bound, step.latency, step.bytes, step.macs, step.bits, step.seconds]);
  const used = columns.map((column, place) => place < 4 || rows.some(row => row[place] !== undefined));
  const only = items => items.filter((_, place) => used[place]);
  const best = run.steps.find(step => step.is_best);
  const plot = pareto(run, cost, names[cost], show);
  const made = el("section", { id: "ladder" }, table({ title: "What was tried", columns: only(columns), rows: rows.map(only), onRow: row => show(run.steps.find(step => step.name === row[1])), rowOf: row => row[0].startsWith("★"),
    note: `Loss against the float model on the same samples; ${names_of_shares(run)}. A row shows its recipe. ★: the chosen one, ◆: not beaten in both loss and cost.` }),
    el("div", { class: plot ? "pair more" : "more" }, plot, detail));
  if (best) requestAnimationFrame(() => show(best));
  return made;
}
function names_of_shares(run) {
  const names = ["time", "bytes", "MACs"].filter((_, place) => run.steps.some(step => step[["latency", "bytes", "macs"][place]] !== undefined));
  const shares = names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)} are shares of the float file's` : `${names[0] || "cost"}: share of the float file's`;
  return run.steps.some(step => step.bits !== undefined) ? `${shares}; bits are of a weight, with its scales` : shares;
}
function ticks(low, high, most = 6) {
  const step = 10 ** Math.floor(Math.log10((high - low) / most || 1)), wide = [1, 2, 5, 10].map(factor => factor * step).find(item => (high - low) / item <= most);
  const found = []; for (let at = Math.ceil(low / wide) * wide; at <= high + wide / 1e6; at += wide) found.push(+at.toPrecision(10));
  return found;
}
function pareto(run, cost, name, show) {
  const steps = run.steps.filter(step => step[cost] !== undefined && step.loss !== undefined);
  if (steps.length < 2) return null;
  const [W, H, L, B, T, R] = [640, 380, 62, 50, 18, 20];
  const xs = [...steps.map(step => step[cost]), run.max_cost].filter(value => value !== undefined), ys = [0, ...steps.flatMap(step => [step.loss, step.loss - (step.bound || 0), step.loss + (step.bound || 0)]), run.max_loss].filter(value => value !== undefined), left = run.steps.length - steps.length;
  const pad = (low, high, least) => { const room = Math.max(0.08 * (high - low), (least - (high - low)) / 2); return [low - room, high + room]; };
  const [x0, x1] = pad(Math.min(...xs), Math.max(...xs), 0.2 * Math.max(...xs)), [y0, y1] = pad(Math.min(...ys), Math.max(...ys), 0.1);
  const x = value => L + (value - x0) / (x1 - x0) * (W - L - R), y = value => H - B - (value - y0) / (y1 - y0) * (H - B - T);
  const clip = value => Math.max(T, Math.min(H - B, y(value)));
  const shapes = { within: "M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0Z", "too much loss": "M0,-7L7,6L-7,6Z", other: "M-6,-6H6V6H-6Z" };
  const front = steps.filter(step => step.is_pareto).sort((one, two) => one[cost] - two[cost]);
  const unit = steps[0].unit || "", written = cost === "bits" ? short : percent;
  return el("figure", {}, svg("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `Loss against ${name}, a point per step` },
    ticks(x0, x1).map(at => [svg("line", { class: "axis", x1: x(at), x2: x(at), y1: T, y2: H - B }), svg("text", { x: x(at), y: H - B + 18, "text-anchor": "middle" }, written(at))]),
    ticks(y0, y1).map(at => [svg("line", { class: "axis", x1: L, x2: W - R, y1: y(at), y2: y(at) }), svg("text", { x: L - 8, y: y(at) + 4, "text-anchor": "end" }, short(at))]),
    svg("text", { x: (L + W - R) / 2, y: H - 10, "text-anchor": "middle" }, cost === "bits" ? name : `${name}, share of the float file's`),
    svg("text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(T + H - B) / 2})` }, `loss${unit && `, ${unit}`}`),
    run.max_loss === undefined ? null : [svg("line", { class: "limit", x1: L, x2: W - R, y1: y(run.max_loss), y2: y(run.max_loss) }), svg("text", { x: L + 6, y: y(run.max_loss) - 6 }, "allowed loss")],
    run.max_cost === undefined ? null : [svg("line", { class: "limit", x1: x(run.max_cost), x2: x(run.max_cost), y1: T, y2: H - B }), svg("text", { x: x(run.max_cost) - 6, y: T + 12, "text-anchor": "end" }, "budget")],
    front.length > 1 ? svg("path", { class: "front", d: `M${front.map(step => `${x(step[cost])},${y(step.loss)}`).join("L")}` }) : null,
    steps.map(step => [step.bound === undefined ? null : svg("line", { class: "bound", x1: x(step[cost]), x2: x(step[cost]), y1: clip(step.loss - step.bound), y2: clip(step.loss + step.bound) }),
      svg("path", { class: `point${step.is_pareto ? " front" : ""}${step.is_best ? " best" : ""}`, d: shapes[step.verdict] || shapes.other, transform: `translate(${x(step[cost])},${y(step.loss)})`, tabindex: 0, role: "button",
        "data-step": step.name, "aria-label": `${step.name}: ${step.verdict}, loss ${short(step.loss)}, ${cost === "bits" ? `${written(step[cost])} bits` : `${written(step[cost])} of the ${name}`}`, onclick: () => show(step), onkeydown: onKeys(() => show(step)) },
        svg("title", {}, `${step.name}: ${step.verdict}`))])),
    el("figcaption", { class: "legend" }, [["within", "within the goal"], ["too much loss", "loses too much"], ["other", "over budget"]].map(([shape, text]) =>
      el("span", {}, svg("svg", { viewBox: "-10 -10 20 20" }, svg("path", { class: "point", d: shapes[shape] })), text)), el("span", {}, `line: not beaten by another; bars: 95 % bound${left ? `; ${left} ${left === 1 ? "step was" : "steps were"} not judged` : ""}`)));
}

// --- the graph: boxes of modules, drawn open where their parts are large enough on the screen

function graph(run) {
  const drawing = run.drawing, boxes = drawing.boxes.map(box => ({ ...box, boxes: [], layers: [], all: [], least: drawing.layer_width })), W = drawing.layer_width, H = drawing.layer_height;
  boxes.forEach((box, place) => { if (box.parent >= 0) boxes[box.parent].boxes.push(place); });
  run.layers.forEach((_, layer) => { boxes[drawing.box_of[layer]].layers.push(layer); for (let at = drawing.box_of[layer]; at >= 0; at = boxes[at].parent) boxes[at].all.push(layer); });
  boxes.forEach(box => { if (!box.layers.length) box.least = Math.min(...box.boxes.map(inner => boxes[inner].width)); });
  const edges = run.layers.flatMap((layer, target) => (layer.inputs || []).map(source => [source, target]));
  const view = { k: 1, x: 0, y: 0 }, root = boxes[0], world = svg("g"), surface = svg("svg", { tabindex: 0, role: "application", "aria-roledescription": "graph", "aria-label": "Graph of the layers. Arrow keys move, Enter opens, Escape goes out, plus and minus zoom, 0 shows all." }, world);
  let tiles = [], chosen = null, pending = 0, size = [800, 600];
  const place = tile => tile.box === undefined ? { x: drawing.x[tile.layer], y: drawing.y[tile.layer], width: W, height: H } : boxes[tile.box];
  const isOpen = box => box === root || box.least * view.k >= READABLE || (box.least * view.k >= VISIBLE && box.width * view.k * box.height * view.k >= LARGE);
  const inView = at => at.x * view.k + view.x < size[0] && (at.x + at.width) * view.k + view.x > 0 && at.y * view.k + view.y < size[1] && (at.y + at.height) * view.k + view.y > 0;
  const same = (one, two) => one && two && one.box === two.box && one.layer === two.layer;
  function clipped(text, width, font) { const room = Math.floor(width / (font * 0.57)); return text.length <= room ? text : room < 4 ? "" : `${text.slice(0, room - 1)}…`; }
  function under(name, outer) { // the part of a name that the box around it does not say; a bare number keeps the part before it
    const rest = outer && name.startsWith(outer) ? name.slice(outer.length).replace(/^[./]/, "") || name : name;
    return /^\d+$/.test(rest) && outer ? `${outer.split(/[./]/).at(-1)}.${rest}` : rest;
  }

  function tileOf(tile) {
    const at = place(tile), folded = tile.box !== undefined, layers = folded ? boxes[tile.box].all.map(index => run.layers[index]) : [run.layers[tile.layer]];
    const seen = look(run, state.metric, layers), name = folded ? under(at.name, boxes[at.parent]?.name) : under(layers[0].name, boxes[drawing.box_of[tile.layer]].name);
    const font = folded ? Math.min(13 / view.k, at.height / 3, at.width / 7) : 13.5, strong = seen.level >= 5 ? ` strong-l${seen.level}` : "";
    const isFloat = !folded && layers[0].arithmetic === "float";
    const parts = [svg("rect", { class: `tile ${seen.kind}${folded ? " folded" : ""}${isFloat ? " is-float" : ""}${same(tile, chosen) || (!folded && tile.layer === state.layer) ? " chosen" : ""}`, x: at.x, y: at.y, width: at.width, height: at.height, rx: 6,
      "data-name": folded ? at.name : layers[0].name, onclick: () => pick(tile) }, svg("title", {}, `${folded ? at.name : layers[0].name}${folded ? `, ${layers.length} layers` : ` (${layers[0].op || "layer"})`}: ${seen.text || "not measured"}`))];
    if (font * view.k >= 7) {
      const mid = at.y + at.height / 2, left = folded ? at.x + at.width / 2 : at.x + 9, anchor = folded ? "middle" : "start";
      const value = folded && !seen.text ? `${layers.length} layers` : seen.text, op = folded || name.toLowerCase().includes((layers[0].op || "").toLowerCase()) ? "" : ` ${layers[0].op}`;
      parts.push(svg("text", { x: left, y: mid - font * 0.25, "font-size": font, "text-anchor": anchor, class: strong }, clipped(name + (name.length + op.length < 17 ? op : ""), at.width - 12, font)),
        svg("text", { x: left, y: mid + font, "font-size": font * 0.92, "text-anchor": anchor, class: `value${strong}` }, clipped(value, at.width - 12, font)));
    }
    if (seen.level > 0) parts.push(svg("rect", { class: `level${strong}`, x: at.x + 3, y: at.y + at.height - 3.5, width: (at.width - 6) * seen.level / 6, height: 2.5, rx: 1 }));
    return parts;
  }
  function draw() {
    pending = 0;
    const frames = [], shown = new Array(run.layers.length), lines = new Map(); tiles = [];
    (function walk(index, depth) {
      const box = boxes[index];
      if (!isOpen(box)) { const tile = { box: index }; tiles.push(tile); for (const layer of box.all) shown[layer] = tile; return; }
      if (index && inView(box)) {
        const font = Math.min(13 / view.k, drawing.title * 0.8), name = under(box.name, boxes[box.parent]?.name);
        frames.push(svg("rect", { class: `frame${depth % 2 ? "" : " deep"}`, x: box.x, y: box.y, width: box.width, height: box.height, rx: 9 }), svg("text", { class: "title", x: box.x + 12, y: box.y + 6 + font, "font-size": font }, clipped(name, box.width - 20, font)));
      }
      for (const layer of box.layers) { const tile = { layer }; tiles.push(tile); shown[layer] = tile; }
      for (const inner of box.boxes) walk(inner, depth + 1);
    })(0, 0);
    for (const [source, target] of edges) {
      const [one, two] = [shown[source], shown[target]];
      if (!one || !two || one === two) continue;
      const key = `${one.box ?? "l" + one.layer} ${two.box ?? "l" + two.layer}`;
      if (!lines.has(key) && (inView(place(one)) || inView(place(two)))) lines.set(key, curve(place(one), place(two), one.layer === state.layer || two.layer === state.layer));
    }
    tiles = tiles.filter(tile => inView(place(tile)));
    world.setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.k})`);
    world.replaceChildren(...frames, ...lines.values(), ...tiles.flatMap(tileOf));
  }
  function curve(one, two, near) {
    const down = two.y >= one.y + one.height - 1, [x1, x2] = [one.x + one.width / 2, two.x + two.width / 2];
    const [y1, y2] = [one.y + one.height, two.y], bend = down ? Math.min(60, Math.max(10, (y2 - y1) / 2)) : 40;
    const side = down ? `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}` : acrossColumns(one, two);
    return svg("path", { class: `edge${near ? " near" : ""}`, d: side });
  }
  function acrossColumns(one, two) { // from the end of a column to the head of the next: sideways, then up
    const right = two.x > one.x, x1 = right ? one.x + one.width : one.x, x2 = right ? two.x : two.x + two.width, way = right ? 1 : -1, mid = (x1 + x2) / 2;
    const [y1, y2] = [one.y + one.height / 2, two.y + two.height / 2];
    return `M${x1},${y1}C${Math.abs(mid - x1) > 60 ? x1 + 60 * way : mid},${y1} ${Math.abs(mid - x1) > 60 ? x2 - 60 * way : mid},${y2} ${x2},${y2}`;
  }
  const later = () => { pending ||= requestAnimationFrame(draw); };
  function frame(at, most = 1.15) {
    const margin = 24, k = Math.min(most, (size[0] - 2 * margin) / at.width, (size[1] - 2 * margin) / at.height);
    Object.assign(view, { k, x: size[0] / 2 - (at.x + at.width / 2) * k, y: size[1] / 2 - (at.y + at.height / 2) * k });
    later();
  }
  function zoom(factor, x = size[0] / 2, y = size[1] / 2) {
    const k = Math.max(0.004, Math.min(3, view.k * factor));
    Object.assign(view, { x: x - (x - view.x) * k / view.k, y: y - (y - view.y) * k / view.k, k });
    later();
  }
  function pick(tile) {
    if (tile.box !== undefined) { chosen = null; frame(boxes[tile.box], 1.15); if (!isOpen(boxes[tile.box])) zoom(1.02 * READABLE / (boxes[tile.box].least * view.k)); say(`${boxes[tile.box].name || "module"} opened`); }
    else select(tile.layer);
  }
  function move(dx, dy) {
    const from = chosen ? place(chosen) : state.layer >= 0 ? place({ layer: state.layer }) : null;
    const centre = at => [at.x + at.width / 2, at.y + at.height / 2];
    const [cx, cy] = from ? centre(from) : [(size[0] / 2 - view.x) / view.k, (size[1] / 2 - view.y) / view.k];
    let found = null, least = Infinity;
    for (const tile of tiles) {
      const [x, y] = centre(place(tile)), along = (x - cx) * dx + (y - cy) * dy, aside = Math.abs((x - cx) * dy) + Math.abs((y - cy) * dx);
      if (from && (along <= 1 || same(tile, chosen))) continue;
      const far = from ? along + 2.5 * aside : Math.hypot(x - cx, y - cy);
      if (far < least) [found, least] = [tile, far];
    }
    if (!found) return;
    chosen = found;
    const at = place(found), layers = found.box === undefined ? [run.layers[found.layer]] : boxes[found.box].all.map(index => run.layers[index]);
    if (at.x * view.k + view.x < 0 || (at.x + at.width) * view.k + view.x > size[0]) view.x = size[0] / 2 - (at.x + at.width / 2) * view.k;
    if (at.y * view.k + view.y < 0 || (at.y + at.height) * view.k + view.y > size[1]) view.y = size[1] / 2 - (at.y + at.height / 2) * view.k;
    say(`${found.box === undefined ? layers[0].name : `${at.name}, ${layers.length} layers`}, ${look(run, state.metric, layers).text}`);
    later();
  }
  function out() { // to the module around what is in the middle
    const x = (size[0] / 2 - view.x) / view.k, y = (size[1] / 2 - view.y) / view.k;
    const around = boxes.filter(box => box.x <= x && x <= box.x + box.width && box.y <= y && y <= box.y + box.height && Math.min((size[0] - 48) / box.width, (size[1] - 48) / box.height) < view.k * 0.95);
    frame(around.length ? around.at(-1) : root);
  }
  const keys = { ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1), ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0), Enter: () => chosen && pick(chosen),
    Escape: out, "+": () => zoom(1.35), "=": () => zoom(1.35), "-": () => zoom(1 / 1.35), 0: () => frame(root) };
  surface.addEventListener("keydown", event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); } });
  surface.addEventListener("wheel", event => { event.preventDefault(); const at = surface.getBoundingClientRect(); zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.clientX - at.left, event.clientY - at.top); }, { passive: false });
  const fingers = new Map();
  surface.addEventListener("pointerdown", event => { fingers.set(event.pointerId, [event.clientX, event.clientY]); });
  surface.addEventListener("pointermove", event => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at), now = [event.clientX, event.clientY];
    if (!surface.hasPointerCapture(event.pointerId) && Math.hypot(now[0] - before[0], now[1] - before[1]) < 4) return;
    surface.setPointerCapture(event.pointerId); surface.classList.add("moving");
    if (others.length) { const at = surface.getBoundingClientRect(), far = point => Math.hypot(point[0] - others[0][0], point[1] - others[0][1]); zoom(far(now) / (far(before) || 1), (now[0] + others[0][0]) / 2 - at.left, (now[1] + others[0][1]) / 2 - at.top); }
    else { view.x += now[0] - before[0]; view.y += now[1] - before[1]; later(); }
    fingers.set(event.pointerId, now);
  });
  for (const name of ["pointerup", "pointercancel"]) surface.addEventListener(name, event => { fingers.delete(event.pointerId); surface.classList.remove("moving"); });
  let isFramed = false;
  new ResizeObserver(([entry]) => { size = [entry.contentRect.width || 800, entry.contentRect.height || 600]; if (!isFramed && entry.contentRect.width) { isFramed = true; if (state.layer >= 0) reveal(state.layer); else frame(root); } later(); }).observe(surface);
  function reveal(layer) { const at = place({ layer }); chosen = null; view.k = Math.max(view.k, 0.85); view.x = size[0] / 2 - (at.x + W / 2) * view.k; view.y = size[1] / 2 - (at.y + H / 2) * view.k; later(); }
  const shownAt = layer => { const at = place({ layer }); return tiles.some(tile => tile.layer === layer) && at.x * view.k + view.x > 0 && (at.x + W) * view.k + view.x < size[0] && at.y * view.k + view.y > 0 && (at.y + H) * view.k + view.y < size[1]; };
  state.refresh.push(() => { if (state.layer >= 0 && !shownAt(state.layer)) reveal(state.layer); later(); });

  const legend = el("div", { class: "legend", id: "legend" }), buttons = el("div", { class: "switch", role: "group", "aria-label": "Colour by" });
  const swatch = (kind, level, text) => el("span", {}, svg("svg", { viewBox: "0 0 22 14", "aria-hidden": "true" }, svg("rect", { class: `tile ${kind}${kind === "float" ? " is-float" : ""}`, x: 1, y: 1, width: 20, height: 12, rx: 3 }), level > 0 ? svg("rect", { class: "level", x: 3, y: 10, width: 16 * level / 6, height: 2 }) : null), text);
  function metric(key) {
    state.metric = key;
    [...buttons.children].forEach(button => button.setAttribute("aria-pressed", String(button.dataset.key === key)));
    const { legend: texts, note } = METRICS[key];
    legend.replaceChildren(...(texts ? texts.map((text, level) => text && swatch(`l${level}`, level, text)).filter(Boolean) : ["integer", "weight-only", "float", "unknown"].map(kind => swatch(kind, 0, kind))), el("span", {}, note));
    later();
  }
  const keysHere = available(run);
  keysHere.forEach(key => buttons.append(el("button", { "data-key": key, onclick: () => metric(key) }, METRICS[key].label)));
  metric(keysHere.includes(state.metric) ? state.metric : keysHere[0] || "error");
  const tool = (text, label, action) => el("button", { "aria-label": label, title: label, onclick: action }, text);
  return { controls: buttons, part: el("div", {}, el("div", { class: "canvas" }, surface, el("div", { class: "tools" }, tool("+", "Zoom in", () => zoom(1.5)), tool("−", "Zoom out", () => zoom(1 / 1.5)), tool("↑", "To the module around", out), tool("All", "Show all", () => frame(root)))), legend) };
}
const nearness = (layer, wanted) => { const name = layer.name.toLowerCase(); return name === wanted ? 0 : name.endsWith(`.${wanted}`) ? 1 : name.includes(wanted) ? 2 : 3; };
function search(run) {
  const found = el("div", { class: "found", hidden: true, role: "listbox", "aria-label": "Layers found" });
  const input = el("input", { type: "search", id: "search", placeholder: "Find a layer  ( / )", "aria-label": "Find a layer", autocomplete: "off", oninput: () => {
    const wanted = input.value.toLowerCase(), hits = wanted ? run.layers.map((layer, place) => [layer, place]).filter(([layer]) => `${layer.name} ${layer.op || ""}`.toLowerCase().includes(wanted)).sort((one, two) => nearness(one[0], wanted) - nearness(two[0], wanted)) : [];
    found.replaceChildren(...hits.slice(0, 30).map(([layer, place]) => el("button", { role: "option", onclick: () => { found.hidden = true; select(place); } }, layer.name, el("span", { class: "soft" }, ` ${layer.op || ""}`))));
    found.hidden = !wanted;
    if (wanted) { if (!hits.length) found.append(el("p", { class: "soft" }, "no layer has this in its name")); say(`${hits.length} layers found`); }
  }, onkeydown: event => {
    if (event.key === "Enter") found.querySelector("button")?.click();
    else if (event.key === "Escape") found.hidden = true;
    else if (event.key === "ArrowDown") { event.preventDefault(); found.querySelector("button")?.focus(); }
  } });
  found.addEventListener("keydown", event => { const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key]; if (next) { event.preventDefault(); (document.activeElement[next] || input).focus(); } else if (event.key === "Escape") { found.hidden = true; input.focus(); } });
  return el("div", { class: "search" }, input, found);
}

// --- one layer

function details(run, layer) {
  if (!layer) return [el("h3", {}, "No layer is chosen"), el("p", { class: "soft" }, "Choose one in the graph, in the table below, or by its name.")];
  const facts = [["operator", layer.op], ["computed in", layer.arithmetic && layer.arithmetic + (layer.kernel ? ` (${layer.kernel})` : "")], ["SQNR of the output", layer.sqnr_db !== undefined && db(layer.sqnr_db)],
    ["bits, weight and activation", [layer.bits, layer.activation_bits].filter(value => value !== undefined).map(value => +value.toFixed(2)).join(" and ")], ["bytes", layer.bytes !== undefined && bytes(layer.bytes) + (layer.float_bytes && layer.float_bytes !== layer.bytes ? `, ${bytes(layer.float_bytes)} before` : "")], ["weight that stays", layer.kept !== undefined && percent(layer.kept)],
    ["multiplications", layer.macs && count(layer.macs)], ["shape", layer.shape], ["time", layer.ms !== undefined && ms(layer.ms) + (layer.float_ms !== undefined ? `, ${ms(layer.float_ms)} in float` : "")],
    ["why float", layer.why_float]].filter(([, value]) => value);
  return [el("div", {}, el("h3", {}, layer.name), el("a", { class: "soft", href: `#layer=${encodeURIComponent(layer.name)}` }, "link to this layer")),
    el("dl", { class: "facts" }, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    ...(layer.causes || []).map(cause => el("div", { class: "cause" }, el("p", {}, cause.text), cause.remedy ? el("p", {}, cause.remedy) : null)),
    ...(layer.tensors || []).map(tensor => el("div", { class: "tensor" }, el("h3", {}, `${tensor.role} `, el("span", { class: "soft" }, [tensor.format, tensor.num_scales && (tensor.num_scales > 1 ? `${tensor.num_scales} scales` : "1 scale"), tensor.observer].filter(Boolean).join(", "))),
      tensor.float_bins ? histogram(tensor) : null,
      el("dl", { class: "facts" }, [["SQNR", tensor.sqnr_db !== undefined && db(tensor.sqnr_db)], ["values from, to", tensor.low !== undefined && `${short(tensor.low)} … ${short(tensor.high)}`],
        ["range from, to", tensor.clip_low !== undefined && `${short(tensor.clip_low)} … ${short(tensor.clip_high)}`], ["outside of the range", tensor.clipped !== undefined && percent(tensor.clipped)]].filter(([, value]) => value).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      tensor.scales ? strip(tensor.scales, "scales per channel") : null, tensor.peaks ? strip(tensor.peaks, "largest value per channel") : null))];
}
function histogram(tensor) {
  const [W, H, B] = [360, 120, 18], all = [tensor.float_bins, tensor.quantized_bins].filter(Boolean), end = item => item.low + item.width * item.heights.length;
  const inner = [Math.min(...all.map(item => item.low)), Math.max(...all.map(end))], ends = [tensor.clip_low, tensor.clip_high].filter(value => value !== undefined && value > inner[0] - 2 * (inner[1] - inner[0]) && value < inner[1] + 2 * (inner[1] - inner[0]));
  const low = Math.min(inner[0], ...ends), high = Math.max(inner[1], ...ends), x = value => 4 + (value - low) / (high - low || 1) * (W - 8);
  const tall = char => HEIGHTS.indexOf(char) / 63 * (H - B - 6), base = H - B;
  const outside = (from, to) => to > from ? svg("rect", { class: "outside", x: x(from), y: 0, width: x(to) - x(from), height: base }) : null;
  const item = tensor.float_bins, steps = tensor.quantized_bins;
  return svg("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Histogram of the ${tensor.role}: float values as bars, quantized ones as a line; ${percent(tensor.clipped || 0)} are outside of the range` },
    tensor.clip_low === undefined ? null : [outside(low, tensor.clip_low), outside(tensor.clip_high, high)],
    [...item.heights].map((char, place) => char === "A" ? null : svg("rect", { class: "bars", x: x(item.low + place * item.width), y: base - tall(char), width: Math.max(1, x(low + item.width) - x(low) - 0.6), height: tall(char) })),
    steps ? svg("path", { class: "steps", d: `M${x(steps.low)},${base}` + [...steps.heights].map((char, place) => `V${base - tall(char)}H${x(steps.low + (place + 1) * steps.width)}`).join("") + `V${base}` }) : null,
    ends.map(at => svg("line", { class: "end", x1: x(at), x2: x(at), y1: 0, y2: base })),
    svg("text", { x: 4, y: H - 3 }, short(low)), svg("text", { x: W - 4, y: H - 3, "text-anchor": "end" }, short(high)));
}
function strip(levels, text) { // sorted values as bars, the smallest first
  const [W, H] = [360, 46], values = [...levels.heights].map(char => HEIGHTS.indexOf(char) / 63), wide = (W - 8) / values.length;
  return el("figure", {}, el("h4", {}, `${text}: ${short(levels.low)} … ${short(levels.high)}`), svg("svg", { class: "plot", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${text}, sorted, from ${short(levels.low)} to ${short(levels.high)}` },
    values.map((value, place) => svg("rect", { class: "bars", x: 4 + place * wide, y: H - 2 - (H - 6) * value, width: Math.max(0.8, wide - 1), height: Math.max(1, (H - 6) * value) }))));
}

// --- the parts of one run

function layerTable(run) {
  const columns = [{ name: "layer", of: layer => layer.name }, { name: "operator", of: layer => layer.op }, { name: "computed in", of: layer => layer.arithmetic }, { name: "bits", of: layer => layer.bits, number: true }, { name: "stays", of: layer => layer.kept, number: true, show: percent },
    { name: "SQNR", of: layer => layer.sqnr_db, number: true, show: db }, { name: "time", of: layer => layer.ms, number: true, show: ms }, { name: "in float", of: layer => layer.float_ms, number: true, show: ms },
    { name: "bytes", of: layer => layer.bytes, number: true, show: bytes }, { name: "MACs", of: layer => layer.macs, number: true, show: count }, { name: "shape", of: layer => layer.shape }, { name: "why float, or cause", of: layer => layer.why_float || layer.causes?.[0]?.text }]
    .filter(column => run.layers.some(layer => column.of(layer) !== undefined));
  const rows = run.layers.map(layer => columns.map(column => column.of(layer)));
  return el("section", { id: "layers" }, table({ title: "Layers", columns, rows, onRow: row => choose_by_name(row[0]) }));
}
function further(item) { // closed, as few readers need it
  const columns = item.columns.map((name, place) => ({ name, number: item.rows.some(row => typeof row[place] === "number"), show: SHOWN[name.split(" ").at(-1)] }));
  const holder = el("div", {}), made = el("details", { class: "further", ontoggle: () => { if (!holder.firstChild) holder.append(table({ ...item, columns, isInside: true })); } },
    el("summary", {}, el("h2", {}, item.title), el("span", { class: "soft" }, many(item.rows.length))), holder);
  return el("section", {}, made);
}
const SHOWN = { bytes, seconds: value => `${+value.toPrecision(3)} s`, dB: value => value.toFixed(1) };
function sections(run) {
  state.refresh = [];
  const parts = [ladder(run)];
  if (run.layers.length) {
    const drawn = run.drawing ? graph(run) : null, panel = el("div", { class: "details", id: "details", tabindex: 0, role: "region", "aria-label": "The chosen layer", "aria-live": "polite" }, details(run, run.layers[state.layer]));
    state.refresh.push(() => panel.replaceChildren(...details(run, run.layers[state.layer])));
    parts.push(el("section", { id: "graph" }, el("div", { class: "bar" }, el("h2", {}, drawn ? "Graph" : "A layer"), drawn ? drawn.controls : null, el("span", { class: "grow" }), search(run)),
      drawn ? el("div", { class: "graph" }, drawn.part, panel) : panel), layerTable(run));
  }
  for (const item of run.tables) parts.push(further(item));
  if (run.notes.length) parts.push(el("section", {}, el("h2", {}, "Notes"), el("ul", { class: "notes" }, run.notes.map(note => el("li", {}, note)))));
  return parts.filter(Boolean);
}
function select(layer, quietly) {
  state.layer = layer;
  const chosen = page.runs[state.run].layers[layer];
  if (chosen && !quietly) { history.replaceState(null, "", `#layer=${encodeURIComponent(chosen.name)}`); say(`${chosen.name} chosen`); }
  for (const refresh of state.refresh) refresh();
}
function choose_by_name(name) {
  let place = page.runs[state.run].layers.findIndex(layer => layer.name === name);
  if (place < 0) {
    const other = page.runs.findIndex(run => run.layers.some(layer => layer.name === name));
    if (other < 0) return;
    show(other); place = page.runs[other].layers.findIndex(layer => layer.name === name);
  }
  select(place); document.getElementById("graph")?.scrollIntoView({ block: "nearest" });
}
function fromLink() { const found = /[#&]layer=([^&]*)/.exec(location.hash); if (found) { try { choose_by_name(decodeURIComponent(found[1])); } catch { say("the link to a layer is damaged"); } } }
function show(index) {
  state.run = index; state.layer = -1;
  for (const button of document.querySelectorAll("#runs button")) button.setAttribute("aria-selected", String(+button.dataset.run === index));
  document.getElementById("run").replaceChildren(...sections(page.runs[index]));
}
function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), button = el("button", { id: "theme" });
  const set = name => { document.documentElement.dataset.theme = name; button.textContent = name === "dark" ? "☀ Light" : "☾ Dark"; button.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} colours`); };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  return button;
}
const runs = page.runs.length > 1 ? el("div", { class: "bar", id: "runs", role: "tablist", "aria-label": "Run" }, page.runs.map((run, index) => el("button", { role: "tab", "data-run": index, onclick: () => show(index) }, run.name))) : null;
document.getElementById("page").replaceChildren(...[el("header", {}, el("div", {}, el("h1", {}, page.title), el("p", { class: "soft" }, `sparsebit ${page.version}`)), theme()), el("div", { id: "said", class: "sr", role: "status" }), heads(), comparison(), runs, el("div", { id: "run" })].filter(Boolean));
show(0);
addEventListener("hashchange", fromLink);
addEventListener("beforeprint", () => { for (const item of document.querySelectorAll("details")) item.open = true; });
addEventListener("keydown", event => { if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) { event.preventDefault(); document.getElementById("search")?.focus(); } });
fromLink();
})();
