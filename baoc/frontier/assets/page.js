// Filters and draws what page.py has computed. Plotly is in the page already.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = {BAOC: "#0b6bcb", uniform: "#d1700f", "random feasible": "#7a7f87"};
const SPARE = ["#2f8f4e", "#8b5cc2", "#b3261e", "#0f8b8d", "#c2a10f", "#c2528b", "#5b6b1f", "#4a4fb5"];
const TITLES = {state_share: "optimizer state, % of fp32 AdamW's", state_mib: "optimizer state, MiB", peak_mib: "peak memory, MiB", samples_per_s: "samples/s", risk: "predicted risk"};
const NARROW = window.innerWidth < 600;
const CONFIG = {responsive: true, displaylogo: false, displayModeBar: NARROW ? false : "hover", showSendToCloud: false, plotlyServerURL: "",
  toImageButtonOptions: {format: "png", scale: 2, filename: "frontier"}, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"]}; // a picture on this machine, and nothing to a server
const EDGE = NARROW ? 44 : 60;
const FEW = 12; // points of which each has a column; of more, those on the front of their family or study
const SHARES = [1, 2, 5, 10, 25, 50, 100];
const byId = (id) => document.getElementById(id);
const number = (value, digits = 4) => (value === null || value === undefined ? "n/a" : Number(value).toPrecision(digits));

// Of one task what is compared: families, or the studies that runs come from
function comparedBy(kind) {
  return kind.study ? byId("by").value : "family";
}

function view(kind) {
  return comparedBy(kind) === "study" ? {...kind, ...kind.study} : kind;
}

function colour(family) {
  const others = [...new Set(data.kinds.flatMap((kind) => view(kind).points.map((point) => point.family)))].filter((name) => !COLOURS[name]);
  return COLOURS[family] || SPARE[others.indexOf(family) % SPARE.length];
}

function cell(row, text, tag = "td", numeric = false) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (numeric) made.className = "number";
  row.appendChild(made);
  return made;
}

function table(id, heads, rows, numeric = []) {
  const holder = byId(id);
  holder.replaceChildren();
  const head = holder.insertRow();
  heads.forEach((text, at) => cell(head, text, "th", numeric.includes(at)));
  rows.forEach((values) => {
    const row = holder.insertRow();
    values.forEach((value, at) => cell(row, value, "td", numeric.includes(at)));
  });
  return holder;
}

function wrapped(text) {
  return text.replace(/(.{1,80})(\s|$)/g, "$1<br>").replace(/<br>$/, "");
}

function axisOf(key) {
  if (key === "state_share") return {title: {text: TITLES[key]}, type: "log", tickvals: SHARES, ticktext: SHARES.map(String)};
  return {title: {text: TITLES[key]}, type: key === "samples_per_s" ? "linear" : "log", dtick: key === "state_mib" ? "D2" : undefined, nticks: 8};
}

function judged(kind) {
  return `${kind.quality}, ${kind.higher ? "higher" : "lower"} is better`;
}

function hover(kind, point) {
  const spread = point.spread === null ? "" : ` ± ${number(point.spread, 2)} (${point.seeds} seeds)`;
  return `<b>${point.short}</b>, ${point.family}<br>${kind.quality} ${number(point.quality)}${spread}<br>state ${number(point.state_mib, 3)} MiB (${number(point.state_share, 3)} % of fp32 AdamW's), peak ` +
    `${number(point.peak_mib)} MiB<br>${number(point.samples_per_s)} samples/s${point.basis ? `<br>chosen by ${wrapped(point.basis)}` : ""}<br>${wrapped(point.command)}`;
}

function front(kind, points, axis) {
  const sign = kind.higher ? -1 : 1, along = axis === "samples_per_s" ? -1 : 1;
  const better = (a, b) => sign * a.quality <= sign * b.quality && along * a[axis] <= along * b[axis] &&
    (a.quality !== b.quality || a[axis] !== b[axis]);
  return points.filter((point) => point.quality !== null && !points.some((other) => other.quality !== null && better(other, point)))
    .sort((a, b) => a[axis] - b[axis]);
}

function scatter(kind, shown, axis) {
  const traces = [];
  [...new Set(shown.map((point) => point.family))].forEach((family) => {
    const mine = shown.filter((point) => point.family === family && point.quality !== null);
    const edge = front(kind, mine, axis);
    traces.push({x: edge.map((p) => p[axis]), y: edge.map((p) => p.quality), mode: "lines", line: {color: colour(family), width: 1.5, shape: axis === "samples_per_s" ? "vh" : "hv"},
      hoverinfo: "skip", showlegend: false});
    traces.push({x: mine.map((p) => p[axis]), y: mine.map((p) => p.quality), name: family, mode: "markers", text: mine.map((p) => hover(kind, p)), hoverinfo: "text",
      error_y: {type: "data", array: mine.map((p) => p.spread || 0), thickness: 1, width: 3, visible: mine.some((p) => p.spread)},
      marker: {color: colour(family), size: 9, symbol: mine.map((p) => (p.dominated ? "circle-open" : "circle"))}});
  });
  const knee = kneeOf(kind, axis);
  if (knee && shown.includes(knee)) {
    traces.push({x: [knee[axis]], y: [knee.quality], name: "knee", mode: NARROW ? "markers" : "markers+text", text: [knee.short], textposition: "top right", cliponaxis: false,
      hoverinfo: "skip", marker: {size: 20, symbol: "star-open", color: "#1c1e21", line: {width: 2}}});
  }
  Plotly.react("scatter", traces, {margin: {l: EDGE, r: 12, t: 40, b: 48}, xaxis: axisOf(axis),
    yaxis: {title: {text: judged(kind)}}, legend: {orientation: "h", x: 0, y: 1.12}}, CONFIG);
}

function kneeOf(kind, axis) {
  const label = kind.knees[{state_share: "state_bytes", state_mib: "state_bytes", peak_mib: "peak_bytes"}[axis]];
  return kind.points.find((point) => point.label === label);
}

function history(kind, families, axis, group) {
  const along = axis === "peak_mib" ? "peak_bytes" : "state_bytes";
  const lines = kind.histories.filter((line) => line.axis === along && (families.includes(line.family) || (group === "family" && line.family === "all")));
  const places = (line) => (group === "study" ? line.runs.map((_, at) => at + 1) : line.runs);
  Plotly.react("history", lines.map((line) => ({x: places(line), y: line.share, name: line.family, mode: "lines", line: {shape: "hv", width: line.family === "all" ? 2.5 : 1.5,
    color: line.family === "all" ? "#1c1e21" : colour(line.family)}, text: line.runs.map((at) => kind.runs[at - 1]), hovertemplate: "%{text}: %{y:.1f} %<extra>" + line.family + "</extra>"})),
  {margin: {l: EDGE, r: 12, t: 40, b: 48}, xaxis: {title: {text: group === "study" ? "run number in its study" : "run number"}, dtick: kind.runs.length <= 20 ? 1 : undefined}, yaxis: {title: {text: "dominated area, %"}, rangemode: "tozero"}, legend: {orientation: "h", x: 0, y: 1.12}}, CONFIG);
}

function space(kind, shown) {
  const traces = [...new Set(shown.map((point) => point.family))].map((family) => {
    const mine = shown.filter((point) => point.family === family && point.quality !== null);
    return {type: "scatter3d", mode: "markers", name: family, x: mine.map((p) => p.peak_mib), y: mine.map((p) => p.samples_per_s), z: mine.map((p) => p.quality),
      text: mine.map((p) => hover(kind, p)), hoverinfo: "text", marker: {size: 4, color: colour(family)}};
  });
  Plotly.react("space", traces, {margin: {l: 0, r: 0, t: 0, b: 0}, legend: {orientation: "h"}, scene: {camera: {eye: {x: 1.7, y: 1.7, z: 1.1}, center: {x: 0, y: 0, z: -0.15}}, xaxis: {title: {text: "peak, MiB"}}, yaxis: {title: {text: "samples/s"}},
    zaxis: {title: {text: judged(kind)}}}}, CONFIG);
}

function parallel(kind, shown) {
  const families = [...new Set(shown.map((point) => point.family))];
  const usable = shown.filter((point) => point.quality !== null);
  const axes = ["quality", "state_share", "peak_mib", "samples_per_s", "risk"].filter((key) => usable.every((point) => point[key] !== null));
  const steps = families.flatMap((family, at) => [[at / families.length, colour(family)], [(at + 1) / families.length, colour(family)]]);
  const doubling = (key) => { // ticks of a share along its doublings, as the other figures have it
    const logs = usable.map((p) => Math.log2(Math.max(p[key], SHARES[0] / 2)));
    const ticks = [0.5, ...SHARES].filter((share) => Math.log2(share) >= Math.min(...logs) - 0.5 && Math.log2(share) <= Math.max(...logs) + 0.5);
    return {values: logs, tickvals: ticks.map(Math.log2), ticktext: ticks.map((share) => (share === 0.5 ? "0 to 0.5" : String(share)))};
  };
  const title = (key) => (key === "quality" ? kind.quality : key === "state_share" ? "state, % of AdamW's" : TITLES[key]);
  byId("parallel").style.minWidth = NARROW ? "720px" : "";
  Plotly.react("parallel", [{type: "parcoords", line: {color: usable.map((p) => families.indexOf(p.family)), cmin: -0.5, cmax: families.length - 0.5, colorscale: steps},
    dimensions: axes.map((key) => ({label: title(key), ...(key === "state_share" ? doubling(key) : {values: usable.map((p) => p[key])})}))}], {margin: {l: 70, r: 70, t: 60, b: 30}}, CONFIG);
}

function heat(kind, shown, axis) {
  const known = shown.filter((point) => Object.keys(point.choices).length);
  byId("rest").hidden = known.length <= FEW;
  const every = byId("every").checked || known.length <= FEW;
  const fronts = new Set([...new Set(known.map((point) => point.family))].flatMap((family) => front(kind, known.filter((point) => point.family === family), axis)));
  const ordered = known.filter((point) => every || fronts.has(point)).sort((a, b) => a.state_mib - b.state_mib);
  const blocks = [...new Set(ordered.flatMap((point) => Object.keys(point.choices)))];
  const names = ordered.map((point, at) => `${at + 1}. ${point.short.length > 44 ? point.short.slice(0, 43) + "…" : point.short}`);
  const kept = (point, block) => (block in point.kept ? point.kept[block] : block in point.choices ? 0 : null);
  const blockText = (point, block) => (block in point.choices ? `${point.choices[block]}<br>` +
    (block in point.kept ? `${number(point.kept[block], 3)} % of fp32 AdamW's state` : "its state is not recorded") : "");
  const roomy = ordered.length <= (NARROW ? 2 : 9);
  const holder = byId("heat");
  holder.style.height = `${Math.max(300, 214 + 22 * blocks.length)}px`;
  holder.style.minWidth = `${Math.max(NARROW ? 560 : 0, 220 + 26 * ordered.length)}px`;
  // Equal steps of colour for equal steps of the root, so that a hundredth and a tenth still differ
  Plotly.react("heat", [{type: "heatmap", x: names, y: blocks, xgap: 2, ygap: 1, zmin: 0, zmax: 10, colorscale: [[0, "#f3f0e6"], [0.35, "#b9d3e3"], [0.6, "#5c9bc4"], [1, "#123f66"]],
    z: blocks.map((block) => ordered.map((point) => { const share = kept(point, block); return share === null ? null : Math.sqrt(Math.min(share, 100)); })),
    text: blocks.map((block) => ordered.map((point) => point.choices[block] || "")), texttemplate: roomy ? "%{text}" : "", textfont: {size: 10},
    customdata: blocks.map((block) => ordered.map((point) => blockText(point, block))), hovertemplate: "%{y}<br>%{x}<br><b>%{customdata}</b><extra></extra>",
    colorbar: {title: {text: "% of AdamW's<br>state kept"}, tickvals: [0, 1, 5, 10, 25, 50, 100].map(Math.sqrt), ticktext: ["0", "1", "5", "10", "25", "50", "100"], thickness: 14}}],
  {margin: {l: 20, r: 20, t: 36, b: 30}, yaxis: {autorange: "reversed", automargin: true, tickfont: {size: 11}, dtick: 1}, xaxis: {tickangle: 35, automargin: true, tickfont: {size: 11}, dtick: 1}}, CONFIG);
}

function levels(kind) {
  const families = [...new Set(kind.levels.flatMap((level) => Object.keys(level.best)))];
  const best = (level) => Object.entries(level.best).sort((a, b) => (kind.higher ? -1 : 1) * (a[1].quality - b[1].quality))[0][0];
  const bestText = (own) => (own ? `${number(own.quality)}${own.spread === null ? "" : ` ± ${number(own.spread, 2)}`}, n ${own.seeds}: ${own.name}${own.of > 1 ? ` (best of ${own.of})` : ""}` : "none fits");
  const holder = table("levels", [`at most (${judged(kind)})`, ...families], kind.levels.map((level) => [level.name, ...families.map((family) => bestText(level.best[family]))]));
  kind.levels.forEach((level, at) => { holder.rows[at + 1].cells[1 + families.indexOf(best(level))].style.fontWeight = "600"; });
}

function curves(kind, shown) {
  const traces = shown.flatMap((point) => Object.entries(point.curves).map(([key, pairs]) => ({x: pairs.map((p) => p[0]), y: pairs.map((p) => p[1]),
    name: `${point.label} ${key}`, mode: key === "train/loss" ? "lines" : "markers", line: {color: colour(point.family), width: 1}, marker: {color: colour(point.family), size: 7},
    hovertemplate: `${point.short}<br>step %{x}: %{y:.4g}<extra>${key}</extra>`, showlegend: false})));
  Plotly.react("curves", traces, {margin: {l: EDGE, r: 12, t: 12, b: 44}, xaxis: {title: {text: "optimizer step"}}, yaxis: {title: {text: ["train/loss (lines)", `${kind.quality} (dots)`].filter((_, at) => traces.some((trace) => (trace.mode === "lines") === (at === 0))).join(", ")}}}, CONFIG);
}

function draw() {
  const whole = data.kinds[byId("kind").value];
  const kind = view(whole), group = comparedBy(whole);
  const axis = byId("axis").value;
  const families = [...document.querySelectorAll("#families input:checked")].map((box) => box.value);
  const shown = kind.points.filter((point) => families.includes(point.family));
  const lost = shown.filter((point) => point.quality === null).length;
  byId("about").textContent = kind.about;
  byId("verdict").textContent = kind.verdict;
  levels(kind);
  byId("summary").textContent = `${shown.length} of ${kind.points.length} points shown; ${judged(kind)}` +
    (lost ? `; ${lost} diverged and cannot be drawn` : "");
  const knee = kneeOf(kind, axis);
  const unit = axis === "state_share" ? " % of fp32 AdamW's optimizer state" : axis === "state_mib" ? " MiB of optimizer state" : " MiB peak memory";
  byId("knee").textContent = knee ? `Knee (the star): ${knee.short}, ${kind.quality} ${number(knee.quality)} with ${number(knee[axis], 3)}${unit}. More memory buys little there, ` +
    "less costs much." : axis === "samples_per_s" ? "" : "This front has no knee.";
  scatter(kind, shown, axis);
  history(kind, families, axis, group);
  space(kind, shown);
  parallel(kind, shown);
  heat(kind, shown, axis);
  curves(kind, shown);
  table("volumes", ["memory axis", group, "points", "share, %"], kind.volumes.map((row) => [row.axis === "state_bytes" ? "optimizer state" : "peak memory", row.family,
    row.points, row.share === null ? "n/a" : row.share.toFixed(1)]), [2, 3]);
  const ranked = [...shown].sort((a, b) => Number(a.dominated) - Number(b.dominated) || Number(a.quality === null) - Number(b.quality === null) || (kind.higher ? b.quality - a.quality : a.quality - b.quality));
  const holder = table("points", ["point", group, kind.quality, "sd", "seeds", "ranks", "state, %", "state, MiB", "peak, MiB", "samples/s", "chosen by (first seed)", "command that makes it again (first seed)"],
    ranked.map((p) => [p.short, p.family, number(p.quality), p.spread === null ? "" : number(p.spread, 2), p.seeds, p.ranks, number(p.state_share, 3), number(p.state_mib, 3), number(p.peak_mib), number(p.samples_per_s), p.basis, p.command]),
    [2, 3, 4, 5, 6, 7, 8, 9]);
  ranked.forEach((point, at) => { if (point.dominated) holder.rows[at + 1].className = "dominated"; });
}

function choose() {
  const whole = data.kinds[byId("kind").value];
  const kind = view(whole);
  byId("compare").hidden = !whole.study;
  byId("families_note").hidden = kind !== whole;
  byId("studies_note").hidden = kind === whole;
  byId("families").replaceChildren(...[...new Set(kind.points.map((point) => point.family))].map((family) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), {type: "checkbox", value: family, checked: true});
    box.addEventListener("change", draw);
    label.append(box, " ", family);
    label.style.color = colour(family);
    return label;
  }));
  draw();
}

data.kinds.forEach((kind, at) => byId("kind").add(new Option(kind.name, at)));
byId("kind").addEventListener("change", choose);
byId("by").addEventListener("change", choose);
byId("axis").addEventListener("change", draw);
byId("every").addEventListener("change", draw);
if (data.failed.length) {
  const title = document.createElement("h2");
  title.textContent = "Runs without a good end";
  const holder = Object.assign(document.createElement("table"), {id: "failures"});
  byId("failed").append(title, holder);
  table("failures", ["run", "settings", "exit code", "message"], data.failed.map((job) => [job.run, job.label, job.code === null ? "" : job.code, job.message]), [2]);
}
if (data.race) {
  byId("race").hidden = false;
  byId("race_lines").replaceChildren(...data.race.lines.map((text) => Object.assign(document.createElement("p"), {textContent: text})));
  table("race_table", data.race.head, data.race.rows, data.race.head.map((_, at) => at).slice(1, -1));
}
if (data.kinds.length) choose();
else {
  byId("nothing").textContent = "No run has finished yet, so there is nothing to compare.";
  document.querySelector("main").hidden = true;
}
document.body.dataset.ready = "yes";
